"""Sharded models from loading to resuming, on ranks against one process."""

from __future__ import annotations

import datetime
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from hf_moe_conformance import ranks, zoo
from packaging.version import Version
from torch import Tensor, nn
from torch.distributed.checkpoint import load, save
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.tensor import DTensor

from hf_moe_backends import (
    AutoModelForCausalLM,
    BackendConfig,
    ConfigError,
    PlanError,
    RanksDisagree,
    agreement,
    clip_grad_norm_,
    get_moe_backend,
    set_moe_backend,
)
from hf_moe_backends.builtin.dispatch.allgather import AllGather
from hf_moe_backends.loading import distributed_config

VERSION = Version(transformers.__version__)
LIMIT = 1e-5
OURS = BackendConfig(experts="torch_mm", dispatcher="allgather")

Sizes = dict[str, int]


def layouts(world: int) -> dict[str, Sizes]:
    """Those of so many ranks that this version of Transformers is right with."""
    found = {}
    if world == 2 or Version("5.19") > VERSION:  # the tiny models have 2 key-value heads to split
        found["shared"] = {"tp_size": world, "ep_size": world, "fsdp_size": 1}
    if world == 4 and Version("5.19") <= VERSION:
        found["tp x ep"] = {"fsdp_size": 2, "tp_size": 2, "ep_size": 2}
    if world == 4 and Version("5.20") <= VERSION:
        found["ep < fsdp"] = {"fsdp_size": 4, "ep_size": 2}
    if Version("5.23") <= VERSION:
        found["ep == fsdp"] = {"ep_size": world}
    return found


def checkpoint(folder: Path, family: str = "qwen3_moe") -> str:
    zoo.build(family).save_pretrained(folder)
    return str(folder)


def loaded(path: str, sizes: Sizes | None = None, backend: BackendConfig | None = None) -> Any:
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    # eager crashes under expert parallelism in some versions
    return AutoModelForCausalLM.from_pretrained(
        path,
        backend=backend or BackendConfig(),
        dtype=torch.float32,
        **({"experts_implementation": "grouped_mm"} if backend is None or backend.experts is None else {}),
        **(sizes or {}),
    )


def batch_of(sizes: Sizes) -> tuple[int, int]:
    """Which batch this rank has, of how many: the ranks of a tensor-parallel group share one."""
    tp = sizes.get("tp_size", 1)
    return dist.get_rank() // tp, dist.get_world_size() // tp


def whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().cpu().clone()


def relative(got: Tensor, expected: Tensor) -> float:
    return float((got - expected).norm() / expected.norm().clamp_min(1e-12))


# Loading


def load_and_look(path: str, sizes: Sizes) -> dict[str, Any]:
    model = loaded(path, sizes, OURS)
    here = sum(p.to_local().numel() if isinstance(p, DTensor) else p.numel() for p in model.parameters())
    experts = zoo.experts_modules(model)[0]
    inputs = zoo.sample_inputs(model)
    with torch.no_grad():
        logits = zoo.output(model, inputs)
    return {
        "classes": [c.__name__ for c in type(model).__mro__],  # fully_shard makes a subclass
        "backend": get_moe_backend(model),
        "here": here,
        "experts": int(experts.num_experts),
        "logits": logits,
    }


@pytest.mark.parametrize("layout", layouts(2))
def test_loads_in_one_call(layout: str, tmp_path: Path) -> None:
    path, sizes = checkpoint(tmp_path), layouts(2)[layout]
    stock = loaded(path)
    with torch.no_grad():
        expected = zoo.output(stock, zoo.sample_inputs(stock))
    total = sum(p.numel() for p in stock.parameters())
    for found in ranks.world("cpu", 2).run(load_and_look, [(path, sizes)] * 2):
        assert type(stock).__name__ in found["classes"] and found["backend"] == OURS
        assert found["experts"] == zoo.experts_modules(stock)[0].num_experts // 2
        assert found["here"] < total
        assert relative(found["logits"], expected) < LIMIT


def tell_torchrun(monkeypatch: pytest.MonkeyPatch, world: int) -> None:
    monkeypatch.setenv("WORLD_SIZE", str(world))


