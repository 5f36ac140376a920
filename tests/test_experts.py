"""`loop` and `torch_mm` on every experts layout, against a dense formula in float64."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, silu
from torch.utils.checkpoint import checkpoint

from hf_moe_backends.builtin.experts.loop import loop
from hf_moe_backends.builtin.experts.torch_mm import torch_mm
from hf_moe_backends.recognise import recognise_gate

BACKENDS = {"loop": loop, "torch_mm": torch_mm}
TOKENS, TOP_K, EXPERTS, HIDDEN, INTERMEDIATE = 11, 2, 4, 7, 5
BF16 = torch.finfo(torch.bfloat16).eps
LIMITS = {torch.float64: 1e-13, torch.float32: 16 * torch.finfo(torch.float32).eps}
"""Relative to the norm of the float64 result. A router weight's gradient of three pairs is three short dot products
that may cancel: with one machine's matrix products it came to 8 units of the last place, with another's to 9."""


class ScaleNorm(nn.Module):
    """An RMSNorm on each expert's output."""

    def __init__(self, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5))


class Experts(nn.Module):
    """An experts module as `@use_experts_implementation` leaves it, in any combination of its layouts."""

    def __init__(
        self,
        *,
        act_fn: Callable[[Tensor], Tensor] = silu,
        gate: Callable[[Tensor, Tensor], Tensor] | None = None,
        has_gate: bool = True,
        transposed: bool = False,
        interleaved: bool = False,
        bias: bool = False,
        post_expert_norm: bool = False,
        experts: int = EXPERTS,
        hidden: int = HIDDEN,
        intermediate: int = INTERMEDIATE,
    ):
        super().__init__()
        self.num_experts, self.has_gate, self.has_bias = experts, has_gate, bias
        self.is_transposed, self.is_concatenated = transposed, not interleaved
        self.has_post_expert_norm = post_expert_norm
        self.act_fn, self.gate = act_fn, gate
        width = 2 * intermediate if has_gate else intermediate
        up, down = (experts, width, hidden), (experts, hidden, intermediate)
        name = "gate_up_proj" if has_gate else "up_proj"
        for weight, shape in ((name, up), ("down_proj", down)):
            stored = (shape[0], shape[2], shape[1]) if transposed else shape
            setattr(self, weight, nn.Parameter(torch.empty(stored)))
            if bias:
                setattr(self, f"{weight}_bias", nn.Parameter(torch.empty(shape[:2])))
        if post_expert_norm:
            self.post_expert_norm = ScaleNorm(hidden)
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator))

    def halves(self, pre: Tensor) -> tuple[Tensor, Tensor]:
        if self.is_concatenated:
            gate, up = pre.chunk(2, dim=-1)
            return gate, up
        return pre[..., ::2], pre[..., 1::2]

    def _apply_gate(self, pre: Tensor) -> Tensor:
        gate, up = self.halves(pre)
        return self.gate(gate, up) if self.gate is not None else self.act_fn(gate) * up


def gpt_oss(gate: Tensor, up: Tensor) -> Tensor:
    gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
    return gate * torch.sigmoid(1.702 * gate) * (up + 1)


def clamped(gate: Tensor, up: Tensor) -> Tensor:
    return silu(gate.clamp(max=2.0)) * up.clamp(-2.0, 2.0)


def softcapped(gate: Tensor, up: Tensor) -> Tensor:
    return 3 * torch.tanh(silu(gate) * up / 3)


