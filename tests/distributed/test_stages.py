"""Pipeline parallelism of transformers: two ranks with some of the blocks each give the results of one process."""

import inspect
from pathlib import Path

import pytest
from transformers.distributed import DistributedConfig

from distributed import stages
from distributed.processes import run_ranks

pytestmark = pytest.mark.skipif(
    "pp_size" not in inspect.signature(DistributedConfig).parameters, reason="this transformers has no `pp_size`"
)


@pytest.fixture(scope="module")
def failures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run all checks in one group of processes; return the folder with a file per failure."""
    folder = tmp_path_factory.mktemp("stages")
    run_ranks(stages.run, 2, folder)
    return folder


@pytest.mark.parametrize("name", stages.CHECKS)
def test_two_ranks(name: str, failures: Path):
    assert [path.read_text() for path in failures.glob(f"{name}-*")] == []
