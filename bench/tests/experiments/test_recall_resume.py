"""An interrupted cell resumes from its newest intact checkpoint; checkpoints are deleted after the row is written."""

from __future__ import annotations

import itertools
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from kalmix.training.checkpoints import list_checkpoints, newest_checkpoint
from kalmix_bench.experiments.recall import evaluation_callback, trainer
from kalmix_bench.experiments.recall.experiment import Recall
from kalmix_bench.runner.cells import Results, digest
from kalmix_bench.runner.experiment import CellStopped
from kalmix_bench.runner.scheduler import run

from .test_recall_run import COPY, CPU, found


def interrupted(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Interrupt a cell in its third epoch; return the folder of its checkpoints."""
    judged = evaluation_callback.EvaluationCallback._evaluate

    def stop(one, loss):
        if len(one.curves.get("loss", ())) == 2:
            raise KeyboardInterrupt
        return judged(one, loss)

    monkeypatch.setattr(evaluation_callback, "CHECKPOINT_SECONDS", 0.0)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(evaluation_callback.EvaluationCallback, "_evaluate", stop)
        found(COPY, folder)
    return folder / "checkpoints" / digest(COPY)


def test_unfinished_checkpoints_are_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = found(COPY, tmp_path / "whole")
    kept = interrupted(tmp_path, monkeypatch)
    (complete, older) = list_checkpoints(kept)
    shutil.copytree(complete, kept / "checkpoint-99")
    for name in ("manifest.json", "trainer_state.json", "optimizer.pt"):
        (kept / "checkpoint-99" / name).unlink(missing_ok=True)
    with pytest.warns(UserWarning, match=r"checkpoint-99: it is unfinished"):
        row = found(COPY, tmp_path)
    assert row["curves"] == whole["curves"] and row["slices"] == whole["slices"]
    assert not kept.exists() and older.name != complete.name


def test_checkpoints_are_deleted_after_the_row_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluation_callback, "CHECKPOINT_SECONDS", 0.0)
    results = Results(tmp_path / "results.jsonl")
    kept = tmp_path / "checkpoints" / digest(COPY)
    rmtree = shutil.rmtree

    def die(*_: object) -> None:
        raise KeyboardInterrupt

    def dying(path: Path, **options) -> None:
        return die() if path == kept else rmtree(path, **options)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Results, "add", die)
        found(COPY, tmp_path)
    assert newest_checkpoint(kept) is not None
    steps = []
    step = trainer.CellTrainer.training_step
    monkeypatch.setattr(trainer.CellTrainer, "training_step", lambda *given: steps.append(1) or step(*given))
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(shutil, "rmtree", dying)
        found(COPY, tmp_path)
    assert [row["epochs"] for row in results.read()] == [3]
    before = len(steps)
    run(Recall(), [COPY], results, CPU)
    assert len(steps) == before and not kept.exists()


@pytest.mark.parametrize("every", [1, 2, 4])
@pytest.mark.slow
def test_a_stopped_cell_resumes_in_the_middle_of_an_epoch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, every: int
) -> None:
    cell = replace(COPY, layer="kla-plus", protocol=replace(COPY.protocol, validation=8))  # it draws random numbers
    (whole,) = Recall().run((cell,), Results(tmp_path / "whole" / "results.jsonl"), CPU, lambda *_: None)
    monkeypatch.setattr(evaluation_callback, "REPORT_SECONDS", 0.0)
    results, stops = Results(tmp_path / "results.jsonl"), 0
    for _ in range(10):
        reports = itertools.count(1)
        try:
            (row,) = Recall().run((cell,), results, CPU, lambda *_, reports=reports: next(reports) >= every)
            break
        except CellStopped:
            stops += 1
    assert stops == {1: 8, 2: 5, 4: 2}[every]
    assert row["curves"] == whole["curves"] and row["slices"] == whole["slices"]
