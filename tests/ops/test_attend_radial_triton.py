"""Triton kernel of `attend_radial` against its PyTorch form in float64, and isolation of sequences.

Without a GPU it runs in Triton's interpreter, at small sizes.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from kalmix import KernelError, Segments, validation
from kalmix.beliefs import HistoryBelief
from kalmix.ops import attend_radial

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOKENS, NOISES = ("q", "k", "v"), ("process_noise", "key_noise", "query_noise")
HISTORY = ("keys", "values")
Inputs = dict[str, Tensor]

SEGMENTS = Segments.of(torch.tensor([[0, 0, 7], [1, 3, 5], [0, 8, 20], [1, 6, 6], [1, 6, 20]]))
PACKED: dict[str, Any] = {"segments": SEGMENTS, "variance": True}
CASES: dict[str, tuple[tuple[int, int, int], dict[str, Any]]] = {  # batch, tokens, channels; options
    "one channel": ((1, 9, 1), {}),
    "two tiles": ((2, 37, 3), {}),
    "large tiles": ((1, 70, 4), {"variance": True}),
    "exponential": ((1, 18, 3), {"weight": "exponential", "variance": True}),
    "two-sided": ((1, 17, 3), {"causal": False}),
    "two-sided, all options": (
        (1, 33, 2),
        {"causal": False, "variance": True, "weight": "exponential", "window": 5},
    ),
    "window": ((1, 37, 2), {"window": 9, "variance": True}),
    "packed": ((2, 20, 3), PACKED),
    "packed, two-sided": ((2, 20, 3), PACKED | {"causal": False}),
    "history": ((2, 16, 3), {"history": 5, "variance": True}),
    "history, packed, window": ((2, 20, 3), PACKED | {"history": 4, "window": 6}),
}
WIDE: dict[str, tuple[tuple[int, int, int], dict[str, Any]]] = {
    f"{channels} channels, {name}": ((2, 300, channels), options)
    for channels in (8, 20, 32)
    for name, options in (
        ("plain", {}),
        ("variance", {"variance": True, "window": 70}),
        ("two-sided", {"causal": False, "weight": "exponential"}),
    )
}
SHAPES = CASES | WIDE if DEVICE == "cuda" else CASES


def inputs(
    batch: int, length: int, channels: int, history: int = 0, count: int = 0, dtype: torch.dtype = torch.float32
) -> tuple[Inputs, dict[str, Any]]:
    """Draw differentiable inputs by name, and fixed arguments: times, and times and positions of the history."""
    generator, heads = torch.Generator().manual_seed(0), 2

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    x = {name: (normal(batch, length, heads, 2 * channels) / channels**0.5).to(dtype) for name in TOKENS}
    x |= {"log_decay": -0.1 * normal(heads).exp(), "frequency": normal(heads, channels)}
    x |= {name: normal(heads, 2).exp() for name in NOISES}
    x |= {"nu": 1 + normal(heads, 2).exp(), "temperature": (0.3 * normal(heads, 2)).exp()}
    x |= {"floor": 0.1 * normal(heads).exp()}
    fixed: dict[str, Any] = {"times": (normal(batch, length) + 0.5).clamp(min=0).cumsum(1).double()}
    if history:
        x |= {name: normal(count, history, heads, 2 * channels) for name in HISTORY}
        fixed["positions"] = torch.arange(history).expand(count, history).clone()
        fixed["positions"][:, ::3] = -1
        fixed["past"] = -normal(count, history).abs().cumsum(1).flip(1).double()
    return {name: y.to(DEVICE) for name, y in x.items()}, {name: y.to(DEVICE) for name, y in fixed.items()}


def run(x: Inputs, fixed: dict[str, Any], kernel: str, **options: Any) -> list[Tensor]:
    """Return mean and variance."""
    x, fixed = dict(x), dict(fixed)
    if "past" in fixed:
        fixed["belief"] = HistoryBelief(*(x.pop(name) for name in HISTORY), fixed.pop("past"), fixed.pop("positions"))
    if "segments" in options:
        options["segments"] = Segments(options["segments"].rows.to(DEVICE))
    result = attend_radial(**x, **fixed, **options, kernel=kernel)
    return [y for y in result[:2] if y is not None]


def outputs_and_gradients(x: Inputs, fixed: dict[str, Any], kernel: str, **options: Any) -> dict[str, Tensor]:
    """Return outputs, and gradients of their sum with weights that every dtype represents."""
    leaves = {name: y.detach().requires_grad_() for name, y in x.items()}
    outputs = run(leaves, fixed, kernel, **options)
    generator = torch.Generator().manual_seed(1)
    weights = [(torch.randint(-8, 9, y.shape, generator=generator) / 4).to(y) for y in outputs]
    gradients = torch.autograd.grad(outputs, list(leaves.values()), weights)
    outputs = [y.detach() for y in outputs]
    return dict(zip(("mean", "variance"), outputs, strict=False)) | dict(zip(leaves, gradients, strict=True))


def compare(x: Inputs, fixed: dict[str, Any], tolerance: float = 1e-5, **options: Any) -> None:
    """Compare the Triton kernel with the PyTorch form in float64; errors are relative to the norm of a tensor."""
    found = outputs_and_gradients(x, fixed, "triton", **options)
    expected = outputs_and_gradients({name: y.double() for name, y in x.items()}, fixed, "reference", **options)
    for name, want in expected.items():
        error = float((found[name].double() - want).norm())
        # Terms of the frequency's gradient are multiplied by times, not by lags, before they cancel.
        allowed = tolerance * (20 if name == "frequency" else 1)
        assert error <= allowed * float(want.norm()) + 1e-10, f"{name}: {error / float(want.norm()):.1e}"


@pytest.mark.parametrize("name", SHAPES)
def test_outputs_and_gradients_match_the_torch_form(name: str) -> None:
    (batch, length, channels), options = SHAPES[name]
    options = dict(options)
    count = options["segments"].count if "segments" in options else batch
    compare(*inputs(batch, length, channels, options.pop("history", 0), count), **options)


WIDE_BFLOAT16 = {f"64 channels, {name.partition(', ')[2]}": ((2, 300, 64), x[1]) for name, x in WIDE.items()}
BFLOAT16_SHAPES = {name: CASES[name] for name in ("two tiles", "packed")}
if DEVICE == "cuda":
    BFLOAT16_SHAPES |= WIDE | WIDE_BFLOAT16


@pytest.mark.parametrize("name", BFLOAT16_SHAPES)
def test_bfloat16_inputs_are_rounded_a_few_times(name: str) -> None:
    (batch, length, channels), options = BFLOAT16_SHAPES[name]
    compare(*inputs(batch, length, channels, dtype=torch.bfloat16), tolerance=0.06, **options)


def test_gradients_are_accurate_at_small_noises() -> None:
    x, fixed = inputs(1, 40, 3)
    compare(x | {name: 1e-5 * x[name] for name in NOISES}, fixed, tolerance=1e-4, variance=True)


def test_inputs_may_have_any_strides() -> None:
    x, fixed = inputs(2, 20, 3)
    strided = {name: y.transpose(0, -1).contiguous().transpose(0, -1) for name, y in x.items()}
    expected, found = (outputs_and_gradients(y, fixed, "triton", variance=True) for y in (x, strided))
    for name, want in expected.items():
        assert torch.equal(found[name], want), name


def test_a_value_of_zero_has_no_gradient() -> None:
    x, fixed = inputs(1, 17, 3)
    x["v"][:, 4] = 0
    compare(x, fixed)
    found = outputs_and_gradients(x, fixed, "triton")
    assert not found["mean"][:, 4].any() and found["v"].isfinite().all()


@pytest.fixture
def unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Do not check values of tensors; on a GPU they are not checked by default."""
    monkeypatch.setattr(validation, "can_check_values", lambda *_: False)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_padding_and_neighbours_change_no_sequence(value: float) -> None:
    """Spoil tokens and upstream gradients of the second sequence and of padding."""
    segments, spoiled_slots = Segments.of(torch.tensor([[0, 0, 7], [0, 7, 16], [0, 18, 24]])), slice(7, 18)
    clean, fixed = inputs(1, 24, 2)
    spoiled, upstream = dict(clean), torch.ones(1, 24, 1, 1, device=DEVICE)
    upstream[:, spoiled_slots] = value
    for name in TOKENS:
        spoiled[name] = clean[name].clone()
        spoiled[name][:, spoiled_slots] = value
    results = []
    for x, factor in ((clean, torch.ones_like(upstream)), (spoiled, upstream)):
        leaves = {name: y.detach().requires_grad_() for name, y in x.items()}
        outputs = run(leaves, fixed, "triton", segments=segments, variance=True)
        grads = torch.autograd.grad(outputs, [leaves[n] for n in TOKENS], [factor.expand_as(y) for y in outputs])
        results.append([*outputs, *grads])
    for want, got in zip(*results, strict=True):
        assert torch.equal(got[:, :7], want[:, :7]) and torch.equal(got[:, 18:], want[:, 18:])
        assert not got[:, 16:18].any()
    assert results[1][0][:, 7:16].isnan().all()


@pytest.mark.usefixtures("unchecked")
def test_nan_changes_no_earlier_token() -> None:
    clean, fixed = inputs(1, 37, 2)
    later = torch.arange(37, device=DEVICE)[:, None, None] >= 21
    spoiled = clean | {name: clean[name].masked_fill(later, torch.nan) for name in TOKENS}
    want, got = (run(x, fixed, "triton")[0] for x in (clean, spoiled))
    assert torch.equal(got[:, :21], want[:, :21]) and got[:, 21:].isnan().all()


def test_second_derivatives_and_forward_mode_are_refused() -> None:
    x, fixed = inputs(1, 9, 2)
    leaf = x["q"].requires_grad_()
    with pytest.raises(KernelError, match="reference"):
        torch.autograd.grad(run(x, fixed, "triton")[0].sum(), leaf, create_graph=True)
    with pytest.raises(KernelError, match="reference"):
        torch.func.jvp(lambda q: run(x | {"q": q}, fixed, "triton")[0], (leaf.detach(),), (leaf.detach(),))
