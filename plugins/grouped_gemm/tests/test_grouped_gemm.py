"""The plugin without its library: what it refuses, and its arithmetic on a stand-in that is as strict as the library.

On a GPU with the library `moe-conformance run experts=grouped_gemm --device cuda` is its test.
"""

from __future__ import annotations

import importlib
import sys
import types
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import hf_moe_backends_grouped_gemm as plugin
import pytest
import torch
from hf_moe_conformance.zoo import build
from torch import Tensor

from hf_moe_backends import BackendConfig, BackendUnavailable, set_moe_backend
from hf_moe_backends.bench import layer as bench
from hf_moe_backends.builtin.experts.torch_mm import torch_mm
from hf_moe_backends.kernels.grouped import PRODUCTS

SMALL: dict[str, dict[str, Any]] = {
    "qwen3-30b-a3b": {"hidden": 64, "intermediate": 48, "count": 8, "top_k": 3},
    "gpt-oss-20b": {"hidden": 64, "intermediate": 48, "count": 8, "top_k": 3},  # biased, stored (in, out)
    "nemotron-3-nano": {"hidden": 64, "intermediate": 48, "count": 8, "top_k": 2},  # without a gate
}


class StandIn:
    """`grouped_gemm.backend` in plain torch, with the library's demands on its arguments."""

    def __init__(self) -> None:
        self.calls: list[tuple[bool, bool]] = []

    def gmm(
        self, a: Tensor, b: Tensor, batch_sizes: Tensor, trans_a: bool = False, trans_b: bool = False, c: Any = None
    ) -> Tensor:
        assert a.dtype == b.dtype == c.dtype == torch.bfloat16
        assert batch_sizes.dtype == torch.int64
        assert batch_sizes.device.type == "cpu"
        assert int(batch_sizes.sum()) == a.shape[0]
        for tensor in (a, b, c):
            assert tensor.is_contiguous()
            assert tensor.data_ptr() % 16 == 0
        self.calls.append((trans_a, trans_b))
        start = 0
        for expert, size in enumerate(batch_sizes.tolist()):
            here = slice(start, start + size)
            if trans_a:
                if size:  # what the library leaves of an empty group is its own affair
                    c[expert] = a[here].t() @ b[here]
            else:
                c[here] = a[here] @ (b[expert].t() if trans_b else b[expert])
            start += size
        out: Tensor = c
        return out


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    stand_in = StandIn()
    module: Any = types.ModuleType("grouped_gemm")
    module.backend = stand_in
    monkeypatch.setitem(sys.modules, "grouped_gemm", module)
    yield stand_in
    sys.modules.pop("hf_moe_backends_grouped_gemm.products", None)
    PRODUCTS.pop("grouped_gemm", None)


def _experts(geometry: str) -> Any:
    experts = bench._build(replace(bench.GEOMETRIES[geometry], **SMALL[geometry]), "cpu", torch.bfloat16)
    torch.manual_seed(0)
    for parameter in experts.parameters():
        parameter.data.normal_(std=0.2)
    return experts


def _run(function: Any, experts: Any, ids: Tensor) -> list[Tensor]:
    torch.manual_seed(1)
    x = torch.randn(ids.shape[0], 64, dtype=torch.bfloat16, requires_grad=True)
    shares = torch.rand(ids.shape, requires_grad=True)
    experts.zero_grad()
    out = function(experts, x, ids, shares)
    out.backward(torch.randn(out.shape, dtype=out.dtype))
    return [out.detach(), x.grad, shares.grad, *(p.grad.clone() for p in experts.parameters())]  # type: ignore[list-item]


@pytest.mark.parametrize("geometry", SMALL)
def test_it_computes_what_torch_mm_computes(geometry: str, library: StandIn) -> None:
    function = importlib.import_module("hf_moe_backends_grouped_gemm.products").grouped_gemm
    experts = _experts(geometry)
    ids = torch.randint(0, 6, (40, SMALL[geometry]["top_k"]))  # experts 6 and 7 without rows
    ids[3] = 8  # pairs of other ranks
    for got, expected in zip(_run(function, experts, ids), _run(torch_mm, experts, ids), strict=True):
        torch.testing.assert_close(got, expected, rtol=2e-2, atol=2e-2 * expected.abs().max().item())
    assert len(library.calls) == 6
    assert library.calls.count((True, False)) == 2


def test_without_a_row_it_calls_nothing(library: StandIn) -> None:
    function = importlib.import_module("hf_moe_backends_grouped_gemm.products").grouped_gemm
    experts = _experts("qwen3-30b-a3b")
    for ids in (torch.full((4, 3), 8), torch.zeros((0, 3), dtype=torch.long)):
        out, *gradients = _run(function, experts, ids)
        assert not any(tensor.any() for tensor in (out, *gradients))
    assert not library.calls


def test_sizes_are_asked_for_once_a_pass(library: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    products = importlib.import_module("hf_moe_backends_grouped_gemm.products")
    asked = []
    cpu = Tensor.cpu
    monkeypatch.setattr(Tensor, "cpu", lambda self: asked.append(self) or cpu(self))
    _run(products.grouped_gemm, _experts("qwen3-30b-a3b"), torch.randint(0, 8, (16, 3)))
    assert len(asked) <= 2


def test_it_is_refused_without_its_library() -> None:
    model = build("qwen3_moe").bfloat16()
    with pytest.raises(BackendUnavailable, match=r"pip install 'hf-moe-backends-grouped-gemm\[cuda\]'"):
        set_moe_backend(model, BackendConfig(experts="grouped_gemm"))


def test_what_it_claims() -> None:
    (spec,) = plugin.hf_moe_backends_register()
    assert spec.capabilities.dtypes == {"bfloat16"}
    assert spec.capabilities.host_sync
    assert spec.capabilities.alignment == 8
