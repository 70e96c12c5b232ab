"""Short runs of one layer with other settings: what they train, and what their rows say."""

from __future__ import annotations

import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kalmix.errors import ArgumentError
from kalmix.training.recipe import Recipe
from kalmix_bench.experiments.language import variations
from kalmix_bench.experiments.language.protocol import PRESETS
from kalmix_bench.experiments.language.variations import kind_and_block, recipe_of
from kalmix_bench.runner.json_lines import read_rows

LAPTOP = PRESETS["laptop"]
TINY = LAPTOP._replace(
    main=replace(
        LAPTOP.main,
        model=replace(LAPTOP.main.model, parameters=40_000, hidden_size=16, depth=1),
        **{"seq_len": 32, "batch_tokens": 128, "batch_size": 4, "eval_tokens": 256},
    )
)


def test_settings_behind_the_layer_change_the_recipe(word_shards: Path) -> None:
    text = 'kla:{"slots": 4, "value": "conv"} {"clip": null, "model": {"logit_cap": 15.0}}'
    recipe, row = recipe_of(text, TINY, word_shards, 1024, 1e-2)
    assert recipe.clip is None and recipe.tokens == 1024 and recipe.learning_rate == 1e-2
    assert recipe.model["logit_cap"] == 15.0 and recipe.model["tie_word_embeddings"]
    assert {block["slots"] for block in recipe.layers} == {4}
    assert row["settings"] == {"clip": None, "model": {"logit_cap": 15.0}}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('kla {"colour": 1}', "colour"),
        ("kla [1]", "a JSON object"),
        ("kla {", "a JSON object"),
        ("kla:{ {}", "a name, a colon"),
        ("kalman", "kalman"),
    ],
)
def test_wrong_variations_are_refused(text: str, words: str, word_shards: Path) -> None:
    with pytest.raises(ArgumentError, match=words):
        recipe_of(text, TINY, word_shards, 1024, 1e-2)


def test_kinds_of_parameters_leave_out_the_number_of_the_block() -> None:
    assert kind_and_block("model.blocks.3.mixer.in_proj.weight") == ("mixer.in_proj.weight", "3")
    assert kind_and_block("model.embedding.weight") == ("model.embedding.weight", None)


@pytest.mark.slow
def test_rows_have_losses_and_clipped_gradient_norms_and_are_not_repeated(
    word_shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(PRESETS, "laptop", TINY)
    output = tmp_path / "rows.jsonl"
    arguments = f"variations --preset laptop --shards {word_shards} --tokens 1280 --rate 0.01 --output {output}"
    monkeypatch.setattr(sys, "argv", [*arguments.split(), "kla", 'kla {"clip": 0.001}'])
    variations.main()
    variations.main()
    assert capsys.readouterr().out.count("already there") == 2
    whole, clipped = read_rows(output)
    assert whole["loss"] == pytest.approx(whole["held_out"]["loss"][-1], abs=1e-3) and whole["loss"] < 7
    norms = whole["clipped_norms"]["kinds"]["mixer.out_proj.weight"]
    assert len(norms) == 10 and len(whole["clipped_norms"]["blocks"]) == whole["blocks"][0]["repeat"]
    found = torch.tensor(list(clipped["clipped_norms"]["kinds"].values())).square().sum(0).sqrt()
    assert found.max() <= 0.00101 < norms[0]


def test_a_diverged_variation_is_a_row(word_shards: Path, tmp_path: Path, diverging: None) -> None:
    recipe, _ = recipe_of("kla", TINY, word_shards, 1280, 1e-2)
    row = variations.run_variation(recipe, tmp_path / "run")
    assert row["loss"] is None and "diverge" in row["diverged"]


@pytest.mark.slow
def test_a_variation_that_fails_does_not_stop_the_others(
    word_shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    train = variations.train

    def fail(recipe: Recipe, *args: Any, **options: Any) -> Any:
        if recipe.clip is None:
            raise MemoryError("too large")
        return train(recipe, *args, **options)

    monkeypatch.setitem(PRESETS, "laptop", TINY)
    monkeypatch.setattr(variations, "train", fail)
    output = tmp_path / "rows.jsonl"
    arguments = f"variations --preset laptop --shards {word_shards} --tokens 1280 --rate 0.01 --output {output}"
    monkeypatch.setattr(sys, "argv", [*arguments.split(), 'kla {"clip": null}', "kla"])
    with pytest.raises(SystemExit, match="1"):
        variations.main()
    assert 'failed: kla {"clip": null}: MemoryError: too large' in capsys.readouterr().err
    assert [row["variation"] for row in read_rows(output)] == ["kla"]


@pytest.mark.slow
def test_a_variation_that_a_signal_ends_has_no_row(
    word_shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = []

    def end(self: variations.GradientNorms, *_: Any, **__: Any) -> None:
        steps.append(1)
        if len(steps) == 2:
            signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(variations.GradientNorms, "on_pre_optimizer_step", end)
    recipe, _ = recipe_of("kla", TINY, word_shards, 1280, 1e-2)
    with pytest.raises(KeyboardInterrupt):
        variations.run_variation(recipe, tmp_path / "run")
    assert len(steps) < 10


@pytest.mark.slow
def test_variations_run_side_by_side_on_several_devices(word_shards: Path) -> None:
    tasks = []
    for text in ("kla", 'kla {"clip": 0.001}', 'kla {"warmup": 0.5}'):
        recipe, row = recipe_of(text, TINY, word_shards, 1280, 1e-2)
        tasks.append((recipe, {**row, "variation": text}))
    alone = {row["variation"]: row["loss"] for row in variations._run_all(tasks, [""])}
    together = {row["variation"]: row["loss"] for row in variations._run_all(tasks, ["", ""])}
    assert together == pytest.approx(alone, rel=1e-5) and len(set(alone.values())) == 3
