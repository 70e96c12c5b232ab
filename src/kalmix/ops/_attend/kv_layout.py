"""Layout of the queries, keys and values of a call in rows of slots.

A row has S slots of keys, and its last T slots also have queries. Without a history, a row is a batch row, and packed
sequences share it. With a history, each sequence has a row of its own: its history, then a copy of its batch row. If
there are more sequences than batch rows and lengths may be read, its own tokens replace that copy. The rank of a slot
encodes which keys a query attends to: it is the position in the sequence, plus `RANK_STRIDE` times the index of the
sequence where sequences share a row.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kalmix.beliefs import HistoryBelief
from kalmix.ops._shared.batching import reads_lengths
from kalmix.segments import Segments
from kalmix.types import replace_fields
from kalmix.validation import in_transform

RANK_STRIDE = 1 << 40  # distance between the ranks of two sequences of a row
EMPTY_RANK = -(1 << 60)  # rank of an empty slot; empty slots attend to each other only


class KVLayout(NamedTuple):
    """R rows of S slots, the last T of which have queries.

    Attributes:
        q: `[R, T, H, K]`, in the dtype of the belief, as `k` and `v`.
        k: `[R, S, H, K]`.
        v: `[R, S, G, V]`.
        times: float64 `[R, S]`, time since the first token of the sequence.
        rank: int64 `[R, S]`; a causal query attends to keys whose rank is at most its own and above its own minus the
            window.
        final_belief: belief after the call.
        segment_ids: int64 `[B, T]`, sequence of each token of the call, -1 for none; `None` if a batch row is a
            sequence.
        query_index: int64 `[B, T]` or `[T]`, position of each token of the call among the queries of the row of its
            sequence; `None` if packed sequences share rows.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    times: Tensor
    rank: Tensor
    final_belief: HistoryBelief
    segment_ids: Tensor | None
    query_index: Tensor | None

    def to_batch(self, x: Tensor) -> Tensor:
        """Return outputs of queries `[R, T, H, *]` at their tokens, `[B, T, H, *]`; 0 at tokens of no sequence."""
        if self.segment_ids is None:
            return x
        if self.query_index is not None:
            x = x[self.segment_ids.clamp(min=0), self.query_index]
        return torch.where((self.segment_ids >= 0)[..., None, None], x, 0)


def make_layout(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    times: Tensor | None,
    belief: HistoryBelief,
    segments: Segments | None,
    window: int | None,
) -> KVLayout:
    """Build the layout of a call, without a host sync. Gradients flow to q, k, v and the belief, but not to times."""
    belief = replace_fields(belief, times=belief.times.detach())
    dtype, device, (batch, length) = belief.keys.dtype, k.device, k.shape[:2]
    q, k, v = (x.to(dtype) for x in (q, k, v))
    has_history = belief.positions.shape[1] > 0
    if segments is None and not has_history:  # every slot has a token, and a row is a sequence
        position = torch.arange(length, device=device).expand(batch, length)
        token_times = position.double() if times is None else times.detach().double()
        relative_times = token_times if times is None else token_times - token_times[:, :1]
        return KVLayout(
            q, k, v, relative_times, position, _truncate_to_window(HistoryBelief(k, v, token_times, position), window),
            None, None,
        )  # fmt: skip

    segment_ids = None if segments is None else segments.segment_ids(batch, length)
    sequence = torch.arange(batch, device=device)[:, None] if segment_ids is None else segment_ids.clamp(min=0)
    position, default_times = (x.expand(batch, length) for x in _continue_positions(belief, segments, sequence, length))
    token_times = default_times if times is None else times.detach().double()
    if segment_ids is not None:
        in_segment = segment_ids >= 0
        q, k, v = (torch.where(in_segment[..., None, None], x, 0) for x in (q, k, v))
        position, token_times = torch.where(in_segment, position, -1), torch.where(in_segment, token_times, 0)
    row = HistoryBelief(k, v, token_times, position)

    new_belief, own_tokens = row, None
    if segments is not None and segment_ids is not None:
        own_tokens = _own_tokens(segments, batch, length)
        new_belief = _row_per_sequence(row, segments, segment_ids, own_tokens, share=not has_history)
    final_belief = (
        HistoryBelief(*(torch.cat(x, 1) for x in zip(belief, new_belief, strict=True))) if has_history else new_belief
    )
    query_index = None
    if segments is not None and has_history:
        rows, query_index = segments.rows[:, 0].long(), torch.arange(length, device=device)
        if own_tokens is None:
            q = q[rows]
        else:
            start = segments.rows[:, 1].long()[sequence]
            q = q[rows[:, None], own_tokens[0]]
            query_index = (query_index - start).clamp(0, q.shape[1] - 1)
    slots, first_rank = final_belief, 0  # ranks of different rows are not compared
    if segment_ids is not None and query_index is None:
        slots, first_rank = row, sequence * RANK_STRIDE
    occupied = slots.positions >= 0
    rank = torch.where(occupied, first_rank + slots.positions, EMPTY_RANK)
    if segments is not None and query_index is None:  # a row may have several sequences, each with its first time
        first_time = token_times.gather(1, segments.rows[:, 1].long()[sequence].clamp(max=length - 1))
    else:
        first_time = torch.where(occupied & slots.times.isfinite(), slots.times, torch.inf).amin(1, keepdim=True)
    relative_times = torch.where(occupied, slots.times - first_time, 0)
    return KVLayout(
        q, slots.keys, slots.values, relative_times, rank, _truncate_to_window(final_belief, window), segment_ids,
        query_index,
    )  # fmt: skip


