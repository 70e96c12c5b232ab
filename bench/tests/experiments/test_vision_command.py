"""`kalmix bench vision` end to end at tiny sizes; finished runs are skipped; errors are one line."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from PIL import Image

from kalmix_bench.experiments.vision import run
from kalmix_bench.experiments.vision.experiment import PRESETS, Vision, VisionCell
from kalmix_bench.experiments.vision.recipe import DIGITS
from kalmix_bench.runner.cells import Results
from kalmix_bench.runner.experiment import CellStopped

TINY = replace(DIGITS, size=32, width=8, depths=(1, 1, 2, 1), windows=(2, 1), batch_size=2, epochs=1, warmup=0.2)


@pytest.fixture
def images(tmp_path: Path) -> Path:
    for split in ("train", "val"):
        for name, colour in (("apple", (200, 30, 30)), ("lime", (30, 200, 30))):
            folder = tmp_path / "images" / split / name
            folder.mkdir(parents=True)
            for n in range(2):
                Image.new("RGB", (40, 40 + n), colour).save(folder / f"{n}.png")
    return tmp_path / "images"


@pytest.mark.slow
def test_models_are_trained_and_reported_once(
    kalmix, tmp_path: Path, images: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(PRESETS, "laptop", TINY)
    trained, train = [], run.train

    def counting(recipe, *given, **options):
        trained.append((recipe.mixer, recipe.seed))
        return train(recipe, *given, **options)

    monkeypatch.setattr(run, "train", counting)
    output = tmp_path / "run"
    asked = ("bench", "vision", "--images", images, "--device", "cpu", "--output", output)
    result = kalmix(*asked)
    assert result.status == 0, result.errors
    assert trained == [("attention", 0), ("gated-kalmanet", 0)]
    for words in ("gated-kalmanet  seed 0  accuracy", "test accuracy", "seconds"):
        assert words in result.output
    for name in ("vision.png", "vision.svg"):
        assert (output / name).stat().st_size > 1000
    lines = (output / "results.jsonl").read_text()
    rows = [json.loads(line) for line in lines.splitlines()]
    assert [row["recipe"]["mixer"] for row in rows] == ["attention", "gated-kalmanet"]
    assert all(0 <= row["accuracy"] <= 1 and len(row["curves"]["loss"]) == 1 for row in rows)
    assert kalmix(*asked).status == 0
    assert len(trained) == 2 and (output / "results.jsonl").read_text() == lines

    (output / "results.jsonl").write_text("")  # killed after training, before the rows were written
    assert kalmix(*asked).status == 0
    again = [json.loads(line) for line in (output / "results.jsonl").read_text().splitlines()]
    assert len(trained) == 2 and [row["curves"] for row in again] == [row["curves"] for row in rows]
    reported = kalmix("bench", "report", output)
    assert reported.status == 0 and "vision/images" in (output / "report.csv").read_text()


@pytest.mark.slow
def test_a_stopped_cell_resumes_from_its_checkpoint(tmp_path: Path, images: Path) -> None:
    cell, cpu = VisionCell(replace(TINY, images=str(images), epochs=2)), torch.device("cpu")
    whole = Vision().run((cell,), Results(tmp_path / "whole" / "results.jsonl"), cpu, lambda *_: False)
    results, reports = Results(tmp_path / "cut" / "results.jsonl"), []
    with pytest.raises(CellStopped):
        Vision().run((cell,), results, cpu, lambda *_: True)
    assert not Vision().is_complete(cell, results)
    resumed = Vision().run((cell,), results, cpu, lambda done, _: reports.append(done))
    assert reports == [1.0] and Vision().is_complete(cell, results)
    assert resumed[0]["curves"] == whole[0]["curves"]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ("--preset desktop", "'laptop' or 'paper'"),
        ("--preset paper", "a folder of images"),
        ("--images nowhere", "train and val"),
        ("--models rnn", "'attention', "),
        ("--preset paper --images . --jobs 2", "`jobs` is 2"),
        ("--seeds 0", "`seeds` is 0"),
        ("--epochs 0", "`epochs` is 0"),
        ("--device tpu", "'cpu' or 'cuda'"),
    ],
)
def test_an_invalid_option_gives_one_line(kalmix, tmp_path: Path, options: str, says: str) -> None:
    result = kalmix("bench", "vision", "--output", tmp_path / "out", *options.split())
    assert result.status == 2
    assert says in result.errors
    assert "Traceback" not in result.output + result.errors
    assert not (tmp_path / "out").exists()
