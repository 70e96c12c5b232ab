"""`kalmix pretrain`: dry runs, runs on shards and on text, mistakes."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
from dataclasses import replace
from inspect import signature
from pathlib import Path

import pytest
from transformers import TrainerCallback

from kalmix.cli.train import run as run_train
from kalmix.training import Recipe
from kalmix.training.recipe import CHANGEABLE, TRAIN_OPTIONS
from kalmix.training.recipe_files import read_recipe, recipe_names
from kalmix.training.run import finished, read_history, train

SMALL = """
layers = [{ mixer = "kla", slots = 2, repeat = 2 }]
vocab_size = 280
hidden_size = 8
seq_len = 16
batch_tokens = 64
batch_size = 2
steps = 4
eval_tokens = 32
description = "A [small] recipe"
"""


class Interrupt(TrainerCallback):
    """Callback that sends this process SIGTERM during a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_begin(self, args, state, control, **_) -> None:
        if state.global_step == self.step - 1:
            os.kill(os.getpid(), signal.SIGTERM)


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    (tmp_path / "small.toml").write_text(SMALL)
    return tmp_path / "small.toml"


def test_recipes_are_listed(kalmix) -> None:
    result = kalmix("list", "recipes")
    assert result.status == 0, result.errors
    lines = result.output.splitlines()
    assert [line.split()[0] for line in lines] == recipe_names()
    assert "(Kalman Linear Attention, Tables 4 and 13)" in result.output


def test_dry_run_prints_size_work_memory_and_time(kalmix, tmp_path: Path) -> None:
    settings = ("--set", "shards=x", "--gpus", 8, "--gpu", "NVIDIA H200", "--output", tmp_path / "run")
    result = kalmix("pretrain", "gka-2.8b-128k", "--dry-run", *settings)
    assert result.status == 0, result.errors
    for text in (
        "Gated KalmaNet, 2.8B",
        "parameters (128,778,240 in embedding and head), 32 blocks of width 2,560",
        "in 11,921 steps of 2,097,152 tokens (1 x 131,072 tokens, 16 batches a step, 8 devices)",
        "FLOPs a token",
        "GiB on each device",
        "hours on 8 x NVIDIA H200 at an MFU of 30%, an assumption",
    ):
        assert text in result.output
    assert not (tmp_path / "run").exists()
    result = kalmix("pretrain", "kla-45m", "--dry-run", "--gpu", "Abacus")
    assert "no estimated time: the GPU is not known" in result.output
    assert all(name in result.output for name in ("A100,", "MI300X,", "RTX 5090"))


