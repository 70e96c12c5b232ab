"""The self-check behind `kalmix doctor`: every kernel against float64, on the machine at hand."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from kalmix.ops import OPS
from kalmix.testing import measure
from kalmix.testing.cases import PROBLEMS, Case

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


class Check(NamedTuple):
    """One kernel on one device in one dtype: its worst quantity, or why it was not tried.

    Attributes:
        problem: an op, and the transitions it is tried with.
        quantity: the output or gradient that used most of its budget.
        error, budget: relative to float64, norm-wise.
        ok: within budget; `None` if not tried, and then `note` says why.
    """

    problem: str
    kernel: str
    device: str
    dtype: str
    quantity: str
    error: float
    budget: float
    ok: bool | None
    note: str


def devices() -> list[str]:
    return ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]


def check_all() -> Iterator[Check]:
    """Check every kernel on every problem of its op, on every device, in every dtype it takes."""
    for name, problem in PROBLEMS.items():
        for kernel in OPS[problem.design.op].kernels:
            for device in devices():
                for dtype in DTYPES:
                    case = Case(
                        name, kernel.name, device, dtype, length=37, key_width=5, value_width=11
                    ).with_min_width()
                    yield check(case, case.unsupported_reason)


def check(case: Case, unsupported_reason: str | None = None) -> Check:
    """Check one kernel: forward and gradients, whole and packed."""
    named = (case.name, case.kernel, case.device, str(case.dtype).removeprefix("torch."))
    if unsupported_reason is not None:
        return Check(*named, "", 0.0, 0.0, None, unsupported_reason)
    rows = case.packing()
    whole, packed = case.inputs(), case.inputs(sequences=rows.count)
    try:
        found = [*measure.forward(case, whole), *measure.gradients(case, whole)]
        found += [*measure.forward(case, packed, rows), *measure.gradients(case, packed, rows)]
    except Exception as error:  # whatever goes wrong, a doctor reports it and goes on
        return Check(*named, "", float("inf"), 0.0, False, f"{type(error).__name__}: {error}".splitlines()[0])
    worst = max(found, key=lambda m: m.error / m.budget)
    return Check(*named, worst.quantity, worst.error, worst.budget, worst.ok, "")
