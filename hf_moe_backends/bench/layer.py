"""One experts layer: time and memory of every backend side by side, after each has been found right.

All backends get the same weights, tokens, routing and output gradient. They are timed in turn, one repetition each,
so that whatever the device's clocks do is done to all. A repetition is a few calls in a row, as layers follow each
other in a model; a call that finds the device idle is measured apart, since it also waits for its first launches.
Times are medians of CUDA events (on the CPU, of the wall clock).
"""

from __future__ import annotations

import copy
import datetime
import gc
import importlib
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from hf_moe_backends._version import __version__
from hf_moe_backends.edits import register_function
from hf_moe_backends.errors import BackendUnavailable, ConfigError, nearest
from hf_moe_backends.registry import registry
from hf_moe_backends.spec import STOCK_NAMES

COMPILED = "+compile"
"""Behind a backend's name: the same under `torch.compile`."""

CALLS = 4
DECODING = 64
"""Up to this many tokens a call may be a step of generation, which engines replay as a CUDA graph: timed as well."""
MIB = 2**20


@dataclass(frozen=True, kw_only=True)
class Geometry:
    """The experts of a published model: its classes in Transformers, and hidden size, intermediate size, E and K."""

    module: str
    experts: str
    config: str
    hidden: int
    intermediate: int
    count: int
    top_k: int
    gated: bool = True

    def flops(self, tokens: int) -> int:
        """Of forward and backward: three products a projection, two operations a multiplication."""
        projections = 3 if self.gated else 2
        return 3 * 2 * tokens * self.top_k * projections * self.hidden * self.intermediate


GEOMETRIES = {
    "qwen3-30b-a3b": Geometry(
        module="qwen3_moe", experts="Qwen3MoeExperts", config="Qwen3MoeConfig",
        hidden=2048, intermediate=768, count=128, top_k=8,
    ),
    "gpt-oss-20b": Geometry(
        module="gpt_oss", experts="GptOssExperts", config="GptOssConfig",
        hidden=2880, intermediate=2880, count=32, top_k=4,
    ),
    "mixtral-8x7b": Geometry(
        module="mixtral", experts="MixtralExperts", config="MixtralConfig",
        hidden=4096, intermediate=14336, count=8, top_k=2,
    ),
    "olmoe": Geometry(
        module="olmoe", experts="OlmoeExperts", config="OlmoeConfig",
        hidden=2048, intermediate=1024, count=64, top_k=8,
    ),
    "nemotron-3-nano": Geometry(
        module="nemotron_h", experts="NemotronHExperts", config="NemotronHConfig",
        hidden=2688, intermediate=1856, count=128, top_k=6, gated=False,
    ),
    # one of eight ranks' experts, with every choice of its tokens among them
    "deepseek-v3-shard": Geometry(
        module="deepseek_v3", experts="DeepseekV3Experts", config="DeepseekV3Config",
        hidden=7168, intermediate=2048, count=32, top_k=8,
    ),
    "tiny": Geometry(
        module="qwen3_moe", experts="Qwen3MoeExperts", config="Qwen3MoeConfig",
        hidden=64, intermediate=32, count=8, top_k=2,
    ),
}  # fmt: skip

ROUTINGS = ("balanced", "uniform", "zipf")


HEADING = (
    f"{'geometry':18} {'tokens':>6} {'routing':9} {'backend':22} {'forward':>8} {'both':>8} {'alone':>8} {'kept':>7} "
    f"{'peak':>7} {'TFLOP/s':>7} {'of floor':>8} {'error':>6} {'replayed':>8}"
)