def _truncate_to_window(final_belief: HistoryBelief, window: int | None) -> HistoryBelief:
    """Return the newest `window` tokens of a belief, or all if there is no window."""
    return final_belief if window is None or final_belief.positions.shape[1] <= window else final_belief.newest(window)


def _continue_positions(
    belief: HistoryBelief, segments: Segments | None, sequence: Tensor, length: int
) -> tuple[Tensor, Tensor]:
    """Return the positions and default times of tokens, continued from the belief.

    `sequence` is the index of the sequence of each token, `[B, T]` or `[B, 1]`.
    """
    positions, times = belief.positions, belief.times
    index_in_sequence = torch.arange(length, device=positions.device)
    if segments is not None:
        index_in_sequence = index_in_sequence - segments.rows[:, 1].long()[sequence]
    if not positions.shape[1]:
        return index_in_sequence, index_in_sequence.double()
    next_position = positions.amax(1) + 1
    default_times = torch.where(next_position > 0, torch.where(positions >= 0, times, -torch.inf).amax(1) + 1, 0)
    return next_position[sequence] + index_in_sequence, default_times[sequence] + index_in_sequence


def _own_tokens(segments: Segments, batch: int, length: int) -> tuple[Tensor, Tensor] | None:
    """Return where the tokens of each sequence are in its batch row.

    Returns:
        Columns, int64 `[N, longest]`, and a mask of those that are tokens; `None` where lengths must not be read, or
        if there are no more sequences than batch rows.
    """
    if not reads_lengths(segments.rows) or torch.compiler.is_compiling() or in_transform():
        return None
    if segments.count <= batch:  # such as padded rows: a cache has the same slots in eager, compiled and exported code
        return None
    _row, start, stop = segments.rows.long().unbind(1)
    columns = start[:, None] + torch.arange(max(1, int((stop - start).max())))
    return columns.clamp(max=length - 1), columns < stop[:, None]


def _row_per_sequence(
    row: HistoryBelief, segments: Segments, segment_ids: Tensor, own_tokens: tuple[Tensor, Tensor] | None, share: bool
) -> HistoryBelief:
    """Return the tokens of each sequence if `own_tokens` locates them, else of its batch row, with positions of its own
    tokens only.

    A single row is expanded. With `share`, and more sequences than rows, so are the tokens of all rows, unless the
    sequences are about equally long.
    """
    rows, count = segments.rows[:, 0].long(), segments.count
    if own_tokens is not None and (not share or own_tokens[0].numel() <= 2 * int(own_tokens[1].sum())):
        columns, inside = own_tokens
        keys, values, times, positions = (x[rows[:, None], columns] for x in row)
        return HistoryBelief(keys, values, times, torch.where(inside, positions, -1))
    leaves = (*row, segment_ids)
    if share and count > segment_ids.shape[0]:
        leaves = tuple(x.flatten(0, 1)[None] for x in leaves)
    keys, values, times, positions, segment_ids = (
        x.expand(count, *x.shape[1:]) if x.shape[0] == 1 else x[rows] for x in leaves
    )
    is_own = segment_ids == torch.arange(count, device=segment_ids.device)[:, None]
    return HistoryBelief(keys, values, times, torch.where(is_own, positions, -1))
