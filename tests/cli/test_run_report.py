"""`kalmix report` evaluates a finished run repeatedly, and an interruption loses nothing."""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from kalmix.cli import report as command
from kalmix.cli.stages import stages
from kalmix.models import KalmixConfig, KalmixForCausalLM
from kalmix.training import Recipe, evaluation
from kalmix.training.evaluation import short_run_warning
from kalmix.training.run import Run
from kalmix.training.schedule import Schedule

from .conftest import SMALL

FIGURES = {"loss.png", "variance.png", "attention.png"}


def numbers(folder: Path) -> dict:
    found = json.loads((folder / "result.json").read_text())
    assert {"versions", "device", "commit"} == found.pop("provenance").keys()
    return found


@pytest.mark.slow
def test_report_is_repeatable(kalmix, run_folder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(run_folder, folder)
    wanted = numbers(folder)
    for name in (*FIGURES, "result.json"):
        (folder / name).unlink()
    result = kalmix("report", folder)
    assert result.status == 0, result.errors
    assert numbers(folder) == wanted
    assert wanted["steps"] == 5 and wanted["tokens"] == 5 * 2 * 16 and wanted["warning"] is None
    assert 0 < wanted["bits_per_byte"] < 9 and wanted["compressors"].keys() == {"gzip -9", "xz -9"}
    assert f"{wanted['bits_per_byte']:.3f}" in result.output and "reading the held-out text" in result.output
    for name in (*FIGURES, "result.json"):
        assert (folder / name).stat().st_size and str(folder / name) in result.output
    assert [path.name for path in folder.iterdir() if path.name.startswith(".")] == [".lock"]


@pytest.mark.slow
def test_report_evaluates_a_run_killed_during_evaluation(
    kalmix, run_folder: Path, text_file: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    train = ["train", "--text", str(text_file), *SMALL, "--steps", "5", "--output", str(folder)]
    with subprocess.Popen([sys.executable, "-m", "kalmix.cli", *train], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("reading the held-out text"):
                process.kill()
    assert process.returncode == -signal.SIGKILL
    assert not (folder / "result.json").exists()
    assert kalmix("train", "--resume", "--output", folder).status == 2
    assert kalmix("report", folder).status == 0
    assert numbers(folder) == numbers(run_folder)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_report_prints_the_command_that_repeats_it(
    kalmix, run_folder: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    wanted, before = numbers(run_folder), signal.getsignal(signal.SIGTERM)

    def interrupted(documents: object) -> dict[str, float]:
        os.kill(os.getpid(), number)
        raise AssertionError("unreachable")

    with monkeypatch.context() as patch:
        patch.setattr(evaluation, "compressor_bits_per_byte", interrupted)
        handler = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
        result = kalmix("report", run_folder)
        signal.signal(signal.SIGINT, handler)
    assert result.status == 130
    assert f"kalmix report {run_folder}" in result.output
    assert signal.getsignal(signal.SIGTERM) is before
    assert numbers(run_folder) == wanted


@pytest.mark.slow
def test_run_interrupted_in_its_last_step_is_not_evaluated(
    kalmix, text_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    began = Schedule.on_train_begin

    def interrupted(schedule: Schedule, *args: Any, **options: Any) -> None:
        began(schedule, *args, **options)
        schedule.signalled = True

    monkeypatch.setattr(Schedule, "on_train_begin", interrupted)
    result = kalmix("train", "--text", text_file, *SMALL, "--steps", 1, "--output", tmp_path / "run")
    assert result.status == 130
    assert f"kalmix report {tmp_path / 'run'}" in result.output and not (tmp_path / "run" / "result.json").exists()
    assert kalmix("report", tmp_path / "run").status == 0


@pytest.mark.slow
def test_figures_are_drawn_after_the_numbers_are_saved(
    kalmix, run_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(run_folder, folder)
    (folder / "result.json").unlink()

    def full(run: Run, rivals: dict[str, float]) -> list[Path]:
        raise OSError(28, "No space left on device")  # as a library raises it, without a path

    monkeypatch.setattr(command, "draw_figures", full)
    result = kalmix("report", folder)
    assert result.status == 1 and "No space left on device" in result.errors and str(folder) in result.errors
    assert numbers(folder) == numbers(run_folder)


def test_unfinished_run_is_refused(kalmix, run_folder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(run_folder, folder)
    history = json.loads((folder / "history.json").read_text())
    history[-1]["progress"] = 0.6
    (folder / "history.json").write_text(json.dumps(history))
    result = kalmix("report", folder)
    assert result.status == 2
    assert "stopped at 60% of its training" in result.errors
    assert f"kalmix train --resume --output {folder}" in result.errors
    (folder / "history.json").unlink()
    result = kalmix("report", folder)
    assert result.status == 2 and "before it saved anything" in result.errors and result.errors.count("\n") == 1


@pytest.mark.slow
def test_changed_text_or_tokenizer_is_refused(kalmix, text_file: Path, tmp_path: Path) -> None:
    text, folder = tmp_path / "text.txt", tmp_path / "run"
    shutil.copy(text_file, text)
    assert kalmix("train", "--text", text, *SMALL, "--steps", 1, "--output", folder).status == 0
    before = (folder / "result.json").read_bytes()
    text.write_text(text_file.read_text() + "\n\nanother paragraph")
    result = kalmix("report", folder)
    assert result.status == 2 and f"`text` is not the same as when '{folder}' was trained" in result.errors
    shutil.copy(text_file, text)
    tokenizer = folder / "model" / "tokenizer.json"
    tokenizer.write_text(tokenizer.read_text().replace("filter", "retlif") + "\n")
    result = kalmix("report", folder)
    assert result.status == 2 and "`tokenizer` is not the same as" in result.errors
    (folder / "inputs.json").write_text("{")
    assert "inputs.json is damaged" in kalmix("report", folder).errors
    assert (folder / "result.json").read_bytes() == before
    (folder / "inputs.json").unlink()  # a run of an older version
    assert kalmix("report", folder).status == 0


@pytest.mark.parametrize(
    ("minutes", "steps", "warmup", "taken", "needed"),
    [
        (1.0, None, 0.02, 49, 50),
        (1.0, None, 0.02, 50, None),
        (1.0, 1000, 0.1, 99, 100),
        (1.0, 1000, 0.1, 100, None),
        (1.0, 8, 0.1, 8, None),  # the steps ended it
        (None, 8, 0.1, 8, None),
        (1.0, None, 0.0, 1, None),
    ],
)
def test_warning_if_training_is_shorter_than_warm_up(minutes, steps, warmup, taken, needed) -> None:
    found = short_run_warning(Recipe(minutes=minutes, steps=steps, warmup=warmup), taken)
    if needed is None:
        assert found is None
    else:
        assert found is not None and f"{taken} training steps, fewer than the {needed}" in found


@pytest.mark.slow
def test_meaningless_result_has_a_warning(kalmix, text_file: Path, tmp_path: Path) -> None:
    result = kalmix("train", "--text", text_file, *SMALL, "--minutes", 1e-4, "--output", tmp_path)
    assert result.status == 0, result.errors
    assert "not meaningful" in result.output
    assert "not meaningful" in numbers(tmp_path)["warning"]


@pytest.mark.parametrize("terminal", [True, False])
def test_stages_show_a_bar_on_a_terminal_and_lines_elsewhere(terminal: bool) -> None:
    file = io.StringIO()
    with stages(Console(file=file, force_terminal=terminal, width=80)) as progress:
        for done in (0.0, 0.5, 1.0):
            progress("reading", done)
        progress("drawing", 0.0)
    if terminal:
        assert "reading" in file.getvalue() or "drawing" in file.getvalue()
    else:
        assert file.getvalue() == "reading\ndrawing\n"


def test_surprisals_report_progress() -> None:
    network = KalmixForCausalLM(KalmixConfig(vocab_size=257, hidden_size=8, layers=["kla"]))
    seen: list[float] = []
    evaluation.surprisals(network, torch.arange(40), window=8, batch_size=3, progress=seen.append)
    assert seen == sorted(seen) and seen[0] == 0 and seen[-1] == 1 and len(seen) > 3
