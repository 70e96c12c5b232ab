"""Triton kernels of `attend`: blocks, tiles, widths, masks and isolation.

Without a GPU they run in Triton's interpreter, at small sizes.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")


from kalmix.beliefs import HistoryBelief
from kalmix.ops import Dynamics
from kalmix.ops._attend import custom_op as triton_kernel
from kalmix.ops._attend import reference
from kalmix.ops._attend.dynamics import Weighting
from kalmix.ops._attend.kv_layout import make_layout
from kalmix.ops._attend.signals import AttendSignals
from kalmix.ops._attend.triton import backward, forward
from kalmix.segments import Segments
from kalmix.testing.heads import draw_weights, solve_together
from kalmix.testing.tolerances import ROUNDINGS, budgets, relative_error
from kalmix.types import Filtered

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HALF = torch.bfloat16
SIGNALS = ("q", "k", "v")
DYNAMICS = ("log_decay", "frequency", "process_noise", "key_noise", "query_noise")
WEIGHTING = ("nu", "temperature", "floor")
HISTORY = ("keys", "values")


def arguments(
    batch: int,
    length: int,
    heads: tuple[int, int],
    widths: tuple[int, int],
    own_dynamics: bool,
    dtype: torch.dtype,
    sequences: int,
    history: int,
) -> tuple[dict[str, Tensor], tuple[Tensor, Tensor, Tensor]]:
    """Draw differentiable inputs by name; and times, history times and history positions (every third slot empty)."""
    generator = torch.Generator().manual_seed(0)
    (shared, values), (width, value_width) = heads, widths

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    def dynamics(channels: int) -> tuple[Tensor, ...]:
        return -0.1 * normal(shared).exp(), normal(shared, channels), *normal(3, shared).exp()

    def scaled_normal(*shape: int) -> Tensor:
        return normal(*shape) / width**0.5

    inputs = {
        "q": scaled_normal(batch, length, shared, width).to(dtype),
        "k": scaled_normal(batch, length, shared, width).to(dtype),
        "v": normal(batch, length, values, value_width).to(dtype),
        **dict(zip(DYNAMICS, dynamics(width // 2), strict=True)),
        "nu": normal(shared).exp(),
        "temperature": (0.3 * normal(shared)).exp(),
        "floor": 0.1 * normal(shared).exp(),
    }
    if own_dynamics:
        inputs |= {f"{name} of values": x for name, x in zip(DYNAMICS, dynamics(value_width // 2), strict=True)}
    if history:
        inputs |= {"keys": scaled_normal(sequences, history, shared, width)}
        inputs |= {"values": normal(sequences, history, values, value_width)}
    positions = torch.arange(history).expand(sequences, history).clone()
    positions[:, ::3] = -1
    times = (normal(batch, length) + 0.5).clamp(min=0).cumsum(1).double()
    history_times = -normal(sequences, history).abs().cumsum(1).flip(1).double()
    return {name: x.to(DEVICE) for name, x in inputs.items()}, (times, history_times, positions)


def outputs_and_gradients(
    function: Any,
    inputs: dict[str, Tensor],
    timing: tuple[Tensor, Tensor, Tensor],
    options: Any,
    segments: Segments | None,
    count: int = 1,
) -> list[Tensor]:
    """Return outputs and gradients of their weighted sum; `count` problems have joined heads."""
    inputs_with_grad = {name: x.detach().requires_grad_() for name, x in inputs.items()}
    result = call_kernel(function, inputs_with_grad, timing, options, segments)
    belief_tensors = [] if result.belief is None else result.belief.compact()[:2]
    outputs = [x for x in (*result[:2], *belief_tensors) if x is not None]
    weights = draw_weights(outputs, [2] * len(outputs), count)
    return [x.detach() for x in outputs] + list(torch.autograd.grad(outputs, list(inputs_with_grad.values()), weights))


def call_kernel(
    function: Any,
    inputs_with_grad: dict[str, Tensor],
    timing: tuple[Tensor, Tensor, Tensor],
    options: Any,
    segments: Segments | None,
) -> Filtered:
    """Call a kernel."""
    q, k, v = (inputs_with_grad[name] for name in SIGNALS)
    times, history_times, positions = (x.to(DEVICE) for x in timing)
    count = len(positions)
    history = [
        inputs_with_grad.get(name, x.new_zeros(count, 0, *x.shape[2:])) for name, x in zip(HISTORY, (k, v), strict=True)
    ]
    keys, values = (x.to(torch.promote_types(x.dtype, torch.float32)) for x in history)
    key_dynamics = Dynamics._make(inputs_with_grad[name] for name in DYNAMICS)
    value_dynamics = None
    if "frequency of values" in inputs_with_grad:
        value_dynamics = Dynamics._make(inputs_with_grad[f"{name} of values"] for name in DYNAMICS)
    weighting = Weighting._make((*(inputs_with_grad[name] for name in WEIGHTING), *options[:3]))
    belief = HistoryBelief(keys, values, history_times, positions)
    return function(
        AttendSignals(q, k, v, times, key_dynamics, value_dynamics, weighting), belief, segments, options[3]
    )


SEGMENTS = Segments.of(torch.tensor([[0, 0, 13], [1, 3, 18], [0, 14, 36], [1, 20, 20], [1, 20, 36]]))
LONG_SEGMENTS = Segments.of(torch.tensor([[0, 0, 130], [0, 131, 300], [1, 3, 290], [1, 290, 290]]))
PLAIN, WITH_VARIANCE = (True, None, True, False), (True, None, True, True)
PLAIN_WINDOW = (True, 5, True, False)
WINDOW, TWO_SIDED = (False, 21, True, True), (False, 9, False, True)
SHAPES = [  # batch, tokens, heads, widths, own value dynamics, dtype, history, options, segments
    (1, 37, (1, 1), (6, 6), False, torch.float32, 0, PLAIN, None),  # three blocks, the last one odd
    (1, 37, (1, 2), (4, 10), True, torch.float32, 0, WINDOW, None),
    (2, 36, (1, 1), (4, 4), False, torch.float32, 0, WITH_VARIANCE, SEGMENTS),
    (2, 36, (1, 1), (4, 4), True, torch.float32, 7, WITH_VARIANCE, SEGMENTS),
    (2, 36, (1, 1), (4, 4), False, torch.float32, 0, PLAIN_WINDOW, SEGMENTS),
    (1, 37, (1, 1), (4, 6), True, torch.float32, 0, TWO_SIDED, None),
    (1, 20, (1, 1), (18, 18), False, HALF, 20, WINDOW, None),
    (1, 9, (1, 2), (4, 4), False, HALF, 0, PLAIN, None),  # the belief is a float32 copy of the inputs
    (1, 140, (1, 1), (4, 4), False, torch.float32, 0, PLAIN, None),  # blocks of many tiles
    (1, 9, (1, 1), (4, 130), True, torch.float32, 0, PLAIN, None),  # values in two slices
]
ON_GPU = [
    (2, 300, heads, widths, own_dynamics, dtype, history, options, segments)
    for dtype in (HALF, torch.float32)
    for widths in ((16, 16), (40, 40), (64, 64), (128, 128), (256, 256))
    for heads, own_dynamics, history, options, segments in (
        ((2, 2), False, 0, PLAIN, None),
        ((1, 2), True, 0, WITH_VARIANCE, LONG_SEGMENTS),
        ((2, 2), False, 70, WINDOW, None),
        ((2, 2), True, 0, TWO_SIDED, None),
    )
    if widths[0] <= 128 or dtype == HALF
]


@pytest.mark.parametrize("shape", SHAPES + ON_GPU if DEVICE == "cuda" else SHAPES, ids=str)
def test_outputs_and_gradients_match_the_reference(shape: tuple[Any, ...]) -> None:
    """Compare with the reference kernel in float64, within the change that rounding of inputs causes."""
    batch, length, heads, widths, own_dynamics, dtype, history, options, segments = shape
    sequences = batch if segments is None else segments.count
    inputs, timing = arguments(batch, length, heads, widths, own_dynamics, dtype, sequences, history)
    segments = None if segments is None else Segments(segments.rows.to(DEVICE))
    check_against_float64(inputs, timing, options, segments)


SMALL_MEMORY = [
    (1, 66, (1, 1), (4, 4), False, torch.float32, 0, PLAIN, None),
    (1, 66, (1, 1), (66, 66), True, torch.float32, 0, WITH_VARIANCE, None),
]


@pytest.mark.parametrize("shape", SMALL_MEMORY + ON_GPU if DEVICE == "cuda" else SMALL_MEMORY, ids=str)
def test_tiles_for_99_kib_of_shared_memory_match_the_reference(
    shape: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """GPUs of compute capability 8.6 and 8.9 get smaller tiles."""
    monkeypatch.setattr("kalmix.ops._shared.triton.compile_and_launch._LAUNCH_CACHE", {})
    for module in (backward, forward):
        monkeypatch.setattr(module, "shared_memory", lambda device: 99 * 1024)
    test_outputs_and_gradients_match_the_reference(shape)


def check_against_float64(
    inputs: dict[str, Tensor],
    timing: tuple[Tensor, Tensor, Tensor],
    options: Any,
    segments: Segments | None,
    only: str | None = None,
) -> None:
    """Compare outputs and gradients, or only the one named `only`, with the reference kernel in float64."""
    got, dtype = (
        outputs_and_gradients(triton_kernel.attend, inputs, timing, options, segments),
        inputs["q"].dtype,
    )
    exact = {name: x.double() for name, x in inputs.items()}
    outputs = ["mean", *["variance"][: options[3]], *(HISTORY if options[2] else []), *(f"d {name}" for name in inputs)]
    axes = {name: 2 if name in (*SIGNALS, *HISTORY) else 0 for name in inputs}

    def exactly(x: dict[str, Tensor], count: int = 1) -> list[Tensor]:
        return outputs_and_gradients(reference.attend, x, timing, options, segments, count)

    want = exactly(exact)
    allowed = budgets(
        exactly,
        exact,
        want,
        torch.float32,
        [x.dtype for x in got],
        HALF if dtype == HALF else None,
        exact_many=solve_together(exactly, axes, [2] * (len(outputs) - len(inputs)) + [*axes.values()]),
    )
    exact["mean"], gradients = want[0], dict(zip(outputs, want, strict=True))
    generator = torch.Generator().manual_seed(1)
    # The upstream gradient that `outputs_and_gradients` uses.
    gradients["d mean"] = (torch.randint(-8, 9, want[0].shape, generator=generator) / 4).to(want[0])
    for name, names in rotated_inputs("frequency of values" in inputs).items():
        rounding = frequency_rounding(names, exact, gradients, timing) / float(gradients[name].norm())
        allowed[outputs.index(name)] += ROUNDINGS * torch.finfo(torch.float32).eps * rounding / 3**0.5  # rms
    for name, x, y, budget in zip(outputs, got, want, allowed, strict=True):
        error = relative_error(x, y)
        assert only not in (None, name) or error <= budget, f"{name}: {error:.2e}, allowed {budget:.2e}"


def rotated_inputs(own_dynamics: bool) -> dict[str, list[str]]:
    """Return the names of the tensors that each frequency rotates."""
    keys, values = ["q", "k", "keys"], ["mean", "v", "values"]
    return {"d frequency": keys, "d frequency of values": values} if own_dynamics else {"d frequency": keys + values}


def frequency_rounding(
    names: list[str], x: dict[str, Tensor], gradients: dict[str, Tensor], timing: tuple[Tensor, ...]
) -> float:
    """Return the change of the frequencies' gradient per relative rounding of each token's term, in root mean square.

    The kernel sums terms of tokens multiplied by their time from the middle of the row. So a term is rounded relative
    to half the span of times, not relative to the lags between tokens.
    """
    times = torch.cat([y.flatten() for y in timing[:2]])
    terms = 0.0
    for name in names:
        if f"d {name}" in gradients:
            (a, b), (c, d) = (y.chunk(2, -1) for y in (x[name], gradients[f"d {name}"]))
            terms += float((a * d - b * c).square().sum())
    return float(times.max() - times.min()) / 2 * terms**0.5


@pytest.mark.parametrize(
    ("options", "own_dynamics"), [(PLAIN, True), (WITH_VARIANCE, False), (TWO_SIDED, False)], ids=str
)
def test_gradients_are_accurate_at_a_small_key_noise(options: tuple[Any, ...], own_dynamics: bool) -> None:
    inputs, timing = arguments(1, 40, (1, 1), (4, 4), own_dynamics, torch.float32, 1, 0)
    inputs |= {name: torch.full_like(x, 1e-5) for name, x in inputs.items() if name.startswith("key_noise")}
    rational = (True, *options[1:])
    check_against_float64(inputs, timing, rational, None)


@pytest.mark.parametrize(("rational", "variance"), [(False, False), (True, True)])
def test_decay_gradient_is_accurate_at_a_large_query_noise(rational: bool, variance: bool) -> None:
    """For later keys, residual and variance grow alike, so the terms of the gradient nearly cancel."""
    inputs, (times, *rest) = arguments(1, 20, (1, 1), (4, 4), True, torch.float32, 1, 0)
    extremes = {"query_noise": 100.0, "key_noise": 1e-4, "nu": 2.0**-9}
    inputs |= {name: torch.full_like(inputs[name], x) for name, x in extremes.items()}
    inputs |= {"k": inputs["k"] / 64}
    check_against_float64(inputs, (times / 1024, *rest), (rational, None, False, variance), None, "d log_decay")


@pytest.mark.parametrize("options", [PLAIN, WITH_VARIANCE, TWO_SIDED], ids=str)
def test_gradients_are_accurate_if_the_variance_of_values_hardly_depends_on_the_lag(options: tuple[Any, ...]) -> None:
    """The score gradients of a query sum to 0, so gradients of the values' noises are small differences."""
    inputs, timing = arguments(1, 40, (1, 1), (4, 4), True, torch.float32, 1, 0)
    constant = {"log_decay": -(2.0**-10), "process_noise": 2.0**-10, "key_noise": 1.0, "query_noise": 2.0}
    inputs |= {f"{name} of values": torch.full_like(inputs[f"{name} of values"], x) for name, x in constant.items()}
    check_against_float64(inputs, timing, options, None)


