"""Tensor parallelism: two ranks that divide the heads give the results of one process."""

from pathlib import Path

import pytest

from distributed import split_heads
from distributed.processes import run_ranks

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def failures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run all checks in one group of processes; return the folder with a file per failure."""
    folder = tmp_path_factory.mktemp("heads")
    run_ranks(split_heads.run, 2, folder)
    return folder


@pytest.mark.parametrize("name", split_heads.CHECKS)
def test_two_ranks(name: str, failures: Path):
    assert [path.read_text() for path in failures.glob(f"{name}-*")] == []
