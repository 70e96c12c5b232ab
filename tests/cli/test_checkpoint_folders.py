"""Commands that take a run also take RUN/checkpoint-N."""

from __future__ import annotations

import json
import shutil
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from kalmix.cli.load_run import load_model
from kalmix.training import Recipe
from kalmix.training.run import train

GREEDY = ("--prompt", "filter", "--temperature", 0, "--tokens", 9)


@pytest.fixture(scope="module")
def finished(text_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a finished run on text with checkpoints of steps 2 and 4, the last one."""
    sizes = {"vocab_size": 280, "hidden_size": 8, "seq_len": 16, "batch_size": 2, "eval_tokens": 64}
    layers = ("kla", "attention")
    recipe = Recipe(text=str(text_file), layers=layers, steps=4, keep_steps=2, separate_documents=True, **sizes)
    folder = tmp_path_factory.mktemp("runs") / "run"
    train(recipe, folder)
    return folder


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    """Return a copy of that run."""
    return Path(shutil.copytree(finished, tmp_path / "run"))


def names(result: object, folder: str) -> bool:
    """Return whether a command wrote the files of a report into a folder."""
    return all(f"{folder}/{name}" in str(result) for name in ("result.json", "loss.png", "variance.png"))


@pytest.mark.parametrize("place", ["", "checkpoints"])
@pytest.mark.slow
def test_generate_takes_a_checkpoint(kalmix, run: Path, place: str) -> None:
    whole = kalmix("generate", run, *GREEDY)
    last = kalmix("generate", run / place / "checkpoint-4", *GREEDY)
    assert last.status == 0, last.errors
    assert last.output == whole.output
    for name in ("model/model.safetensors", "model/config.json", "history.json"):
        (run / name).unlink()  # a run that is under way, or was killed
    assert kalmix("generate", run / place / "checkpoint-4", *GREEDY).output == whole.output


def test_weights_are_those_of_the_checkpoint(run: Path) -> None:
    folder = run / "checkpoints" / "checkpoint-2"
    config = json.loads((folder / "config.json").read_text())
    assert config["max_packed_sequences"] is not None
    model = load_model(run / "checkpoint-2")
    assert model.config.max_packed_sequences is None and not model.training
    saved, last = load_file(folder / "model.safetensors"), load_file(run / "model" / "model.safetensors")
    for name, value in saved.items():
        assert torch.equal(model.state_dict()[name], value), name
    assert any(not torch.equal(value, last[name]) for name, value in saved.items())


def test_checkpoint_of_the_current_folder_is_found(kalmix, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = kalmix("generate", run, *GREEDY).output
    monkeypatch.chdir(run)
    assert kalmix("generate", "checkpoint-4", *GREEDY).output == whole


def test_inspect_takes_a_checkpoint(kalmix, run: Path, tmp_path: Path) -> None:
    first = kalmix("inspect", run / "checkpoint-2", "--text", "a filter", "--output", tmp_path / "out")
    assert first.status == 0, first.errors
    assert "bits each on average" in first.output and (tmp_path / "out" / "beliefs.html").exists()


@pytest.mark.slow
def test_report_of_a_checkpoint_leaves_the_run_as_it_is(kalmix, run: Path) -> None:
    assert kalmix("report", run).status == 0
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    whole = json.loads((run / "result.json").read_text())
    (run / "history.json").unlink()  # of a run that is under way
    for step in (4, 2):
        result = kalmix("report", run / f"checkpoint-{step}")
        assert result.status == 0, result.errors
        folder = run / "evaluation" / f"checkpoint-{step}"
        assert names(result.output, str(folder)) and str(run / "checkpoints" / f"checkpoint-{step}") in result.output
        found = json.loads((folder / "result.json").read_text())
        assert (found["steps"], found["tokens"]) == (step, step * 2 * 16)
        assert (found["bits_per_byte"] == whole["bits_per_byte"]) == (step == 4)
    (run / "history.json").write_bytes(before[run / "history.json"])
    assert before == {path: path.read_bytes() for path in before}
    (run / "checkpoints" / "checkpoint-2" / "trainer_state.json").write_text("{")
    assert "checkpoint-2': trainer_state.json is damaged" in kalmix("report", run / "checkpoint-2").errors


def test_damaged_checkpoint_is_refused(kalmix, run: Path) -> None:
    weights = run / "checkpoints" / "checkpoint-2" / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-3] ^= 64  # an exponent bit of one weight; without its checksum the file is valid
    weights.write_bytes(content)
    initial = f"initial={run / 'checkpoint-2'}"
    commands = {
        ("generate", run / "checkpoint-2"): "model",
        ("inspect", run / "checkpoint-2", "--text", "a"): "model",
        ("eval", run / "checkpoint-2", "--suite", "long", "--tasks", "niah_single_1", "--lengths", 512): "model",
        ("pretrain", "kla-45m", "--set", initial, "--dry-run"): "initial",
    }
    if find_spec("lm_eval") is None:
        commands = {command: name for command, name in commands.items() if command[0] != "eval"}
    for command, name in commands.items():
        result = kalmix(*command)
        assert result.status == 2 and len(result.errors.splitlines()) == 1
        assert f"`{name}` is '{weights.parent}': model.safetensors is damaged; expected an intact" in result.errors
    weights.unlink()
    assert "checkpoint-2': it lacks model.safetensors;" in kalmix("generate", run / "checkpoint-2").errors
    (run / "checkpoints" / "checkpoint-4" / "optimizer.pt").write_bytes(b"")  # generate does not read it
    assert kalmix("generate", run / "checkpoint-4", *GREEDY).status == 0


def test_missing_checkpoints_are_named(kalmix, run: Path) -> None:
    for command in (("generate",), ("inspect", "--text", "a"), ("report",)):
        result = kalmix(command[0], run / "checkpoint-3", *command[1:])
        assert result.status == 2 and len(result.errors.splitlines()) == 1
        assert "checkpoint-3', which does not exist; expected checkpoint-2, checkpoint-4. Other" in result.errors
    result = kalmix("generate", run.parent / "checkpoint-3")
    assert result.status == 2 and "checkpoint-3' does not exist; expected a folder that" in result.errors


def test_checkpoint_of_another_trainer_is_a_model_folder(kalmix, run: Path, tmp_path: Path) -> None:
    shutil.copytree(run / "model", tmp_path / "checkpoint-3")
    assert kalmix("generate", tmp_path / "checkpoint-3", *GREEDY) == kalmix("generate", run, *GREEDY)


def test_checkpoint_with_weights_in_pieces_is_refused(kalmix, run: Path) -> None:
    folder = run / "checkpoints" / "checkpoint-4"
    for name in ("config.json", "generation_config.json", "model.safetensors"):
        (folder / name).unlink()  # as with FSDP
    (folder / "pytorch_model_fsdp_0").mkdir()
    for command in (("generate",), ("inspect", "--text", "a")):
        result = kalmix(command[0], run / "checkpoint-4", *command[1:])
        assert result.status == 2 and len(result.errors.splitlines()) == 1
        assert "a checkpoint of a run with `fsdp`, whose weights are in pieces; expected" in result.errors
        assert f"writes its model to {run / 'model'} when it ends, also by Ctrl-C" in result.errors
