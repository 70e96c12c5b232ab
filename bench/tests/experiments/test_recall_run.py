"""Cells of the benchmarks learn, are reproducible, resume from checkpoints, and store their results."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from kalmix_bench.datasets import Rows
from kalmix_bench.datasets.metrics import micro
from kalmix_bench.experiments.recall import (
    ModelShape,
    Part,
    RecallCell,
    RecallProtocol,
    evaluation_callback,
    experiment,
    trainer,
)
from kalmix_bench.experiments.recall.data import Batches, draw_cell_data
from kalmix_bench.experiments.recall.experiment import Recall
from kalmix_bench.experiments.recall.models import TokenModel
from kalmix_bench.runner.cells import Results
from kalmix_bench.runner.scheduler import run

CPU = torch.device("cpu")
COPY = RecallCell(
    "mad/selective-copying",
    (Part.of(64, 32, seq_len=16, num_tokens_to_copy=2, vocab_size=6),),
    "gated-deltanet",
    ModelShape(16, state_size=64, heads=2),
    RecallProtocol(epochs=3, batch_size=24, learning_rate=1e-2, max_grad_norm=5.0),
    0,
)


def found(cell: RecallCell, folder: Path, device: torch.device = CPU) -> dict:
    return run(Recall(), [cell], Results(folder / "results.jsonl"), device)[cell]


def test_a_layer_learns_and_its_row_has_curves_and_sizes(tmp_path: Path) -> None:
    row = found(replace(COPY, protocol=replace(COPY.protocol, epochs=5)), tmp_path)
    curves = row["curves"]
    assert row["epochs"] == len(curves["loss"]) == len(curves["macro"]) == 5
    assert curves["loss"][-1] < 0.7 * curves["loss"][0] and curves["test_loss"][-1] < curves["test_loss"][0]
    assert row["score"] == "macro" and row["scores"]["macro"] == pytest.approx(max(curves["macro"]), rel=1e-5)
    assert row["slices"]["last"][0]["micro"] == pytest.approx(curves["micro"][-1], rel=1e-5)
    assert row["slices"]["loss"][0]["test_loss"] == pytest.approx(min(curves["test_loss"]), rel=1e-5)
    assert row["state"] == 64 and row["parameters"] > row["layer_parameters"] > 0
    assert row["tokens_per_second"] > 0 and row["peak_memory"] is None and row["mixer"]["head_dim"] == 4
    assert row["parts"][0]["settings"]["frac_noise"] == 0 and not list(tmp_path.glob("checkpoints/*"))


def test_evaluation_batches_have_limited_logits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = found(COPY, tmp_path / "whole")
    data = draw_cell_data(COPY)
    length = data.test[0].inputs.shape[1]
    monkeypatch.setattr(trainer, "LOGITS", 5 * length * data.vocab_size)
    sizes = []
    loss = trainer.masked_cross_entropy

    def record(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        if not logits.requires_grad:
            sizes.append(len(logits))
        return loss(logits, targets)

    monkeypatch.setattr(trainer, "masked_cross_entropy", record)
    parts = found(COPY, tmp_path / "parts")
    assert sizes == [5] * 6 + [2] + [5] * 6 + [2] + [5] * 6 + [2]  # 32 rows in each of three epochs
    assert parts["scores"] == pytest.approx(whole["scores"], rel=1e-5)


def test_training_is_deterministic(tmp_path: Path) -> None:
    first, again = (found(COPY, tmp_path / name) for name in ("first", "again"))
    assert first["curves"] == again["curves"] and first["slices"] == again["slices"]
    assert first["curves"] != found(replace(COPY, seed=1), tmp_path / "first")["curves"]


def test_progress_is_reported_within_an_epoch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluation_callback, "REPORT_SECONDS", 0.0)
    reports = []
    cell = replace(COPY, protocol=replace(COPY.protocol, epochs=2, batch_size=32))
    run(
        Recall(),
        [cell],
        Results(tmp_path / "results.jsonl"),
        CPU,
        progress_factory=lambda *_: lambda *now: reports.append(now),
    )
    assert [done for done, _ in reports] == [0.25, 0.5, 0.5, 0.75, 0.999, 0.999, 1.0]
    assert [how[:5] for _, how in reports] == ["", "", *["macro"] * 5]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="runs on a GPU")
@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("layer", ["kla", "kla-plus", "gated-deltanet"])
def test_training_is_deterministic_on_gpu(tmp_path: Path, layer: str, captured: bool) -> None:
    part = Part.of(8192, 64, seq_len=64, num_tokens_to_copy=4)  # most tokens are one id, asked for by many at once
    protocol = replace(COPY.protocol, batch_size=1024, cuda_graph=captured)
    cell = replace(COPY, parts=(part,), layer=layer, protocol=protocol)
    first, again = (found(cell, tmp_path / name, torch.device("cuda")) for name in ("first", "again"))
    assert first["curves"] == again["curves"] and first["slices"] == again["slices"]
    before = torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory
    assert before == (False, True)


@pytest.mark.slow
def test_steps_that_cannot_be_captured_run_without_a_graph(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = found(COPY, tmp_path / "plain")
    tried = []

    def refuse(self: trainer.CellTrainer, model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> None:
        tried.append(model is self.net)
        trainer.CellTrainer._step(self, self.net, **batch).item()  # the failure may come after a backward pass
        time.sleep(0.5)
        raise RuntimeError("no kernel\nand a long text")

    monkeypatch.setattr(trainer.CellTrainer, "_capture", refuse)
    monkeypatch.setattr(trainer.CellTrainer, "training_step", _replayed_step)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    began = time.monotonic()
    row = found(COPY, tmp_path / "refused")
    seconds = time.monotonic() - began
    assert (row["curves"], row["slices"]) == (expected["curves"], expected["slices"])
    assert tried == [False, True]
    kinds = ("compiled", "captured")
    assert row["fallbacks"] == [f"steps (24, 16) are not {kind}: RuntimeError: no kernel" for kind in kinds]
    assert "fallbacks" not in expected
    assert row["compilation_seconds"] >= 1.0 and expected["compilation_seconds"] == 0.0
    assert row["training_seconds"] + row["evaluation_seconds"] + row["compilation_seconds"] <= seconds


def _replayed_step(
    self: trainer.CellTrainer, model: torch.nn.Module, inputs: dict[str, torch.Tensor], count: object = None
) -> torch.Tensor:
    loss = self._replay(**inputs)
    self.total += loss
    return loss


@pytest.mark.parametrize("head", ["untied", "tied"])
@pytest.mark.slow
def test_an_interrupted_run_resumes_exactly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, head: str) -> None:
    cell = replace(COPY, shape=replace(COPY.shape, head=head))
    whole = found(cell, tmp_path / "whole")
    monkeypatch.setattr(evaluation_callback, "CHECKPOINT_SECONDS", 0.0)
    judged = evaluation_callback.EvaluationCallback._evaluate

    def interrupted(one, loss):
        if len(one.curves.get("loss", ())) == 2:
            raise KeyboardInterrupt
        return judged(one, loss)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(evaluation_callback.EvaluationCallback, "_evaluate", interrupted)
        found(cell, tmp_path / "parts")
    (kept,) = (tmp_path / "parts" / "checkpoints").iterdir()
    steps = []
    step = trainer.CellTrainer.training_step
    monkeypatch.setattr(trainer.CellTrainer, "training_step", lambda *given: steps.append(1) or step(*given))
    row = found(cell, tmp_path / "parts")
    assert len(steps) == 3  # one epoch
    assert row["curves"] == whole["curves"] and row["slices"] == whole["slices"]
    assert not kept.exists()


def test_a_run_ends_at_the_stop_score_or_without_improvement(tmp_path: Path) -> None:
    stale = replace(COPY.protocol, epochs=50, learning_rate=1e-9, patience=2)
    assert found(replace(COPY, protocol=stale), tmp_path)["epochs"] == 3
    assert found(replace(COPY, protocol=replace(stale, patience=None, stop_score=0.0)), tmp_path)["epochs"] == 1


def test_lengths_without_training_rows_choose_no_epoch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model is right on the trained length from the second epoch on, and on the other in the first alone."""
    parts = (Part.of(24, 8, k=3), Part.of(0, 8, k=5), Part.of(24, 0, k=2))
    protocol = replace(COPY.protocol, epochs=9, patience=3, stop_score=2.0)
    cell = replace(COPY, task="words/a5", parts=parts, protocol=protocol)
    predict, calls = trainer.CellTrainer.predict_rows, []

    def known(self: trainer.CellTrainer, rows: Rows) -> tuple[float, np.ndarray]:
        calls.append(rows.inputs.shape[1])
        is_short, epoch = rows.inputs.shape[1] == min(calls), (len(calls) - 1) // 2
        loss, predicted = predict(self, rows)
        return loss, rows.targets if (epoch > 0) == is_short else np.zeros_like(predicted)

    monkeypatch.setattr(trainer.CellTrainer, "predict_rows", known)
    row = found(cell, tmp_path)
    assert row["epochs"] == 2 + 3  # the best epoch is the second
    assert row["curves"]["trained_sequence_accuracy"] == [0, 1, 1, 1, 1]
    assert row["curves"]["sequence_accuracy"] == [0.5] * 5 and row["scores"]["sequence_accuracy"] == 0.5
    assert [part["sequence_accuracy"] for part in row["slices"]["score"]] == [1, 0]
    calls.clear()
    stopped = found(replace(cell, protocol=replace(protocol, stop_score=0.99)), tmp_path / "stopped")
    assert stopped["epochs"] == 2