def test_a_mixture_names_each_folder_once(kalmix, recipe: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("a")
    (tmp_path / "a").mkdir()
    for other in ("link", "b/../a"):
        mixture = f'shards={{ "{tmp_path}/a" = 1, "{tmp_path}/{other}" = 2 }}'
        result = kalmix("pretrain", recipe, "--set", mixture, "--output", tmp_path / "run")
        assert result.status == 2 and f"`shards` names '{tmp_path}/a' twice; expected each folder once" in result.errors


def test_dry_run_assumes_the_given_mfu(kalmix) -> None:
    line = ("pretrain", "kla-45m", "--dry-run", "--gpu", "H200")
    whole, part = (kalmix(*line, *more).output.splitlines()[-1] for more in (("--mfu", 0.02), ("--mfu", 0.01)))
    assert whole.endswith("at an MFU of 2%, an assumption") and part.endswith("at an MFU of 1%, an assumption")
    hours = [float(re.search(r"about ([\d.]+) hours", x)[1]) for x in (whole, part)]
    assert hours[1] == pytest.approx(2 * hours[0], rel=0.01)


@pytest.mark.slow
def test_dry_run_refuses_missing_initial_weights_as_the_run_does(
    kalmix, recipe: Path, text_file: Path, tmp_path: Path
) -> None:
    (tmp_path / "empty").mkdir()
    for name, message in (("nothing", "nothing' does not exist; expected"), ("empty", "empty', which holds no model")):
        given = ("pretrain", recipe, "--set", f"text={text_file}", "--set", f"initial={tmp_path / name}")
        dry, real = kalmix(*given, "--dry-run"), kalmix(*given, "--output", tmp_path / "run")
        assert dry.status == real.status == 2
        assert message in dry.errors and dry.errors == real.errors and "`initial`" in dry.errors
        assert "parameters" not in dry.output
    first = read_recipe(str(recipe), [f"text={text_file}", "keep_steps=2"])
    train(first, tmp_path / "first")
    shutil.copytree(tmp_path / "first", tmp_path / "second")
    for weights in ("first", "first/model", "first/checkpoint-2"):
        result = kalmix("pretrain", recipe, "--dry-run", "--set", f"initial={tmp_path / weights}")
        assert result.status == 0 and "parameters" in result.output, result.errors
    replace(first, initial=str(tmp_path / "nothing")).save(tmp_path / "second")  # weights that were deleted
    assert kalmix("pretrain", "--branch-from", tmp_path / "second" / "checkpoint-2", "--dry-run").status == 0


def test_resumed_run_takes_settings_that_do_not_affect_its_result(
    kalmix, recipe: Path, text_file: Path, tmp_path: Path
) -> None:
    shards, moved, output = tmp_path / "shards", tmp_path / "moved", tmp_path / "run"
    result = kalmix("data", "prepare", text_file, "--vocab-size", 270, "--held-out", 0, "--output", shards)
    assert result.status == 0, result.errors
    train(read_recipe(str(recipe), [f"shards={shards}"]), output, callbacks=[Interrupt(3)])
    shards.rename(moved)
    resume = ("pretrain", "--resume", "--output", output)
    refused = kalmix(*resume, "--set", f"shards={moved}", "--set", "steps=9")
    assert refused.status == 2 and "`set` changes `steps`" in refused.errors
    assert all(f"`{name}`" in refused.errors for name in CHANGEABLE) and len(refused.errors.splitlines()) == 1
    changes = [f"shards={moved}", "workers=1", "keep_checkpoints=1", "save_minutes=3", "save_steps=2"]
    settings = [x for change in [*changes, "description=moved"] for x in ("--set", change)]
    result = kalmix(*resume, *settings)
    assert result.status == 0, result.errors
    saved = Recipe.load(output)
    assert (saved.shards, saved.workers, saved.keep_checkpoints) == (str(moved), 1, 1)
    assert (saved.save_minutes, saved.save_steps, saved.description, saved.steps) == (3, 2, "moved", 4)
    assert finished(read_history(output))


def test_resumed_run_refuses_an_edited_recipe(kalmix, recipe: Path, text_file: Path, tmp_path: Path) -> None:
    output = tmp_path / "run"
    train(read_recipe(str(recipe), [f"text={text_file}"]), output, callbacks=[Interrupt(3)])
    edited = json.loads((output / "recipe.json").read_text()) | {"learning_rate": 0.1, "batch_tokens": 32, "workers": 1}
    (output / "recipe.json").write_text(json.dumps(edited))
    for command in (("pretrain", "--set", "keep_checkpoints=1"), ("train",)):
        result = kalmix(command[0], "--resume", "--output", output, *command[1:])
        assert result.status == 2 and len(result.errors.splitlines()) == 1
        named = "`batch_tokens` is 32, `learning_rate` is 0.1; expected `batch_tokens` 64, `learning_rate` 0.004, as in"
        assert named in result.errors
        assert f"If '{output / 'recipe.json'}' was edited, change it back" in result.errors
        assert "workers" not in result.errors
    assert json.loads((output / "recipe.json").read_text()) == edited


def test_resumed_run_refuses_other_data(kalmix, recipe: Path, text_file: Path, tmp_path: Path) -> None:
    train(read_recipe(str(recipe), [f"text={text_file}"]), tmp_path / "run", callbacks=[Interrupt(3)])
    (tmp_path / "other.txt").write_text(text_file.read_text() + "more")
    result = kalmix("pretrain", "--resume", "--output", tmp_path / "run", "--set", f"text={tmp_path / 'other.txt'}")
    assert result.status == 2 and "`text` is not the same" in result.errors


def test_options_of_train_are_listed() -> None:
    assert {*TRAIN_OPTIONS} == {*signature(run_train).parameters} - {"context", "output", "resume"}


@pytest.mark.parametrize(
    ("settings", "command"),
    [({"layers": ("kla",)}, "train"), ({"shards": "x"}, "pretrain"), ({"clip": 2.0}, "pretrain")],
)
def test_run_without_a_model_is_not_called_damaged(kalmix, settings: dict, command: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    (run / "model").mkdir(parents=True)
    (run / "model" / "tokenizer.json").write_text("{}")
    Recipe(steps=30, **settings).save(run)
    hint = f"Continue it with: kalmix {command} --resume --output {run}"
    for arguments in (("generate", run), ("generate", run / "model"), ("inspect", run, "--text", "a")):
        result = kalmix(*arguments)
        assert result.status == 2 and "a run that is not finished" in result.errors
        assert hint in result.errors and "damaged" not in result.errors
    (run / "history.json").write_text('[{"progress": 1.0}]')
    assert "config.json is missing" in kalmix("generate", run).errors


def test_run_on_shards(kalmix, recipe: Path, text_file: Path, tmp_path: Path) -> None:
    shards = tmp_path / "shards"
    result = kalmix("data", "prepare", text_file, "--vocab-size", 270, "--held-out", 0, "--output", shards)
    assert result.status == 0, result.errors
    output = tmp_path / "run"
    result = kalmix("pretrain", recipe, "--set", f"shards={shards}", "--set", "seed=3", "--output", output)
    assert result.status == 0, result.errors
    assert "step 4" in result.output and "gradient" in result.output and "loss" in result.output
    assert "training text:" in result.output and str(output / "model") in result.output
    assert json.loads((output / "recipe.json").read_text())["seed"] == 3
    assert kalmix("generate", output, "--tokens", 3).status == 0
    result = kalmix("report", output)
    assert result.status == 2 and "which was trained on token shards" in result.errors


@pytest.mark.slow
def test_run_that_propagates_samples_generates_and_is_evaluated(kalmix, recipe: Path, text_file: Path, tmp_path: Path):
    pytest.importorskip("lm_eval")
    settings = ("--set", "model.propagate=sample", "--set", f"text={text_file}")
    assert kalmix("pretrain", recipe, *settings, "--output", tmp_path / "run").status == 0
    assert json.loads((tmp_path / "run" / "model" / "config.json").read_text())["propagate"] == "sample"
    assert kalmix("generate", tmp_path / "run", "--tokens", 3).status == 0
    options = ("--suite", "long", "--tasks", "perplexity", "--text", text_file, "--lengths", "32")
    result = kalmix("eval", tmp_path / "run", *options)
    assert result.status == 0, result.errors


def test_run_on_text_ends_with_a_report(kalmix, recipe: Path, text_file: Path, tmp_path: Path) -> None:
    result = kalmix("pretrain", recipe, "--set", f"text={text_file}", "--output", tmp_path / "run")
    assert result.status == 0, result.errors
    assert "this model" in result.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "`recipe` is missing"),
        (("kla-46m",), "which does not exist"),
        (("kla-45m", "--set", "steps"), "`set` is 'steps'"),
        (("kla-45m", "--output", " "), "`output` is empty"),
        (("--resume",), "`output` is missing"),
        (("kla-45m", "--resume", "--output", "x"), "`recipe` is given with --resume"),
        (("--resume", "--output", "x", "--set", "workers=1"), "holds no run"),
        (
            ("--resume", "--output", "x", "--mfu", "0.1"),
            "`mfu` is given with --resume; expected only --output and --set",
        ),
        (("kla-45m", "--dry-run", "--gpu", "H200", "--mfu", "0"), "`mfu` is 0"),
        (("kla-45m", "--set", "steps=1"), "`shards` is missing, and so is `text`"),
        (("kla-45m", "--dry-run", "--gpus", "0"), "`gpus` is 0"),
        (("kla-45m", "--dry-run", "--gpus", "3"), "`batch_tokens`"),
        (("kla-45m", "--set", "shards=nothing"), "nothing"),
    ],
    ids=str,
)
def test_mistakes_are_named(kalmix, arguments: tuple, message: str, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = kalmix("pretrain", *arguments)
    assert result.status == 2
    assert message in result.errors
    assert len(result.errors.strip().splitlines()) == 1
