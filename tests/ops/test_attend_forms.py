"""The forms of `attend` that have no kernels of their own: against double loops, as one another, and the one law."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from histories import (
    NAMES,
    Signals,
    arguments,
    check_same,
    double_loop,
    gradients,
    leaves,
    paired,
    radial_loop,
    reads,
    signals,
    tokens,
)
from torch.utils._python_dispatch import TorchDispatchMode

from kalmix import ArgumentError, Segments
from kalmix.ops import attend, attend_radial
from kalmix.ops._shared import batching
from kalmix.ops.experimental import attend_channels
from kalmix.types import Filtered


@pytest.fixture(params=[1, 1 << 19], ids=["a query a tile", "one tile"])
def room(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batching, "MAX_ENTRIES_CPU", request.param)


def _channels(x: Signals, **options: Any) -> Filtered:
    return attend_channels(**(arguments(x) | {"variance": True} | options))


def _radial(x: Signals, **options: Any) -> Filtered:
    return attend_radial(**(arguments(x) | {"variance": True} | options))


def _both_ways(length: int = 8) -> Signals:
    """Signals of the radial form: of each noise, nu and temperature, one along and one across."""
    x = signals(length, groups=1)
    return x | {name: torch.stack([x[name], x[name].flip(0) / 2], 1) for name in (*NAMES[2:], "nu", "temperature")}


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "exponential": {"weight": "exponential"},
    "window": {"window": 3},
    "two-sided": {"causal": False},
}


@pytest.mark.usefixtures("room")
@pytest.mark.parametrize("still", [False, True], ids=["decay", "no decay"])
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("form", ["channels", "channels, values of their own", "radial"])
def test_it_is_the_double_loop(form: str, options: str, still: bool) -> None:
    if form == "radial":
        x, run, loop = _both_ways(6), _radial, radial_loop
    else:
        x, run, loop = signals(6, each=True, own=2 if "own" in form else None), _channels, double_loop
    if still:
        x |= {name: torch.zeros_like(y) for name, y in x.items() if name.endswith("log_decay")}
    given = leaves(x)
    got, want = reads(run(given, **OPTIONS[options])), loop(given, **OPTIONS[options])
    check_same(got, want, 1e-10)
    check_same(gradients(got, given), gradients(want, given), 1e-8)


@pytest.mark.parametrize("causal", [True, False])
def test_channels_that_are_alike_are_attend(causal: bool) -> None:
    x = signals(own=2)
    alike = x | {
        prefix + name: x[prefix + name][:, None].expand(2, width)
        for prefix, width in (("", 3), ("value.", 2))
        for name in NAMES
        if name != "frequency"
    }
    got, want = _channels(alike, causal=causal), attend(**arguments(x), variance=True, causal=causal)
    check_same(reads(got), [want.mean, reads(want)[1].expand_as(want.mean)], 1e-12)


def test_equal_noises_and_weights_are_attend_but_for_a_phase() -> None:
    """Of the estimate along the token's direction the real part is kept, and its length is that part."""
    x = _both_ways()
    x |= {name: x[name][:, :1].expand(2, 2) for name in NAMES[2:]}
    x |= {"nu": torch.full((2, 2), 1e16).double(), "temperature": torch.ones(2, 2).double()}
    alike = x | {name: x[name][:, 0] for name in (*NAMES[2:], "nu", "temperature")}
    whole = attend(**arguments(alike), variance=True)
    value, estimate = paired(x["v"]), paired(whole.mean)
    unit = value / value.abs().square().sum(-1, keepdim=True).sqrt()
    along = (unit.conj() * estimate).sum(-1, keepdim=True)
    step = value + estimate - along * unit
    want = along.real * step / step.abs().square().sum(-1, keepdim=True).sqrt()
    got = _radial(x)
    check_same([paired(got.mean)], [want], 1e-10)
    check_same([reads(got)[1]], [reads(whole)[1].expand_as(got.mean)], 1e-10)


