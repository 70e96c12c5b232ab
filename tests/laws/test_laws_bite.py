"""Laws fail for wrong kernels. Each kernel here has one error that occurred in practice."""

from dataclasses import replace

import pytest
import torch
from torch.autograd import forward_ad
from torch.autograd.function import once_differentiable

from kalmix.beliefs import DiagonalBelief
from kalmix.ops import OPS
from kalmix.ops._diagonal.reference import diagonal as right
from kalmix.testing import measure
from kalmix.testing.cases import Case
from kalmix.testing.laws import LAWS, MANY, assert_within
from kalmix.types import Filtered
from kalmix.validation import in_transform


def forgets_the_prior(signals, belief, segments, variance):
    return right(signals, DiagonalBelief(belief.mean * 0, belief.variance), segments, variance)


def ignores_segments(signals, belief, segments, variance):
    return right(signals, DiagonalBelief(*(x[: signals.q.shape[0]] for x in belief)), None, variance)


def detaches_the_final_belief(*arguments):
    mean, variance, belief = right(*arguments)
    return Filtered(mean, variance, belief.detach())


def writes_the_gate_twice(signals, belief, segments, variance):
    return right(signals._replace(precision=signals.precision**2), belief, segments, variance)


def rounds_its_belief(*arguments):
    mean, variance, belief = right(*arguments)
    return Filtered(mean, variance, belief.to(torch.bfloat16).to(torch.float32))


def leaves_a_hole(*arguments):
    mean, variance, belief = right(*arguments)
    hole = torch.empty_like(mean)
    hole[:, 1:] = mean[:, 1:]
    return Filtered(hole, variance, belief)


def slightly_wrong_gradient(signals, belief, segments, variance):
    p = signals.process_noise
    return right(signals._replace(process_noise=p + 1e-3 * (p - p.detach())), belief, segments, variance)


def decays_at_idle(signals, belief, segments, variance):
    return right(signals._replace(log_decay=signals.log_decay - 1e-6), belief, segments, variance)


def multiplies_neighbours_by_zero(signals, belief, segments, variance):
    mean, variance, belief = right(signals, belief, segments, variance)
    return Filtered(mean + 0 * signals.v.sum(1, keepdim=True), variance, belief)


def mixes_gradients_of_neighbours(*arguments):
    mean, variance, belief = right(*arguments)
    if mean.requires_grad:
        mean.register_hook(lambda grad: grad + 0 * grad.sum())
    return Filtered(mean, variance, belief)


def multiplies_later_tokens_by_zero(signals, belief, segments, variance):
    mean, variance, belief = right(signals, belief, segments, variance)
    return Filtered(mean + 0 * signals.v.flip(1).cumsum(1).flip(1), variance, belief)


class _OnceDifferentiable(torch.autograd.Function):
    """The identity, by PyTorch's decorator, which lets a part of the second derivative through."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):  # pyright: ignore[reportIncompatibleMethodOverride]
        return grad


def loses_second_derivatives(signals, *rest):
    return right(signals._replace(v=_OnceDifferentiable.apply(signals.v)), *rest)


def loses_tangents(signals, *rest):
    v = forward_ad.unpack_dual(signals.v).primal if forward_ad._current_level >= 0 else signals.v
    return right(signals._replace(v=v), *rest)


def _off(signals, off, *rest):
    return right(signals._replace(v=1.001 * signals.v) if off else signals, *rest)


def errs_in_batches(signals, *rest):
    return _off(signals, in_transform(), *rest)


def limits_precision(signals, *rest):
    return right(signals._replace(precision=signals.precision.clamp(max=1e3)), *rest)


def errs_at_whole_tiles(signals, *rest):
    return _off(signals, signals.v.shape[1] == 64, *rest)


def errs_when_compiled_again(signals, *rest):
    return _off(signals, torch.compiler.is_compiling() and signals.v.shape[1] == 7, *rest)


WRONG = {
    forgets_the_prior: "agrees_with_the_oracle",
    ignores_segments: "padding_changes_nothing",
    detaches_the_final_belief: "gradients_agree_with_the_oracle",
    writes_the_gate_twice: "agrees_with_the_oracle",
    rounds_its_belief: "any_split_gives_the_same",
    leaves_a_hole: "outputs_are_fully_written",
    slightly_wrong_gradient: "gradients_agree_with_the_oracle",
    decays_at_idle: "idle_tokens_leave_the_belief",
    multiplies_neighbours_by_zero: "nothing_reaches_other_sequences",
    mixes_gradients_of_neighbours: "nothing_reaches_other_sequences",
    multiplies_later_tokens_by_zero: "nothing_later_reaches_earlier_tokens",
    loses_second_derivatives: "second_derivatives_are_right_or_refused",
    loses_tangents: "forward_mode_is_right_or_refused",
    errs_in_batches: "vmap_is_right_or_refused",
    limits_precision: "agrees_over_all_documented_noises",
    errs_at_whole_tiles: "agrees_at_lengths_around_tiles",
    errs_when_compiled_again: "compiles_to_one_graph",
}


def _install(monkeypatch, name="reference", **changes):
    kernels = OPS["diagonal"].kernels
    table = tuple(replace(k, **changes) if k.name == name else k for k in kernels)
    monkeypatch.setattr("kalmix.ops._diagonal.api.KERNELS", table)
    monkeypatch.setitem(OPS, "diagonal", replace(OPS["diagonal"], kernels=table))


@pytest.mark.parametrize("wrong", WRONG, ids=lambda kernel: kernel.__name__)
def test_law_catches_wrong_kernel(wrong, monkeypatch):
    name = "chunked" if wrong is errs_when_compiled_again else "reference"
    _install(monkeypatch, name, function=wrong)
    with pytest.raises(AssertionError):
        LAWS[WRONG[wrong]](Case("diagonal", name))


@pytest.mark.parametrize("wrong", [limits_precision, errs_at_whole_tiles], ids=lambda kernel: kernel.__name__)
def test_default_signals_miss_wrong_kernel(wrong, monkeypatch):
    _install(monkeypatch, function=wrong)
    LAWS["agrees_with_the_oracle"](Case("diagonal", "reference"))


def test_law_catches_undeclared_derivative(monkeypatch):
    _install(monkeypatch, features=frozenset())
    with pytest.raises(AssertionError, match="does not declare it"):
        LAWS["second_derivatives_are_right_or_refused"](Case("diagonal", "reference"))


def test_budgets_of_wide_noises_use_enough_draws():
    """Three draws gave a budget that float64 rounding of d angle exceeds 1.98 times."""
    case = Case("dense-turning", "chunked", dtype=torch.float64, key_width=3, seed=7)
    assert_within(measure.gradients(case, case.wide_inputs(), draws=MANY), "wide")