LAYOUTS: dict[str, dict[str, Any]] = {
    "default": {},
    "transposed": {"transposed": True},
    "interleaved": {"interleaved": True},
    "bias": {"bias": True},
    "gpt_oss": {"transposed": True, "interleaved": True, "bias": True, "gate": gpt_oss},
    "gpt_oss concatenated": {"gate": gpt_oss},
    "clamped": {"gate": clamped},
    "geglu": {"act_fn": gelu},
    "ungated": {"has_gate": False, "act_fn": lambda x: torch.relu(x).square()},
    "ungated with all else": {"has_gate": False, "act_fn": torch.relu, "transposed": True, "bias": True},
    "custom": {"gate": softcapped},
    "custom with all else": {"gate": softcapped, "transposed": True, "interleaved": True, "bias": True},
    "custom activation": {"has_gate": False, "act_fn": torch.tanh},
    "post-expert norm": {"post_expert_norm": True},
    "post-expert norm with all else": {"post_expert_norm": True, "bias": True, "transposed": True, "interleaved": True},
}
FORMULAS = {
    "gpt_oss": "gpt_oss",
    "gpt_oss concatenated": "gpt_oss",
    "clamped": "swiglu_clamped",
    "geglu": "geglu",
    "ungated": "relu2",
    "ungated with all else": "relu",
    **dict.fromkeys(("custom", "custom with all else", "custom activation"), "custom"),
}


class Inputs(NamedTuple):
    hidden: Tensor  # (T, H)
    ids: Tensor  # (T, K)
    shares: Tensor  # (T, K)


def make_inputs(
    ids: Tensor | None = None, *, tokens: int = TOKENS, top_k: int = TOP_K, experts: int = EXPERTS, hidden: int = HIDDEN
) -> Inputs:
    generator = torch.Generator().manual_seed(1)
    if ids is None:
        ids = torch.rand(tokens, experts, generator=generator).topk(top_k).indices
    states = torch.randn(ids.shape[0], hidden, generator=generator)
    return Inputs(states, ids, torch.rand(ids.shape, generator=generator) + 0.1)


def dense(experts: Experts, hidden: Tensor, ids: Tensor, shares: Tensor) -> Tensor:
    """Every expert on every token, and then the sum of what the router picked: (T, H)."""
    turned = "eih" if experts.is_transposed else "ehi"
    up = experts.gate_up_proj if experts.has_gate else experts.up_proj
    pre = torch.einsum(f"th,{'ehi' if experts.is_transposed else 'eih'}->eti", hidden, up)
    if experts.has_bias:
        pre = pre + (experts.gate_up_proj_bias if experts.has_gate else experts.up_proj_bias)[:, None]
    inner = experts._apply_gate(pre) if experts.has_gate else experts.act_fn(pre)
    out = torch.einsum(f"eti,{turned}->eth", inner, experts.down_proj)
    if experts.has_bias:
        out = out + experts.down_proj_bias[:, None]
    if experts.has_post_expert_norm:
        out = experts.post_expert_norm(out)
    mixture = torch.zeros(*ids.shape[:1], experts.num_experts, dtype=shares.dtype)
    local = (ids >= 0) & (ids < experts.num_experts)
    mixture = mixture.scatter_add(1, ids.long().where(local, 0), shares.where(local, 0))
    return torch.einsum("te,eth->th", mixture.to(out.dtype), out)


class Result(NamedTuple):
    output: Tensor
    gradients: dict[str, Tensor]


def run(backend: Callable[..., Tensor], experts: nn.Module, inputs: Inputs, *, backward: bool = True) -> Result:
    """The output, and the gradients of everything under a fixed random cotangent."""
    hidden, shares = (t.detach().clone().requires_grad_() for t in (inputs.hidden, inputs.shares))
    experts.zero_grad(set_to_none=True)
    output = backend(experts, hidden, inputs.ids, shares)
    if not backward:
        return Result(output.detach(), {})
    generator = torch.Generator().manual_seed(2)
    output.backward(torch.randn(output.shape, generator=generator).to(output.dtype))
    named = {"hidden": hidden, "shares": shares, **dict(experts.named_parameters())}
    return Result(output.detach(), {name: t.grad for name, t in named.items() if t.grad is not None})


def exact(experts: Experts, inputs: Inputs) -> Result:
    """The same in float64, from the same rounded weights and inputs."""
    wide = Inputs(inputs.hidden.double(), inputs.ids, inputs.shares.double())
    return run(dense, copy.deepcopy(experts).double(), wide)


