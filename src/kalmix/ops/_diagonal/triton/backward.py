"""Backward pass of `diagonal` in Triton, exact and parallel over time.

Let (gm, gs) be the gradients with respect to a posterior (mean, variance). A tile maps those at its end to its start:

    gm_start = gm + D_m gm_end,   gs_start = gs + D_x gm_end + D_m^2 gs_end

Here gm and gs come from the read-outs of the tile, and D_m (`mean_factor`) and D_x are the derivatives of the mean at
its end with respect to mean and variance at its start. D_x / D_m (`var_ratio`) is a sum over tokens. There are three
launches:

1. `_map_tile_grads`: these four numbers for every tile; if NO_PRIOR, the prior has no gradient, and the first tile of a
   sequence is left out. Derivatives with respect to the belief at the start accumulate forward in time, so nothing has
   to be stored;
2. `_scan_tile_grads`: the gradients at the end of every tile, from the last tile to the first, and those of the prior;
3. `tile_gradients`: the backward pass inside every tile. Beliefs are recomputed from the stored ones; those of
   `PREFETCH` tokens stay in registers.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kalmix.ops._diagonal.cuda import cuda_kernel
from kalmix.ops._diagonal.cuda.plan import constants, group_tokens, num_splits
from kalmix.ops._diagonal.cuda.plan import tile_size as cuda_tile_size
from kalmix.ops._diagonal.scratch import CHUNK, padded_slots
from kalmix.ops._diagonal.triton.gradients import tile_gradients
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
    TilePlan,
    channels_per_warp,
    is_ragged,
    locate_tile,
    plan_tiles,
)
from kalmix.ops._shared.gpu import num_multiprocessors
from kalmix.ops._shared.triton.compile_and_launch import Launch
from kalmix.ops._shared.triton.ptx import supports_ptx
from kalmix.ops._shared.triton.tiles import contiguous_rows
from kalmix.segments import Segments

_RESIDENT_WARPS = 8  # warps of `tile_gradients` per multiprocessor, which use all registers a thread can have


@triton.jit
def accumulate_token(
    mean, var, mean_factor, var_ratio, tile_grad_mean, tile_grad_var, query, key, value, weight, grad, grad_var,
    decay, noise, VARIANCE: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Extend a tile by one token: its belief, its derivatives, and the gradients with respect to its start."""
    query, key, value, weight = query.to(tl.float32), key.to(tl.float32), value.to(tl.float32), weight.to(tl.float32)
    mean, var, shrinkage, innovation = filter_step(mean, var, key, weight, value, decay, noise, PTX)
    mean_factor *= decay * shrinkage
    var_ratio += mean_factor * innovation
    read_factor = mean_factor * query
    grad_mean = read_factor * grad.to(tl.float32)
    tile_grad_mean += grad_mean
    tile_grad_var += var_ratio * grad_mean
    if VARIANCE:
        tile_grad_var += read_factor * read_factor * grad_var.to(tl.float32)
    return mean, var, mean_factor, var_ratio, tile_grad_mean, tile_grad_var


