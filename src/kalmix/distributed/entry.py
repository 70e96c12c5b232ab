"""State that the tokens of a rank need from other ranks: beliefs, histories, and inputs of convolutions."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from inspect import signature
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kalmix.beliefs import HistoryBelief
from kalmix.distributed.context import Call, active_call
from kalmix.distributed.layout import KeyRuns
from kalmix.errors import ArgumentError
from kalmix.ops import OpSpec
from kalmix.types import belief_dtype


def gather_updates(
    call: Call, op: OpSpec, v: Tensor, signals: dict[str, Any], *, as_filtered: bool = False
) -> tuple[list[Any], Callable[[int], Any]]:
    """Compute the update by the last run of each span of this rank, and gather those of all ranks.

    A run that begins a document makes its update constant.

    Args:
        call: the call of the layer.
        op: the op, which has updates.
        v: values `[B, T, G, V]`.
        signals: arguments of the op beside q, v, the belief and the segments.
        as_filtered: round updates as the op rounds.

    Returns:
        The update by each span, in order of time, `[B, ...]`; and a function that returns the prior of `count` runs.
    """
    assert op.update is not None and op.prior is not None
    call.participants += 1
    function = op.update_as_filtered if as_filtered and op.update_as_filtered is not None else op.update
    accepted = (signature if torch.compiler.is_compiling() else _signature)(function).parameters
    arguments = {name: x for name, x in signals.items() if name in accepted}
    update = function(**(arguments | {"v": v, "segments": call.tails}))
    sizes = {"G": v.shape[2], "K": signals["k"].shape[3], "V": v.shape[3]}
    prior_of, kind = op.prior, type(update)
    if call.tails_start is not False:
        constant = kind.constant(update.apply(prior_of(v, sizes | {"N": len(call.runs.tails)})))
        update = _select(call.starts, constant, update)  # also if all begin: shapes are equal on all ranks
    gathered = call.gather_spans(list(update))
    updates = [kind(*span) for span in zip(*gathered, strict=True)]
    return updates, lambda count: prior_of(v, sizes | {"N": count})


_signature = cache(signature)


def entry_belief(call: Call, op: OpSpec, v: Tensor, signals: dict[str, Any]) -> Any:
    """Return the belief before each run of this rank.

    Each rank computes the update by the last run of its spans, and receives those of the others. It combines those of
    the earlier spans, last ones first, and applies the result.

    Args:
        call, op, v, signals: see `gather_updates`.
    """
    gathered, prior_of = gather_updates(call, op, v, signals)
    copies, kind = len(call.placement.held), type(gathered[0])  # one copy for each span of this rank
    first, *later = [kind(*(x.repeat(copies, *[1] * (x.ndim - 1)) for x in span)) for span in gathered]
    prior = prior_of(len(call.runs.tails))
    total = kind.identity(prior)
    for index in reversed(range(1, len(later))):  # nothing follows the last span
        span = later[index - 1]
        total = _select(call.held > index, span if index == len(later) - 1 else span.then(total), total)
    return call.select(total.apply(first.apply(prior)), prior_of(call.sequences))


def _select(condition: Tensor, yes: Any, no: Any) -> Any:
    pairs = zip(yes, no, strict=True)
    return type(no)(*(torch.where(condition.view(-1, 1, 1, 1), x, y) for x, y in pairs))


def entry_history(call: Call, k: Tensor, v: Tensor, times: Tensor | None) -> HistoryBelief:
    """Return keys, values and times `[N, S, ...]` of the tokens before each run of this rank.

    Args:
        call: the call of the layer.
        k: keys `[B, T, H, K]`.
        v: values `[B, T, G, V]`.
        times: `[B, T]`, or `None` for 0, 1, 2, ... in each document.
    """
    call.participants += 1
    placement, runs = call.placement, call.runs.every
    size = placement.span_length(call.length)
    tensors = [k, v] if times is None else [k, v, times.detach()]
    by_span = [torch.cat(x.split(size, 1)) for x in tensors]  # [spans * B, L, ...]
    starts = [placement.held[run.span] * size + run.start % size for run in runs]  # of runs, in the whole sequence
    slots = max(1, *starts, 1)
    keys, values, *gathered = (torch.cat(x, 1)[:, :slots][call.row] for x in call.gather_spans(by_span))
    token = torch.arange(slots, device=v.device)
    first = call.document[:, None]
    own = (token >= first) & (token < first + call.past[:, None])
    positions = torch.where(own, token - first, -1)
    keys, values = (torch.where(own[..., None, None], x, 0).to(belief_dtype(v.dtype)) for x in (keys, values))
    return HistoryBelief(keys, values, (gathered[0] if gathered else positions).double(), positions)


def entry_inputs(x: Tensor, count: int) -> Tensor | None:
    """Return the last `count` inputs before each run of this rank, `[N, count, C]`; `None` without an active context.

    Args:
        x: inputs `[B, T, C]`.
        count: number of inputs.

    Raises:
        ArgumentError: a span has fewer tokens.
    """
    call = active_call()
    if call is None or count == 0:
        return None
    size = call.placement.span_length(call.length)
    if size < count:
        problem = f"has {size} tokens in each part of the sequence"
        raise ArgumentError("x", problem=problem, expected=f"at least {count}, the inputs of the short convolution")
    last = torch.cat([span[:, size - count :] for span in x.split(size, 1)])  # [spans * B, count, C]
    inside = torch.arange(size - count, size, device=x.device) >= call.tail_start[:, None]
    return call.entries(call.gather_spans([torch.where(inside[..., None], last, 0)]))[0]


def past_tokens() -> Tensor | None:
    """Return the number of tokens of the document before each run, int64 `[N]`; `None` without an active context."""
    call = active_call()
    return None if call is None else call.past


class SharedKeys(NamedTuple):
    """Keys and values of all ranks, and the runs of this rank.

    Attributes:
        keys, values: `[B, S, G, W]`, of the whole sequences.
        runs: runs of this rank, and the keys of their documents, up to the last token of each run.
    """

    keys: Tensor
    values: Tensor
    runs: KeyRuns

    def positions(self) -> Tensor:
        """Return the position of each token in the document of each run, int64 `[N, B * S]`; -1 if not visible."""
        batch, length = self.keys.shape[:2]
        token = torch.arange(batch * length, device=self.keys.device)
        row, start, stop = self.runs.extents.unbind(1)
        first, end = (x[:, None] for x in (row * length + start, row * length + stop))
        return torch.where((token >= first) & (token < end), token - first, -1)


def share_keys(k: Tensor, v: Tensor) -> SharedKeys | None:
    """Return the keys and values of all ranks, given those of this rank; `None` without an active context.

    Args:
        k, v: `[B, T, G, W]`.
    """
    call = active_call()
    if call is None:
        return None
    call.participants += 1
    size = call.placement.span_length(call.length)
    keys, values = (torch.cat(x, 1) for x in call.gather_spans([torch.cat(x.split(size, 1)) for x in (k, v)]))
    return SharedKeys(keys, values, call.key_runs())