def relative(got: Tensor, expected: Tensor) -> float:
    return ((got.double() - expected).norm() / expected.norm().clamp_min(1e-30)).item()


def assert_close(got: Result, expected: Result, limit: float) -> None:
    assert got.output.shape == expected.output.shape
    assert relative(got.output, expected.output) <= limit
    assert got.gradients.keys() == expected.gradients.keys()
    errors = {name: relative(got.gradients[name], g) for name, g in expected.gradients.items()}
    assert {name: error for name, error in errors.items() if not error <= limit} == {}


def assert_no_worse(got: Result, stock: Result, expected: Result, floor: float = 0.0) -> None:
    """The error is at most half again eager's own, or half a unit of the dtype's last place."""
    for name, reference in [("output", expected.output), *expected.gradients.items()]:
        mine, theirs = (r.output if name == "output" else r.gradients[name] for r in (got, stock))
        least = max(floor, torch.finfo(mine.dtype).eps / 2)
        assert relative(mine, reference) <= max(1.5 * relative(theirs, reference), least), name


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """Matrices as small as these are faster without others waiting for them."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> Callable[..., Tensor]:
    return BACKENDS[request.param]


@pytest.fixture(params=LAYOUTS)
def layout(request: pytest.FixtureRequest) -> str:
    return request.param


# One layout of each way through the backends: fused gates with and without biases, none, and a module's own code.
WAYS = ("default", "gpt_oss", "ungated", "custom with all else", "post-expert norm with all else")


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest) -> str:
    return request.param


def test_the_layouts_are_what_they_are_called(layout: str) -> None:
    assert recognise_gate(Experts(**LAYOUTS[layout])).formula == FORMULAS.get(layout, "swiglu")


class TestParity:
    @pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
    def test_every_layout(self, backend: Callable[..., Tensor], layout: str, dtype: torch.dtype) -> None:
        experts, inputs = Experts(**LAYOUTS[layout]).to(dtype), make_inputs()
        inputs = Inputs(inputs.hidden.to(dtype), inputs.ids, inputs.shares.to(dtype))
        got = run(backend, experts, inputs)
        assert got.output.dtype == dtype
        assert all(g.dtype == dtype for g in got.gradients.values())
        assert len(got.gradients) == 2 + len(list(experts.parameters()))
        assert_close(got, exact(experts, inputs), LIMITS[dtype])

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_half_precision_is_no_worse_than_eager(
        self, backend: Callable[..., Tensor], layout: str, dtype: torch.dtype
    ) -> None:
        experts = Experts(**LAYOUTS[layout], hidden=48, intermediate=32).to(dtype)
        with torch.no_grad():
            for parameter in experts.parameters():
                parameter.mul_(0.3)
        inputs = make_inputs(tokens=64, hidden=48)
        inputs = Inputs(inputs.hidden.to(dtype), inputs.ids, inputs.shares.to(dtype))
        expected, stock, got = exact(experts, inputs), run(eager, experts, inputs), run(backend, experts, inputs)
        assert {got.output.dtype, *(g.dtype for g in got.gradients.values())} == {dtype}
        assert_no_worse(got, stock, expected)

    @pytest.mark.parametrize("shares", [torch.float64, torch.float32, torch.bfloat16])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_router_weights_of_another_dtype(
        self, backend: Callable[..., Tensor], way: str, dtype: torch.dtype, shares: torch.dtype
    ) -> None:
        """41 families hand over float32 weights under bfloat16 states."""
        experts, inputs = Experts(**LAYOUTS[way]).to(dtype), make_inputs()
        mixed = Inputs(inputs.hidden.to(dtype), inputs.ids, inputs.shares.to(shares))
        got = run(backend, experts, mixed)
        assert got.output.dtype == got.gradients["hidden"].dtype == dtype
        assert got.gradients["shares"].dtype == shares
        assert_no_worse(got, run(eager, experts, mixed), exact(experts, mixed), floor=LIMITS.get(dtype, 0.0))

    def test_states_of_another_dtype_than_the_weights(self, backend: Callable[..., Tensor], way: str) -> None:
        """Computed in the weights' dtype, given back in the states'."""
        experts, inputs = Experts(**LAYOUTS[way]), make_inputs()
        got = run(backend, experts, inputs._replace(hidden=inputs.hidden.bfloat16()))
        assert got.output.dtype == got.gradients["hidden"].dtype == torch.bfloat16
        same = run(backend, experts, inputs._replace(hidden=inputs.hidden.bfloat16().float()))
        assert torch.equal(got.output, same.output.bfloat16())


def eager(experts: Experts, hidden: Tensor, ids: Tensor, shares: Tensor) -> Tensor:
    """As Transformers' own eager experts: an expert after another, all in the dtype of the states."""
    output = torch.zeros_like(hidden)
    up = experts.gate_up_proj if experts.has_gate else experts.up_proj
    up_bias = (experts.gate_up_proj_bias if experts.has_gate else experts.up_proj_bias) if experts.has_bias else None
    for expert in range(experts.num_experts):
        token, slot = torch.where(ids == expert)
        rows = hidden[token] @ (up[expert] if experts.is_transposed else up[expert].t())
        rows = rows if up_bias is None else rows + up_bias[expert]
        rows = experts._apply_gate(rows) if experts.has_gate else experts.act_fn(rows)
        rows = rows @ (experts.down_proj[expert] if experts.is_transposed else experts.down_proj[expert].t())
        rows = rows if up_bias is None else rows + experts.down_proj_bias[expert]
        rows = experts.post_expert_norm(rows) if experts.has_post_expert_norm else rows
        output = output.index_add(0, token, (rows * shares[token, slot, None]).to(output.dtype))
    return output


