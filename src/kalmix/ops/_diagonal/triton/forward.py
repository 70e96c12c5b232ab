"""`diagonal` in Triton: the forward pass, of `triton_cells` cut by `triton_plan`.

Every cell (slot, channel) is independent, so a program owns a few channels with all their slots and steps through
time with the beliefs in registers. Parallelism over time comes from tiles of tokens, in three launches:

1. `_map_tiles`: what each tile does to *any* belief entering it, five numbers a cell;
2. `_enter_tiles`: the entry belief of every tile, by applying those maps to the prior one after another;
3. `_read_out`: the recursion itself from the entry belief, writing outputs and, for the backward pass, a belief
   every few tokens.

The effect of a tile on a cell of mean m and variance x is, with d = 1 / (1 + x information),

    variance = gain^2 x d + floor,    mean = gain (m + x score) d + offset

where `floor` and `offset` are what the recursion makes of x = 0, m = 0. All five are bounded whatever the data;
none needs p > 0. (A composition of the Moebius maps of equation 16 needs rescaling; this does not.)

Scratch memory is channels-first with the slots of a channel contiguous, padded to a power of two (`P` below), so
that a thread's four slots are one 16-byte access and few lanes share a sum.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kalmix.ops._diagonal.scratch import SPACING, padded
from kalmix.ops._diagonal.triton.cells import (
    STRIDES,
    UNSPECIALIZED,
    belief_of,
    cell_offsets,
    dynamics_of,
    keys_at,
    step,
    values_at,
)
from kalmix.ops._diagonal.triton.plan import WINDOW, block, locate_tile, multiprocessors, plan, ragged, tile_size
from kalmix.ops._shared.triton.compile_and_launch import Launch
from kalmix.ops._shared.triton.ptx import supports_ptx
from kalmix.ops._shared.triton.tiles import contiguous_rows
from kalmix.segments import Segments

_RESIDENT = 32  # warps a multiprocessor is kept busy with


@triton.jit
def map_token(gain, information, score, floor, offset, key, value, weight, decay, noise, PTX: tl.constexpr):
    """A tile's five numbers, one token later."""
    key, value, weight = key.to(tl.float32), value.to(tl.float32), weight.to(tl.float32)
    offset, floor, shrink, surprise = step(offset, floor, key, weight, value, decay, noise, PTX)
    before = decay * gain
    gain = before * shrink
    return gain, information + before * gain * (key * (key * weight)), score + gain * surprise, floor, offset


