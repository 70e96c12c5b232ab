"""Checks of `kalmix doctor`: every kernel of this machine against float64."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from kalmix.ops import OPS
from kalmix.testing import measure
from kalmix.testing.cases import PROBLEMS, Case

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


class Check(NamedTuple):
    """Result for one kernel, device and dtype: its worst quantity, or the reason why it cannot run.

    Attributes:
        problem: name of the problem, which begins with its op.
        quantity: output or gradient with the largest error relative to its budget.
        error, budget: norm-wise relative error against float64, and its limit.
        ok: whether the error is within its budget; `None` if the kernel cannot run.
        note: reason why it cannot run, or the exception that it raised.
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
    """Yield a check for every kernel, problem of its op, device and dtype."""
    for name, problem in PROBLEMS.items():
        for kernel in OPS[problem.design.op].kernels:
            for device in devices():
                for dtype in DTYPES:
                    case = Case(
                        name, kernel.name, device, dtype, length=37, key_width=5, value_width=11
                    ).with_min_width()
                    yield check(case, case.unsupported_reason)


def check(case: Case, unsupported_reason: str | None = None) -> Check:
    """Check outputs and gradients of one kernel, with and without packing."""
    named = (case.name, case.kernel, case.device, str(case.dtype).removeprefix("torch."))
    if unsupported_reason is not None:
        return Check(*named, "", 0.0, 0.0, None, unsupported_reason)
    rows = case.packing()
    whole, packed = case.inputs(), case.inputs(sequences=rows.count)
    try:
        found = measure.forward_and_gradients(case, whole)
        found += measure.forward_and_gradients(case, packed, rows)
    except Exception as error:  # any failure is part of the report
        return Check(*named, "", float("inf"), 0.0, False, f"{type(error).__name__}: {error}".splitlines()[0])
    worst = max(found, key=lambda m: m.error / m.budget)
    return Check(*named, worst.quantity, worst.error, worst.budget, worst.ok, "")
