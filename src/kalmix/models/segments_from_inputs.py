"""Sequences in a model's input, from the tensors that tokenizers and data collators of transformers produce."""

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
    """Return the sequences in an input of `batch` rows and `length` tokens.

    The first tensor that is not `None` decides, in the order below. On a GPU, `seq_idx` and `position_ids` synchronize
    once per forward pass and `cu_seq_lens_q` never. A mask synchronizes only if gradients are off, to find out whether
    anything is padded.

    Args:
        batch: number of rows.
        length: tokens per row.
        cu_seq_lens_q: int `[N + 1]`, cumulative lengths of N sequences packed into one row.
        seq_idx: `[batch, length]`, changes from one sequence to the next.
        attention_mask: `[batch, at least length]`, 0 at padding; its last `length` columns belong to the input.
        position_ids: `[batch, length]` or `[1, length]`, start anew in each sequence.

    Returns:
        The segments; `None` if each row is one sequence without padding.

    Raises:
        ArgumentError: a tensor has the wrong shape, or the mask has a hole.
    """
    if cu_seq_lens_q is not None:
        if batch != 1:
            problem = f"is given with {batch} batch rows"
            raise ArgumentError("cu_seq_lens_q", problem=problem, expected="one row that contains all sequences")
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
            expected = f"[{batch}, {length}], or longer by the tokens in the cache (a padding mask, not a 4-D mask)"
            raise ArgumentError("attention_mask", problem=f"has shape {list(attention_mask.shape)}", expected=expected)
        mask = attention_mask[:, attention_mask.shape[1] - length :]
        if _may_read_values(mask) and bool(mask.all()):
            return None
        return Segments.padded(mask)
    return None if position_ids is None else _segments_by_marks("position_ids", position_ids, batch, length, step=1)


def _may_read_values(mask: Tensor) -> bool:
    """Return whether the mask may be read on the host: reading it must not break a graph or slow training."""
    if torch.compiler.is_compiling() or mask.device.type == "meta":
        return False
    if mask.is_cuda and torch.cuda.is_current_stream_capturing():
        return False
    return can_check_values(mask) or not torch.is_grad_enabled()


def _segments_by_marks(name: str, marks: Tensor, batch: int, length: int, step: int) -> Segments | None:
    """Return the longest segments in which `marks` grow by `step` per token; `None` if each row is one."""
    if marks.ndim != 2 or marks.shape[1] != length or marks.shape[0] not in (1, batch):
        raise ArgumentError(name, problem=f"has shape {list(marks.shape)}", expected=f"[{batch}, {length}]")
    begins = torch.ones(batch, length, dtype=torch.bool, device=marks.device)
    begins[:, 1:] = marks.diff(dim=1) != step
    row, start = begins.nonzero().unbind(1)
    if row.shape[0] <= batch:
        return None
    ends = torch.cat([(row * length + start)[1:], row.new_tensor([batch * length])])
    return segments_without_checks(torch.stack([row, start, ends - row * length], dim=1).to(torch.int32))
