"""Forward pass of `diagonal` in Triton.

Cells (slot, channel) are independent, so a program takes a few channels with all their slots, and steps through time
with the beliefs in registers. Tiles of tokens add parallelism over time, in three launches:

1. `map_tiles`: the map of beliefs by each tile, five numbers per cell;
2. `_scan_tiles`: the belief at the start of all tiles but the first of a sequence, by applying these maps to the prior
   one after another;
3. `_read_out`: the recursion inside every tile from that belief; writes the outputs and, for the backward pass, a
   belief every `CHUNK` tokens.

A tile maps a cell of mean m and variance x, with d = 1 / (1 + x information), to

    variance = factor^2 x d + var_offset,    mean = factor (m + x info_mean) d + mean_offset

The offsets are the result for x = 0 and m = 0. All five numbers are bounded for any input, also without process noise.
(Composing the Moebius maps of equation 16 would need rescaling.)

In scratch memory, channels come first and the slots of a channel are contiguous, padded to a power of two P, so that a
thread accesses four slots in 16 bytes and few threads take part in a sum.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kalmix.ops._diagonal.cuda import cuda_kernel
from kalmix.ops._diagonal.cuda.plan import block_channels, constants
from kalmix.ops._diagonal.scratch import CHUNK, padded_slots
from kalmix.ops._diagonal.triton.loads_and_filter_step import (
    STRIDES,
    UNSPECIALIZED,
    cell_offsets,
    filter_step,
    load_belief,
    load_dynamics,
    load_keys,
    load_values,
)
from kalmix.ops._diagonal.triton.plan import (
    PREFETCH,
    channels_per_warp,
    forward_tile_size,
    is_ragged,
    locate_tile,
    plan_tiles,
)
from kalmix.ops._shared.triton.compile_and_launch import Launch
from kalmix.ops._shared.triton.ptx import supports_ptx
from kalmix.ops._shared.triton.tiles import contiguous_rows
from kalmix.segments import Segments


@triton.jit
def extend_tile_map(
    factor, information, info_mean, var_offset, mean_offset, key, value, weight, decay, noise, PTX: tl.constexpr
):
    """Extend the map of a tile by one token."""
    key, value, weight = key.to(tl.float32), value.to(tl.float32), weight.to(tl.float32)
    mean_offset, var_offset, shrinkage, innovation = filter_step(
        mean_offset, var_offset, key, weight, value, decay, noise, PTX
    )
    predicted_factor = decay * factor
    factor = predicted_factor * shrinkage
    return (
        factor,
        information + predicted_factor * factor * (key * (key * weight)),
        info_mean + factor * innovation,
        var_offset,
        mean_offset,
    )


@triton.jit(do_not_specialize=UNSPECIALIZED)
def map_tiles(
    k, v, precision, log_decay, noise, maps, tile_table,
    length, size, tiles, k_token: tl.constexpr, k_head, v_token: tl.constexpr, v_head,
    p_token: tl.constexpr, p_head, G: tl.constexpr, V: tl.constexpr, GROUP,
    K: tl.constexpr, P: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr, PACKED: tl.constexpr,
    EVEN: tl.constexpr, RAGGED: tl.constexpr, PREFETCH: tl.constexpr, PTX: tl.constexpr, EVERY: tl.constexpr,
):  # fmt: skip
    blocks = tl.cdiv(V, BLOCK)
    index = tl.program_id(0) // blocks
    head = tl.program_id(1)
    channel = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    slot = tl.arange(0, P)
    _sequence, token, count, _begins, last, _stored_index = locate_tile(
        tile_table, index, length, size, tiles, CHUNK, PACKED
    )
    unused = count == 0
    if not EVERY:
        unused = unused | last  # no later tile needs the map
    if unused:
        return
    decay, noise = load_dynamics(log_decay, noise, head, channel, V, K, P)
    k += token * k_token + head // GROUP * k_head
    v += token * v_token + head * v_head
    precision += token * p_token + head * p_head
    var_offset = tl.zeros([BLOCK, P], tl.float32)
    mean_offset = tl.zeros([BLOCK, P], tl.float32)
    factor = tl.full([BLOCK, P], 1.0, tl.float32)
    information = tl.zeros([BLOCK, P], tl.float32)
    info_mean = tl.zeros([BLOCK, P], tl.float32)
    next_keys = load_keys(0, count, k, k_token, slot, channel, K, P, PREFETCH, RAGGED)
    next_values = load_values(0, count, v, v_token, channel, V, EVEN, PREFETCH, RAGGED)
    next_weights = load_values(0, count, precision, p_token, channel, V, EVEN, PREFETCH, RAGGED)
    whole = count // PREFETCH * PREFETCH
    for start in range(0, whole, PREFETCH):
        keys, values, weights = next_keys, next_values, next_weights
        next_keys = load_keys(start + PREFETCH, count, k, k_token, slot, channel, K, P, PREFETCH, RAGGED)
        next_values = load_values(start + PREFETCH, count, v, v_token, channel, V, EVEN, PREFETCH, RAGGED)
        next_weights = load_values(start + PREFETCH, count, precision, p_token, channel, V, EVEN, PREFETCH, RAGGED)
        for i in tl.static_range(PREFETCH):
            factor, information, info_mean, var_offset, mean_offset = extend_tile_map(
                factor,
                information,
                info_mean,
                var_offset,
                mean_offset,
                keys[i],
                values[i],
                weights[i],
                decay,
                noise,
                PTX,
            )
    if RAGGED:
        for t in range(whole, count):
            keys = load_keys(t, count, k, k_token, slot, channel, K, P, 1, False)
            values = load_values(t, count, v, v_token, channel, V, EVEN, 1, False)
            weights = load_values(t, count, precision, p_token, channel, V, EVEN, 1, False)
            factor, information, info_mean, var_offset, mean_offset = extend_tile_map(
                factor,
                information,
                info_mean,
                var_offset,
                mean_offset,
                keys[0],
                values[0],
                weights[0],
                decay,
                noise,
                PTX,
            )
    inside = (channel < V)[:, None] & (slot < P)[None, :]
    plane = G * V * P
    maps += index.to(tl.int64) * 5 * plane + cell_offsets(head, channel, V, P)
    tl.store(maps, factor, mask=inside)
    tl.store(maps + plane, information, mask=inside)
    tl.store(maps + 2 * plane, info_mean, mask=inside)
    tl.store(maps + 3 * plane, var_offset, mask=inside)
    tl.store(maps + 4 * plane, mean_offset, mask=inside)


@triton.jit(do_not_specialize=[*UNSPECIALIZED, *STRIDES])
def _scan_tiles(
    maps, entries, mean, var, final_mean, final_var, sequence_table, tiles,
    mean_n, mean_g, mean_k, mean_v, var_n, var_g, var_k, var_v, G, V,
    K: tl.constexpr, P: tl.constexpr, BLOCK: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Store the belief at the start of all tiles but the first, for one sequence and head and some channels.

    The final belief of an empty sequence is its prior.
    """
    sequence = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    channel = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.arange(0, P)
    inside = (channel < V)[:, None] & (slot < P)[None, :]
    real = (channel < V)[:, None] & (slot < K)[None, :]
    needed = real
    if PACKED:
        first, end = tl.load(sequence_table + 5 * sequence), tl.load(sequence_table + 5 * sequence + 3)
        needed = real & (end - first != 1)
    else:
        first, end = sequence * tiles, sequence * tiles + tiles
    m = load_belief(mean, sequence, head, channel, slot, mean_n, mean_g, mean_k, mean_v, needed)
    x = load_belief(var, sequence, head, channel, slot, var_n, var_g, var_k, var_v, needed)
    if PACKED:
        to = (sequence * G + head) * K * V + slot[None, :] * V + channel[:, None]
        tl.store(final_mean + to, m, mask=real & (end == first))
        tl.store(final_var + to, x, mask=real & (end == first))
    plane = G * V * P
    at = cell_offsets(head, channel, V, P)
    for index in tl.range(first, end, num_stages=4):
        factor = tl.load(maps + index * 5 * plane + at, mask=inside & (index + 1 < end), other=0.0)
        information = tl.load(maps + (index * 5 + 1) * plane + at, mask=inside & (index + 1 < end), other=0.0)
        info_mean = tl.load(maps + (index * 5 + 2) * plane + at, mask=inside & (index + 1 < end), other=0.0)
        var_offset = tl.load(maps + (index * 5 + 3) * plane + at, mask=inside & (index + 1 < end), other=0.0)
        mean_offset = tl.load(maps + (index * 5 + 4) * plane + at, mask=inside & (index + 1 < end), other=0.0)
        tl.store(entries + index * 2 * plane + at, m, mask=inside & (index > first))
        tl.store(entries + (index * 2 + 1) * plane + at, x, mask=inside & (index > first))
        shrunk_factor = factor / (1.0 + x * information)
        m = (m + x * info_mean) * shrunk_factor + mean_offset
        x = factor * x * shrunk_factor + var_offset


