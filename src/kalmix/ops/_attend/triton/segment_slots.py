"""Layout of packed sequences in Triton: ranks and times of tokens, and the slots of a belief, in two launches."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kalmix.ops._attend import kv_layout
from kalmix.ops._shared.triton.compile_and_launch import Launch, allocate_table

EMPTY_RANK = tl.constexpr(kv_layout.EMPTY_RANK)
RANK_STRIDE = tl.constexpr(kv_layout.RANK_STRIDE)
BLOCK = 1024  # tokens or slots per step of a program
PROGRAMS = 1024  # programs that number tokens, if there are fewer sequences


@triton.jit
def load_run(rows, sequence, batch, length):
    """Load the first token of a sequence in the flattened batch (int64), and its length; 0 if its row does not exist.

    Starts and stops are clamped, so that wrong rows cannot make a kernel write outside its tensors.
    """
    at = rows + sequence.to(tl.int64) * 3
    row, start, stop = tl.load(at), tl.load(at + 1), tl.load(at + 2)
    start, stop = tl.maximum(start, 0), tl.minimum(stop, length)
    exists = (row >= 0) & (row < batch)
    count = tl.where(exists, tl.maximum(stop - start, 0), 0)
    return tl.where(exists, row, 0).to(tl.int64) * length + start, count


@triton.jit(do_not_specialize=["batch", "length", "slots"])
def empty_slots_kernel(
    rows, rank, times, token_times, positions, index, batch, length, slots,
    HAS_TIMES: tl.constexpr, PER_ROW: tl.constexpr, NEWEST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Mark all tokens as tokens of no sequence (program 0), and write the slots of one sequence in the belief (others).

    The slots of a sequence are all tokens of the batch; those of its batch row if `PER_ROW`; or its last tokens, empty
    slots first, if `NEWEST`, and then `index` is the token of each slot in the flattened batch.
    """
    sequence, slot = tl.program_id(0) - 1, tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    if sequence < 0:
        inside = slot < batch * length
        tl.store(rank + slot, tl.full([BLOCK], EMPTY_RANK, tl.int64), mask=inside)
        tl.store(times + slot, tl.zeros([BLOCK], tl.float64), mask=inside)
        if HAS_TIMES:
            tl.store(token_times + slot, tl.zeros([BLOCK], tl.float64), mask=inside)
    else:
        begin, count = load_run(rows, sequence, batch, length)
        token = slot.to(tl.int64)
        if NEWEST:
            token += begin + count - slots
        if PER_ROW:
            token += begin // length * length
        at, inside = sequence.to(tl.int64) * slots + slot, slot < slots
        position = token - begin
        position = tl.where((position >= 0) & (position < count), position, -1)
        tl.store(positions + at, position, mask=inside)
        if NEWEST:
            tl.store(index + at, tl.maximum(tl.minimum(token, batch * length - 1), 0), mask=inside)


@triton.jit(do_not_specialize=["batch", "length"])
def number_tokens_kernel(
    rows, given_times, rank, times, token_times, batch, length, HAS_TIMES: tl.constexpr, BLOCK: tl.constexpr
):
    """Write the ranks and times of the tokens of one sequence; programs along axis 1 take turns."""
    sequence = tl.program_id(0)
    begin, count = load_run(rows, sequence, batch, length)
    if HAS_TIMES:
        first_time = tl.load(given_times + begin, mask=count > 0, other=0).to(tl.float64)
    for first in range(tl.program_id(1) * BLOCK, count, tl.num_programs(1) * BLOCK):
        position = first + tl.arange(0, BLOCK)
        at, inside = begin + position, position < count
        tl.store(rank + at, sequence.to(tl.int64) * RANK_STRIDE + position, mask=inside)
        if HAS_TIMES:
            time = tl.load(given_times + at, mask=inside, other=0).to(tl.float64)
            tl.store(token_times + at, time, mask=inside)
            tl.store(times + at, time - first_time, mask=inside)
        else:
            tl.store(times + at, position.to(tl.float64), mask=inside)


def segment_slots(
    rows: Tensor, times: Tensor | None, batch: int, length: int, slots: int, layout: str
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Compute the layout; see `custom_op._slots`."""
    count, per_row, newest = rows.shape[0], layout == "row", layout == "newest"
    integers, floats = ({"dtype": x, "device": rows.device} for x in (torch.int64, torch.float64))
    rank, relative_times = allocate_table(batch, length, **integers), torch.empty(batch, length, **floats)
    token_times = torch.empty((0,) if times is None else (batch, length), **floats)
    positions, index = (allocate_table(count, n, **integers) for n in (slots, slots if newest else 0))
    rows, has_times = rows.contiguous(), times is not None
    given_times = relative_times if times is None else times.contiguous()
    compiled = {"HAS_TIMES": has_times, "BLOCK": BLOCK, "num_warps": 4}
    tensors = (rows, rank, relative_times, token_times, positions, index)
    modes = {"PER_ROW": per_row, "NEWEST": newest}
    grid = (count + 1 if slots else 1), -(-max(batch * length, slots) // BLOCK)
    Launch(empty_slots_kernel, grid, (*tensors, batch, length, slots), compiled | modes).run()
    if count:
        turns = max(1, min(-(-length // BLOCK), PROGRAMS // count))
        args = (rows, given_times, rank, relative_times, token_times, batch, length)
        Launch(number_tokens_kernel, (count, turns), args, compiled).run()
    return rank, relative_times, token_times, positions, index
