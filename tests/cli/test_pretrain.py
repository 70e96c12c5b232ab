"""`kalmix pretrain`: dry runs, runs on shards and on text, mistakes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kalmix.training.recipe_files import recipe_names

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
        (("--resume", "--output", "x", "--set", "steps=1"), "`set` is given with --resume"),
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