@dataclass(frozen=True, kw_only=True)
class Row:
    """One backend at one size. Times in milliseconds, memory in MiB; `error` instead of figures if it failed.

    `forward` and `both` (forward and backward) are of one call among others, `alone` is `both` on an idle device.
    `kept` is what forward leaves allocated for backward besides its output. `worst_error` is the largest, over output
    and gradients, of the error against float64 divided by stock eager's own. `replayed` is forward without gradients
    in a CUDA graph, so what the device alone takes: of at most `DECODING` tokens.
    """

    geometry: str
    tokens: int
    routing: str
    backend: str
    forward: float | None = None
    both: float | None = None
    alone: float | None = None
    kept: float | None = None
    peak: float | None = None
    tflops: float | None = None
    of_floor: float | None = None
    worst_error: float | None = None
    replayed: float | None = None
    error: str | None = None

    def line(self) -> str:
        """The row of a table: times in ms, memory in MiB, what is not known left blank."""
        about = f"{self.geometry:18} {self.tokens:6} {Path(self.routing).stem:9.9} {self.backend:22}"
        if self.error:
            return f"{about} {self.error}"
        forms = {
            **dict.fromkeys(("forward", "both", "alone"), "8.3f"),
            **dict.fromkeys(("kept", "peak", "tflops"), "7.0f"),
            "of_floor": "8.0%",
            "worst_error": "6.2f",
            "replayed": "8.4f",
        }
        values = [(getattr(self, name), form) for name, form in forms.items()]
        return " ".join([about, *(f"{v:{form}}" if v is not None else " " * int(form[0]) for v, form in values)])


def layers(
    geometries: Sequence[str],
    tokens: Sequence[int],
    routings: Sequence[str],
    backends: Sequence[str],
    *,
    device: str,
    dtype: torch.dtype = torch.bfloat16,
    repetitions: int = 20,
) -> Iterator[Row]:
    """Measure every combination, one row a backend, the product-only floor first.

    Args:
        routings: names of `ROUTINGS`, or paths of tensors (T, K) saved with `torch.save`, whose T must be `tokens`.
        backends: names of experts backends, each with or without `COMPILED` behind it.

    Raises:
        ConfigError: an unknown geometry, routing or backend.
        BackendUnavailable: a backend that cannot run on this machine.
    """
    for geometry in geometries:
        if geometry not in GEOMETRIES:
            raise ConfigError(f"geometry {geometry!r} is not known: {nearest(geometry, GEOMETRIES)}")
    for routing in routings:
        if routing not in ROUTINGS and not Path(routing).is_file():
            raise ConfigError(f"routing {routing!r} is neither a file nor one of {', '.join(ROUTINGS)}")
    for backend in backends:
        _register(backend.removesuffix(COMPILED))
    for name in geometries:
        experts = _build(GEOMETRIES[name], device, dtype)
        for size in tokens:
            for routing in routings:
                ids, weights = _route(GEOMETRIES[name], size, routing, device)
                yield from _measure(name, experts, size, routing, ids, weights.to(dtype), backends, repetitions)
        del experts
        _free(device)


def environment(device: str) -> dict[str, str]:
    """What the figures depend on besides the code."""
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "hf_moe_backends": __version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "device": torch.cuda.get_device_name() if device == "cuda" else platform.processor() or platform.machine(),
    }


def as_json(rows: Sequence[Row], device: str, command: str) -> dict[str, Any]:
    """The run as plain data: `environment`, the command, and every row."""
    return {"environment": environment(device), "command": command, "rows": [asdict(row) for row in rows]}


