"""`BackendConfig`: a value that travels (YAML, pickle, copies) and says no to what cannot be meant."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from typing import Any

import pytest
import yaml

from hf_moe_backends import BackendConfig, ConfigError
from hf_moe_backends.spec import KINDS

FULL = BackendConfig(
    attn="te",
    experts="torch_mm",
    dispatcher="deepep",
    norm="auto",
    options={"dispatcher.deepep": {"num_sms": 20, "low_latency": False, "scale": 0.5, "path": "a", "hint": None}},
)
CONFIGS = [BackendConfig(), BackendConfig.auto(), FULL]


def test_every_kind_is_a_field_and_none_by_default() -> None:
    assert [f.name for f in dataclasses.fields(BackendConfig)] == [*KINDS, "options"]
    assert {BackendConfig().get(kind) for kind in KINDS} == {None}
    assert BackendConfig().to_dict() == {}


def test_auto_sets_every_kind() -> None:
    assert BackendConfig.auto().to_dict() == dict.fromkeys(KINDS, "auto")


ROUND_TRIPS = {
    "dict": lambda config: BackendConfig.from_dict(config.to_dict()),
    "yaml": lambda config: BackendConfig.from_dict(yaml.safe_load(yaml.safe_dump(config.to_dict()))),
    "pickle": lambda config: pickle.loads(pickle.dumps(config)),
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "replace": dataclasses.replace,
}


@pytest.mark.parametrize("way", ROUND_TRIPS)
@pytest.mark.parametrize("config", CONFIGS)
def test_round_trip(config: BackendConfig, way: str) -> None:
    back = ROUND_TRIPS[way](config)
    assert back == config
    assert hash(back) == hash(config)
    assert back.to_dict() == config.to_dict()


def test_from_yaml_as_a_person_writes_it() -> None:
    text = """
        experts: torch_mm
        attn:
        dispatcher: deepep
        options:
          dispatcher.deepep: {num_sms: 20}
    """
    config = BackendConfig.from_dict(yaml.safe_load(text))
    assert config == BackendConfig(
        experts="torch_mm", dispatcher="deepep", options={"dispatcher.deepep": {"num_sms": 20}}
    )


def test_empty_options_in_yaml() -> None:
    assert BackendConfig.from_dict(yaml.safe_load("experts: loop\noptions:\n")) == BackendConfig(experts="loop")


def test_equal_configs_hash_alike_and_different_ones_differ() -> None:
    def config(**values: Any) -> BackendConfig:
        return BackendConfig(experts="x", options={"experts.x": values})

    assert len({config(a=1, b=2), config(b=2, a=1)}) == 1
    assert config(a=1) == config(a=1.0)
    assert hash(config(a=1)) == hash(config(a=1.0))
    assert config(a=1) != config(a=2)
    assert len(set(CONFIGS)) == len(CONFIGS)
    assert BackendConfig(experts="loop") != BackendConfig(norm="loop")


def test_nothing_in_it_can_be_changed_from_inside_or_outside() -> None:
    values: dict[str, Any] = {"num_sms": 20}
    options: dict[str, Any] = {"dispatcher.deepep": values}
    config = BackendConfig(dispatcher="deepep", options=options)
    values["num_sms"] = 1
    options.clear()
    config.to_dict()["options"]["dispatcher.deepep"]["num_sms"] = 1
    assert config.options == {"dispatcher.deepep": {"num_sms": 20}}

    with pytest.raises(dataclasses.FrozenInstanceError):
        config.experts = "loop"  # type: ignore[misc]
    with pytest.raises(TypeError, match="does not support item assignment"):
        config.options["experts.loop"] = {}  # type: ignore[index]
    for again in (config, pickle.loads(pickle.dumps(config)), copy.deepcopy(config)):
        with pytest.raises(TypeError, match="does not support item assignment"):
            again.options["dispatcher.deepep"]["num_sms"] = 1  # type: ignore[index]


def test_replace_changes_one_kind_and_keeps_the_options() -> None:
    changed = dataclasses.replace(FULL, experts="loop")
    assert changed.experts == "loop"
    assert changed.options == FULL.options
    with pytest.raises(ConfigError, match=r"'dispatcher.deepep', but this config asks for dispatcher=None"):
        dataclasses.replace(FULL, dispatcher=None)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"exprts": "loop"}, "a backend config has no field 'exprts': did you mean 'experts'? (known: attn, "),
        ({3: "loop"}, "a backend config has no field 3: known: attn, dispatcher, experts, linear, loss, norm, options"),
        ("torch_mm", "a backend config must be a mapping of kinds to names, got 'torch_mm'"),
        (None, "a backend config must be a mapping of kinds to names, got None"),
        ({"experts": True}, "experts=True must be a backend's name, 'auto' or None"),
        ({"experts": ""}, "experts='' must be a backend's name, 'auto' or None"),
        ({"experts": ["loop"]}, "experts=['loop'] must be a backend's name, 'auto' or None"),
        ({"options": ["a"]}, "options=['a'] must be a mapping like {'experts.torch_mm': {...}}"),
        (
            {"experts": "x", "options": {"expert.x": {}}},
            "options key 'expert.x' must read 'kind.backend', like 'dispatcher.deepep': did you mean 'experts'?",
        ),
        ({"experts": "x", "options": {"experts": {}}}, "options key 'experts' must read 'kind.backend'"),
        ({"experts": "x", "options": {"experts.": {}}}, "options key 'experts.' must read 'kind.backend'"),
        ({"experts": "x", "options": {7: {}}}, "options key 7 must read 'kind.backend'"),
        (
            {"experts": "x", "options": {"experts.y": {}}},
            "options are given for 'experts.y', but this config asks for experts='x'",
        ),
        (
            {"options": {"experts.x": {}}},
            "options are given for 'experts.x', but this config asks for experts=None",
        ),
        ({"experts": "x", "options": {"experts.x": 3}}, "options['experts.x']=3 must map option names to values"),
        (
            {"experts": "x", "options": {"experts.x": {"tile": [1]}}},
            "option experts.x.tile=[1] must be a bool, int, float, str or None, got list",
        ),
        (
            {"experts": "x", "options": {"experts.x": {1: 2}}},
            "option experts.x.1=2 must be a bool, int, float, str or None, got int",
        ),
    ],
)
def test_what_cannot_be_meant_is_refused(values: Any, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        BackendConfig.from_dict(values)
    assert str(error.value).startswith(message)


def test_auto_may_have_options_for_any_backend_of_its_kind() -> None:
    config = BackendConfig(experts="auto", options={"experts.x": {"tile": 1}, "experts.y": {}})
    assert set(config.options) == {"experts.x", "experts.y"}
