"""Which tokens of a model's input form which sequence, from what tokenizers and collators give."""

from __future__ import annotations

import torch
from torch import Tensor

from kalmix.errors import ArgumentError
from kalmix.segments import Segments, segments_without_checks
from kalmix.validation import can_check_values


def find_segments(
    batch: int,
    length: int,
    *,
    attention_mask: Tensor | None = None,
    position_ids: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    seq_idx: Tensor | None = None,
) -> Segments | None:
    """The sequences of a `[batch, length]` input; `None` where each row is one.

    The first of these that is given decides: `cu_seq_lens_q` `[N + 1]`, where sequences packed into one row begin;
    `seq_idx` `[batch, length]`, changing from sequence to sequence; `attention_mask` `[batch, at least length]`, 0 at
    padding, its last columns belonging to the input; `position_ids`, starting anew in each sequence.

    On a GPU, `seq_idx` and `position_ids` cost one wait a forward pass, `cu_seq_lens_q` none, and the mask one only
    where gradients are off, to find that nothing is padded: generation waits for every token anyway.

    Raises:
        ArgumentError: another shape, or a hole in the mask.
    """
    if cu_seq_lens_q is not None:
        if batch != 1:
            raise ArgumentError(
                "cu_seq_lens_q", got=f"with {batch} batch rows", expected="with one, holding all sequences"
            )
        segments = Segments.packed(cu_seq_lens_q)
        if can_check_values(cu_seq_lens_q) and int(cu_seq_lens_q[-1]) > length:
            raise ArgumentError(
                "cu_seq_lens_q", problem=f"ends at {int(cu_seq_lens_q[-1])}", expected=f"at most {length} tokens"
            )
        return segments
    if seq_idx is not None:
        return _segments_by_marks("seq_idx", seq_idx, batch, length, step=0)
    if attention_mask is not None:
        if attention_mask.ndim != 2 or attention_mask.shape[0] != batch or attention_mask.shape[1] < length:
            expected = f"[{batch}, {length}] or longer by the tokens of the cache: a padding mask, not a 4-D one"
            raise ArgumentError("attention_mask", got=list(attention_mask.shape), expected=expected)
        mask = attention_mask[:, attention_mask.shape[1] - length :]
        if _may_read_values(mask) and bool(mask.all()):
            return None
        return Segments.padded(mask)
    return None if position_ids is None else _segments_by_marks("position_ids", position_ids, batch, length, step=1)


def _may_read_values(mask: Tensor) -> bool:
    if torch.compiler.is_compiling() or mask.device.type == "meta":
        return False
    if mask.is_cuda and torch.cuda.is_current_stream_capturing():
        return False
    return can_check_values(mask) or not torch.is_grad_enabled()


def _segments_by_marks(name: str, marks: Tensor, batch: int, length: int, step: int) -> Segments | None:
    """Runs in which `marks` grow by `step` from token to token."""
    if marks.ndim != 2 or marks.shape[1] != length or marks.shape[0] not in (1, batch):
        raise ArgumentError(name, got=list(marks.shape), expected=[batch, length])
    begins = torch.ones(batch, length, dtype=torch.bool, device=marks.device)
    begins[:, 1:] = marks.diff(dim=1) != step
    row, start = begins.nonzero().unbind(1)
    if row.shape[0] <= batch:
        return None
    ends = torch.cat([(row * length + start)[1:], row.new_tensor([batch * length])])
    return segments_without_checks(torch.stack([row, start, ends - row * length], dim=1).to(torch.int32))
