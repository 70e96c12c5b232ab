"""Whole runs: they learn, resume after interruptions, and save a usable model."""

from __future__ import annotations

import json
import math
import os
import random
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from transformers import TrainerCallback

from kalmix import ArgumentError
from kalmix.models import huggingface
from kalmix.models.losses import head_cross_entropy
from kalmix.training import Recipe
from kalmix.training.run import train
from kalmix.training.trainer import KalmixTrainer


class Kill(TrainerCallback):
    """Callback that sends this process a signal during a step."""

    def __init__(self, step: int, number: int = signal.SIGTERM) -> None:
        self.step, self.number = step, number

    def on_step_begin(self, args, state, control, **_) -> None:
        if state.global_step == self.step - 1:
            os.kill(os.getpid(), self.number)


def test_run_learns_and_saves_a_model(recipe, tmp_path: Path) -> None:
    ended = train(recipe(steps=40, learning_rate=1e-2), tmp_path / "run")
    assert ended.finished
    assert ended.steps == 40
    assert ended.held_out[-1][1] < ended.held_out[0][1]
    assert ended.training[-1][0] == 40 * 2 * 16
    assert {path.name for path in (tmp_path / "run").iterdir()} == {
        ".lock",
        "history.json",
        "inputs.json",
        "model",
        "recipe.json",
        "tensorboard",
    }
    ask = (
        "from transformers import AutoModelForCausalLM, AutoTokenizer; import sys, torch;"
        "m = AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True);"
        "t = AutoTokenizer.from_pretrained(sys.argv[1]);"
        "print(m(**t('the filter', return_tensors='pt')).logits.double().sum().item())"
    )
    result = subprocess.run(
        [sys.executable, "-c", ask, str(tmp_path / "run" / "model")], capture_output=True, text=True, check=True
    )
    ids = ended.tokenizer("the filter", return_tensors="pt")["input_ids"]
    assert float(result.stdout.split()[-1]) == pytest.approx(ended.model(ids).logits.double().sum().item(), rel=1e-5)


def test_held_out_text_of_less_than_a_batch_is_evaluated(recipe, tmp_path: Path) -> None:
    ended = train(recipe(steps=2, batch_size=4, eval_tokens=3 * 16), tmp_path / "run")
    assert [row["step"] for row in ended.history if "eval_loss" in row] == [1, 2]


@pytest.mark.parametrize("bf16", [False, True])
def test_training_keeps_no_logits(bf16, recipe, tmp_path: Path, monkeypatch) -> None:
    """Neither do evaluations during training."""
    heads = []

    def loss(head, *arguments):
        heads.append(head)
        return head_cross_entropy(head, *arguments)

    monkeypatch.setattr(huggingface, "head_cross_entropy", loss)
    monkeypatch.setattr(huggingface, "cross_entropy", None)
    ended = train(recipe(steps=1, bf16=bf16), tmp_path / "run")
    assert len(heads) > 1 and ended.held_out


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_resumed_run_equals_the_uninterrupted_run(recipe, tmp_path: Path, number: int) -> None:
    before = signal.getsignal(signal.SIGINT)  # ignored, if a shell started this in the background
    whole = train(recipe(grad_accum=2), tmp_path / "whole")
    part = train(recipe(grad_accum=2), tmp_path / "part", callbacks=[Kill(3, number)])
    assert (part.finished, part.steps) == (False, 3)
    assert signal.getsignal(signal.SIGINT) is before
    rest = train(recipe(grad_accum=2), tmp_path / "part", resume=True)
    assert (rest.finished, rest.steps) == (True, 8)
    assert rest.training == whole.training
    for name, value in whole.model.state_dict().items():
        torch.testing.assert_close(rest.model.state_dict()[name], value, rtol=0, atol=0)


@pytest.mark.slow
def test_run_resumes_from_the_newest_intact_checkpoint(recipe, tmp_path: Path) -> None:
    train(recipe(), tmp_path, callbacks=[Kill(5)])
    found = sorted((tmp_path / "checkpoints").iterdir())
    assert [path.name for path in found] == ["checkpoint-4", "checkpoint-5"]
    weights = found[-1] / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])
    with pytest.warns(UserWarning, match=r"checkpoint-5.*damaged"):
        ended = train(recipe(), tmp_path, resume=True)
    assert (ended.finished, ended.steps) == (True, 8)


