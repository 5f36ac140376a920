"""The kernels' tests where there is no GPU: in a process of its own, under Triton's interpreter."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch


@pytest.mark.skipif(torch.cuda.is_available(), reason="test_kernels.py itself runs, on the GPU")
def test_kernels_under_the_interpreter() -> None:
    # by the environment, which Triton reads when it is imported; torch.compile fails in a process that has it set
    tests = Path(__file__).with_name("kernels_on_device.py")
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", tests],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-2000:]
    passed = re.search(r"(\d+) passed", result.stdout)
    assert passed is not None and int(passed[1]) > 80, result.stdout[-500:]
    assert "skipped" not in result.stdout
