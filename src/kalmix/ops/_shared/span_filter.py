"""All spans of a long sequence, filtered at the same time."""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kalmix.ops._shared.custom_op import PriorSwitch, once_differentiable
from kalmix.ops._shared.op_spec import OpSpec
from kalmix.ops._shared.two_phase import compute_gradients, entry_gradients, take_stored
from kalmix.types import Filtered
from kalmix.validation import in_transform

ALTERNATIVE = "the op itself, with kernel='reference'"


class SpanCall(NamedTuple):
    """Call of an op on spans.

    Attributes:
        op: the op, which has updates.
        spans: number of spans.
        cut: function of the name and the value of an argument that returns it with spans as batch rows.
        names: names of the arguments that are tensors, after the tensors of the belief.
        options: other arguments.
    """

    op: OpSpec
    spans: int
    cut: Callable[[str, Any], Any]
    names: tuple[str, ...]
    options: dict[str, Any]

    def split(self, tensors: list[Tensor]) -> tuple[list[Tensor], dict[str, Any]]:
        """Return the tensors of the belief, and the arguments of the op with spans as batch rows."""
        leaves = len(tensors) - len(self.names)
        given = dict(zip(self.names, tensors[leaves:], strict=True))
        return tensors[:leaves], {name: self.cut(name, x) for name, x in given.items()} | self.options

    def updates(self, arguments: dict[str, Any]) -> list[Any]:
        """Return the update by each span, `[B, ...]`, rounded as the op rounds."""
        function = self.op.update_as_filtered or self.op.update
        assert function is not None
        accepted = signature(function).parameters
        update = function(**{name: x for name, x in arguments.items() if name in accepted})
        return [type(update)(*span) for span in self.unbind(update)]

    def unbind(self, rows: Any) -> list[tuple[Tensor, ...]]:
        """Return the tensors `[B, ...]` of each span, from tensors `[B * spans, ...]`."""
        return list(zip(*(x.unflatten(0, (-1, self.spans)).unbind(1) for x in rows), strict=True))

    def entries(self, updates: list[Any], belief: Any) -> list[Any]:
        """Return the belief before each span, given that before the first."""
        found = [belief]
        for update in updates[:-1]:
            found.append(update.apply(found[-1]))
        return found

    def join(self, spans: list[Any]) -> list[Tensor]:
        """Return tensors `[B * spans, ...]`, from those of each span."""
        return [torch.stack(x, 1).flatten(0, 1) for x in zip(*spans, strict=True)]

    def run(self, arguments: dict[str, Any], entry: list[Tensor]) -> list[Tensor | None]:
        """Return the mean, the variance and the tensors of the belief after each span."""
        mean, variance, belief = self.op.function(**arguments, belief=self.op.belief(*entry))
        return [mean, variance, *belief]


def filter_spans(call: SpanCall, belief: Any, tensors: list[Tensor]) -> Filtered:
    """Filter all spans; the results have spans as batch rows.

    In eager code autograd does not record the updates: gradients of beliefs are passed through them by `pull_back`. In
    compiled code, and under transforms of `torch.func`, it does.

    Args:
        call: the call.
        belief: belief before the first span.
        tensors: the arguments that `call.names` names.
    """
    inputs = [*belief, *tensors]
    if torch.compiler.is_compiling() or in_transform():
        leaves, arguments = call.split(inputs)
        entries = call.entries(call.updates(arguments), type(belief)(*leaves))
        mean, variance, *final = call.run(arguments, call.join(entries))
    else:
        inputs = inputs if torch.is_grad_enabled() else [x.detach() for x in inputs]  # `forward` cannot ask that
        mean, variance, *final = _Spans.apply(call, *inputs)
    return Filtered(mean, variance, call.op.belief(*final))  # pyright: ignore[reportArgumentType]


class _Spans(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: SpanCall, *tensors: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        needed = ctx.needs_input_grad[1:]
        leaves = [x.detach().requires_grad_(y) for x, y in zip(tensors, needed, strict=True)]
        with torch.set_grad_enabled(any(needed)):
            belief, arguments = call.split(leaves)
            with torch.no_grad():
                updates = call.updates(arguments)
                entries = call.entries(updates, call.op.belief(*belief))
                entry = call.join(entries)
            entry = [x.requires_grad_(any(needed)) for x in entry]
            with (switch := PriorSwitch()).record():
                outputs = call.run(arguments, entry)
        if any(needed):
            ctx.stored = leaves[len(belief) :], entry, outputs, updates, entries, switch
        ctx.call = call
        ctx.set_materialize_grads(False)
        return tuple(None if x is None else x.detach() for x in outputs)

    @staticmethod
    @once_differentiable("`filter_in_spans`", ALTERNATIVE)
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        call: SpanCall = ctx.call
        inputs, entry, outputs, updates, entries, switch = take_stored(ctx)
        with switch.turned_on():
            local = compute_gradients(outputs, grads, entry, retain=True)
        filled = [torch.zeros_like(x) if g is None else g for x, g in zip(entry, local, strict=True)]
        needs_prior = any(ctx.needs_input_grad[1 : len(entry) + 1])
        found = entry_gradients(call.unbind(filled), updates, entries, 0 if needs_prior else 1)
        prior = found.pop(0) if needs_prior else [None] * len(entry)
        exits = call.join([*found, [torch.zeros_like(x) for x in entries[0]]])
        total = [*grads[:2], *(x if g is None else x + g for x, g in zip(exits, grads[2:], strict=True))]
        remaining = iter(compute_gradients(outputs, total, [x for x in inputs if x.requires_grad], retain=False))
        return None, *prior, *(next(remaining) if x.requires_grad else None for x in inputs)