def spread(*rows: list[int]) -> Tensor:
    return torch.tensor(rows)


ROUTINGS: dict[str, Tensor] = {
    "one token": spread([2, 0]),
    "one of each": spread([3], [1], [0]),
    "all experts": torch.arange(EXPERTS).expand(3, EXPERTS).contiguous(),
    "one takes all": torch.full((9, 1), 2),
    "most are empty": spread([0, 3], [3, 0], [0, 3]),
    "the same twice": spread([1, 1], [2, 1], [3, 3], [0, 0]),
    "more than there are": spread([0, 1, 2, 3, 0, 1], [3, 3, 3, 3, 3, 3]),
    "beyond the last": spread([EXPERTS, 1], [0, EXPERTS], [EXPERTS, EXPERTS]),
    "negative": spread([-1, 1], [0, -1], [-1, -1]),
    "all elsewhere": torch.full((5, 2), EXPERTS),
    "all negative": torch.full((5, 2), -1),
}


class TestRouting:
    @pytest.mark.parametrize("integer", [torch.int64, torch.int32])
    @pytest.mark.parametrize("name", ROUTINGS)
    def test_every_kind(self, backend: Callable[..., Tensor], way: str, name: str, integer: torch.dtype) -> None:
        experts, ids = Experts(**LAYOUTS[way]), ROUTINGS[name]
        inputs = make_inputs(ids)
        got = run(backend, experts, inputs._replace(ids=ids.to(integer)))
        assert_close(got, exact(experts, inputs), LIMITS[torch.float32])
        hit = set(ids.flatten().tolist())
        for weight in experts.parameters(recurse=False):
            assert weight.grad is not None
            for expert in set(range(EXPERTS)) - hit:
                assert torch.equal(weight.grad[expert], torch.zeros_like(weight[expert]))

    def test_no_tokens(self, backend: Callable[..., Tensor], layout: str) -> None:
        """A rank without tokens: connected to autograd, or a sharded model's backward would hang."""
        experts = Experts(**LAYOUTS[layout])
        hidden, shares = torch.empty(0, HIDDEN, requires_grad=True), torch.empty(0, TOP_K, requires_grad=True)
        output = backend(experts, hidden, torch.empty(0, TOP_K, dtype=torch.int64), shares)
        assert output.shape == (0, HIDDEN)
        output.sum().backward()
        assert hidden.grad is not None and hidden.grad.shape == (0, HIDDEN)
        for parameter in experts.parameters(recurse=False):
            assert parameter.grad is not None and not parameter.grad.any()

    @pytest.mark.parametrize("elsewhere", [EXPERTS, -1])
    def test_rows_of_nobody_are_not_read(self, backend: Callable[..., Tensor], way: str, elsewhere: int) -> None:
        """What is in a row, a share or a gradient that is another rank's stays there, NaN or not."""
        experts = Experts(**LAYOUTS[way])
        ids = spread([elsewhere, elsewhere], [0, elsewhere], [elsewhere, 2], [1, 3])
        inputs = make_inputs(ids)
        clean = run(backend, experts, inputs)
        hidden, shares = inputs.hidden.clone(), inputs.shares.clone()
        hidden[0] = math.nan
        shares[ids == elsewhere] = math.nan
        got = run(backend, experts, Inputs(hidden, ids, shares))
        assert torch.equal(got.output, clean.output)
        assert not got.output[0].any()
        assert all(torch.equal(got.gradients[name], g) for name, g in clean.gradients.items())
        assert not got.gradients["hidden"][0].any()
        assert not got.gradients["shares"][ids == elsewhere].any()

    def test_a_nan_token_stays_in_its_row(self, backend: Callable[..., Tensor], way: str) -> None:
        experts, inputs = Experts(**LAYOUTS[way]), make_inputs()
        clean = run(backend, experts, inputs)
        inputs.hidden[3] = math.nan
        got = run(backend, experts, inputs)
        rest = torch.arange(TOKENS) != 3
        assert torch.equal(got.output[rest], clean.output[rest])
        assert got.output[3].isnan().all()
        for name in ("hidden", "shares"):
            assert torch.equal(got.gradients[name][rest], clean.gradients[name][rest])

    def test_weights_of_zero_leave_their_token_out(self, backend: Callable[..., Tensor], way: str) -> None:
        experts, inputs = Experts(**LAYOUTS[way]), make_inputs()
        inputs.shares[2] = 0
        got = run(backend, experts, inputs)
        assert not got.output[2].any()
        assert_close(got, exact(experts, inputs), LIMITS[torch.float32])


