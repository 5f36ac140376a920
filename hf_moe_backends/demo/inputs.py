"""What every side of the demonstration shares: the initial checkpoint and the batches, written to files once."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import torch

from hf_moe_backends.errors import ConfigError

BYTES = 256
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "spiece.model")


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """The text: where it is from, how it was cut into tokens, how many there are, and how often it is read through."""

    source: str
    tokens: str
    count: int
    passes: float


def save_model(path: Path, *, seed: int) -> Path:
    """A new Qwen3-MoE of 27 million parameters: 8 layers, 32 experts, 4 a token, one token a byte.

    Small enough that all three sides train for 40 steps in under three minutes on two CPU cores. Its weights are drawn
    at hidden_size ** -0.5: at Transformers' 0.02, which is for models of thousands, experts as narrow as these add so
    little that an error of 1% in their output stays below the demonstration's limit.
    """
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        vocab_size=BYTES,
        hidden_size=256,
        intermediate_size=512,
        moe_intermediate_size=128,
        num_hidden_layers=8,
        num_experts=32,
        num_experts_per_tok=4,
        norm_topk_prob=True,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        initializer_range=256**-0.5,
        max_position_embeddings=4096,
        # its vocabulary is bytes, so that Qwen3's own special tokens are not in it
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    torch.manual_seed(seed)
    Qwen3MoeForCausalLM(config).save_pretrained(path)
    return path


def save_batches(
    path: Path, *, text: Path | None, model: str | None, vocabulary: int, shape: tuple[int, int, int], seed: int
) -> Corpus:
    """Write token ids of `shape` (steps, batch, sequence), int64, to `path`.

    The text is cut into sequences that do not overlap, shuffled by `seed`; a text that is used up is read again in
    another order.

    Args:
        model: take the tokenizer from there. None, or a checkpoint without one: a token a byte.

    Raises:
        ConfigError: the text cannot be read, is shorter than one sequence, or does not fit the vocabulary.
    """
    steps, batch, sequence = shape
    source, tokens, ids = _tokenise(text, model)
    if int(ids.max()) >= vocabulary:
        raise ConfigError(
            f"the model's vocabulary has {vocabulary} tokens and the text has id {int(ids.max())} "
            f"({tokens}). A checkpoint with its own tokenizer takes any text; bytes need a vocabulary of {BYTES}"
        )
    if len(ids) < sequence:
        raise ConfigError(
            f"{source} has {len(ids)} tokens, fewer than one sequence of {sequence}: --sequence {len(ids)} or less"
        )
    windows = ids[: len(ids) // sequence * sequence].view(-1, sequence)
    generator = torch.Generator().manual_seed(seed)
    needed = steps * batch
    passes = math.ceil(needed / len(windows))
    order = torch.cat([torch.randperm(len(windows), generator=generator) for _ in range(passes)])
    torch.save(windows[order[:needed]].view(steps, batch, sequence), path)
    return Corpus(source=source, tokens=tokens, count=len(ids), passes=needed / len(windows))


def _tokenise(text: Path | None, model: str | None) -> tuple[str, str, torch.Tensor]:
    """The text's source, how it was cut, and its token ids (N,) int64."""
    if text is None:
        from pydoc_data.topics import topics

        source, content = (
            "Python's documentation (pydoc_data.topics)",
            "\n\n".join(topics[key] for key in sorted(topics)),
        )
        data = content.encode()
    else:
        source = str(text)
        try:
            data = text.read_bytes()
        except OSError as error:
            raise ConfigError(f"--text {text}: {error.strerror}") from None
        if not data:
            raise ConfigError(f"--text {text} is empty")
    if model is not None and _has_tokenizer(model):
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(model)
        # the whole text is cut into sequences afterwards, so that its length says nothing about the model's
        ids = tokenizer(data.decode(errors="replace"), add_special_tokens=False, verbose=False)["input_ids"]
        return source, "the model's own tokenizer", torch.tensor(ids)
    return source, "a token a byte", torch.frombuffer(bytearray(data), dtype=torch.uint8).long()


def _has_tokenizer(model: str) -> bool:
    """A model on the Hub has one; a folder need not."""
    folder = Path(model)
    return not folder.is_dir() or any((folder / name).is_file() for name in _TOKENIZER_FILES)
