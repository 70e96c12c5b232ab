"""Launches of the forward kernels of linear memories. Block sizes follow from widths and dtypes; nothing is tuned."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from kalmix.ops._linear_memory.scratch import SUBTILE, subtile_signals_size
from kalmix.ops._linear_memory.triton.forward_kernels import read_out, scan_memory, solve_errors
from kalmix.ops._linear_memory.triton.vector_decay import fold_decays
from kalmix.ops._linear_memory.triton.vector_decay_tiles import decay_subtiles, join_subtiles
from kalmix.ops._shared.gpu import shared_memory
from kalmix.ops._shared.triton.compile_and_launch import Launch
from kalmix.ops._shared.triton.decay_products import head_decays
from kalmix.ops._shared.triton.tiles import Tiling, contiguous_rows, dot_precision

# Columns per block, also for narrower matrices: on Hopper, Triton 3.6 miscompiles a product of 64 rows whose left
# factor is itself a product of another width.
BLOCK = 64
# In half precision, and in float32: the fastest options that agreed with float64. With 32 columns, Triton 3.6
# miscompiles `fold_decays` on Hopper.
FOLD_OPTIONS = (
    {"BLOCK": 16, "num_warps": 1, "num_stages": 3, "maxnreg": 168},  # registers for 12 programs on a multiprocessor
    {"BLOCK": 16, "num_warps": 1, "num_stages": 1},
)
DECAY_BLOCK = 128  # keys of a program of `decay_subtiles`, of which each warp has 32
JOIN_OPTIONS = {"BLOCK": 128, "num_warps": 8, "num_stages": 1}, {"BLOCK": 32, "num_warps": 4, "num_stages": 1}


class ForwardResults(NamedTuple):
    """Results of the forward pass.

    Attributes:
        mean: `[B, T, G, V]`.
        states: memories at the start of each tile, `[num_tiles, G, K, V]` in one axis; if the prior is not read, those
            at the boundaries between tiles, `[num_boundaries, G, K, V]`.
        errors: prediction errors, `[B, T, G, V]`; empty without corrections.
        inverses: (I + N)^-1 of each tile, `[B, T, G, SIZE]`; empty without corrections.
        scores, subtile_decays: those of `PreparedSignals` and its `subtiles`, with which the backward pass prepares the
            signals faster; empty if they are not stored.
        subtile_signals: the other `subtiles` of `PreparedSignals`, `[2, B, T, G, K]` (3 with corrections) in one axis;
            empty or `None` if they are not stored.
    """

    mean: Tensor
    states: Tensor
    errors: Tensor
    inverses: Tensor
    scores: Tensor
    subtile_decays: Tensor
    subtile_signals: Tensor | None = None


class PreparedSignals(NamedTuple):
    """Signals in the form that kernels read: contiguous rows, with decays per key folded into them.

    Attributes:
        q, k: `[B, T, H, K]`; with decays per key `[B, T, G, K]`, times the decay from the start of the tile.
        writes: k or the gain vectors, `[B, T, H or G, K]`; with decays per key `[B, T, G, K]`, times the gain and the
            decay to the end of the tile.
        gain, log_decay: contiguous `[B, T, G]` if there is one number per token, otherwise a placeholder.
        from_start, to_end, tile_decay: results of `head_decays` if decays are per head. With decays per key,
            `tile_decay` is `[num_tiles, G, K]`. Without decays, `to_end` is the gain. Otherwise placeholders.
        scores, corrections: with decays per key, S and N (see `forward_kernels`), `[B, T, G, SIZE]`. For pairs of
            tokens in one subtile, the latter has (I + N)^-1 of the subtile. It is a placeholder if S was stored.
        subtiles: with decays per key, q, k and writes with decays folded in by subtile, and the decays of subtiles
            `[subtiles, G, K]`.
        tiling: the tiles.
        scalar_decays, per_key: whether decays are per head, per key.
        scalar_gains, vector_gains: whether gains are scalars, vectors.
        sizes: compile-time options of the kernels of both passes.
    """

    q: Tensor
    k: Tensor
    writes: Tensor
    gain: Tensor
    log_decay: Tensor
    from_start: Tensor
    to_end: Tensor
    tile_decay: Tensor
    scores: Tensor
    corrections: Tensor
    subtiles: tuple[Tensor, ...]
    tiling: Tiling
    scalar_decays: bool
    per_key: bool
    scalar_gains: bool
    vector_gains: bool
    sizes: dict[str, Any]


def prepare_signals(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gain: Tensor | None,
    log_decay: Tensor | None,
    tiling: Tiling,
    corrects: bool,
    results: ForwardResults,
    stored: bool,
) -> PreparedSignals:
    """Compute decays inside tiles, and fold decays per key into the signals; the first step of both passes.

    If `results` has room for scores and for `subtiles`, they are written to it or, if `stored`, read from it.
    """
    (batch, length, heads, width), keys = v.shape, k.shape[3]
    size = tiling.size
    q, k = contiguous_rows(q), contiguous_rows(k)
    per_key, vector_gains = log_decay is not None and log_decay.ndim == 4, gain is not None and gain.ndim == 4
    scalar_gains, scalar_decays = gain is not None and not vector_gains, log_decay is not None and not per_key
    writes = contiguous_rows(gain) if vector_gains else k
    per_token = gain.contiguous() if scalar_gains else q
    sizes = {
        "K": keys,
        "V": width,
        "BLOCK": BLOCK,
        "SIZE": size,
        "PACKED": tiling.packed,
        "PRECISION": dot_precision(v.dtype),
    }
    from_start = tile_decay = log_decay_rows = scores = corrections = q
    to_end = per_token
    if scalar_decays:
        log_decay_rows = log_decay.contiguous()
        shape, like = (batch, length, heads), {"dtype": torch.float32, "device": v.device}
        from_start, to_end = (torch.empty(shape, **like) for _ in range(2))  # two, so that each is aligned
        tile_decay = torch.empty(tiling.num_tiles, heads, dtype=torch.float32, device=v.device)
        Launch(head_decays, (tiling.num_tiles, heads), (
            log_decay_rows, per_token, from_start, to_end, tile_decay, tiling.tile_table, length, tiling.tiles, heads,
        ), {"SIZE": size, "PACKED": tiling.packed, "GAINS": scalar_gains, "num_warps": 1}).run()  # fmt: skip
    subtiles: tuple[Tensor, ...] = ()
    if per_key:
        log_decay_rows, inputs = contiguous_rows(log_decay), (q, k, writes)
        shape, like, float32 = (batch, length, heads), {"dtype": v.dtype, "device": v.device}, torch.float32
        folded = [torch.empty(*shape, keys, **like) for _ in range(3 if corrects else 2)]
        q, k, writes = folded[0], folded[1] if corrects else folded[0], folded[-1]
        has_room = size > SUBTILE and results.scores.numel() > 0
        stored = stored and has_room
        scores = results.scores if has_room else torch.empty(*shape, size, **like)
        writes_corrections = corrects and not stored
        corrections = torch.empty(*shape, size, dtype=float32, device=v.device) if writes_corrections else scores
        tile_decay = torch.empty(tiling.num_tiles, heads, keys, dtype=float32, device=v.device)
        num_subtiles, subtile_decays = size // SUBTILE, tile_decay
        if num_subtiles > 1:
            room = results.subtile_signals if has_room else None
            folded = [torch.empty_like(x) for x in folded] if room is None else list(room.view(-1, *q.shape))
            decays_shape = tiling.num_tiles * num_subtiles, heads, keys
            subtile_decays = (
                results.subtile_decays if has_room else torch.empty(decays_shape, dtype=float32, device=v.device)
            )
        subtiles = (folded[0], folded[1] if corrects else folded[0], folded[-1], subtile_decays)
        tiles, features = (tiling.tile_table, length, tiling.tiles), per_key_sizes(sizes, corrects)
        decay_options = {"GAINS": scalar_gains, "VECTOR": vector_gains, **features}
        strides_and_heads = (
            *strides(*inputs, log_decay_rows), heads, heads // inputs[0].shape[2], heads // inputs[2].shape[2],
        )  # fmt: skip
        if stored:
            del features["PRECISION"]
            block = min(max(triton.next_power_of_2(keys), 32), DECAY_BLOCK)
            Launch(decay_subtiles, (tiling.num_tiles * num_subtiles, heads, -(-keys // block)), (
                *subtiles, q, k, writes, tile_decay, *tiles, heads,
            ), {**features, "BLOCK": block, "num_warps": block // 32}).run()  # fmt: skip
        else:
            Launch(fold_decays, (tiling.num_tiles * num_subtiles, heads), (
                *inputs, per_token, log_decay_rows, *subtiles, scores, corrections, *tiles, *strides_and_heads,
            ), {**decay_options, **per_key_options(FOLD_OPTIONS, keys, v)}).run()  # fmt: skip
        if num_subtiles > 1 and not stored:
            Launch(join_subtiles, (tiling.num_tiles, heads), (
                *subtiles, q, k, writes, tile_decay, scores, corrections, *tiles, heads,
            ), {**features, **per_key_options(JOIN_OPTIONS, keys, v)}).run()  # fmt: skip
    tensors = (q, k, writes, per_token, log_decay_rows, from_start, to_end, tile_decay, scores, corrections, subtiles)
    return PreparedSignals(*tensors, tiling, scalar_decays, per_key, scalar_gains, vector_gains, sizes)


def per_key_sizes(sizes: dict[str, Any], corrects: bool) -> dict[str, Any]:
    """Return the compile-time options of kernels for decays per key, given `PreparedSignals.sizes`."""
    return {name: sizes[name] for name in ("K", "SIZE", "PACKED", "PRECISION")} | {"CORRECTS": corrects}


def per_key_options(options: tuple[dict[str, int], dict[str, int]], keys: int, v: Tensor) -> dict[str, int]:
    """Choose options for half precision or float32. Some key widths are not prefetched, as in `scan_options`."""
    chosen = options[v.dtype == torch.float32]
    return chosen if keys % 4 == 0 else chosen | {"num_stages": 1}


def solve_options(keys: int, v: Tensor) -> dict[str, int]:
    """Choose options of `solve_errors`: in half precision, registers for three programs on a multiprocessor."""
    return {"num_warps": 4} | ({"maxnreg": 168} if keys <= 128 and v.dtype != torch.float32 else {})


def strides(*tensors: Tensor) -> list[int]:
    """Return the strides of tokens and heads of tensors `[B, T, heads, width]`."""
    return [stride for x in tensors for stride in x.stride()[1:3]]


def scan_options(sequences: int, v: Tensor, sizes: dict[str, Any], signals: int) -> dict[str, int]:
    """Return the options of a kernel that scans memories: columns per program, and pipeline stages.

    Tiles are prefetched to shared memory. A tile needs room for `signals` tensors as wide as a key and two as wide as
    the columns; the memory itself needs room, too. In float32 everything takes twice as much, since products are split.
    Key widths that are not multiples of 4 are not prefetched: on Hopper, Triton 3.6 then reads out of bounds.
    """
    keys, values = -(-sizes["K"] // BLOCK) * BLOCK, scan_columns(sequences, v, sizes["K"])
    element = 8 if v.dtype == torch.float32 else v.dtype.itemsize
    available = shared_memory(v.device) // element - keys * values
    stages = available // (sizes["SIZE"] * (signals * keys + 2 * values))
    return {"VALUES": values, "STAGES": max(1, min(3, stages)) if sizes["K"] % 4 == 0 else 1}


def scan_columns(sequences: int, v: Tensor, keys: int) -> int:
    """Return the columns per program of a kernel that scans memories.

    Few columns give programs for every multiprocessor, and leave shared memory for prefetched tiles.
    """
    heads, width = v.shape[2:]
    columns = min(BLOCK, max(16, 1 << (width - 1).bit_length()), 64 if keys <= 128 else 32 if keys <= 256 else 16)
    while columns > 32 and sequences * heads * -(-width // columns) < 128:
        columns //= 2
    return columns


def num_boundaries(v: Tensor, size: int) -> int:
    """Return the number of indices of boundaries between tiles, for values `[B, T, G, V]`: see `boundary_index`.

    Index 0 is unused; it keeps the tensor of stored memories non-empty.
    """
    return v.shape[0] * v.shape[1] // size + 1


def allocate_results(
    k: Tensor,
    v: Tensor,
    tiles: int,
    size: int,
    corrects: bool,
    packed: bool,
    per_key: bool = False,
    no_prior: bool = False,
) -> ForwardResults:
    """Allocate results; means are zero where tokens may lie outside every sequence.

    If `no_prior`, there is room for states at boundaries between tiles only. If `per_key`, there is room for scores,
    decays of subtiles and their signals: zeros, which nothing uses, if tiles are subtiles.
    """
    like, shape = {"dtype": v.dtype, "device": v.device}, v.shape[:3]
    mean = (torch.zeros if packed else torch.empty)(v.shape, **like)
    num_states = num_boundaries(v, size) if no_prior else tiles
    states = torch.empty(num_states * v.shape[2] * k.shape[3] * v.shape[3], **like)
    errors = torch.empty(v.shape if corrects else (0,), **like)
    inverses = torch.empty((*shape, size) if corrects else (0,), **like)
    allocate = torch.zeros if size == SUBTILE else torch.empty
    scores = allocate((*shape, size) if per_key else (0,), **like)
    decays_size = tiles * (size // SUBTILE) * v.shape[2] * k.shape[3] if per_key else 0
    decays = allocate(decays_size, dtype=torch.float32, device=v.device)
    signals_size = subtile_signals_size(k, v, size, corrects) if per_key else 0
    return ForwardResults(mean, states, errors, inverses, scores, decays, allocate(signals_size, **like))


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gain: Tensor | None,
    log_decay: Tensor | None,
    prior: Tensor,
    tiling: Tiling,
    corrects: bool,
    results: ForwardResults | None,
    no_prior: bool = False,
) -> Tensor:
    """Filter the tokens of `tiling`: write to `results`, and return the final memories `[N, G, K, V]`.

    Args:
        q, k, v, gain, log_decay: signals.
        prior: prior memories `[N, G, K, V]`.
        tiling: the tiles.
        corrects: whether to compute `delta`.
        results: results of `allocate_results`. If `None`, only the final memories are computed, and `q` is not used.
        no_prior: whether the prior is 0; it is not read then. The tiles must be those of packed sequences.
    """
    (batch, length, heads, width), keys = v.shape, k.shape[3]
    store = results is not None
    if results is None:
        empty, inverses_shape = v.new_empty(0), (batch, length, heads, tiling.size) if corrects else (0,)
        results = ForwardResults(empty, empty, empty, v.new_empty(inverses_shape), empty, empty)
    s = prepare_signals(q, k, v, gain, log_decay, tiling, corrects, results, stored=False)._replace(subtiles=())
    v, write_group = contiguous_rows(v), heads // s.writes.shape[2]
    tiles, group = (tiling.tile_table, length, tiling.tiles), heads // s.q.shape[2]
    like = {"dtype": v.dtype, "device": v.device}
    mean, states, errors, inverses, *_ = results
    final_memory = torch.empty(tiling.num_sequences, heads, keys, width, dtype=prior.dtype, device=v.device)
    features = {"DECAYS": s.scalar_decays, "GAINS": s.scalar_gains and not s.per_key}
    scaled = s.scalar_decays or (s.scalar_gains and not s.per_key)
    error_keys, initial_errors = v, v
    if corrects:
        initial_errors = errors if no_prior else torch.empty(v.shape, **like)
        error_keys = torch.empty(batch, length, heads, keys, **like)
        Launch(solve_errors, (tiling.num_tiles * heads,), (
            s.k, s.writes, v, s.gain, s.log_decay, s.from_start, s.corrections, inverses, error_keys, initial_errors,
            *tiles, *strides(s.k, s.writes, v), heads, group, write_group,
        ), {**features, "PRECOMPUTED": s.per_key, **solve_options(keys, v), **s.sizes}).run()  # fmt: skip
    else:
        errors = v
    plan = scan_options(tiling.num_sequences, v, s.sizes, 2)
    options = {"PER_KEY": s.per_key, "SCALED": scaled, "CORRECTS": corrects, "STORE": store}
    options |= {"NO_PRIOR": no_prior, "num_warps": 4}
    Launch(scan_memory, (tiling.num_sequences, heads, -(-width // plan["VALUES"])), (
        s.writes, error_keys, initial_errors, errors, states, prior, final_memory, s.to_end, s.tile_decay,
        tiling.sequence_table, length, tiling.tiles,
        *strides(s.writes, initial_errors), *prior.stride(), heads, write_group,
    ), {"DECAYS": s.scalar_decays, **options, **plan, **s.sizes}).run()  # fmt: skip
    if not store:
        return final_memory
    values = BLOCK if width <= BLOCK else 2 * BLOCK
    options = {"VALUES": values, "PRECOMPUTED": s.per_key, "BACKWARD": False, "INNER": no_prior, "num_warps": 4}
    Launch(read_out, (tiling.num_tiles * heads * -(-width // values),), (
        s.q, s.writes, errors, s.gain, s.log_decay, s.scores, states, mean, *tiles,
        *strides(s.q, s.writes, errors), heads, group, write_group,
    ), {**options, **features, **s.sizes}).run()  # fmt: skip
    return final_memory
