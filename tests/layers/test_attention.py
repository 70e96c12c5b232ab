"""Attention compared with softmax attention in a loop."""

import math

import pytest
import torch

from kalmix import Segments
from kalmix.layers import Attention, LinearAttention

from .conftest import shake


@pytest.mark.parametrize(("width", "options"), [(16, {}), (12, {"head_dim": 4, "norm_eps": 1e-3, "rotary_base": 1e3})])
def test_against_the_formula(width, options):
    torch.manual_seed(0)
    layer = Attention(width, heads=4, kv_heads=2, **options).double()
    eps, base = options.get("norm_eps", 1e-6), options.get("rotary_base", 1e4)
    shake(layer)
    x = torch.randn(1, 6, width, dtype=torch.float64)
    q, k, v = (x @ layer.in_proj.weight.T)[0].split([16, 8, 8], dim=-1)
    found = []
    for head in range(4):
        rows = []
        for t in range(6):
            turn = lambda u, norm, s: rotate(unit_rms(u, eps) * norm.weight, s, base)  # noqa: E731
            query = turn(q[t, 4 * head : 4 * head + 4], layer.query_norm, t)
            part = slice(4 * (head // 2), 4 * (head // 2) + 4)
            scores = torch.stack([query @ turn(k[s, part], layer.key_norm, s) / math.sqrt(4) for s in range(t + 1)])
            rows.append(scores.softmax(0) @ v[: t + 1, part])
        found.append(torch.stack(rows))
    expected = torch.cat(found, dim=-1) @ layer.out_proj.weight.T
    torch.testing.assert_close(layer(x)[0][0], expected, rtol=1e-6, atol=1e-6)  # angles are float32


def unit_rms(u: torch.Tensor, eps: float) -> torch.Tensor:
    return u / (u.square().mean() + eps).sqrt()


def rotate(u: torch.Tensor, position: int, base: float) -> torch.Tensor:
    z = torch.complex(u[:2], u[2:])
    angle = position * base ** (-torch.arange(2, dtype=torch.float64) / 2)
    z = z * torch.polar(torch.ones_like(angle), angle)
    return torch.cat([z.real, z.imag])


def test_no_posterior():
    assert Attention(8).filter(torch.randn(1, 3, 8), variance=True).variance is None


def test_packing_stores_keys_once():
    """Sequences packed into one row share its keys without a copy."""
    layer = Attention(8)
    cu = torch.arange(0, 101, 10)
    _, state = layer(torch.randn(1, 100, 8), None, Segments.packed(cu))
    assert state.keys.shape[0] == 10 and state.keys.untyped_storage().nbytes() <= 100 * 3 * 8 * 4


def test_values_of_linear_attention_are_as_wide_as_keys():
    layer = LinearAttention(16, heads=2, head_dim=4)
    state = layer(torch.randn(1, 3, 16))[1]
    assert torch.utils._pytree.tree_leaves(state)[0].shape == (1, 2, 4, 5)  # and one column for the weights
