"""`loss="chunked"`, and the lazy logits under every fused loss."""

from __future__ import annotations

import copy
import pickle
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hf_moe_conformance import zoo
from torch import Tensor, nn

import hf_moe_backends.survey as survey
from hf_moe_backends import (
    BackendConfig,
    BackendUnavailable,
    PlanError,
    reset_moe_backend,
    set_moe_backend,
)
from hf_moe_backends.builtin.loss.chunked import linear_cross_entropy
from hf_moe_backends.kernels.cross_entropy import cross_entropy_
from hf_moe_backends.lazy_logits import LazyLogits, lazy_forward

CHUNKED = BackendConfig(loss="chunked", options={"loss.chunked": {"chunk": 5}})


def families_with_a_head() -> list[str]:
    return [f for f in zoo.families() if survey.survey(zoo.build(f))["loss"]]


def train(model: Any, inputs: dict[str, Tensor], **how: Any) -> dict[str, Tensor]:
    model.train()
    model.zero_grad()
    torch.manual_seed(0)  # of routers that add noise in training
    loss = model(**inputs, labels=inputs["input_ids"], **how).loss
    loss.backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return {"loss": loss.detach(), **found}


def assert_same(got: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        error = (got[name] - value).abs().max().item()
        # where terms cancel, a gradient is as exact as its terms: the floor is float32's epsilon beside a loss of one
        assert error <= max(1e-5 * value.abs().max().item(), 1.2e-7), f"{name}: {error}"


def operands(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    hidden, weight, bias = torch.randn(17, 8), torch.randn(29, 8), torch.randn(29)
    labels = torch.randint(0, 29, (17,))
    labels[3:6] = -100
    return *(t.to(dtype).requires_grad_() for t in (hidden, weight, bias)), labels  # type: ignore[return-value]


class TestLinearCrossEntropy:
    @pytest.mark.parametrize("chunk", [1, 5, 17, 1024])
    @pytest.mark.parametrize("scale, softcap", [(1.0, None), (0.3, None), (1.0, 2.0), (0.7, 3.0)])
    @pytest.mark.parametrize("items", [None, 40, torch.tensor(40)], ids=["mean", "int", "tensor"])
    @pytest.mark.parametrize("biased", [False, True])
    def test_it_is_the_formula(self, chunk: int, scale: float, softcap: float | None, items: Any, biased: bool) -> None:
        hidden, weight, bias, labels = operands()
        of = [hidden, weight] + [bias] * biased
        value = scale * F.linear(hidden, weight, bias if biased else None)
        if softcap:
            value = softcap * torch.tanh(value / softcap)
        expected = F.cross_entropy(value, labels, reduction="mean" if items is None else "sum")
        expected = expected if items is None else expected / items
        loss = linear_cross_entropy(
            hidden, weight, labels, bias=bias if biased else None, ignore_index=-100, num_items=items, scale=scale,
            softcap=softcap, chunk=chunk,
        )  # fmt: skip
        torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
        for got, want in zip(torch.autograd.grad(3 * loss, of), torch.autograd.grad(3 * expected, of), strict=True):
            torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-14)

    def test_no_label_counts(self) -> None:
        hidden, weight, _, labels = operands(torch.float32)
        labels.fill_(-100)
        how: dict[str, Any] = {"bias": None, "ignore_index": -100, "scale": 1.0, "softcap": None, "chunk": 4}
        loss = linear_cross_entropy(hidden, weight, labels, num_items=None, **how)
        assert loss.isnan()  # as stock's mean of nothing, whose gradients are zero as well
        loss.backward()
        assert not hidden.grad.any() and not weight.grad.any()  # type: ignore[union-attr]
        assert linear_cross_entropy(hidden, weight, labels, num_items=3, **how) == 0

    def test_backward_twice(self) -> None:
        hidden, weight, _, labels = operands()
        how: dict[str, Any] = {"bias": None, "ignore_index": -100, "scale": 1.0, "softcap": None, "chunk": 4}
        loss = linear_cross_entropy(hidden, weight, labels, num_items=None, **how)
        loss.backward(retain_graph=True)
        once = weight.grad.clone()  # type: ignore[union-attr]
        loss.backward()
        torch.testing.assert_close(weight.grad, 2 * once)
        with pytest.raises(RuntimeError, match="second time"):
            loss.backward()

    def test_the_logits_stay_without_a_gradient(self) -> None:
        hidden, weight, _, labels = operands()
        logits = (hidden @ weight.t()).detach()
        before = logits.clone()
        cross_entropy_(logits, labels, gradient=False, ignore_index=-100)
        assert torch.equal(logits, before)


@pytest.mark.parametrize("family", families_with_a_head())
def test_every_family_with_a_head(family: str) -> None:
    model = zoo.build(family)
    inputs = zoo.sample_inputs(model)
    expected = train(model, inputs)
    set_moe_backend(model, CHUNKED)
    assert_same(train(model, inputs), expected)
    assert_same(train(model, inputs, num_items_in_batch=7), train_stock(model, inputs, num_items_in_batch=7))
    assert isinstance(model(**inputs, labels=inputs["input_ids"]).logits, LazyLogits)


def train_stock(model: Any, inputs: dict[str, Tensor], **how: Any) -> dict[str, Tensor]:
    reset_moe_backend(model)
    found = train(model, inputs, **how)
    set_moe_backend(model, CHUNKED)
    return found


class TestLazyLogits:
    @pytest.fixture
    def model(self) -> Any:
        model = zoo.build("qwen3_moe").train()
        set_moe_backend(model, CHUNKED)
        return model

    def outputs(self, model: Any) -> tuple[Any, Tensor]:
        inputs = zoo.sample_inputs(model)
        lazy = model(**inputs, labels=inputs["input_ids"])
        reset_moe_backend(model)
        real = model(**inputs).logits
        set_moe_backend(model, CHUNKED)
        return lazy, real

    def test_used_they_are_the_logits(self, model: Any) -> None:
        lazy, real = self.outputs(model)
        assert isinstance(lazy.logits, LazyLogits)
        assert lazy.logits.shape == real.shape and lazy.logits.dtype == real.dtype and len(lazy.logits) == len(real)
        assert lazy.logits.requires_grad and not lazy.logits.computed
        assert torch.equal(lazy.logits.argmax(-1), real.argmax(-1))
        assert lazy.logits.computed
        assert torch.equal(lazy.logits[:, -1] + 0, real[:, -1])
        assert torch.equal(pickle.loads(pickle.dumps(lazy.logits.detach())), real)
        assert "tensor" in repr(lazy.logits)

    def test_they_have_their_gradient(self, model: Any) -> None:
        lazy, real = self.outputs(model)
        weight = model.lm_head.weight
        with torch.no_grad():
            lazy.logits.sum()  # computed here, they still have a graph
        (got,) = torch.autograd.grad(lazy.logits.square().sum(), weight)
        (expected,) = torch.autograd.grad(real.square().sum(), weight)
        torch.testing.assert_close(got, expected)

    def test_after_a_step_they_are_gone(self, model: Any) -> None:
        lazy, _ = self.outputs(model)
        with torch.no_grad():
            model.lm_head.weight.add_(1)
        with pytest.raises(RuntimeError, match=r"Read them before optimizer\.step"):
            lazy.logits.sum()

    def test_steps_are_followed(self) -> None:
        head = nn.Linear(8, 11, bias=False)
        x = torch.randn(2, 3, 8)
        logits: Any = lazy_forward(head, x)
        real = head(x)
        capped = torch.tanh((logits[..., :9] * 3 / 6).float() / 5) * 5
        assert isinstance(capped, LazyLogits) and not capped.computed and capped.shape == (2, 3, 9)
        assert (capped.chain.scale, capped.chain.softcap) == (pytest.approx(0.5), 5)
        torch.testing.assert_close(capped + 0, torch.tanh(real[..., :9] * 0.5 / 5) * 5)
        assert type(logits[..., 1:]) is Tensor and type(logits * torch.ones(())) is Tensor
        assert type(logits.clamp(0)) is Tensor
        assert type(logits / 0) is Tensor and (logits / 0).isinf().all()  # no scale stands for it
        assert type(logits * 0) is Tensor

    def test_gradient_hooks_wait(self, model: Any) -> None:
        lazy, _ = self.outputs(model)
        seen: list[Tensor] = []
        lazy.logits.register_hook(lambda grad: seen.append(grad))
        assert not lazy.logits.computed
        lazy.loss.backward()
        assert not seen
        lazy, _ = self.outputs(model)
        lazy.logits.register_hook(lambda grad: seen.append(grad))
        lazy.logits.sum().backward()
        assert len(seen) == 1

    def test_evaluation_is_stock(self, model: Any) -> None:
        model.eval()
        inputs = zoo.sample_inputs(model)
        with torch.no_grad():
            out = model(**inputs, labels=inputs["input_ids"])
        assert type(out.logits) is Tensor
        reset_moe_backend(model)
        with torch.no_grad():
            assert torch.equal(out.loss, model(**inputs, labels=inputs["input_ids"]).loss)

    def test_inference_mode(self, model: Any) -> None:
        inputs = zoo.sample_inputs(model)
        with torch.inference_mode():
            assert type(model(**inputs, labels=inputs["input_ids"]).logits) is Tensor

    def test_a_head_that_is_wrapped_later_is_told(self, model: Any) -> None:
        class Wrapped(nn.Module):
            def __init__(self, head: nn.Module):
                super().__init__()
                self.head = head

            def forward(self, x: Tensor) -> Tensor:
                return self.head(x) + 0

        inputs = zoo.sample_inputs(model)
        model.lm_head = Wrapped(model.lm_head)
        with pytest.warns(UserWarning, match="saved nothing"):
            model(**inputs, labels=inputs["input_ids"])

    def test_float64_under_autocast(self) -> None:
        """Autocast leaves float64 alone."""
        head = nn.Linear(8, 11).double()
        x = torch.randn(2, 3, 8, dtype=torch.float64)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits, real = lazy_forward(head, x), head(x)
        assert isinstance(logits, LazyLogits) and logits.dtype == real.dtype
        assert logits.operands()[0].dtype == torch.float64 and torch.equal(logits + 0, real)

    def test_reading_them_first_is_told(self, model: Any) -> None:
        inputs = zoo.sample_inputs(model)
        logits = model(**inputs).logits
        logits.sum()
        with pytest.warns(UserWarning, match="saved nothing"):
            loss = model.loss_function(logits, inputs["input_ids"], model.config.vocab_size)
        assert loss.requires_grad

    def test_a_copy_is_its_own(self, model: Any) -> None:
        twin = copy.deepcopy(model)
        inputs = zoo.sample_inputs(model)
        twin(**inputs, labels=inputs["input_ids"]).loss.backward()
        assert twin.lm_head.weight.grad is not None and model.lm_head.weight.grad is None
        reset_moe_backend(twin)
        assert "forward" not in vars(twin.lm_head) and "forward" in vars(model.lm_head)

    def test_under_autocast(self, model: Any) -> None:
        inputs = zoo.sample_inputs(model)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            lazy = model(**inputs, labels=inputs["input_ids"])
        assert isinstance(lazy.logits, LazyLogits) and lazy.logits.dtype == torch.bfloat16
        lazy.loss.backward()
        got = model.lm_head.weight.grad.clone()
        reset_moe_backend(model)
        model.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            stock = model(**inputs, labels=inputs["input_ids"])
        stock.loss.backward()
        torch.testing.assert_close(lazy.loss, stock.loss, rtol=1e-3, atol=0)
        assert got.dtype == torch.float32
        torch.testing.assert_close(got, model.lm_head.weight.grad, rtol=2e-2, atol=2e-2 * got.abs().max().item())


class TestRefusals:
    @pytest.mark.parametrize("what, match", [("hook", "has hooks or a forward"), ("class", "is a .*Odd")])
    def test_heads(self, what: str, match: str) -> None:
        class Odd(nn.Linear):
            pass

        model = zoo.build("qwen3_moe")
        if what == "hook":
            model.lm_head.register_forward_hook(lambda *args: None)
        else:
            model.lm_head.__class__ = Odd
        with pytest.raises(BackendUnavailable, match=match):
            set_moe_backend(model, BackendConfig(loss="chunked"))
        assert "forward" not in vars(model.lm_head)

    def test_a_loss_of_the_users_own(self) -> None:
        model = zoo.build("qwen3_moe")
        model.loss_function = lambda *args, **kwargs: 0
        with pytest.raises(BackendUnavailable, match="is not Transformers' ForCausalLMLoss"):
            set_moe_backend(model, BackendConfig(loss="chunked"))

    def test_a_head_hooked_since(self) -> None:
        model = zoo.build("qwen3_moe")
        set_moe_backend(model, BackendConfig(loss="chunked"))
        inner = model.lm_head.forward
        model.lm_head.forward = lambda *args: inner(*args)
        with pytest.raises(PlanError, match="the output head was hooked since"):
            reset_moe_backend(model)

    def test_reset_restores_everything(self) -> None:
        model = zoo.build("qwen3_moe")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            stock = model.loss_function
        set_moe_backend(model, BackendConfig(loss="chunked"))
        reset_moe_backend(model)
        assert "forward" not in vars(model.lm_head) and "_loss_function" not in vars(model)
        assert model.loss_function is stock