@triton.jit(do_not_specialize=UNSPECIALIZED)
def _map_tile_grads(
    q, k, v, precision, log_decay, noise, stored, grad_mean, grad_var, maps, tile_table,
    length, size, tiles, q_token: tl.constexpr, q_head, k_token: tl.constexpr, k_head, v_token: tl.constexpr, v_head,
    p_token: tl.constexpr, p_head, gm_token: tl.constexpr, gm_head, gv_token: tl.constexpr, gv_head,
    G: tl.constexpr, V: tl.constexpr, GROUP,
    K: tl.constexpr, P: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr, PACKED: tl.constexpr,
    EVEN: tl.constexpr, RAGGED: tl.constexpr, PREFETCH: tl.constexpr, VARIANCE: tl.constexpr, NO_PRIOR: tl.constexpr,
    PTX: tl.constexpr,
):  # fmt: skip
    blocks = tl.cdiv(V, BLOCK)
    index = tl.program_id(0) // blocks
    head = tl.program_id(1)
    channel = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    slot = tl.arange(0, P)
    _sequence, token, count, begins, _last, stored_index = locate_tile(
        tile_table, index, length, size, tiles, CHUNK, PACKED
    )
    unused = count == 0
    if NO_PRIOR:
        unused = unused | begins
    if unused:
        return
    inside = (channel < V)[:, None] & (slot < P)[None, :]
    plane = G * V * P
    at = cell_offsets(head, channel, V, P)
    stored += stored_index * 2 * plane + at
    mean = tl.load(stored, mask=inside, other=0.0)
    var = tl.load(stored + plane, mask=inside, other=0.0)
    decay, noise = load_dynamics(log_decay, noise, head, channel, V, K, P)
    q += token * q_token + head // GROUP * q_head
    k += token * k_token + head // GROUP * k_head
    v += token * v_token + head * v_head
    precision += token * p_token + head * p_head
    grad_mean += token * gm_token + head * gm_head
    grad_var += token * gv_token + head * gv_head
    mean_factor = tl.full([BLOCK, P], 1.0, tl.float32)
    var_ratio = tl.zeros([BLOCK, P], tl.float32)
    tile_grad_mean = tl.zeros([BLOCK, P], tl.float32)
    tile_grad_var = tl.zeros([BLOCK, P], tl.float32)
    next_queries = load_keys(0, count, q, q_token, slot, channel, K, P, PREFETCH, RAGGED)
    next_keys = load_keys(0, count, k, k_token, slot, channel, K, P, PREFETCH, RAGGED)
    next_values = load_values(0, count, v, v_token, channel, V, EVEN, PREFETCH, RAGGED)
    next_weights = load_values(0, count, precision, p_token, channel, V, EVEN, PREFETCH, RAGGED)
    next_grads = load_values(0, count, grad_mean, gm_token, channel, V, EVEN, PREFETCH, RAGGED)
    next_var_grads = load_values(0, count, grad_var, gv_token, channel, V, EVEN, PREFETCH, RAGGED)
    whole = count // PREFETCH * PREFETCH
    for start in range(0, whole, PREFETCH):
        after = start + PREFETCH
        queries, keys, values, weights = next_queries, next_keys, next_values, next_weights
        grads, var_grads = next_grads, next_var_grads
        next_queries = load_keys(after, count, q, q_token, slot, channel, K, P, PREFETCH, RAGGED)
        next_keys = load_keys(after, count, k, k_token, slot, channel, K, P, PREFETCH, RAGGED)
        next_values = load_values(after, count, v, v_token, channel, V, EVEN, PREFETCH, RAGGED)
        next_weights = load_values(after, count, precision, p_token, channel, V, EVEN, PREFETCH, RAGGED)
        next_grads = load_values(after, count, grad_mean, gm_token, channel, V, EVEN, PREFETCH, RAGGED)
        next_var_grads = load_values(after, count, grad_var, gv_token, channel, V, EVEN, PREFETCH, RAGGED)
        for i in tl.static_range(PREFETCH):
            mean, var, mean_factor, var_ratio, tile_grad_mean, tile_grad_var = accumulate_token(
                mean, var, mean_factor, var_ratio, tile_grad_mean, tile_grad_var,
                queries[i], keys[i], values[i], weights[i], grads[i], var_grads[i], decay, noise, VARIANCE, PTX,
            )  # fmt: skip
    if RAGGED:
        for t in range(whole, count):
            queries = load_keys(t, count, q, q_token, slot, channel, K, P, 1, False)
            keys = load_keys(t, count, k, k_token, slot, channel, K, P, 1, False)
            values = load_values(t, count, v, v_token, channel, V, EVEN, 1, False)
            weights = load_values(t, count, precision, p_token, channel, V, EVEN, 1, False)
            grads = load_values(t, count, grad_mean, gm_token, channel, V, EVEN, 1, False)
            var_grads = load_values(t, count, grad_var, gv_token, channel, V, EVEN, 1, False)
            mean, var, mean_factor, var_ratio, tile_grad_mean, tile_grad_var = accumulate_token(
                mean, var, mean_factor, var_ratio, tile_grad_mean, tile_grad_var,
                queries[0], keys[0], values[0], weights[0], grads[0], var_grads[0], decay, noise, VARIANCE, PTX,
            )  # fmt: skip
    maps += index.to(tl.int64) * 4 * plane + at
    tl.store(maps, tile_grad_mean, mask=inside)
    tl.store(maps + plane, tile_grad_var, mask=inside)
    tl.store(maps + 2 * plane, mean_factor, mask=inside)
    tl.store(maps + 3 * plane, mean_factor * var_ratio, mask=inside)


