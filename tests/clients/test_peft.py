"""Adapters of PEFT: training, saving, loading and merging."""

import pytest
import torch
import transformers.integrations.peft
from packaging.version import Version

from kalmix.models import KalmixForSequenceClassification

from .conftest import LAYERS, build

peft = pytest.importorskip("peft")

LORA = {"r": 4, "init_lora_weights": False, "target_modules": "all-linear"}


def _ids(model) -> torch.Tensor:
    return torch.randint(6, model.config.vocab_size, (2, 9), generator=torch.Generator().manual_seed(0))


def test_lora_is_saved_loaded_and_merged(model, tmp_path):
    ids = _ids(model)
    plain = model(ids).logits
    model.save_pretrained(tmp_path / "base")
    adapted = peft.get_peft_model(model, peft.LoraConfig(**LORA, task_type="CAUSAL_LM")).eval()
    expected = adapted(ids).logits
    assert not torch.allclose(expected, plain, atol=1e-3)
    adapted.save_pretrained(tmp_path / "adapter")

    base = type(model).from_pretrained(tmp_path / "base")
    loaded = peft.PeftModel.from_pretrained(base, str(tmp_path / "adapter")).eval()
    torch.testing.assert_close(loaded(ids).logits, expected)
    torch.testing.assert_close(loaded.merge_and_unload()(ids).logits, expected, rtol=1e-4, atol=1e-4)


def test_lora_of_a_capped_head_is_merged(tokenizer):
    model = build(LAYERS["kla"], tokenizer, logit_cap=0.5)
    ids, options = _ids(model), {**LORA, "target_modules": ["lm_head"]}
    adapted = peft.get_peft_model(model, peft.LoraConfig(**options, task_type="CAUSAL_LM")).eval()
    expected = adapted(ids).logits
    assert expected.abs().max() > 0.4
    torch.testing.assert_close(adapted.merge_and_unload()(ids).logits, expected, rtol=1e-4, atol=1e-4)


def test_lora_has_default_targets(model):
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=4, task_type="CAUSAL_LM"))
    assert 0 < adapted.get_nb_trainable_parameters()[0] < model.num_parameters()


def test_adapters_are_added_by_the_model_itself(model, tmp_path, monkeypatch):
    """transformers 5.24 asks for PEFT 0.22; the test lifts this limit, since 0.21 works."""
    least = min(transformers.integrations.peft.MIN_PEFT_VERSION, peft.__version__, key=Version)
    monkeypatch.setattr(transformers.integrations.peft, "MIN_PEFT_VERSION", least)
    ids = _ids(model)
    model.add_adapter(peft.LoraConfig(**LORA))
    expected = model.eval()(ids).logits
    model.disable_adapters()
    assert not torch.allclose(model(ids).logits, expected, atol=1e-3)
    model.enable_adapters()
    model.save_pretrained(tmp_path)
    assert (tmp_path / "adapter_model.safetensors").exists()


def test_adapted_model_generates_what_it_computes(model):
    adapted = peft.get_peft_model(model, peft.LoraConfig(**LORA, task_type="CAUSAL_LM")).eval()
    ids = _ids(model)
    cached = adapted.generate(input_ids=ids, max_new_tokens=6, do_sample=False, eos_token_id=None)
    assert torch.equal(cached, adapted.generate(input_ids=ids, max_new_tokens=6, use_cache=False, eos_token_id=None))


@pytest.mark.parametrize("kind", ["VeraConfig", "IA3Config", "LoHaConfig", "LNTuningConfig", "PromptTuningConfig"])
def test_other_adapters_train(kind, model):
    targets = ["norm"] if kind == "LNTuningConfig" else ["out_proj"]
    options = {"num_virtual_tokens": 3} if kind == "PromptTuningConfig" else {"target_modules": targets}
    if kind == "IA3Config":
        options["feedforward_modules"] = []
    adapted = peft.get_peft_model(model, getattr(peft, kind)(task_type="CAUSAL_LM", **options)).train()
    ids = _ids(model)
    adapted(input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids).loss.backward()
    grads = [p.grad for p in adapted.parameters() if p.requires_grad]
    assert any(grad is not None and bool(grad.abs().sum() > 0) for grad in grads)


def test_context_aware_prompt_tuning(model):
    """CPT begins with the embeddings of given tokens, moves those of some, and generates what it computes."""
    prompt, ids = [6, 7, 8, 9, 10], _ids(model)
    mask = torch.ones_like(ids)
    mask[1, :4] = 0  # padding between the prompt and the text
    prefix = torch.tensor([prompt]).expand(2, -1)
    expected = model(torch.cat([prefix, ids], 1), attention_mask=torch.cat([torch.ones_like(prefix), mask], 1)).logits
    options = {"cpt_token_ids": prompt, "cpt_mask": [1] * 5, "cpt_tokens_type_mask": [1, 2, 2, 3, 4]}
    options |= {"opt_projection_epsilon": 40.0, "opt_projection_format_epsilon": 40.0}  # a tiny model needs large steps
    adapted = peft.get_peft_model(model, peft.CPTConfig(task_type="CAUSAL_LM", **options)).eval()
    found = adapted(input_ids=ids, attention_mask=mask).logits
    torch.testing.assert_close(found[:, 5:][mask == 1], expected[:, 5:][mask == 1])

    labels = ids.masked_fill(mask == 0, -100)
    optimizer = torch.optim.Adam([p for p in adapted.parameters() if p.requires_grad], lr=0.1)
    losses = []
    for _ in range(5):
        kinds = torch.full_like(ids, 4) * mask  # PEFT changes them in place
        loss = adapted(input_ids=ids, attention_mask=mask, labels=labels, input_type_mask=kinds).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    moved = adapted.prompt_encoder["default"].delta_embedding.weight.abs().sum(1) > 0
    assert moved.tolist() == [True, True, True, True, False]

    text = adapted.generate(input_ids=ids, attention_mask=mask, max_new_tokens=6, do_sample=False, eos_token_id=None)
    logits = adapted(input_ids=text, attention_mask=torch.cat([mask, mask.new_ones(2, 6)], 1)).logits
    assert torch.equal(logits[:, 13:-1].argmax(2), text[:, 9:])


def test_prompts_of_a_classifier_train_with_padding_on_either_side(tokenizer):
    """PEFT gives the model embedded tokens, in which no id marks the padding."""
    torch.manual_seed(0)
    config = build(LAYERS["hybrid"], tokenizer, num_labels=3).config
    options = {"task_type": "SEQ_CLS", "num_virtual_tokens": 3}
    adapted = peft.get_peft_model(KalmixForSequenceClassification(config), peft.PromptTuningConfig(**options)).eval()
    ids, labels = _ids(adapted), torch.tensor([2, 0])
    mask = torch.tensor([[1] * 6 + [0] * 3, [0] * 4 + [1] * 5])
    ids[mask == 0] = tokenizer.pad_token_id
    output = adapted(input_ids=ids, attention_mask=mask, labels=labels)
    whole = [(ids[None, i, mask[i] == 1], mask[None, i, mask[i] == 1]) for i in range(2)]
    alone = torch.cat([adapted(input_ids=row, attention_mask=ones).logits for row, ones in whole])
    torch.testing.assert_close(output.logits, alone)
    output.loss.backward()
    assert any(bool(p.grad.abs().sum() > 0) for p in adapted.prompt_encoder.parameters())