class TestMemory:
    @pytest.mark.parametrize("what", ["hidden", "ids", "shares", "weights", "gradient"])
    def test_non_contiguous(self, backend: Callable[..., Tensor], way: str, what: str) -> None:
        experts, inputs = Experts(**LAYOUTS[way]), make_inputs()
        expected = exact(experts, inputs)
        if what == "weights":
            for name, parameter in experts.named_parameters(recurse=False):
                padded = torch.stack([parameter.detach()] * 2, dim=-1)[..., 0]
                assert not padded.is_contiguous()
                setattr(experts, name, nn.Parameter(padded))
        hidden, ids, shares = inputs
        hidden = hidden.t().contiguous().t() if what == "hidden" else hidden
        ids = ids.t().contiguous().t() if what == "ids" else ids
        shares = torch.stack([shares] * 2, dim=-1)[..., 0] if what == "shares" else shares
        if what == "gradient":
            got = run(lambda *args: backend(*args).t().contiguous().t(), experts, inputs)
        else:
            got = run(backend, experts, Inputs(hidden, ids, shares))
        assert_close(got, expected, LIMITS[torch.float32])

    def test_an_expanded_gradient(self, backend: Callable[..., Tensor], way: str) -> None:
        """What `.sum().backward()` hands over has strides of zero."""
        experts, inputs = Experts(**LAYOUTS[way]), make_inputs()
        hidden = inputs.hidden.requires_grad_()
        backend(experts, hidden, *inputs[1:]).sum().backward()
        wide = hidden.detach().double().requires_grad_()
        dense(copy.deepcopy(experts).double(), wide, inputs.ids, inputs.shares.double()).sum().backward()
        assert relative(hidden.grad, wide.grad) <= 1e-6  # type: ignore[arg-type]

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_memory_mapped_weights_that_are_not_aligned(
        self, backend: Callable[..., Tensor], way: str, dtype: torch.dtype, tmp_path: Path
    ) -> None:
        """safetensors maps a file, in which a tensor may begin at any element."""
        experts, inputs = Experts(**LAYOUTS[way]).to(dtype), make_inputs()
        inputs = Inputs(inputs.hidden.to(dtype), inputs.ids, inputs.shares.to(dtype))
        expected = run(backend, experts, inputs)
        for name, parameter in list(experts.named_parameters(recurse=False)):
            path = tmp_path / name
            raw = torch.cat([parameter.detach().flatten()[:1], parameter.detach().flatten()])
            path.write_bytes(raw.view(torch.uint8).numpy().tobytes())
            mapped = torch.from_file(str(path), shared=False, size=raw.numel(), dtype=dtype)[1:].view(parameter.shape)
            assert mapped.data_ptr() % 16
            setattr(experts, name, nn.Parameter(mapped))
        got = run(backend, experts, inputs)
        assert torch.equal(got.output, expected.output)
        assert all(torch.equal(got.gradients[name], g) for name, g in expected.gradients.items())

    def test_nothing_is_written_to_what_it_is_given(self, backend: Callable[..., Tensor], way: str) -> None:
        experts, inputs = Experts(**LAYOUTS[way]), make_inputs()
        given = [*inputs, *experts.parameters()]
        before = [(t.detach().clone(), t._version) for t in given]
        run(backend, experts, inputs)
        assert all(
            torch.equal(t, old) and t._version == version for t, (old, version) in zip(given, before, strict=True)
        )

    def test_repeatable(self, backend: Callable[..., Tensor], way: str) -> None:
        experts, inputs = Experts(**LAYOUTS[way], hidden=33), make_inputs(tokens=200, hidden=33)
        first, again = run(backend, experts, inputs), run(backend, experts, inputs)
        assert torch.equal(first.output, again.output)
        assert all(torch.equal(again.gradients[name], g) for name, g in first.gradients.items())


