"""Partition of a covariance that is too wide for the registers of one program: blocks of rows, one program each.

A program holds `[rows, groups, COLUMNS]` of the matrix; a row is in a few threads of one warp. Vectors exist in two
layouts: by rows (`[rows]`, the program's own) and by columns (`[groups, COLUMNS]`, all of it, in every warp).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import knobs

from kalmix.ops._dense.block_sizes import PROGRAM_NUMBERS


def row_blocks(padded: int) -> int:
    """Return the number of programs that share a covariance; 1 in the interpreter, which runs programs in sequence."""
    return 1 if knobs.runtime.interpret else padded * padded // PROGRAM_NUMBERS


def partition_options(padded: int) -> dict[str, int]:
    """Return the constants and launch options of a kernel with row blocks; a thread holds 64 numbers."""
    return {"P": padded, "ROWS": padded // row_blocks(padded), "COLUMNS": 64, "num_warps": 8}


def sync_buffers(states: Tensor) -> tuple[Tensor, Tensor]:
    """Return the buffer through which programs exchange vectors, and the counter of `atomic_work_id`."""
    sequences, heads, padded, _ = states.shape
    size = 4 * padded if row_blocks(padded) > 1 else 0
    exchange = torch.zeros(sequences, heads, size, dtype=torch.int64, device=states.device)
    return exchange, torch.zeros(1, dtype=torch.int32, device=states.device)


@triton.jit
def atomic_work_id(work_counter, G, ROW_BLOCKS: tl.constexpr):
    """Return the sequence (int64), head and row block that a program processes.

    Programs wait for the others of their covariance. Work is therefore assigned in the order in which programs start,
    not by program id: the programs that a program waits for have started, or start next.
    """
    work_id = tl.program_id(0) * G + tl.program_id(1)
    if ROW_BLOCKS > 1:
        work_id = tl.atomic_add(work_counter, 1)
    return (work_id // (ROW_BLOCKS * G)).to(tl.int64), work_id // ROW_BLOCKS % G, work_id % ROW_BLOCKS


@triton.jit
def exchange_vectors(x, y, zeros, exchange, row_block, round_index, P: tl.constexpr, ROWS: tl.constexpr):
    """Convert two vectors from rows to columns, through global memory; each number carries the index of its round.

    A program that reads a number of this round has also read all numbers of the last round, so two buffers suffice.
    Adding the vectors to `zeros` gives them the layout by columns; otherwise they would keep the layout by rows.
    """
    if ROWS < P:
        exchange += round_index % 2 * (2 * P)
        i, all_rows, stamp = (
            row_block * ROWS + tl.arange(0, ROWS),
            tl.arange(0, P),
            (round_index + 1).to(tl.int64) << 32,
        )
        tl.store(exchange + i, stamp | (x.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF))
        tl.store(exchange + P + i, stamp | (y.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF))
        x_words, y_words = tl.load(exchange + all_rows, volatile=True), tl.load(exchange + P + all_rows, volatile=True)
        while tl.min(tl.minimum(x_words, y_words) >> 32, 0) <= round_index:
            x_words, y_words = (
                tl.load(exchange + all_rows, volatile=True),
                tl.load(exchange + P + all_rows, volatile=True),
            )
        x, y = x_words.to(tl.int32).to(tl.float32, bitcast=True), y_words.to(tl.int32).to(tl.float32, bitcast=True)
    return tl.split(zeros + tl.reshape(tl.join(x, y), zeros.shape))


@triton.jit
def zero_columns(state, i):
    """Return two zero vectors in the layout by columns, computed so that the compiler cannot fold them to constants."""
    zeros = tl.sum(tl.where(i[:, None, None] < 0, state, 0.0), 0)
    return tl.join(zeros, zeros)


@triton.jit
def column_index(P: tl.constexpr, COLUMNS: tl.constexpr):
    """Return the index of every column, `[groups, COLUMNS]`."""
    return tl.arange(0, P // COLUMNS)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]


@triton.jit
def load_vector(x, dim, K: tl.constexpr, valid):
    """Load a vector in its stored dtype; 0 where `valid` is false."""
    return tl.load(x + dim, mask=(dim < K) & valid, other=0.0)


@triton.jit
def load_float32(x, dim, K: tl.constexpr, valid):
    """Load a vector as float32; 0 where `valid` is false."""
    return load_vector(x, dim, K, valid).to(tl.float32)


@triton.jit
def matvec(state, x):
    """Return the product of the program's rows and a vector by columns, `[rows]`."""
    return tl.sum(tl.sum(state * x[None, :, :], 1), 1)


@triton.jit
def dot(x, y):
    """Return the inner product of two vectors by columns."""
    return tl.sum(tl.sum(x * y, 0), 0)


@triton.jit
def outer(x, y):
    """Return the outer product of a vector by rows and one by columns."""
    return x[:, None, None] * y[None, :, :]


@triton.jit
def decay_rows(state, row_decay, decay, DECAY: tl.constexpr):
    """Apply decays to the program's rows: a scalar, or vectors by rows and by columns."""
    if DECAY == 2:
        state *= outer(row_decay, decay)
    elif DECAY == 1:
        state *= decay * decay
    return state
