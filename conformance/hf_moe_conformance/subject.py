"""What is tested: one backend of one kind, with its options, on one device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from hf_moe_backends import BackendConfig, BackendSpec, Plan, set_moe_backend
from hf_moe_backends.registry import registry
from hf_moe_backends.spec import Kind

DTYPES = ("float32", "bfloat16", "float16")
"""What a run may ask for. float64 is the reference's own."""

DEFAULT_DTYPES = ("float32", "bfloat16")


@dataclass(frozen=True, kw_only=True)
class Subject:
    """One backend as it is tested.

    Attributes:
        spec: what the backend declares. The checks hold it to that.
        label: the distribution that offers it and its version.
        options: given to the backend, as `BackendConfig.options` has them.
        device: `"cpu"` or `"cuda"`.
        dtypes: those that cells are drawn over. What the backend does not claim among them must be refused.
        seed: of every size, weight and input of the run.
    """

    kind: Kind
    name: str
    spec: BackendSpec
    label: str
    options: Mapping[str, Any] = field(default_factory=dict)
    device: str = "cpu"
    dtypes: tuple[str, ...] = DEFAULT_DTYPES
    seed: int = 0

    @classmethod
    def find(
        cls,
        kind: Kind,
        name: str,
        *,
        options: Mapping[str, Any] | None = None,
        device: str = "cpu",
        dtypes: Sequence[str] = DEFAULT_DTYPES,
        seed: int = 0,
    ) -> Subject:
        """Look an installed backend up.

        float32 is always among the dtypes of a backend that claims it: a silent downcast is seen in no other.

        Raises:
            ConfigError: no backend of that kind and name, or an option that it does not have.
            BackendConflict: two distributions offer it.
            ValueError: a dtype that the suite does not have.
        """
        unknown = sorted(set(dtypes) - set(DTYPES))
        if unknown or not dtypes:
            raise ValueError(f"dtypes {unknown or 'none'} cannot be tested; choose from {', '.join(DTYPES)}")
        backend = registry().get(kind, name)
        subject = cls(
            kind=kind,
            name=name,
            spec=backend.spec,
            label=backend.plugin.label,
            options=dict(options or {}),
            device=device,
            dtypes=tuple(
                d for d in DTYPES if d in dtypes or (d == "float32" and d in backend.spec.capabilities.dtypes)
            ),
            seed=seed,
        )
        backend.spec.resolve_options(subject.options)
        return subject

    @property
    def config(self) -> BackendConfig:
        """The config that puts this backend, and nothing else, in place."""
        options = {f"{self.kind}.{self.name}": dict(self.options)} if self.options else {}
        return BackendConfig.from_dict({self.kind: self.name, "options": options})

    def apply(self, model: nn.Module) -> Plan:
        """Put the backend in place on a model, as a user does.

        Raises:
            MoeBackendError: it was refused.
        """
        return set_moe_backend(model, self.config)
