"""Runs on token shards: batches, optimizer settings, exact resume."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from kalmix import ArgumentError
from kalmix.models import KalmixConfig, KalmixForCausalLM, optimizer
from kalmix.models.optimizer import optimizer_groups
from kalmix.training import Recipe, recipe_checks, trainer
from kalmix.training.batching import plan_batches
from kalmix.training.initial_model import build
from kalmix.training.recipe import CHANGEABLE
from kalmix.training.run import train
from kalmix.training.shards import Preparation, prepare

from .test_run import Kill


@pytest.mark.parametrize("changes", [{"packing": "best-fit"}, {"batch_tokens": 128, "workers": 1}], ids=str)
def test_run_on_shards_resumes_bit_exactly(changes: dict, small, shards: Path, tmp_path: Path) -> None:
    recipe = small(**changes)
    whole = train(recipe, tmp_path / "whole")
    assert (whole.finished, whole.steps, len(whole.training), len(whole.held_out)) == (True, 6, 6, 6)
    part = train(recipe, tmp_path / "part", callbacks=[Kill(3)])
    assert (part.finished, part.steps) == (False, 3)
    rest = train(recipe, tmp_path / "part", resume=True)
    assert rest.training == whole.training and rest.held_out == whole.held_out
    for name, value in whole.model.state_dict().items():
        assert torch.equal(rest.model.state_dict()[name], value)
    assert whole.training[-1][0] == 6 * 32 * (4 if "batch_tokens" in changes else 2)


@pytest.mark.slow
def test_changeable_settings_do_not_affect_the_result_of_a_resumed_run(small, shards: Path, tmp_path: Path) -> None:
    whole = train(small(), tmp_path / "whole")
    train(small(), tmp_path / "part", callbacks=[Kill(3)])
    shutil.copytree(shards, tmp_path / "moved")
    changes = {
        "shards": str(tmp_path / "moved"),
        "workers": 2,
        "keep_checkpoints": 1,
        "keep_steps": 2,
        "save_minutes": 1e-4,
    }
    changes |= {"save_steps": 1, "report_to": ("tensorboard",), "description": "moved"}
    assert {*changes, "text"} == {*CHANGEABLE}
    rest = train(small(**changes), tmp_path / "part", resume=True)
    assert rest.training == whole.training and rest.held_out == whole.held_out
    for name, value in whole.model.state_dict().items():
        torch.testing.assert_close(rest.model.state_dict()[name], value, rtol=0, atol=0)


def test_run_on_a_mixture_of_shards(small, shards: Path, tmp_path: Path) -> None:
    ended = train(small(shards={str(shards): 3.0}, steps=1), tmp_path / "run")
    assert math.isfinite(ended.training[0][1])
    assert (tmp_path / "run" / "model" / "tokenizer.json").read_bytes() == (
        shards / "tokenizer" / "tokenizer.json"
    ).read_bytes()


def test_resumed_run_refuses_other_weights_of_its_shards(small, shards: Path, tmp_path: Path) -> None:
    shutil.copytree(shards, tmp_path / "copy")
    mixture = {str(shards): 1.0, str(tmp_path / "copy"): 1.0}
    train(small(shards=mixture), tmp_path / "run", callbacks=[Kill(3)])
    other = small(shards={**mixture, str(shards): 3.0})
    with pytest.raises(ArgumentError, match=r"`shards` have the weights \[3\.0, 1\.0\]; expected \[1\.0, 1\.0\]"):
        train(other, tmp_path / "run", resume=True)
    assert Recipe.load(tmp_path / "run").shards == mixture  # the refused settings do not replace those of the run
    scaled = small(shards=dict.fromkeys(mixture, 5.0))
    assert train(scaled, tmp_path / "run", resume=True).finished


@pytest.mark.slow
def test_order_of_the_folders_of_a_mixture_is_that_of_its_run(small, shards: Path, tmp_path: Path) -> None:
    shutil.copytree(shards, tmp_path / "copy")
    (tmp_path / "more.txt").write_text("a filter is a recurrence. " * 200)
    prepare(Preparation(str(tmp_path / "more.txt"), tokenizer=str(shards / "tokenizer"), held_out=0), tmp_path / "more")
    mixture = {str(shards): 1.0, str(tmp_path / "more"): 2.0}
    reversed_mixture = dict(reversed(mixture.items()))
    whole = train(small(shards=mixture), tmp_path / "whole")
    train(small(shards=mixture), tmp_path / "part", callbacks=[Kill(3)])
    for weights in ((2.0, 1.0), (1.0, 2.0)):
        moved = small(shards=dict(zip((str(tmp_path / "more"), str(tmp_path / "copy")), weights, strict=True)))
        message = r"\[1.0, 2.0\], in this order" if weights[0] == 2 else "in the order of recipe.json"
        with pytest.raises(ArgumentError, match=f"`shards` .*{message}"):
            train(moved, tmp_path / "part", resume=True)
    with pytest.raises(
        ArgumentError, match=r"`text` is given, and '.*checkpoint-3' was trained on shards; expected sh"
    ):
        train(small(shards=None, text=str(tmp_path / "more.txt")), tmp_path / "part", resume=True)
    rest = train(small(shards=reversed_mixture), tmp_path / "part", resume=True)
    assert rest.training == whole.training and rest.held_out == whole.held_out
    assert list(Recipe.load(tmp_path / "part").shards or ()) == list(mixture)


def test_batches_are_copied_without_waiting_for_the_gpu(small, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainers = []
    step = trainer.KalmixTrainer.training_step
    monkeypatch.setattr(
        trainer.KalmixTrainer, "training_step", lambda self, *args: trainers.append(self) or step(self, *args)
    )
    train(small(steps=1, eval_tokens=0), tmp_path / "run")
    copying, targets = trainers[0], torch.tensor([[3, -100, 5]])
    batch = {"labels": targets, "shift_labels": targets, "rows": [torch.ones(1 << 20)], "skip_logits": True}
    on_gpu = copying.args.device.type == "cuda"
    if on_gpu:
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
    try:
        _, count = copying.get_batch_samples(iter([batch]), 1, copying.args.device)
        copied = copying._prepare_input(batch)
    finally:
        if on_gpu:
            torch.cuda.set_sync_debug_mode("default")
    assert copied["labels"].device == count.device == copied["rows"][0].device == copying.model.device
    assert count == 2 and torch.equal(copied["labels"].cpu(), targets)
    assert copied["rows"][0].sum() == 1 << 20 and copied["skip_logits"] is True


def test_shards_with_a_larger_vocabulary_are_refused(small, tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=r"`vocab_size` is 260.*at least"):
        train(small(vocab_size=260), tmp_path / "run")


@pytest.mark.slow
def test_run_begins_with_weights_of_another(small, tmp_path: Path) -> None:
    first = train(small(steps=1), tmp_path / "first")
    second = train(small(steps=1, learning_rate=1e-30, initial=str(tmp_path / "first")), tmp_path / "second")
    for name, value in first.model.state_dict().items():
        torch.testing.assert_close(second.model.state_dict()[name], value)
    train(small(keep_steps=2), tmp_path / "run")
    saved = load_file(tmp_path / "run" / "checkpoints" / "checkpoint-2" / "model.safetensors")
    begun = train(
        small(steps=1, learning_rate=1e-30, initial=str(tmp_path / "run" / "checkpoint-2")), tmp_path / "begun"
    )
    for name, value in saved.items():
        torch.testing.assert_close(begun.model.state_dict()[name], value)
    with pytest.raises(ArgumentError, match="`initial`"):
        train(small(steps=1, hidden_size=16, initial=str(tmp_path / "first")), tmp_path / "third")


def test_weights_that_were_trained_with_another_tokenizer_are_refused(small, shards: Path, tmp_path: Path) -> None:
    first = train(small(steps=1), tmp_path / "first")
    corpus = str(shards.parent / "corpus")
    prepare(Preparation(corpus, vocab_size=270), tmp_path / "other")
    for data in ({"shards": str(tmp_path / "other")}, {"shards": None, "text": corpus, "vocab_size": 270}):
        weights = tmp_path / "first"
        if "text" in data:  # a new tokenizer, of as many tokens as the other
            config = KalmixConfig.from_pretrained(weights / "model", vocab_size=270)
            KalmixForCausalLM(config).save_pretrained(tmp_path / "small")
            first.tokenizer.save_pretrained(tmp_path / "small")
            weights = tmp_path / "small"
        with pytest.raises(ArgumentError, match=r"`initial` is '.*', whose tokenizer is another than that of the data"):
            train(small(steps=1, **data, initial=str(weights)), tmp_path / "second")
    (tmp_path / "first" / "model" / "tokenizer.json").unlink()  # weights alone are not checked
    assert train(small(steps=1, initial=str(tmp_path / "first")), tmp_path / "third").finished


@pytest.mark.parametrize(
    ("changes", "processes", "planned"),
    [
        ({"batch_tokens": 2**19, "tokens": 10**9}, 1, (16, 16, 1, 2**19, 1908)),
        ({"batch_tokens": 2**19, "tokens": 10**9}, 8, (16, 2, 8, 2**19, 1908)),
        ({"batch_tokens": 2**19, "context_parallel": 4, "shards": "x"}, 8, (16, 8, 2, 2**19, 7)),
        ({"batch_tokens": 48 * 2048}, 4, (12, 1, 4, 48 * 2048, 7)),
        ({"grad_accum": 3}, 2, (16, 3, 2, 16 * 3 * 2 * 2048, 7)),
    ],
    ids=str,
)
def test_batches_follow_from_tokens_per_step(changes: dict, processes: int, planned: tuple) -> None:
    steps = {} if "tokens" in changes else {"steps": 7}
    assert plan_batches(Recipe(seq_len=2048, batch_size=16, **steps, **changes), processes) == planned


def test_tokens_per_step_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ArgumentError, match=r"batch_tokens.*6,144.*3 processes"):
        plan_batches(Recipe(seq_len=2048, batch_tokens=8192, steps=1), 3)
    with pytest.raises(ArgumentError, match="context_parallel"):
        plan_batches(Recipe(seq_len=2048, context_parallel=2, shards="x", steps=1), 3)
    with pytest.raises(ArgumentError, match=r"batch_tokens.*6,144.*3 groups of 2 processes"):
        plan_batches(Recipe(seq_len=2048, batch_tokens=8192, context_parallel=2, shards="x", steps=1), 6)


def test_learning_rates_scale_with_width_and_batch() -> None:
    """Kalman Linear Attention, Table 13: effective rates of 2.5e-3 and 3.0e-3."""
    rules = {"reference_width": 768, "reference_batch": 2**19, "steps": 1}
    small, large = (Recipe(hidden_size=width, **rules) for width in (496, 1360))
    assert 4e-3 * small.lr_scale(131072) == pytest.approx(2.5e-3, rel=0.01)
    assert 4e-3 * large.lr_scale(524288) == pytest.approx(3.0e-3, rel=0.01)


def test_groups_have_their_own_rates_and_decays() -> None:
    assert recipe_checks.GROUPS == optimizer.NAMES
    model = build(Recipe(steps=1, hidden_size=8), 64, 0)
    rates, decays = {"embeddings": 0.3, "dynamics": 1e-5}, {"head": 0.1}
    settings = {"learning_rate": 1e-3, "weight_decay": 0.2, "learning_rates": rates, "weight_decays": decays}
    found = {group["name"]: (group["lr"], group["weight_decay"]) for group in optimizer_groups(model, **settings)}
    assert found == {
        "matrices": (1e-3, 0.2),
        "vectors": (1e-3, 0.0),
        "embeddings": (0.3, 0.0),
        "head": (1e-3, 0.1),
        "dynamics": (1e-5, 0.0),
    }
    with pytest.raises(ArgumentError, match="weight_decays"):
        optimizer_groups(model, **settings | {"weight_decays": {"heads": 0.1}})


def test_optimizer_settings_reach_the_trainer(small, tmp_path: Path) -> None:
    seen = {}

    class Look(Kill):
        def on_step_begin(self, args, state, control, **given) -> None:
            optimizer = given["optimizer"]
            optimizer = getattr(optimizer, "optimizer", optimizer)
            seen.update({x["name"]: (x["initial_lr"], x["betas"], x["eps"]) for x in optimizer.param_groups})
            seen["clip"] = args.max_grad_norm
            seen["logged"] = args.learning_rate, args.weight_decay, args.adam_beta1, args.adam_beta2, args.adam_epsilon
            seen["name"] = args.run_name

    settings = {"betas": (0.8, 0.95), "eps": 1e-9, "clip": 3.0, "learning_rates": {"embeddings": 0.3}}
    settings["weight_decay"] = 0.3
    train(small(steps=1, reference_width=2, **settings), tmp_path / "run", callbacks=[Look(9)])
    assert seen["clip"] == 3.0
    assert seen["embeddings"] == (pytest.approx(0.15), (0.8, 0.95), 1e-9)
    assert seen["matrices"][0] == pytest.approx(2e-3)
    assert seen["logged"] == (pytest.approx(2e-3), 0.3, 0.8, 0.95, 1e-9) and seen["name"] == "run"


@pytest.mark.parametrize(
    "changes",
    [
        {"shards": {}},
        {"shards": {"x": 0.0}},
        {"shards": "x", "text": "y"},
        {"packing": "worst-fit"},
        {"workers": -1},
        {"batch_tokens": 1000},
        {"tokens": 5, "steps": 5},
        {"learning_rates": {"biases": 1.0}},
        {"weight_decays": {"head": -1.0}},
        {"betas": (0.9,)},
        {"betas": (0.9, 1.0)},
        {"clip": 0.0},
        {"schedule": "linear"},
        {"final_learning_rate": 2.0},
        {"context_parallel": 3},
        {"context_parallel": 4, "context_layout": "head-tail", "seq_len": 12},
        {"context_layout": "striped"},
        {"context_attention": "tree"},
        {"save_steps": 0},
        {"keep_checkpoints": 0},
        {"keep_steps": 0},
        {"report_to": "wandb"},
        {"model": {"hidden_size": 8}},
        {"model": {"bos_token_id": 3}},
        {"model": 3},
        {"initial": " "},
        {"separate_documents": True, "shards": "x"},
    ],
    ids=str,
)
def test_wrong_settings_are_refused(changes: dict) -> None:
    with pytest.raises(ArgumentError, match=f"`{next(iter(changes))}`"):
        Recipe(**{"steps": 1, **changes} if "steps" not in changes else changes)


def test_recipe_without_a_limit_names_all_limits() -> None:
    with pytest.raises(ArgumentError, match=r"`minutes` is missing, and so are `steps` and `tokens`"):
        Recipe()


def test_unknown_model_settings_are_refused() -> None:
    with pytest.raises(ArgumentError, match="`model` contains 'mlps'"):
        build(Recipe(steps=1, model={"mlps": 3}), 64, 0)


def test_all_settings_are_loaded_as_saved(tmp_path: Path) -> None:
    recipe = Recipe(
        tokens=10**11, report_to=("wandb",), betas=(0.8, 0.9), learning_rates={"head": 1.0}, shards={"x": 1.0}
    )
    recipe.save(tmp_path)
    assert Recipe.load(tmp_path) == recipe
    assert json.loads((tmp_path / "recipe.json").read_text())["tokens"] == 10**11


def test_log_has_rates_and_gradient_norms(small, tmp_path: Path) -> None:
    history = train(small(steps=3), tmp_path / "run").history
    rows = [row for row in history if "loss" in row]
    assert ["tokens_per_second" in row for row in rows] == [False, True, True]
    assert all(row["grad_norm"] > 0 for row in rows)


def test_one_process_trains_on_one_of_several_gpus(small, tmp_path: Path, monkeypatch) -> None:
    """The Trainer would wrap the model in `nn.DataParallel`, which divides batches and cannot divide documents."""
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    seen = []

    class Look(Kill):
        def on_step_begin(self, args, state, control, **_) -> None:
            seen.append((args.n_gpu, args.train_batch_size))

    train(small(steps=1, eval_tokens=0), tmp_path / "run", callbacks=[Look(9)])
    assert seen == [(1, 2)]


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a GPU")
def test_sharded_parameters_need_a_gpu(small, tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="`fsdp` is True; expected False on a machine without a GPU"):
        train(small(fsdp=True), tmp_path / "run")


def test_sharded_parameters_need_torchrun(small, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(trainer, "has_fsdp", lambda: True)
    with pytest.raises(ArgumentError, match=r"`fsdp` is True; expected False without torchrun.*nproc-per-node 1"):
        train(small(fsdp=True), tmp_path / "run")
    assert not (tmp_path / "run").exists()