@pytest.mark.parametrize(
    "version, world, sizes, said",
    [
        ("5.24.0", 1, {"ep_size": 8}, r"ep_size=8 is for 8 processes .* there is 1\. .* torchrun --nproc-per-node 8"),
        ("5.24.0", 4, {"fsdp_size": 2}, r"fsdp_size=2 is for 2 processes .* there are 4"),
        ("5.24.0", 4, {"ep_size": 3}, r"ep_size must divide fsdp_size \* tp_size = 4"),
        ("5.24.0", 4, {"ep_size": 1, "tp_size": 3}, r"for 3 processes"),
        ("5.24.0", 8, {"ep_size": 2, "tp_size": 4}, r"ep_size must be a multiple of tp_size=4"),
        ("5.24.0", 4, {"ep_size": 0}, r"ep_size=0 must be an int of at least 1"),
        ("5.24.0", 4, {"ep_size": "4"}, r"ep_size='4' must be an int"),
        ("5.22.0", 4, {"ep_size": 4}, r"gradients 4 times too small .*transformers>=5\.23"),
        ("5.19.0", 4, {"ep_size": 2}, r"has ep_size == tp_size only"),
        ("5.18.0", 2, {"ep_size": 2}, r"only over ranks that share a batch\. Use tp_size=2, fsdp_size=1, ep_size=2"),
    ],
)
def test_sizes_that_cannot_be(
    version: str, world: int, sizes: dict[str, Any], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tell_torchrun(monkeypatch, world)
    monkeypatch.setattr("hf_moe_backends.loading.transformers.__version__", version)
    with pytest.raises(ConfigError, match=said):
        AutoModelForCausalLM.from_pretrained("nowhere", **sizes)


@pytest.mark.skipif(Version("5.23") > VERSION, reason="the sizes of older versions are other ones")
@pytest.mark.parametrize(
    "world, sizes, found",
    [
        (8, {"ep_size": 8}, (8, 8, 1)),
        (8, {"ep_size": 4, "tp_size": 2}, (4, 4, 2)),
        (8, {"fsdp_size": 8}, (1, 8, 1)),
        (8, {"fsdp_size": 1, "tp_size": 8, "ep_size": 8}, (8, 1, 8)),
    ],
)
def test_sizes_left_out(world: int, sizes: Sizes, found: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    tell_torchrun(monkeypatch, world)
    config = distributed_config(**sizes)
    assert (config.ep_size, config.fsdp_size, config.tp_size) == found


@pytest.mark.parametrize("beside", [{"distributed_config": {}}, {"device_map": "auto"}, {"tp_plan": "auto"}])
def test_sizes_beside_what_says_the_same(beside: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"{next(iter(beside))}= and ep_size= or fsdp_size="):
        AutoModelForCausalLM.from_pretrained("nowhere", ep_size=2, **beside)


# Agreement


def fails(*arguments: Any, **options: Any) -> None:
    raise ValueError("no buffer on this rank")


def set_on(path: str, backend: dict[str, Any], how: str) -> tuple[str, bool]:
    """What this rank is told, and whether its model is as it was."""
    model = loaded(path, layouts(2)["shared"])
    before = [vars(module).get("forward") for module in model.modules()]
    agreement.PATIENCE = datetime.timedelta(seconds=3)
    if how == "absent" and dist.get_rank() == 1:
        time.sleep(5)
        return "", True
    if how == "dies" and dist.get_rank() == 1:
        os._exit(9)
    failing = pytest.MonkeyPatch()
    if how == "constructor" and dist.get_rank() == 1:
        failing.setattr(AllGather, "__init__", fails)
    try:
        set_moe_backend(model, BackendConfig.from_dict(backend))
        told = ""
    except (RanksDisagree, ConfigError, PlanError) as error:
        told = f"{type(error).__name__}: {error}"
    finally:
        failing.undo()
    after = [vars(module).get("forward") for module in model.modules()]
    same = all(one is other for one, other in zip(before, after, strict=True))
    return told, same and get_moe_backend(model) == BackendConfig()


class TestAgreement:
    """Ranks that have the experts together set the same, or none of them does."""

    def run(self, folder: Path, backends: Sequence[dict[str, Any]], how: str = "") -> list[tuple[str, bool]]:
        path = checkpoint(folder)
        return ranks.world("cpu", 2).run(set_on, [(path, backend, how) for backend in backends])

    def test_another_config(self, tmp_path: Path) -> None:
        found = self.run(tmp_path, [{"dispatcher": "allgather"}, {"dispatcher": "allgather", "experts": "loop"}])
        for rank, (told, same) in enumerate(found):
            assert same
            assert re.match(rf"RanksDisagree: .* rank {1 - rank} differ from rank {rank}, .*experts: ", told)
            assert "experts: loop" in told and "experts: as it is" in told

    def test_another_option(self, tmp_path: Path) -> None:
        options = {"dispatcher.allgather": {"equal_lengths": True}}
        found = self.run(tmp_path, [{"dispatcher": "allgather"}, {"dispatcher": "allgather", "options": options}])
        assert all(same and "'equal_lengths': True" in told for told, same in found)

    def test_a_config_that_is_refused_on_one_rank(self, tmp_path: Path) -> None:
        (told, same), (own, also) = self.run(tmp_path, [{"dispatcher": "allgather"}, {"dispatcher": "nowhere"}])
        assert same and also
        assert told.startswith("RanksDisagree: rank 1 failed") and "dispatcher='nowhere' is not a known backend" in told
        assert own.startswith("ConfigError")

    def test_a_constructor_that_raises_on_one_rank(self, tmp_path: Path) -> None:
        (told, same), (own, also) = self.run(tmp_path, [{"dispatcher": "allgather"}] * 2, "constructor")
        assert same and also
        assert told.startswith("RanksDisagree: rank 1 failed") and "no buffer on this rank" in told
        assert own.startswith("PlanError") and "no buffer on this rank" in own

    def test_a_rank_that_does_not_come(self, tmp_path: Path) -> None:
        (told, same), _ = self.run(tmp_path, [{"dispatcher": "allgather"}] * 2, "absent")
        ranks.world("cpu", 2).close()  # what the one waits for is still under way
        assert same and told.startswith("RanksDisagree: rank 1 did not set the same backends within 3 s")

    def test_a_rank_that_is_dead(self, tmp_path: Path) -> None:
        path = checkpoint(tmp_path)
        first, second = ranks.world("cpu", 2).attempt(set_on, [(path, {"dispatcher": "allgather"}, "dies")] * 2)
        assert second.how == "died"
        assert first.after - second.after < 5
        said = first.text if first.how == "raised" else first.value[0]
        assert "rank 1" in said or "Connection" in said


# The norm of all gradients


def norms(path: str, sizes: Sizes, norm_type: float, without: bool) -> dict[str, Any]:
    """The norm, and gradients after clipping to 0.1 of it."""
    model = loaded(path, sizes, OURS).train()
    inputs = zoo.sample_inputs(model)
    out = model(**inputs, labels=inputs["input_ids"])
    out.loss.backward()
    if without and dist.get_rank() == 1:
        model.lm_head.weight.grad = None
    before = clip_grad_norm_(model.parameters(), 1e9, norm_type)
    again = clip_grad_norm_(model.parameters(), 0.1 * float(before), norm_type)
    if without:
        return {"norm": before, "again": again}
    gradients = {name: whole(p.grad) for name, p in model.named_parameters() if p.grad is not None}
    return {"norm": before, "again": again, "gradients": gradients}


@pytest.mark.parametrize("norm_type", [2.0, 3.0, float("inf")])
@pytest.mark.parametrize("layout", layouts(4))
def test_clipping_is_that_of_one_process(layout: str, norm_type: float, tmp_path: Path) -> None:
    """Every rank has the same batch, so that averages over batches are those of one."""
    path = checkpoint(tmp_path)
    model = loaded(path).train()
    inputs = zoo.sample_inputs(model)
    model(**inputs, labels=inputs["input_ids"]).loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9, norm_type)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1 * float(norm), norm_type)
    for found in ranks.world("cpu", 4).run(norms, [(path, layouts(4)[layout], norm_type, False)] * 4):
        assert type(found["norm"]) is Tensor and found["norm"].shape == ()
        assert relative(found["norm"], norm) < LIMIT and relative(found["again"], norm) < LIMIT
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                assert relative(found["gradients"][name], parameter.grad) < LIMIT, name