@pytest.mark.parametrize("causal", [True, False])
def test_gradients_are_accurate_if_one_key_has_nearly_all_weight(causal: bool) -> None:
    """The gradient of its score is a small difference, which a residual of thousands of variances multiplies."""
    inputs, timing = arguments(1, 40, (1, 1), (4, 4), False, torch.float32, 1, 0)
    noises = {"process_noise": 1.0, "key_noise": 1e-4, "query_noise": 1e-4}
    inputs |= {name: torch.full_like(inputs[name], x) for name, x in noises.items()}
    check_against_float64(inputs, timing, (False, None, causal, False), None)


NEIGHBOURS = Segments.of(torch.tensor([[0, 0, 7], [0, 7, 16], [0, 18, 24]]))
SPOILED = slice(7, 18)  # the second sequence, and padding


@pytest.mark.slow
@pytest.mark.parametrize(("own_dynamics", "history", "value"), [(False, 0, float("nan")), (True, 3, float("inf"))])
def test_padding_and_neighbours_change_no_sequence(own_dynamics: bool, history: int, value: float) -> None:
    """Spoil values and upstream gradients; a tile has tokens of several sequences."""
    clean, timing = arguments(1, 24, (1, 2), (4, 4), own_dynamics, torch.float32, 3, history)
    segments, upstream, spoiled = (
        Segments(NEIGHBOURS.rows.to(DEVICE)),
        torch.ones(1, 24, 1, 1, device=DEVICE),
        dict(clean),
    )
    upstream[:, SPOILED] = value
    for name in SIGNALS:
        spoiled[name] = spoiled[name].clone()
        spoiled[name][:, SPOILED] = value
    results = [
        outputs_and_token_gradients(x, timing, WITH_VARIANCE, segments, y)
        for x, y in ((spoiled, upstream), (clean, torch.ones_like(upstream)))
    ]
    for got, want in zip(*results, strict=True):
        assert torch.equal(got[:, :7], want[:, :7]) and torch.equal(got[:, 18:], want[:, 18:])
        assert not got[:, 16:18].any()
    assert results[0][0][:, 7:16].isnan().all()


