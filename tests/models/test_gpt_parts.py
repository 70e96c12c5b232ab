"""Parts of nanochat's GPT as settings of a model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from kalmix import ArgumentError
from kalmix.layers.fused import cross_entropy
from kalmix.models import KalmixConfig, KalmixForCausalLM
from kalmix.models.blocks import MLP


def make(**settings) -> KalmixForCausalLM:
    torch.manual_seed(0)
    sizes = {"vocab_size": 40, "hidden_size": 16, "layers": ["attention", "kla"]}
    return KalmixForCausalLM(KalmixConfig(**{**sizes, **settings}))


def test_squared_relu_has_no_gate() -> None:
    mlp, x = MLP(8, 12, "relu2"), torch.randn(3, 8)
    torch.testing.assert_close(mlp(x), F.relu(x @ mlp.in_proj.weight.T).square() @ mlp.out_proj.weight.T)
    block = make(mlp_activation="relu2").model.layers[0]
    assert block.mlp.in_proj.weight.shape == (64, 16)
    assert make().model.layers[0].mlp.in_proj.weight.shape[0] == 2 * 48


def test_capped_logits_and_their_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loss by chunks equals the cross-entropy of all logits, with its gradients."""
    monkeypatch.setattr(cross_entropy, "CHUNK_BYTES", 40 * 8 * 5)
    model, ids = make(logit_cap=3.0, initializer_range=1.0).double(), torch.randint(40, (2, 9))
    plain = make(initializer_range=1.0).double()
    plain.load_state_dict(model.state_dict())
    logits = 3 * torch.tanh(plain(ids).logits / 3)
    torch.testing.assert_close(model(ids).logits, logits)
    assert logits.abs().max() > 2.9
    labels = ids.clone()
    labels[0, 4] = -100
    expected = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    loss, other = model(ids, labels=labels, skip_logits=True).loss, model(ids, labels=labels).loss
    torch.testing.assert_close(loss, expected, check_dtype=False)
    loss.backward()
    found = {name: value.grad.clone() for name, value in model.named_parameters()}
    model.zero_grad()
    other.backward()
    torch.testing.assert_close(loss, other)
    for name, value in model.named_parameters():
        torch.testing.assert_close(found[name], value.grad)


def test_cap_acts_on_all_that_a_head_returns() -> None:
    """Adapters and hooks add to the logits before they are capped, so that a merged adapter gives the same ones."""
    model, ids = make(logit_cap=0.5).eval(), torch.randint(40, (2, 9))
    added = torch.randn(40)
    plain = model.lm_head(model(ids, output_hidden_states=True).hidden_states[-1])
    expected = 0.5 * torch.tanh((plain + added) / 0.5)
    model.lm_head.register_forward_hook(lambda module, inputs, output: output + added)
    torch.testing.assert_close(model(ids).logits, expected)
    loss = F.cross_entropy(expected[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    for skip in (False, True):
        torch.testing.assert_close(model(ids, labels=ids, skip_logits=skip).loss, loss)


def test_model_with_zero_weights_begins_with_a_uniform_prediction(tmp_path: Path) -> None:
    model, ids = make(zero_init=True, tie_word_embeddings=False), torch.randint(40, (1, 7))
    output = model(ids, labels=ids, output_hidden_states=True)
    assert not output.logits.any()
    torch.testing.assert_close(output.hidden_states[1], output.hidden_states[0])
    assert output.loss.exp().item() == pytest.approx(40.0)
    for value in model.parameters():
        torch.nn.init.normal_(value)
    model.save_pretrained(tmp_path)
    loaded = KalmixForCausalLM.from_pretrained(tmp_path)
    for name, value in model.state_dict().items():
        torch.testing.assert_close(loaded.state_dict()[name], value)


@pytest.mark.parametrize("blocks", [1, 4])
def test_outputs_of_blocks_begin_as_large_as_embeddings(blocks: int) -> None:
    """Otherwise little would be left of the current token after the first block, and training would begin slowly."""
    layers = ["kla", "afa", "attention"] * blocks  # without an MLP, with biases, with an MLP
    sizes = {"vocab_size": 40, "hidden_size": 64, "num_attention_heads": 2, "initializer_range": 0.1}
    model = KalmixForCausalLM(KalmixConfig(layers=layers, **sizes))
    parts = [part for block in model.model.layers for part in (block.mixer, block.mlp) if part is not None]
    assert 3 * blocks < len(parts) < 6 * blocks
    outputs = [part.out_proj(torch.randn(100, part.out_proj.in_features)) for part in parts]
    assert sum(outputs).std().item() == pytest.approx(0.1, rel=0.1)
    assert model.model.embed_tokens.weight.std().item() == pytest.approx(0.1, rel=0.1)


def test_embeddings_are_normed() -> None:
    model, ids = make(embedding_norm=True), torch.randint(40, (1, 7))
    x = model(ids, output_hidden_states=True).hidden_states[0]
    torch.testing.assert_close(x.square().mean(-1), torch.ones(1, 7), rtol=0.02, atol=0)


def test_configuration_has_the_cap_under_the_name_of_other_models() -> None:
    config = KalmixConfig(logit_cap=3.0)
    assert config.final_logit_softcapping == 3.0
    assert KalmixConfig().final_logit_softcapping is None
    assert "final_logit_softcapping" not in config.to_dict()
    assert KalmixConfig(**config.to_dict()).to_dict() == config.to_dict()
    assert KalmixConfig(final_logit_softcapping=3.0).logit_cap == 3.0
    assert KalmixConfig(logit_cap=3.0, final_logit_softcapping=None).logit_cap == 3.0
    with pytest.raises(ArgumentError, match="logit_cap"):
        KalmixConfig(final_logit_softcapping=0.0)
    with pytest.raises(ArgumentError, match="final_logit_softcapping"):
        KalmixConfig(logit_cap=3.0, final_logit_softcapping=5.0)


@pytest.mark.parametrize("settings", [{"mlp_activation": "gelu"}, {"logit_cap": 0.0}, {"zero_init": 1}], ids=str)
def test_wrong_settings_are_refused(settings: dict) -> None:
    with pytest.raises(ArgumentError, match=next(iter(settings))):
        make(**settings)
