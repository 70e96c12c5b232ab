"""The residual block with norms of another class, or with hooks."""

import torch
from torch import nn

from kalmix.models.blocks import Block, layer_specs


def block() -> Block:
    return Block(32, layer_specs(["gated-deltanet"], 32, heads=2)[0])


def test_norm_before_the_mlp_may_be_of_another_class():
    x, ours = torch.randn(1, 5, 32), block()
    ours.mlp_norm = nn.LayerNorm(32)
    assert ours.mlp is not None
    middle = x + ours.mixer(ours.norm(x))[0]
    torch.testing.assert_close(ours(x).hidden_state, middle + ours.mlp(ours.mlp_norm(middle)))


def test_hooks_of_the_norm_before_the_mlp_run():
    x, ours, calls = torch.randn(1, 5, 32), block(), []
    expected = ours(x).hidden_state
    assert ours.mlp_norm is not None
    ours.mlp_norm.register_forward_hook(lambda *_: calls.append(1))
    torch.testing.assert_close(ours(x).hidden_state, expected)
    assert calls == [1]
