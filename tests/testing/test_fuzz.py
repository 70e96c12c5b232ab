"""The fuzz script: random calls of every op and kernel against independent float64 recursions."""

import pytest
import torch

from kalmix import ops
from kalmix.testing import fuzz
from kalmix.testing.draws import SIGNAL_DRAWS, draw, fuzzed_ops
from kalmix.testing.fuzz import kernels_on, measure, run_case
from kalmix.testing.recursions import stack_inputs
from kalmix.testing.tolerances import perturb_inputs


def test_call_is_reproducible_by_number():
    first, second = (draw(7, kernels_on("cpu")) for _ in range(2))
    assert str(first) == str(second)
    assert all(torch.equal(first.x[name], x) for name, x in second.x.items())


def test_wrong_kernel_fails(monkeypatch):
    """The gain of `additive` is off by 1e-3."""
    right = fuzz.ops.additive
    monkeypatch.setattr(fuzz.ops, "additive", lambda q, k, v, **given: right(q, k, 1.001 * v, **given))
    outcomes = [run_case(number, only=("additive",)) for number in range(4)]
    assert all(outcome.failed for outcome in outcomes if outcome.case.dtype == torch.float32)
    assert any(outcome.case.dtype == torch.float32 for outcome in outcomes)


@pytest.mark.slow
def test_budget_includes_rounding_of_stored_solutions():
    """k'x is far shorter than x here: d v was off by 1.9 budgets."""
    case = draw(7000000124, kernels_on("cuda"), tuple(SIGNAL_DRAWS), small=False)
    assert (case.op, case.kernel, case.dtype) == ("ridge", "triton", torch.bfloat16)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    assert not [x for x in measure(case, device) if x.error > x.budget]


def test_script_reports_every_op(capsys):
    arguments = fuzz.parse(["--cases", "12", "--ops", "additive", "delta"])
    assert fuzz.fuzz(arguments) == 0
    description = capsys.readouterr().out
    assert "12 cases, 0 failures" in description and "delta" in description
    assert set(fuzzed_ops()) == set(ops.OPS)


@pytest.mark.slow
def test_op_without_draws_uses_its_problems(monkeypatch):
    monkeypatch.delitem(SIGNAL_DRAWS, "diagonal")
    outcomes = [run_case(number, only=("diagonal",)) for number in range(6)]
    assert not [outcome.error_text for outcome in outcomes if outcome.failed]
    assert all(outcome.quantities for outcome in outcomes)


@pytest.mark.parametrize("op", ["additive", "delta", "diagonal", "dense", "ridge"])
@pytest.mark.slow
def test_recursion_filters_several_inputs_at_once(op, monkeypatch):
    """Budgets of a call need the results of several rounded inputs."""
    stacked = []
    monkeypatch.setattr(fuzz, "stack_inputs", lambda *x: stacked.append(x) or stack_inputs(*x))
    for number in range(6, 12):
        case, weights = draw(number, kernels_on("cpu"), (op,)), []
        inputs = {name: x.double() for name, x in case.x.items()} | fuzz.ones_of(case)
        fuzz.exact(case, weights, inputs)
        trials = [perturb_inputs(inputs, 1e-3, i) for i in range(3)]
        expected = [fuzz.exact(case, weights, x) for x in trials]
        torch.testing.assert_close(fuzz.exact_many(case, weights, trials), expected, rtol=1e-6, atol=1e-9)
    assert stacked


@pytest.mark.parametrize(("seed", "cases"), [(0, 15), pytest.param(1, 285, marks=pytest.mark.slow)])
def test_random_calls_stay_within_budget(seed, cases):
    """Run a fixed number, so that every machine runs the same calls; `python -m kalmix.testing.fuzz` runs more."""
    assert fuzz.fuzz(fuzz.parse(["--seed", str(seed), "--cases", str(cases)])) == 0


def test_all_drawn_numbers_are_finite():
    """Case 15 drew a nu of 1e6, which is infinite in float16."""
    case = draw(15, kernels_on("cpu"), ("attend",))
    assert case.dtype == torch.float16
    assert all(bool(x.isfinite().all()) for x in case.x.values())
