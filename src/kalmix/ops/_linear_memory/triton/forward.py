"""How the forward kernels of linear memories are launched: by rule, from widths and dtypes."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from kalmix.ops._linear_memory.triton.forward_kernels import carry, read, solve
from kalmix.ops._linear_memory.triton.vector_decay import fold
from kalmix.ops._linear_memory.triton.vector_decay_tiles import join
from kalmix.ops._shared.triton.compile_and_launch import Launch
from kalmix.ops._shared.triton.decay_products import head_decays
from kalmix.ops._shared.triton.tiles import Tiling, contiguous_rows, dot_precision

# Columns worked on at a time, also of narrow matrices: Triton 3.6 on Hopper gets a product of 64 rows wrong whose left
# factor is itself a product, of another width.
BLOCK = 64
PIECE = 16  # tokens that decays per key are folded over first
# Of decays per key, the fastest that agreed with float64: 32 columns at a time, Triton 3.6 on Hopper gets `fold` wrong.
FOLD = {"BLOCK": 16, "num_warps": 1, "num_stages": 1}
JOIN = {"BLOCK": 128, "num_warps": 8, "num_stages": 1}


class Signals(NamedTuple):
    """Signals as the kernels read them: rows contiguous, decays per key folded in.

    Attributes:
        q, k: `[B, T, H, K]`; per key, `[B, T, G, K]` with the decay since the tile's entry.
        writes: k, or the vector gains, `[B, T, H or G, K]`; per key, `[B, T, G, K]` with gain and decay to the exit.
        gain, log_decay: contiguous `[B, T, G]` where they are a number a token, else a placeholder.
        entering, leaving, across: of decays per head, `triton_decays.pace`; else what stands for it, or a placeholder.
        scores, corrections: S and N of decays per key, `[B, T, G, SIZE]`, or placeholders.
        pieces: of decays per key, q, k and w as folded into pieces, and the decay across each, `[pieces, G, K]`.
        cut: the tiles.
        decays, keyed: whether there are decays per head, per key.
        gains, vector: whether there are gains that are a number a token, a vector.
        sizes: what kernels of both passes compile for.
    """

    q: Tensor
    k: Tensor
    writes: Tensor
    gain: Tensor
    log_decay: Tensor
    entering: Tensor
    leaving: Tensor
    across: Tensor
    scores: Tensor
    corrections: Tensor
    pieces: tuple[Tensor, ...]
    cut: Tiling
    decays: bool
    keyed: bool
    gains: bool
    vector: bool
    sizes: dict[str, Any]


def prepare(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gain: Tensor | None,
    log_decay: Tensor | None,
    cut: Tiling,
    corrects: bool,
) -> Signals:
    """What both passes start from."""
    (batch, length, heads, width), keys = v.shape, k.shape[3]
    size = cut.size
    q, k = contiguous_rows(q), contiguous_rows(k)
    keyed, vector = log_decay is not None and log_decay.ndim == 4, gain is not None and gain.ndim == 4
    gains, decays = gain is not None and not vector, log_decay is not None and not keyed
    writes = contiguous_rows(gain) if vector else k
    per_token = gain.contiguous() if gains else q
    sizes = {
        "K": keys,
        "V": width,
        "BLOCK": BLOCK,
        "SIZE": size,
        "PACKED": cut.packed,
        "PRECISION": dot_precision(v.dtype),
    }
    entering = across = log_decay_rows = scores = corrections = q
    leaving = per_token
    if decays:
        log_decay_rows = log_decay.contiguous()
        entering, leaving = torch.empty(2, batch, length, heads, dtype=torch.float32, device=v.device)
        across = torch.empty(cut.num_tiles, heads, dtype=torch.float32, device=v.device)
        Launch(head_decays, (cut.num_tiles, heads), (
            log_decay_rows, per_token, entering, leaving, across, cut.tile_table, length, cut.tiles, heads,
        ), {"SIZE": size, "PACKED": cut.packed, "GAINS": gains, "num_warps": 1}).run()  # fmt: skip
    pieces: tuple[Tensor, ...] = ()
    if keyed:
        log_decay_rows, inputs = contiguous_rows(log_decay), (q, k, writes)
        shape, like, float32 = (batch, length, heads), {"dtype": v.dtype, "device": v.device}, torch.float32
        folded = [torch.empty(*shape, keys, **like) for _ in range(3 if corrects else 2)]
        q, k, writes = folded[0], folded[1] if corrects else folded[0], folded[-1]
        scores = torch.empty(*shape, size, **like)
        corrections = torch.empty(*shape, size, dtype=float32, device=v.device) if corrects else scores
        across = torch.empty(cut.num_tiles, heads, keys, dtype=float32, device=v.device)
        parts, paths = size // PIECE, across
        if parts > 1:
            folded = [torch.empty_like(x) for x in folded]
            paths = torch.empty(cut.num_tiles * parts, heads, keys, dtype=float32, device=v.device)
        pieces = (folded[0], folded[1] if corrects else folded[0], folded[-1], paths)
        tiles, kinds = (cut.tile_table, length, cut.tiles), keyed_sizes(sizes, corrects)
        Launch(fold, (cut.num_tiles * parts, heads), (
            *inputs, per_token, log_decay_rows, *pieces, scores, corrections, *tiles,
            *strides(*inputs, log_decay_rows), heads, heads // inputs[0].shape[2], heads // inputs[2].shape[2],
        ), {"GAINS": gains, **kinds, **FOLD}).run()  # fmt: skip
        if parts > 1:
            Launch(join, (cut.num_tiles, heads), (
                *pieces, q, k, writes, across, scores, corrections, *tiles, heads,
            ), {**kinds, **JOIN}).run()  # fmt: skip
    found = (q, k, writes, per_token, log_decay_rows, entering, leaving, across, scores, corrections, pieces)
    return Signals(*found, cut, decays, keyed, gains, vector, sizes)


def keyed_sizes(sizes: dict[str, Any], corrects: bool) -> dict[str, Any]:
    """What kernels of decays per key compile for, given `Signals.sizes`."""
    return {name: sizes[name] for name in ("K", "SIZE", "PACKED", "PRECISION")} | {"CORRECTS": corrects}


def strides(*tensors: Tensor) -> list[int]:
    return [stride for x in tensors for stride in x.stride()[1:3]]


def carried(sequences: int, heads: int, sizes: dict[str, Any], dtype: torch.dtype, signals: int) -> dict[str, int]:
    """How a memory is carried: columns a program, and tiles on their way while one is worked on.

    Few columns, so that there are programs for every multiprocessor and shared memory for the next tiles: of `signals`
    as wide as a key, of two as wide as the columns, and the memory itself, twice as much where products are split.
    Keys of 3 or 5 numbers are not fetched ahead: on Hopper, Triton 3.6 then reads outside of memory.
    """
    keys, width = -(-sizes["K"] // sizes["BLOCK"]) * sizes["BLOCK"], sizes["V"]
    values = min(sizes["BLOCK"], max(16, triton.next_power_of_2(width)), 32 if keys > 128 else 64)
    while values > 32 and sequences * heads * -(-width // values) < 128:
        values //= 2
    room = 232_448 // dtype.itemsize // (2 if dtype == torch.float32 else 1) - keys * values
    stages = room // (sizes["SIZE"] * (signals * keys + 2 * values))
    return {"VALUES": values, "STAGES": max(1, min(3, stages)) if sizes["K"] % 4 == 0 else 1}


class Results(NamedTuple):
    """What the forward pass fills: means; of tiles, the memory at their entry; of corrections, errors and inverses."""

    mean: Tensor
    states: Tensor
    errors: Tensor
    inverses: Tensor


def blank(k: Tensor, v: Tensor, tiles: int, size: int, corrects: bool, packed: bool) -> Results:
    """Room for results; 0 where tokens may lie outside every sequence."""
    like, shape = {"dtype": v.dtype, "device": v.device}, v.shape[:3]
    mean = (torch.zeros if packed else torch.empty)(v.shape, **like)
    states = torch.empty(tiles, v.shape[2], k.shape[3], v.shape[3], **like)
    errors = torch.empty(v.shape if corrects else (0,), **like)
    return Results(mean, states, errors, torch.empty((*shape, size) if corrects else (0,), **like))


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gain: Tensor | None,
    log_decay: Tensor | None,
    prior: Tensor,
    cut: Tiling,
    corrects: bool,
    results: Results,
) -> Tensor:
    """Fill the results of some tiles, and return the last memories."""
    (batch, length, heads, width), keys = v.shape, k.shape[3]
    s = prepare(q, k, v, gain, log_decay, cut, corrects)._replace(pieces=())
    v, own = contiguous_rows(v), heads // s.writes.shape[2]
    tiles, share = (cut.tile_table, length, cut.tiles), heads // s.q.shape[2]
    like = {"dtype": v.dtype, "device": v.device}
    mean, states, errors, inverses = results
    last = torch.empty(cut.num_sequences, heads, keys, width, dtype=prior.dtype, device=v.device)
    kinds = {"DECAYS": s.decays, "GAINS": s.gains and not s.keyed}
    fast, free = v, v
    if corrects:
        free, fast = torch.empty(v.shape, **like), torch.empty(batch, length, heads, keys, **like)
        Launch(solve, (cut.num_tiles * heads,), (
            s.k, s.writes, v, s.gain, s.log_decay, s.entering, s.corrections, inverses, fast, free, *tiles,
            *strides(s.k, s.writes, v), heads, share, own,
        ), {**kinds, "GIVEN": s.keyed, "num_warps": 4, **s.sizes}).run()  # fmt: skip
    else:
        errors = v
    plan = carried(cut.num_sequences, heads, s.sizes, v.dtype, 2)
    options = {"KEYED": s.keyed, "SCALED": s.decays or (s.gains and not s.keyed), "CORRECTS": corrects, "num_warps": 4}
    Launch(carry, (cut.num_sequences, heads, -(-width // plan["VALUES"])), (
        s.writes, fast, free, errors, states, prior, last, s.leaving, s.across, cut.sequence_table, length, cut.tiles,
        *strides(s.writes, free), *prior.stride(), heads, own,
    ), {"DECAYS": s.decays, **options, **plan, **s.sizes}).run()  # fmt: skip
    values = BLOCK if width <= BLOCK else 2 * BLOCK
    Launch(read, (cut.num_tiles * heads * -(-width // values),), (
        s.q, s.writes, errors, s.gain, s.log_decay, s.scores, states, mean, *tiles,
        *strides(s.q, s.writes, errors), heads, share, own,
    ), {"VALUES": values, "GIVEN": s.keyed, "BACK": False, "num_warps": 4, **kinds, **s.sizes}).run()  # fmt: skip
    return last
