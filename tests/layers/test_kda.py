"""Merged projections of `KDA`; `test_memory.py` compares the layer with its equations."""

import pytest
import torch

from kalmix.layers import KDA, kda

from .test_memory import CLOSE, D, made


@pytest.mark.parametrize("name", ["decay", "decay.proj", "decay.proj.0", "decay.proj.1", "gate_proj", "gate_proj.0"])
def test_kda_calls_projections_with_hooks(name, monkeypatch):
    """Without hooks, one product serves the inner factors of both projections; results are the same."""
    layer, x = made(KDA(D, heads=2))
    x.requires_grad_()
    merges, merge = [], kda.low_rank_pair
    monkeypatch.setattr(kda, "low_rank_pair", lambda *maps: merges.append(merge(*maps)) or merges[-1])

    def outputs_and_gradients():
        y = layer(x)[0]
        return y, *torch.autograd.grad(y.square().sum(), [x, *layer.parameters()])

    merged, calls = outputs_and_gradients(), []
    assert [x is not None for x in merges] == [True]
    layer.get_submodule(name).register_forward_hook(lambda *_: calls.append(name))
    torch.testing.assert_close(outputs_and_gradients(), merged, **CLOSE)
    assert calls == [name]


def test_signals_of_a_subclass_of_kda_count():
    class WithoutDecay(KDA):
        def signals(self, x):
            signals = super().signals(x)
            return signals | {"log_decay": torch.zeros_like(signals["log_decay"])}

    (layer, x), plain = made(WithoutDecay(D, heads=2)), KDA(D, heads=2).double()
    plain.load_state_dict(layer.state_dict())
    assert not torch.allclose(layer(x)[0], plain(x)[0])
    with torch.no_grad():
        plain.decay.dynamics.log_rate.fill_(-60)
    torch.testing.assert_close(layer(x)[0], plain(x)[0], **CLOSE)
