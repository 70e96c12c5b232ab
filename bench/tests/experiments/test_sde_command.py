"""`kalmix bench sde` end to end at tiny sizes; nothing runs twice; errors are one line."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import pytest

from kalmix_bench.experiments.sde import PRESETS, SdeProtocol
from kalmix_bench.experiments.sde import report as sde_report

PNG = b"\x89PNG\r\n"


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(
        PRESETS, "laptop", SdeProtocol(epochs=1, batch_size=4, channels=8, train=4, validation=2, test=2)
    )
    monkeypatch.setattr(sde_report, "calibration", functools.partial(sde_report.calibration, trajectories=10))


@pytest.mark.slow
def test_models_are_trained_compared_and_drawn_once(kalmix, tmp_path: Path) -> None:
    asked = ("bench", "sde", "--settings", "figure-1b", "--models", "afa,softmax-2", "--seeds", 2, "--device", "cpu")
    result = kalmix(*asked, "--output", tmp_path)
    assert result.status == 0, result.errors
    for words in ("4.98", "53.18", "a scale a token", "softmax-2  seed 1  error", "smoother", "over kalman", "±"):
        assert words in result.output
    pictures = ("errors", "pulled", "paths-afa", "paths-softmax-2", "maps-figure-1b")
    for name in pictures:
        assert (tmp_path / f"{name}.png").read_bytes().startswith(PNG)
        assert f"{name}.png" in result.output
    lines = (tmp_path / "results.jsonl").read_text()
    rows = [json.loads(line) for line in lines.splitlines()]
    assert [(row["setting"], row["model"], row["seed"]) for row in rows] == [
        ("figure-1b", model, seed) for model in ("references", "afa", "softmax-2") for seed in (0, 1)
    ]
    assert rows[0]["versions"]["torch"] and rows[0]["device"] and "commit" in rows[0]
    again = kalmix(*asked, "--models", "softmax-2", "--output", tmp_path)
    assert again.status == 0 and "error 0" not in again.output
    assert (tmp_path / "results.jsonl").read_text() == lines


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ("--settings figure-2", "'figure-1a', 'figure-1b'"),
        ("--models rnn", "'afa', 'rt-afa', 'recurrent-afa', 'softmax' or 'softmax-2'"),
        ("--preset desktop", "'laptop' or 'paper'"),
        ("--seeds 0", "`seeds` is 0"),
        ("--epochs 0", "`epochs` is 0"),
        ("--device tpu", "'cpu' or 'cuda'"),
    ],
)
def test_an_invalid_option_gives_one_line(kalmix, tmp_path: Path, options: str, says: str) -> None:
    result = kalmix("bench", "sde", "--output", tmp_path / "out", *options.split())
    assert result.status == 2
    assert says in result.errors
    assert "Traceback" not in result.output + result.errors
    assert not (tmp_path / "out").exists()
