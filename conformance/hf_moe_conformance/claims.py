"""What a cell asks of a backend that it does not claim, and whether it says no.

A capability that is not claimed must be refused when the backend is set: a backend that is silently wrong there is
worse than one that lacks it. Some claims nobody can refuse, since what they are about comes later than the setting
(`torch.compile`, autocast, repeated runs, ids handed in by a dispatcher). These are tried.
"""

from __future__ import annotations

from hf_moe_conformance.check import CLAIMS, Cell, Failure
from hf_moe_conformance.subject import Subject

UNREFUSABLE = frozenset({"compile", "autocast", "deterministic", "no_host_sync", "negative_ids"})


def unclaimed(cell: Cell, subject: Subject) -> frozenset[str]:
    """What the cell needs and the backend does not claim, as names of features, claims or values."""
    can = subject.spec.capabilities
    claims = {
        "training": can.training,
        "compile": can.compile,
        "autocast": can.autocast,
        "deterministic": can.deterministic,
        "no_host_sync": not can.host_sync,
    }
    assert claims.keys() == CLAIMS
    layout, dtype = cell.variant.layout, cell.variant.dtype
    features = (layout.features | cell.check.needs) - CLAIMS
    missing = {name for name in cell.check.needs & CLAIMS if not claims[name]} | (features - can.features)
    if dtype not in can.dtypes:
        missing.add(dtype)
    if subject.device not in can.devices:
        missing.add(subject.device)
    if can.gates is not None and layout.gate is not None and layout.gate not in can.gates:
        missing.add(f"the gate {layout.gate}")
    return frozenset(missing)


def see_refusal(cell: Cell, subject: Subject, missing: frozenset[str]) -> str:
    """Ask for what is not claimed, and return the refusal.

    Raises:
        Failure: it was not refused.
    """
    refusal = cell.check.bench(subject, cell.variant).refusal(cell.check.needs)
    if refusal is None:
        raise Failure([f"{subject.name} does not claim {', '.join(sorted(missing))} and was not refused"])
    return refusal
