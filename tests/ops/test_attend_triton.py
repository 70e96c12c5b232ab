"""What only the Triton kernels of `attend` can get wrong: blocks, tiles, widths, who is seen, which way they look.

On a machine without a GPU they run in Triton's interpreter, at sizes it can bear.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from launch_log import log_launches

from kalmix.beliefs import HistoryBelief
from kalmix.ops import Dynamics
from kalmix.ops._attend import custom_op as fused
from kalmix.ops._attend import reference
from kalmix.ops._attend.dynamics import Weighting
from kalmix.ops._attend.signals import AttendSignals
from kalmix.segments import Segments
from kalmix.testing.tolerances import ROUNDINGS, budgets, relative_error
from kalmix.types import Filtered

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HALF = torch.bfloat16
SIGNALS = ("q", "k", "v")
DYNAMICS = ("log_decay", "frequency", "process_noise", "key_noise", "query_noise")
WEIGHING = ("nu", "temperature", "floor")
HISTORY = ("keys", "values")


def arguments(
    batch: int,
    length: int,
    heads: tuple[int, int],
    widths: tuple[int, int],
    own: bool,
    dtype: torch.dtype,
    sequences: int,
    history: int,
) -> tuple[dict[str, Tensor], tuple[Tensor, Tensor, Tensor]]:
    """What gradients reach, by name; and times, those of the history and its positions, every third slot empty."""
    draw = torch.Generator().manual_seed(0)
    (shared, values), (width, value_width) = heads, widths

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw)

    def dynamics(channels: int) -> tuple[Tensor, ...]:
        return -0.1 * normal(shared).exp(), normal(shared, channels), *normal(3, shared).exp()

    def look(*shape: int) -> Tensor:
        return normal(*shape) / width**0.5

    inputs = {
        "q": look(batch, length, shared, width).to(dtype),
        "k": look(batch, length, shared, width).to(dtype),
        "v": normal(batch, length, values, value_width).to(dtype),
        **dict(zip(DYNAMICS, dynamics(width // 2), strict=True)),
        "nu": normal(shared).exp(),
        "temperature": (0.3 * normal(shared)).exp(),
        "floor": 0.1 * normal(shared).exp(),
    }
    if own:
        inputs |= {f"{name} of values": x for name, x in zip(DYNAMICS, dynamics(value_width // 2), strict=True)}
    if history:
        inputs |= {"keys": look(sequences, history, shared, width)}
        inputs |= {"values": normal(sequences, history, values, value_width)}
    positions = torch.arange(history).expand(sequences, history).clone()
    positions[:, ::3] = -1
    times = (normal(batch, length) + 0.5).clamp(min=0).cumsum(1).double()
    before = -normal(sequences, history).abs().cumsum(1).flip(1).double()
    return {name: x.to(DEVICE) for name, x in inputs.items()}, (times, before, positions)


def answer(
    function: Any, inputs: dict[str, Tensor], when: tuple[Tensor, Tensor, Tensor], how: Any, segments: Segments | None
) -> list[Tensor]:
    """Outputs, what the belief holds, and gradients of their sum, weighted by numbers that every dtype holds."""
    leaves = {name: x.detach().requires_grad_() for name, x in inputs.items()}
    result = called(function, leaves, when, how, segments)
    seen = [] if result.belief is None else result.belief[:2]
    outputs = [x for x in (*result[:2], *seen) if x is not None]
    draw = torch.Generator().manual_seed(1)
    weights = [(torch.randint(-8, 9, x.shape, generator=draw) / 4).to(x) for x in outputs]
    return [x.detach() for x in outputs] + list(torch.autograd.grad(outputs, list(leaves.values()), weights))


def called(
    function: Any, leaves: dict[str, Tensor], when: tuple[Tensor, Tensor, Tensor], how: Any, segments: Segments | None
) -> Filtered:
    """Call a kernel."""
    q, k, v = (leaves[name] for name in SIGNALS)
    times, before, positions = (x.to(DEVICE) for x in when)
    count = len(positions)
    kept = [leaves.get(name, x.new_zeros(count, 0, *x.shape[2:])) for name, x in zip(HISTORY, (k, v), strict=True)]
    keys, values = (x.to(torch.promote_types(x.dtype, torch.float32)) for x in kept)
    moves = Dynamics._make(leaves[name] for name in DYNAMICS)
    own = None
    if "frequency of values" in leaves:
        own = Dynamics._make(leaves[f"{name} of values"] for name in DYNAMICS)
    weighing = Weighting._make((*(leaves[name] for name in WEIGHING), *how[:3]))
    belief = HistoryBelief(keys, values, before, positions)
    return function(AttendSignals(q, k, v, times, moves, own, weighing), belief, segments, how[3])


RUNS = Segments.of(torch.tensor([[0, 0, 13], [1, 3, 18], [0, 14, 36], [1, 20, 20], [1, 20, 36]]))
LONG_RUNS = Segments.of(torch.tensor([[0, 0, 130], [0, 131, 300], [1, 3, 290], [1, 290, 290]]))
PLAIN, VARYING = (True, None, True, False), (True, None, True, True)
NARROW, AROUND = (False, 21, True, True), (False, 9, False, True)
SHAPES = [  # batch, tokens, heads, widths, values move on their own, dtype, history, how, segments
    (1, 37, (1, 1), (6, 6), False, torch.float32, 0, PLAIN, None),  # three blocks, the last one odd
    (1, 37, (1, 2), (4, 10), True, torch.float32, 0, NARROW, None),
    (2, 36, (1, 1), (4, 4), False, torch.float32, 0, VARYING, RUNS),
    (2, 36, (1, 1), (4, 4), True, torch.float32, 7, VARYING, RUNS),
    (1, 37, (1, 1), (4, 6), True, torch.float32, 0, AROUND, None),
    (1, 20, (1, 1), (18, 18), False, HALF, 20, NARROW, None),
    (1, 9, (1, 2), (4, 4), False, HALF, 0, PLAIN, None),  # the belief is what was given, in float32
    (1, 140, (1, 1), (4, 4), False, torch.float32, 0, PLAIN, None),  # blocks of many tiles
    (1, 9, (1, 1), (4, 130), True, torch.float32, 0, PLAIN, None),  # values in two strips
]
ON_GPU = [
    (2, 300, heads, widths, own, dtype, history, how, segments)
    for dtype in (HALF, torch.float32)
    for widths in ((16, 16), (40, 40), (64, 64), (128, 128), (256, 256))
    for heads, own, history, how, segments in (
        ((2, 2), False, 0, PLAIN, None),
        ((1, 2), True, 0, VARYING, LONG_RUNS),
        ((2, 2), False, 70, NARROW, None),
        ((2, 2), True, 0, AROUND, None),
    )
    if widths[0] <= 128 or dtype == HALF
]


@pytest.mark.parametrize("shape", SHAPES + ON_GPU if DEVICE == "cuda" else SHAPES, ids=str)
def test_it_agrees_with_the_reference(shape: tuple[Any, ...]) -> None:
    """Outputs and gradients against float64 written out, within what rounding the inputs would do to it."""
    batch, length, heads, widths, own, dtype, history, how, segments = shape
    sequences = batch if segments is None else segments.count
    inputs, when = arguments(batch, length, heads, widths, own, dtype, sequences, history)
    segments = None if segments is None else Segments(segments.rows.to(DEVICE))
    check(inputs, when, how, segments)


def check(
    inputs: dict[str, Tensor],
    when: tuple[Tensor, Tensor, Tensor],
    how: Any,
    segments: Segments | None,
    only: str | None = None,
) -> None:
    """Compare outputs and gradients, or `only` the one of this name, with float64."""
    got, dtype = answer(fused.attend, inputs, when, how, segments), inputs["q"].dtype
    exact = {name: x.double() for name, x in inputs.items()}
    want = answer(reference.attend, exact, when, how, segments)
    allowed = budgets(
        lambda moved: answer(reference.attend, moved, when, how, segments),
        exact,
        torch.float32,
        [x.dtype for x in got],
        HALF if dtype == HALF else None,
    )
    outputs = ["mean", *["variance"][: how[3]], *(HISTORY if how[2] else []), *(f"d {name}" for name in inputs)]
    exact["mean"], gradients = want[0], dict(zip(outputs, want, strict=True))
    draw = torch.Generator().manual_seed(1)
    gradients["d mean"] = (torch.randint(-8, 9, want[0].shape, generator=draw) / 4).to(want[0])  # as `answer` has it
    for name, turns in turning("frequency of values" in inputs).items():
        slip = slipping(turns, exact, gradients, when) / float(gradients[name].norm())
        allowed[outputs.index(name)] += ROUNDINGS * torch.finfo(torch.float32).eps * slip / 3**0.5  # rms
    for name, x, y, budget in zip(outputs, got, want, allowed, strict=True):
        error = relative_error(x, y)
        assert only not in (None, name) or error <= budget, f"{name}: {error:.2e}, allowed {budget:.2e}"


def turning(own: bool) -> dict[str, list[str]]:
    """What turns with each frequency."""
    keys, values = ["q", "k", "keys"], ["mean", "v", "values"]
    return {"d frequency": keys, "d frequency of values": values} if own else {"d frequency": keys + values}


def slipping(names: list[str], x: dict[str, Tensor], gradients: dict[str, Tensor], when: tuple[Tensor, ...]) -> float:
    """How far the gradient of frequencies moves where each token's share of it moves by itself, at random.

    The kernel sums it over tokens, of what their times from the middle of the lane multiply (DESIGN.md): a rounding
    moves each by eps of half the span of times, not of the lags between tokens.
    """
    times = torch.cat([y.flatten() for y in when[:2]])
    terms = 0.0
    for name in names:
        if f"d {name}" in gradients:
            (a, b), (c, d) = (y.chunk(2, -1) for y in (x[name], gradients[f"d {name}"]))
            terms += float((a * d - b * c).square().sum())
    return float(times.max() - times.min()) / 2 * terms**0.5


@pytest.mark.parametrize(("how", "own"), [(PLAIN, True), (VARYING, False), (AROUND, False)], ids=str)
def test_gradients_are_right_at_a_small_key_noise(how: tuple[Any, ...], own: bool) -> None:
    inputs, when = arguments(1, 40, (1, 1), (4, 4), own, torch.float32, 1, 0)
    inputs |= {name: torch.full_like(x, 1e-5) for name, x in inputs.items() if name.startswith("key_noise")}
    rational = (True, *how[1:])
    check(inputs, when, rational, None)


@pytest.mark.parametrize(("rational", "variance"), [(False, False), (True, True)])
def test_the_gradient_of_the_rate_is_right_at_a_large_query_noise(rational: bool, variance: bool) -> None:
    """The residual and the variance of what is ahead grow alike, so that little is left of the rate's gradient."""
    inputs, (now, *rest) = arguments(1, 20, (1, 1), (4, 4), True, torch.float32, 1, 0)
    extremes = {"query_noise": 100.0, "key_noise": 1e-4, "nu": 2.0**-9}
    inputs |= {name: torch.full_like(inputs[name], x) for name, x in extremes.items()}
    inputs |= {"k": inputs["k"] / 64}
    check(inputs, (now / 1024, *rest), (rational, None, False, variance), None, "d log_decay")


