"""Step of `RetNet`: both forms of the rotation agree with the layer's ordinary call in float64."""

from __future__ import annotations

import copy

import pytest
import torch
from forms import DEVICE, form

from kalmix import steps
from kalmix.layers import RetNet, retnet

pytest.importorskip("triton")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("heads", "width"), [(2, 6), (3, 2), (1, 18)])
@pytest.mark.parametrize("kind", ["eager", "triton"])
@torch.no_grad()
def test_steps_agree_with_the_ordinary_call(kind, heads, width, dtype, monkeypatch):
    """A sequence has no past; one row is padding, one continues another slot, and one stores nothing."""
    torch.manual_seed(0)
    calls, run = [], retnet.rotary_step
    monkeypatch.setattr(retnet, "rotary_step", lambda *given: calls.append(1) or run(*given))
    layer = RetNet(12, heads=heads, head_dim=width).to(DEVICE, dtype)
    x = torch.randn(4, 7, 12, device=DEVICE).to(dtype)
    pool, exact = layer.state_pool(5), copy.deepcopy(layer).double()
    steps.store(pool, torch.tensor([1, 2, 3], device=DEVICE), layer(x[1:, :6])[1])
    pool.conv_state[2] += 200_000  # far along
    before = copy.deepcopy(pool)
    slots = steps.Slots(*torch.tensor([[1, -1, 0, 2, 3], [1, 3, 0, 4, -1]], device=DEVICE))
    token = torch.cat([x[1, 6:], x[0, :1], x[0, :1], x[2, 6:], x[3, 6:]])[:, None]
    with form(kind):
        y = layer.step(token, pool, slots)
    bound = 1e-5 if dtype == torch.float32 else 0.05
    for row, slot in enumerate(slots.read.tolist()):
        if slot < 0:
            assert not y[row].any()
            continue
        state = before.take(torch.tensor([slot], device=DEVICE))
        state = state._replace(belief=type(state.belief)(*(z.double() for z in state.belief)))
        expected, _ = exact(token[row : row + 1].double(), state)
        torch.testing.assert_close(y[row].double(), expected[0], rtol=bound, atol=bound)
    assert pool.conv_state.tolist() == [1, 7, 200_006, 6, 200_007]
    assert len(calls) == (kind == "triton")