class TestAutograd:
    @pytest.mark.parametrize("trained", ["hidden", "shares", "up", "down", "biases", "norm"])
    def test_only_some_have_a_gradient(self, backend: Callable[..., Tensor], way: str, trained: str) -> None:
        experts, inputs = Experts(**LAYOUTS[way]), make_inputs()
        expected = exact(experts, inputs)
        tensors = {"hidden": inputs.hidden.clone(), "shares": inputs.shares.clone(), **dict(experts.named_parameters())}
        wanted = {
            "hidden": {"hidden"},
            "shares": {"shares"},
            "up": {"gate_up_proj", "up_proj"},
            "down": {"down_proj"},
            "biases": {"gate_up_proj_bias", "down_proj_bias"},
            "norm": {"post_expert_norm.weight"},
        }[trained] & tensors.keys()
        for name, tensor in tensors.items():
            tensor.requires_grad_(name in wanted)
        output = backend(experts, tensors["hidden"], inputs.ids, tensors["shares"])
        assert output.requires_grad == bool(wanted)
        assert relative(output, expected.output) <= 1e-6
        if wanted:
            generator = torch.Generator().manual_seed(2)
            output.backward(torch.randn(output.shape, generator=generator))
        assert {name for name, tensor in tensors.items() if tensor.grad is not None} == wanted
        for name in wanted:
            assert relative(tensors[name].grad, expected.gradients[name]) <= 1e-6, name  # type: ignore[arg-type]

    def test_without_autograd(self, backend: Callable[..., Tensor], layout: str) -> None:
        experts, inputs = Experts(**LAYOUTS[layout]), make_inputs()
        expected = backend(experts, *inputs)
        assert expected.requires_grad
        for mode in (torch.no_grad(), torch.inference_mode()):
            with mode:
                got = backend(experts, *inputs)
            assert not got.requires_grad
            assert torch.equal(got, expected)

    def test_a_second_backward_raises(self, backend: Callable[..., Tensor], way: str) -> None:
        output = backend(Experts(**LAYOUTS[way]), *make_inputs())
        output.sum().backward()
        with pytest.raises(RuntimeError, match="backward through the graph a second time"):
            output.sum().backward()

    def test_a_retained_graph(self, backend: Callable[..., Tensor], way: str) -> None:
        experts, inputs = Experts(**LAYOUTS[way]), make_inputs()
        output = backend(experts, *inputs)
        output.sum().backward(retain_graph=True)
        first = [p.grad.clone() for p in experts.parameters() if p.grad is not None]
        output.sum().backward()
        assert len(first) == len(list(experts.parameters()))
        assert all(torch.equal(p.grad, 2 * g) for p, g in zip(experts.parameters(), first, strict=True))

    def test_weights_changed_before_backward_raise(self, backend: Callable[..., Tensor], way: str) -> None:
        """An optimiser step between forward and backward must not give wrong gradients in silence."""
        experts = Experts(**LAYOUTS[way])
        output = backend(experts, *(t.requires_grad_() if t.is_floating_point() else t for t in make_inputs()))
        with torch.no_grad():
            experts.down_proj.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            output.sum().backward()

    @pytest.mark.parametrize("reentrant", [False, True])
    def test_activation_checkpointing(self, backend: Callable[..., Tensor], way: str, reentrant: bool) -> None:
        experts, inputs = Experts(**LAYOUTS[way]), make_inputs()
        expected = run(backend, experts, inputs)
        got = run(lambda *args: checkpoint(backend, *args, use_reentrant=reentrant), experts, inputs)
        assert torch.equal(got.output, expected.output)
        assert all(torch.equal(got.gradients[name], g) for name, g in expected.gradients.items())

    def test_what_torch_mm_keeps_for_backward(self) -> None:
        """Of what it computes, the pre-activation alone: not the gathered, the activated or the weighted rows."""
        experts, inputs = Experts(hidden=8, intermediate=6), make_inputs(hidden=8)
        given = {t.untyped_storage().data_ptr() for t in (*inputs, *experts.parameters())}
        kept: list[Tensor] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
            torch_mm(experts, *inputs)
        made = [t for t in kept if t.untyped_storage().data_ptr() not in given and t.is_floating_point()]
        assert [tuple(t.shape) for t in made] == [(TOKENS * TOP_K, 12)]


