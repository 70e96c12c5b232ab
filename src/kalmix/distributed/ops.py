"""The functions of `kalmix.ops` as layers call them: under context parallelism they continue from other ranks.

Without an active context they are those functions.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from torch import Tensor

from kalmix import ops
from kalmix.designs import Design
from kalmix.distributed.context import Call, active_call
from kalmix.distributed.entry import entry_belief, entry_history
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


def _parallel(function: Callable[..., Filtered], name: str) -> Callable[..., Filtered]:
    """Return the function of an op, with the belief that a run of this rank starts from."""

    @wraps(function)
    def run(q: Tensor, k: Tensor, v: Tensor, *, belief: Any = None, **arguments: Any) -> Filtered:
        call = active_call()
        if call is not None:
            belief = _continue(call, OPS[name], v, {"k": k, **arguments})
        return function(q, k, v, belief=belief, **arguments)

    return run


additive = _parallel(ops.additive, "additive")
attend = _parallel(ops.attend, "attend")
attend_radial = _parallel(ops.attend_radial, "attend")
delta = _parallel(ops.delta, "delta")
dense = _parallel(ops.dense, "dense")
diagonal = _parallel(ops.diagonal, "diagonal")
ridge = _parallel(ops.ridge, "ridge")


@wraps(filter_by)
def filter(  # noqa: A001 - the public name
    design: Design, q: Tensor, k: Tensor, v: Tensor, *, belief: Any = None, **arguments: Any
) -> Filtered:
    """Call `kalmix.filter`."""
    call = active_call()
    if call is not None:
        options = ("segments", "kernel", "variance")
        signals = {name: x for name, x in arguments.items() if name not in options}
        belief = _continue(call, OPS[design.op], v, {"k": k, **lower(design, k, v, signals)})
    return filter_by(design, q, k, v, belief=belief, **arguments)
