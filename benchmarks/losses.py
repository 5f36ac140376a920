"""Output head and loss, forward and backward: stock, `loss="chunked"` at several chunks, Liger, Cut Cross Entropy.

    python benchmarks/losses.py --json losses.json

Every side is given the same bfloat16 hidden states (T, H) that learn, weight (V, H) that learns, and labels, and ends
with both gradients. Medians of CUDA events, all sides in turn; memory is the peak over what there was before. Each
side's loss and gradients are compared with stock's in float32 first (relative, in the Frobenius norm).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.loss.loss_utils import ForCausalLMLoss

from hf_moe_backends.bench.layer import environment
from hf_moe_backends.builtin.loss.chunked import linear_cross_entropy

HEADS = {  # hidden size, vocabulary
    "qwen3-30b-a3b": (2048, 151936),
    "gpt-oss-20b": (2880, 201088),
    "nemotron-3-nano": (2688, 131072),
}
CHUNKS = (512, 1024, 2048, 4096)
Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


def stock(x: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    logits = F.linear(x, weight)
    loss: Tensor = ForCausalLMLoss(logits[None], None, weight.shape[0], shift_labels=labels[None])
    return loss


def chunked(x: Tensor, weight: Tensor, labels: Tensor, *, chunk: int) -> Tensor:
    how: dict[str, Any] = {"bias": None, "ignore_index": -100, "num_items": None, "scale": 1.0, "softcap": None}
    return linear_cross_entropy(x, weight, labels, chunk=chunk, **how)


def liger(x: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

    loss: Tensor = liger_fused_linear_cross_entropy(x, weight, labels)
    return loss


def cce(x: Tensor, weight: Tensor, labels: Tensor, *, filter_eps: str | None) -> Tensor:
    from cut_cross_entropy import linear_cross_entropy as cut

    loss: Tensor = cut(x, weight, labels, filter_eps=filter_eps)
    return loss


def sides(chunks: tuple[int, ...]) -> dict[str, Loss]:
    return {
        "stock": stock,
        "stock compiled": torch.compile(stock),
        **{f"chunked {chunk}": partial(chunked, chunk=chunk) for chunk in chunks},
        "liger": liger,
        "cce exact": partial(cce, filter_eps=None),
        "cce": partial(cce, filter_eps="high"),
    }


def step(loss: Loss, x: nn.Parameter, weight: nn.Parameter, labels: Tensor) -> Tensor:
    x.grad = weight.grad = None
    value = loss(x, weight, labels)
    value.backward()
    return value.detach()


def measure(x: nn.Parameter, weight: nn.Parameter, labels: Tensor, repetitions: int) -> list[dict[str, Any]]:
    calls = sides(CHUNKS)
    wide = [nn.Parameter(t.detach().float()) for t in (x, weight)]
    expected = [step(stock, *wide, labels), *(t.grad for t in wide)]
    del wide
    rows: dict[str, dict[str, Any]] = {}
    for name, call in list(calls.items()):
        rows[name] = row = {"side": name}
        try:
            step(call, x, weight, labels)
            torch.cuda.synchronize()
            x.grad = weight.grad = None
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            found = [step(call, x, weight, labels), x.grad, weight.grad]
            row["peak_mib"] = (torch.cuda.max_memory_allocated() - before) / 2**20
            for what, ours, right in zip(("loss", "dx", "dw"), found, expected, strict=True):
                assert ours is not None and right is not None
                row[f"error_{what}"] = ((ours.float() - right).norm() / right.norm()).item()
        except Exception as error:
            row["error"] = f"{type(error).__name__}: {error}"[:300]
            del calls[name]
        torch.cuda.empty_cache()
    del expected
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repetitions):
        for name, call in calls.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            step(call, x, weight, labels)
            start.record()
            step(call, x, weight, labels)
            step(call, x, weight, labels)
            end.record()
            end.synchronize()
            times[name].append(start.elapsed_time(end) / 2)
    for name, measured in times.items():
        rows[name]["ms"] = median(measured)
    return list(rows.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--head", action="append", choices=HEADS)
    parser.add_argument("--tokens", action="append", type=int)
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for name in options.head or HEADS:
        hidden, vocabulary = HEADS[name]
        for tokens in options.tokens or (4096, 16384):
            torch.manual_seed(0)
            x = nn.Parameter(torch.randn(tokens, hidden, device="cuda").bfloat16())
            weight = nn.Parameter((torch.randn(vocabulary, hidden, device="cuda") * hidden**-0.5).bfloat16())
            labels = torch.randint(vocabulary, (tokens,), device="cuda")
            labels[torch.rand(tokens, device="cuda") < 0.1] = -100
            here = measure(x, weight, labels, options.repetitions)
            for row in here:
                row |= {"head": name, "tokens": tokens, "hidden": hidden, "vocabulary": vocabulary}
                print(
                    f"{name:16} {tokens:6} {row['side']:15}",
                    row.get("error")
                    or f"{row['ms']:8.3f} ms {row['peak_mib']:9.0f} MiB  error of loss {row['error_loss']:.1e}, "
                    f"dx {row['error_dx']:.1e}, dw {row['error_dw']:.1e}",
                    flush=True,
                )
            rows += here
            if options.json:
                command = " ".join(["python", *sys.argv])
                options.json.write_text(
                    json.dumps({"environment": environment("cuda"), "command": command, "rows": rows})
                )


if __name__ == "__main__":
    main()
