"""The one hook that a plugin implements."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import pluggy

if TYPE_CHECKING:
    from hf_moe_backends.spec import BackendSpec

PROJECT = "hf_moe_backends"
"""The pluggy project name and the entry-point group."""

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@hookspec
def hf_moe_backends_register() -> Iterable[BackendSpec]:  # type: ignore[empty-body]
    """Return the backends that this plugin offers.

    It is called while backends are listed: import no kernel library and no torch here. `BackendSpec.target` names the
    code, which is imported only when a plan needs it.
    """
