"""Dispatchers on 2 ranks against one process, family by family, and what they hand to experts backends.

The conformance suite has the layouts, routings and edges; here are the families, whose blocks differ around the
experts.
"""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from hf_moe_conformance import ranks, zoo
from hf_moe_conformance.checks import dispatcher_ranks
from hf_moe_conformance.checks.dispatcher_ranks import Refused, Sharded
from packaging.version import Version
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from hf_moe_backends import (
    BackendConfig,
    BackendSpec,
    BackendUnavailable,
    get_moe_backend,
    reset_moe_backend,
    set_moe_backend,
)
from hf_moe_backends.builtin.dispatch.allgather import AllGather
from hf_moe_backends.discovery import Plugin
from hf_moe_backends.expert_parallel import Dispatched, takes_negative_ids
from hf_moe_backends.registry import Registry
from hf_moe_backends.selection import select
from hf_moe_backends.spec import KINDS
from hf_moe_backends.survey import survey

VERSION = Version(transformers.__version__)
LIMIT = 1e-5

FAMILIES = ("qwen3_moe", "mixtral", "gpt_oss", "deepseek_v3", "nemotron_h", "olmoe", "glm4_moe")
QUICK = ("qwen3_moe",)


def layouts() -> dict[str, dict[str, Any]]:
    """2 ranks that share a batch, and where this version can be right with it 2 that have one each."""
    if Version("5.19") > VERSION:
        return {"shared": {"tp_size": 2, "enable_expert_parallel": True}}
    shared = {"shared": {"tp_size": 2, "ep_size": 2}}
    # 5.20 to 5.22 make the experts' gradients too small there
    return shared | ({"own": {"fsdp_size": 2, "ep_size": 2}} if Version("5.23") <= VERSION else {})