@pytest.mark.skipif(Version("5.23") > VERSION, reason="no layout that is right splits the head")
def test_a_gradient_that_one_rank_lacks_does_not_hang(tmp_path: Path) -> None:
    path = checkpoint(tmp_path)
    found = ranks.world("cpu", 2).run(norms, [(path, layouts(2)["ep == fsdp"], 2.0, True)] * 2)
    assert found[0]["norm"] == found[1]["norm"]


class TestClipping:
    """What needs no ranks: the same as torch."""

    def gradients(self, *dtypes: torch.dtype) -> list[nn.Parameter]:
        parameters = [nn.Parameter(torch.randn(3, 4, dtype=dtype)) for dtype in dtypes]
        for parameter in parameters:
            parameter.grad = torch.randn_like(parameter)
        return parameters

    @pytest.mark.parametrize("norm_type", [1.0, 2.0, float("inf")])
    def test_as_torch(self, norm_type: float) -> None:
        ours = [*self.gradients(torch.float32, torch.float64), nn.Parameter(torch.ones(2))]
        theirs = [nn.Parameter(p.detach().clone()) for p in ours]
        for one, other in zip(ours, theirs, strict=True):
            other.grad = None if one.grad is None else one.grad.clone()
        norm = clip_grad_norm_(ours, 0.5, norm_type)
        torch.testing.assert_close(norm, torch.nn.utils.clip_grad_norm_(theirs, 0.5, norm_type), check_dtype=False)
        for one, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(one.grad, other.grad)

    def test_bfloat16_is_summed_in_float32(self) -> None:
        parameter = nn.Parameter(torch.zeros(1000, dtype=torch.bfloat16))
        parameter.grad = torch.full_like(parameter, 1.0078125)
        norm = clip_grad_norm_(parameter, 1e9)
        assert norm.dtype == torch.float32 and abs(float(norm) / (1.0078125 * 1000**0.5) - 1) < 1e-6

    def test_not_finite(self) -> None:
        (parameter,) = self.gradients(torch.float32)
        assert parameter.grad is not None
        parameter.grad[0, 0] = torch.inf
        before = parameter.grad.clone()
        with pytest.raises(RuntimeError, match="is inf, so that they cannot be clipped"):
            clip_grad_norm_([parameter], 1.0, error_if_nonfinite=True)
        assert torch.equal(parameter.grad, before)
        assert not clip_grad_norm_([parameter], 1.0).isfinite()

    def test_nothing(self) -> None:
        assert clip_grad_norm_([], 1.0) == 0 and clip_grad_norm_(iter([nn.Parameter(torch.ones(2))]), 1.0) == 0

    def test_a_norm_that_is_none(self) -> None:
        with pytest.raises(ValueError, match="norm_type=0"):
            clip_grad_norm_(self.gradients(torch.float32), 1.0, norm_type=0)


