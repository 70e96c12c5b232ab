"""`kalmix bench collision` end to end at tiny sizes; nothing runs twice; errors are one line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kalmix_bench.experiments.collision import experiment

PNG = b"\x89PNG\r\n"
TINY = ("--steps", 2, "--batch-size", 2, "--test-sequences", 1)


def lines(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_the_mechanism_is_printed_beside_its_closed_forms(kalmix, tmp_path: Path) -> None:
    result = kalmix("bench", "collision", "--parts", "mechanism", "--output", tmp_path / "new")
    assert result.status == 0, result.errors
    for number in ("0.00768", "0.61803", "0.35138", "0.72309", "0.73106", "+0.46", "-0.42"):
        assert number in result.output
    assert str(tmp_path / "new" / "mechanism.png") in result.output
    assert (tmp_path / "new" / "mechanism.png").read_bytes().startswith(PNG)
    written = json.loads((tmp_path / "new" / "mechanism.json").read_text())
    assert written["margins"]["Bayesian Layer"][6] == pytest.approx(0.446, abs=5e-4)


@pytest.mark.parametrize(("part", "model"), [("recall", "reset"), ("crowding", "bayesian")])
@pytest.mark.slow
def test_models_are_trained_tested_and_drawn(kalmix, tmp_path: Path, part: str, model: str) -> None:
    options = ("--parts", part, "--models", model, "--seeds", 2, "--commit", "abc", *TINY, "--output", tmp_path)
    result = kalmix("bench", "collision", *options)
    assert result.status == 0, result.errors
    assert (tmp_path / f"{part}.png").read_bytes().startswith(PNG)
    assert f"{part}  {model}  loss" in result.output
    assert "±" in result.output
    rows = lines(tmp_path)
    assert [(row["study"], row["model"], row["seed"]) for row in rows] == [(part, model, 0), (part, model, 1)]
    assert rows[0]["protocol"]["steps"] == 2
    assert rows[0]["versions"]["torch"] and rows[0]["device"]
    assert rows[0]["commit"] == "abc"
    if part == "recall":
        margins = {(test["flood"], test["overlap"]): test["margin"] for test in rows[0]["scores"]}
        assert {(256, 0.8), (64, 0.8), (64, 0.95)} <= set(margins)
        assert all(-1 <= margin <= 1 for margin in margins.values())


@pytest.mark.slow
def test_a_finished_cell_is_not_run_again(kalmix, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    learned = []
    train = experiment.train

    def counting(model, study, seeds, *rest):
        learned.append(seeds)
        return train(model, study, seeds, *rest)

    monkeypatch.setattr(experiment, "train", counting)
    asked = ("bench", "collision", "--parts", "crowding", "--models", "deltanet", *TINY, "--output", tmp_path)
    assert kalmix(*asked, "--seeds", 2).status == 0
    first = (tmp_path / "results.jsonl").read_text()
    again = kalmix(*asked, "--seeds", 2)
    assert again.status == 0
    assert "±" in again.output
    assert kalmix(*asked, "--seeds", 3).status == 0
    assert learned == [[0, 1], [2]]
    assert (tmp_path / "results.jsonl").read_text().startswith(first)

    (tmp_path / "results.jsonl").write_text(first[: len(first) * 3 // 4])  # a crash in the middle of the second row
    assert kalmix(*asked, "--seeds", 2).status == 0
    assert learned[2:] == [[1]]
    for other in (("--steps", 3), ("--queries", "write")):  # another protocol is another cell
        assert kalmix(*asked, "--seeds", 1, *other).status == 0
    assert learned[3:] == [[0], [0]]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ("--parts recal", "Did you mean 'recall'"),
        ("--models gated", "'reset', 'bayesian', 'bayesian-decay-per-key' or 'bayesian-decay-per-head'"),
        ("--preset desktop", "'laptop' or 'paper'"),
        ("--seeds 0", "`seeds` is 0"),
        ("--steps 0", "`steps` is 0"),
        ("--batch-size -1", "`batch_size` is -1"),
        ("--test-sequences 0", "`test_sequences` is 0"),
        ("--queries ask", "'read' or 'write'"),
        ("--overlap 1", "below 1"),
        ("--device tpu", "'cpu' or 'cuda'"),
    ],
)
def test_an_invalid_option_gives_one_line(kalmix, tmp_path: Path, options: str, says: str) -> None:
    result = kalmix("bench", "collision", "--output", tmp_path / "out", *options.split())
    assert result.status == 2
    assert says in result.errors
    assert "Traceback" not in result.output + result.errors
    assert not (tmp_path / "out").exists()


def test_benches_are_listed(kalmix) -> None:
    assert "collision" in kalmix("bench", "--help").output
