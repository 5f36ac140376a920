"""The checks, one module a kind. Importing this package declares them all."""

from __future__ import annotations

from hf_moe_conformance.checks import experts as experts
