"""SwiGLU of a projection in one kernel: it agrees with the projection in float64, and serves decoding only."""

from __future__ import annotations

import pytest
import torch
from forms import DEVICE, form

from kalmix.layers.fused import can_fuse_swiglu, swiglu, swiglu_linear
from kalmix.models.blocks import MLP

pytest.importorskip("triton")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("rows", "inputs", "width"), [(1, 40, 10), (3, 136, 33), (17, 24, 64), (64, 16, 40)])
def test_the_kernel_agrees_with_float64(rows, inputs, width, dtype):
    torch.manual_seed(0)
    x = torch.randn(rows, 1, 2 * inputs, device=DEVICE).to(dtype)[..., :inputs]  # a view with longer rows
    weight = (torch.randn(2 * width, inputs, device=DEVICE) / inputs**0.5).to(dtype)
    expected = swiglu(x.double() @ weight.double().T)
    with form("triton"):
        assert can_fuse_swiglu(x, weight)
        y = swiglu_linear(x, weight)
    assert y.dtype == dtype
    tolerance = 0.02 if dtype == torch.bfloat16 else 0.003  # the projection is rounded, and the result
    torch.testing.assert_close(y.double(), expected, rtol=tolerance, atol=tolerance)


def test_an_mlp_uses_it_without_gradients_for_few_tokens():
    torch.manual_seed(0)
    mlp, x = MLP(16, 24).to(DEVICE, torch.bfloat16), torch.randn(2, 1, 16, device=DEVICE).bfloat16()
    calls = []
    mlp.in_proj.forward = lambda x: calls.append(x) or torch.nn.Linear.forward(mlp.in_proj, x)
    assert mlp(x).shape == x.shape  # a replaced `forward` is called
    assert len(calls) == 1
    del mlp.in_proj.forward
    with torch.no_grad():
        expected = mlp(x)
        with form("triton"):
            torch.testing.assert_close(mlp(x), expected, rtol=0.02, atol=0.02)


def test_other_calls_are_not_fused():
    x, weight = torch.randn(2, 8, device=DEVICE).bfloat16(), torch.randn(6, 8, device=DEVICE).bfloat16()
    with form("triton"):
        assert can_fuse_swiglu(x, weight)
        assert not can_fuse_swiglu(x.float(), weight.float())
        assert not can_fuse_swiglu(x, weight.float())
        assert not can_fuse_swiglu(x.expand(65, 2, 8), weight)
        assert not can_fuse_swiglu(x, weight.requires_grad_())
        with torch.no_grad(), torch.autocast(DEVICE, torch.bfloat16):
            assert not can_fuse_swiglu(x, weight)
    with form("eager"), torch.no_grad():
        assert not can_fuse_swiglu(x, weight)
