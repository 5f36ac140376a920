"""Named backends are used or refused, never replaced; "auto" takes the best that serves every site, and says why."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest
import torch
from torch import nn

from hf_moe_backends import (
    BackendConfig,
    BackendConflict,
    BackendSpec,
    BackendUnavailable,
    Capabilities,
    ConfigError,
    NoSite,
    Option,
    Requirement,
    builtin,
)
from hf_moe_backends.discovery import Plugin
from hf_moe_backends.recognise import Gate
from hf_moe_backends.registry import Registry
from hf_moe_backends.selection import Candidate, Choice, select
from hf_moe_backends.spec import FEATURES, KINDS, Kind
from hf_moe_backends.survey import Demand, ExpertsDemand, Site


def spec(name: str, kind: Kind = "experts", priority: int = 0, **more: Any) -> BackendSpec:
    can = {name: more.pop(name) for name in list(more) if name in Capabilities.__dataclass_fields__}
    return BackendSpec(
        kind=kind, name=name, target="kernel:run", priority=priority, capabilities=Capabilities(**can), **more
    )


_NAMES = {("experts", "eager"), ("experts", "grouped_mm"), ("norm", "torch"), ("dispatcher", "all_to_all")}
STOCK = tuple(
    dataclasses.replace(s, requires=()) for s in builtin.hf_moe_backends_register() if (s.kind, s.name) in _NAMES
)


def registry(*specs: BackendSpec, others: tuple[BackendSpec, ...] = ()) -> Registry:
    """Stock code, a plugin with `specs` and a plugin with `others`."""
    return Registry(
        [
            Plugin(distribution="hf-moe-backends", version="0.1", entry_point="builtin", specs=STOCK),
            Plugin(distribution="fast-kernels", version="1.2", entry_point="fast", specs=specs),
            Plugin(distribution="other-kernels", version="3.4", entry_point="other", specs=others),
        ]
    )


def experts(count: int = 2, first: int = 0, **demand: Any) -> tuple[Site, ...]:
    values: dict[str, Any] = {
        "device": "cpu",
        "dtype": "float32",
        "gate": Gate(formula="swiglu"),
        "count": 5,
        "sizes": {"hidden": 64, "intermediate": 48},
    }
    return tuple(
        Site(
            kind="experts",
            name=f"model.layers.{i}.mlp.experts",
            module=nn.Identity(),
            demand=ExpertsDemand(**values | demand),
        )
        for i in range(first, first + count)
    )


def choose(config: BackendConfig, sites: tuple[Site, ...], known: Registry, **more: Any) -> Choice:
    """What becomes of experts, on a model that runs them on stock grouped_mm."""
    by_kind: dict[Kind, tuple[Site, ...]] = dict.fromkeys(KINDS, ()) | {"experts": sites}
    current = {"experts": "grouped_mm"} | more.pop("current", {})
    choices = select(config, by_kind, known, current=current, **more)
    assert [choice.kind for choice in choices] == list(KINDS)
    assert all(c.backend is None and c.note == "not asked for" for c in choices if config.get(c.kind) is None)
    return next(choice for choice in choices if choice.kind == "experts")


def named(name: str = "fast", **options: Any) -> BackendConfig:
    return BackendConfig(experts=name, options={f"experts.{name}": options} if options else {})


AUTO = BackendConfig(experts="auto")


def taken(choice: Choice) -> str | None:
    return choice.backend.spec.name if choice.backend else None


def lost(choice: Choice) -> dict[str, str | None]:
    return {candidate.name: candidate.lost for candidate in choice.trace}


class TestNamed:
    def test_taken_on_every_site_with_all_options(self) -> None:
        tile = Option(name="tile", type=int, default=64, help="")
        stages = Option(name="stages", type=int, default=None, help="")
        sites = experts()
        choice = choose(named(tile=128), sites, registry(spec("fast", options=(tile, stages))))
        assert (taken(choice), choice.asked, choice.sites) == ("fast", "fast", sites)
        assert choice.options == {"tile": 128, "stages": None}
        assert choice.trace == (Candidate(name="fast", plugin="fast-kernels 1.2", lost=None),)
        assert not choice.is_stock

    def test_taken_whatever_has_a_higher_priority(self) -> None:
        known = registry(spec("fast", priority=-5), spec("faster", priority=99))
        assert taken(choose(named(), experts(), known)) == "fast"
        choice = choose(named("eager"), experts(), known)
        assert taken(choice) == "eager"
        assert choice.is_stock

    def test_refused_with_what_was_asked_why_and_what_is_usable(self) -> None:
        wide = frozenset({"float32", "float64"})
        known = registry(
            spec("fast", dtypes=frozenset({"bfloat16", "float16"}), priority=9),
            spec("narrow", alignment=128),
            spec("twice", dtypes=wide),
            spec("slow", priority=-9, dtypes=wide),
            others=(spec("twice", dtypes=wide),),
        )
        with pytest.raises(BackendUnavailable) as error:
            choose(named(), experts(3) + experts(1, first=3, dtype="float64"), known)
        # neither what would refuse as well nor what two distributions offer is usable
        assert str(error.value) == (
            "experts='fast' cannot run this model on this machine.\n"
            "  fast (fast-kernels 1.2): computes in bfloat16, float16, not in float32 "
            "(at model.layers.0.mlp.experts and 2 more); "
            "computes in bfloat16, float16, not in float64 (at model.layers.3.mlp.experts)\n"
            "  usable here: eager, grouped_mm, slow"
        )

    def test_one_site_that_it_cannot_serve_is_enough(self) -> None:
        sites = experts(3) + experts(1, first=3, features=frozenset({"bias"}))
        with pytest.raises(BackendUnavailable, match=r"biases .* \(at model.layers.3.mlp.experts\)"):
            choose(named(), sites, registry(spec("fast")))

    def test_nothing_usable_and_a_site_without_a_name(self) -> None:
        site = Site(kind="experts", name="", module=nn.Identity(), demand=experts()[0].demand)
        known = Registry([Plugin(distribution="d", version="1", entry_point="e", specs=(spec("fast", alignment=7),))])
        with pytest.raises(BackendUnavailable, match=r"\(at the model itself\)\n  usable here: none$"):
            choose(named(), (site,), known)

    def test_without_a_site(self) -> None:
        with pytest.raises(NoSite) as error:
            choose(named(), (), registry(spec("fast")))
        assert str(error.value) == (
            "experts='fast' has nothing to replace: this model has no site of kind experts. "
            "It is a dense model, or its experts are none that this package knows."
        )

    def test_a_dispatcher_without_a_site_says_how_to_load(self) -> None:
        with pytest.raises(NoSite) as error:
            choose(BackendConfig(dispatcher="deepep"), experts(), registry(spec("deepep", kind="dispatcher")))
        assert str(error.value) == (
            "dispatcher='deepep' has nothing to dispatch: this model's experts are not sharded over ranks.\n"
            "  Load it under torchrun with DistributedConfig(fsdp_size=N, ep_size=N), "
            "from_pretrained(path, distributed_config=...), then set the dispatcher."
        )

    def test_an_unknown_name_an_unknown_option_and_a_conflict(self) -> None:
        known = registry(spec("fast"), spec("twice"), others=(spec("twice"),))
        with pytest.raises(ConfigError, match=r"^experts='fst' is not a known backend: did you mean 'fast'\?"):
            choose(named("fst"), experts(), known)
        with pytest.raises(ConfigError, match=r"^experts.fast has no option 'tile': known: none$"):
            choose(named(tile=3), experts(), known)
        with pytest.raises(BackendConflict, match=r"fast-kernels 1.2 and other-kernels 3.4"):
            choose(named("twice"), experts(), known)


REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "device": ({"devices": frozenset({"cuda", "xpu"})}, {}, "runs on cuda, xpu, not on cpu"),
    "dtype": ({"dtypes": frozenset({"bfloat16"})}, {}, "computes in bfloat16, not in float32"),
    "feature": (
        {"features": frozenset({"bias"})},
        {"features": frozenset({"bias", "transposed", "ungated"})},
        "does not support weights stored (experts, in, out); experts without a gate (up_proj, activation, down_proj)",
    ),
    "gate": (
        {"gates": frozenset({"swiglu", "geglu"})},
        {"gate": Gate(formula="gpt_oss", limit=7.0, alpha=1.702)},
        "fuses the gates geglu, swiglu, not gpt_oss(limit=7, alpha=1.702)",
    ),
    "gate by custom code": (
        {"gates": frozenset({"swiglu"})},
        {"gate": Gate(formula="custom")},
        "fuses the gates swiglu, not custom",
    ),
    "alignment": (
        {"alignment": 32},
        {"sizes": {"hidden": 64, "intermediate": 48}},
        "needs sizes that are multiples of 32, intermediate is 48",
    ),
    "blocked": ({}, {"blocked": "its weights are quantised"}, "its weights are quantised"),
    "training": (
        {"training": False},
        {"training": True},
        "has no backward pass, and this model is in training mode: model.eval() first",
    ),
    "package": (
        {"requires": (Requirement(distribution="kernel-of-yore"),), "install": "pip install yore"},
        {},
        "needs kernel-of-yore, not installed -> pip install yore",
    ),
    "contract": (
        {"contract": 2},
        {},
        "written for plugin contract 2, this is contract 1 -> pip install -U hf-moe-backends",
    ),
    "probe": ({"probe": f"{__name__}:probe"}, {}, "needs NVLink"),
}
"""What the backend can, what the sites demand, and the reason for the no."""

MACHINE = ("package", "contract", "probe")
"""Reasons of the machine, which name no site."""


def probe() -> str:
    return "needs NVLink"


@pytest.mark.parametrize("which", REFUSED)
class TestRefusal:
    def test_named_is_refused_with_the_reason_and_the_site(self, which: str) -> None:
        can, demand, reason = REFUSED[which]
        at = "" if which in MACHINE else " (at model.layers.0.mlp.experts and 1 more)"
        with pytest.raises(BackendUnavailable) as error:
            choose(named(), experts(**demand), registry(spec("fast", **can)))
        assert f"\n  fast (fast-kernels 1.2): {reason}{at}\n" in str(error.value)

    def test_auto_passes_it_over_with_the_reason(self, which: str) -> None:
        can, demand, reason = REFUSED[which]
        can = {"features": frozenset(demand.get("features", ()))} | can
        backup = spec("backup", priority=1, features=frozenset(demand.get("features", ())))
        choice = choose(AUTO, experts(**demand), registry(spec("fast", priority=9, **can), backup))
        assert (lost(choice)["fast"] or "").startswith(reason)
        # what blocks a site blocks it for every backend
        assert taken(choice) == (None if which == "blocked" else "backup")


SERVED: dict[str, dict[str, Any]] = {
    "device": {"device": "cuda"},
    "dtype": {"dtype": "bfloat16"},
    "feature": {"features": frozenset({"bias"})},
    "gate": {"gate": Gate(formula="geglu")},
    "alignment": {"count": 5, "sizes": {"hidden": 64, "intermediate": 32}},  # a count of experts is no matrix size
    "training": {"training": False},
}
"""Demands that the backends of `REFUSED` do meet."""


@pytest.mark.parametrize("which", SERVED)
def test_what_is_claimed_is_served(which: str) -> None:
    known = registry(spec("fast", priority=9, **REFUSED[which][0]))
    for config in (named(), AUTO):
        assert taken(choose(config, experts(**SERVED[which]), known)) == "fast"


class TestDemands:
    """Where the demand itself is not plain."""

    def test_compute_capability(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 6))
        known = registry(spec("fast", min_sm=90), spec("older", min_sm=86))
        on_cuda = experts(device="cuda")
        with pytest.raises(BackendUnavailable, match=r"needs compute capability 9\.0, this GPU has 8\.6 \(at "):
            choose(named(), on_cuda, known)
        assert taken(choose(named("older"), on_cuda, known)) == "older"
        assert taken(choose(named(), experts(), known)) == "fast"  # min_sm says nothing about the CPU

    def test_compute_capability_is_unknown_without_a_gpu(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        assert taken(choose(named(), experts(device="meta"), registry(spec("fast", min_sm=90)), device="cuda"))

    def test_a_model_on_meta_is_planned_for_the_device_given(self) -> None:
        known = registry(spec("fast", devices=frozenset({"cpu"})))
        meta = experts(device="meta")
        assert taken(choose(named(), meta, known)) == "fast"
        assert taken(choose(named(), meta, known, device="cpu")) == "fast"
        with pytest.raises(BackendUnavailable, match="runs on cpu, not on cuda"):
            choose(named(), meta, known, device="cuda")
        # only what is undecided: these weights are where they are
        assert taken(choose(named(), experts(device="cpu"), known, device="cuda")) == "fast"

    def test_a_site_without_a_weight_has_no_dtype_to_refuse(self) -> None:
        assert taken(choose(named(), experts(dtype=None, sizes={}), registry(spec("fast", alignment=8)))) == "fast"

    def test_a_backend_that_calls_the_modules_own_gate_serves_any(self) -> None:
        custom = experts(gate=Gate(formula="custom"))
        assert taken(choose(named(), custom, registry(spec("fast", gates=None)))) == "fast"

    def test_stock_code_serves_what_it_does_unless_the_site_is_blocked(self) -> None:
        features = frozenset(FEATURES["experts"]) - {"negative_ids"}
        odd = {"device": "npu", "dtype": "float64", "features": features, "training": True}
        assert taken(choose(named("eager"), experts(gate=Gate(formula="custom"), **odd), registry())) == "eager"
        with pytest.raises(BackendUnavailable, match="expert id -1"):
            choose(named("eager"), experts(features=frozenset({"negative_ids"})), registry())
        with pytest.raises(BackendUnavailable, match="not decorated"):
            choose(named("eager"), experts(blocked="not decorated"), registry())

    @pytest.mark.parametrize(
        ("name", "demand", "reason"),
        [
            # stock computes config.hidden_act here, whatever the module's own gate is
            ("sonicmoe", {"gate": Gate(formula="swiglu_clamped", limit=7.0)}, "fuses the gates reglu, swiglu, not"),
            ("sonicmoe", {"device": "cpu"}, "runs on cuda, not on cpu"),
            ("deepgemm", {"training": True}, "has no backward pass"),
            ("deepgemm", {"dtype": "float32"}, "computes in bfloat16, not in float32"),
        ],
    )
    def test_stock_kernels_refuse_what_they_would_compute_wrongly(
        self, name: str, demand: dict[str, Any], reason: str
    ) -> None:
        kernel = next(s for s in builtin.hf_moe_backends_register() if s.name == name)
        known = Registry(
            [
                Plugin(
                    distribution="hf-moe-backends",
                    version="0.1",
                    entry_point="builtin",
                    specs=(dataclasses.replace(kernel, requires=()),),
                )
            ]
        )
        served: dict[str, Any] = {"device": "cuda", "dtype": "bfloat16"}
        assert taken(choose(named(name), experts(**served), known)) == name
        with pytest.raises(BackendUnavailable, match=reason):
            choose(named(name), experts(**served | demand), known)

    def test_a_gate_is_asked_of_experts_only(self) -> None:
        sites: dict[Kind, tuple[Site, ...]] = dict.fromkeys(KINDS, ())
        demand = Demand(device="cpu", dtype="float32")
        sites["norm"] = (Site(kind="norm", name="model.norm", module=nn.Identity(), demand=demand),)
        known = registry(spec("fast", kind="norm", gates=frozenset({"swiglu"})))
        choice = select(BackendConfig(norm="fast"), sites, known, current={})[KINDS.index("norm")]
        assert taken(choice) == "fast"

    def test_a_model_in_eval_mode_needs_no_backward(self) -> None:
        known = registry(spec("fast", training=False, priority=9))
        for config in (named(), AUTO):
            assert taken(choose(config, experts(training=False), known)) == "fast"
        # one part in training mode is enough
        with pytest.raises(BackendUnavailable, match=r"model\.eval\(\) first \(at model\.layers\.2\.mlp\.experts\)"):
            choose(named(), experts() + experts(1, first=2, training=True), known)


class TestAuto:
    def test_the_highest_priority_that_serves_every_site_and_why_each_other_lost(self) -> None:
        known = registry(
            spec("a_twice", priority=99),
            spec("best", priority=50),
            spec("narrow", priority=70, alignment=32),
            spec("spare", priority=40),
            spec("tied", priority=50),
            spec("default"),
            spec("slow", priority=-10),
            others=(spec("a_twice", priority=5),),
        )
        sites = experts(1, sizes={"hidden": 64}) + experts(1, first=1)
        choice = choose(AUTO, sites, known)
        assert (taken(choice), choice.asked, choice.sites) == ("best", "auto", sites)
        stock = "stock; auto does not swap one stock implementation for another"
        assert [(c.name, c.plugin, c.lost) for c in choice.trace] == [
            ("a_twice", "fast-kernels 1.2", "offered by more than one distribution"),
            (
                "narrow",
                "fast-kernels 1.2",
                "needs sizes that are multiples of 32, intermediate is 48 (at model.layers.1.mlp.experts)",
            ),
            ("best", "fast-kernels 1.2", None),
            ("tied", "fast-kernels 1.2", "priority 50 is not above best's 50"),
            ("spare", "fast-kernels 1.2", "priority 40 is not above best's 50"),
            ("a_twice", "other-kernels 3.4", "offered by more than one distribution"),
            ("default", "fast-kernels 1.2", "priority 0 is not above stock code's 0"),
            ("eager", "hf-moe-backends 0.1", stock),
            ("grouped_mm", "hf-moe-backends 0.1", "priority 0 is not above best's 50"),
            ("slow", "fast-kernels 1.2", "priority -10 is not above stock code's 0"),
        ]

    @pytest.mark.parametrize("name", ["a_default", "z_default"])
    @pytest.mark.parametrize("current", ["grouped_mm", "eager", "something_newer", None])
    def test_stays_on_stock_code_unless_the_priority_is_higher(self, name: str, current: str | None) -> None:
        # whatever the order of names, and whether or not the model's own implementation is one that has a name here
        choice = choose(AUTO, experts(), registry(spec(name), spec("slow", priority=-1)), current={"experts": current})
        assert taken(choice) is None
        assert choice.note == (f"stays on {current}" if current else "stays as it is")
        assert {n for n, reason in lost(choice).items() if reason is None} == {current} & {"grouped_mm", "eager"}

    def test_the_note_says_what_blocks(self) -> None:
        choice = choose(AUTO, experts(blocked="its weights are quantised"), registry(spec("fast", priority=9)))
        assert choice.backend is None
        assert choice.note == "stays on grouped_mm: its weights are quantised"

    def test_without_a_site_is_a_no_op(self) -> None:
        choice = choose(AUTO, (), registry(spec("fast", priority=9)))
        assert choice == Choice(
            kind="experts", asked="auto", backend=None, note="this model has no site of kind experts"
        )

    def test_options_go_to_the_chosen_one(self) -> None:
        tile = Option(name="tile", type=int, default=64, help="")
        known = registry(spec("fast", priority=9, options=(tile,)), spec("spare", priority=5, options=(tile,)))
        config = BackendConfig(experts="auto", options={"experts.fast": {"tile": 1}, "experts.spare": {"tile": 2}})
        choice = choose(config, experts(), known)
        assert (taken(choice), choice.options) == ("fast", {"tile": 1})

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"experts.spare": {"tiel": 1}}, "experts.spare has no option 'tiel': did you mean 'tile'? (known: tile)"),
            ({"experts.spare": {"tile": "1"}}, "option experts.spare.tile takes int, got '1' (str)"),
            ({"experts.spar": {}}, "experts='spar' is not a known backend: did you mean 'spare'?"),
        ],
    )
    def test_options_of_a_backend_that_was_not_chosen_are_checked(self, options: Any, message: str) -> None:
        tile = Option(name="tile", type=int, default=64, help="")
        known = registry(spec("fast", priority=9), spec("spare", priority=5, options=(tile,)))
        with pytest.raises(ConfigError, match="^" + re.escape(message)):
            choose(BackendConfig(experts="auto", options=options), experts(), known)