def plot(rows: Sequence[Row], path: Path) -> None:
    """Time and kept memory over tokens, one panel a geometry and routing. Needs matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    panels = list(dict.fromkeys((row.geometry, row.routing) for row in rows))
    figure, axes = pyplot.subplots(2, len(panels), figsize=(4.5 * len(panels), 7), squeeze=False, sharex="col")
    fields = (("both", "forward + backward, ms"), ("kept", "kept, MiB"))
    for column, (geometry, routing) in enumerate(panels):
        for axis, (field, label) in zip(axes[:, column], fields, strict=True):
            here = [row for row in rows if (row.geometry, row.routing) == (geometry, routing) and getattr(row, field)]
            for backend in dict.fromkeys(row.backend for row in here):
                points = [(row.tokens, getattr(row, field)) for row in here if row.backend == backend]
                axis.plot(*zip(*points, strict=True), marker="o", markersize=3, label=backend)
            axis.set(xscale="log", yscale="log", ylabel=label)
            axis.grid(alpha=0.3)
        axes[0][column].set_title(f"{geometry}, {Path(routing).stem} routing", fontsize=10)
        axes[1][column].set_xlabel("tokens")
    axes[0][0].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def _register(name: str) -> None:
    backend = registry().get("experts", name)
    reason = backend.unavailable(probe=True)
    if reason:
        raise BackendUnavailable(f"experts={name!r} cannot run on this machine: {reason}")
    if name not in STOCK_NAMES["experts"]:
        register_function(name, backend.spec.target, (type(ALL_EXPERTS_FUNCTIONS), backend.spec.load()))


def _build(geometry: Geometry, device: str, dtype: torch.dtype) -> nn.Module:
    config = getattr(transformers, geometry.config)()
    values = {
        "hidden_size": geometry.hidden,
        **dict.fromkeys(("moe_intermediate_size", "intermediate_size"), geometry.intermediate),
        **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), geometry.count),
    }
    for name, value in values.items():
        if hasattr(config, name):
            setattr(config, name, value)
    modeling = importlib.import_module(f"transformers.models.{geometry.module}.modeling_{geometry.module}")
    # the class has had two names
    kind = getattr(modeling, geometry.experts, None) or getattr(
        modeling, geometry.experts.replace("Experts", "NaiveMoe")
    )
    with torch.device("meta"):
        experts: nn.Module = kind(config)
    experts = experts.to(dtype).to_empty(device=device)
    generator = torch.Generator(device).manual_seed(0)
    with torch.no_grad():
        for parameter in experts.parameters():
            parameter.normal_(0, 0.02, generator=generator)
    found = experts.get_parameter("down_proj").shape[0]
    if found != geometry.count:
        raise RuntimeError(f"{kind.__name__} has {found} experts instead of {geometry.count}")
    return experts


def _route(geometry: Geometry, tokens: int, routing: str, device: str) -> tuple[Tensor, Tensor]:
    """Ids (T, K) and weights (T, K) that sum to one."""
    generator = torch.Generator(device).manual_seed(1)
    shape = (tokens, geometry.count)
    if routing == "balanced":
        ids = (torch.arange(tokens * geometry.top_k, device=device) % geometry.count).view(tokens, geometry.top_k)
    elif routing in ROUTINGS:
        scores = torch.zeros(shape, device=device)
        if routing == "zipf":
            scores -= torch.arange(1, geometry.count + 1, device=device).log()
        # the largest of scores plus Gumbel noise are a draw without replacement
        noise = torch.rand(shape, device=device, generator=generator).clamp_min(1e-9)
        ids = (scores - (-noise.log()).log()).topk(geometry.top_k).indices
    else:
        ids = torch.load(routing, map_location=device, weights_only=True)
        if ids.shape != (tokens, geometry.top_k):
            raise ConfigError(f"{routing} holds ids of shape {tuple(ids.shape)}, not {(tokens, geometry.top_k)}")
    weights = torch.rand(ids.shape, device=device, generator=generator) + 0.1
    return ids, weights / weights.sum(1, keepdim=True)


class _Problem:
    """Tokens, routing and output gradient, and what a call of the layer gives on them."""

    def __init__(self, experts: nn.Module, tokens: int, hidden: int, ids: Tensor, weights: Tensor):
        self.experts, self.ids = experts, ids[:tokens]
        generator = torch.Generator(ids.device).manual_seed(2)
        dtype = next(experts.parameters()).dtype
        make = partial(torch.randn, (tokens, hidden), device=ids.device, dtype=dtype, generator=generator)
        self.x, self.grad = make().requires_grad_(), make()
        self.weights = weights[:tokens].clone().requires_grad_()

    def forward(self, call: Callable[..., Tensor]) -> Tensor:
        return call(self.x, self.ids, self.weights)

    def both(self, call: Callable[..., Tensor]) -> Tensor:
        for tensor in (self.x, self.weights, *self.experts.parameters()):
            tensor.grad = None
        out = self.forward(call)
        torch.autograd.backward(out, self.grad)
        return out.detach()

    def results(self, call: Callable[..., Tensor]) -> list[Tensor]:
        """Output and gradients."""
        out = self.both(call)
        grads = [t.grad for t in (self.x, self.weights, *self.experts.parameters())]
        return [out, *(g for g in grads if g is not None)]


def _measure(
    name: str,
    experts: nn.Module,
    tokens: int,
    routing: str,
    ids: Tensor,
    weights: Tensor,
    backends: Sequence[str],
    repetitions: int,
) -> Iterator[Row]:
    geometry, device = GEOMETRIES[name], ids.device.type
    hidden = geometry.hidden
    about: dict[str, Any] = {"geometry": name, "tokens": tokens, "routing": routing}
    floor = _floor(geometry, experts, ids, repetitions)
    flops = geometry.flops(tokens)
    if floor is not None:
        tflops = flops / floor[1] / 1e9
        yield Row(**about, backend="products only", forward=floor[0], both=floor[1], tflops=tflops, of_floor=1.0)

    problem = _Problem(experts, tokens, hidden, ids, weights)
    calls = {backend: _call(experts, backend) for backend in backends}
    errors = _errors(experts, calls, min(tokens, 1024), hidden, ids, weights)
    times: dict[str, list[tuple[float, float, float]]] = {backend: [] for backend in calls}
    failed = {backend: error for backend, error in errors.items() if isinstance(error, str)}
    replayed = _replayed(problem, {b: c for b, c in calls.items() if b not in failed}, tokens, repetitions)
    for repetition in range(-3, repetitions):
        for backend, call in calls.items():
            if backend in failed:
                continue
            try:
                forward = _time(partial(problem.forward, call), device, calls=CALLS)
                both = _time(partial(problem.both, call), device, calls=CALLS)
                alone = _time(partial(problem.both, call), device)
            except Exception as exception:
                failed[backend] = _first_line(exception)
                continue
            if repetition >= 0:
                times[backend].append((forward, both, alone))
    for backend, call in calls.items():
        if backend in failed:
            yield Row(**about, backend=backend, error=failed[backend])
            continue
        forward, both, alone = map(median, zip(*times[backend], strict=True))
        kept, peak = _memory(problem, call, device)
        error = errors[backend]
        yield Row(
            **about,
            backend=backend,
            forward=forward,
            both=both,
            alone=alone,
            kept=kept,
            peak=peak,
            tflops=flops / both / 1e9,
            of_floor=floor[1] / both if floor is not None else None,
            worst_error=error if isinstance(error, float) else None,
            replayed=replayed.get(backend),
        )


def _call(experts: Any, backend: str) -> Callable[..., Tensor]:
    """The layer on one backend. The config is read at each call, so it is set at each call."""
    name = backend.removesuffix(COMPILED)
    if backend != name:
        torch._dynamo.reset()
        experts.config._experts_implementation = name
        forward: Callable[..., Tensor] = torch.compile(experts.forward, fullgraph=True)
    else:
        forward = experts

    def call(x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        experts.config._experts_implementation = name
        return forward(x, ids, weights)

    return call


def _errors(
    experts: nn.Module,
    calls: dict[str, Callable[..., Tensor]],
    tokens: int,
    hidden: int,
    ids: Tensor,
    weights: Tensor,
) -> dict[str, float | str]:
    """Each backend's worst error against the loop in float64, in stock eager's own; a text instead if it is wrong."""
    exact = _Problem(copy.deepcopy(experts).double(), tokens, hidden, ids, weights.double())
    rounded = _Problem(experts, tokens, hidden, ids, weights)
    with torch.no_grad():
        exact.x.copy_(rounded.x)
        exact.grad.copy_(rounded.grad)
    _register("loop")
    expected = exact.results(_call(exact.experts, "loop"))

    def relative(call: Callable[..., Tensor]) -> list[float]:
        got = rounded.results(call)
        return [float((g.double() - e).norm() / e.norm().clamp_min(1e-30)) for g, e in zip(got, expected, strict=True)]

    own = relative(_call(experts, "eager"))
    found: dict[str, float | str] = {}
    for backend, call in calls.items():
        try:
            worst = max(error / max(e, 1e-12) for error, e in zip(relative(call), own, strict=True))
        except Exception as exception:
            found[backend] = _first_line(exception)
            continue
        # NaN is not at most three either. Stock code is what is measured against, whatever its error: it is shown.
        wrong = not worst <= 3 and backend.removesuffix(COMPILED) not in STOCK_NAMES["experts"]
        found[backend] = f"wrong: its error is {worst:.3g} times stock eager's" if wrong else worst
    return found


def _floor(geometry: Geometry, experts: nn.Module, ids: Tensor, repetitions: int) -> tuple[float, float] | None:
    """Forward and all of the layer's grouped products alone, on operands that are there; None off CUDA."""
    if ids.device.type != "cuda":
        return None
    rows, hidden, width = ids.numel(), geometry.hidden, geometry.intermediate
    columns = 2 * width if geometry.gated else width
    offsets = torch.bincount(ids.flatten(), minlength=geometry.count).cumsum(0).to(torch.int32)
    make: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
    x, pre, act = (torch.randn(rows, size, **make) for size in (hidden, columns, width))
    up = torch.randn(geometry.count, columns, hidden, **make) * 0.02
    down = torch.randn(geometry.count, hidden, width, **make) * 0.02

    def forward() -> None:
        F.grouped_mm(x, up.transpose(1, 2), offs=offsets)
        F.grouped_mm(act, down.transpose(1, 2), offs=offsets)

    def both() -> None:
        forward()
        F.grouped_mm(x, down, offs=offsets)
        F.grouped_mm(pre, up, offs=offsets)
        F.grouped_mm(x.t(), act, offs=offsets)
        F.grouped_mm(pre.t(), x, offs=offsets)

    times = []
    for function in (forward, both):
        for _ in range(3):
            function()
        times.append(median(_time(function, "cuda", calls=CALLS) for _ in range(repetitions)))
    return times[0], times[1]


