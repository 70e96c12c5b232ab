"""Features of the Trainer of transformers, and of accelerate below it."""

import copy

import pytest
import torch
from datasets import Dataset
from transformers import DataCollatorForLanguageModeling, DataCollatorWithFlattening, Trainer, TrainingArguments

from .conftest import build, sentences

COMMON = {
    "max_steps": 3,
    "per_device_train_batch_size": 4,
    "report_to": "none",
    "use_cpu": True,
    "logging_steps": 1,
    "save_strategy": "no",
    "disable_tqdm": True,
}
# The name in transformers 5.23, and in 5.17.
CHECKPOINTING = next(x for x in ("activation_checkpointing", "gradient_checkpointing") if hasattr(TrainingArguments, x))
FEATURES = {
    "plain": {},
    "checkpointing": {CHECKPOINTING: True},
    "checkpointing, not reentrant": {CHECKPOINTING: True, f"{CHECKPOINTING}_kwargs": {"use_reentrant": False}},
    "label smoothing": {"label_smoothing_factor": 0.1},
    "gradient accumulation": {"gradient_accumulation_steps": 2},
    "bf16": {"bf16": True},
    "neftune": {"neftune_noise_alpha": 5.0},
    "length groups": {"train_sampling_strategy": "group_by_length"},
    "adafactor": {"optim": "adafactor"},
    "batch size finder": {"auto_find_batch_size": True},
}

LAYER_FEATURES = ("plain", "checkpointing", "checkpointing, not reentrant", "bf16")  # they change what layers compute


def _rows(tokenizer, count: int = 16) -> Dataset:
    return Dataset.from_list([{"input_ids": tokenizer(text)["input_ids"]} for text in sentences(count)])


def _trainer(model, tokenizer, folder, flatten: bool = False, **options) -> Trainer:
    collate = DataCollatorWithFlattening() if flatten else DataCollatorForLanguageModeling(tokenizer, mlm=False)
    rows = _rows(tokenizer)
    arguments = TrainingArguments(str(folder), **{**COMMON, **options})
    return Trainer(model, arguments, train_dataset=rows, eval_dataset=rows, data_collator=collate)


def _losses(trainer: Trainer) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def _assert_loss_decreases(model, tokenizer, folder, **options) -> None:
    trainer = _trainer(model, tokenizer, folder, max_steps=12, learning_rate=3e-3, **options)
    trainer.train()
    losses = _losses(trainer)
    assert sum(losses[-3:]) < sum(losses[:3])


@pytest.mark.parametrize(
    ("feature", "model"),
    [*((feature, "hybrid") for feature in FEATURES), *((feature, "kla") for feature in LAYER_FEATURES)],
    indirect=["model"],
)
def test_trainer_lowers_the_loss(feature, model, tokenizer, tmp_path):
    _assert_loss_decreases(model, tokenizer, tmp_path, **FEATURES[feature])


def test_trainer_lowers_the_loss_of_a_compiled_model(tokenizer, tmp_path):
    options = {"torch_compile": True, "torch_compile_backend": "aot_eager"}
    _assert_loss_decreases(build(["kla"], tokenizer), tokenizer, tmp_path, **options)


def test_evaluation_and_prediction(model, tokenizer, tmp_path):
    trainer = _trainer(model, tokenizer, tmp_path)
    predicted = trainer.predict(trainer.eval_dataset)
    assert trainer.evaluate()["eval_loss"] == pytest.approx(predicted.metrics["test_loss"])
    assert predicted.predictions.shape[::2] == (16, len(tokenizer))


def test_resumed_training_is_uninterrupted_training(model, tokenizer, tmp_path):
    options = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    whole = _trainer(copy.deepcopy(model), tokenizer, tmp_path / "whole", **options)
    whole.train()
    resumed = _trainer(model, tokenizer, tmp_path / "resumed", **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole/checkpoint-2"))
    for (name, a), b in zip(whole.model.named_parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(a, b), name


def test_best_model_is_loaded_at_the_end(model, tokenizer, tmp_path):
    options = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2, "max_steps": 4}
    trainer = _trainer(model, tokenizer, tmp_path, load_best_model_at_end=True, **options)
    trainer.train()
    assert trainer.evaluate()["eval_loss"] == pytest.approx(trainer.state.best_metric, rel=1e-5)


def test_flattened_batches_have_the_loss_of_padded_ones(model, tokenizer, tmp_path):
    losses = []
    for flatten in (False, True):
        trainer = _trainer(copy.deepcopy(model), tokenizer, tmp_path, flatten)
        trainer.train()
        losses.append(_losses(trainer))
    assert losses[0] == pytest.approx(losses[1], abs=2e-4)  # the log has four digits
