from __future__ import annotations

import os

import pytest
import torch
import transformers

if not torch.cuda.is_available():
    # Before Triton is imported: its kernels then run on the CPU. Nothing but tests calls them there.
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture(autouse=True, scope="session")
def _quiet_transformers() -> None:
    """Tiny configs make Transformers warn about rope scaling and layer types, by logging."""
    transformers.logging.set_verbosity_error()