def test_of_epochs_with_equal_scores_that_of_the_lowest_loss_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a task that is not solved yet would have the results of the first epoch."""
    losses = iter([3.0, 1.0, 2.0])
    monkeypatch.setattr(
        trainer.CellTrainer, "predict_rows", lambda _, rows: (next(losses), np.full_like(rows.targets, -1))
    )
    row = found(replace(COPY, protocol=replace(COPY.protocol, epochs=3)), tmp_path)
    assert row["scores"]["test_loss"] == 1.0 and set(row["curves"][row["score"]]) == {0.0}
    assert [part["test_loss"] for part in row["slices"]["score"]] == [1.0]


@pytest.mark.parametrize("tf32", [False, True])
def test_a_cell_runs_at_the_precision_of_its_experiment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tf32: bool
) -> None:
    given = []
    mode = experiment.deterministic_mode
    monkeypatch.setattr(
        experiment, "deterministic_mode", lambda device, *, tf32: given.append(tf32) or mode(device, tf32=tf32)
    )
    one = replace(COPY, protocol=replace(COPY.protocol, epochs=1))
    row = run(Recall(tf32=tf32), [one], Results(tmp_path / "results.jsonl"), CPU)[one]
    assert given == [tf32] and "tf32" not in row  # a CPU does not round


def test_a_run_that_diverges_is_finished(tmp_path: Path) -> None:
    cell = replace(COPY, protocol=replace(COPY.protocol, learning_rate=1e30, max_grad_norm=0.0))
    row = found(cell, tmp_path)
    assert "NaN or infinity" in row["diverged"] and "scores" not in row
    assert list(Results(tmp_path / "results.jsonl").rows([cell])) == [cell]


def test_parts_share_no_batch_and_an_epoch_takes_every_row_once() -> None:
    parts = (
        Part.of(7, 3, vocab_size=40, input_seq_len=16, num_kv_pairs=2),
        Part.of(5, 2, vocab_size=60, input_seq_len=24, num_kv_pairs=2),
    )
    cell = RecallCell("mqar", parts, "gated-deltanet", COPY.shape, COPY.protocol, 4)
    drawn = draw_cell_data(cell)
    assert drawn.vocab_size == 60
    batches = Batches(drawn, 4, shuffle=True, seed=0, device=CPU)
    for epoch in (0, 1):
        batches.set_epoch(epoch)
        came = list(batches)
        assert len(came) == len(batches) == 4
        assert [len(batch["inputs"]) for batch in came] == [4] * 4
        for part, data in enumerate(drawn.parts):
            for split in ("inputs", "targets"):
                rows = torch.cat([b[split] for b in came if b[split].shape[1] == data.train.inputs.shape[1]])
                asked = torch.cat([b["targets"] for b in came if b[split].shape[1] == rows.shape[1]]).ne(-100).any(1)
                assert sorted(rows[asked].tolist()) == sorted(getattr(data.train, split).tolist()), part
    firsts = [next(iter(batches))["inputs"].tolist() for batches.epoch in (0, 0, 1)]
    assert firsts[0] == firsts[1] != firsts[2]


def test_batches_have_the_positions_of_scored_tokens_where_these_are_few() -> None:
    few = (
        Part.of(7, 3, vocab_size=60, input_seq_len=24, num_kv_pairs=2),
        Part.of(5, 2, vocab_size=60, input_seq_len=24, num_kv_pairs=3),
    )
    cell = RecallCell("mqar", few, "gated-deltanet", COPY.shape, COPY.protocol, 4)
    unscored = 0
    for batch in Batches(draw_cell_data(cell), 4, shuffle=True, seed=0, device=CPU):
        positions, targets = batch["positions"], batch["targets"]
        assert positions.shape == (4, 3) and all(len(set(row)) == 3 for row in positions.tolist())
        scored = targets.gather(1, positions)
        unscored += int((scored == -100).sum())
        assert torch.equal((scored != -100).sum(1), (targets != -100).sum(1))
    assert unscored == 7 + 4 * 3  # one of each row of two pairs, and all of the rows that pad a batch
    every = replace(cell, task="mad/in-context-recall", parts=(Part.of(4, 2, seq_len=16),))
    assert all(len(batch) == 2 for batch in Batches(draw_cell_data(every), 4, shuffle=True, seed=0, device=CPU))


@pytest.mark.parametrize("layer", ["gated-deltanet", "kla-plus"])
def test_a_step_needs_only_the_logits_of_scored_tokens(layer: str, tmp_path: Path) -> None:
    cell = replace(COPY, layer=layer)
    data = draw_cell_data(cell)
    torch.manual_seed(0)
    model = TokenModel(data.vocab_size, cell.shape, layer)
    arguments = trainer.training_arguments(cell, tmp_path, CPU)
    evaluation = evaluation_callback.EvaluationCallback(cell, data, lambda *_: False)
    one = trainer.CellTrainer(cell, data, model, evaluation, arguments)
    batch = next(iter(one.batches))
    assert batch["positions"].shape == (24, 2)

    def step(**given: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor | None]]:
        torch.manual_seed(1)
        model.zero_grad()
        outputs: list[torch.Tensor] = []
        loss = one._step(lambda *x: outputs.append(model(*x)) or outputs[-1], **given)
        assert outputs[0].shape[1] == (2 if "positions" in given else 16)
        return loss, [x.grad for x in model.parameters()]

    (loss, grads), (whole_loss, whole_grads) = step(**batch), step(inputs=batch["inputs"], targets=batch["targets"])
    torch.testing.assert_close(loss, whole_loss)
    torch.testing.assert_close(grads, whole_grads, rtol=1e-4, atol=1e-6)
    assert max(float(x.abs().max()) for x in grads if x is not None) > 1e-2


def test_scores_by_depth() -> None:
    targets = np.array([[1, 2], [3, 4], [5, 6], [7, 8]])
    predicted = np.array([[1, 0], [3, 4], [5, 0], [0, 0]])
    rows = Rows(targets, targets, {"depth": np.array([0.0, 0.19, 0.2, 1.0])})
    assert evaluation_callback.by_depth(micro, predicted, rows) == {
        "depth 1/5": 0.75,
        "depth 2/5": 0.5,
        "depth 5/5": 0.0,
    }
    assert evaluation_callback.by_depth(micro, predicted, Rows(targets, targets)) == {}
