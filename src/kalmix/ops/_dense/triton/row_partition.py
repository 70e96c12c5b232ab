"""How programs share a covariance that is too wide for the registers of one.

Each has a band of rows, `[rows, strips, COLUMNS]`: a row lies in a few threads of a warp, which have all that it is
multiplied with, and a vector is wanted by rows (`[rows]`) and by columns (`[strips, COLUMNS]`, all with every warp).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import knobs

from kalmix.ops._dense.block_sizes import ROWS


def row_blocks(padded: int) -> int:
    """Programs that share a covariance; one in the interpreter, which knows no registers and runs them in turn."""
    return 1 if knobs.runtime.interpret else padded // ROWS


def partition_options(padded: int) -> dict[str, int]:
    """How bands are compiled: 64 numbers a thread."""
    return {"P": padded, "ROWS": padded // row_blocks(padded), "COLUMNS": 64, "num_warps": 8}


def sync_buffers(states: Tensor) -> tuple[Tensor, Tensor]:
    """Where the programs that share one of the covariances `states` tell each other vectors, and take their seats."""
    sequences, heads, padded, _ = states.shape
    size = 4 * padded if row_blocks(padded) > 1 else 0
    exchange = torch.zeros(sequences, heads, size, dtype=torch.int64, device=states.device)
    return exchange, torch.zeros(1, dtype=torch.int32, device=states.device)


@triton.jit
def atomic_work_id(work_counter, G, ROW_BLOCKS: tl.constexpr):
    """Sequence (int64), head and band of a program.

    Programs wait for those they share a covariance with. So they take their seats as they start, not as they are
    numbered: whoever waits, those with seats before its own are done or running, and those it waits for come next.
    """
    work_id = tl.program_id(0) * G + tl.program_id(1)
    if ROW_BLOCKS > 1:
        work_id = tl.atomic_add(work_counter, 1)
    return (work_id // (ROW_BLOCKS * G)).to(tl.int64), work_id // ROW_BLOCKS % G, work_id % ROW_BLOCKS


@triton.jit
def exchange_vectors(x, y, zeros, exchange, row_block, round_index, P: tl.constexpr, ROWS: tl.constexpr):
    """Two vectors by rows, by columns: those of all bands, from memory, each number with that of its turn.

    Who reads another's numbers of this turn has that one's word that it read the last: two places serve. Added to
    `zero` vectors lie by columns; else their layout would be that of the rows.
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
    """Two vectors of zeros by columns, which the compiler cannot know them to be."""
    zeros = tl.sum(tl.where(i[:, None, None] < 0, state, 0.0), 0)
    return tl.join(zeros, zeros)


@triton.jit
def column_index(P: tl.constexpr, COLUMNS: tl.constexpr):
    return tl.arange(0, P // COLUMNS)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]


@triton.jit
def load_vector(x, dim, K: tl.constexpr, valid):
    """A vector as it is in memory; 0 where not `live`."""
    return tl.load(x + dim, mask=(dim < K) & valid, other=0.0)


@triton.jit
def load_float32(x, dim, K: tl.constexpr, valid):
    return load_vector(x, dim, K, valid).to(tl.float32)


@triton.jit
def matvec(state, x):
    """`[rows]`, a band times a vector by columns."""
    return tl.sum(tl.sum(state * x[None, :, :], 1), 1)


@triton.jit
def dot(x, y):
    """Of vectors by columns."""
    return tl.sum(tl.sum(x * y, 0), 0)


@triton.jit
def outer(x, y):
    """Of a vector by rows and one by columns."""
    return x[:, None, None] * y[None, :, :]


@triton.jit
def decay_rows(state, row_decay, decay, DECAY: tl.constexpr):
    """A band that decays: by one number, or by vectors by rows and by columns."""
    if DECAY == 2:
        state *= outer(row_decay, decay)
    elif DECAY == 1:
        state *= decay * decay
    return state
