from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch
import transformers

from hf_moe_backends.registry import registry

TESTS = Path(__file__).parent


@pytest.fixture(autouse=True, scope="session")
def _quiet_and_small() -> None:
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def mutants_installed(tmp_path_factory: pytest.TempPathFactory) -> None:
    """The mutants as an installed distribution, here and in the processes that tests start."""
    folder = tmp_path_factory.mktemp("site")
    info = folder / "hf_moe_mutants-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: hf-moe-mutants\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[hf_moe_backends]\nmutants = mutants\ndispatcher_mutants = dispatcher_mutants\n"
    )
    paths = [str(folder), str(TESTS)]
    sys.path[:0] = paths
    os.environ["PYTHONPATH"] = os.pathsep.join([*paths, *filter(None, [os.environ.get("PYTHONPATH")])])
    registry(refresh=True)
