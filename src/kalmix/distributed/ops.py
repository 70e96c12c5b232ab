"""The functions of `kalmix.ops` as layers call them: under context parallelism they continue from other ranks.

Without an active context they are those functions. With `slots`, they are the functions of `kalmix.steps`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor

from kalmix import ops, steps
from kalmix.designs import Design
from kalmix.distributed.context import Call, active_call
from kalmix.distributed.entry import entry_belief, entry_history
from kalmix.distributed.ring_filter import attend_in_ring
from kalmix.distributed.two_phase import filter_in_two_phases
from kalmix.filtering import filter as filter_by
from kalmix.filtering import lower
from kalmix.ops import OPS, OpSpec
from kalmix.ops import diagonal_matrix as diagonal_matrix
from kalmix.types import Filtered


def _continue(call: Call, op: OpSpec, v: Tensor, signals: dict[str, Any]) -> Any:
    """Return the belief before each run of this rank."""
    if op.update is not None:
        return entry_belief(call, op, v, signals)
    if not signals.get("causal", True):
        raise RuntimeError("attention to later tokens cannot take part in context parallelism")
    return entry_history(call, signals["k"], v, signals.get("times"))


def _same(_k: Tensor, _v: Tensor, arguments: dict[str, Any]) -> dict[str, Any]:
    return arguments


def _attend_signals(q: Tensor, k: Tensor, v: Tensor, **x: Any) -> steps.AttendSignals:
    """Return the signals of a step of `attend` for arguments of the op; nu, temperature and floor are tensors `[H]`."""
    nu, rational = x["nu"], x.get("weight", "rational") == "rational"
    floor = x["floor"] if "floor" in x else torch.zeros_like(nu)
    weighting = steps.Weighting(nu, x["temperature"], floor, rational, x.get("window"), causal=True)
    dynamics = ops.Dynamics(*(x[name] for name in ops.Dynamics._fields))
    return steps.AttendSignals(q, k, v, x.get("times"), dynamics, x.get("value_dynamics"), weighting)


STEP_OPTIONS = ("ridge", "solver", "variance")  # arguments of an op that are not signals of its step
SIGNALS: dict[str, Callable[..., Any]] = {
    "additive": steps.AdditiveSignals,
    "attend": _attend_signals,
    "delta": steps.DeltaSignals,
    "dense": steps.DenseSignals,
    "diagonal": steps.DiagonalSignals,
    "ridge": steps.RidgeSignals,
}
STEP_KERNELS = {"triton": "triton", "chunked": "torch", "reference": "torch"}  # kernel of an op, and of its step


def _step(
    name: str, *tokens: Tensor, slots: steps.Slots, belief: Any, kernel: str | None, **arguments: Any
) -> Filtered:
    """Call `kalmix.steps.<name>` on a pool of beliefs, with q, k and v of one token per row."""
    options = {option: arguments.pop(option) for option in STEP_OPTIONS if option in arguments}
    signals = SIGNALS[name](*tokens, **arguments)
    return getattr(steps, name)(signals, belief, slots, kernel=STEP_KERNELS.get(kernel or ""), **options)


def _parallel(name: str, op: str | None = None) -> Callable[..., Filtered]:
    """Return a function that calls `kalmix.ops.<name>` with the belief that a run of this rank starts from."""

    @wraps(getattr(ops, name))
    def run(q: Tensor, k: Tensor, v: Tensor, *, slots: steps.Slots | None = None, **arguments: Any) -> Filtered:
        if slots is not None:
            return _step(name, q, k, v, slots=slots, **arguments)
        call = active_call()
        if call is not None and name == "attend" and call.context.attention == "ring":
            return attend_in_ring(call, q, k, v, arguments)
        if call is not None and call.context.two_phase and OPS[op or name].update is not None:
            return filter_in_two_phases(call, OPS[name], getattr(ops, name), _same, (q, k, v), arguments)
        if call is not None:
            arguments["belief"] = _continue(call, OPS[op or name], v, {"k": k, **arguments})
        return getattr(ops, name)(q, k, v, **arguments)

    return run


additive = _parallel("additive")
attend = _parallel("attend")
attend_radial = _parallel("attend_radial", "attend")
delta = _parallel("delta")
dense = _parallel("dense")
diagonal = _parallel("diagonal")
ridge = _parallel("ridge")


@wraps(filter_by)
def filter(  # noqa: A001 - the public name
    design: Design, q: Tensor, k: Tensor, v: Tensor, *, slots: steps.Slots | None = None, **arguments: Any
) -> Filtered:
    """Call `kalmix.filter`."""
    if slots is not None:
        belief, kernel = arguments.pop("belief"), arguments.pop("kernel", None)
        signals = lower(design, k, v, arguments)
        return _step(design.op, q, k, v, slots=slots, **signals, belief=belief, kernel=kernel)
    call = active_call()

    def lowered(k: Tensor, v: Tensor, given: dict[str, Any]) -> dict[str, Any]:
        options = ("belief", "segments", "kernel", "variance")
        return lower(design, k, v, {name: x for name, x in given.items() if name not in options})

    op = OPS[design.op]
    if call is not None and call.context.two_phase and op.update is not None:
        return filter_in_two_phases(call, op, partial(filter_by, design), lowered, (q, k, v), arguments)
    if call is not None:
        arguments["belief"] = _continue(call, op, v, {"k": k, **lowered(k, v, arguments)})
    return filter_by(design, q, k, v, **arguments)
