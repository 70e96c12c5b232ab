"""Runs resume from the newest intact checkpoint, and only with unchanged data."""

from __future__ import annotations

import json
import multiprocessing
import shutil
import time
from contextlib import nullcontext
from dataclasses import replace
from multiprocessing.synchronize import Event
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from kalmix import ArgumentError
from kalmix.errors import FormatError
from kalmix.files import FORMAT, lock_folder
from kalmix.training import Recipe
from kalmix.training.checkpoints import check_step_size, list_checkpoints, newest_checkpoint, read_settings
from kalmix.training.run import train
from kalmix.training.saving import SafeTrainer

from .test_run import Kill


@pytest.fixture(scope="module")
def stopped(text_file: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Recipe, Path]:
    """Return a run of 8 steps that was interrupted after 5, with checkpoints of steps 4 and 5."""
    folder = tmp_path_factory.mktemp("stopped")
    text = folder / "text.txt"
    shutil.copy(text_file, text)
    small = {
        "layers": ({"mixer": "kla", "slots": 4},),
        "vocab_size": 280,
        "hidden_size": 8,
        "seq_len": 16,
        "batch_size": 2,
    }
    recipe = Recipe(text=str(text), steps=8, **small)
    train(recipe, folder / "run", callbacks=[Kill(5)])
    assert [path.name for path in list_checkpoints(folder / "run" / "checkpoints")] == ["checkpoint-5", "checkpoint-4"]
    return recipe, folder / "run"


@pytest.fixture
def halted(stopped: tuple[Recipe, Path], tmp_path: Path) -> tuple[Recipe, Path]:
    """Return a copy of the interrupted run with its own copy of the text."""
    recipe, folder = stopped
    shutil.copytree(folder, tmp_path / "run")
    shutil.copy(str(recipe.text), tmp_path / "text.txt")
    return replace(recipe, text=str(tmp_path / "text.txt")), tmp_path / "run"


STATE = ["model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json"]


@pytest.mark.parametrize("name", [*STATE, "manifest.json"])
@pytest.mark.parametrize("how", ["truncated", "zeroed"])
def test_damaged_checkpoint_is_skipped_for_the_one_before(halted: tuple[Recipe, Path], name: str, how: str) -> None:
    file = halted[1] / "checkpoints" / "checkpoint-5" / name
    content = file.read_bytes()
    half = len(content) // 2
    file.write_bytes(content[:half] + (b"" if how == "truncated" else bytes(len(content) - half)))
    with pytest.warns(UserWarning, match=rf"skipping .*checkpoint-5: {name} is damaged"):
        path = newest_checkpoint(halted[1] / "checkpoints")
    assert path is not None and path.name == "checkpoint-4"


@pytest.mark.parametrize("name", STATE)
def test_checkpoint_with_a_missing_file_is_refused(halted: tuple[Recipe, Path], name: str) -> None:
    recipe, folder = halted
    (folder / "checkpoints" / "checkpoint-5" / name).unlink()
    with pytest.raises(ArgumentError, match=rf"checkpoint-5.*lacks {name}.*Delete that folder"):
        train(recipe, folder, resume=True)


def test_skipped_checkpoint_is_deleted_after_the_next_save(halted: tuple[Recipe, Path]) -> None:
    recipe, folder = halted
    (folder / "checkpoints" / "checkpoint-5" / "optimizer.pt").write_bytes(b"")
    with pytest.warns(UserWarning, match="skipping"):
        train(recipe, folder, resume=True, callbacks=[Kill(7)])
    assert [path.name for path in list_checkpoints(folder / "checkpoints")] == ["checkpoint-7", "checkpoint-5"]
    assert newest_checkpoint(folder / "checkpoints", processes=1) == folder / "checkpoints" / "checkpoint-7"


def test_a_changed_text_or_tokenizer_is_refused(halted: tuple[Recipe, Path]) -> None:
    recipe, folder = halted
    tokenizer = folder / "model" / "tokenizer.json"
    before = tokenizer.read_text()
    tokenizer.write_text(before.replace("\n", "\n ", 1))
    with pytest.raises(ArgumentError, match=r"`tokenizer` is not the same as when .*checkpoint-5"):
        train(recipe, folder, resume=True)
    tokenizer.write_text(before)
    with Path(str(recipe.text)).open("a") as file:
        file.write("\n\nand more")
    with pytest.raises(ArgumentError, match=r"`text` is not the same as when .*checkpoint-5"):
        train(recipe, folder, resume=True)


