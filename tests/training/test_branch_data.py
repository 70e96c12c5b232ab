"""Branches that train on other shards than the run they came from."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import TrainerCallback

from kalmix import ArgumentError
from kalmix.files import read_json
from kalmix.training import Recipe
from kalmix.training.run import train
from kalmix.training.shards import Order, Preparation, TokenLoader, prepare

from .conftest import WORDS
from .test_branch import STABLE, KilledError, assert_equal_from, curve, names, stable  # noqa: F401 - a fixture


@pytest.fixture(scope="session")
def other(shards: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return shards of other documents with the tokenizer of `shards`."""
    folder = tmp_path_factory.mktemp("other")
    (folder / "corpus").mkdir()
    for n in range(80):
        (folder / "corpus" / f"{n}.txt").write_text(" ".join(WORDS[(7 * n + k) % len(WORDS)] for k in range(20)))
    prepare(Preparation(str(folder / "corpus"), str(shards / "tokenizer"), held_out=0.1), folder / "shards")
    return folder / "shards"


class Watch(TrainerCallback):
    """Store the tokens of each batch that a model trains on, and end the run at a step as a kill would."""

    def __init__(self, until: int = 1000) -> None:
        self.batches: list[torch.Tensor] = []
        self.until = until

    def on_train_begin(self, args, state, control, model, **_) -> None:
        model.register_forward_pre_hook(self._store, with_kwargs=True)

    def _store(self, model, args, given) -> None:
        if model.training:
            self.batches.append(given["input_ids"].clone())

    def on_step_begin(self, args, state, control, **_) -> None:
        if state.global_step == self.until:
            raise KilledError


def first_batches(given: Any, count: int) -> list[torch.Tensor]:
    batches = iter(TokenLoader(given, Order(32, "stream"), batch_size=2))
    return [next(batches)["input_ids"] for _ in range(count)]


@pytest.mark.parametrize("kind", ["other", "mixture", "weights"])
@pytest.mark.slow
def test_branch_reads_other_data_from_their_start(
    kind: str,
    stable: tuple[Recipe, Path],  # noqa: F811
    shards: Path,
    other: Path,
    small: Callable,
    tmp_path: Path,
) -> None:
    recipe, folder = stable
    mixture = {str(shards): 1.0, str(other): 3.0}
    given = str(other) if kind == "other" else mixture
    if kind == "weights":
        folder = tmp_path / "mixed"
        recipe = small(**STABLE | {"shards": {str(shards): 1.0, str(other): 1.0}})
        train(recipe, folder)
    changed = replace(recipe, shards=given, steps=12, cooldown=0.3, keep_steps=None)
    watch = Watch()
    whole = train(changed, tmp_path / "whole", branch_from=folder / "checkpoint-8", callbacks=[watch])
    assert whole.finished and len(watch.batches) == 4
    for batch, expected in zip(watch.batches, first_batches(given, 4), strict=True):
        assert torch.equal(batch, expected)
    assert read_json(tmp_path / "whole" / "branch.json") == {"run": str(folder), "step": 8, "data": "new"}
    parts = [Watch(9), Watch(11), Watch()]  # before a checkpoint of its own, and after one
    with pytest.raises(KilledError):
        train(changed, tmp_path / "part", branch_from=folder / "checkpoint-8", callbacks=[parts[0]])
    begun = Recipe.load(tmp_path / "part")
    with pytest.raises(KilledError):
        train(replace(begun, save_steps=10), tmp_path / "part", resume=True, callbacks=[parts[1]])
    rest = train(begun, tmp_path / "part", resume=True, callbacks=[parts[2]])
    assert_equal_from(rest, whole, 8)
    assert torch.equal(parts[2].batches[0], watch.batches[2])


@pytest.mark.slow
def test_branch_goes_on_with_equal_data_under_another_name(
    stable: tuple[Recipe, Path],  # noqa: F811
    shards: Path,
    tmp_path: Path,
) -> None:
    recipe, folder = stable
    shutil.copytree(shards, tmp_path / "moved")
    whole = train(replace(recipe, steps=12), tmp_path / "whole", branch_from=folder / "checkpoint-8")
    for n, given in enumerate((str(tmp_path / "moved"), {str(tmp_path / "moved"): 5.0})):
        changed = replace(recipe, steps=12, shards=given)
        branch = train(changed, tmp_path / f"{n}", branch_from=folder / "checkpoint-8")
        assert curve(branch, "loss", 8) == curve(whole, "loss", 8)
        assert read_json(tmp_path / f"{n}" / "branch.json")["data"] == "same"


