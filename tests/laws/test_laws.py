"""Every law, for every kernel of every op on every device of this machine. New kernels are included at once."""

import pytest
import torch

from kalmix.ops import OPS
from kalmix.testing.cases import PROBLEMS, Case, cases
from kalmix.testing.laws import laws

DEVICES = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
CASES = cases(DEVICES, (torch.float32, torch.float64))


def test_every_op_has_a_problem():
    assert {problem.design.op for problem in PROBLEMS.values()} == set(OPS)


@pytest.mark.parametrize(("op", "kernel"), [(op, row.name) for op in OPS for row in OPS[op].kernels])
def test_every_kernel_has_a_case(op, kernel):
    tried = [case for case in CASES if (case.op, case.kernel) == (op, kernel)]
    unsupported_reason = Case(op, kernel, DEVICES[-1]).with_min_width().unsupported_reason
    if kernel == "cuda" and unsupported_reason is not None:  # no interpreter stands in for this GPU
        pytest.skip(unsupported_reason)
    assert tried


SAME_IN_FLOAT64 = {
    "agrees_at_lengths_around_tiles",
    "compiles_to_one_graph",
    "compiles_with_inductor",
    "half_precision_inputs_keep_float32_beliefs",  # the same case
    "nothing_reaches_other_sequences",
    "nothing_later_reaches_earlier_tokens",
    "strides_do_not_matter",
    "second_derivatives_are_right_or_refused",
    "forward_mode_is_right_or_refused",
    "vmap_is_right_or_refused",
}

SLOW_INTERPRETED = {  # several seconds each; `additive` and `attend` stand for the other ops
    "nothing_reaches_other_sequences",
    "agrees_over_all_documented_noises",
    "strides_do_not_matter",
    "half_precision_inputs_keep_float32_beliefs",
    "outputs_are_fully_written",
}


VARIANTS = ("attend-window", "attend-shared")  # of `attend`, which stands for them in some laws
COMPILED = {("triton", "additive")}  # others are compiled by tests of layers and in `test_compiled_lengths`
INDUCTOR = ("additive", "attend", "dense")  # on a CPU
NOT_COMPILED = {  # on a CPU, to one graph: other tests compile the same code (kernel -> problems)
    "reference": ("additive-keys", *VARIANTS, "delta-keys", "dense", "dense-heads"),  # other problems of their ops
    "chunked": ("attend-shared", "delta-keys", "dense-heads"),
    "triton": ("additive-keys", "delta", "dense", "diagonal", "ridge"),  # `test_compiled_lengths` and opcheck
}
SAME_IN_VARIANTS = {
    "agrees_over_all_documented_noises",
    "forward_mode_is_right_or_refused",
    "half_precision_inputs_keep_float32_beliefs",
}


def _slow(case, name):
    """Return whether only `make test-all` runs a law, because cheaper cases cover it."""
    if name == "compiles_with_inductor":
        return case.device == "cpu"  # the C++ compiler takes most of the time
    if name == "compiles_to_one_graph":
        return (case.kernel, case.name) not in COMPILED
    if name == "nothing_reaches_other_sequences" and case.kernel == "reference":
        return case.name not in ("delta", "attend", "dense")
    if case.interpreted and case.name == "dense-turning":  # `test_dense_triton` compares rotations with the reference
        return name != "one_at_a_time_equals_the_whole"
    if name in SAME_IN_VARIANTS and case.name in VARIANTS:
        return True
    if name == "agrees_over_all_documented_noises" and case.dtype == torch.float64:  # errors of float32 are larger
        return True
    return case.interpreted and name in SLOW_INTERPRETED and case.name not in ("additive", "attend")


def _tried(case, name, law):
    slow = [pytest.mark.slow] if _slow(case, name) else []
    return pytest.param(case, law, id=f"{case}-{name}", marks=slow)


def _covered(case, name):
    """Return whether other cases run all code that the law would run."""
    if case.dtype == torch.float64 and name in SAME_IN_FLOAT64:
        return True
    if case.device != "cpu":
        return False
    if name == "compiles_to_one_graph":
        return case.name in NOT_COMPILED.get(case.kernel, ())
    if name == "agrees_at_lengths_around_tiles":
        return case.kernel == "reference"  # it has no tiles
    if name in SAME_IN_VARIANTS and case.name in VARIANTS:
        return case.dtype == torch.float64  # float32 runs the same code; `attend` runs in both
    return name == "compiles_with_inductor" and case.name not in INDUCTOR


TRIED = [_tried(case, name, law) for case in CASES for name, law in laws(case).items() if not _covered(case, name)]


@pytest.mark.parametrize(("case", "law"), TRIED)
def test_law(case, law):
    law(case)