class TestAutocast:
    def test_as_eager_under_autocast(self, backend: Callable[..., Tensor], way: str) -> None:
        """The products in bfloat16, float32 parameters with float32 gradients.

        Eager adds a float32 bias in float32 where torch_mm rounds it to bfloat16, hence the floor of a rounding.
        """
        experts, inputs = Experts(**LAYOUTS[way], hidden=48, intermediate=32), make_inputs(tokens=64, hidden=48)
        with torch.no_grad():
            for parameter in experts.parameters():
                parameter.mul_(0.3)

        def cast(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
            def under(*args: Any) -> Tensor:
                with torch.autocast("cpu", torch.bfloat16):
                    return function(*args)

            return under

        expected, stock = exact(experts, inputs), run(cast(eager), experts, inputs)
        got, plain = run(cast(backend), experts, inputs), run(backend, experts, inputs)
        assert got.output.dtype == torch.float32
        assert all(g.dtype == torch.float32 for g in got.gradients.values())
        # in bfloat16 truly, and no worse than eager in it
        assert relative(got.output, plain.output.double()) > 1e-4
        assert_no_worse(got, stock, expected, floor=BF16 / 2)

    def test_float64_stays_float64(self, backend: Callable[..., Tensor], way: str) -> None:
        """As in torch's own products under autocast."""
        experts, inputs = Experts(**LAYOUTS[way]).double(), make_inputs()
        inputs = Inputs(inputs.hidden.double(), inputs.ids, inputs.shares.double())
        with torch.autocast("cpu", torch.bfloat16):
            got = run(backend, experts, inputs)
        assert_close(got, exact(experts, inputs), 1e-13)

    def test_switched_off_inside(self, backend: Callable[..., Tensor], way: str) -> None:
        experts, inputs = Experts(**LAYOUTS[way]), make_inputs()
        with torch.autocast("cpu", torch.bfloat16), torch.autocast("cpu", enabled=False):
            got = run(backend, experts, inputs)
        assert_close(got, exact(experts, inputs), LIMITS[torch.float32])


class TestLora:
    """peft's `target_parameters`: weights that a parametrization computes at each access."""

    peft = pytest.importorskip("peft")

    class Layer(nn.Module):
        def __init__(self, experts: Experts):
            super().__init__()
            self.experts = experts

    def test_parity(self, backend: Callable[..., Tensor], way: str) -> None:
        experts, inputs = Experts(**LAYOUTS[way]), make_inputs()
        base = copy.deepcopy(experts)
        weights = ["gate_up_proj" if experts.has_gate else "up_proj", "down_proj"]
        torch.manual_seed(0)
        settings = self.peft.LoraConfig(
            r=2,
            target_modules=[],
            target_parameters=[f"experts.{name}" for name in weights],
            init_lora_weights=False,
        )
        wrapped = self.peft.get_peft_model(self.Layer(experts), settings)
        adapters = {n: p for n, p in wrapped.named_parameters() if "lora_" in n}
        assert len(adapters) == 4
        outer = wrapped.base_model.model.experts

        def within(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
            """`function` on the experts, from inside peft's own wrappers, which set the parametrizations."""
            return lambda _, *args: call(outer, function, *args)

        def call(module: Any, function: Callable[..., Tensor], *args: Tensor) -> Tensor:
            experts.forward = lambda *inner: function(experts, *inner)  # type: ignore[method-assign]
            return module(*args)

        got = run(within(backend), wrapped, inputs)
        assert set(got.gradients) == {"hidden", "shares", *adapters}
        assert relative(got.output, run(dense, base, inputs).output.double()) > 1e-2  # the adapters do something
        wide = Inputs(inputs.hidden.double(), inputs.ids, inputs.shares.double())
        expected = run(within(dense), wrapped.double(), wide)
        assert_close(got, expected, LIMITS[torch.float32])


def test_a_gate_in_float32(backend: Callable[..., Tensor]) -> None:
    """beam's experts compute theirs so; one that does not round its result is rounded."""
    rounds = Experts(gate=lambda g, u: softcapped(g.float(), u.float()).bfloat16()).bfloat16()
    leaves = Experts(gate=lambda g, u: softcapped(g.float(), u.float())).bfloat16()
    inputs = make_inputs()
    inputs = inputs._replace(hidden=inputs.hidden.bfloat16())
    expected, got = run(backend, rounds, inputs), run(backend, leaves, inputs)
    assert torch.equal(got.output, expected.output)
    assert all(torch.equal(got.gradients[name], g) for name, g in expected.gradients.items())


def test_torch_mm_recognises_a_gate_again_when_it_changes() -> None:
    experts, inputs = Experts(), make_inputs()
    assert relative(torch_mm(experts, *inputs), exact(experts, inputs).output) <= 1e-6
    experts.act_fn = gelu
    assert relative(torch_mm(experts, *inputs), exact(experts, inputs).output) <= 1e-6


class Limited(Experts):
    limit = 2.0

    def _apply_gate(self, pre: Tensor) -> Tensor:
        gate, up = self.halves(pre)
        return silu(gate.clamp(max=self.limit)) * up.clamp(-self.limit, self.limit)


def test_torch_mm_recognises_a_gate_again_when_its_limit_changes() -> None:
    experts, inputs = Limited(), make_inputs()
    for limit in (2.0, 1.5, 4.0):
        experts.limit = limit
        assert relative(torch_mm(experts, *inputs), exact(experts, inputs).output) <= 1e-6