NEIGHBOURS = Segments.of(torch.tensor([[0, 0, 7], [0, 7, 16], [0, 18, 24]]))
SPOILED = slice(7, 18)  # the second of them, and padding


@pytest.mark.slow
@pytest.mark.parametrize(("own", "history", "value"), [(False, 0, float("nan")), (True, 3, float("inf"))])
def test_neither_padding_nor_a_neighbour_reaches_a_sequence(own: bool, history: int, value: float) -> None:
    """Values and upstream gradients; also where a tile has tokens of several sequences."""
    clean, when = arguments(1, 24, (1, 2), (4, 4), own, torch.float32, 3, history)
    segments, upstream, spoiled = (
        Segments(NEIGHBOURS.rows.to(DEVICE)),
        torch.ones(1, 24, 1, 1, device=DEVICE),
        dict(clean),
    )
    upstream[:, SPOILED] = value
    for name in SIGNALS:
        spoiled[name] = spoiled[name].clone()
        spoiled[name][:, SPOILED] = value
    found = [
        spread(x, when, VARYING, segments, y) for x, y in ((spoiled, upstream), (clean, torch.ones_like(upstream)))
    ]
    for got, want in zip(*found, strict=True):
        assert torch.equal(got[:, :7], want[:, :7]) and torch.equal(got[:, 18:], want[:, 18:])
        assert not got[:, 16:18].any()
    assert found[0][0][:, 7:16].isnan().all()


