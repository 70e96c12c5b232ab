"""The base model, its outputs, and the options of gradient checkpointing."""

import logging

import pytest
import torch
from transformers import AutoModel, AutoModelForCausalLM
from transformers.modeling_layers import GradientCheckpointingLayer

from kalmix import ArgumentError
from kalmix.models import KalmixForCausalLM, KalmixModel

from .conftest import build, tokens


@torch.no_grad()
def test_head_of_the_last_hidden_state_gives_the_logits(model):
    ids = tokens(2, 6)
    output = model(ids, output_hidden_states=True)
    base = model.model(ids, output_hidden_states=True)
    assert torch.equal(model.lm_head(output.hidden_states[-1]), output.logits)
    assert torch.equal(base.last_hidden_state, base.hidden_states[-1])
    assert torch.equal(base.last_hidden_state, output.hidden_states[-1])
    embedded = model.model(inputs_embeds=model.get_input_embeddings()(ids))
    assert torch.equal(embedded.last_hidden_state, base.last_hidden_state)


def test_names_of_weights_are_those_of_llama():
    names = set(build("hybrid").state_dict())
    outside = {name for name in names if not name.startswith(("model.layers.0.", "model.layers.1."))}
    assert outside == {"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"} and outside < names


@torch.no_grad()
def test_base_model_loads_checkpoints_of_the_language_model(tmp_path):
    model = build("hybrid")
    model.save_pretrained(tmp_path / "lm")
    base = AutoModel.from_pretrained(tmp_path / "lm")
    assert type(base) is KalmixModel
    assert torch.equal(base(tokens(1, 5)).last_hidden_state, model.model(tokens(1, 5)).last_hidden_state)
    base.save_pretrained(tmp_path / "base")
    again, info = AutoModelForCausalLM.from_pretrained(tmp_path / "base", output_loading_info=True)
    assert type(again) is KalmixForCausalLM and info["missing_keys"] == {"lm_head.weight"}
    assert torch.equal(again.model.norm.weight, model.model.norm.weight)


@pytest.mark.parametrize("options", [{"use_reentrant": True}, {"use_reentrant": False, "determinism_check": "none"}])
def test_options_of_gradient_checkpointing_reach_torch(monkeypatch, options):
    model, seen = build(["kla", "attention", "kla"]).train(), []

    def checkpoint(function, *args, **given):
        seen.append(given)
        return function(*args)

    monkeypatch.setattr("transformers.modeling_utils.checkpoint", checkpoint)
    assert all(isinstance(block, GradientCheckpointingLayer) for block in model.model.layers)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
    model(tokens(1, 4))
    assert seen == [options] * 3
    model.eval()(tokens(1, 4))
    assert len(seen) == 3


def test_incomplete_checkpoint_is_loaded_and_listed(tmp_path, caplog, monkeypatch):
    """With `strict=False`, transformers names the missing weights in a warning; without it they are an error."""
    model = build("kla")
    weights = {name: weight for name, weight in model.state_dict().items() if "layers.1.mixer.in_proj" not in name}
    model.save_pretrained(tmp_path, state_dict=dict(weights))
    missing = set(model.state_dict()) - set(weights)
    with pytest.raises(ArgumentError, match="lacks 1 weights"):
        KalmixForCausalLM.from_pretrained(tmp_path)
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    again, info = KalmixForCausalLM.from_pretrained(tmp_path, strict=False, output_loading_info=True)
    assert len(missing) == 1 and info["missing_keys"] == missing
    assert all(name in caplog.text for name in missing)
    for name, weight in weights.items():
        assert torch.equal(again.state_dict()[name], weight), name
