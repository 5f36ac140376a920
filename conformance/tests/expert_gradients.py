"""How large stock's expert gradients are with ep == fsdp, as a part of what one process computes.

A script of its own, run on the Transformers that comes first on the path: in 5.20 to 5.22, where this is wrong,
every dispatcher is refused on such a mesh, so that the suite's dispatcher checks do not run there.
"""

from __future__ import annotations

import json
import tempfile
from typing import Any

import torch
import transformers
from hf_moe_conformance.ranks import World

RANKS = 2


def config() -> Any:
    return transformers.Qwen3MoeConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=32,
        moe_intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_experts=8,
        num_experts_per_tok=2,
    )


def batch(rank: int) -> torch.Tensor:
    return torch.randint(0, 64, (2, 24), generator=torch.Generator().manual_seed(rank))


def expert_gradients(model: Any) -> dict[str, torch.Tensor]:
    found = {}
    for name, parameter in model.named_parameters():
        if ".experts." in name:
            gradient = parameter.grad
            found[name] = gradient.to_local() if hasattr(gradient, "to_local") else gradient
    return found


def on_rank(path: str, rank: int) -> dict[str, torch.Tensor]:
    from transformers.distributed import DistributedConfig

    model = transformers.Qwen3MoeForCausalLM.from_pretrained(
        path,
        distributed_config=DistributedConfig(fsdp_size=RANKS, ep_size=RANKS),
        experts_implementation="grouped_mm",
        dtype=torch.float32,
    ).train()
    ids = batch(rank)
    model(input_ids=ids, labels=ids).loss.backward()
    return expert_gradients(model)


def main() -> None:
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.manual_seed(0)
    alone = transformers.Qwen3MoeForCausalLM(config()).train()
    with tempfile.TemporaryDirectory() as path:
        alone.save_pretrained(path)
        world = World("cpu", RANKS)
        ranks = world.run(on_rank, [(path, rank) for rank in range(RANKS)])
        world.close()
    # gradients are averaged over the ranks' batches
    for rank in range(RANKS):
        (alone(input_ids=batch(rank), labels=batch(rank)).loss / RANKS).backward()
    ratios = {}
    for name, expected in expert_gradients(alone).items():
        got = torch.cat([found[name] for found in ranks])  # each rank has a block of the experts
        ratios[name] = ((got * expected).sum() / expected.square().sum()).item()
    print(json.dumps({"transformers": transformers.__version__, "ratios": ratios}))


if __name__ == "__main__":
    main()