def test_nan_changes_no_earlier_token() -> None:
    clean, timing = arguments(1, 37, (1, 2), (4, 4), False, torch.float32, 1, 0)
    spoiled = clean | {
        name: torch.where(torch.arange(37, device=DEVICE)[:, None, None] < 21, clean[name], torch.nan)
        for name in SIGNALS
    }
    got, want = (outputs_and_gradients(triton_kernel.attend, x, timing, PLAIN, None)[0] for x in (spoiled, clean))
    assert torch.equal(got[:, :21], want[:, :21]) and got[:, 21:].isnan().all()


def outputs_and_token_gradients(
    inputs: dict[str, Tensor],
    timing: tuple[Tensor, Tensor, Tensor],
    options: Any,
    segments: Segments,
    upstream: Tensor,
) -> list[Tensor]:
    """Return mean, variance, and the gradients of q, k and v for the upstream gradient `[B, T, 1, 1]`."""
    inputs_with_grad = {name: x.detach().requires_grad_() for name, x in inputs.items()}
    result = call_kernel(triton_kernel.attend, inputs_with_grad, timing, options, segments)
    outputs = [result.mean, result.variance]
    grads = torch.autograd.grad(
        outputs, [inputs_with_grad[name] for name in SIGNALS], [upstream.expand_as(x) for x in outputs]
    )
    return [x.detach() for x in (*outputs, *grads)]


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [None, 3, 99])
@pytest.mark.parametrize("has_times", [True, False])
@pytest.mark.parametrize(
    "rows", [SEGMENTS.rows.tolist(), [[0, 4, 36], [1, 0, 20]], [[1, 3, 9]], [[0, 0, 0]] * 3], ids=str
)
def test_layout_of_segments_matches_the_one_of_the_torch_kernels(
    rows: list[list[int]], has_times: bool, window: int | None, causal: bool
) -> None:
    inputs, (times, *_) = arguments(2, 36, (1, 1), (4, 4), False, torch.float32, len(rows), 0)
    q, k, v = (inputs[name] for name in SIGNALS)
    segments = Segments(torch.tensor(rows, dtype=torch.int32, device=DEVICE).view(-1, 3))
    call_times = times.to(DEVICE) if has_times else None
    none, no_time = k.new_zeros(len(rows), 0, 1, 4), times.new_zeros(len(rows), 0)
    belief = HistoryBelief(none, none, no_time, no_time.long()).to(DEVICE)
    weighting = Weighting._make((*(inputs[name] for name in WEIGHTING), True, window, causal))
    dynamics = Dynamics._make(inputs[name] for name in DYNAMICS)
    signals = AttendSignals(q, k, v, call_times, dynamics, None, weighting)
    want = make_layout(q, k, v, call_times, belief, segments, window)
    got, tokens = triton_kernel._segment_layout(signals, belief, segments)
    assert torch.equal(got.rank, want.rank) and torch.equal(got.times, want.times)
    if causal:
        slots = (triton_kernel._slots_of_sequences(x, segments, tokens) for x in (k, v))
        found = HistoryBelief._make((*slots, *got.final_belief[2:]))
        assert found.positions.shape[1] <= min(72, window or 72)
        assert all(torch.equal(x, y) for x, y in zip(found.compact(), want.final_belief.compact(), strict=True))


def test_score_gradients_sum_to_zero() -> None:
    """If all scores of a query are equal, the gradients of parameters that shift them together are 0."""
    inputs, timing = arguments(1, 37, (1, 1), (4, 4), False, HALF, 1, 0)
    inputs |= {name: 0 * inputs[name] for name in ("k", "log_decay", "process_noise")}
    results = outputs_and_gradients(triton_kernel.attend, inputs, timing, PLAIN, None)
    gradients = dict(zip(inputs, results[-len(inputs) :], strict=True))
    for name in ("key_noise", "query_noise", "nu", "temperature"):
        assert float(gradients[name].abs().max()) < 1e-5, name