@pytest.mark.parametrize("grad_accum", [4, pytest.param(16, marks=pytest.mark.slow)])
@pytest.mark.slow
def test_every_step_has_all_of_its_batches(recipe, tmp_path: Path, monkeypatch, grad_accum: int) -> None:
    """Steps at the end of an epoch too, and steps that are larger than the text."""
    sizes, compute_loss = [], KalmixTrainer.compute_loss

    def count(self, model, inputs, *args, **options):
        sizes.extend([inputs["input_ids"].numel()] if model.training else [])
        return compute_loss(self, model, inputs, *args, **options)

    monkeypatch.setattr(KalmixTrainer, "compute_loss", count)
    changes = {"seq_len": 128, "grad_accum": grad_accum, "steps": 7, "eval_tokens": 0}
    ended = train(recipe(**changes), tmp_path / "run")
    assert sum(sizes) == ended.history[-1]["tokens"] == 7 * grad_accum * 2 * 128


def test_loss_of_separate_documents_is_that_of_their_targets(tmp_path: Path, recipe) -> None:
    """The logged loss is the mean over all tokens but the first of each document."""
    draw = random.Random(0)
    (tmp_path / "text").mkdir()
    for n in range(40):
        (tmp_path / "text" / f"{n}.txt").write_text("".join(draw.choices("abcdef", k=8)))
    changes = {
        "text": str(tmp_path / "text"),
        "tokenizer": "bytes",
        "seq_len": 64,
        "learning_rate": 1e-9,
        "eval_tokens": 0,
    }
    ended = train(recipe(separate_documents=True, steps=1, **changes), tmp_path / "run")
    assert ended.history[0]["loss"] == pytest.approx(math.log(257), rel=0.01)


def test_run_killed_before_its_first_checkpoint_starts_again(recipe, tmp_path: Path) -> None:
    recipe().save(tmp_path)
    assert train(recipe(), tmp_path, resume=True).finished


def test_folder_with_a_run_is_not_overwritten(recipe, tmp_path: Path) -> None:
    train(recipe(steps=1), tmp_path)
    for resume, message in ((False, "which holds a run"), (True, "a finished run")):
        with pytest.raises(ArgumentError, match=message):
            train(recipe(steps=1), tmp_path, resume=resume)


@pytest.mark.slow
def test_resuming_with_other_settings_is_refused(recipe, tmp_path: Path) -> None:
    train(recipe(), tmp_path, callbacks=[Kill(2)])
    for change in ({"hidden_size": 16}, {"vocab_size": 300}, {"steps": 9}, {"learning_rate": 1e-4}):
        with pytest.raises(ArgumentError, match=rf"`{next(iter(change))}` is .*in the run to resume"):
            train(recipe(**change), tmp_path, resume=True)
    assert train(replace(Recipe.load(tmp_path), keep_checkpoints=1), str(tmp_path), resume=True).finished
    assert Recipe.load(tmp_path).keep_checkpoints == 1


