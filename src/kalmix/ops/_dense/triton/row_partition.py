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

from kalmix.ops._dense.block_sizes import BAND


def bands(lanes: int) -> int:
    """Programs that share a covariance; one in the interpreter, which knows no registers and runs them in turn."""
    return 1 if knobs.runtime.interpret else lanes // BAND


def layout(lanes: int) -> dict[str, int]:
    """How bands are compiled: 64 numbers a thread."""
    return {"P": lanes, "BAND": lanes // bands(lanes), "COLUMNS": 64, "num_warps": 8}


def meeting(states: Tensor) -> tuple[Tensor, Tensor]:
    """Where the programs that share one of the covariances `states` tell each other vectors, and take their seats."""
    sequences, heads, lanes, _ = states.shape
    size = 4 * lanes if bands(lanes) > 1 else 0
    places = torch.zeros(sequences, heads, size, dtype=torch.int64, device=states.device)
    return places, torch.zeros(1, dtype=torch.int32, device=states.device)


@triton.jit
def seat(tickets, G, BANDS: tl.constexpr):
    """Sequence (int64), head and band of a program.

    Programs wait for those they share a covariance with. So they take their seats as they start, not as they are
    numbered: whoever waits, those with seats before its own are done or running, and those it waits for come next.
    """
    ticket = tl.program_id(0) * G + tl.program_id(1)
    if BANDS > 1:
        ticket = tl.atomic_add(tickets, 1)
    return (ticket // (BANDS * G)).to(tl.int64), ticket // BANDS % G, ticket % BANDS


@triton.jit
def by_columns(x, y, zero, places, band, turn, P: tl.constexpr, BAND: tl.constexpr):
    """Two vectors by rows, by columns: those of all bands, from memory, each number with that of its turn.

    Who reads another's numbers of this turn has that one's word that it read the last: two places serve. Added to
    `zero` vectors lie by columns; else their layout would be that of the rows.
    """
    if BAND < P:
        places += turn % 2 * (2 * P)
        i, every, mark = band * BAND + tl.arange(0, BAND), tl.arange(0, P), (turn + 1).to(tl.int64) << 32
        tl.store(places + i, mark | (x.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF))
        tl.store(places + P + i, mark | (y.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF))
        one, two = tl.load(places + every, volatile=True), tl.load(places + P + every, volatile=True)
        while tl.min(tl.minimum(one, two) >> 32, 0) <= turn:
            one, two = tl.load(places + every, volatile=True), tl.load(places + P + every, volatile=True)
        x, y = one.to(tl.int32).to(tl.float32, bitcast=True), two.to(tl.int32).to(tl.float32, bitcast=True)
    return tl.split(zero + tl.reshape(tl.join(x, y), zero.shape))


@triton.jit
def zero_by_columns(state, i):
    """Two vectors of zeros by columns, which the compiler cannot know them to be."""
    zero = tl.sum(tl.where(i[:, None, None] < 0, state, 0.0), 0)
    return tl.join(zero, zero)


@triton.jit
def columns(P: tl.constexpr, COLUMNS: tl.constexpr):
    return tl.arange(0, P // COLUMNS)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]


@triton.jit
def load(x, lane, K: tl.constexpr, live):
    """A vector as it is in memory; 0 where not `live`."""
    return tl.load(x + lane, mask=(lane < K) & live, other=0.0)


@triton.jit
def vector(x, lane, K: tl.constexpr, live):
    return load(x, lane, K, live).to(tl.float32)


@triton.jit
def times(state, x):
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
def faded(state, own_decay, decay, DECAY: tl.constexpr):
    """A band that decays: by one number, or by vectors by rows and by columns."""
    if DECAY == 2:
        state *= outer(own_decay, decay)
    elif DECAY == 1:
        state *= decay * decay
    return state
