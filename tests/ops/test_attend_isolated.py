"""Isolation in `attend` and its forms: NaN affects only queries that attend to it, forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from histories import Signals, arguments, mean_var, signals, with_gradients
from torch import Tensor

from kalmix import Segments, checks
from kalmix.ops import attend, attend_radial
from kalmix.ops._attend import tiles
from kalmix.ops._shared import batching
from kalmix.ops.experimental import attend_channels
from kalmix.types import Filtered

RUNS = [[0, 0, 4], [0, 4, 7], [0, 7, 10], [1, 1, 11]]  # padding: token 10 of row 0, token 0 of row 1
SPOILED = [(0, 4, 7), (0, 10, 11), (1, 0, 1)]  # row, start, stop: a sequence and padding
PER_TOKEN = ("q", "k", "v", "times")
OPTIONS: dict[str, dict[str, Any]] = {
    "all": {},
    "window": {"window": 3, "weight": "exponential"},
    "two-sided": {"causal": False},
    "two-sided window": {"causal": False, "window": 2},
}
Op = Callable[..., Filtered]


def _radial(x: Signals, **options: Any) -> Filtered:
    """Call `attend_radial` with the same noises along and across, and one value head per key head."""
    pairs = {name: x[name][:, None].expand(-1, 2) for name in ("process_noise", "key_noise", "query_noise")}
    pairs |= {name: x[name][:, None].expand(-1, 2) for name in ("nu", "temperature")}
    return attend_radial(**(arguments(x) | pairs | {"v": x["v"][:, :, :2]}), **options)


def _channels(x: Signals, **options: Any) -> Filtered:
    each = {
        name: x[name][:, None].expand_as(x["frequency"]) for name in arguments(x) if name.endswith(("_decay", "_noise"))
    }
    return attend_channels(**(arguments(x) | each), **options)


OPS: dict[str, Op] = {
    "chunked": lambda x, **options: attend(**arguments(x), kernel="chunked", **options),
    "reference": lambda x, **options: attend(**arguments(x), kernel="reference", **options),
    "channels": _channels,
    "radial": _radial,
}


@pytest.fixture(params=OPS)
def op(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Op:
    """Return a form, with tiles so small that there are several, which mix sequences."""
    monkeypatch.setattr(tiles, "QUERY_TILE", 4)
    monkeypatch.setattr(batching, "MAX_ENTRIES_CPU", 1)
    return OPS[request.param]


def _spoil(x: Tensor, value: float, where: list[tuple[int, int, int]]) -> Tensor:
    x = x.clone()
    for row, start, stop in where:
        x[row, start:stop] = value
    return x


def _answer(op: Op, x: Signals, value: float | None, **options: Any) -> list[Tensor]:
    """Return outputs and gradients of q, k and v, with `value` in spoiled tokens and in their upstream gradients."""
    spoil = partial(_spoil, value=0.0 if value is None else value, where=[] if value is None else SPOILED)
    given = with_gradients({name: spoil(y) if name in PER_TOKEN else y for name, y in x.items()})
    with checks(enabled=False):
        found = op(given, segments=Segments.of(torch.tensor(RUNS)), variance=True, **options)
    draw = torch.Generator().manual_seed(1)
    outputs = mean_var(found)
    weights = [spoil(torch.randn(y.shape, generator=draw, dtype=y.dtype)) for y in outputs]
    grads = torch.autograd.grad(outputs, [given[name] for name in "qkv"], weights)
    return [*outputs, *grads]


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_padding_and_neighbours_change_no_sequence(options: dict[str, Any], op: Op) -> None:
    x = signals(groups=1)
    unspoiled = _answer(op, x, None, **options)
    for value in (float("nan"), float("inf"), 1e200):
        spoiled = _answer(op, x, value, **options)
        assert spoiled[0][0, 4:7].isnan().all(), value
        for got, want in zip(spoiled, unspoiled, strict=True):
            for row, start, stop in (RUNS[0], RUNS[2], RUNS[3]):
                assert torch.equal(got[row, start:stop], want[row, start:stop]), value
            for row, start, stop in SPOILED[1:]:
                assert not got[row, start:stop].any()


@pytest.mark.parametrize("options", list(OPTIONS.values())[:2], ids=list(OPTIONS)[:2])
def test_nan_changes_no_earlier_token(options: dict[str, Any], op: Op) -> None:
    x, first = signals(groups=1), 6
    spoiled = {
        name: _spoil(y, float("nan"), [(0, first, 11), (1, first, 11)]) if name in "qkv" else y for name, y in x.items()
    }
    with checks(enabled=False):
        got, want = (op(y, variance=True, **options) for y in (spoiled, x))
    for ours, theirs in zip(mean_var(got), mean_var(want), strict=True):
        assert torch.equal(ours[:, :first], theirs[:, :first])
    assert got.mean[:, first:].isnan().all()


def test_nan_spreads_no_further_than_the_window(op: Op) -> None:
    x, window = signals(groups=1), 3
    spoiled = {name: _spoil(y, float("nan"), [(0, 4, 5)]) if name in "qkv" else y for name, y in x.items()}
    with checks(enabled=False):
        causal, around = (op(spoiled, window=window, causal=causal).mean[0] for causal in (True, False))
    assert causal.flatten(1).isnan().all(1).nonzero().flatten().tolist() == [4, 5, 6]
    assert around.flatten(1).isnan().all(1).nonzero().flatten().tolist() == [2, 3, 4, 5, 6]
    assert causal.isnan().any((1, 2)).sum() == 3 and around.isnan().any((1, 2)).sum() == 5


def test_shared_slots_of_other_sequences_stay_masked(op: Op) -> None:
    """Packed sequences share the slots of their row, and keep those of others masked in the next call."""
    x, segments = (
        {name: y[:1] if y.ndim == 4 or name == "times" else y for name, y in signals(groups=1).items()},
        [[0, 0, 5], [0, 5, 11]],
    )
    spoiled = {name: _spoil(y, float("nan"), [(0, 5, 11)]) if name in "qkv" else y for name, y in x.items()}
    later = {name: y + 20 if name == "times" else y for name, y in x.items()}
    found = []
    with checks(enabled=False):
        for y in (spoiled, x):
            belief = op(y, segments=Segments.of(torch.tensor(segments))).belief
            found.append(op(later, segments=Segments.of(torch.tensor(segments)), belief=belief).mean)
    assert torch.equal(found[0][:, :5], found[1][:, :5]) and found[0][:, 5:].isnan().all()


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize(
    ("kernel", "entries"),
    [("chunked", 1), ("chunked", 10**6), ("reference", 1), ("radial", 1), ("channels", 1)],
    ids=["many tiles", "one tile", "reference", "radial", "channels"],
)
def test_products_with_an_upstream_gradient_that_overflow_change_no_other_sequence(
    options: dict[str, Any], kernel: str, entries: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Values and upstream gradients are finite."""
    monkeypatch.setattr(tiles, "QUERY_TILE", 4 if entries == 1 else 64)
    monkeypatch.setattr(batching, "MAX_ENTRIES_CPU", entries)
    found = []
    for fill in (1e308, 1.0):
        given = with_gradients(signals(groups=1))
        outputs = mean_var(OPS[kernel](given, segments=Segments.of(torch.tensor(RUNS)), variance=True, **options))
        weights = [_spoil(torch.ones_like(y), fill, SPOILED) for y in outputs]
        found.append(torch.autograd.grad(outputs, [given[name] for name in "qkv"], weights))
    for got, want in zip(*found, strict=True):
        for row, start, stop in (RUNS[0], RUNS[2], RUNS[3]):
            assert torch.equal(got[row, start:stop], want[row, start:stop])


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("kernel", OPS)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_nonfinite_upstream_gradient_changes_no_other_sequence(
    value: float, kernel: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Values are finite. The gradient of frequencies, which all sequences share, is NaN."""
    monkeypatch.setattr(tiles, "QUERY_TILE", 4)
    found = []
    for fill in (value, 1.0):
        given = with_gradients(signals(groups=1))
        outputs = mean_var(OPS[kernel](given, segments=Segments.of(torch.tensor(RUNS)), variance=True, **options))
        weights = [_spoil(torch.ones_like(y), fill, SPOILED) for y in outputs]
        found.append(torch.autograd.grad(outputs, [given[name] for name in ("q", "k", "v", "frequency")], weights))
    for got, want in zip(*(x[:3] for x in found), strict=True):
        for row, start, stop in (RUNS[0], RUNS[2], RUNS[3]):
            assert torch.equal(got[row, start:stop], want[row, start:stop])
    assert found[0][0][0, 4:7].isnan().all() and found[0][3].isnan().all()
