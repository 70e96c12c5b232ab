"""Problems with joined heads give the same results as each problem alone, which budgets of the laws rely on."""

import pytest
import torch

from kalmix.testing.cases import PROBLEMS, Case, outputs
from kalmix.testing.heads import draw_weights, head_axis, solve_together
from kalmix.testing.measure import differentiable, exact, pull_back, with_gradients
from kalmix.testing.tolerances import budgets


def function_of(case):
    """Return a function that computes outputs and gradients of the oracle, and the axis of the heads of each."""

    def compute(x, count):
        leaves = with_gradients(x)
        found = outputs(case.run_oracle(x | leaves))
        weights = draw_weights(found, [head_axis(name) for name in case.quantities], count)
        return [y.detach() for y in found] + pull_back(weights, found, leaves)

    return compute, [
        head_axis(name, case.problem.invariant) for name in (*case.quantities, *differentiable(case.inputs()))
    ]


@pytest.mark.parametrize("name", PROBLEMS)
def test_joined_problems_equal_each_alone(name):
    case = Case(name, "reference", length=4, **(PROBLEMS[name].sizes | {"key_heads": 2, "value_heads": 4}))
    trials = [exact(case.with_changes(seed=seed).inputs()) for seed in (0, 1)]
    for trial in trials[1:]:  # problems share what has no heads
        trial |= {key: x for key, x in trials[0].items() if head_axis(key, case.problem.invariant) is None}
    compute, axes = function_of(case)
    together = solve_together(compute, {x: head_axis(x, case.problem.invariant) for x in trials[0]}, axes)
    for got, trial in zip(together(trials), trials, strict=True):
        for x, y in zip(got, compute(trial, 1), strict=True):
            torch.testing.assert_close(x, y, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", ["dense", "diagonal", "attend"])
def test_budgets_of_joined_problems_are_those_of_each_alone(name):
    """Beliefs are rounded alike, too."""
    case = Case(name, "reference", length=4, **PROBLEMS[name].sizes)
    given = exact(case.inputs())
    compute, axes = function_of(case)
    together = solve_together(compute, {x: head_axis(x, case.problem.invariant) for x in given}, axes)
    expected = compute(given, 1)
    settings = lambda x: compute(x, 1), given, expected, torch.float32, [torch.float32] * len(expected)
    alone, joined = budgets(*settings), budgets(*settings, exact_many=together)
    assert joined == pytest.approx(alone, rel=1e-6)