# Training


STEPS = 20


def batches(vocabulary: int, count: int, step: int) -> list[Tensor]:
    """The same at every second step, so that there is something to learn."""
    generator = torch.Generator().manual_seed(step % 2)
    return [torch.randint(vocabulary, (2, 12), generator=generator) for _ in range(count)]


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=3e-4, foreach=False)


def train(model: Any, optimizer: torch.optim.Optimizer, steps: Sequence[int], sizes: Sizes | None, of: int) -> list:
    """The mean loss of all batches at each step."""
    losses = []
    for step in steps:
        every = batches(model.config.vocab_size, of, step)
        own = every if sizes is None else [every[batch_of(sizes)[0]]]
        total = 0.0
        for ids in own:
            loss = model(input_ids=ids, labels=ids).loss / len(own)
            loss.backward()
            total += float(loss.detach())
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        mean = torch.tensor(total, dtype=torch.float64)
        if sizes is not None:
            dist.all_reduce(mean, dist.ReduceOp.AVG) if dist.get_backend() != "gloo" else dist.all_reduce(mean)
            mean /= dist.get_world_size()
        losses.append(float(mean))
    return losses


def curve(path: str, sizes: Sizes, save_to: str) -> list[float]:
    model = loaded(path, sizes, OURS).train()
    losses = train(model, optimizer_of(model), range(STEPS), sizes, batch_of(sizes)[1])
    model.save_pretrained(save_to)
    return losses