@triton.jit(do_not_specialize=[*UNSPECIALIZED, *STRIDES])
def _scan_tile_grads(
    maps, grad_exits, grad_final_mean, grad_final_var, grad_mean, grad_var, sequence_table, tiles,
    mean_n, mean_g, mean_k, mean_v, var_n, var_g, var_k, var_v, G, V,
    K: tl.constexpr, P: tl.constexpr, BLOCK: tl.constexpr, PACKED: tl.constexpr, NO_PRIOR: tl.constexpr,
):  # fmt: skip
    sequence = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    channel = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.arange(0, P)
    inside = (channel < V)[:, None] & (slot < P)[None, :]
    real = (channel < V)[:, None] & (slot < K)[None, :]
    gm = load_belief(grad_final_mean, sequence, head, channel, slot, mean_n, mean_g, mean_k, mean_v, real)
    gs = load_belief(grad_final_var, sequence, head, channel, slot, var_n, var_g, var_k, var_v, real)
    if PACKED:
        first, end = tl.load(sequence_table + 5 * sequence), tl.load(sequence_table + 5 * sequence + 3)
    else:
        first, end = sequence * tiles, sequence * tiles + tiles
    plane = G * V * P
    at = cell_offsets(head, channel, V, P)
    for back in tl.range(0, end - first, num_stages=4):
        index = end - 1 - back
        mapped = inside
        if NO_PRIOR:
            mapped = inside & (index > first)
        tile_grad_mean = tl.load(maps + index * 4 * plane + at, mask=mapped, other=0.0)
        tile_grad_var = tl.load(maps + (index * 4 + 1) * plane + at, mask=mapped, other=0.0)
        mean_factor = tl.load(maps + (index * 4 + 2) * plane + at, mask=mapped, other=0.0)
        var_coupling = tl.load(maps + (index * 4 + 3) * plane + at, mask=mapped, other=0.0)
        tl.store(grad_exits + index * 2 * plane + at, gm, mask=inside)
        tl.store(grad_exits + (index * 2 + 1) * plane + at, gs, mask=inside)
        gs = tile_grad_var + var_coupling * gm + mean_factor * mean_factor * gs
        gm = tile_grad_mean + mean_factor * gm
    if not NO_PRIOR:
        at = (sequence * G + head) * K * V + slot[None, :] * V + channel[:, None]
        tl.store(grad_mean + at, gm, mask=real)
        tl.store(grad_var + at, gs, mask=real)


def backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    precision: Tensor,
    log_decay: Tensor,
    process_noise: Tensor,
    stored: Tensor,
    segments: Segments | None,
    grad_mean: Tensor,
    grad_var: Tensor | None,
    grad_final_mean: Tensor,
    grad_final_var: Tensor,
    cuda: bool,
    no_prior: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of q, k, v, precision, log_decay, process_noise and of the prior's mean and variance.

    The latter are empty if `no_prior`: a default prior has no gradient. `cuda` uses `cuda/backward.cu` in place of
    `tile_gradients`.
    """
    (batch, length, heads, channels), (shared, slots) = v.shape, q.shape[2:]
    like = {"dtype": torch.float32, "device": v.device}
    kinds = [x.dtype for x in (q, k, log_decay, process_noise)]
    q, k, v, precision, grad_mean = (contiguous_rows(x) for x in (q, k, v, precision, grad_mean))
    variance = grad_var is not None
    grad_var = contiguous_rows(grad_var) if grad_var is not None else grad_mean
    log_decay, process_noise = log_decay.contiguous(), process_noise.contiguous()
    width = padded_slots(slots)

    resident, size = _RESIDENT_WARPS * num_multiprocessors(v.device), channels_per_warp(slots, 8)
    if cuda:
        splits = num_splits(channels, slots)
        plan = plan_tiles(batch, length, cuda_tile_size(v, slots), segments, q)
    else:  # one round of warps; each takes a tile and every `splits`-th block of channels
        plan = plan_tiles(batch, length, max(64, -(-batch * length * heads // resident)), segments, q)
        splits = min(-(-channels // size), channels // (2 * slots), resident // (plan.num_tiles * heads))
        splits = max(1, splits)  # `splits` also bounds the memory for partial sums of dq and dk

    common = {"K": slots, "P": width, "PACKED": segments is not None}
    loops = {"CHUNK": CHUNK, "PREFETCH": PREFETCH, "RAGGED": is_ragged(length, segments)}
    cells = {"VARIANCE": variance, "PTX": supports_ptx(), **loops}
    strides = [stride for x in (q, k, v, precision, grad_mean, grad_var) for stride in x.stride()[1:3]]
    grad_exits = torch.empty(plan.num_tiles, 2, heads, channels, width, **like)
    single = cuda and plan.single_tile
    shape = grad_final_mean.shape if single or not no_prior else (0,)
    prior_mean, prior_var = torch.empty(shape, **like), torch.empty(shape, **like)
    if not single:
        signals = q, k, v, precision, log_decay, process_noise
        grads = grad_mean, grad_var, grad_final_mean, grad_final_var
        _scan(signals, stored, grads, plan, segments, variance, (grad_exits, prior_mean, prior_var), no_prior)
    elif segments is not None and not no_prior:  # the gradient of an empty segment's final belief is that of its prior
        prior_mean.copy_(grad_final_mean)
        prior_var.copy_(grad_final_var)

    tokens = torch.empty if segments is None else torch.zeros  # tokens outside every segment have zero gradient
    dv = tokens(v.shape, dtype=v.dtype, device=v.device)
    dprecision = tokens(v.shape, dtype=precision.dtype, device=v.device)
    pair = (2, slots) if cuda else (slots, 2)
    dqk = tokens(splits, batch, length, shared, heads // shared, *pair, **like)
    if cuda:
        arguments = (
            q, k, v, precision, log_decay.float(), process_noise.float(), stored, grad_exits, grad_final_mean,
            grad_final_var, grad_mean, grad_var, dv, dprecision, dqk, prior_mean, prior_var, plan.tile_table,
            length, plan.size, plan.tiles, splits, batch * length, *strides[1::2], *grad_final_mean.stride(),
            *grad_final_var.stride(), heads // shared,
        )  # fmt: skip
        group = group_tokens(slots)
        options = {"VARIANCE": variance, "SINGLE": single, "TOKENS": group}
        options["RAGGED"] = is_ragged(length, segments, group)
        signals = {"Q_TOKEN": q, "K_TOKEN": k, "V_TOKEN": v, "P_TOKEN": precision}
        options |= constants({**signals, "GM_TOKEN": grad_mean, "GV_TOKEN": grad_var}, segments)
        Launch(cuda_kernel("backward"), (plan.num_tiles * splits, heads), arguments, options).run()
    else:
        states = torch.empty(plan.num_tiles * splits, heads, CHUNK // PREFETCH, 2, size, width, **like)
        arguments = (
            q, k, v, precision, log_decay, process_noise, stored, states, grad_exits, grad_mean, grad_var, dv,
            dprecision, dqk, plan.tile_table, length, plan.size, plan.tiles, splits, batch * length, *strides, heads,
            channels, heads // shared,
        )  # fmt: skip
        options = {"BLOCK": size, "EVEN": channels % size == 0, "num_warps": 1, **cells, **common}
        Launch(tile_gradients, (plan.num_tiles * splits, heads), arguments, options).run()
        del states
    del arguments
    ddynamics = grad_exits.sum(0)[..., :slots].transpose(-1, -2)  # the kernel replaced the gradients by these
    sums = (*dqk.sum((0, 4)).unbind(-2 if cuda else -1), *ddynamics.unbind(0))
    dq, dk, ddecay, dnoise = (
        torch.empty(x.shape, dtype=kind, device=x.device).copy_(x) for x, kind in zip(sums, kinds, strict=True)
    )
    if no_prior:
        prior_mean, prior_var = (x.new_empty(0) for x in (prior_mean, prior_var))
    return dq, dk, dv, dprecision, ddecay, dnoise, prior_mean, prior_var


def backward_to_prior(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    precision: Tensor,
    log_decay: Tensor,
    process_noise: Tensor,
    stored: Tensor,
    segments: Segments | None,
    grad_mean: Tensor,
    grad_var: Tensor | None,
    grad_final_mean: Tensor,
    grad_final_var: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return the gradients of the prior's mean and variance alone, by the first two launches of `backward`."""
    (batch, length, heads, channels), slots = v.shape, q.shape[3]
    like = {"dtype": torch.float32, "device": v.device}
    variance = grad_var is not None
    q, k, v, precision, grad_mean = (contiguous_rows(x) for x in (q, k, v, precision, grad_mean))
    grad_var = contiguous_rows(grad_var) if grad_var is not None else grad_mean
    resident = _RESIDENT_WARPS * num_multiprocessors(v.device)
    plan = plan_tiles(batch, length, max(64, -(-batch * length * heads // resident)), segments, q)
    grad_exits = torch.empty(plan.num_tiles, 2, heads, channels, padded_slots(slots), **like)
    prior_mean, prior_var = torch.empty(grad_final_mean.shape, **like), torch.empty(grad_final_var.shape, **like)
    signals = q, k, v, precision, log_decay.contiguous(), process_noise.contiguous()
    grads = grad_mean, grad_var, grad_final_mean, grad_final_var
    _scan(signals, stored, grads, plan, segments, variance, (grad_exits, prior_mean, prior_var))
    return prior_mean, prior_var


def _scan(
    signals: tuple[Tensor, ...],
    stored: Tensor,
    grads: tuple[Tensor, ...],
    plan: TilePlan,
    segments: Segments | None,
    variance: bool,
    results: tuple[Tensor, Tensor, Tensor],
    no_prior: bool = False,
) -> None:
    """Compute the gradients at the end of every tile and, unless `no_prior`, of the prior, into `results`."""
    q, k, v, precision = signals[:4]
    grad_mean, grad_var, grad_final_mean, grad_final_var = grads
    (_, length, heads, channels), (shared, slots) = v.shape, q.shape[2:]
    width, block = padded_slots(slots), channels_per_warp(slots, 4)
    maps = torch.empty(plan.num_tiles, 4, heads, channels, width, dtype=torch.float32, device=v.device)
    common = {"BLOCK": block, "K": slots, "P": width, "PACKED": segments is not None}
    arguments = (
        *signals, stored, grad_mean, grad_var, maps, plan.tile_table, length, plan.size, plan.tiles,
        *(stride for x in (q, k, v, precision, grad_mean, grad_var) for stride in x.stride()[1:3]),
        heads, channels, heads // shared,
    )  # fmt: skip
    options = {"EVEN": channels % block == 0, "VARIANCE": variance, "PTX": supports_ptx(), "num_warps": 1, **common}
    options |= {"CHUNK": CHUNK, "PREFETCH": PREFETCH, "RAGGED": is_ragged(length, segments), "NO_PRIOR": no_prior}
    Launch(_map_tile_grads, (plan.num_tiles * -(-channels // block), heads), arguments, options).run()
    arguments = (
        maps, results[0], grad_final_mean, grad_final_var, *results[1:], plan.sequence_table, plan.tiles,
        *grad_final_mean.stride(), *grad_final_var.stride(), heads, channels,
    )  # fmt: skip
    grid = (len(grad_final_mean), heads, -(-channels // block))
    Launch(_scan_tile_grads, grid, arguments, {"num_warps": 4, "NO_PRIOR": no_prior, **common}).run()
