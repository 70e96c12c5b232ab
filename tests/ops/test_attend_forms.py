"""Forms of `attend` without kernels of their own: against double loops, against each other, and in pieces."""

from __future__ import annotations

from functools import cache
from itertools import pairwise
from typing import Any

import pytest
import torch
from histories import (
    NAMES,
    Signals,
    arguments,
    assert_close_to,
    double_loop,
    gradients,
    mean_var,
    radial_loop,
    signals,
    slice_tokens,
    to_complex,
    with_gradients,
)
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from kalmix import ArgumentError, Segments
from kalmix.ops import attend, attend_radial
from kalmix.ops._shared import batching
from kalmix.ops.experimental import attend_channels
from kalmix.types import Filtered


@pytest.fixture(params=[1, 1 << 19], ids=["one query per block", "one block"])
def max_entries(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batching, "MAX_ENTRIES_CPU", request.param)


def _channels(x: Signals, **options: Any) -> Filtered:
    return attend_channels(**(arguments(x) | {"variance": True} | options))


def _radial(x: Signals, **options: Any) -> Filtered:
    return attend_radial(**(arguments(x) | {"variance": True} | options))


def _radial_signals(length: int = 8) -> Signals:
    """Draw inputs of the radial form, with noises, nu and temperature along and across."""
    x = signals(length, groups=1)
    return x | {name: torch.stack([x[name], x[name].flip(0) / 2], 1) for name in (*NAMES[2:], "nu", "temperature")}


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "exponential": {"weight": "exponential"},
    "window": {"window": 3},
    "two-sided": {"causal": False},
}


@pytest.mark.usefixtures("max_entries")
@pytest.mark.parametrize("no_decay", [False, True], ids=["decay", "no decay"])
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("form", ["channels", "channels, own value dynamics", "radial"])
def test_outputs_and_gradients_match_the_double_loop(form: str, options: str, no_decay: bool) -> None:
    given, want, want_gradients = _loop(form, options, no_decay)
    got = mean_var((_radial if form == "radial" else _channels)(given, **OPTIONS[options]))
    assert_close_to(got, want, 1e-10)
    assert_close_to(gradients(got, given), want_gradients, 1e-8)


@cache
def _loop(form: str, options: str, no_decay: bool) -> tuple[Signals, list[Tensor], list[Tensor]]:
    """Return inputs, and outputs and gradients of the double loop: the same for all sizes of blocks."""
    if form == "radial":
        x, loop = _radial_signals(6), radial_loop
    else:
        x, loop = signals(6, per_channel=True, value_channels=2 if "own" in form else None), double_loop
    if no_decay:
        x |= {name: torch.zeros_like(y) for name, y in x.items() if name.endswith("log_decay")}
    given = with_gradients(x)
    want = loop(given, **OPTIONS[options])
    return given, [y.detach() for y in want], gradients(want, given)


@pytest.mark.parametrize("causal", [True, False])
def test_equal_channels_give_attend(causal: bool) -> None:
    x = signals(value_channels=2)
    alike = x | {
        prefix + name: x[prefix + name][:, None].expand(2, width)
        for prefix, width in (("", 3), ("value.", 2))
        for name in NAMES
        if name != "frequency"
    }
    got, want = _channels(alike, causal=causal), attend(**arguments(x), variance=True, causal=causal)
    assert_close_to(mean_var(got), [want.mean, mean_var(want)[1].expand_as(want.mean)], 1e-12)


def test_radial_with_equal_noises_gives_attend_up_to_a_phase() -> None:
    """Along the direction of the token, the form keeps the real part of the estimate."""
    x = _radial_signals()
    x |= {name: x[name][:, :1].expand(2, 2) for name in NAMES[2:]}
    x |= {"nu": torch.full((2, 2), 1e16).double(), "temperature": torch.ones(2, 2).double()}
    alike = x | {name: x[name][:, 0] for name in (*NAMES[2:], "nu", "temperature")}
    whole = attend(**arguments(alike), variance=True)
    value, estimate = to_complex(x["v"]), to_complex(whole.mean)
    unit = value / value.abs().square().sum(-1, keepdim=True).sqrt()
    along = (unit.conj() * estimate).sum(-1, keepdim=True)
    step = value + estimate - along * unit
    want = along.real * step / step.abs().square().sum(-1, keepdim=True).sqrt()
    got = _radial(x)
    assert_close_to([to_complex(got.mean)], [want], 1e-10)
    assert_close_to([mean_var(got)[1]], [mean_var(whole)[1].expand_as(got.mean)], 1e-10)