@pytest.mark.parametrize("layout", layouts(4))
def test_training_follows_one_process(layout: str, tmp_path: Path) -> None:
    """And what it saves is a stock checkpoint, that one process without this package reads."""
    path, sizes = checkpoint(tmp_path / "first"), layouts(4)[layout]
    count = 4 // sizes.get("tp_size", 1)
    model = loaded(path).train()
    expected = train(model, optimizer_of(model), range(STEPS), None, count)
    found = ranks.world("cpu", 4).run(curve, [(path, sizes, str(tmp_path / "trained"))] * 4)
    for losses in found:
        assert losses == pytest.approx(expected, rel=LIMIT)
    assert expected[-1] < expected[0]
    script = (
        "import sys, torch, transformers\n"
        "model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32)\n"
        "assert 'hf_moe_backends' not in sys.modules\n"
        "torch.save(model.state_dict(), sys.argv[2])\n"
    )
    read = tmp_path / "read.pt"
    subprocess.run([sys.executable, "-c", script, str(tmp_path / "trained"), str(read)], check=True, timeout=120)
    state = torch.load(read)
    assert state.keys() == model.state_dict().keys()
    for name, parameter in model.state_dict().items():
        assert relative(state[name], parameter) < 1e-3, name  # AdamW divides by what may be near zero


def resumed(path: str, sizes: Sizes, folder: str) -> dict[str, Any]:
    """Four steps in a row, against two, a checkpoint, and two of a model that is loaded anew."""
    model = loaded(path, sizes, OURS).train()
    optimizer = optimizer_of(model)
    of = batch_of(sizes)[1]
    train(model, optimizer, range(2), sizes, of)
    weights, state = get_state_dict(model, optimizer)
    save({"model": weights, "optimizer": state}, checkpoint_id=folder)
    saved = {name: whole(t) for name, t in model.state_dict().items()}
    model.save_pretrained(f"{folder}-stock")
    train(model, optimizer, range(2, 4), sizes, of)

    again = loaded(path, sizes, OURS).train()
    optimizer = optimizer_of(again)
    weights, state = get_state_dict(again, optimizer)
    whole_state = {"model": weights, "optimizer": state}
    load(whole_state, checkpoint_id=folder)
    set_state_dict(again, optimizer, model_state_dict=weights, optim_state_dict=state)
    train(again, optimizer, range(2, 4), sizes, of)
    return {
        "saved": saved,
        "one": {name: whole(t) for name, t in model.state_dict().items()},
        "other": {name: whole(t) for name, t in again.state_dict().items()},
    }


@pytest.mark.parametrize("layout", layouts(4))
def test_saving_and_resuming_lose_no_bit(layout: str, tmp_path: Path) -> None:
    path, sizes = checkpoint(tmp_path / "first"), layouts(4)[layout]
    folder = str(tmp_path / "second")
    found = ranks.world("cpu", 4).run(resumed, [(path, sizes, folder)] * 4)[0]
    for name, tensor in found["one"].items():
        assert torch.equal(tensor, found["other"][name]), name
        assert not torch.equal(tensor, found["saved"][name]) or not tensor.is_floating_point(), name
    stock = transformers.AutoModelForCausalLM.from_pretrained(f"{folder}-stock", dtype=torch.float32).state_dict()
    assert stock.keys() == found["saved"].keys()
    for name, tensor in found["saved"].items():
        assert torch.equal(stock[name], tensor), name


# Generation


def generate(path: str, sizes: Sizes, dispatcher: str) -> Tensor:
    model = loaded(path, sizes, BackendConfig(experts="torch_mm", dispatcher=dispatcher)).eval()
    ids = batches(model.config.vocab_size, 2, 0)[batch_of(sizes)[0] % 2]
    tokens: Tensor = model.generate(ids, max_new_tokens=6, do_sample=False, synced_gpus=True)
    return tokens


def dispatchers(layout: str) -> list[str]:
    if Version("5.19") > VERSION:
        return ["allgather", "all_to_all", "all_reduce"]
    found = ["allgather", "all_to_all"]
    return found + (["all_reduce"] if layout == "shared" and Version("5.23") <= VERSION else [])


@pytest.mark.parametrize("layout, dispatcher", [(one, other) for one in layouts(2) for other in dispatchers(one)])
def test_generates_what_one_process_does(layout: str, dispatcher: str, tmp_path: Path) -> None:
    path, sizes = checkpoint(tmp_path), layouts(2)[layout]
    model = loaded(path).eval()
    prompts = batches(model.config.vocab_size, 2, 0)
    expected = [model.generate(ids, max_new_tokens=6, do_sample=False) for ids in prompts]
    for rank, tokens in enumerate(ranks.world("cpu", 2).run(generate, [(path, sizes, dispatcher)] * 2)):
        assert torch.equal(tokens, expected[rank // sizes.get("tp_size", 1)])
