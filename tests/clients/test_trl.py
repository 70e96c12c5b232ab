"""Fine-tuning with TRL: supervised, on preferences, and by reinforcement learning."""

import copy

import pytest
import torch

from .conftest import LAYERS, build, sentences

trl = pytest.importorskip("trl")
Dataset = pytest.importorskip("datasets").Dataset

COMMON = {
    "max_steps": 2,
    "per_device_train_batch_size": 4,
    "report_to": "none",
    "use_cpu": True,
    "logging_steps": 1,
    "save_strategy": "no",
    "disable_tqdm": True,
}
LORA = {"r": 4, "target_modules": "all-linear"}


def _texts() -> "Dataset":
    return Dataset.from_dict({"text": sentences(16)})


def _pairs() -> "Dataset":
    return Dataset.from_dict({"prompt": sentences(16), "completion": sentences(16, seed=1)})


def _chats() -> "Dataset":
    chats = [
        [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        for question, answer in zip(sentences(16), sentences(16, seed=1), strict=True)
    ]
    return Dataset.from_dict({"messages": chats})


SFT = {
    "plain": ({}, _texts),
    "packing": ({"packing": True, "max_length": 32}, _texts),
    "packing-wrapped": ({"packing": True, "packing_strategy": "wrapped", "max_length": 32}, _texts),
    "padding-free": ({"padding_free": True, "max_length": None}, _texts),
    "completion-only": ({"completion_only_loss": True}, _pairs),
    "assistant-only": ({"assistant_only_loss": True}, _chats),
    "gradient-checkpointing": ({"gradient_checkpointing": True}, _texts),
    "bf16": ({"bf16": True}, _texts),
}


def _check_trained(trainer, before: dict[str, torch.Tensor]) -> None:
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(losses) == 2
    assert all(torch.isfinite(torch.tensor(loss)) for loss in losses)
    after = {name: p.detach() for name, p in trainer.model.named_parameters() if p.requires_grad}
    changed = [name for name, p in after.items() if name not in before or not torch.equal(p, before[name])]
    assert len(changed) > len(after) // 2


@pytest.mark.parametrize("case", SFT)
def test_sft_trains(case, model, tokenizer, tmp_path):
    options, data = SFT[case]
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    trainer = trl.SFTTrainer(
        model, trl.SFTConfig(str(tmp_path), **COMMON, **options), train_dataset=data(), processing_class=tokenizer
    )
    _check_trained(trainer, before)


def test_sft_trains_lora(model, tokenizer, tmp_path):
    peft = pytest.importorskip("peft")
    frozen = {name: p.detach().clone() for name, p in model.named_parameters()}
    trainer = trl.SFTTrainer(
        model,
        trl.SFTConfig(str(tmp_path), **COMMON),
        train_dataset=_texts(),
        processing_class=tokenizer,
        peft_config=peft.LoraConfig(**LORA),
    )
    trainer.train()
    base = trainer.model.get_base_model().state_dict()
    for name, value in frozen.items():
        assert torch.equal(base.get(name, base.get(name.replace(".weight", ".base_layer.weight"))), value)


def test_padding_free_batches_have_the_loss_of_padded_ones(model, tokenizer, tmp_path):
    losses = []
    for options in ({}, {"padding_free": True, "max_length": None}):
        config = trl.SFTConfig(str(tmp_path), **{**COMMON, "max_steps": 1}, **options)
        trainer = trl.SFTTrainer(copy.deepcopy(model), config, train_dataset=_texts(), processing_class=tokenizer)
        trainer.train()
        losses.append(trainer.state.log_history[0]["loss"])
    assert losses[0] == pytest.approx(losses[1], abs=2e-4)  # the log has four digits


def test_losses_of_a_model_with_capped_logits_are_its_own(tokenizer, tmp_path):
    """TRL computes logits from the weight of the head, and caps them by itself."""
    model = build(LAYERS["kla"], tokenizer, logit_cap=0.5, initializer_range=0.5)
    config = trl.SFTConfig(str(tmp_path), **COMMON, per_device_eval_batch_size=16)
    data = {"train_dataset": _texts(), "eval_dataset": _texts()}
    trainer = trl.SFTTrainer(model, config, **data, processing_class=tokenizer)
    (batch,) = trainer.get_eval_dataloader()
    assert trainer.evaluate()["eval_loss"] == pytest.approx(float(model.eval()(**batch).loss), rel=1e-4)


@pytest.fixture
def folder(model, tokenizer, tmp_path):
    """Folder of a checkpoint, from which TRL loads the reference model."""
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_dpo_trains(folder, model, tokenizer, tmp_path):
    data = Dataset.from_dict(
        {"prompt": sentences(16), "chosen": sentences(16, seed=1), "rejected": sentences(16, seed=2)}
    )
    trainer = trl.DPOTrainer(
        str(folder), args=trl.DPOConfig(str(tmp_path), **COMMON), train_dataset=data, processing_class=tokenizer
    )
    _check_trained(trainer, dict(model.named_parameters()))


def test_kto_trains(folder, model, tokenizer, tmp_path):
    """The log-probabilities that TRL reports are those of each completion alone, without padding."""
    labels = [True, False, False, True] * 4
    data = Dataset.from_dict({"prompt": sentences(16), "completion": sentences(16, seed=1), "label": labels})
    config = trl.KTOConfig(str(tmp_path), **COMMON, per_device_eval_batch_size=16)
    splits = {"train_dataset": data, "eval_dataset": data}
    trainer = trl.KTOTrainer(str(folder), args=config, **splits, processing_class=tokenizer)
    found = trainer.evaluate()
    expected = {True: [], False: []}
    for row in trainer.eval_dataset:
        prompt, completion = row["prompt_ids"], torch.tensor(row["completion_ids"])
        logits = model(torch.tensor([[*prompt, *completion]])).logits[0, len(prompt) - 1 : -1]
        expected[row["label"]].append(logits.log_softmax(1).gather(1, completion[:, None]).sum().item())
    assert found["eval_logps/chosen"] == pytest.approx(sum(expected[True]) / 8, rel=1e-4)
    assert found["eval_logps/rejected"] == pytest.approx(sum(expected[False]) / 8, rel=1e-4)
    _check_trained(trainer, dict(model.named_parameters()))


def test_grpo_trains(folder, model, tokenizer, tmp_path):
    def reward(completions, **kwargs):
        return [float(len(set(text.split()))) for text in completions]

    config = trl.GRPOConfig(str(tmp_path), **COMMON, num_generations=4, max_completion_length=8, beta=0.1)
    data = Dataset.from_dict({"prompt": sentences(8)})
    trainer = trl.GRPOTrainer(
        str(folder), reward_funcs=reward, args=config, train_dataset=data, processing_class=tokenizer
    )
    _check_trained(trainer, dict(model.named_parameters()))
