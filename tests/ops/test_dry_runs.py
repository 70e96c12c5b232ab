"""Dry runs compile kernels without launching them, so no tensor that a kernel would write may be used as an index."""

import pytest
import torch
from torch.overrides import TorchFunctionMode

pytest.importorskip("triton")

from kalmix.ops import OPS
from kalmix.ops._shared.triton.compile_and_launch import dry_run
from kalmix.testing.cases import PROBLEMS, Case, outputs
from kalmix.testing.measure import differentiable

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CASES = [
    Case(name, row.name, DEVICE) for name in PROBLEMS for row in OPS[PROBLEMS[name].design.op].kernels if row.triton
]


class Uninitialised(TorchFunctionMode):
    """Context in which integers that nobody has written are large."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if "empty" in func.__name__ and not result.is_floating_point():
            result.fill_(1 << 30)
        return result


@pytest.mark.parametrize("case", [x for x in CASES if x.with_min_width().unsupported_reason is None], ids=str)
@pytest.mark.parametrize("packed", [False, True], ids=["rows", "packed"])
def test_dry_run_uses_no_result_of_a_kernel(case, packed):
    case = case.with_min_width()
    segments = case.packing() if packed else None
    inputs = case.inputs(sequences=segments and segments.count)
    leaves = differentiable(inputs)
    inputs |= {name: x.requires_grad_() for name, x in leaves.items()}
    launches = []
    one_thread = torch.autograd.set_multithreading_enabled(False)  # a dry run is of one thread
    with Uninitialised(), dry_run(launches.append), one_thread:
        total = torch.stack([y.float().sum() for y in outputs(case.run(inputs, segments))]).sum()
        torch.autograd.grad(total, list(leaves.values()))
    if DEVICE == "cuda":
        torch.cuda.synchronize()  # a wrong index is reported here
    assert launches
