"""A law that cannot fail is no law: each of these kernels is wrong in one way that was met in the wild."""

from dataclasses import replace

import pytest
import torch

from kalmix import ops
from kalmix.beliefs import DiagonalBelief
from kalmix.kernels.diagonal.reference import diagonal as right
from kalmix.ops import OPS, Op
from kalmix.testing.cases import Case
from kalmix.testing.laws import LAWS
from kalmix.types import Filtered


def forgets_the_prior(q, k, v, w, a, p, belief, segments, variance):
    return right(q, k, v, w, a, p, DiagonalBelief(belief.mean * 0, belief.variance), segments, variance)


def ignores_segments(q, k, v, w, a, p, belief, segments, variance):
    return right(q, k, v, w, a, p, DiagonalBelief(*(x[: q.shape[0]] for x in belief)), None, variance)


def detaches_the_final_belief(*arguments):
    mean, variance, belief = right(*arguments)
    return Filtered(mean, variance, belief.detach())


def writes_the_gate_twice(q, k, v, w, a, p, belief, segments, variance):
    return right(q, k, v, w**2, a, p, belief, segments, variance)


def rounds_its_belief(*arguments):
    mean, variance, belief = right(*arguments)
    return Filtered(mean, variance, belief.to(torch.bfloat16).to(torch.float32))


def leaves_a_hole(*arguments):
    mean, variance, belief = right(*arguments)
    hole = torch.empty_like(mean)
    hole[:, 1:] = mean[:, 1:]
    return Filtered(hole, variance, belief)


def slightly_wrong_gradient(q, k, v, w, a, p, belief, segments, variance):
    return right(q, k, v, w, a, p + 1e-3 * (p - p.detach()), belief, segments, variance)


def decays_at_idle(q, k, v, w, a, p, belief, segments, variance):
    return right(q, k, v, w, a - 1e-6, p, belief, segments, variance)


WRONG = {
    forgets_the_prior: "agrees_with_the_oracle",
    ignores_segments: "padding_changes_nothing",
    detaches_the_final_belief: "gradients_agree_with_the_oracle",
    writes_the_gate_twice: "agrees_with_the_oracle",
    rounds_its_belief: "any_split_gives_the_same",
    leaves_a_hole: "outputs_are_fully_written",
    slightly_wrong_gradient: "gradients_agree_with_the_oracle",
    decays_at_idle: "idle_tokens_leave_the_belief",
}


@pytest.mark.parametrize("wrong", WRONG, ids=lambda kernel: kernel.__name__)
def test_the_law_catches(wrong, monkeypatch):
    kernels = OPS["diagonal"].kernels
    reference = next(kernel for kernel in kernels if kernel.name == "reference")
    table = tuple(replace(k, function=wrong) if k is reference else k for k in kernels)
    monkeypatch.setattr(ops._diagonal, "KERNELS", table)
    monkeypatch.setitem(OPS, "diagonal", Op(ops.diagonal, table))
    with pytest.raises(AssertionError):
        LAWS[WRONG[wrong]](Case("diagonal", "reference"))
