"""The six grouped products of an experts layer alone: torch's kernel, quack's at fixed configurations, a loop over mm.

    python benchmarks/products.py --compile 14 --json products.json

The loop is given the sizes on the host, so it is no backend but a measure of what dense products reach on these
shapes. `gathered` reads tokens through indices instead of rows that another kernel has gathered before; only quack
can. Medians of CUDA events, all candidates of a product in turn. Each result is compared with torch's first.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_moe_backends.bench.layer import GEOMETRIES, _route, environment
from hf_moe_backends.kernels.routing import sort_by_expert

CASES = (
    ("qwen3-30b-a3b", 4096, "uniform"),
    ("qwen3-30b-a3b", 16384, "uniform"),
    ("gpt-oss-20b", 4096, "uniform"),
    ("gpt-oss-20b", 16384, "zipf"),
    ("nemotron-3-nano", 16384, "uniform"),
    ("mixtral-8x7b", 4096, "uniform"),
)
TILES = (  # rows, columns, whether two groups of warps take turns on tiles or share one
    (256, 128, False),
    (256, 192, False),
    (256, 160, False),
    (128, 256, False),
    (128, 224, False),
    (128, 192, True),
    (128, 160, True),
    (128, 128, True),
    (192, 128, True),
)
CLUSTERS = ((2, 1), (1, 2), (1, 1))
DEVICE = "cuda"


def configs(gathers: bool) -> list[tuple[Any, bool]]:
    from quack.gemm_config import GemmConfig

    made = []
    for (rows, columns, pingpong), (m, n), dynamic in itertools.product(TILES, CLUSTERS, (False, True)):
        if gathers and (n != 1 or dynamic):
            continue
        if dynamic and (m, n) != (2, 1):
            continue
        made.append(
            (
                GemmConfig(
                    tile_m=rows,
                    tile_n=columns,
                    pingpong=pingpong,
                    cluster_m=m,
                    cluster_n=n,
                    is_dynamic_persistent=dynamic,
                    device_capacity=9,
                ),
                dynamic,
            )
        )
    return made


def label(config: Any, dynamic: bool) -> str:
    way = "pingpong" if config.pingpong else "coop"
    return f"{config.tile_m}x{config.tile_n} {way} c{config.cluster_m}{config.cluster_n}{' dynamic' if dynamic else ''}"


def quack_call(config: Any, dynamic: bool, a: Tensor, b: Tensor, out: Tensor, **lengths: Any) -> Callable[[], Any]:
    from quack.gemm_interface import gemm_tuned

    return lambda: gemm_tuned.fn(a, b, out, config=config, dynamic_scheduler=dynamic, **lengths)


def products(geometry: Any, ids: Tensor) -> list[dict[str, Any]]:
    """Each product: operands for torch and quack, with the operand that may be gathered."""
    tokens, hidden, inter, experts = ids.shape[0], geometry.hidden, geometry.intermediate, geometry.count
    wide = inter * (2 if geometry.gated else 1)
    routing = sort_by_expert(ids, experts)
    order = (routing.order // ids.shape[1]).int()
    size = order.numel()

    def make(*shape: int) -> Tensor:
        return torch.randn(*shape, device=DEVICE, dtype=torch.bfloat16) * 0.05

    transposed = geometry.module == "gpt_oss"  # stored (in, out)
    up = make(experts, hidden, wide) if transposed else make(experts, wide, hidden).transpose(1, 2)
    down = make(experts, inter, hidden) if transposed else make(experts, hidden, inter).transpose(1, 2)
    x, grad, act, pre = make(tokens, hidden), make(tokens, hidden), make(size, inter), make(size, wide)
    x_rows, grad_rows = x[order.long()], grad[order.long()]
    common = {"offsets": routing.offsets, "order": order}
    left, right = (x_rows, pre) if transposed else (pre, x_rows)
    down_left, down_right = (act, grad_rows) if transposed else (grad_rows, act)
    return [
        {"name": "up", "a": x_rows, "tokens": x, "b": up, "outer": False, **common},
        {"name": "down", "a": act, "b": down, "outer": False, **common},
        {"name": "d activation", "a": grad_rows, "tokens": grad, "b": down.transpose(1, 2), "outer": False, **common},
        {"name": "d rows", "a": pre, "b": up.transpose(1, 2), "outer": False, **common},
        {"name": "d up", "a": left.t(), "b": right, "outer": True, "tokens": x.t() if transposed else None, **common},
        {"name": "d down", "a": down_left.t(), "b": down_right, "outer": True,
         "tokens": None if transposed else grad.t(), **common},
    ]  # fmt: skip


def candidates(product: dict[str, Any], sizes: list[int]) -> dict[str, tuple[Callable[[], Any], Tensor]]:
    a, b, offsets, order = product["a"], product["b"], product["offsets"], product["order"]
    starts = F.pad(offsets, (1, 0)).int()
    ends = list(itertools.accumulate(sizes))
    kind = "cu_seqlens_k" if product["outer"] else "cu_seqlens_m"
    shape = (len(sizes), a.shape[0], b.shape[1]) if product["outer"] else (a.shape[0], b.shape[2])

    def new() -> Tensor:
        return torch.empty(shape, device=DEVICE, dtype=torch.bfloat16)

    found: dict[str, tuple[Callable[[], Any], Tensor]] = {}
    out = new()
    found["torch"] = (lambda: F.grouped_mm(a, b, offs=offsets), out)

    def loop(out: Tensor) -> None:
        for expert, (size, end) in enumerate(zip(sizes, ends, strict=True)):
            here = slice(end - size, end)
            if product["outer"]:
                torch.mm(a[:, here], b[here], out=out[expert])
            elif size:
                torch.mm(a[here], b[expert], out=out[here])

    looped = new()
    found["loop of mm"] = (lambda: loop(looped), looped)
    for config, dynamic in configs(False):
        out = new()
        found[label(config, dynamic)] = (quack_call(config, dynamic, a, b, out, **{kind: starts}), out)
    if product.get("tokens") is not None:
        for config, dynamic in configs(True):
            out = new()
            call = quack_call(config, dynamic, product["tokens"], b, out, A_idx=order, **{kind: starts})
            found["gathered " + label(config, dynamic)] = (call, out)
    return found


def measure(product: dict[str, Any], sizes: list[int], repetitions: int) -> list[dict[str, Any]]:
    calls = candidates(product, sizes)
    expected = calls["torch"][0]().float()
    norm = expected.norm()
    rows = {}
    for name, (call, out) in list(calls.items()):
        row: dict[str, Any] = {"product": product["name"], "candidate": name}
        try:
            result = call()
            result = result if name == "torch" else out
            row["difference"] = ((result.float() - expected).norm() / norm).item()
            call()
            torch.cuda.synchronize()
        except Exception as error:  # a configuration that a shape does not allow
            row["error"] = f"{type(error).__name__}: {error}"[:200]
            del calls[name]
        rows[name] = row
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repetitions):
        for name, (call, _) in calls.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            call()  # the clocks and caches of a call of the same kind
            start.record()
            call()
            call()
            end.record()
            end.synchronize()
            times[name].append(start.elapsed_time(end) / 2)
    for name, measured in times.items():
        rows[name]["ms"] = median(measured)
    return list(rows.values())


def compile_some(part: int, parts: int) -> None:
    """Fill quack's cache on disk: a kernel depends on layouts and configuration, not on sizes."""
    torch.manual_seed(0)
    todo = 0
    for name in ("qwen3-30b-a3b", "gpt-oss-20b"):
        geometry = GEOMETRIES[name]
        ids, _ = _route(geometry, 256, "uniform", DEVICE)
        for product in products(geometry, ids):
            for candidate, (call, _) in candidates(product, [0] * geometry.count).items():
                if candidate in ("torch", "loop of mm"):
                    continue
                todo += 1
                if todo % parts == part:
                    try:
                        call()
                    except Exception as error:
                        print(part, candidate, product["name"], str(error)[:150], file=sys.stderr)
    torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compile", type=int, default=0, metavar="N", help="compile in N processes first")
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--limit", type=float, default=300, help="seconds after which no further case begins")
    options = parser.parse_args()
    began = time.monotonic()
    if options.compile:
        context = multiprocessing.get_context("spawn")
        workers = [context.Process(target=compile_some, args=(i, options.compile)) for i in range(options.compile)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join(200)
            worker.kill()
        print(f"compiled in {time.monotonic() - began:.0f} s", flush=True)
    rows: list[dict[str, Any]] = []
    for name, tokens, routing in CASES:
        if time.monotonic() - began > options.limit:
            print("not measured:", name, tokens, routing)
            continue
        geometry = GEOMETRIES[name]
        ids, _ = _route(geometry, tokens, routing, DEVICE)
        sizes = torch.bincount(ids.flatten(), minlength=geometry.count).tolist()
        flops = 2 * ids.numel() * geometry.hidden * geometry.intermediate
        total: dict[str, float] = {}
        for product in products(geometry, ids):
            here = measure(product, sizes, options.repetitions)
            wide = 2 if geometry.gated and product["name"] in ("up", "d rows", "d up") else 1
            for row in here:
                row |= {"geometry": name, "tokens": tokens, "routing": routing}
                if "ms" in row:
                    row["tflops"] = flops * wide / row["ms"] / 1e9
            rows += here
            good = sorted((r for r in here if "ms" in r and r["difference"] < 0.01), key=lambda r: r["ms"])
            of = {r["candidate"]: r["ms"] for r in good}
            plain = [r for r in good if r["candidate"][0].isdigit()]
            gathered = [r for r in good if r["candidate"].startswith("gathered")]
            line = f"{name:16} {tokens:6} {product['name']:13} torch {of['torch']:.3f} mm {of['loop of mm']:.3f}"
            for best in plain[:3] + gathered[:2]:
                line += f" | {best['candidate']} {best['ms']:.3f}"
            best_of = {"torch": of["torch"], "mm": of["loop of mm"], "quack": plain[0]["ms"] if plain else 0}
            for key, value in best_of.items():
                total[key] = total.get(key, 0) + value
            print(line, flush=True)
        print(f"{name:16} {tokens:6} total", {k: round(v, 3) for k, v in total.items()}, flush=True)
        if options.json:
            command = " ".join(["python", *sys.argv])
            options.json.write_text(json.dumps({"environment": environment(DEVICE), "command": command, "rows": rows}))
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
