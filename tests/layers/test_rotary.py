"""Rotary positions: angles at late positions, and what is stored for the backward pass."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from kalmix.layers import Attention, RetNet
from kalmix.layers.fused.rotary_angles import rotary_cos_sin
from kalmix.layers.modules import apply_rotary

POSITIONS = [0, 1, -1, 4_095, 100_000, 1_000_003, 2**31 + 5]
CYCLE = Fraction(math.pi) + Fraction(1.2246467991473532e-16)  # pi, to 32 digits


def exact(position: int, pairs: int, base: float) -> list[tuple[float, float]]:
    """Return cosine and sine of each angle, reduced to one turn in rational numbers."""
    angles = (Fraction(position) * Fraction(base ** (-j / pairs)) for j in range(pairs))
    return [(math.cos(angle), math.sin(angle)) for angle in (float(x % (2 * CYCLE)) for x in angles)]


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 3e-7), (torch.float64, 1e-15)])
@pytest.mark.parametrize(("pairs", "base"), [(1, 1e4), (3, 0.01), (64, 1e4), (128, 5e5)])
def test_angles_have_no_error_that_grows_with_the_position(pairs: int, base: float, dtype: torch.dtype, bound: float):
    got = torch.stack(rotary_cos_sin(torch.tensor(POSITIONS), pairs, base, dtype), -1)
    want = torch.tensor([exact(position, pairs, base) for position in POSITIONS], dtype=torch.float64)
    error = (got.double() - want).abs().amax((1, 2))
    fastest = max(1.0, base ** (1 / pairs - 1))
    rounding = torch.tensor([4e-16 * abs(position) * fastest for position in POSITIONS])  # of frequencies in float64
    assert bool((error <= bound + rounding).all()), error


@pytest.mark.parametrize("layer", [Attention(32, heads=2), RetNet(32, heads=2)], ids=["attention", "retnet"])
@torch.no_grad()
def test_late_tokens_agree_with_float64(layer: Attention | RetNet):
    torch.manual_seed(0)
    x, rows = torch.randn(1, 6, 32), []
    for dtype in (torch.float32, torch.float64):
        layer = layer.to(dtype)
        _, state = layer(x[:, :3].to(dtype))
        if isinstance(layer, RetNet):
            state = state._replace(conv_state=state.conv_state + 300_000)
        else:
            state = state._replace(positions=state.positions + 300_000)
        rows.append(layer(x[:, 3:].to(dtype), state)[0].double())
    torch.testing.assert_close(*rows, rtol=0, atol=2e-6)


class Largest(TorchDispatchMode):
    """Record the number of elements of the largest float64 tensor that an operation returns."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and result.dtype == torch.float64:
            self.elements = max(self.elements, result.numel())
        return result


def test_float64_is_used_for_frequencies_only_and_not_saved():
    q = torch.randn(2, 5, 3, 8, requires_grad=True)
    saved: list[Tensor] = []
    with Largest() as largest, torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        apply_rotary(q, q, torch.arange(5)[None], 1e4)
    assert largest.elements == 4
    assert {(x.dtype, x.numel()) for x in saved} == {(torch.float32, 5 * 4)}


@pytest.mark.slow
def test_compiled_code_computes_frequencies_once_and_exported_programs_have_no_custom_op():
    graphs: list[str] = []

    def record(module: torch.fx.GraphModule, inputs: list[Tensor]):
        graphs.append(str(module.graph))
        return module.forward

    layer, x = RetNet(8, heads=2), torch.randn(1, 4, 8)
    compiled = torch.compile(layer, backend=record, fullgraph=True)
    torch.testing.assert_close(compiled(x)[0], layer(x)[0])
    exported = torch.export.export(layer, (x,), strict=False)
    torch.testing.assert_close(exported.module()(x)[0], layer(x)[0])
    assert "rotary_frequencies" in graphs[0] and "rotary_frequencies" not in str(exported.graph)
    torch.compiler.reset()