@triton.jit
def filter_token(
    t, mean, var, query, key, value, weight, read_mean, read_var, channel, V, G, decay, noise,
    VARIANCE: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Filter one token and store its read-out."""
    query, key, value, weight = query.to(tl.float32), key.to(tl.float32), value.to(tl.float32), weight.to(tl.float32)
    mean, var, _shrinkage, _innovation = filter_step(mean, var, key, weight, value, decay, noise, PTX)
    at = t * (G * V) + channel
    tl.store(read_mean + at, tl.sum(query * mean, 1).to(read_mean.dtype.element_ty), mask=channel < V)
    if VARIANCE:
        tl.store(read_var + at, tl.sum(query * query * var, 1), mask=channel < V)
    return mean, var


@triton.jit(do_not_specialize=[*UNSPECIALIZED, *STRIDES])
def _read_out(
    q, k, v, precision, log_decay, noise, prior_mean, prior_var, entries, read_mean, read_var, final_mean, final_var,
    stored, tile_table, length, size, tiles, q_token: tl.constexpr, q_head, k_token: tl.constexpr, k_head,
    v_token: tl.constexpr, v_head, p_token: tl.constexpr, p_head,
    mean_n, mean_g, mean_k, mean_v, var_n, var_g, var_k, var_v, G: tl.constexpr, V: tl.constexpr, GROUP,
    K: tl.constexpr, P: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr, PACKED: tl.constexpr,
    EVEN: tl.constexpr, RAGGED: tl.constexpr, PREFETCH: tl.constexpr, SINGLE: tl.constexpr, VARIANCE: tl.constexpr,
    STORE: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    blocks = tl.cdiv(V, BLOCK)
    index = tl.program_id(0) // blocks
    head = tl.program_id(1)
    channel = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    slot = tl.arange(0, P)
    inside = (channel < V)[:, None] & (slot < P)[None, :]
    real = (channel < V)[:, None] & (slot < K)[None, :]
    sequence, token, count, begins, last, stored_index = locate_tile(
        tile_table, index, length, size, tiles, CHUNK, PACKED
    )
    plane = G * V * P
    from_prior = real
    if not SINGLE:  # tiles other than the first start from a result of `_scan_tiles`
        from_prior = real & begins
    mean = load_belief(prior_mean, sequence, head, channel, slot, mean_n, mean_g, mean_k, mean_v, from_prior)
    var = load_belief(prior_var, sequence, head, channel, slot, var_n, var_g, var_k, var_v, from_prior)
    if not SINGLE:
        entries += index.to(tl.int64) * 2 * plane + cell_offsets(head, channel, V, P)
        from_scan = inside & (begins == 0) & (count > 0)
        mean = tl.where(begins, mean, tl.load(entries, mask=from_scan, other=0.0))
        var = tl.where(begins, var, tl.load(entries + plane, mask=from_scan, other=0.0))
    decay, noise = load_dynamics(log_decay, noise, head, channel, V, K, P)
    q += token * q_token + head // GROUP * q_head
    k += token * k_token + head // GROUP * k_head
    v += token * v_token + head * v_head
    precision += token * p_token + head * p_head
    read_mean += (token * G + head) * V
    read_var += (token * G + head) * V
    stored += stored_index * 2 * plane + cell_offsets(head, channel, V, P)
    for chunk in range(0, count, CHUNK):
        if STORE:
            tl.store(stored, mean, mask=inside)
            tl.store(stored + plane, var, mask=inside)
            stored += 2 * plane
        end = tl.minimum(chunk + CHUNK, count)
        whole = chunk + (end - chunk) // PREFETCH * PREFETCH
        next_queries = load_keys(chunk, count, q, q_token, slot, channel, K, P, PREFETCH, RAGGED)
        next_keys = load_keys(chunk, count, k, k_token, slot, channel, K, P, PREFETCH, RAGGED)
        next_values = load_values(chunk, count, v, v_token, channel, V, EVEN, PREFETCH, RAGGED)
        next_weights = load_values(chunk, count, precision, p_token, channel, V, EVEN, PREFETCH, RAGGED)
        for start in range(chunk, whole, PREFETCH):
            queries, keys, values, weights = next_queries, next_keys, next_values, next_weights
            next_queries = load_keys(start + PREFETCH, count, q, q_token, slot, channel, K, P, PREFETCH, RAGGED)
            next_keys = load_keys(start + PREFETCH, count, k, k_token, slot, channel, K, P, PREFETCH, RAGGED)
            next_values = load_values(start + PREFETCH, count, v, v_token, channel, V, EVEN, PREFETCH, RAGGED)
            next_weights = load_values(start + PREFETCH, count, precision, p_token, channel, V, EVEN, PREFETCH, RAGGED)
            for i in tl.static_range(PREFETCH):
                mean, var = filter_token(
                    start + i, mean, var, queries[i], keys[i], values[i], weights[i], read_mean, read_var,
                    channel, V, G, decay, noise, VARIANCE, PTX,
                )  # fmt: skip
        if RAGGED:
            for t in range(whole, end):
                queries = load_keys(t, count, q, q_token, slot, channel, K, P, 1, False)
                keys = load_keys(t, count, k, k_token, slot, channel, K, P, 1, False)
                values = load_values(t, count, v, v_token, channel, V, EVEN, 1, False)
                weights = load_values(t, count, precision, p_token, channel, V, EVEN, 1, False)
                mean, var = filter_token(
                    t, mean, var, queries[0], keys[0], values[0], weights[0], read_mean, read_var,
                    channel, V, G, decay, noise, VARIANCE, PTX,
                )  # fmt: skip
    at = (sequence * G + head) * K * V + slot[None, :] * V + channel[:, None]
    tl.store(final_mean + at, mean, mask=real & last)
    tl.store(final_var + at, var, mask=real & last)


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
    stored: Tensor,
    cuda: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the mean and variance of the read-out (empty without `variance`) and those of the final belief.

    Writes the belief before every `CHUNK`-th token of a sequence to `stored`, unless `stored` is empty. `cuda` uses
    `cuda/forward.cu` in place of `_read_out`.
    """
    (batch, length, heads, channels), (shared, slots) = v.shape, q.shape[2:]
    q, k, v, precision = (contiguous_rows(x) for x in (q, k, v, precision))
    log_decay, process_noise = log_decay.contiguous(), process_noise.contiguous()
    width, size = padded_slots(slots), channels_per_warp(slots, 4)
    blocks = -(-channels // size)
    plan = plan_tiles(batch, length, forward_tile_size(v, slots), segments, q)

    like = {"dtype": torch.float32, "device": v.device}
    tokens = torch.empty if segments is None else torch.zeros  # tokens outside every segment have mean and variance 0
    read_mean = tokens(v.shape, dtype=v.dtype, device=v.device)
    read_var = tokens(v.shape if variance else 0, **like)
    final_mean, final_var = (torch.empty(x.shape, **like) for x in (mean, var))
    if segments is not None and plan.single_tile:  # the final belief of an empty segment is its prior
        final_mean.copy_(mean)
        final_var.copy_(var)

    common = {"K": slots, "P": width, "PACKED": segments is not None}
    even, uneven = channels % size == 0, is_ragged(length, segments)
    cells = {"BLOCK": size, "EVEN": even, "RAGGED": uneven, "CHUNK": CHUNK, "PREFETCH": PREFETCH, "PTX": supports_ptx()}
    strides = (*k.stride()[1:3], *v.stride()[1:3], *precision.stride()[1:3])
    entries = mean
    if not plan.single_tile:
        maps = torch.empty(plan.num_tiles, 5, heads, channels, width, **like)
        arguments = (
            k, v, precision, log_decay, process_noise, maps, plan.tile_table, length, plan.size, plan.tiles,
            *strides, heads, channels, heads // shared,
        )  # fmt: skip
        Launch(
            map_tiles, (plan.num_tiles * blocks, heads), arguments, {"num_warps": 1, "EVERY": False, **cells, **common}
        ).run()
        entries = torch.empty(plan.num_tiles, 2, heads, channels, width, **like)
        arguments = (
            maps,
            entries,
            mean,
            var,
            final_mean,
            final_var,
            plan.sequence_table,
            plan.tiles,
            *mean.stride(),
            *var.stride(),
            heads,
            channels,
        )
        scan_size = size if segments is None else 4 * size  # fewer programs, since there may be many sequences
        options = {"BLOCK": scan_size, "num_warps": 4, **common}
        Launch(_scan_tiles, (len(mean), heads, -(-channels // scan_size)), arguments, options).run()
    arguments = (
        q, k, v, precision, log_decay, process_noise, mean, var, entries, read_mean, read_var, final_mean, final_var,
        stored, plan.tile_table, length, plan.size, plan.tiles, *q.stride()[1:3], *strides,
        *mean.stride(), *var.stride(), heads, channels, heads // shared,
    )  # fmt: skip
    options = {
        "SINGLE": plan.single_tile,
        "VARIANCE": variance,
        "STORE": stored.numel() > 0,
        "num_warps": 1,
        **cells,
        **common,
    }
    if cuda:
        arguments = (
            q, k, v, precision, log_decay.float(), process_noise.float(), mean, var, entries, read_mean, read_var,
            final_mean, final_var, stored, plan.tile_table, length, plan.size, plan.tiles, q.stride(2),
            k.stride(2), v.stride(2), precision.stride(2), *mean.stride(), *var.stride(), heads // shared,
        )  # fmt: skip
        options = {name: options[name] for name in ("SINGLE", "VARIANCE", "STORE", "RAGGED")}
        options |= constants({"Q_TOKEN": q, "K_TOKEN": k, "V_TOKEN": v, "P_TOKEN": precision}, segments)
        blocks = -(-channels // block_channels(slots))
        Launch(cuda_kernel("forward"), (plan.num_tiles * blocks, heads), arguments, options).run()
    else:
        Launch(_read_out, (plan.num_tiles * blocks, heads), arguments, options).run()
    return read_mean, read_var, final_mean, final_var
