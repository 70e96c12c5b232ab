"""`kalmix bench run` runs the cells of a file, ends by its deadline, and continues where it stopped."""

from __future__ import annotations

import json
import os
import re
import shlex
import time
from pathlib import Path

import pytest
import torch

import kalmix_bench.experiments.recall.trainer  # noqa: F401 - each process would import it
from kalmix.errors import ArgumentError
from kalmix_bench.experiments.recall.cell_line import parse_cell
from kalmix_bench.experiments.recall.protocol import RecallCell
from kalmix_bench.runner import options, workers
from kalmix_bench.runner.cells import digest

from .clock import DEADLINE, set_clock

DOCS = Path(__file__).parents[3] / "docs" / "benchmarks.md"
LINE = {
    "task": "mad/selective-copying",
    "parts": [{"train": 8, "test": 4, "settings": {"seq_len": 12, "num_tokens_to_copy": 2}}],
    "layer": 'kla:{"slots": 2}',
    "shape": {"hidden_size": 8},
    "protocol": {"epochs": 2, "batch_size": 4, "learning_rate": 0.001},
    "seed": 0,
}


@pytest.fixture(autouse=True)
def start_quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fork processes, which see no GPU, and end them at once: each holds the pipes of those before it."""
    monkeypatch.setattr(workers, "START_METHOD", "fork")
    monkeypatch.setattr(workers, "SHUTDOWN_SECONDS", 0.05)


def line(**changes: object) -> dict:
    """Return a cell with changes; names such as `protocol__epochs` change a nested value."""
    changed = json.loads(json.dumps(LINE))
    for name, value in changes.items():
        outer, _, inner = name.partition("__")
        if inner:
            changed[outer][inner] = value
        else:
            changed[outer] = value
    return changed


def lines(path: Path, *cells: dict) -> Path:
    path.write_text("".join(json.dumps(cell) + "\n" for cell in cells))
    return path


def rows(folder: Path) -> list[dict]:
    return [json.loads(row) for row in (folder / "results.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_the_documented_commands_write_cells_and_run_them(kalmix, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    example = re.search(
        r"```\n(kalmix bench mad .*--write.*)\n(kalmix bench run .*--deadline.*)\n```", DOCS.read_text()
    )
    assert example, "docs/benchmarks.md has no such example"
    write, run = (shlex.split(command.partition("#")[0])[1:] for command in example.groups())
    result = kalmix(*write)
    assert result.status == 0, result.errors
    (file,) = tmp_path.glob("*.jsonl")
    written = [json.loads(cell) for cell in file.read_text().splitlines()]
    assert all(json.loads(json.dumps(parse_cell(cell).to_dict())) == cell for cell in written)
    small = [line(layer=cell["layer"], shape={"hidden_size": 8, "depth": cell["shape"]["depth"]}) for cell in written]
    small = [cell for place, cell in enumerate(small) if cell not in small[:place]]
    assert len(small) == 4
    lines(file, *small)
    result = kalmix(*(["cpu" if word == "all" else "2" if word == "9" else word for word in run]))
    assert result.status == 0, result.errors
    (results,) = tmp_path.rglob("results.jsonl")
    assert len(rows(results.parent)) == 4
    assert "report.md" in result.output


@pytest.mark.slow
def test_a_run_ends_by_its_deadline_and_continues(kalmix, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long = line(protocol__epochs=100_000, layer="linear-attention")
    file = lines(tmp_path / "cells.jsonl", line(layer="linear-attention"), long, line(layer="linear-attention", seed=1))
    output = tmp_path / "out"
    asked = ("bench", "run", file, "--devices", "cpu", "--jobs-per-device", 2, "--output", output)
    with monkeypatch.context() as patch:
        set_clock(patch, output / "results.jsonl", 2)
        began = time.monotonic()
        result = kalmix(*asked, "--deadline", DEADLINE)
    assert result.status == 3 and time.monotonic() - began < 120, result.errors
    assert "2 of 3 cells are finished" in result.output
    (checkpoints,) = (output / "checkpoints").iterdir()
    (newest, *_) = sorted(checkpoints.glob("checkpoint-*"), key=lambda path: int(path.name.rpartition("-")[2]))[::-1]
    steps = json.loads((newest / "trainer_state.json").read_text())["global_step"]
    assert steps > 0
    enough = line(protocol__epochs=steps // 2 + 2, layer="linear-attention")  # two steps an epoch
    lines(file, enough, *(json.loads(row) for row in file.read_text().splitlines()[::2]))
    (output / "checkpoints" / digest(parse_cell(enough))).parent.mkdir(exist_ok=True)
    checkpoints.rename(output / "checkpoints" / digest(parse_cell(enough)))
    result = kalmix(*asked)
    assert result.status == 0, result.errors
    found = rows(output)
    assert [row["protocol"]["epochs"] for row in found[:2]] == [2, 2] and len(found) == 3
    assert found[2]["epochs"] == steps // 2 + 2 and found[2]["commit"] == found[0]["commit"]
    assert not list((output / "checkpoints").iterdir())


def test_a_cell_that_fails_leaves_the_others_alone(kalmix, tmp_path: Path) -> None:
    bad = line(layer='gla:{"samples": 3}')
    file = lines(tmp_path / "cells.jsonl", bad, line(layer="linear-attention"))
    result = kalmix("bench", "run", file, "--devices", "cpu", "--output", tmp_path)
    assert result.status == 1
    assert 'gla:{"samples": 3}' in result.errors and "posterior" in result.errors and "Traceback" not in result.errors
    assert [row["layer"] for row in rows(tmp_path)] == ["linear-attention"] and "1 of 2 cells" in result.output


@pytest.mark.parametrize(
    ("cell", "says"),
    [
        (line(layer="kalman"), "cells.jsonl, line 2: `layer` is 'kalman'"),
        (line(layer='kla:{"slot": 1}'), "line 2: `slot` is not an option of 'kla'"),
        (line(task="mad/copying"), "line 2: `name` is 'mad/copying'"),
        (line(shape__widht=8), "line 2: `shape` has the key 'widht'"),
        (line(shape__hidden_size="8"), "line 2: `hidden_size` is '8'; expected an integer"),
        (line(protocol__betas=["a"]), "line 2: `betas`"),
        (line(protocol={"epochs": 2}), "line 2: `protocol` lacks batch_size, learning_rate"),
        (line(parts=[{"train": 8, "test": 4, "settings": {"length": 3}}]), "line 2: `length`"),
        (line(parts=[]), "line 2: `parts` lacks"),
        (line(parts=[3]), "line 2: `parts` contains 3"),
        (line(parts=[{"train": -8, "test": 4}]), "line 2: `train` is -8; expected at least 0"),
        (line(seed=-1), "line 2: `seed` is -1; expected at least 0"),
        (line(seed=None), "line 2: `seed` is None"),
        (line(extra=1), "line 2: `cell` has the key 'extra'"),
        (line(mixer={"mixer": "kla", "slots": 4}), "line 2: `mixer` is"),
        ({}, "line 2: `cell` lacks task"),
        ([1], "line 2: `cell` is a list"),
    ],
)
def test_a_bad_line_is_one_sentence_with_its_number(kalmix, tmp_path: Path, cell: dict, says: str) -> None:
    file = lines(tmp_path / "cells.jsonl", line(), cell)
    result = kalmix("bench", "run", file, "--devices", "cpu", "--output", tmp_path / "out")
    assert result.status == 2 and says in result.errors and "Traceback" not in result.errors
    assert result.errors.count("error:") == 1 and not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("content", "words", "says"),
    [
        ("{", (), "line 1: `cell` is not JSON"),
        ("\n", (), "has no cell"),
        (None, (), "cells.jsonl is missing"),
        (json.dumps(LINE), ("--deadline", 0), "`deadline` is 0"),
        (json.dumps(LINE), ("--jobs-per-device", 0), "`jobs-per-device` is 0"),
        (json.dumps(LINE), ("--devices", "tpu"), "`devices` is 'tpu'"),
    ],
)
def test_an_invalid_option_gives_one_line(kalmix, tmp_path: Path, content: str | None, words: tuple, says: str) -> None:
    file = tmp_path / "cells.jsonl"
    if content is not None:
        file.write_text(content)
    result = kalmix("bench", "run", file, "--output", tmp_path / "out", *words)
    assert result.status == 2 and says in result.errors, result.errors
    assert not (tmp_path / "out").exists()


def test_a_line_may_leave_out_defaults_and_a_row_of_results_is_a_line() -> None:
    cell = parse_cell(line(protocol__learning_rate=1))
    assert (
        isinstance(cell, RecallCell)
        and cell.protocol.learning_rate == 1.0
        and isinstance(cell.protocol.learning_rate, float)
    )
    row = {**cell.to_dict(), "seconds": 1.0, "versions": {}, "scores": {}}
    assert parse_cell(json.loads(json.dumps(row))).to_dict() == cell.to_dict()


def test_devices_are_gpus_as_each_process_sees_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.delenv(workers.VISIBLE_DEVICES, raising=False)
    assert options.gpus(None) == options.gpus("all") == ["0", "1", "2"]
    assert options.gpus("2,0") == ["2", "0"] and options.gpus("cpu") == [""]
    monkeypatch.setenv(workers.VISIBLE_DEVICES, "5,GPU-7,3")
    assert options.gpus("1,2") == ["GPU-7", "3"]
    for wrong in ("3", "0,0", "-1", "", "a"):
        with pytest.raises(ArgumentError, match="from 0 to 2"):
            options.gpus(wrong)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert options.gpus(None) == [""]
    with pytest.raises(ArgumentError, match="no GPU"):
        options.gpus("all")
    with workers._visible_devices("GPU-7"):
        assert os.environ[workers.VISIBLE_DEVICES] == "GPU-7"
    assert os.environ[workers.VISIBLE_DEVICES] == "5,GPU-7,3"
