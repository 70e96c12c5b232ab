"""Groups of parameters, and a plain Trainer that uses them."""

import pytest
import torch
from transformers import Trainer, TrainingArguments

from kalmix import ArgumentError
from kalmix.models import optimizer_groups
from kalmix.models.optimizer import DYNAMICS_LR_FACTOR

from .conftest import build, tokens


def groups_by_name(model: torch.nn.Module) -> dict:
    return {group["name"]: group for group in optimizer_groups(model, learning_rate=1.0, weight_decay=0.1)}


@pytest.mark.parametrize("tie", [False, True])
def test_every_parameter_is_in_one_group_and_dynamics_learn_slowly(tie):
    model = build("kla", tie_word_embeddings=tie)
    groups = groups_by_name(model)
    grouped = [id(value) for group in groups.values() for value in group["params"]]
    assert sorted(grouped) == sorted(map(id, model.parameters()))
    dynamics = {id(value) for mixer in model.model.layers.mixers for value in mixer.dynamics_parameters()}
    assert {id(value) for value in groups["dynamics"]["params"]} == dynamics and dynamics
    assert groups["dynamics"]["lr"] == DYNAMICS_LR_FACTOR
    assert [name for name, group in groups.items() if group["weight_decay"]] == ["matrices"]
    assert all(value.ndim >= 2 for value in groups["matrices"]["params"])
    assert [id(value) for value in groups["embeddings"]["params"]] == [id(model.get_input_embeddings().weight)]
    assert ("head" in groups) != tie
    assert tie or [id(value) for value in groups["head"]["params"]] == [id(model.lm_head.weight)]


@pytest.mark.parametrize("wrong", [{"learning_rate": -1.0}, {"learning_rate": "1"}, {"weight_decay": float("nan")}])
def test_rates_and_decays_are_numbers_of_at_least_0(wrong):
    with pytest.raises(ArgumentError, match=f"`{next(iter(wrong))}`"):
        optimizer_groups(torch.nn.Linear(2, 2), **{"learning_rate": 1.0, "weight_decay": 0.0, **wrong})


def test_groups_of_parameters_instead_of_a_model_are_refused():
    with pytest.raises(ArgumentError, match="`model`"):
        optimizer_groups(torch.nn.Linear(2, 2).parameters(), learning_rate=1.0, weight_decay=0.0)


@pytest.mark.parametrize("argument", ["optimizers", "optimizer_cls_and_kwargs"])
def test_plain_trainer_uses_the_groups(tmp_path, argument):
    """The Trainer's schedule multiplies the rate of each group."""
    model, ids = build("kla"), tokens(8, 6)
    groups = optimizer_groups(model, learning_rate=0.01, weight_decay=0.5)
    given = {
        "optimizers": (torch.optim.AdamW(groups), None),
        "optimizer_cls_and_kwargs": (torch.optim.AdamW, {"params": groups}),
    }
    arguments = TrainingArguments(
        str(tmp_path),
        max_steps=2,
        per_device_train_batch_size=2,
        lr_scheduler_type="linear",
        use_cpu=True,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    rows = [{"input_ids": row, "labels": row} for row in ids]
    trainer = Trainer(model, arguments, train_dataset=rows, **{argument: given[argument]})
    rates = []
    trainer.create_optimizer_and_scheduler(2)
    trainer.optimizer.register_step_pre_hook(
        lambda optimizer, *_: rates.append({group["name"]: group["lr"] for group in optimizer.param_groups})
    )
    before = [p.detach().clone() for p in model.parameters()]
    trainer.train()
    assert [round(step["matrices"], 6) for step in rates] == [0.01, 0.005]
    assert [round(step["dynamics"], 7) for step in rates] == [0.001, 0.0005]
    assert not all(torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))


def test_trainer_without_groups_trains_dynamics_as_matrices(tmp_path):
    """Why `docs/huggingface.md` asks for the groups. If this fails, transformers may have a hook for them."""
    model = build("kla")
    arguments = TrainingArguments(str(tmp_path), learning_rate=0.01, weight_decay=0.5, use_cpu=True, report_to="none")
    decayed, others = Trainer(model, arguments).create_optimizer().param_groups
    assert decayed["lr"] == others["lr"] == 0.01
    assert (decayed["weight_decay"], others["weight_decay"]) == (0.5, 0.0)
    dynamics = {id(value) for mixer in model.model.layers.mixers for value in mixer.dynamics_parameters()}
    assert dynamics & {id(value) for value in decayed["params"]}