def test_wrong_arguments_of_train_are_named(recipe, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("text")
    good = {"recipe": recipe(), "output": tmp_path / "run"}
    wrong = {"recipe": [{}, tmp_path], "output": [None, 3, tmp_path / "file"], "resume": ["yes", 1]}
    for name, values in (wrong | {"callbacks": [3, [3], [int], Kill(1)]}).items():
        for value in values:
            with pytest.raises(ArgumentError, match=f"`{name}`"):
                train(**good | {name: value})
    with pytest.raises(ArgumentError, match="`report_to` is 'wandbb', which is unknown"):
        train(recipe(report_to=("wandbb",)), tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_time_limit_ends_a_run_with_learning_rate_zero(recipe, tmp_path: Path) -> None:
    ended = train(recipe(steps=None, minutes=0.04), tmp_path)
    history = json.loads((tmp_path / "history.json").read_text())
    rates = [row["learning_rate"] for row in history if "learning_rate" in row]
    assert ended.finished
    assert ended.steps > 3
    assert ended.seconds < 0.04 * 60 + 5
    assert rates[-1] < 0.25 * max(rates)


@pytest.mark.slow
def test_time_limit_covers_all_sessions(recipe, tmp_path: Path) -> None:
    part = train(recipe(steps=None, minutes=0.05), tmp_path, callbacks=[Kill(6)])
    rest = train(recipe(steps=None, minutes=0.05), tmp_path, resume=True)
    progress = [row["progress"] for row in json.loads((tmp_path / "history.json").read_text())]
    assert (part.finished, rest.finished) == (False, True)
    assert 0 < progress[5] < progress[-1] == 1
    assert progress == sorted(progress)


def test_a_rising_gradient_norm_gives_one_warning(recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    norms = iter([2.0, 40.0, 70.0, 900.0, 1.0])
    monkeypatch.setattr(Accelerator, "clip_grad_norm_", lambda *_: torch.tensor(next(norms)))
    with pytest.warns(UserWarning, match=r"rose from 2 to 70 in step 3; .*longer `warmup` \(now 0.02\)") as caught:
        train(recipe(steps=5), tmp_path / "rising")
    assert sum("gradient norm" in str(each.message) for each in caught) == 1


def test_divergence_names_the_learning_rate(recipe, tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="diverged"):
        train(recipe(learning_rate=1e30, warmup=0.0), tmp_path)


@pytest.mark.parametrize(
    "changes",
    [
        {"loss": "marginal"},
        {"bf16": True},
        {"separate_documents": True},
        {"tokenizer": "bytes"},
        {"layers": ("attention", "kla")},
        {"layers": ("attention",)},
    ],
    ids=str,
)
def test_every_option_trains(recipe, tmp_path: Path, changes: dict) -> None:
    ended = train(recipe(steps=2, **changes), tmp_path)
    assert all(math.isfinite(bits) for _, bits in ended.training)


def test_separate_documents_do_not_affect_each_other(recipe, tmp_path: Path) -> None:
    """Logits of packed documents equal those of each document alone."""
    ended = train(recipe(steps=1, separate_documents=True), tmp_path)
    one, two = torch.tensor([[0, 5, 6, 7]]), torch.tensor([[0, 9, 8]])
    packed = ended.model(torch.cat([one, two], 1), position_ids=torch.tensor([[0, 1, 2, 3, 0, 1, 2]]))
    torch.testing.assert_close(packed.logits[:, 4:], ended.model(two).logits)


@pytest.mark.parametrize("output", ["text", "text/run", "link/runs/run", "text/.hidden/run", "text-run"])
def test_a_run_inside_its_text_is_refused(recipe, text_file: Path, tmp_path: Path, output: str) -> None:
    (tmp_path / "text").mkdir()
    (tmp_path / "link").symlink_to("text")
    shutil.copy(text_file, tmp_path / "text")
    given = recipe(text=str(tmp_path / "text"), steps=1)
    if output in ("text/.hidden/run", "text-run"):
        assert train(given, tmp_path / output).finished
        return
    with pytest.raises(ArgumentError, match=rf"`output` is '{tmp_path / output}', which is inside the text .*--output"):
        train(given, tmp_path / output)
    assert sorted(path.name for path in (tmp_path / "text").iterdir()) == [text_file.name]


@pytest.mark.slow
def test_compiled_run_has_the_losses_of_an_uncompiled_one(recipe, tmp_path: Path) -> None:
    """Compilation reorders sums in float32: losses near 5 nats differ by less than 1e-5."""
    layers = {"mixer": "attention", "heads": 2}, {"mixer": "kla", "slots": 4}
    plain, compiled = (
        train(recipe(layers=layers, steps=5, compile=on), tmp_path / f"compiled-{on}") for on in (False, True)
    )
    for name in ("training", "held_out"):
        expected, found = getattr(plain, name), getattr(compiled, name)
        assert [row[0] for row in found] == [row[0] for row in expected]
        assert [row[1] for row in found] == pytest.approx([row[1] for row in expected], abs=1e-5)


@pytest.mark.slow
def test_run_that_propagates_samples_resumes_exactly(recipe, tmp_path: Path) -> None:
    """Resumed runs draw the samples of the uninterrupted one; the model is then evaluated with means."""
    layers = ({"mixer": "kla", "slots": 4},) * 2
    sampled = recipe(layers=layers, steps=6, model={"propagate": "sample"})
    whole = train(sampled, tmp_path / "whole")
    train(sampled, tmp_path / "part", callbacks=[Kill(3)])
    rest = train(sampled, tmp_path / "part", resume=True)
    assert rest.training == whole.training and rest.held_out == whole.held_out
    assert all(math.isfinite(loss) for _, loss in whole.training)
    assert whole.training != train(recipe(layers=layers, steps=6), tmp_path / "mean").training
    model, ids = rest.model.eval(), torch.arange(1, 9)[None]
    assert model.config.propagate == "sample"
    torch.testing.assert_close(model(ids).logits, model(ids).logits, rtol=0, atol=0)
    assert model.generate(ids, max_new_tokens=3, do_sample=False, eos_token_id=None).shape == (1, 11)