@pytest.mark.slow
def test_branch_goes_on_with_equal_weights_that_are_rounded_otherwise(
    small: Callable,
    shards: Path,
    other: Path,
    tmp_path: Path,
) -> None:
    recipe = small(**STABLE | {"shards": {str(shards): 3.0, str(other): 7.0}})
    train(recipe, tmp_path / "run")
    whole = train(replace(recipe, steps=12), tmp_path / "whole", branch_from=tmp_path / "run" / "checkpoint-8")
    scaled = {str(other): 7.0 * 0.1, str(shards): 3.0 * 0.1}  # in another order
    assert 3.0 * 0.1 / (3.0 * 0.1 + 7.0 * 0.1) != 0.3
    changed = replace(recipe, steps=12, shards=scaled)
    branch = train(changed, tmp_path / "branch", branch_from=tmp_path / "run" / "checkpoint-8")
    assert curve(branch, "loss", 8) == curve(whole, "loss", 8)
    assert read_json(tmp_path / "branch" / "branch.json")["data"] == "same"


@pytest.mark.slow
def test_branches_to_unfit_data_are_refused(
    stable: tuple[Recipe, Path],  # noqa: F811
    recipe: Callable,
    shards: Path,
    other: Path,
    tmp_path: Path,
) -> None:
    given, folder = stable
    prepare(Preparation(str(other.parent / "corpus"), vocab_size=270, held_out=0.1), tmp_path / "tokens")
    (tmp_path / "short.txt").write_text("a b")
    prepare(Preparation(str(tmp_path / "short.txt"), str(shards / "tokenizer"), held_out=0), tmp_path / "short")
    mixture = {str(shards): 0.5, str(tmp_path / "tokens"): 0.5}
    corpus, tokenizer = str(other.parent / "corpus"), str(shards / "tokenizer")
    prepare(Preparation(corpus, tokenizer, bos="a", held_out=0), tmp_path / "begun")
    for path, message in (
        (
            tmp_path / "begun",
            "`shards` begin documents with another token than the run; expected token .*, as `kalmix data",
        ),
        (tmp_path / "tokens", "`shards` have another tokenizer than the run; expected shards that .* --tokenizer"),
        (mixture, "`shards` have 2 different tokenizers"),
        (tmp_path / "short", r"whose split 'train' has . tokens; expected enough for one row"),
        (None, "`branch_from` trains on shards, and the branch on text; expected the same kind of data"),
    ):
        text = None if path else str(Path(__file__))
        changed = replace(given, steps=12, shards=str(path) if isinstance(path, Path) else path, text=text)
        with pytest.raises(ArgumentError, match=message):
            train(changed, tmp_path / "branch", branch_from=folder / "checkpoint-8")
        assert not names(tmp_path / "branch") and not (tmp_path / "branch" / "recipe.json").exists()
    shutil.copytree(shards, tmp_path / "kept")
    kept = replace(given, shards=str(tmp_path / "kept"))
    train(kept, tmp_path / "run")
    shutil.rmtree(tmp_path / "kept")
    shutil.copytree(other, tmp_path / "kept")  # files that changed under one name are an error, no other data
    with pytest.raises(
        ArgumentError, match=r"`shards` is not the same as when '.*run/checkpoints/checkpoint-8' was saved"
    ):
        train(replace(kept, steps=12), tmp_path / "branch", branch_from=tmp_path / "run" / "checkpoint-8")
    assert not names(tmp_path / "branch") and not (tmp_path / "branch" / "recipe.json").exists()


@pytest.mark.slow
def test_branch_of_a_run_on_text_keeps_its_text(recipe: Callable, text_file: Path, tmp_path: Path) -> None:
    train(recipe(**STABLE), tmp_path / "run")
    (tmp_path / "other.txt").write_text(text_file.read_text() + " again" * 9)
    changed = recipe(**STABLE | {"steps": 12, "text": str(tmp_path / "other.txt")})
    message = r"`text` is not the same as when '.*checkpoint-8' was saved; expected unchanged data to branch from it"
    with pytest.raises(ArgumentError, match=message):
        train(changed, tmp_path / "branch", branch_from=tmp_path / "run" / "checkpoint-8")
    text_file_moved = shutil.copy(text_file, tmp_path / "moved.txt")
    changed = replace(changed, text=str(text_file_moved))
    assert train(changed, tmp_path / "branch", branch_from=tmp_path / "run" / "checkpoint-8").steps == 12
