"""Every law over every kernel of every op, on every device there is. A new kernel row is tested by being one."""

import pytest
import torch

from kalmix.ops import OPS
from kalmix.testing.cases import PROBLEMS, cases
from kalmix.testing.laws import laws

DEVICES = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
CASES = cases(DEVICES, (torch.float32, torch.float64))


def test_every_op_has_a_problem_and_every_kernel_is_tried():
    assert {problem.design.op for problem in PROBLEMS.values()} == set(OPS)
    tried = {(case.op, case.kernel) for case in CASES}
    assert tried == {(op, kernel.name) for op, (_, kernels) in OPS.items() for kernel in kernels}


TRIED = [
    pytest.param(case, law, id=f"{case}-{name}")
    for case in CASES
    for name, law in laws(case).items()
    if (name, case.dtype) != ("compiles_to_one_graph", torch.float64)  # the same graph again
]


@pytest.mark.parametrize(("case", "law"), TRIED)
def test_law(case, law):
    law(case)
