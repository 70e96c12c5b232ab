"""Sequences in a model's input, from the tensors that tokenizers and data collators of transformers produce."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from kalmix.errors import ArgumentError
from kalmix.segments import Segments, segments_without_checks
from kalmix.validation import can_check_values, in_transform

MIN_SEQUENCES = 64  # packed sequences that any call may have
TOKENS_PER_SEQUENCE = 64  # longer calls may have one more per so many tokens; see `find_layout`
PRECEDENCE = ("cu_seq_lens_q", "seq_idx", "attention_mask", "position_ids")  # `find_layout` uses the first given
HIDDEN = -1e4  # an entry of a 4-D mask at or below this hides a key


class InputLayout(NamedTuple):
    """Order in which a model filters the tokens of its input, and the sequences that they form.

    Masked tokens are moved to the end of their row, so that each sequence is a contiguous run. A token's *column* is
    its index in the input, and its *slot* is its index after this.

    Attributes:
        segments: sequences, in slots; `None` if each row is one sequence.
        order: int64 `[B, T]`, column of the token in each slot; `None` if no token is moved.
    """

    segments: Segments | None = None
    order: Tensor | None = None

    def compact(self, x: Tensor) -> Tensor:
        """Reorder tokens `[B, T, ...]` from columns to slots."""
        return x if self.order is None else x.flatten(0, 1).index_select(0, self._flat_order(x)).view(x.shape)

    def restore(self, x: Tensor) -> Tensor:
        """Reorder tokens `[B, T, ...]` from slots to columns; inverse of `compact`."""
        if self.order is None:
            return x
        flat = x.flatten(0, 1)
        return torch.empty_like(flat).index_copy(0, self._flat_order(x), flat).view(x.shape)

    def tokens(self, batch: int, length: int) -> Tensor | None:
        """Return which columns `[B, T]` hold tokens of sequences; `None` if all do."""
        if self.segments is None:
            return None
        return self.restore(self.segments.segment_ids(batch, length) >= 0)

    def check_single(self, name: str, batch: int, expected: str) -> None:
        """Check that no row has several sequences. Where values are not read, the device checks it.

        Args:
            name: argument that describes the sequences.
            batch: number of rows.
            expected: what is accepted instead.

        Raises:
            ArgumentError: a row has several sequences.
            RuntimeError: the device found that a row has several sequences.
        """
        if self.segments is None or in_transform():
            return
        row, start, stop = self.segments.rows.long().unbind(1)
        count = torch.zeros(batch, dtype=torch.int64, device=row.device).index_add(0, row, (stop > start).long())
        single, problem = (count <= 1).all(), "describes several sequences in a row"
        if not _may_read(single):
            torch._assert_async(single, f"`{name}` {problem}; expected {expected}")
        elif not single:
            raise ArgumentError(name, problem=problem, expected=expected)

    def truncate(self, columns: int) -> InputLayout:
        """Return the layout of the first `columns` columns of the input."""
        return self.slice(0, columns)

    def slice(self, first: int, end: int) -> InputLayout:
        """Return the layout of the columns from `first` to `end - 1`, with the same number of sequences."""
        segments, order = self
        if segments is None:
            return self
        row, start, stop = segments.rows.unbind(1)
        if order is None:
            start, stop = (x.clamp(first, end) - first for x in (start, stop))
        else:
            chosen = (order >= first) & (order < end)
            before = F.pad(chosen.cumsum(1), (1, 0))  # chosen tokens before each slot, in whose order they stay
            start, stop = (before[row.long(), slot.long()].to(torch.int32) for slot in (start, stop))
            chosen_first = chosen.logical_not().to(torch.uint8).argsort(dim=1, stable=True)
            order = order.gather(1, chosen_first)[:, : end - first] - first
        return InputLayout(segments_without_checks(torch.stack([row, start, stop], dim=1)), order)

    def take(self, index: Tensor) -> InputLayout:
        """Return the layout of the batch rows `index` (int64 `[M]`); each row must be one sequence."""
        segments, order = self
        if segments is not None:
            row = torch.arange(len(index), dtype=torch.int32, device=index.device)
            segments = segments_without_checks(torch.cat([row[:, None], segments.rows[index, 1:]], dim=1))
        return InputLayout(segments, None if order is None else order[index])

    def _flat_order(self, x: Tensor) -> Tensor:
        """Return `order` as indices into the flattened batch `[B * T]`, on the device of `x`."""
        assert self.order is not None
        order = self.order.to(x.device)
        return (order + torch.arange(order.shape[0], device=x.device)[:, None] * order.shape[1]).flatten()


def find_layout(
    batch: int,
    length: int,
    *,
    attention_mask: Tensor | None = None,
    position_ids: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    seq_idx: Tensor | None = None,
    max_sequences: int | None = None,
    cached: bool = False,
) -> InputLayout:
    """Return the sequences in an input of `batch` rows and `length` tokens.

    The first tensor that is not `None` decides, in the order `cu_seq_lens_q`, `seq_idx`, `attention_mask`,
    `position_ids`.

    Under `torch.compile`, and in training on a GPU, where reading would synchronize, shapes do not depend on values:
    `seq_idx`, `position_ids` and 4-D masks give `max_sequences` sequences, some of them empty, and the device checks
    that these are enough. If such a call returns a cache, whose states have one entry per sequence, each row must
    be one sequence. A GPU synchronizes if gradients are off, except for `cu_seq_lens_q`.

    Args:
        batch: number of rows.
        length: tokens per row.
        cu_seq_lens_q: int `[N + 1]`, cumulative lengths of N sequences packed into one row.
        seq_idx: `[batch, length]`, changes from one sequence to the next.
        attention_mask: `[batch, at least length]`, 0 at padding, which may be anywhere; its last `length` columns
            belong to the input. Or a block-causal mask `[batch or 1, 1, length, length]`: each token (third axis)
            attends to the earlier tokens of its sequence (last axis), which is contiguous apart from padding. It is
            True or 0.0 where a token attends, and False or very negative elsewhere. A token that does not attend to
            itself is padding.
        position_ids: `[batch, length]` or `[1, length]`, grow by 1 in each sequence.
        max_sequences: most sequences of a call whose values are not read. Default: 64, and one per row and per 64
            tokens.
        cached: a cache is returned.

    Raises:
        ArgumentError: a tensor has the wrong shape or dtype, or a 4-D mask is not block-causal.
        RuntimeError: the device found that a 4-D mask is not block-causal, or that there are more sequences than
            `max_sequences`. A GPU reports it at the next synchronization.
    """
    if cu_seq_lens_q is not None:
        return InputLayout(_packed(cu_seq_lens_q, batch, length))
    if attention_mask is not None and seq_idx is None:
        if isinstance(attention_mask, Tensor) and attention_mask.ndim == 4:
            return _from_block_mask(attention_mask, batch, length, max_sequences, cached)
        return _from_padding_mask(attention_mask, batch, length)
    name, marks, step = ("position_ids", position_ids, 1) if seq_idx is None else ("seq_idx", seq_idx, 0)
    if marks is None:
        return InputLayout()
    if not isinstance(marks, Tensor) or marks.ndim != 2 or marks.shape[1] != length or len(marks) not in (1, batch):
        problem = f"has shape {list(marks.shape)}" if isinstance(marks, Tensor) else f"is a {type(marks).__name__}"
        raise ArgumentError(name, problem=problem, expected=f"[{batch}, {length}]")
    begins = F.pad(marks.diff(dim=1) != step, (1, 0), value=True).expand(batch, length)
    return InputLayout(_runs(name, begins, None, max_sequences, cached))


def _packed(cu_seq_lens: Tensor, batch: int, length: int) -> Segments:
    """Return the segments of sequences in one row."""
    if batch != 1:
        problem = f"is given with {batch} batch rows"
        raise ArgumentError("cu_seq_lens_q", problem=problem, expected="one row that contains all sequences")
    segments = Segments.packed(cu_seq_lens)
    if can_check_values(cu_seq_lens) and int(cu_seq_lens[-1]) > length:
        problem = f"ends at {int(cu_seq_lens[-1])}"
        raise ArgumentError("cu_seq_lens_q", problem=problem, expected=f"at most {length} tokens")
    return segments


def _from_padding_mask(mask: Tensor, batch: int, length: int) -> InputLayout:
    """Return the layout in which the tokens of each row form one sequence and masked tokens follow it."""
    if not isinstance(mask, Tensor) or mask.ndim != 2 or mask.shape[0] != batch or mask.shape[1] < length:
        got = f"has shape {list(mask.shape)}" if isinstance(mask, Tensor) else f"is a {type(mask).__name__}"
        expected = (
            f"[{batch}, {length}], or longer by the tokens in the cache; or a 4-D mask [{batch}, 1, {length}, {length}]"
        )
        raise ArgumentError("attention_mask", problem=got, expected=expected)
    mask = mask[:, mask.shape[1] - length :] != 0
    if _may_read(mask) and bool(mask.all()):
        return InputLayout()
    row = torch.arange(batch, device=mask.device)
    rows = torch.stack([row, torch.zeros_like(row), mask.sum(1)], dim=1).to(torch.int32)
    order = mask.logical_not().to(torch.uint8).argsort(dim=1, stable=True) if length > 1 else None
    return InputLayout(segments_without_checks(rows), order)


def _from_block_mask(mask: Tensor, batch: int, length: int, max_sequences: int | None, cached: bool) -> InputLayout:
    """Return the layout of sequences that attend to themselves only, causally."""
    if mask.shape[0] not in (1, batch) or mask.shape[1:] != (1, length, length):
        problem = f"has shape {list(mask.shape)}"
        expected = f"[{batch}, 1, {length}, {length}], without a cache (with one, give a 2-D mask)"
        raise ArgumentError("attention_mask", problem=problem, expected=expected)
    if mask.dtype != torch.bool and not mask.is_floating_point():
        problem = f"has dtype {mask.dtype} and 4 dimensions"
        raise ArgumentError("attention_mask", problem=problem, expected="torch.bool, or floats to add to scores")
    visible = (mask if mask.dtype == torch.bool else mask > HIDDEN)[:, 0].expand(batch, length, length)
    token = visible.diagonal(dim1=1, dim2=2)
    first = torch.where(token, visible.to(torch.uint8).argmax(2), length)  # column where the token's sequence begins
    same = (first[:, :, None] == first[:, None, :]) & token[:, :, None]
    contiguous = first == torch.where(token, first, 0).cummax(1).values
    padding = (visible & ~token[:, None]).any(2).logical_not()  # padding attends to tokens only, if to any
    valid = torch.where(token, (visible == same.tril()).all(2) & contiguous, padding)
    if mask.dtype != torch.bool:
        valid = valid & ((mask == 0) | (mask <= HIDDEN))[:, 0].all(2)
    block_causal = valid.all()
    expected = "a block-causal mask: True or 0.0 where a token attends to the tokens of its sequence up to itself"
    if not can_check_values(mask):
        torch._assert_async(block_causal, f"`attention_mask` is not supported; expected {expected}")
    elif not block_causal:
        row, query = valid.logical_not().nonzero()[0].tolist()
        problem = f"is not block-causal at query {query} of row {row}"
        raise ArgumentError("attention_mask", problem=problem, expected=expected)
    order = first.argsort(dim=1, stable=True)
    first, count = first.gather(1, order), token.sum(1)  # in slots
    begins = F.pad(first.diff(dim=1) != 0, (1, 0), value=True) & (first < length)
    segments = _runs("attention_mask", begins, count, max_sequences, cached)
    return InputLayout(segments, order if segments is not None else None)


def _runs(name: str, begins: Tensor, count: Tensor | None, max_sequences: int | None, cached: bool) -> Segments | None:
    """Return the segments that begin at the tokens `begins`, `[B, T]`; `None` if each row is known to be one.

    Args:
        name: argument that describes the sequences.
        begins: bool `[B, T]`.
        count: tokens of each row `[B]`, without the padding at its end; `None` if nothing is padded.
        max_sequences: see `find_layout`.
        cached: see `find_layout`.
    """
    batch, length = begins.shape
    if length == 0 or (length == 1 and count is None):
        return None
    readable = _may_read(begins)
    single = (begins.sum(1) <= 1).all()  # each row is one sequence
    if bool(single) if readable else cached:
        if not readable:
            reason = "with a cache, each row must be one sequence; set use_cache=False"
            torch._assert_async(single, f"`{name}` describes several sequences in a row: {reason}")
        if count is None or (readable and bool((count == length).all())):
            return None
        row = torch.arange(batch, device=begins.device)
        return segments_without_checks(torch.stack([row, torch.zeros_like(row), count], dim=1).to(torch.int32))
    index = begins.flatten().cumsum(0)  # sequences begun so far
    if readable:
        sequences = int(index[-1])
    else:
        default = MIN_SEQUENCES + batch + batch * length // TOKENS_PER_SEQUENCE
        sequences = default if max_sequences is None else max_sequences
        reason = "set config.max_packed_sequences, or give cu_seq_lens_q"
        torch._assert_async(index[-1] <= sequences, f"`{name}` describes too many sequences: {reason}")
    bounds = torch.searchsorted(index, torch.arange(1, sequences + 2, device=begins.device))
    row = (bounds[:-1] // length).clamp(max=batch - 1)  # unused runs are empty, at the end of the last row
    start, stop = bounds[:-1] - row * length, bounds[1:] - row * length
    if count is not None:
        stop = torch.minimum(stop, count[row].clamp(min=start))
    return segments_without_checks(torch.stack([row, start, stop], dim=1).to(torch.int32))


def _may_read(tensor: Tensor) -> bool:
    """Return whether the host may read values here: this must not break a graph or slow training."""
    if torch.compiler.is_compiling() or tensor.device.type == "meta" or in_transform():
        return False
    if tensor.is_cuda and torch.cuda.is_current_stream_capturing():
        return False
    return can_check_values(tensor) or not torch.is_grad_enabled()
