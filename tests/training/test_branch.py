"""Branches: runs that continue from a checkpoint of another one with another length or cooldown."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from distributed.processes import run_ranks
from distributed.sharded import run_command
from transformers import TrainerCallback

from kalmix import ArgumentError
from kalmix.files import read_json
from kalmix.training import Recipe
from kalmix.training.checkpoints import list_checkpoints, read_settings, run_of
from kalmix.training.run import Run, read_history, train

from .test_run import Kill

STABLE = {"steps": 10, "warmup": 0.2, "cooldown": 0.0, "schedule": "wsd", "keep_steps": 2, "keep_checkpoints": 1}
MARGINAL = {"loss": "marginal"}  # draws samples in every step


class KilledError(BaseException):
    pass


class Die(TrainerCallback):
    """End a run before its first step, as a kill would."""

    def on_step_begin(self, args, state, control, **_) -> None:
        raise KilledError


def names(folder: Path) -> list[str]:
    return [path.name for path in list_checkpoints(folder / "checkpoints")]


def curve(run: Run, name: str, after: int) -> list[tuple[int, float]]:
    """Return the steps and values of the rows after a step, as the log prints them."""
    return [(int(row["step"]), row[name]) for row in run.history if name in row and row["step"] > after]


def assert_equal_from(branch: Run, whole: Run, step: int) -> None:
    """Check that losses, rates and progress after a step, and final weights, are equal bit for bit."""
    for name in ("loss", "bits_per_byte", "grad_norm", "learning_rate", "tokens", "progress"):
        assert curve(branch, name, step) == curve(whole, name, step), name
    assert curve(branch, "loss", step)
    for name, value in whole.model.state_dict().items():
        assert torch.equal(branch.model.state_dict()[name], value), name


@pytest.fixture(params=["shards", "text"])
def make(request: pytest.FixtureRequest, small: Callable, recipe: Callable) -> Callable[..., Recipe]:
    return small if request.param == "shards" else recipe


@pytest.fixture
def stable(small: Callable, tmp_path: Path) -> tuple[Recipe, Path]:
    """Return a finished run without a cooldown, and its folder."""
    train(small(**STABLE), tmp_path / "stable")
    return small(**STABLE), tmp_path / "stable"


def test_branch_without_changes_equals_the_uninterrupted_run(make: Callable, tmp_path: Path) -> None:
    recipe = make(**STABLE | MARGINAL | {"cooldown": 0.4})
    whole = train(recipe, tmp_path / "whole")
    for step in (2, 6):
        branch = train(recipe, tmp_path / f"{step}", branch_from=tmp_path / "whole" / f"checkpoint-{step}")
        assert branch.finished and branch.recipe == recipe
        assert_equal_from(branch, whole, step)
        assert curve(branch, "loss", 0) == curve(whole, "loss", 0)


@pytest.mark.parametrize(
    ("schedule", "step", "steps"),
    [("trapezoid", 4, 6), pytest.param("wsd", 10, 13, marks=pytest.mark.slow), ("wsd", 8, 20)],
)
@pytest.mark.slow
def test_branch_equals_a_run_that_was_planned_so(
    schedule: str, step: int, steps: int, make: Callable, tmp_path: Path
) -> None:
    """Its cooldown begins at the checkpoint, which may be that of the last step, or later."""
    train(make(**STABLE | MARGINAL), tmp_path / "stable")
    cooldown = 1 - step / steps if steps < 20 else 0.1
    changed = make(**STABLE | MARGINAL | {"steps": steps, "cooldown": cooldown, "schedule": schedule})
    branch = train(changed, tmp_path / "branch", branch_from=str(tmp_path / "stable" / f"checkpoint-{step}"))
    planned = replace(changed, warmup=STABLE["warmup"] * STABLE["steps"] / steps)
    assert branch.recipe.warmup == pytest.approx(planned.warmup)
    whole = train(planned, tmp_path / "whole")
    assert_equal_from(branch, whole, step)
    rates = [rate for _, rate in curve(branch, "learning_rate", 0)]
    assert rates[1] < rates[2] == rates[step - 1] and rates[-1] < rates[2]
    assert [row["progress"] for row in branch.history] == sorted(row["progress"] for row in branch.history)


@pytest.mark.slow
def test_several_branches_by_tokens_leave_the_run_as_it_is(stable: tuple[Recipe, Path], tmp_path: Path) -> None:
    recipe, folder = stable
    assert names(folder) == ["checkpoint-10", "checkpoint-8", "checkpoint-6", "checkpoint-4", "checkpoint-2"]
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    step_tokens = 2 * 32
    for step in (2, 4, 8):
        changes: dict[str, Any] = {"steps": None, "tokens": int(1.25 * step * step_tokens), "cooldown": 0.2}
        branch = train(
            replace(recipe, **changes, keep_steps=None),
            tmp_path / f"{step}",
            branch_from=folder / "checkpoints" / f"checkpoint-{step}",
        )
        assert branch.finished and not names(tmp_path / f"{step}")
    longer = train(replace(recipe, steps=12), tmp_path / "longer", branch_from=folder)
    assert longer.steps == 12 and longer.recipe.cooldown == 0 and names(tmp_path / "longer")[0] == "checkpoint-12"
    assert before == {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.slow
def test_branch_resumes_without_the_run_that_it_came_from(stable: tuple[Recipe, Path], tmp_path: Path) -> None:
    recipe, folder = stable
    changed = replace(recipe, steps=12, cooldown=0.3, keep_steps=None)
    whole = train(changed, tmp_path / "whole", branch_from=folder / "checkpoint-8")

    with pytest.raises(KilledError):  # before a checkpoint of its own
        train(changed, tmp_path / "part", branch_from=folder / "checkpoint-8", callbacks=[Die()])
    assert names(tmp_path / "part") == ["checkpoint-8"]
    shutil.rmtree(folder)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        train(Recipe.load(tmp_path / "part"), tmp_path / "part", resume=True, callbacks=[Kill(10)])
        rest = train(Recipe.load(tmp_path / "part"), tmp_path / "part", resume=True)
    assert_equal_from(rest, whole, 8)


@pytest.mark.parametrize("steps", [4, 5])
def test_run_killed_after_its_last_checkpoint_trains_no_further_step(
    steps: int, make: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = make(steps=steps, keep_steps=2, cooldown=0.2)
    whole = train(recipe, tmp_path / "whole")
    monkeypatch.setattr("kalmix.training.run._save_model", lambda *_: (_ for _ in ()).throw(InterruptedError))
    with pytest.raises(InterruptedError):
        train(recipe, tmp_path / "part")
    monkeypatch.undo()
    rest = train(recipe, tmp_path / "part", resume=True)
    assert rest.finished and rest.steps == steps and names(tmp_path / "part") == names(tmp_path / "whole")
    for name, value in whole.model.state_dict().items():
        assert torch.equal(rest.model.state_dict()[name], value)


@pytest.mark.slow
def test_checkpoints_to_keep_do_not_count_for_the_newest(small: Callable, tmp_path: Path) -> None:
    recipe = small(steps=30, keep_steps=10, save_steps=3, keep_checkpoints=2)
    train(recipe, tmp_path / "run", callbacks=[Kill(29)])
    assert names(tmp_path / "run") == [f"checkpoint-{n}" for n in (29, 27, 20, 10)]
    train(recipe, tmp_path / "run", resume=True)
    assert names(tmp_path / "run") == [f"checkpoint-{n}" for n in (30, 20, 10)]
    with pytest.raises(ArgumentError, match="holds a finished run"):
        train(recipe, tmp_path / "run", resume=True)
    assert names(tmp_path / "run") == [f"checkpoint-{n}" for n in (30, 20, 10)]


def test_resuming_a_finished_run_deletes_no_checkpoint_to_branch_from(
    stable: tuple[Recipe, Path],
) -> None:
    recipe, folder = stable
    before = names(folder)
    for changes in ({}, {"keep_steps": None}, {"keep_steps": 5}):
        with pytest.raises(ArgumentError, match="holds a finished run"):
            train(replace(recipe, **changes), folder, resume=True)
        assert names(folder) == before


class StoppedError(Exception):
    pass


@pytest.mark.parametrize("file", ["branch.json", "recipe.json", "checkpoint-8"])
@pytest.mark.slow
def test_branch_that_was_killed_before_it_began_can_begin_again(
    file: str, stable: tuple[Recipe, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe, folder = stable
    changed = replace(recipe, steps=12, keep_steps=None)
    rename, replace_file = Path.rename, Path.replace

    def until(move: Callable) -> Callable:
        def killed(path: Path, target: Path) -> Any:
            if target.name == file and target.is_relative_to(tmp_path / "branch"):
                raise StoppedError
            return move(path, target)

        return killed

    monkeypatch.setattr(Path, "rename", until(rename))
    monkeypatch.setattr(Path, "replace", until(replace_file))
    with pytest.raises(StoppedError):
        train(changed, tmp_path / "branch", branch_from=folder / "checkpoint-8")
    monkeypatch.undo()
    if (tmp_path / "branch" / "branch.json").exists():
        with pytest.raises(
            ArgumentError, match=r"a branch without an intact checkpoint.*step 8 of .*stable, into a new"
        ):
            train(changed, tmp_path / "branch", resume=True)
    assert train(changed, tmp_path / "branch", branch_from=folder / "checkpoint-8").steps == 12
    assert read_json(tmp_path / "branch" / "branch.json")["step"] == 8


@pytest.mark.slow
def test_branch_with_a_damaged_checkpoint_does_not_start_from_the_beginning(
    stable: tuple[Recipe, Path], tmp_path: Path
) -> None:
    recipe, folder = stable
    changed = replace(recipe, steps=12, keep_steps=None)
    with pytest.raises(KilledError):
        train(changed, tmp_path / "branch", branch_from=folder / "checkpoint-8", callbacks=[Die()])
    damaged = tmp_path / "branch" / "checkpoints" / "checkpoint-8" / "optimizer.pt"
    data = damaged.read_bytes()
    damaged.unlink()  # a link
    damaged.write_bytes(data[:-5])
    begun = Recipe.load(tmp_path / "branch")
    with pytest.warns(UserWarning, match="damaged"), pytest.raises(ArgumentError, match="without an intact checkpoint"):
        train(begun, tmp_path / "branch", resume=True)
    shutil.rmtree(tmp_path / "branch" / "checkpoints")
    assert train(changed, tmp_path / "branch").steps == 12  # a new run, which is no branch
    assert not (tmp_path / "branch" / "branch.json").exists()


@pytest.mark.parametrize(
    ("start", "changes", "message"),
    [
        ("checkpoint-8", {}, r"`branch_from` is '.*checkpoint-8', which is in the cooldown .* step 6 or before"),
        ("", {}, r"`branch_from` is '.*checkpoint-10', which is in the cooldown of its run"),
        ("checkpoint-5", {}, r"checkpoint-5', which does not exist; expected checkpoint-2, .*-10. Other.*keep_steps"),
        ("checkpoint-4", {"steps": 4}, r"`steps` is 4, and checkpoint-4 has trained 4; expected more"),
        ("checkpoint-4", {"steps": None, "tokens": 200}, r"`tokens` is 200, and checkpoint-4 has trained 256"),
        ("checkpoint-4", {"steps": 6}, r"`cooldown` is 0.4, so that it begins at step 4 of 6.* at most 0.3333"),
        ("checkpoint-4", {"minutes": 1.0}, r"`minutes` is 1.0; expected None, as in the run to branch from"),
        ("checkpoint-4", {"seed": 1}, r"`seed` is 1; expected 0, as in the run to branch from"),
        ("checkpoint-4", {"warmup": 0.0}, r"`warmup` is 0.0; expected 0.2, as in the run to branch from"),
        ("checkpoint-4", {"schedule": "cosine"}, r"`schedule` is 'cosine'; expected 'trapezoid' or 'wsd'"),
        ("nothing/checkpoint-4", {}, r"`run` is '.*nothing', which holds no run"),
    ],
    ids=str,
)
def test_branches_that_are_impossible_are_refused(
    start: str,
    changes: dict[str, Any],
    message: str,
    small: Callable,
    shards: Path,
    tmp_path_factory: pytest.TempPathFactory,
    tmp_path: Path,
) -> None:
    recipe = small(**STABLE | {"cooldown": 0.4})
    folder = tmp_path_factory.getbasetemp() / "cooled"
    if not folder.exists():
        train(recipe, folder)
    with pytest.raises(ArgumentError, match=message):
        train(replace(recipe, **changes), tmp_path / "branch", branch_from=folder / start)
    assert not names(tmp_path / "branch") and not (tmp_path / "branch" / "recipe.json").exists()


def test_branch_of_a_run_whose_recipe_was_edited_is_refused(stable: tuple[Recipe, Path], tmp_path: Path) -> None:
    _, folder = stable
    saved = json.loads((folder / "recipe.json").read_text())
    for changes, message in (
        ({"learning_rate": 0.1}, r"`learning_rate` is 0\.1; expected 0\.004, as in the run to branch from"),
        ({"steps": 30, "warmup": 0.1}, r"`warmup` is 0\.1; expected 0\.2, as in the run to branch from"),
    ):
        (folder / "recipe.json").write_text(json.dumps(saved | changes))
        with pytest.raises(ArgumentError, match=message):
            train(Recipe.load(folder), tmp_path / "branch", branch_from=folder / "checkpoint-4")


@pytest.mark.slow
def test_checkpoint_of_a_branch_has_its_settings(stable: tuple[Recipe, Path], tmp_path: Path) -> None:
    recipe, folder = stable
    before = (folder / "checkpoints" / "checkpoint-8" / "manifest.json").read_bytes()
    with pytest.raises(KilledError):  # before a checkpoint of its own
        train(replace(recipe, steps=12), tmp_path / "a", branch_from=folder / "checkpoint-8", callbacks=[Die()])
    begun = Recipe.load(tmp_path / "a")
    assert begun.warmup != recipe.warmup
    assert read_settings(tmp_path / "a" / "checkpoints" / "checkpoint-8") == begun
    assert (folder / "checkpoints" / "checkpoint-8" / "manifest.json").read_bytes() == before
    with pytest.raises(ArgumentError, match="`steps` is 11; expected 12, as in the run to resume"):
        train(replace(begun, steps=11), tmp_path / "a", resume=True)
    assert train(begun, tmp_path / "b", branch_from=tmp_path / "a").recipe == begun  # a branch of the branch


def test_damaged_checkpoints_and_folders_of_runs_are_refused(stable: tuple[Recipe, Path], tmp_path: Path) -> None:
    recipe, folder = stable
    with pytest.raises(ArgumentError, match=r"`output` is '.*stable', which holds a run"):
        train(recipe, folder, branch_from=folder / "checkpoint-4")
    with pytest.raises(ArgumentError, match=r"`branch_from` is '.*', with resume=True"):
        train(recipe, tmp_path / "branch", resume=True, branch_from=folder)
    (folder / "checkpoints" / "checkpoint-4" / "optimizer.pt").write_bytes(b"")
    with pytest.raises(ArgumentError, match=r"`branch_from` is '.*checkpoint-4': optimizer.pt is damaged"):
        train(recipe, tmp_path / "branch", branch_from=folder / "checkpoint-4")
    shutil.rmtree(folder / "checkpoints")
    with pytest.raises(ArgumentError, match=r"holds no checkpoint; .*A finished run has those of `keep_steps` only"):
        train(recipe, tmp_path / "branch", branch_from=folder)


@pytest.mark.slow
def test_branch_is_long_enough_for_the_warmup(small: Callable, tmp_path: Path) -> None:
    recipe = small(**STABLE | {"warmup": 0.5})
    train(recipe, tmp_path / "run")
    message = r"`cooldown` is 0.4, so that it begins at step 4 of 7; expected one after the warmup of 5 steps"
    with pytest.raises(ArgumentError, match=message):
        train(replace(recipe, steps=7, cooldown=0.4), tmp_path / "branch", branch_from=tmp_path / "run/checkpoint-2")
    exact = replace(recipe, steps=7, cooldown=2 / 7)
    assert train(exact, tmp_path / "branch", branch_from=tmp_path / "run/checkpoint-2").recipe.warmup == 5 / 7


def test_run_of_a_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tmp_path / "checkpoint-1"
    Recipe(steps=1).save(run)
    for path in (run, run / "checkpoint-2", run / "checkpoints" / "checkpoint-2"):
        assert run_of(path) == run
    (run / "checkpoints").mkdir()
    for folder in (run, run / "checkpoints"):
        monkeypatch.chdir(folder)
        assert run_of(Path("checkpoint-2")) == run


@pytest.mark.slow
def test_command_branches(kalmix, small: Callable, tmp_path: Path) -> None:
    train(small(**STABLE), tmp_path / "stable")
    line = ("pretrain", "--branch-from", tmp_path / "stable" / "checkpoint-8", "--output", tmp_path / "branch")
    settings = [x for change in ("tokens=640", "cooldown=0.2", "keep_steps=none") for x in ("--set", change)]
    result = kalmix(*line, *settings)
    assert result.status == 0, result.errors
    assert f"continuing from {tmp_path / 'stable' / 'checkpoint-8'}" in result.output
    saved = Recipe.load(tmp_path / "branch")
    assert (saved.tokens, saved.steps, saved.cooldown, saved.keep_steps, saved.warmup) == (640, None, 0.2, None, 0.2)
    assert read_history(tmp_path / "branch")[-1]["step"] == 10
    assert not json.loads((tmp_path / "branch" / "history.json").read_text())[0]["progress"] > 0.11
    cases = {
        "`set` changes `seed`, but a branch keeps the settings of its run that affect its result": ("--set", "seed=1"),
        "`recipe` is given with --branch-from; expected only --set": ("kla-45m",),
        "`branch_from` is given with --resume": ("--resume",),
    }
    for message, arguments in cases.items():
        result = kalmix(*line, *arguments)
        assert result.status == 2 and message in result.errors and len(result.errors.splitlines()) == 1


@pytest.mark.slow
def test_branch_in_two_processes_equals_a_run_that_was_planned_so(
    small: Callable,
    tmp_path: Path,
) -> None:
    """The main process alone writes what the others begin with."""
    sizes = {name: getattr(small(), name) for name in ("shards", "vocab_size", "hidden_size", "seq_len", "layers")}
    plan = {**sizes, **STABLE, "layers": "kla", "loss": "marginal", "batch_size": 2, "batch_tokens": 128}
    settings = {"stable": {}, "whole": {"steps": 8, "cooldown": 0.5, "warmup": 0.25, "keep_steps": "none"}}
    for name, changes in settings.items():
        recipe = tmp_path / f"{name}.toml"
        recipe.write_text("".join(f"{key} = {json.dumps(value)}\n" for key, value in plan.items()))
        line = [x for change in changes.items() for x in ("--set", "=".join(map(str, change)))]
        run_ranks(run_command, 2, tmp_path, "pretrain", recipe.name, *line, "--output", name)
    line = ["--set", "steps=8", "--set", "cooldown=0.5", "--set", "keep_steps=none", "--output", "branch"]
    run_ranks(run_command, 2, tmp_path, "pretrain", "--branch-from", "stable/checkpoint-4", *line)
    branch, whole = (read_history(tmp_path / name) for name in ("branch", "whole"))
    for name in ("loss", "grad_norm", "learning_rate"):
        first, second = ([row[name] for row in rows if name in row and row["step"] > 4] for rows in (branch, whole))
        assert first == second and len(first) == 4, name


@pytest.mark.slow
def test_a_refused_branch_is_one_error_of_two_processes(stable: tuple[Recipe, Path], tmp_path: Path) -> None:
    line = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "kalmix.cli"]
    line += ["pretrain", "--branch-from", str(stable[1] / "checkpoint-8"), "--set", f"text={__file__}"]
    ended = subprocess.run([*line, "--output", str(tmp_path / "branch")], capture_output=True, text=True, check=False)
    errors = [text for text in ended.stderr.splitlines() if text.startswith("error:")]
    assert ended.returncode == 1, ended.stderr
    assert errors == ["error: `branch_from` trains on shards, and the branch on text; expected the same kind of data."]
    assert [path.name for path in (tmp_path / "branch").iterdir()] == [".lock"]
