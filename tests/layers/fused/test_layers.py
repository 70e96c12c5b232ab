"""Layers and a model on both forms of their parts."""

from __future__ import annotations

import pytest
import torch
from forms import DEVICE, form

from kalmix.layers import MIXERS
from kalmix.models import KalmixConfig, KalmixForCausalLM, LanguageModel
from kalmix.segments import Segments

pytest.importorskip("triton")
LAYERS = {
    "gated-deltanet": {"heads": 2},
    "kda": {"heads": 2},
    "gated-kalmanet": {"heads": 2},
    "mamba2": {"heads": 4, "groups": 2, "state_dim": 4},
    "kla": {"slots": 4},
    "attention": {"heads": 2},
}


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", LAYERS)
def test_layers_agree_on_both_forms(name, packed):
    torch.manual_seed(0)
    layer = MIXERS[name](16, **LAYERS[name]).to(DEVICE)
    x = torch.randn(2, 7, 16, device=DEVICE).requires_grad_()
    segments = Segments.of(torch.tensor([[0, 0, 3], [0, 3, 7], [1, 1, 6]], device=DEVICE)) if packed else None
    found = []
    for each in ("eager", "triton"):
        with form(each):
            y, state = layer(x, None, segments)
            y, _ = layer(y, state, segments)
            found.append([y, *torch.autograd.grad(y.square().sum(), [x, *layer.parameters()])])
    for eager, triton in zip(*found, strict=True):
        torch.testing.assert_close(triton, eager, rtol=1e-3, atol=1e-4)


def test_models_agree_on_both_forms():
    """Residuals, norms and MLPs of blocks."""
    torch.manual_seed(0)
    model = LanguageModel(11, 16, layers=[{"mixer": "gated-deltanet", "heads": 2}, "kla"]).to(DEVICE)
    tokens = torch.randint(11, (2, 6), device=DEVICE)
    found = []
    for each in ("eager", "triton"):
        with form(each):
            loss = model.logits(model(model.embed_tokens(tokens)).hidden_state).square().sum()
            found.append([loss, *torch.autograd.grad(loss, list(model.parameters()))])
    for eager, triton in zip(*found, strict=True):
        torch.testing.assert_close(triton, eager, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", LAYERS)
def test_triton_forms_allow_gradient_checkpointing(name):
    torch.manual_seed(0)
    spec = {"mixer": name, **LAYERS[name]}
    model = (
        KalmixForCausalLM(KalmixConfig(vocab_size=11, hidden_size=16, layers=[spec], initializer_range=0.5))
        .to(DEVICE)
        .train()
    )
    tokens = torch.randint(11, (2, 6), device=DEVICE)
    found = []
    for _ in range(2):
        with form("triton"):
            loss = model(input_ids=tokens, labels=tokens).loss
            found.append([loss, *torch.autograd.grad(loss, list(model.parameters()))])
        model.gradient_checkpointing_enable()
    for plain, checkpointed in zip(*found, strict=True):
        torch.testing.assert_close(checkpointed, plain, rtol=1e-4, atol=1e-6)
