"""Does a backend of `hf_moe_backends` compute what stock Transformers computes? Case by case, with the numbers."""

from __future__ import annotations

__version__ = "0.1.0"