def test_nan_in_a_token_reaches_no_earlier_one() -> None:
    clean, when = arguments(1, 37, (1, 2), (4, 4), False, torch.float32, 1, 0)
    spoiled = clean | {
        name: torch.where(torch.arange(37, device=DEVICE)[:, None, None] < 21, clean[name], torch.nan)
        for name in SIGNALS
    }
    got, want = (answer(fused.attend, x, when, PLAIN, None)[0] for x in (spoiled, clean))
    assert torch.equal(got[:, :21], want[:, :21]) and got[:, 21:].isnan().all()


def spread(
    inputs: dict[str, Tensor], when: tuple[Tensor, Tensor, Tensor], how: Any, segments: Segments, upstream: Tensor
) -> list[Tensor]:
    """Mean and variance, and gradients of q, k and v of their sum, weighted by `upstream` `[B, T, 1, 1]`."""
    leaves = {name: x.detach().requires_grad_() for name, x in inputs.items()}
    result = called(fused.attend, leaves, when, how, segments)
    outputs = [result.mean, result.variance]
    grads = torch.autograd.grad(outputs, [leaves[name] for name in SIGNALS], [upstream.expand_as(x) for x in outputs])
    return [x.detach() for x in (*outputs, *grads)]


def test_gradients_of_scores_add_up_to_nothing() -> None:
    """Where a query's scores are all alike it does not matter what they are, however weights are rounded."""
    inputs, when = arguments(1, 37, (1, 1), (4, 4), False, HALF, 1, 0)
    inputs |= {name: 0 * inputs[name] for name in ("k", "log_decay", "process_noise")}
    found = answer(fused.attend, inputs, when, PLAIN, None)
    gradients = dict(zip(inputs, found[-len(inputs) :], strict=True))
    for name in ("key_noise", "query_noise", "nu", "temperature"):
        assert float(gradients[name].abs().max()) < 1e-5, name


@pytest.mark.skipif(DEVICE == "cuda", reason="logs launches without running them")
@pytest.mark.parametrize("dtype", [torch.float32, HALF], ids=str)
def test_dry_run_compiles_every_launched_kernel(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    log = log_launches(monkeypatch)
    inputs, when = arguments(1, 70, (1, 2), (6, 6), False, dtype, 1, 0)
    answer(fused.attend, inputs, when, PLAIN, None)
    assert log[True] == log[False]
    attention = {"token_blocks_kernel", "attend_kernel", "query_grads_kernel", "key_grads_kernel"}
    assert {name for name, *_ in log[True]} == attention | {"rotate_kernel", "rotate_backward_kernel"}
