"""What only a GPU can show of `torch_mm`. Run there with `pytest -m gpu tests/test_gpu.py`."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hf_moe_backends.bench import layer
from hf_moe_backends.builtin.experts.torch_mm import torch_mm

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

SMALL: dict[str, dict[str, Any]] = {
    "qwen3-30b-a3b": {"hidden": 256, "intermediate": 192, "count": 16, "top_k": 4},
    "gpt-oss-20b": {"hidden": 320, "intermediate": 192, "count": 8, "top_k": 3},
    "nemotron-3-nano": {"hidden": 256, "intermediate": 200, "count": 16, "top_k": 2},
}


@pytest.fixture(params=SMALL)
def experts(request: pytest.FixtureRequest) -> nn.Module:
    return build(request.param)


def build(name: str, dtype: torch.dtype = torch.bfloat16) -> Any:
    import dataclasses

    built = layer._build(dataclasses.replace(layer.GEOMETRIES[name], **SMALL[name]), "cuda", dtype)
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in built.parameters():
            parameter.normal_(0, 0.2)
    return built


def inputs(experts: Any, tokens: int = 300) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Tokens, ids with duplicates and pairs of other ranks, router weights, and an output gradient."""
    torch.manual_seed(1)
    hidden = experts.down_proj.shape[2 if experts.is_transposed else 1]
    count, dtype = experts.down_proj.shape[0], experts.down_proj.dtype
    x, grad = (torch.randn(tokens, hidden, device="cuda", dtype=dtype) for _ in range(2))
    ids = torch.randint(0, count + 1, (tokens, 3), device="cuda")
    return x.requires_grad_(), ids, torch.rand(tokens, 3, device="cuda").requires_grad_(), grad


def run(experts: nn.Module, call: Callable[..., Tensor], given: tuple[Tensor, ...]) -> list[Tensor]:
    x, ids, weights, grad = given
    for tensor in (x, weights, *experts.parameters()):
        tensor.grad = None
    out = call(experts, x, ids, weights)
    out.backward(grad)
    grads = [t.grad for t in (x, weights, *experts.parameters())]
    assert all(g is not None for g in grads)
    return [out.detach(), *(g.clone() for g in grads if g is not None)]


def test_bit_equal_from_run_to_run(experts: nn.Module) -> None:
    given = inputs(experts)
    first = run(experts, torch_mm, given)
    for _ in range(5):
        assert all(torch.equal(a, b) for a, b in zip(first, run(experts, torch_mm, given), strict=True))


@pytest.fixture
def no_waiting() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says once that the mode is a prototype
        torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")


def test_the_host_never_waits(experts: nn.Module, no_waiting: None) -> None:
    run(experts, torch_mm, inputs(experts))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_the_host_never_waits_in_other_dtypes(dtype: torch.dtype, no_waiting: None) -> None:
    experts = build("gpt-oss-20b", dtype)
    run(experts, torch_mm, inputs(experts))


def test_deterministic_algorithms_are_no_obstacle(experts: nn.Module) -> None:
    torch.use_deterministic_algorithms(True)
    try:
        run(experts, torch_mm, inputs(experts))
    finally:
        torch.use_deterministic_algorithms(False)


def test_captured_by_a_graph_forward_and_backward(experts: nn.Module) -> None:
    given = inputs(experts)
    expected = run(experts, torch_mm, given)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run(experts, torch_mm, given)
    torch.cuda.current_stream().wait_stream(stream)
    x, ids, weights, grad = given
    leaves = [x, weights, *experts.parameters()]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = torch_mm(experts, x, ids, weights)
        grads = torch.autograd.grad(out, leaves, grad)
    # other tokens to other experts, into the same memory
    with torch.no_grad():
        x.copy_(x.flip(0))
        ids.copy_(ids.flip(0))
        weights.copy_(weights.flip(0))
        grad.copy_(grad.flip(0))
    graph.replay()
    assert torch.equal(out, expected[0].flip(0))
    assert torch.equal(grads[0], expected[1].flip(0)) and torch.equal(grads[1], expected[2].flip(0))


@pytest.mark.filterwarnings("default")
def test_compiled_whole(experts: Any) -> None:
    given = inputs(experts)
    expected = run(experts, torch_mm, given)
    layer._register("torch_mm")
    experts.config._experts_implementation = "torch_mm"
    compiled = torch.compile(experts.forward, fullgraph=True)
    got = run(experts, lambda _, *arguments: compiled(*arguments), given)
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed(experts: nn.Module, reentrant: bool) -> None:
    given = inputs(experts)
    expected = run(experts, torch_mm, given)

    def call(*arguments: Any) -> Tensor:
        out: Tensor = checkpoint(torch_mm, *arguments, use_reentrant=reentrant)
        return out

    assert all(torch.equal(a, b) for a, b in zip(run(experts, call, given), expected, strict=True))


def test_autocast_computes_in_bfloat16() -> None:
    experts = build("qwen3-30b-a3b", torch.float32)
    given = inputs(experts)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        out = run(experts, torch_mm, given)[0]
    assert out.dtype == torch.float32
    exact = run(experts, torch_mm, given)[0]
    error = ((out - exact).norm() / exact.norm()).item()
    assert 1e-4 < error < 1e-2


def test_more_than_two_billion_elements() -> None:
    """131072 tokens x 8 x 2880 is 3.0e9: 32-bit indices would wrap."""
    torch.manual_seed(0)
    tokens, hidden, width, count = 131072, 2880, 64, 32
    make: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
    from hf_moe_backends.kernels.layer import run as run_layer

    x = torch.randn(tokens, hidden, **make).requires_grad_()
    up = (torch.randn(count, 2 * width, hidden, **make) * 0.02).requires_grad_()
    down = (torch.randn(count, hidden, width, **make) * 0.1).requires_grad_()
    ids = torch.rand(tokens, count, device="cuda").topk(8).indices
    weights = torch.rand(tokens, 8, device="cuda").requires_grad_()

    def call(part: slice) -> Tensor:
        return run_layer(x[part], ids[part], weights[part], up, None, down, None, False, False, "swiglu", 0.0, 1.0)

    out = call(slice(None))
    out.sum().backward()
    assert x.grad is not None
    whole, whole_grad = out.detach(), x.grad.clone()
    for start in (0, tokens // 2, tokens - 1024):
        part = slice(start, start + 1024)
        x.grad = None
        small = call(part)
        small.sum().backward()
        # the same rows in other tiles of the products
        torch.testing.assert_close(whole[part], small.detach(), rtol=2e-2, atol=2e-2)
        torch.testing.assert_close(whole_grad[part], x.grad[part], rtol=2e-2, atol=2e-1)


@pytest.mark.parametrize("name", SMALL)
def test_decoding_is_the_layer(name: str) -> None:
    experts = build(name)
    x, ids, weights, _ = inputs(experts, tokens=2)
    expected = torch_mm(experts, x, ids, weights)
    with torch.no_grad():
        got = torch_mm(experts, x, ids, weights)
    torch.testing.assert_close(got, expected, rtol=2e-2, atol=2e-2 * float(expected.detach().abs().max()))
