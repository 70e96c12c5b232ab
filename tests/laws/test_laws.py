"""Every law over every kernel of every op, on every device there is. A new kernel row is tested by being one."""

import pytest
import torch

from kalmix.kernels.kernel import Call, Kernel
from kalmix.ops import OPS
from kalmix.testing.cases import PROBLEMS, Case
from kalmix.testing.laws import LAWS

DEVICES = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]


def cases() -> list[Case]:
    found = []
    for op, (_, kernels) in OPS.items():
        for kernel in kernels:
            for device in DEVICES:
                dtypes = [dtype for dtype in (torch.float32, torch.float64) if serves(kernel, device, dtype)]
                found += [Case(op, kernel.name, device, dtype) for dtype in dtypes]
    return found


def serves(kernel: Kernel, device: str, dtype: torch.dtype) -> bool:
    return kernel.refuses(Call(device, dtype, key_width=3, value_width=5)) is None


def test_every_op_has_a_problem_and_every_kernel_is_tried():
    assert set(PROBLEMS) == set(OPS)
    tried = {(case.op, case.kernel) for case in cases()}
    assert tried == {(op, kernel.name) for op, (_, kernels) in OPS.items() for kernel in kernels}


@pytest.mark.parametrize("law", LAWS.values(), ids=LAWS.keys())
@pytest.mark.parametrize("case", cases(), ids=str)
def test_law(case, law):
    law(case)