# all_to_all is stock's own from 5.19 on
@pytest.mark.parametrize("dispatcher", ["allgather"] + ["all_to_all"] * (Version("5.19") > VERSION))
@pytest.mark.parametrize("layout", layouts())
@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in FAMILIES]
)
def test_is_one_process(family: str, layout: str, dispatcher: str, tmp_path: Path) -> None:
    if family == "nemotron_h" and Version("5.21") > VERSION:
        pytest.skip("Transformers has no EP plan for nemotron_h through 5.20")
    sizes = layouts()[layout]
    batches = sizes.get("fsdp_size", 1)
    model = zoo.build(family)
    model.save_pretrained(tmp_path)
    name = type(model).__name__
    model = getattr(transformers, name).from_pretrained(tmp_path, experts_implementation="grouped_mm").train()
    inputs, cotangents, logits = [], [], []
    for batch in range(batches):
        inputs.append(zoo.sample_inputs(model, length=9 + 4 * batch, seed=batch))
        y = zoo.output(model, inputs[-1])
        cotangents.append(torch.randn(y.shape, generator=torch.Generator().manual_seed(batch)))
        torch.autograd.backward(y, cotangents[-1])
        logits.append(y.detach())
    expected = {n: None if p.grad is None else p.grad for n, p in model.named_parameters()}

    sharded = Sharded(
        path=str(tmp_path),
        model_class=name,
        dtype=torch.float32,
        sizes=sizes,
        batches=batches,
        backend={"dispatcher": dispatcher},
        training=True,
    )
    of = [rank * batches // 2 for rank in range(2)]
    found = ranks.world("cpu", 2).run(
        dispatcher_ranks.whole_model, [(sharded, inputs[of[rank]], cotangents[of[rank]]) for rank in range(2)]
    )
    for rank, got in enumerate(found):
        assert not isinstance(got, Refused), got
        assert relative(got["y"], logits[of[rank]]) < LIMIT
        for parameter, gradient in expected.items():
            assert (got[parameter] is None) == (gradient is None), parameter
            if gradient is not None:
                assert relative(got[parameter], gradient) < LIMIT, parameter


def relative(got: Tensor, expected: Tensor) -> float:
    return float((got - expected).norm() / expected.norm().clamp_min(1e-12))


def there_and_back(sharded: Sharded, inputs: dict[str, Tensor]) -> dict[str, Any]:
    """On each rank: what runs under stock, under allgather, under the stock name and after a reset."""
    model = dispatcher_ranks.load(sharded)
    model.eval()

    def forwards() -> list[Any]:
        return [vars(module).get("forward") for module in model.modules()]

    def logits() -> Tensor:
        with torch.no_grad():
            return zoo.output(model, inputs)

    before, stock = forwards(), logits()
    set_moe_backend(model, BackendConfig(dispatcher="allgather"))
    changed = sum(one is not other for one, other in zip(before, forwards(), strict=True))
    ours = logits()
    name = "all_reduce" if Version("5.19") > VERSION else "all_to_all"
    set_moe_backend(model, BackendConfig(dispatcher=name))
    named = get_moe_backend(model).dispatcher == name
    again = logits()
    reset_moe_backend(model)
    same = all(one is other for one, other in zip(before, forwards(), strict=True))
    return {
        "changed": changed,
        "ours": relative(ours, stock),
        "named": named,
        "again": relative(again, stock),
        "same": same,
        "after": torch.equal(logits(), stock),
    }


def test_swapped_and_restored(tmp_path: Path) -> None:
    model = zoo.build("qwen3_moe")
    model.save_pretrained(tmp_path)
    sharded = Sharded(
        path=str(tmp_path),
        model_class=type(model).__name__,
        dtype=torch.float32,
        sizes=layouts()["shared"],
        batches=1,
        backend={},
        training=False,
    )
    arguments = [(sharded, zoo.sample_inputs(model))] * 2
    routers = 2 if Version("5.19") > VERSION else 0  # those of 5.17 and 5.18 slice what they choose
    for found in ranks.world("cpu", 2).run(there_and_back, arguments):
        assert found["changed"] == 2 + routers
        assert found["ours"] < LIMIT and found["again"] < LIMIT
        assert found["named"] and found["same"] and found["after"]


def handed(lengths: list[int]) -> dict[str, Tensor]:
    """On each rank: what its experts get of 4 experts, 2 a rank, from batches of these lengths."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("tp", "ep"))
    experts = nn.Module()
    experts.num_experts = 2  # type: ignore[assignment]
    dispatcher = AllGather(experts, mesh["ep"], mesh["tp"])
    tokens = lengths[dist.get_rank()]
    ids = torch.tensor([[0, 3], [2, 3], [1, 0]])[:tokens]
    rows, ids, weights, state = dispatcher.dispatch(torch.ones(tokens, 4), ids, torch.ones(tokens, 2))
    return {"ids": ids, "weights": weights, "back": dispatcher.combine(rows, state)}


@pytest.mark.parametrize("lengths", [[3, 1], [0, 2], [0, 0]])
def test_a_pair_for_another_rank_is_a_sentinel_without_weight(lengths: list[int]) -> None:
    found = ranks.world("cpu", 2).run(handed, [(lengths,)] * 2)
    longest = max(1, *lengths)
    for rank, got in enumerate(found):
        assert got["ids"].shape == (2 * longest, 2) and got["back"].shape == (lengths[rank], 4)
        assert torch.equal(got["weights"], (got["ids"] < 2).float())
    whole = sum(int((got["ids"] < 2).sum()) for got in found)
    assert whole == 2 * sum(lengths)  # every pair is one rank's


@pytest.mark.parametrize(
    "version, sizes, refused",
    [
        ("5.22.0", (2, 1, 2), True),
        ("5.20.0", (2, 2, 4), True),
        ("5.22.0", (4, 1, 2), False),
        ("5.22.0", (1, 2, 2), False),
        ("5.23.0", (2, 1, 2), False),
        ("5.19.0", (2, 1, 2), False),
    ],
)
def test_gradients_that_stock_makes_too_small_are_refused(
    version: str, sizes: tuple[int, int, int], refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = zoo.build("qwen3_moe")
    for layer in model.model.layers:
        layer.mlp.experts._is_expert_parallel = True
    # of the module that survey has: Transformers puts another in its place in sys.modules
    monkeypatch.setattr("hf_moe_backends.survey.transformers.__version__", version)
    names = ("fsdp_size", "tp_size", "ep_size")
    model.config.distributed_config = SimpleNamespace(**dict(zip(names, sizes, strict=True)))
    blocked = [site.demand.blocked for site in survey(model)["dispatcher"]]
    assert len(blocked) == 2 and len(set(blocked)) == 1
    if refused:
        assert re.search(rf"gradients {sizes[0]} times too small .*transformers>=5\.23", str(blocked[0]))
    else:
        assert blocked == [None, None]


@pytest.mark.parametrize("hands, fits", [(frozenset(), True), (frozenset({"sentinels"}), False)])
def test_experts_must_take_what_the_dispatcher_hands(hands: frozenset[str], fits: bool) -> None:
    """Whether they are asked for with it or stay as they are."""

    def spec(kind: Any, name: str, **more: Any) -> BackendSpec:
        return BackendSpec(kind=kind, name=name, target="a:b", **more)

    backends = spec("dispatcher", "carries", hands=hands), spec("experts", "plain")  # it declares no sentinels
    known = Registry([Plugin(distribution="mine", version="1", entry_point="mine", specs=backends)])
    model = zoo.build("qwen3_moe")
    for layer in model.model.layers:
        layer.mlp.experts._is_expert_parallel = True
    sites = survey(model)
    for config in (BackendConfig(dispatcher="carries", experts="plain"), BackendConfig(dispatcher="carries")):
        if fits:
            assert select(config, sites, known, current={"experts": "plain"})[KINDS.index("dispatcher")].backend
        else:
            with pytest.raises(BackendUnavailable, match="does not support expert-parallel sentinels"):
                select(config, sites, known, current={"experts": "plain"})


class Experts(nn.Module):
    """It keeps what it was called with."""

    num_experts = 4

    def __init__(self, implementation: str):
        super().__init__()
        self.config = type("Config", (), {"_experts_implementation": implementation})()

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        self.called = x, ids, weights
        return x * weights.sum(-1, keepdim=True)


class Negative:
    """It hands on what it gets, -1 included."""

    def __init__(self, *arguments: Any):
        pass

    def dispatch(self, x: Tensor, ids: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        return x, ids, weights, None

    def combine(self, y: Tensor, state: None) -> Tensor:
        return y


@pytest.mark.parametrize("implementation, handed", [("torch_mm", -1), ("grouped_mm", 4), ("unknown", 4)])
def test_ids_of_minus_one_become_sentinels_for_who_does_not_declare_them(implementation: str, handed: int) -> None:
    experts = Experts(implementation)
    mesh: Any = None
    ids = torch.tensor([[0, -1], [3, 2]])
    Dispatched(Negative, True, experts, mesh, mesh)(torch.ones(2, 3), ids, torch.ones(2, 2))
    assert experts.called[1].tolist() == [[0, handed], [3, 2]]
    assert takes_negative_ids(implementation) == (handed == -1)


def test_without_rows_the_backward_runs_through_the_experts() -> None:
    experts = Experts("torch_mm")
    mesh: Any = None
    x, weights = torch.ones(0, 3, requires_grad=True), torch.ones(0, 2, requires_grad=True)
    y = Dispatched(Negative, False, experts, mesh, mesh)(x, torch.empty(0, 2, dtype=torch.long), weights)
    assert y.shape == (0, 3)
    row, ids, share = experts.called
    assert row.shape == (1, 3) and ids.tolist() == [[0]] and share.tolist() == [[0.0]]
    y.sum().backward()
    assert x.grad is not None and weights.grad is not None
