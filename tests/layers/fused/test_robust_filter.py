"""The recurrent form of Adaptive Filter Attention as a Triton kernel, compared with its PyTorch form."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from forms import DEVICE, check_second_derivatives, compare_forms, form
from torch import Tensor

from kalmix import validation
from kalmix.layers import RecurrentFilterAttention
from kalmix.layers.fused import positive
from kalmix.layers.recurrent_afa import RecurrentAFAState
from kalmix.segments import Segments

pytest.importorskip("triton")
SEGMENTS = Segments.of(torch.tensor([[0, 0, 4], [0, 5, 9], [1, 2, 5], [1, 6, 7], [1, 7, 7]]))


def make_layer(iterations: int = 1, channels: int = 3) -> RecurrentFilterAttention:
    """Build a layer with random parameters."""
    torch.manual_seed(0)
    layer = RecurrentFilterAttention(12, heads=2, head_dim=channels, iterations=iterations).to(DEVICE)
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            parameter.add_((0.0 if "proj" in name else 0.3) * torch.randn_like(parameter))
        layer.residual.fill_(0.5)
    return layer


def draw(*shape: int) -> Tensor:
    return torch.randn(shape, device=DEVICE)


def results(layer: RecurrentFilterAttention, x: Tensor, state: tuple[Tensor, ...], **options: Any) -> list[Tensor]:
    """Return outputs, the final state, and gradients."""
    dtype = next(layer.parameters()).dtype
    leaves = [y.detach().to(dtype).requires_grad_() for y in (x, *state[:2])]
    x, *rest = leaves
    previous = RecurrentAFAState(*rest, state[2]) if state else None
    (mean, variance, final), _ = layer.read(x, previous, options.pop("segments", None), True, **options)
    outputs = [mean, variance, final.mean, final.precision]
    generator = torch.Generator().manual_seed(1)
    weights = [torch.randn(y.shape, generator=generator).to(y) for y in outputs]
    gradients = torch.autograd.grad(outputs, [*leaves, *layer.parameters()], weights, allow_unused=True)
    return [*(y.detach() for y in outputs), final.time, *(y for y in gradients if y is not None)]


@pytest.mark.parametrize("iterations", [1, 3])
@pytest.mark.parametrize("timed", [False, True])
@pytest.mark.parametrize("setting", ["plain", "state", "packed", "packed state"])
def test_outputs_states_and_gradients_match_the_torch_form(setting: str, timed: bool, iterations: int) -> None:
    layer, x = make_layer(iterations), 2 * draw(2, 9, 12)
    options: dict[str, Any] = {"times": draw(2, 9).abs().cumsum(1).double()} if timed else {}
    if "packed" in setting:
        options["segments"] = Segments(SEGMENTS.rows.to(DEVICE))
    count, state = SEGMENTS.count if "packed" in setting else 2, ()
    if "state" in setting:
        state = (draw(count, 2, 2, 6), draw(count, 1, 2, 1).abs(), -draw(count, 1, 1, 1).abs().double())
        state[1][0] = 0  # no token yet
    with form("triton"):
        found = results(layer, x, state, **options)
    with form("eager"):
        expected = results(layer.double(), x, state, **options)
    for got, want in zip(found, expected, strict=True):
        assert float((got - want).norm()) <= 2e-5 * float(want.norm()) + 1e-9


def test_no_sequence_reaches_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(validation, "can_check_values", lambda *_: False)  # as on a GPU
    layer, x = make_layer(), draw(2, 9, 12)
    segments = Segments(SEGMENTS.rows.to(DEVICE))
    with form("triton"):
        want = layer(x, None, segments)[0]
        x[0, 4:9] = torch.nan
        leaf = x.requires_grad_()
        got = layer(leaf, None, segments)[0]
        (gradient,) = torch.autograd.grad(torch.where(got.isnan(), 0, got).sum(), leaf)
    assert torch.equal(got[0, :4], want[0, :4]) and torch.equal(got[1], want[1])
    assert got[0, 5:9].isnan().all() and not got[0, 4].any()
    assert gradient[0, :4].isfinite().all() and gradient[1].isfinite().all()


def test_second_derivatives_match_the_torch_form() -> None:
    layer, x = make_layer(), draw(1, 4, 12)

    def part(leaf: Tensor) -> list[Tensor]:
        return [layer.to(leaf.dtype)(leaf)[0]]

    check_second_derivatives(part, [x])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_positive_numbers_match_the_torch_form(dtype: torch.dtype) -> None:
    raw = torch.tensor([-300.0, -80.0, -8.5, -8.0, -1.0, 0.0, 0.5, 7.9, 8.1, 20.0])
    compare_forms(lambda x: [positive(x).log()], [raw], dtype)
    with form("triton"):
        assert positive(torch.tensor([torch.nan], device=DEVICE)).isnan().all()
    check_second_derivatives(lambda x: [positive(x)], [raw[2:8].to(DEVICE)])