def edit(file: Path, **changes: object) -> None:
    """Change settings in a recipe.json, as a user would."""
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def test_an_edited_recipe_is_refused_and_its_changes_are_named(halted: tuple[Recipe, Path]) -> None:
    recipe, folder = halted
    checkpoint = folder / "checkpoints" / "checkpoint-5"
    assert read_settings(checkpoint) == replace(recipe, text=read_settings(checkpoint).text)
    before = (folder / "recipe.json").read_text()
    edit(folder / "recipe.json", learning_rate=0.1)
    message = r"^`learning_rate` is 0\.1; expected 0\.004, as in the run to resume\. If '.*recipe.json' was edited, "
    with pytest.raises(ArgumentError, match=message):
        train(Recipe.load(folder), folder, resume=True)
    edit(folder / "recipe.json", batch_size=4, steps=6)
    message = (
        r"^`batch_size` is 4, `steps` is 6, `learning_rate` is 0\.1; "
        r"expected `batch_size` 2, `steps` 8, `learning_rate` 0\.004, as in the run to resume"
    )
    with pytest.raises(ArgumentError, match=message):
        train(Recipe.load(folder), folder, resume=True)
    (folder / "recipe.json").write_text(before)
    edit(folder / "recipe.json", text=recipe.text, keep_checkpoints=1)  # settings that --set may change
    assert train(Recipe.load(folder), folder, resume=True).finished


def test_a_run_whose_checkpoints_lack_settings_resumes(halted: tuple[Recipe, Path]) -> None:
    recipe, folder = halted
    for path in list_checkpoints(folder / "checkpoints"):
        manifest = json.loads((path / "manifest.json").read_text())
        del manifest["recipe"]  # as in older versions of kalmix
        (path / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(ArgumentError, match="`steps` is 9; expected 8, as in the run to resume"):
        train(replace(recipe, steps=9), folder, resume=True)
    assert train(recipe, folder, resume=True).finished


@pytest.mark.parametrize("settings", [{"steps": "x"}, {"steps": 8, "layers": 3}, {}], ids=str)
def test_unreadable_settings_of_a_checkpoint_are_named(halted: tuple[Recipe, Path], settings: object) -> None:
    recipe, folder = halted
    edit(folder / "checkpoints" / "checkpoint-5" / "manifest.json", recipe=settings)
    with pytest.raises(ArgumentError, match=r"checkpoint-5', whose manifest.json has unreadable settings \(`"):
        train(recipe, folder, resume=True)


@pytest.mark.parametrize("settings", [[], "x", 3], ids=str)
def test_checkpoint_whose_settings_are_no_mapping_is_damaged(halted: tuple[Recipe, Path], settings: object) -> None:
    edit(halted[1] / "checkpoints" / "checkpoint-5" / "manifest.json", recipe=settings)
    with pytest.warns(UserWarning, match=r"checkpoint-5: manifest.json is damaged"):
        path = newest_checkpoint(halted[1] / "checkpoints")
    assert path is not None and path.name == "checkpoint-4"


def test_another_number_of_processes_is_refused(halted: tuple[Recipe, Path]) -> None:
    with pytest.raises(ArgumentError, match="`processes` is 2; expected 1"):
        newest_checkpoint(halted[1] / "checkpoints", processes=2)


def test_another_number_of_processes_needs_as_many_sequences_per_step(halted: tuple[Recipe, Path]) -> None:
    checkpoint = halted[1] / "checkpoints" / "checkpoint-5"
    manifest = checkpoint / "manifest.json"
    written = json.loads(manifest.read_text())
    manifest.write_text(json.dumps(written | {"processes": 2, "sequences": 6}))
    check_step_size(checkpoint, 2, 7)
    check_step_size(checkpoint, 3, 6)
    with pytest.raises(ArgumentError, match=r"`processes` is 3; expected 2, .*batch_tokens"):
        check_step_size(checkpoint, 3, 9)


@pytest.mark.parametrize("processes", [1, 2])
def test_sequences_of_a_step_are_those_of_all_batches_and_processes(
    recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, processes: int
) -> None:
    accumulating = recipe(steps=4, grad_accum=3)
    train(accumulating, tmp_path, callbacks=[Kill(2)])
    checkpoint = list_checkpoints(tmp_path / "checkpoints")[0]
    assert json.loads((checkpoint / "manifest.json").read_text())["sequences"] == 3 * 2  # of one process
    state = {"num_processes": processes, "process_index": 0, "is_main_process": True}
    monkeypatch.setattr(
        "kalmix.training.run.process_state", lambda: SimpleNamespace(**state, main_process_first=nullcontext)
    )
    checked = Mock(side_effect=InterruptedError)
    monkeypatch.setattr("kalmix.training.run.check_step_size", checked)
    with pytest.raises(InterruptedError):
        train(accumulating, tmp_path, resume=True)
    checked.assert_called_once_with(checkpoint, processes, 3 * 2 * processes)


def test_a_newer_format_is_refused(halted: tuple[Recipe, Path]) -> None:
    recipe, folder = halted
    for file in (folder / "checkpoints" / "checkpoint-5" / "manifest.json", folder / "recipe.json"):
        written = json.loads(file.read_text())
        assert written["format"] == FORMAT
        file.write_text(json.dumps({**written, "format": FORMAT + 1}))
    newer = f"`format` is {FORMAT + 1} in"
    with pytest.raises(FormatError, match=rf"{newer} '.*manifest.json'; expected at most {FORMAT}. Update kalmix"):
        train(recipe, folder, resume=True)
    with pytest.raises(FormatError, match=rf"{newer} '.*recipe.json'"):
        Recipe.load(folder)


def test_recipe_of_an_old_format_is_refused(halted: tuple[Recipe, Path]) -> None:
    file = halted[1] / "recipe.json"
    written = json.loads(file.read_text())
    for old in (written | {"format": 1}, {name: value for name, value in written.items() if name != "format"}):
        file.write_text(json.dumps(old))
        with pytest.raises(FormatError, match=r"`format` is [01] in '.*recipe.json'; expected at least 2. An older"):
            Recipe.load(halted[1])


@pytest.mark.slow
def test_resuming_before_the_first_checkpoint_warns(recipe, tmp_path: Path) -> None:
    recipe = recipe(eval_tokens=Recipe(steps=1).eval_tokens)  # other numbers are no option of `kalmix train`
    recipe.save(tmp_path)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "tokenizer.json").write_text('{"version')  # truncated, as by a kill
    with pytest.warns(UserWarning, match=rf"stopped before its first.*kalmix train --resume --output {tmp_path}"):
        assert train(recipe, tmp_path, resume=True).finished