def _replayed(
    problem: _Problem, calls: dict[str, Callable[..., Tensor]], tokens: int, repetitions: int
) -> dict[str, float]:
    """Milliseconds of each backend's forward as a CUDA graph, in turn; without those that cannot be captured."""
    if not problem.x.is_cuda or tokens > DECODING:
        return {}
    graphs: dict[str, torch.cuda.CUDAGraph] = {}
    with torch.no_grad():
        for backend, call in calls.items():
            for _ in range(3):
                problem.forward(call)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            try:
                with torch.cuda.graph(graph):
                    for _ in range(CALLS):
                        problem.forward(call)
            except (RuntimeError, torch.AcceleratorError):
                continue  # it asks the device something: generation cannot replay it either
            graphs[backend] = graph
    times: dict[str, list[float]] = {backend: [] for backend in graphs}
    for _ in range(3 * repetitions):
        for backend, graph in graphs.items():
            times[backend].append(_time(graph.replay, "cuda") / CALLS)
    return {backend: median(found) for backend, found in times.items()}


def _time(function: Callable[[], object], device: str, calls: int = 1) -> float:
    """Milliseconds of one of some calls in a row."""
    if device != "cuda":
        start = time.perf_counter()
        for _ in range(calls):
            function()
        return 1e3 * (time.perf_counter() - start) / calls
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    begin.record()
    for _ in range(calls):
        function()
    end.record()
    end.synchronize()
    elapsed: float = begin.elapsed_time(end)
    return elapsed / calls