@triton.jit(do_not_specialize=UNSPECIALIZED)
def _map_tiles(
    k, v, precision, log_decay, noise, maps, table,
    length, size, tiles, k_token, k_head, v_token, v_head, p_token, p_head, G, V, SHARE,
    K: tl.constexpr, P: tl.constexpr, BLOCK: tl.constexpr, SPACING: tl.constexpr, PACKED: tl.constexpr,
    EVEN: tl.constexpr, RAGGED: tl.constexpr, WINDOW: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    blocks = tl.cdiv(V, BLOCK)
    index = tl.program_id(0) // blocks
    head = tl.program_id(1)
    channel = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    slot = tl.arange(0, P)
    _sequence, token, count, last, _kept_slot = locate_tile(table, index, length, size, tiles, SPACING, PACKED)
    if last or count == 0:  # nothing comes after it to be entered
        return
    decay, noise = dynamics_of(log_decay, noise, head, channel, V, K, P)
    k += token * k_token + head // SHARE * k_head
    v += token * v_token + head * v_head
    precision += token * p_token + head * p_head
    floor = tl.zeros([BLOCK, P], tl.float32)
    offset = tl.zeros([BLOCK, P], tl.float32)
    gain = tl.full([BLOCK, P], 1.0, tl.float32)
    information = tl.zeros([BLOCK, P], tl.float32)
    score = tl.zeros([BLOCK, P], tl.float32)
    next_keys = keys_at(0, count, k, k_token, slot, channel, K, P, WINDOW)
    next_values = values_at(0, count, v, v_token, channel, V, EVEN, WINDOW)
    next_weights = values_at(0, count, precision, p_token, channel, V, EVEN, WINDOW)
    whole = count // WINDOW * WINDOW
    for start in range(0, whole, WINDOW):
        keys, values, weights = next_keys, next_values, next_weights
        next_keys = keys_at(start + WINDOW, count, k, k_token, slot, channel, K, P, WINDOW)
        next_values = values_at(start + WINDOW, count, v, v_token, channel, V, EVEN, WINDOW)
        next_weights = values_at(start + WINDOW, count, precision, p_token, channel, V, EVEN, WINDOW)
        for i in tl.static_range(WINDOW):
            gain, information, score, floor, offset = map_token(
                gain, information, score, floor, offset, keys[i], values[i], weights[i], decay, noise, PTX
            )
    if RAGGED:
        for t in range(whole, count):
            keys = keys_at(t, count, k, k_token, slot, channel, K, P, 1)
            values = values_at(t, count, v, v_token, channel, V, EVEN, 1)
            weights = values_at(t, count, precision, p_token, channel, V, EVEN, 1)
            gain, information, score, floor, offset = map_token(
                gain, information, score, floor, offset, keys[0], values[0], weights[0], decay, noise, PTX
            )
    inside = (channel < V)[:, None] & (slot < P)[None, :]
    plane = G * V * P
    maps += index.to(tl.int64) * 5 * plane + cell_offsets(head, channel, V, P)
    tl.store(maps, gain, mask=inside)
    tl.store(maps + plane, information, mask=inside)
    tl.store(maps + 2 * plane, score, mask=inside)
    tl.store(maps + 3 * plane, floor, mask=inside)
    tl.store(maps + 4 * plane, offset, mask=inside)


@triton.jit(do_not_specialize=[*UNSPECIALIZED, *STRIDES])
def _enter_tiles(
    maps, entries, mean, var, bounds, tiles,
    mean_n, mean_g, mean_k, mean_v, var_n, var_g, var_k, var_v, G, V,
    K: tl.constexpr, P: tl.constexpr, BLOCK: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    sequence = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    channel = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.arange(0, P)
    inside = (channel < V)[:, None] & (slot < P)[None, :]
    real = (channel < V)[:, None] & (slot < K)[None, :]
    m = belief_of(mean, sequence, head, channel, slot, mean_n, mean_g, mean_k, mean_v, real)
    x = belief_of(var, sequence, head, channel, slot, var_n, var_g, var_k, var_v, real)
    if PACKED:
        first, end = tl.load(bounds + 2 * sequence), tl.load(bounds + 2 * sequence + 1)
    else:
        first, end = sequence * tiles, sequence * tiles + tiles
    plane = G * V * P
    at = cell_offsets(head, channel, V, P)
    for index in tl.range(first, end, num_stages=4):
        gain = tl.load(maps + index * 5 * plane + at, mask=inside & (index + 1 < end), other=0.0)
        information = tl.load(maps + (index * 5 + 1) * plane + at, mask=inside & (index + 1 < end), other=0.0)
        score = tl.load(maps + (index * 5 + 2) * plane + at, mask=inside & (index + 1 < end), other=0.0)
        floor = tl.load(maps + (index * 5 + 3) * plane + at, mask=inside & (index + 1 < end), other=0.0)
        offset = tl.load(maps + (index * 5 + 4) * plane + at, mask=inside & (index + 1 < end), other=0.0)
        tl.store(entries + index * 2 * plane + at, m, mask=inside)
        tl.store(entries + (index * 2 + 1) * plane + at, x, mask=inside)
        through = gain / (1.0 + x * information)
        m = (m + x * score) * through + offset
        x = gain * x * through + floor


@triton.jit
def read_token(
    t, mean, var, query, key, value, weight, read_mean, read_var, channel, V, G, decay, noise,
    VARIANCE: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """One token with its outputs."""
    query, key, value, weight = query.to(tl.float32), key.to(tl.float32), value.to(tl.float32), weight.to(tl.float32)
    mean, var, _shrink, _surprise = step(mean, var, key, weight, value, decay, noise, PTX)
    at = t * (G * V) + channel
    tl.store(read_mean + at, tl.sum(query * mean, 1).to(read_mean.dtype.element_ty), mask=channel < V)
    if VARIANCE:
        tl.store(read_var + at, tl.sum(query * query * var, 1), mask=channel < V)
    return mean, var


@triton.jit(do_not_specialize=[*UNSPECIALIZED, *STRIDES])
def _read_out(
    q, k, v, precision, log_decay, noise, entry_mean, entry_var, read_mean, read_var, last_mean, last_var, kept, table,
    length, size, tiles, q_token, q_head, k_token, k_head, v_token, v_head, p_token, p_head,
    mean_n, mean_g, mean_k, mean_v, var_n, var_g, var_k, var_v, G, V, SHARE,
    K: tl.constexpr, P: tl.constexpr, BLOCK: tl.constexpr, SPACING: tl.constexpr, PACKED: tl.constexpr,
    EVEN: tl.constexpr, RAGGED: tl.constexpr, WINDOW: tl.constexpr, SINGLE: tl.constexpr, VARIANCE: tl.constexpr,
    KEEP: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    blocks = tl.cdiv(V, BLOCK)
    index = tl.program_id(0) // blocks
    head = tl.program_id(1)
    channel = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    slot = tl.arange(0, P)
    inside = (channel < V)[:, None] & (slot < P)[None, :]
    real = (channel < V)[:, None] & (slot < K)[None, :]
    sequence, token, count, last, kept_slot = locate_tile(table, index, length, size, tiles, SPACING, PACKED)
    entry = sequence if SINGLE else index.to(tl.int64)  # the prior itself, or what `_enter_tiles` wrote
    mean = belief_of(entry_mean, entry, head, channel, slot, mean_n, mean_g, mean_k, mean_v, real)
    var = belief_of(entry_var, entry, head, channel, slot, var_n, var_g, var_k, var_v, real)
    decay, noise = dynamics_of(log_decay, noise, head, channel, V, K, P)
    q += token * q_token + head // SHARE * q_head
    k += token * k_token + head // SHARE * k_head
    v += token * v_token + head * v_head
    precision += token * p_token + head * p_head
    read_mean += (token * G + head) * V
    read_var += (token * G + head) * V
    plane = G * V * P
    kept += kept_slot * 2 * plane + cell_offsets(head, channel, V, P)
    for group in range(0, count, SPACING):
        if KEEP:
            tl.store(kept, mean, mask=inside)
            tl.store(kept + plane, var, mask=inside)
            kept += 2 * plane
        end = tl.minimum(group + SPACING, count)
        whole = group + (end - group) // WINDOW * WINDOW
        next_queries = keys_at(group, count, q, q_token, slot, channel, K, P, WINDOW)
        next_keys = keys_at(group, count, k, k_token, slot, channel, K, P, WINDOW)
        next_values = values_at(group, count, v, v_token, channel, V, EVEN, WINDOW)
        next_weights = values_at(group, count, precision, p_token, channel, V, EVEN, WINDOW)
        for start in range(group, whole, WINDOW):
            queries, keys, values, weights = next_queries, next_keys, next_values, next_weights
            next_queries = keys_at(start + WINDOW, count, q, q_token, slot, channel, K, P, WINDOW)
            next_keys = keys_at(start + WINDOW, count, k, k_token, slot, channel, K, P, WINDOW)
            next_values = values_at(start + WINDOW, count, v, v_token, channel, V, EVEN, WINDOW)
            next_weights = values_at(start + WINDOW, count, precision, p_token, channel, V, EVEN, WINDOW)
            for i in tl.static_range(WINDOW):
                mean, var = read_token(
                    start + i, mean, var, queries[i], keys[i], values[i], weights[i], read_mean, read_var,
                    channel, V, G, decay, noise, VARIANCE, PTX,
                )  # fmt: skip
        if RAGGED:
            for t in range(whole, end):
                queries = keys_at(t, count, q, q_token, slot, channel, K, P, 1)
                keys = keys_at(t, count, k, k_token, slot, channel, K, P, 1)
                values = values_at(t, count, v, v_token, channel, V, EVEN, 1)
                weights = values_at(t, count, precision, p_token, channel, V, EVEN, 1)
                mean, var = read_token(
                    t, mean, var, queries[0], keys[0], values[0], weights[0], read_mean, read_var,
                    channel, V, G, decay, noise, VARIANCE, PTX,
                )  # fmt: skip
    if last:
        at = (sequence * G + head) * K * V + slot[None, :] * V + channel[:, None]
        tl.store(last_mean + at, mean, mask=real)
        tl.store(last_var + at, var, mask=real)


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    precision: Tensor,
    log_decay: Tensor,
    process_noise: Tensor,
    mean: Tensor,
    var: Tensor,
    segments: Segments | None,
    variance: bool,
    kept: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Read-out mean and variance (empty where not wanted), last belief's mean and variance.

    Writes the belief before every `SPACING`-th token of a sequence into `kept`, unless it is empty.
    """
    (batch, length, heads, channels), (shared, slots) = v.shape, q.shape[2:]
    q, k, v, precision = (
        contiguous_rows(q),
        contiguous_rows(k),
        contiguous_rows(v),
        contiguous_rows(precision),
    )
    log_decay, process_noise = log_decay.contiguous(), process_noise.contiguous()
    width, size = padded(slots), block(slots, 4)
    blocks = triton.cdiv(channels, size)
    resident = _RESIDENT * multiprocessors(v.device)
    cut = plan(batch, length, tile_size(length, batch * heads * blocks, resident), segments, q)

    like = {"dtype": torch.float32, "device": v.device}
    tokens = torch.empty if segments is None else torch.zeros  # tokens outside every segment read out 0
    read_mean = tokens(v.shape, dtype=v.dtype, device=v.device)
    read_var = tokens(v.shape if variance else 0, **like)
    last_mean, last_var = torch.empty(mean.shape, **like), torch.empty(var.shape, **like)
    if segments is not None:  # an empty one ends with its prior
        last_mean.copy_(mean)
        last_var.copy_(var)

    common = {"K": slots, "P": width, "PACKED": segments is not None}
    even, uneven = channels % size == 0, ragged(length, segments)
    cells = {"BLOCK": size, "EVEN": even, "RAGGED": uneven, "SPACING": SPACING, "WINDOW": WINDOW, "PTX": supports_ptx()}
    strides = (*k.stride()[1:3], *v.stride()[1:3], *precision.stride()[1:3])
    entry_mean, entry_var = mean, var
    if not cut.single:
        maps = torch.empty(cut.count, 5, heads, channels, width, **like)
        arguments = (
            k, v, precision, log_decay, process_noise, maps, cut.table, length, cut.size, cut.tiles,
            *strides, heads, channels, heads // shared,
        )  # fmt: skip
        Launch(_map_tiles, (cut.count * blocks, heads), arguments, {"num_warps": 1, **cells, **common}).run()
        entries = torch.empty(cut.count, 2, heads, channels, width, **like)
        arguments = (maps, entries, mean, var, cut.bounds, cut.tiles, *mean.stride(), *var.stride(), heads, channels)
        options = {"BLOCK": size, "num_warps": 4, **common}
        Launch(_enter_tiles, (len(mean), heads, blocks), arguments, options).run()
        entry_mean, entry_var = (x.transpose(-1, -2) for x in entries.unbind(1))
    arguments = (
        q, k, v, precision, log_decay, process_noise, entry_mean, entry_var, read_mean, read_var, last_mean, last_var,
        kept, cut.table, length, cut.size, cut.tiles, *q.stride()[1:3], *strides,
        *entry_mean.stride(), *entry_var.stride(), heads, channels, heads // shared,
    )  # fmt: skip
    options = {"SINGLE": cut.single, "VARIANCE": variance, "KEEP": kept.numel() > 0, "num_warps": 1, **cells, **common}
    Launch(_read_out, (cut.count * blocks, heads), arguments, options).run()
    return read_mean, read_var, last_mean, last_var