@pytest.mark.slow
def test_a_run_without_checkpoints_and_history_starts_again(halted: tuple[Recipe, Path]) -> None:
    recipe, folder = halted
    shutil.rmtree(folder / "checkpoints")
    (folder / "history.json").unlink()
    with pytest.warns(UserWarning, match="stopped before its first checkpoint"):
        assert train(recipe, folder, resume=True).finished


@pytest.mark.parametrize("damage", ["damaged", "deleted", "also history"])
def test_a_run_without_an_intact_checkpoint_does_not_start_again(halted: tuple[Recipe, Path], damage: str) -> None:
    recipe, folder = halted
    for path in list_checkpoints(folder / "checkpoints"):
        (path / "optimizer.pt").write_bytes(b"") if damage == "damaged" else shutil.rmtree(path)
    if damage == "also history":  # perhaps of a finished run
        (folder / "history.json").write_bytes((folder / "history.json").read_bytes()[:9])
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    with pytest.raises(ArgumentError, match="holds a run"):
        train(recipe, folder)
    for given in (recipe, replace(recipe, steps=9)):  # also if recipe.json was edited
        with (
            pytest.warns(UserWarning, match="optimizer.pt is damaged") if damage == "damaged" else nullcontext(),
            pytest.raises(ArgumentError, match=r"run', which holds no intact checkpoint; expected a run that can be"),
        ):
            train(given, folder, resume=True)
    assert before == {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def checkpoints_of(recipe: Recipe, folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Train, and return the steps of all saved checkpoints."""
    steps = []
    publish = SafeTrainer._publish

    def noted(self) -> None:
        publish(self)
        steps.append(list_checkpoints(self._folder)[0].name.removeprefix("checkpoint-"))

    monkeypatch.setattr(SafeTrainer, "_publish", noted)
    train(recipe, folder)
    return steps


def test_run_saves_at_least_four_checkpoints(recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert checkpoints_of(recipe(steps=10), tmp_path, monkeypatch) == ["2", "4", "6", "8"]


def test_run_saves_every_ten_minutes(recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert Recipe.save_minutes == 10
    assert checkpoints_of(recipe(steps=5, save_minutes=1e-9), tmp_path, monkeypatch) == ["1", "2", "3", "4"]


@pytest.mark.slow
def test_run_saves_every_so_many_steps_and_keeps_the_newest(recipe, tmp_path: Path, monkeypatch) -> None:
    settings = {"steps": 30, "save_steps": 9, "keep_checkpoints": 3}
    assert checkpoints_of(recipe(**settings), tmp_path, monkeypatch) == ["6", "9", "12", "18", "24", "27"]


def hold(folder: Path, held: Event) -> None:
    with lock_folder(folder):
        held.set()
        time.sleep(600)


def test_folder_of_a_running_process_is_refused(recipe, tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    held = context.Event()
    other = context.Process(target=hold, args=(tmp_path, held), daemon=True)
    other.start()
    assert held.wait(60)
    with pytest.raises(ArgumentError, match="where a run is under way"):
        train(recipe(), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [".lock"]
    other.kill()
    other.join()
    assert train(recipe(steps=1), tmp_path).finished  # the kernel released the lock
