"""Each Triton kernel against its twin in plain torch: on a GPU where there is one, else under Triton's interpreter.

    pytest tests/kernels_on_device.py

Not collected by itself: `test_interpreter.py` runs it where there is no GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from hf_moe_backends.bench import layer as bench
from hf_moe_backends.builtin.experts.torch_mm import torch_mm
from hf_moe_backends.kernels import cross_entropy, decode, gates, grouped, layer, routing, rows
from hf_moe_backends.recognise import Gate

triton = pytest.importorskip("triton", reason="the Triton kernels need Triton")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float64, torch.float32, torch.float16] + ([torch.bfloat16] if DEVICE == "cuda" else [])
GATES = [
    *(
        Gate(formula=f)
        for f in ("swiglu", "geglu", "geglu_tanh", "reglu", "silu", "gelu", "gelu_tanh", "relu", "relu2")
    ),
    Gate(formula="swiglu_clamped", limit=0.7),
    Gate(formula="swiglu_clamped_after", limit=0.3),
    Gate(formula="gpt_oss", limit=0.7, alpha=1.702),
]


def assert_close(got: Tensor, expected: Tensor) -> None:
    """Both compute in the same precision and round once, so that they differ by the order of sums and one rounding."""
    epsilon = torch.finfo(got.dtype).eps
    torch.testing.assert_close(got, expected, rtol=8 * epsilon, atol=8 * epsilon * float(expected.abs().max() or 1))


class Problem(NamedTuple):
    """Tokens routed to experts with duplicates, pairs of other ranks (id E and -1) and an expert without tokens."""

    x: Tensor
    ids: Tensor
    weights: Tensor
    sorted: routing.Routing
    used: int


def problem(dtype: torch.dtype, tokens: int = 37, top_k: int = 3, experts: int = 6, hidden: int = 24) -> Problem:
    torch.manual_seed(0)
    ids = torch.randint(-1, experts + 1, (tokens, top_k))
    ids[ids == 2] = 1
    weights, x = torch.rand(tokens, top_k), torch.randn(tokens, hidden, dtype=dtype)
    order = routing._sort_torch(ids.reshape(-1), experts)
    order = routing.Routing(*(t.to(DEVICE) for t in order))
    return Problem(x.to(DEVICE), ids.to(DEVICE), weights.to(DEVICE), order, int(order.offsets[-1]))


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize(
    ("tokens", "top_k", "experts"),
    [(37, 3, 5), (1, 1, 1), (64, 8, 128), (300, 2, 4), (0, 2, 4), (50, 4, 300), (9000, 4, 64), (40000, 1, 3)],
)
def test_sort(tokens: int, top_k: int, experts: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    ids = torch.randint(-2, experts + 2, (tokens * top_k,), dtype=dtype)
    got = routing._sort_triton(ids.to(DEVICE), experts)
    for mine, twin in zip(got, routing._sort_torch(ids, experts), strict=True):
        assert torch.equal(mine.cpu(), twin)
    # and the twin against what a sort is
    order, position, offsets = routing._sort_torch(ids, experts)
    local = (ids >= 0) & (ids < experts)
    assert torch.equal(order.sort().values, torch.arange(ids.numel(), dtype=torch.int32))
    assert torch.equal(offsets, torch.bincount(ids[local], minlength=experts).cumsum(0).to(torch.int32))
    assert torch.equal(position >= 0, local)
    assert torch.equal(order[position[local].long()], torch.arange(ids.numel(), dtype=torch.int32)[local])
    placed = ids[order[: int(offsets[-1])].long()]
    assert torch.equal(placed, ids[local].sort(stable=True).values)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hidden", [24, 7])
def test_rows(dtype: torch.dtype, hidden: int) -> None:
    p = problem(dtype, hidden=hidden)
    bias = torch.randn(6, hidden, dtype=dtype, device=DEVICE)
    with on_triton(False):
        gathered, product = rows.gather(p.x, p.sorted, 3, p.ids, bias)
        back = rows.weighted_sum_backward(p.x, gathered, p.sorted, p.weights)
    got, got_product = rows._gather_triton(p.x, p.sorted, 3, p.ids, bias)
    assert product is not None and got_product is not None
    assert torch.equal(got[: p.used], gathered[: p.used])
    assert_close(got_product[: p.used], product[: p.used])
    assert (gathered[p.used :] == 0).all()
    poisoned = gathered.clone()
    poisoned[p.used :] = torch.nan  # rows of nobody are never read
    for weights, own_bias, weigh_rows in ((None, None, False), (p.weights, bias, False), (p.weights, None, True)):
        arguments: dict[str, Any] = {"weights": weights, "bias": own_bias, "weigh_rows": weigh_rows}
        with on_triton(False):
            expected = rows.weighted_sum(poisoned, p.sorted, p.ids, **arguments)
        assert_close(rows._weighted_sum_triton(poisoned, p.sorted, p.ids, weights, own_bias, weigh_rows), expected)
    got_back = rows._weighted_sum_backward_triton(p.x, poisoned, p.sorted, p.weights)
    for mine, twin in zip(got_back, back, strict=True):
        assert_close(mine, twin)
    assert (got_back[0][p.used :] == 0).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", [1, 29, 5003])
@pytest.mark.parametrize("scale, softcap", [(1.0, None), (0.3, None), (1.7, 2.0)])
def test_cross_entropy(dtype: torch.dtype, columns: int, scale: float, softcap: float | None) -> None:
    torch.manual_seed(0)
    logits = (4 * torch.randn(7, columns)).to(DEVICE, dtype)
    logits[1] *= 1e-3  # where a cap is next to linear
    labels = torch.randint(columns, (7,), device=DEVICE)
    labels[4] = -100
    how: dict[str, Any] = {"ignore_index": -100, "scale": scale, "softcap": softcap}
    for gradient in (False, True):
        twin, mine = logits.clone(), logits.clone()
        with on_triton(False):
            losses = cross_entropy.cross_entropy_(twin, labels, gradient=gradient, **how)
        assert_close(cross_entropy._cross_entropy_triton(mine, labels, gradient, -100, scale, softcap), losses)
        assert_close(mine, twin)
        assert torch.equal(mine, logits) is not gradient or columns == 1
    assert not mine[4].any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gate", GATES, ids=str)
def test_gates(gate: Gate, dtype: torch.dtype) -> None:
    p, width = problem(dtype), 13
    known = gates.formula(gate)
    assert known is not None
    columns = 2 * width if known.gated else width
    pre = torch.randn(p.ids.numel(), columns, dtype=dtype, device=DEVICE)
    grad = torch.randn(p.ids.numel(), width, dtype=dtype, device=DEVICE)
    extra = torch.randn(p.ids.numel(), dtype=rows.accumulator(dtype), device=DEVICE)
    pre[p.used :] = grad[p.used :] = extra[p.used :] = torch.nan
    bias = torch.randn(6, columns, dtype=dtype, device=DEVICE)
    for interleaved in (False, True) if known.gated else (False,):
        for own_bias, own_extra in ((None, None), (bias, extra)):
            about = gates.Rows(p.sorted, p.ids, p.weights, own_bias)
            with on_triton(False):
                expected = gates.activate(pre, about, known, interleaved)
                expected_back = gates.activate_backward(grad, own_extra, pre, about, known, interleaved)
            got = gates._activate_triton(pre, about, known, interleaved)
            assert_close(got[: p.used], expected[: p.used])
            grad_pre, weighted, grad_weights = gates._backward_triton(grad, own_extra, pre, about, known, interleaved)
            assert_close(grad_pre[: p.used], expected_back[0][: p.used])
            assert_close(weighted[: p.used], expected_back[1][: p.used])
            assert_close(grad_weights, expected_back[2])
            assert torch.equal(weighted[: p.used], got[: p.used]), "what backward makes again is what forward made"


@pytest.mark.parametrize("gate", GATES, ids=str)
def test_a_gate_s_derivatives_are_autograd_s(gate: Gate) -> None:
    known = gates.formula(gate)
    assert known is not None
    g, u = (torch.randn(2000, dtype=torch.float64, requires_grad=True) for _ in range(2))
    value, by_gate, by_up = gates._evaluate(g if known.gated else None, u, known)
    value.sum().backward()
    assert u.grad is not None
    torch.testing.assert_close(by_up.detach(), u.grad, rtol=1e-12, atol=1e-12)
    if by_gate is not None:
        assert g.grad is not None
        torch.testing.assert_close(by_gate.detach(), g.grad, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("hidden", "width"), [(24, 40), (7, 11)])
def test_grouped_products(dtype: torch.dtype, hidden: int, width: int) -> None:
    p = problem(dtype, hidden=hidden, tokens=90)
    with on_triton(False):
        gathered = rows.gather(p.x, p.sorted, 3)[0]
    stored = torch.randn(6, width, hidden, dtype=dtype, device=DEVICE)
    exact = gathered.double()
    for matrices in (stored.transpose(1, 2), stored.transpose(1, 2).contiguous()):
        got = grouped._rows_times_experts_triton(gathered, matrices, p.sorted.offsets)
        expected = exact.new_zeros(exact.shape[0], width)
        start = 0
        for expert, end in enumerate(p.sorted.offsets.tolist()):
            expected[start:end] = exact[start:end] @ matrices[expert].double()
            start = end
        assert_close(got[: p.used], expected[: p.used].to(dtype))
        with on_triton(False):
            assert_close(grouped.rows_times_experts(gathered, matrices, p.sorted.offsets)[: p.used], got[: p.used])
    other = torch.randn(gathered.shape[0], width, dtype=dtype, device=DEVICE)
    outer = grouped._experts_outer_triton(gathered, other, p.sorted.offsets)
    sums = grouped._expert_sums_triton(other, p.sorted.offsets, None)
    of_tokens = grouped._expert_sums_triton(p.x, p.sorted.offsets, (p.sorted, p.weights))
    share = p.weights.reshape(-1, 1)[p.sorted.order.long()].double()
    start = 0
    for expert, end in enumerate(p.sorted.offsets.tolist()):
        assert_close(outer[expert], (exact[start:end].t() @ other[start:end].double()).to(dtype))
        assert_close(sums[expert], other[start:end].double().sum(0).to(sums.dtype))
        assert_close(of_tokens[expert], (exact[start:end] * share[start:end]).sum(0).to(sums.dtype))
        start = end
    assert (outer[2] == 0).all() and (sums[2] == 0).all(), "an expert without rows"
    with on_triton(False):
        assert_close(grouped.experts_outer(gathered, other, p.sorted.offsets), outer)
        assert_close(grouped.expert_sums(other, p.sorted.offsets), sums)
        assert_close(grouped.expert_sums(p.x, p.sorted.offsets, of_tokens=(p.sorted, p.weights)), of_tokens)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "gate", [Gate(formula="swiglu"), Gate(formula="gpt_oss", limit=0.7, alpha=1.702), GATES[-4]], ids=str
)
def test_decode_is_the_layer(gate: Gate, dtype: torch.dtype) -> None:
    p, width = problem(dtype, tokens=5), 13
    known = gates.formula(gate)
    assert known is not None
    columns = 2 * width if known.gated else width
    up = torch.randn(6, columns, 24, dtype=dtype, device=DEVICE) / 5
    down = torch.randn(6, 24, width, dtype=dtype, device=DEVICE) / 4
    up_bias = torch.randn(6, columns, dtype=dtype, device=DEVICE)
    down_bias = torch.randn(6, 24, dtype=dtype, device=DEVICE)
    for interleaved in (False, True) if known.gated else (False,):
        for biases in ((None, None), (up_bias, down_bias)):
            with on_triton(False):
                expected = layer.experts_layer(
                    p.x, p.ids, p.weights, up, biases[0], down, biases[1], False, interleaved, gate.formula,
                    0.0 if gate.limit == float("inf") else gate.limit, gate.alpha, "torch",
                )[0]  # fmt: skip
            got = decode._decode(p.x, p.ids, p.weights, up, biases[0], down, biases[1], interleaved, known)
            # the layer rounds its rows to the dtype before it sums them, decoding does not
            assert_close(got / 2, expected / 2)


@pytest.mark.parametrize("tokens", [2, 40], ids=["decode", "layer"])  # qwen3 decodes where pairs are few
@pytest.mark.parametrize("geometry", ["qwen3-30b-a3b", "gpt-oss-20b"])
def test_strides_change_nothing(geometry: str, tokens: int) -> None:
    sizes = {"hidden": 24, "intermediate": 12, "count": 6, "top_k": 3}
    experts = bench._build(replace(bench.GEOMETRIES[geometry], **sizes), DEVICE, torch.float32)
    torch.manual_seed(0)
    for parameter in experts.parameters():
        parameter.data.normal_()
    p = problem(torch.float32, tokens)
    with on_triton(True), torch.no_grad():
        expected = torch_mm(experts, p.x, p.ids, p.weights)
        for parameter in experts.parameters():
            parameter.data = strided(parameter.data)
        assert_close(torch_mm(experts, strided(p.x), strided(p.ids), strided(p.weights)), expected)


def strided(tensor: Tensor) -> Tensor:
    """The same values, column by column."""
    return tensor.transpose(-1, -2).contiguous().transpose(-1, -2)


@contextmanager
def on_triton(yes: bool) -> Iterator[None]:
    """Within: the public functions take the Triton kernels, or their torch twins, whatever the device."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (cross_entropy, decode, gates, grouped, rows, routing):
            patch.setattr(module, "use_triton", lambda tensor: yes)
        yield