@pytest.mark.usefixtures("max_entries")
@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("form", ["channels", "radial"])
def test_pieces_and_packing_give_the_same_as_one_call(form: str, window: int | None) -> None:
    """Outputs, beliefs and gradients agree; later tokens change no earlier output."""
    run, x = (_radial, _radial_signals(11)) if form == "radial" else (_channels, signals(per_channel=True))
    given = with_gradients(x)
    whole = run(given, window=window)
    want = gradients(mean_var(whole), given)
    for cuts in ((0, 4, 11), tuple(range(12))):
        belief, parts = None, []
        for start, stop in pairwise(cuts):
            parts.append(run(slice_tokens(given, start, stop), belief=belief, window=window))
            belief = parts[-1].belief
        joined = [torch.cat(found, 1) for found in zip(*map(mean_var, parts), strict=True)]
        assert_close_to(joined, mean_var(whole), 1e-12)
        assert_close_to(list(parts[-1].belief), list(whole.belief), 0.0)
        assert_close_to(gradients(joined, given), want, 1e-10)
    packed = run(x, window=window, segments=Segments.of(torch.tensor([[1, 6, 11], [0, 2, 2], [1, 0, 6]])))
    alone = run(
        {name: y[1:] if y.ndim == 4 or name == "times" else y for name, y in slice_tokens(x, 0, 6).items()},
        window=window,
    )
    assert_close_to([y[1:, :6] for y in mean_var(packed)], mean_var(alone), 1e-12)
    assert float(packed.mean[0].abs().max()) == 0
    last = packed.belief.take(torch.tensor([2])).compact()
    assert_close_to(list(last)[:3], list(alone.belief)[:3], 0.0)
    other = {name: y + 1 if name in ("q", "k", "v") else y for name, y in x.items()}
    head = {name: torch.cat([y[:, :6], other[name][:, 6:]], 1) if y.ndim == 4 else y for name, y in x.items()}
    assert_close_to(
        [y[:, :6] for y in mean_var(run(head, window=window))],
        [y[:, :6] for y in mean_var(whole)],
        0.0,
    )


@pytest.mark.parametrize("form", ["channels", "radial"])
def test_gradients_are_finite_in_single_and_half_precision(form: str) -> None:
    """Also for a value of 0, which has no direction."""
    run, x = (_radial, _radial_signals(40)) if form == "radial" else (_channels, signals(40, per_channel=True))
    x["v"][:, 3] = 0
    for dtype in (torch.float32, torch.bfloat16):
        given = with_gradients({name: y if name == "times" else y.to(dtype) for name, y in x.items()})
        found = run(given)
        assert found.mean.dtype == dtype and found.belief.keys.dtype == torch.float32
        assert all(bool(y.isfinite().all()) for y in (*mean_var(found), *gradients(mean_var(found), given)))
        exact = run(x).mean
        assert float((found.mean.detach() - exact).norm() / exact.norm()) < 40 * torch.finfo(dtype).eps


def test_value_of_zero_passes_no_large_gradient() -> None:
    x = {name: y.float() for name, y in _radial_signals().items()}
    x["v"][:, 2] = 0
    v = x["v"].requires_grad_()
    found = _radial(x)
    assert not found.mean[:, 2].any()
    (grad,) = torch.autograd.grad(found.mean.sum(), v, create_graph=True)
    (second,) = torch.autograd.grad(grad.square().sum(), v)
    others = torch.arange(v.shape[1]) != 2
    assert grad[:, 2].abs().max() < grad[:, others].abs().max()
    assert second.isfinite().all()


class Largest(TorchDispatchMode):
    """Dispatch mode that records the size of the largest tensor."""

    entries = 0

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        made = function(*arguments, **(options or {}))
        for x in made if isinstance(made, tuple | list) else (made,):
            if isinstance(x, torch.Tensor):
                self.entries = max(self.entries, x.untyped_storage().nbytes() // x.element_size())
        return made


@pytest.mark.parametrize("form", ["channels", "radial"])
@pytest.mark.slow
def test_no_tensor_is_as_large_as_all_pairs(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In forward and backward pass, no tensor has as many elements as there are pairs of tokens."""
    monkeypatch.setattr(batching, "MAX_ENTRIES_CPU", 1 << 11)
    run, x = (
        (_radial, _radial_signals(128)) if form == "radial" else (_channels, signals(128, groups=1, per_channel=True))
    )
    given = with_gradients(x)
    with Largest() as largest:
        gradients(mean_var(run(given)), given)
    assert 128 * 2 * 2 * 6 <= largest.entries <= 4 * batching.MAX_ENTRIES_CPU < 128 * 128


@pytest.mark.parametrize("form", ["channels", "radial"])
def test_empty_input_returns_the_belief(form: str) -> None:
    run, x = (_radial, _radial_signals()) if form == "radial" else (_channels, signals(8, per_channel=True))
    belief = run(x).belief
    found = run(slice_tokens(x, 0, 0), belief=belief)
    assert found.mean.shape == mean_var(found)[1].shape == (2, 0, *x["v"].shape[2:])
    assert_close_to(list(found.belief), list(belief), 0.0)


def test_invalid_arguments_raise() -> None:
    x, y = signals(4, per_channel=True), _radial_signals(4)
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
