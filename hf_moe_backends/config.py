"""`BackendConfig`: what the user asks for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import Any

from hf_moe_backends.errors import ConfigError, nearest
from hf_moe_backends.spec import KINDS, Kind

Value = bool | int | float | str | None


@dataclass(frozen=True, kw_only=True)
class BackendConfig:
    """One backend name a kind. None leaves a kind as the model has it; `"auto"` takes the best that can serve it.

    Args:
        attn, linear, norm, experts, dispatcher, loss: a backend's name, `"auto"` or None.
        options: options of the backends, keyed `"kind.backend"`: `{"dispatcher.deepep": {"num_sms": 20}}`.

    Raises:
        ConfigError: a value that is not a name, options for a backend that this config does not choose, or an option
            value that is not a bool, int, float, str or None. Names are checked against what is installed when a plan
            is made, so that a config can be written on another machine.
    """

    attn: str | None = None
    linear: str | None = None
    norm: str | None = None
    experts: str | None = None
    dispatcher: str | None = None
    loss: str | None = None
    options: Mapping[str, Mapping[str, Value]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for kind in KINDS:
            name = getattr(self, kind)
            if name is not None and (not isinstance(name, str) or not name):
                raise ConfigError(f"{kind}={name!r} must be a backend's name, 'auto' or None")
        if not isinstance(self.options, Mapping):
            raise ConfigError(f"options={self.options!r} must be a mapping like {{'experts.torch_mm': {{...}}}}")
        frozen = {}
        for key, values in self.options.items():
            field_name, _, backend = str(key).partition(".")
            if field_name not in KINDS or not backend:
                hint = nearest(field_name, KINDS)
                raise ConfigError(f"options key {key!r} must read 'kind.backend', like 'dispatcher.deepep': {hint}")
            asked = getattr(self, field_name)
            if asked not in (backend, "auto"):
                raise ConfigError(f"options are given for {key!r}, but this config asks for {field_name}={asked!r}")
            if not isinstance(values, Mapping):
                raise ConfigError(f"options[{key!r}]={values!r} must map option names to values")
            for name, value in values.items():
                if not isinstance(name, str) or not isinstance(value, Value):
                    raise ConfigError(
                        f"option {key}.{name}={value!r} must be a bool, int, float, str or None, got "
                        f"{type(value).__name__}"
                    )
            frozen[key] = MappingProxyType(dict(values))
        object.__setattr__(self, "options", MappingProxyType(frozen))

    @classmethod
    def auto(cls) -> BackendConfig:
        """Every kind on `"auto"`."""
        return cls.from_dict(dict.fromkeys(KINDS, "auto"))

    def get(self, kind: Kind) -> str | None:
        """What is asked for one kind."""
        name: str | None = getattr(self, kind)
        return name

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> BackendConfig:
        """From `to_dict`'s form, or from YAML or JSON of that form.

        Raises:
            ConfigError: as the constructor does, and for an unknown field, with the nearest match.
        """
        if not isinstance(values, Mapping):
            raise ConfigError(f"a backend config must be a mapping of kinds to names, got {values!r}")
        known = [f.name for f in fields(cls)]
        for name in values:
            if name not in known:
                raise ConfigError(f"a backend config has no field {name!r}: {nearest(str(name), known)}")
        given = dict(values)
        if given.get("options") is None:  # an empty `options:` in YAML
            given.pop("options", None)
        return cls(**given)

    def to_dict(self) -> dict[str, Any]:
        """Plain strings, numbers and dicts, for YAML and JSON. Fields that ask for nothing are left out."""
        values: dict[str, Any] = {kind: self.get(kind) for kind in KINDS if self.get(kind) is not None}
        if self.options:
            values["options"] = {key: dict(options) for key, options in self.options.items()}
        return values

    def __hash__(self) -> int:
        # of the values themselves, since 1 and 1.0 are equal
        options = frozenset((key, frozenset(values.items())) for key, values in self.options.items())
        return hash((*map(self.get, KINDS), options))

    def __reduce__(self) -> tuple[Any, ...]:
        # a mapping proxy does not pickle
        return (BackendConfig.from_dict, (self.to_dict(),))