@pytest.mark.usefixtures("room")
@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("form", ["channels", "radial"])
def test_one_law(form: str, window: int | None) -> None:
    """Any split, one token at a time and packed: the same reads, beliefs and gradients; the future never matters."""
    run, x = (_radial, _both_ways(11)) if form == "radial" else (_channels, signals(each=True))
    given = leaves(x)
    whole = run(given, window=window)
    want = gradients(reads(whole), given)
    for cuts in ((0, 4, 11), tuple(range(12))):
        belief, parts = None, []
        for start, stop in pairwise(cuts):
            parts.append(run(tokens(given, start, stop), belief=belief, window=window))
            belief = parts[-1].belief
        joined = [torch.cat(found, 1) for found in zip(*map(reads, parts), strict=True)]
        check_same(joined, reads(whole), 1e-12)
        check_same(list(parts[-1].belief), list(whole.belief), 0.0)
        check_same(gradients(joined, given), want, 1e-10)
    packed = run(x, window=window, segments=Segments.of(torch.tensor([[1, 6, 11], [0, 2, 2], [1, 0, 6]])))
    alone = run(
        {name: y[1:] if y.ndim == 4 or name == "times" else y for name, y in tokens(x, 0, 6).items()}, window=window
    )
    check_same([y[1:, :6] for y in reads(packed)], reads(alone), 1e-12)
    assert float(packed.mean[0].abs().max()) == 0
    last = packed.belief.take(torch.tensor([2])).compact()
    check_same(list(last)[:3], list(alone.belief)[:3], 0.0)
    other = {name: y + 1 if name in ("q", "k", "v") else y for name, y in x.items()}
    head = {name: torch.cat([y[:, :6], other[name][:, 6:]], 1) if y.ndim == 4 else y for name, y in x.items()}
    check_same([y[:, :6] for y in reads(run(head, window=window))], [y[:, :6] for y in reads(whole)], 0.0)


@pytest.mark.parametrize("form", ["channels", "radial"])
def test_they_train_in_single_and_half_precision(form: str) -> None:
    """A token without a direction included."""
    run, x = (_radial, _both_ways(40)) if form == "radial" else (_channels, signals(40, each=True))
    x["v"][:, 3] = 0
    for dtype in (torch.float32, torch.bfloat16):
        given = leaves({name: y if name == "times" else y.to(dtype) for name, y in x.items()})
        found = run(given)
        assert found.mean.dtype == dtype and found.belief.keys.dtype == torch.float32
        assert all(bool(y.isfinite().all()) for y in (*reads(found), *gradients(reads(found), given)))
        exact = run(x).mean
        assert float((found.mean.detach() - exact).norm() / exact.norm()) < 40 * torch.finfo(dtype).eps


class Largest(TorchDispatchMode):
    """Remembers how many numbers the largest tensor has that is made."""

    entries = 0

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        made = function(*arguments, **(options or {}))
        for x in made if isinstance(made, tuple | list) else (made,):
            if isinstance(x, torch.Tensor):
                self.entries = max(self.entries, x.untyped_storage().nbytes() // x.element_size())
        return made


@pytest.mark.parametrize("form", ["channels", "radial"])
def test_tiles_keep_nothing_of_a_pair(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward and backward make nothing as large as there are pairs, let alone pairs and channels."""
    monkeypatch.setattr(batching, "MAX_ENTRIES_CPU", 1 << 11)
    run, x = (_radial, _both_ways(128)) if form == "radial" else (_channels, signals(128, groups=1, each=True))
    given = leaves(x)
    with Largest() as largest:
        gradients(reads(run(given)), given)
    assert 128 * 2 * 2 * 6 <= largest.entries <= 4 * batching.MAX_ENTRIES_CPU < 128 * 128


@pytest.mark.parametrize("form", ["channels", "radial"])
def test_nothing_to_read(form: str) -> None:
    run, x = (_radial, _both_ways()) if form == "radial" else (_channels, signals(8, each=True))
    belief = run(x).belief
    found = run(tokens(x, 0, 0), belief=belief)
    assert found.mean.shape == reads(found)[1].shape == (2, 0, *x["v"].shape[2:])
    check_same(list(found.belief), list(belief), 0.0)


def test_bad_arguments() -> None:
    x, y = signals(4, each=True), _both_ways(4)
    with pytest.raises(ArgumentError, match="`log_decay`"):
        _channels(x | {"log_decay": x["log_decay"][:, 0]})
    with pytest.raises(ArgumentError, match="`value_dynamics` is None"):
        _channels(x | {"v": torch.zeros(2, 4, 2, 8).double()})
    with pytest.raises(ArgumentError, match="`v`"):
        _radial(y | {"v": torch.zeros(2, 4, 4, 6).double()})
    with pytest.raises(ArgumentError, match="`key_noise`"):
        _radial(y | {"key_noise": torch.ones(2).double()})
    with pytest.raises(ArgumentError, match="`nu`"):
        _radial(y | {"nu": torch.ones(2).double()})
