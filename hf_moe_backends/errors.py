"""What can go wrong, said to the person who reads it: what was asked, why it cannot be, what can, what would help."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class MoeBackendError(Exception):
    """Base class of every error this package raises on purpose. The model is as it was before the call."""


class ConfigError(MoeBackendError, ValueError):
    """A `BackendConfig` names a field, a backend or an option that does not exist, or gives it a wrong value."""


class BackendUnavailable(MoeBackendError, RuntimeError):
    """A backend was asked for by name and cannot run this model on this machine."""


class BackendConflict(MoeBackendError, RuntimeError):
    """Two installed distributions offer the same kind and name, so that neither can be meant."""


class NoSite(MoeBackendError, ValueError):
    """A backend was asked for by name and the model has nothing that it could replace."""


class PlanError(MoeBackendError, RuntimeError):
    """An edit cannot be made on this model, or failed and was undone."""


class RanksDisagree(MoeBackendError, RuntimeError):
    """The ranks that have a model's experts together did not all set the same backends."""


def nearest(name: str, known: Iterable[str]) -> str:
    """`name`'s likeliest correction as a clause for an error message, or the whole choice when none is near."""
    known = sorted(known)
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    if close:
        return f"did you mean {close[0]!r}? (known: {', '.join(known)})"
    return f"known: {', '.join(known) if known else 'none'}"
