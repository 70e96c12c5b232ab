"""Tensor parallelism: two ranks that divide the heads give the results of one process."""

from pathlib import Path

import pytest
from torch import multiprocessing

from distributed import split_heads

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def failures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run all checks in one group of processes; return the folder with a file per failure."""
    folder = tmp_path_factory.mktemp("heads")
    multiprocessing.spawn(split_heads.run, (2, str(folder)), 2)
    return folder


@pytest.mark.parametrize("name", split_heads.CHECKS)
def test_two_ranks(name: str, failures: Path):
    assert [path.read_text() for path in failures.glob(f"{name}-*")] == []
