"""FSDP2 and DDP: models on two ranks give the loss and gradients of one process."""

import json
from pathlib import Path

import pytest

from distributed import sharded
from distributed.processes import run_ranks
from kalmix import ArgumentError
from kalmix.training.checkpoints import list_checkpoints
from kalmix.training.model_folder import find_model
from kalmix.training.run import train

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def failures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run all checks in one group of processes; return the folder with a file per failure."""
    folder = tmp_path_factory.mktemp("sharded")
    run_ranks(sharded.run, 2, folder)
    return folder


@pytest.mark.parametrize("name", sharded.CHECKS)
def test_two_ranks(name: str, failures: Path):
    assert [path.read_text() for path in failures.glob(f"{name}-*")] == []


def write_text(folder: Path) -> None:
    documents = (f"Document {n}: " + "a filter is a recurrence. " * 20 for n in range(9))
    (folder / "text.txt").write_text("\n\n".join(documents))


def test_two_ranks_evaluate_the_held_out_text_of_one_process(tmp_path: Path):
    write_text(tmp_path)
    expected = train(sharded.replicated_recipe(str(tmp_path)), tmp_path / "alone").history
    run_ranks(sharded.train_replicated, 2, tmp_path)
    found = json.loads((tmp_path / "replicated" / "history.json").read_text())
    losses = [{row["step"]: row["eval_loss"] for row in rows if "eval_loss" in row} for rows in (found, expected)]
    assert len(losses[1]) == 3
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_a_sharded_run_resumes_on_another_number_of_ranks(tmp_path: Path):
    """The rows of each step are the same, so the losses are."""
    write_text(tmp_path)

    def run(world: int, *arguments: object) -> None:
        run_ranks(sharded.train_sharded, world, tmp_path, *arguments)

    run(2, "whole", False, None)
    run(2, "halved", False, 1)
    checkpoint = list_checkpoints(tmp_path / "halved" / "checkpoints")[0]
    assert len(list(checkpoint.glob("pytorch_model_fsdp_0/*.distcp"))) == 2  # all ranks save
    with pytest.raises(ArgumentError, match="a checkpoint of a run with `fsdp`, whose weights are in pieces"):
        find_model(tmp_path / "halved" / checkpoint.name)
    run(3, "halved", True, None)
    histories = [json.loads((tmp_path / name / "history.json").read_text()) for name in ("whole", "halved")]
    losses = [{row["step"]: row["loss"] for row in rows if "loss" in row} for rows in histories]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    assert histories[0][-2]["tokens"] == histories[1][-2]["tokens"]
