"""Memories with a backward pass in two phases, in which updates have no backward pass of their own.

Forward: each rank computes the update by its tokens without a graph, gathers those of all ranks, and runs the op from
the belief before its tokens. Backward:

1. Each rank computes the gradient of the belief that it started from, as if nothing depended on its final belief. Some
   kernels compute it alone; others run the whole backward pass of the op.
2. The ranks gather these gradients. From the last span to the first, each gradient is passed through the update of the
   span before. So a rank knows the gradient of its final belief.
3. Each rank runs the backward pass of its op.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kalmix.distributed.context import Call
from kalmix.distributed.entry import gather_updates
from kalmix.ops import OpSpec
from kalmix.ops._shared.custom_op import PriorSwitch, once_differentiable
from kalmix.ops._shared.two_phase import compute_gradients, entry_gradients, take_stored
from kalmix.types import Filtered

Lower = Callable[[Tensor, Tensor, dict[str, Any]], dict[str, Any]]


class MemoryCall(NamedTuple):
    """Call of an op whose beliefs have a constant size.

    Attributes:
        call: the call of the layer.
        op: the op.
        function: function of q, k, v and keyword arguments that returns `Filtered`.
        lower: function `(k, v, arguments)` that returns the arguments of the op.
        options: arguments that are no tensors.
        names: names of the arguments that are tensors, after q, k and v.
    """

    call: Call
    op: OpSpec
    function: Callable[..., Filtered]
    lower: Lower
    options: dict[str, Any]
    names: tuple[str, ...]

    def arguments(self, tensors: Sequence[Tensor]) -> dict[str, Any]:
        """Return the keyword arguments of the function, from all tensors of the call."""
        return self.options | dict(zip(self.names, tensors[3:], strict=True))


def filter_in_two_phases(
    call: Call,
    op: OpSpec,
    function: Callable[..., Filtered],
    lower: Lower,
    tokens: tuple[Tensor, Tensor, Tensor],
    arguments: dict[str, Any],
) -> Filtered:
    """Filter the tokens of this rank.

    Without packing, the parts of the rank are batch rows. An op that is slow on one long sequence also cuts each part
    into spans (`OpSpec.count_spans`) and filters them at the same time, as if each were held by a rank of its own.

    Args:
        call: the call of the layer.
        op: the op, which has updates.
        function: function of q, k, v and `arguments` that returns `Filtered`.
        lower: function `(k, v, arguments)` that returns the keyword arguments of the op.
        tokens: q, k and v.
        arguments: keyword arguments of `function`, without the belief.
    """
    parts, spans = call.placement.spans, 1
    if op.count_spans is not None:
        spans = op.count_spans(tokens[2], call.placement.world)
        spans = spans if call.length % (parts * spans) == 0 else 1
    rows = None
    if call.context.documents is None and parts * spans > 1:
        call.participants += 1
        call = rows = call.in_rows(spans)
        shape = tokens[0].shape[:2]
        arguments = {
            name: rows.cut(x) if isinstance(x, Tensor) and x.shape[:2] == shape else x for name, x in arguments.items()
        } | {"segments": None}
        q, k, v = map(rows.cut, tokens)
        tokens = q, k, v
    tensors = {name: x for name, x in arguments.items() if isinstance(x, Tensor)}
    options = {name: x for name, x in arguments.items() if name not in tensors}
    memory = MemoryCall(call, op, function, lower, options, tuple(tensors))
    mean, variance, *belief = call.context.uncompiled(_TwoPhases.apply, memory, *tokens, *tensors.values())
    if rows is not None:
        mean, variance = rows.join(mean), None if variance is None else rows.join(variance)
        belief = map(rows.after_parts, belief)
    return Filtered(mean, variance, op.belief(*belief))


class _Stored(NamedTuple):
    """Graph of a local op, and what its backward pass needs from other ranks.

    Attributes:
        inputs: detached inputs of the op that need a gradient.
        entry: belief before each span of this rank, `[spans * B, ...]`.
        outputs: mean, variance or `None`, and the tensors of the final belief.
        updates: update by each span of all ranks, `[B, ...]`.
        entries: belief before each of these spans, `[B, ...]`. If updates are affine, `None` after the spans of this
            rank.
        switch: switch by which the graph computes the gradient of `entry` alone.
    """

    inputs: list[Tensor]
    entry: list[Tensor]
    outputs: list[Tensor | None]
    updates: list[Any]
    entries: list[Any]
    switch: PriorSwitch


class _TwoPhases(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, memory: MemoryCall, *tensors: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        call, op = memory.call, memory.op
        needs_grad = ctx.needs_input_grad[1:]
        inputs = [x.detach().requires_grad_(needed) for x, needed in zip(tensors, needs_grad, strict=True)]
        _, k, v = inputs[:3]
        arguments = memory.arguments(inputs)
        with torch.no_grad():
            signals = {"k": k, **memory.lower(k, v, arguments)}
            updates, prior_of = gather_updates(call, op, v, signals, as_filtered=True)
            held, prior = call.placement.held, prior_of(call.sequences)
            later = any(needs_grad) and not updates[0].is_affine
            entries = [prior_of(call.batch)]
            for update in updates[: -1 if later else held[-1]]:
                entries.append(update.apply(entries[-1]))
            entries += [None] * (len(updates) - len(entries))
            entry = [_join([entries[span][leaf] for span in held]) for leaf in range(len(prior))]
        with torch.set_grad_enabled(any(needs_grad)):
            entry = [x.detach().requires_grad_(any(needs_grad)) for x in entry]
            arguments["belief"] = call.select(entry, prior)
            with (switch := PriorSwitch()).record():
                mean, variance, belief = memory.function(*inputs[:3], **arguments)
        outputs = [mean, variance, *belief]
        if any(needs_grad):
            ctx.stored = _Stored([x for x in inputs if x.requires_grad], entry, outputs, updates, entries, switch)
        ctx.call, ctx.needs_grad = call, needs_grad
        ctx.set_materialize_grads(False)
        return tuple(None if x is None else x.detach() for x in outputs)

    @staticmethod
    @once_differentiable("`ContextParallel(two_phase=True)`", "`two_phase=False`")
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        call: Call = ctx.call
        inputs, entry, outputs, updates, entries, switch = take_stored(ctx)
        with switch.turned_on():
            local = compute_gradients(outputs, grads, entry, retain=True)
        own_grads = [torch.zeros_like(x) if g is None else g for x, g in zip(entry, local, strict=True)]
        gathered = call.gather_spans(own_grads)
        held, belief = call.placement.held, outputs[2:]
        later = entry_gradients(list(zip(*gathered, strict=True)), updates, entries, held[0] + 1)
        later.append([torch.zeros_like(spans[-1]) for spans in gathered])  # nothing follows the last span
        exits = [later[span - held[0]] for span in held]
        total = list(grads)
        for i, (x, own) in enumerate(zip(belief, zip(*exits, strict=True), strict=True), 2):
            grad, given = call.final_gradient(x, _join(own)), grads[i]
            total[i] = grad if given is None else given + grad
        found = compute_gradients(outputs, total, inputs, retain=False)
        remaining = iter(found)
        return None, *(next(remaining) if needed else None for needed in ctx.needs_grad)


def _join(tensors: Sequence[Tensor]) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(list(tensors))
