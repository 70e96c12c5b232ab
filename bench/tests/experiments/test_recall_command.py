"""`kalmix bench mad` and others end to end at tiny sizes; nothing runs twice; errors are one line."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kalmix_bench import cli
from kalmix_bench.experiments.recall import ModelShape, Part, RecallCell, RecallProtocol, presets
from kalmix_bench.experiments.recall.presets import BENCHES, RecallStudy, make_cells
from kalmix_bench.experiments.recall.published import published_score
from kalmix_bench.experiments.recall.summary import scores_by_length, slices, summarize
from kalmix_bench.runner.scores import Score

PNG = b"\x89PNG\r\n"
_COPY = RecallStudy(
    "mad/selective-copying",
    (Part.of(8, 4, seq_len=12, num_tokens_to_copy=2),),
    (ModelShape(8, state_size=32, heads=2),),
    RecallProtocol(epochs=2, batch_size=4, learning_rate=1e-3),
    ("kla", "kla-noise-free"),
)
_RECALL = RecallStudy(
    "mqar",
    tuple(Part.of(8, 4, vocab_size=40, input_seq_len=n, num_kv_pairs=d) for n, d in ((16, 2), (24, 4))),
    (ModelShape(8), ModelShape(16)),
    RecallProtocol(epochs=1, batch_size=4, learning_rate=1e-3),
    ("linear-attention",),
    learning_rates=(1e-3, 1e-2),
)


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(BENCHES["mad"], "laptop", (_COPY, replace(_COPY, task="mad/fuzzy-recall")))
    monkeypatch.setitem(BENCHES["mqar"], "laptop", (_RECALL,))


@pytest.mark.slow
def test_layers_are_run_once_and_reported_next_to_papers(kalmix, tmp_path: Path) -> None:
    asked = ("bench", "mad", "--task", "selective-copying", "--device", "cpu", "--output", tmp_path, "--seeds", 2)
    result = kalmix(*asked)
    assert result.status == 0, result.errors
    for words in ("kla  8 x 1  seed 0  macro", "(4/4)", "90.67", "75.73", "±", "Figure 5a", "report.md", "8 x 1"):
        assert words in result.output, words
    lines = (tmp_path / "results.jsonl").read_text()
    rows = [json.loads(line) for line in lines.splitlines()]
    assert [(row["layer"], row["seed"]) for row in rows] == [
        (layer, seed) for seed in (0, 1) for layer in ("kla", "kla-noise-free")
    ]
    again = kalmix(*asked)
    assert again.status == 0 and "(4/4)" not in again.output
    assert (tmp_path / "results.jsonl").read_text() == lines
    other = kalmix(*asked, "--layer", "gla", "--layer", "kla", "--epochs", 1)
    assert other.status == 0 and "(4/4)" in other.output  # other epochs are another cell
    assert "| kla " in (tmp_path / "report.md").read_text()
    assert (tmp_path / "learning.png").read_bytes().startswith(PNG)

    report = kalmix("bench", "report", tmp_path, "--output", tmp_path / "all")
    assert report.status == 0 and "kla-noise-free" in report.output and "gla" in report.output
    with (tmp_path / "all" / "report.csv").open() as file:
        table = list(csv.DictReader(file))
    ours = next(row for row in table if row["layer"] == "kla" and row["score"] == "macro")
    assert (ours["seeds"], ours["paper percent"], ours["state"]) == ("2", "90.67", "32")


@pytest.mark.slow
def test_widths_and_loads_are_drawn_at_the_best_rate(kalmix, tmp_path: Path) -> None:
    result = kalmix("bench", "mqar", "--device", "cpu", "--output", tmp_path)
    assert result.status == 0, result.errors
    for name in ("widths", "lengths", "learning"):
        assert (tmp_path / f"{name}.png").read_bytes().startswith(PNG)
    rows = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert len(rows) == 4
    by, found = slices(summarize(rows)[0])
    assert by == "pairs" and list(found) == [(16, 2), (24, 4)]
    for row in rows:
        row["scores"][row["score"]] = row["protocol"]["learning_rate"]
    assert [entry.rows[0]["protocol"]["learning_rate"] for entry in summarize(rows)] == [1e-2, 1e-2]
    rows[1] |= {"diverged": "loss"}
    assert [entry.rows[0]["protocol"]["learning_rate"] for entry in summarize(rows)] == [1e-3, 1e-2]


def test_layers_are_grouped_by_task() -> None:
    asked = make_cells(BENCHES["mad"]["laptop"], (), (), 1)
    rows = [{**cell.to_dict(), "score": "macro", "scores": {"macro": 0.5}} for cell in (*asked[::2], *asked[1::2])]
    assert [entry.task for entry in summarize(rows)] == sorted((cell.task for cell in asked), reverse=True)


def test_hidden_sizes_are_selected() -> None:
    asked = make_cells(BENCHES["mqar"]["laptop"], (), (), 1, (16,))
    assert len(asked) == 2 and {cell.shape.hidden_size for cell in asked} == {16}


@pytest.mark.slow
def test_variants_of_a_layer_are_reported_apart(kalmix, tmp_path: Path) -> None:
    variant = 'kla:{"process_noise": false, "slots": 1}'
    asked = ("bench", "mad", "--task", "selective-copying", "--device", "cpu", "--output", tmp_path, "--depth", "1,2")
    result = kalmix(*asked, "--layer", "kla", "--layer", 'kla:{"slots":1,"process_noise":false}')
    assert result.status == 0, result.errors
    rows = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert {(row["layer"], row["shape"]["depth"]) for row in rows} == {(x, n) for x in ("kla", variant) for n in (1, 2)}
    assert all(row["mixer"]["slots"] == (1 if row["layer"] == variant else 2) for row in rows)
    report = (tmp_path / "report.md").read_text()
    assert f"| {variant} | 8 x 2 " in report and "| kla " in report
    assert (tmp_path / "depths.png").read_bytes().startswith(PNG)
    with (tmp_path / "report.csv").open() as file:
        table = [row for row in csv.DictReader(file) if row["score"] == "macro"]
    again = kalmix(*asked, "--layer", 'kla: {"process_noise": false, "slots": 1}')
    assert again.status == 0 and "(1/" not in again.output  # the same layers, written in another way
    papers = {(row["layer"], row["depth"]): row["paper percent"] for row in table}
    assert papers == {("kla", "1"): "90.67", ("kla", "2"): "90.67", (variant, "1"): "", (variant, "2"): ""}


@pytest.mark.slow
def test_validation_rows_select_the_epoch(kalmix, tmp_path: Path) -> None:
    asked = ("bench", "mad", "--task", "selective-copying", "--layer", "kla", "--epochs", 4, "--device", "cpu")
    assert kalmix(*asked, "--output", tmp_path).status == 0
    result = kalmix(*asked, "--output", tmp_path, "--validation", 6)
    assert result.status == 0, result.errors
    assert "epoch chosen on 6 validation rows" in result.output and "macro %, chosen on test" in result.output
    without, row = (json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines())
    assert "test_chosen_scores" not in without and "validation" not in without["protocol"]
    curves = row["curves"]
    assert all(curves[name] == curve for name, curve in without["curves"].items())  # the same training and test rows
    best, papers = (curves[name].index(max(curves[name])) for name in ("validation_macro", "macro"))
    assert row["scores"]["macro"] == pytest.approx(curves["macro"][best], rel=1e-5)
    assert row["test_chosen_scores"]["macro"] == pytest.approx(curves["macro"][papers], rel=1e-5)
    assert row["slices"]["score on test"] == without["slices"]["score"]
    assert "macro, chosen on test" in (tmp_path / "report.csv").read_text()


@pytest.mark.slow
def test_the_report_has_the_time_of_all_processes_of_a_cell(kalmix, tmp_path: Path) -> None:
    asked = ("bench", "mad", "--task", "selective-copying", "--layer", "kla", "--epochs", 1, "--device", "cpu")
    assert kalmix(*asked, "--output", tmp_path).status == 0
    (row,) = (json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines())
    parts = {"training_seconds": 5000.0, "evaluation_seconds": 21.0, "compilation_seconds": 4.0}
    resumed = {**row, "seconds": 3.0, **parts}  # 3 seconds: the last process
    (tmp_path / "results.jsonl").write_text(json.dumps(resumed) + "\n")
    report = kalmix("bench", "report", tmp_path)
    assert report.status == 0 and " 5025 |" in (tmp_path / "report.md").read_text()


def test_scores_over_seeds() -> None:
    assert str(Score.of([0.5])) == "50.0" and str(Score.of([0.5, 0.7])) == "60.0 ± 10.0"
    assert published_score("mad/compression", "kla-noise-free") == (72.91, "Kalman Linear Attention, Table 6")
    assert published_score("mqar", "kla") is None


@pytest.mark.parametrize(("bench", "preset"), [(bench, preset) for bench in BENCHES for preset in BENCHES[bench]])
def test_presets_are_cells(bench: str, preset: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    asked = make_cells(BENCHES[bench][preset], (), (), 1)
    assert asked and len(set(asked)) == len(asked)
    assert all(json.dumps(cell.to_dict()) for cell in asked)


def test_mads_protocol_runs_every_difficulty_and_hyperparameter() -> None:
    asked = make_cells(BENCHES["mad"]["mad-lab"], ("compression",), ("kla",), 1)
    tried = {(cell.protocol.learning_rate, cell.protocol.weight_decay) for cell in asked}
    assert tried == {(rate, decay) for rate in (1e-4, 5e-4, 1e-3) for decay in (0.0, 0.1)}
    lengths, rows = ({settings(cell) for cell in asked} for settings in (_length, lambda cell: cell.parts[0].train))
    assert lengths == {32, 64, 128, 256} and rows == {12_800, 6400, 3200, 1600, 800} and len(asked) == 6 * 11


def _length(cell: RecallCell) -> int:
    return cell.settings()[0]["seq_len"]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ("mad --layer kalman", "Did you mean 'kla'"),
        ('mad --layer kla:{"slot":8}', "`slot` is not an option of 'kla'"),
        ("mad --layer kla:{slots:8}", 'such as kla:{"slots": 8}'),
        ('mad --layer kla:{"slots":"8"}', "`slots` is '8'"),
        ('mad --layer kla:{"mixer":"gla"}', "`mixer` is not an option of"),
        ('mad --layer gla:{"heads":3}', "multiple of 3"),
        ("mad --layer design", "`design` is missing"),
        ("mad --depth 1,0", "`depth` is '1,0'"),
        ("mad --validation -1", "`validation` is -1"),
        ("mad --task copying", "selective-copying"),
        (
            "mad --task memorization",
            "`preset` is 'laptop', which has no task 'memorization'; expected 'paper', 'encoder' or 'mad-lab'",
        ),
        ("mad --preset desktop", "'laptop', 'paper', 'short', 'encoder' or 'mad-lab'"),
        ("mad --seeds 0", "`seeds` is 0"),
        ("mqar --hidden-size 12", "expected 8 or 16"),
        ("mqar --jobs 0", "`jobs` is 0"),
        ("mad --epochs 0", "`epochs` is 0"),
        ("a5 --device tpu", "'cpu' or 'cuda'"),
    ],
)
def test_an_invalid_option_gives_one_line(kalmix, tmp_path: Path, options: str, says: str) -> None:
    result = kalmix("bench", *options.split(), "--output", tmp_path / "out")
    assert result.status == 2
    assert says in result.errors
    assert "Traceback" not in result.output + result.errors
    assert not (tmp_path / "out").exists()


def test_cells_for_a_gpu_are_written_without_one(kalmix, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    file = tmp_path / "cells.jsonl"
    result = kalmix("bench", "mqar", "--device", "cuda", "--write", file)
    assert result.status == 0, result.errors
    assert len(file.read_text().splitlines()) == 4  # two widths at two learning rates


def test_a_report_of_something_else_is_refused(kalmix, tmp_path: Path) -> None:
    assert "has no results.jsonl" in kalmix("bench", "report", tmp_path).errors
    (tmp_path / "results.jsonl").write_text("step,loss\n")
    result = kalmix("bench", "report", tmp_path)
    assert result.status == 2 and "line 1 is not JSON" in result.errors
    for nothing in ("", '{"task": "mqa', '{"step": 1, "seconds": 1.0, "versions": {}}\n'):
        (tmp_path / "results.jsonl").write_text(nothing)
        result = kalmix("bench", "report", tmp_path)
        assert result.status == 2 and "no finished cell" in result.errors
    assert not (tmp_path / "report.md").exists()


@pytest.mark.slow
def test_all_runs_every_bench_into_its_folder(kalmix, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    called = {}

    def recorder(name: str):
        return lambda **options: called.setdefault(name, options)

    for experiment in cli.EXPERIMENTS:
        commands = {name: recorder(name) for name in experiment.commands()}
        monkeypatch.setattr(type(experiment), "commands", lambda _, found=commands: found)
    reported = []
    monkeypatch.setattr(cli, "report", lambda *given: reported.append(given))
    asked = ("bench", "all", "--seeds", 2, "--jobs", 2, "--output", tmp_path)
    assert kalmix(*asked).status == 0
    assert list(called) == ["mad", "mqar", "needle", "a5", "collision", "solvers", "sde"]
    assert reported == [([tmp_path / name for name in called], tmp_path)]
    assert called["mad"] == {"preset": "laptop", "seeds": 2, "jobs": 2, "device": None, "output": tmp_path / "mad"}
    assert called["sde"]["epochs"] < 100  # a laptop has half an hour
    called.clear()
    assert kalmix(*asked, "--preset", "paper").status == 0
    assert "epochs" not in called["sde"] and called["a5"]["preset"] == "paper"
    for wrong in (("--preset", "desktop"), ("--seeds", 0), ("--jobs", 0), ("--device", "tpu")):
        result = kalmix("bench", "all", *wrong)
        assert result.status == 2 and not result.output, wrong


@pytest.mark.slow
def test_needles_are_scored_by_length_and_depth(kalmix, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = tuple(presets._bytes(length, train, 6) for length, train in ((464, 4), (640, 0)))
    protocol = RecallProtocol(epochs=1, batch_size=4, learning_rate=1e-3)
    study = RecallStudy("needle/single-1", parts, (ModelShape(8),), protocol, ("linear-attention",))
    monkeypatch.setitem(BENCHES["needle"], "laptop", (study,))
    result = kalmix("bench", "needle", "--device", "cpu", "--output", tmp_path)
    assert result.status == 0 and "string_match 0.000" in result.output, result.errors
    (row,) = (json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines())
    for scores in row["slices"]["last"]:
        depths = [name for name in scores if name.startswith("depth")]
        assert depths and set(depths) <= {f"depth {fifth}/5" for fifth in range(1, 6)}
    by, found = slices(summarize([row])[0])
    assert by == "depth" and {length for length, _ in found} == {464, 640} and {part[1:] for _, part in found} == {"/5"}
    assert (tmp_path / "lengths.png").read_bytes().startswith(PNG)


@pytest.mark.slow
def test_words_are_scored_by_length(kalmix, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = (Part.of(8, 4, k=3), Part.of(0, 6, k=2), Part.of(0, 4, k=5))
    protocol = RecallProtocol(epochs=1, batch_size=4, learning_rate=1e-3)
    study = RecallStudy("words/a5", parts, (ModelShape(8),), protocol, ("linear-attention",))
    monkeypatch.setitem(BENCHES["a5"], "laptop", (study,))
    result = kalmix("bench", "a5", "--device", "cpu", "--output", tmp_path)
    assert result.status == 0, result.errors
    (row,) = (json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines())
    for scores, value in zip(row["slices"]["score"], (0.5, 1.0, 0.25), strict=True):
        scores["sequence_accuracy"] = value
    (entry,) = summarize([row])
    assert {length: score.mean for length, score in scores_by_length(entry).items()} == {2: 1.0, 3: 0.5, 5: 0.25}
    assert (tmp_path / "words.png").read_bytes().startswith(PNG)