def _memory(problem: _Problem, call: Callable[..., Tensor], device: str) -> tuple[float | None, float | None]:
    """MiB that forward keeps besides its output, and the peak of forward and backward above what was there."""
    for tensor in (problem.x, problem.weights, *problem.experts.parameters()):
        tensor.grad = None
    if device != "cuda":
        return _kept_by_hooks(problem, call), None
    _free(device)
    before = torch.cuda.memory_allocated()
    out = problem.forward(call)
    kept = torch.cuda.memory_allocated() - before - out.numel() * out.element_size()
    del out
    torch.cuda.reset_peak_memory_stats()
    problem.both(call)
    return kept / MIB, (torch.cuda.max_memory_allocated() - before) / MIB


def _kept_by_hooks(problem: _Problem, call: Callable[..., Tensor]) -> float:
    """MiB that autograd holds for backward, the layer's own weights and input apart."""
    own = {t.untyped_storage().data_ptr() for t in (problem.x, problem.weights, problem.ids)}
    own |= {p.untyped_storage().data_ptr() for p in problem.experts.parameters()}
    held: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            held[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = problem.forward(call)
    del out
    return sum(held.values()) / MIB


def _first_line(exception: Exception) -> str:
    return f"{type(exception).__name__}: {exception}".splitlines()[0]


def _free(device: str) -> None:
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
