"""Stock's expert gradients with ep == fsdp, also where they are wrong and dispatchers are refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("expert_gradients.py")


@pytest.mark.slow
@pytest.mark.parametrize(("version", "ratio"), [("5.20.0", 0.5), ("5.22.0", 0.5), ("5.23.0", 1.0)])
def test_expert_gradients_of_stock(version: str, ratio: float, tmp_path: Path) -> None:
    """Averaged twice over the two ranks' batches from 5.20 to 5.22, and so half of what they should be."""
    requirement = f"transformers=={version}"
    install = ["-m", "pip", "install", "--quiet", "--no-deps", "--target", str(tmp_path), requirement]
    subprocess.run([sys.executable, *install], check=True, capture_output=True)
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = os.environ | {"PYTHONPATH": path}
    done = subprocess.run([sys.executable, SCRIPT], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["transformers"] == version
    assert len(found["ratios"]) == 4 and list(found["ratios"].values()) == pytest.approx([ratio] * 4, abs=1e-4)
