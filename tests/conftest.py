from __future__ import annotations

import pytest
import transformers


@pytest.fixture(autouse=True, scope="session")
def _quiet_transformers() -> None:
    """Tiny configs make Transformers warn about rope scaling and layer types, by logging."""
    transformers.logging.set_verbosity_error()
