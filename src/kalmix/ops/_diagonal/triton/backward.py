"""`diagonal` in Triton: the backward pass, exact and parallel over time.

With adjoints (gm, gs) of a posterior (mean, variance), one token takes them to those of its predecessor, and over a
tile that is affine in the adjoints leaving the tile:

    gm_in = gm + D_m gm_out,   gs_in = gs + D_x gm_out + D_m^2 gs_out

where D_m and D_x are the derivatives of the mean leaving by the mean and the variance entering. Three launches again:

1. `_map_adjoints`: `gm`, `gs`, `D_m` and `D_x` of every tile. Derivatives by the entry belief accumulate *forwards*
   in time, so nothing has to be kept;
2. `_enter_adjoints`: the adjoints leaving every tile, from the last to the first, and the prior's gradient;
3. `gradients`: backwards through each tile with its true adjoints. Beliefs are recomputed from the kept ones, and
   those of the few tokens at hand stay in registers.
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
from kalmix.ops._diagonal.triton.gradients import gradients
from kalmix.ops._diagonal.triton.plan import WINDOW, block, locate_tile, multiprocessors, plan, ragged
from kalmix.ops._shared.triton.compile_and_launch import Launch
from kalmix.ops._shared.triton.ptx import supports_ptx
from kalmix.ops._shared.triton.tiles import contiguous_rows
from kalmix.segments import Segments

_RESIDENT = 8  # warps of `gradients` that fit on a multiprocessor: all the registers a thread can have


@triton.jit
def adjoint_token(
    t, mean, var, by_mean, by_var, adjoint_mean, adjoint_var, query, key, value, weight, grad, grad_var, gv_token,
    channel, V, decay, noise, EVEN: tl.constexpr, VARIANCE: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """One token later: the belief, its derivatives by the entry belief, and the adjoints of that."""
    query, key, value, weight = query.to(tl.float32), key.to(tl.float32), value.to(tl.float32), weight.to(tl.float32)
    mean, var, shrink, surprise = step(mean, var, key, weight, value, decay, noise, PTX)
    slope = decay * shrink
    by_mean *= slope
    by_var = slope * by_var + by_mean * by_mean * surprise
    asked = query * grad.to(tl.float32)
    adjoint_mean += by_mean * asked
    adjoint_var += by_var * asked
    if VARIANCE:
        grads = values_at(t, t + 1, grad_var, gv_token, channel, V, EVEN, 1)
        adjoint_var += by_mean * by_mean * (query * query * grads[0].to(tl.float32))
    return mean, var, by_mean, by_var, adjoint_mean, adjoint_var


@triton.jit(do_not_specialize=UNSPECIALIZED)
def _map_adjoints(
    q, k, v, precision, log_decay, noise, kept, grad_mean, grad_var, maps, table,
    length, size, tiles, q_token, q_head, k_token, k_head, v_token, v_head, p_token, p_head, gm_token, gm_head,
    gv_token, gv_head, G, V, SHARE,
    K: tl.constexpr, P: tl.constexpr, BLOCK: tl.constexpr, SPACING: tl.constexpr, PACKED: tl.constexpr,
    EVEN: tl.constexpr, RAGGED: tl.constexpr, WINDOW: tl.constexpr, VARIANCE: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    blocks = tl.cdiv(V, BLOCK)
    index = tl.program_id(0) // blocks
    head = tl.program_id(1)
    channel = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    slot = tl.arange(0, P)
    _sequence, token, count, _last, kept_slot = locate_tile(table, index, length, size, tiles, SPACING, PACKED)
    if count == 0:
        return
    inside = (channel < V)[:, None] & (slot < P)[None, :]
    plane = G * V * P
    at = cell_offsets(head, channel, V, P)
    kept += kept_slot * 2 * plane + at
    mean = tl.load(kept, mask=inside, other=0.0)
    var = tl.load(kept + plane, mask=inside, other=0.0)
    decay, noise = dynamics_of(log_decay, noise, head, channel, V, K, P)
    q += token * q_token + head // SHARE * q_head
    k += token * k_token + head // SHARE * k_head
    v += token * v_token + head * v_head
    precision += token * p_token + head * p_head
    grad_mean += token * gm_token + head * gm_head
    grad_var += token * gv_token + head * gv_head
    by_mean = tl.full([BLOCK, P], 1.0, tl.float32)
    by_var = tl.zeros([BLOCK, P], tl.float32)
    adjoint_mean = tl.zeros([BLOCK, P], tl.float32)
    adjoint_var = tl.zeros([BLOCK, P], tl.float32)
    next_queries = keys_at(0, count, q, q_token, slot, channel, K, P, WINDOW)
    next_keys = keys_at(0, count, k, k_token, slot, channel, K, P, WINDOW)
    next_values = values_at(0, count, v, v_token, channel, V, EVEN, WINDOW)
    next_weights = values_at(0, count, precision, p_token, channel, V, EVEN, WINDOW)
    next_grads = values_at(0, count, grad_mean, gm_token, channel, V, EVEN, WINDOW)
    whole = count // WINDOW * WINDOW
    for start in range(0, whole, WINDOW):
        queries, keys, values, weights, grads = next_queries, next_keys, next_values, next_weights, next_grads
        next_queries = keys_at(start + WINDOW, count, q, q_token, slot, channel, K, P, WINDOW)
        next_keys = keys_at(start + WINDOW, count, k, k_token, slot, channel, K, P, WINDOW)
        next_values = values_at(start + WINDOW, count, v, v_token, channel, V, EVEN, WINDOW)
        next_weights = values_at(start + WINDOW, count, precision, p_token, channel, V, EVEN, WINDOW)
        next_grads = values_at(start + WINDOW, count, grad_mean, gm_token, channel, V, EVEN, WINDOW)
        for i in tl.static_range(WINDOW):
            mean, var, by_mean, by_var, adjoint_mean, adjoint_var = adjoint_token(
                start + i, mean, var, by_mean, by_var, adjoint_mean, adjoint_var,
                queries[i], keys[i], values[i], weights[i], grads[i], grad_var, gv_token,
                channel, V, decay, noise, EVEN, VARIANCE, PTX,
            )  # fmt: skip
    if RAGGED:
        for t in range(whole, count):
            queries = keys_at(t, count, q, q_token, slot, channel, K, P, 1)
            keys = keys_at(t, count, k, k_token, slot, channel, K, P, 1)
            values = values_at(t, count, v, v_token, channel, V, EVEN, 1)
            weights = values_at(t, count, precision, p_token, channel, V, EVEN, 1)
            grads = values_at(t, count, grad_mean, gm_token, channel, V, EVEN, 1)
            mean, var, by_mean, by_var, adjoint_mean, adjoint_var = adjoint_token(
                t, mean, var, by_mean, by_var, adjoint_mean, adjoint_var,
                queries[0], keys[0], values[0], weights[0], grads[0], grad_var, gv_token,
                channel, V, decay, noise, EVEN, VARIANCE, PTX,
            )  # fmt: skip
    maps += index.to(tl.int64) * 4 * plane + at
    tl.store(maps, adjoint_mean, mask=inside)
    tl.store(maps + plane, adjoint_var, mask=inside)
    tl.store(maps + 2 * plane, by_mean, mask=inside)
    tl.store(maps + 3 * plane, by_var, mask=inside)


@triton.jit(do_not_specialize=[*UNSPECIALIZED, *STRIDES])
def _enter_adjoints(
    maps, leaving, grad_last_mean, grad_last_var, grad_mean, grad_var, bounds, tiles,
    mean_n, mean_g, mean_k, mean_v, var_n, var_g, var_k, var_v, G, V,
    K: tl.constexpr, P: tl.constexpr, BLOCK: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    sequence = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    channel = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.arange(0, P)
    inside = (channel < V)[:, None] & (slot < P)[None, :]
    real = (channel < V)[:, None] & (slot < K)[None, :]
    gm = belief_of(grad_last_mean, sequence, head, channel, slot, mean_n, mean_g, mean_k, mean_v, real)
    gs = belief_of(grad_last_var, sequence, head, channel, slot, var_n, var_g, var_k, var_v, real)
    if PACKED:
        first, end = tl.load(bounds + 2 * sequence), tl.load(bounds + 2 * sequence + 1)
    else:
        first, end = sequence * tiles, sequence * tiles + tiles
    plane = G * V * P
    at = cell_offsets(head, channel, V, P)
    for back in tl.range(0, end - first, num_stages=4):
        index = end - 1 - back
        adjoint_mean = tl.load(maps + index * 4 * plane + at, mask=inside, other=0.0)
        adjoint_var = tl.load(maps + (index * 4 + 1) * plane + at, mask=inside, other=0.0)
        by_mean = tl.load(maps + (index * 4 + 2) * plane + at, mask=inside, other=0.0)
        by_var = tl.load(maps + (index * 4 + 3) * plane + at, mask=inside, other=0.0)
        tl.store(leaving + index * 2 * plane + at, gm, mask=inside)
        tl.store(leaving + (index * 2 + 1) * plane + at, gs, mask=inside)
        gs = adjoint_var + by_var * gm + by_mean * by_mean * gs
        gm = adjoint_mean + by_mean * gm
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
    kept: Tensor,
    segments: Segments | None,
    grad_mean: Tensor,
    grad_var: Tensor | None,
    grad_last_mean: Tensor,
    grad_last_var: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v, precision, log_decay, process_noise and the prior's mean and variance."""
    (batch, length, heads, channels), (shared, slots) = v.shape, q.shape[2:]
    like = {"dtype": torch.float32, "device": v.device}
    kinds = [x.dtype for x in (q, k, log_decay, process_noise)]
    q, k, v, precision, grad_mean = (
        contiguous_rows(q),
        contiguous_rows(k),
        contiguous_rows(v),
        contiguous_rows(precision),
        contiguous_rows(grad_mean),
    )
    variance = grad_var is not None
    grad_var = contiguous_rows(grad_var) if grad_var is not None else grad_mean
    log_decay, process_noise = log_decay.contiguous(), process_noise.contiguous()
    width = padded(slots)

    # One round of warps: a tile and every `splits`-th block of channels each.
    resident = _RESIDENT * multiprocessors(v.device)
    cut = plan(batch, length, max(64, triton.cdiv(batch * length * heads, resident)), segments, q)
    size = block(slots, 8)
    splits = min(triton.cdiv(channels, size), channels // (2 * slots), resident // (cut.count * heads))
    splits = max(1, splits)  # and their sums of dq and dk no larger than the values

    common = {"K": slots, "P": width, "PACKED": segments is not None}
    cells = {"SPACING": SPACING, "RAGGED": ragged(length, segments), "VARIANCE": variance, "PTX": supports_ptx()}
    strides = [stride for x in (q, k, v, precision, grad_mean, grad_var) for stride in x.stride()[1:3]]
    maps = torch.empty(cut.count, 4, heads, channels, width, **like)
    few = block(slots, 4)
    arguments = (
        q, k, v, precision, log_decay, process_noise, kept, grad_mean, grad_var, maps, cut.table,
        length, cut.size, cut.tiles, *strides, heads, channels, heads // shared,
    )  # fmt: skip
    options = {"BLOCK": few, "EVEN": channels % few == 0, "WINDOW": WINDOW // 2, "num_warps": 1, **cells, **common}
    Launch(_map_adjoints, (cut.count * triton.cdiv(channels, few), heads), arguments, options).run()
    leaving = torch.empty(cut.count, 2, heads, channels, width, **like)
    prior_mean, prior_var = torch.empty(grad_last_mean.shape, **like), torch.empty(grad_last_var.shape, **like)
    arguments = (
        maps, leaving, grad_last_mean, grad_last_var, prior_mean, prior_var, cut.bounds, cut.tiles,
        *grad_last_mean.stride(), *grad_last_var.stride(), heads, channels,
    )  # fmt: skip
    options = {"BLOCK": few, "num_warps": 4, **common}
    Launch(_enter_adjoints, (len(prior_mean), heads, triton.cdiv(channels, few)), arguments, options).run()
    del maps, arguments

    tokens = torch.empty if segments is None else torch.zeros  # tokens outside every segment have no gradient
    dv = tokens(v.shape, dtype=v.dtype, device=v.device)
    dprecision = tokens(v.shape, dtype=precision.dtype, device=v.device)
    dqk = tokens(splits, batch, length, shared, heads // shared, slots, 2, **like)
    states = torch.empty(cut.count * splits, heads, SPACING // WINDOW, 2, size, width, **like)
    arguments = (
        q, k, v, precision, log_decay, process_noise, kept, states, leaving, grad_mean, grad_var, dv, dprecision, dqk,
        cut.table, length, cut.size, cut.tiles, splits, batch * length, *strides, heads, channels, heads // shared,
    )  # fmt: skip
    options = {"BLOCK": size, "EVEN": channels % size == 0, "WINDOW": WINDOW, "num_warps": 1, **cells, **common}
    Launch(gradients, (cut.count * splits, heads), arguments, options).run()
    del states, arguments
    ddynamics = leaving.sum(0)[..., :slots].transpose(-1, -2)  # `gradients` left them where the adjoints were
    sums = (*dqk.sum((0, 4)).unbind(-1), *ddynamics.unbind(0))
    dq, dk, ddecay, dnoise = (
        torch.empty(x.shape, dtype=kind, device=x.device).copy_(x) for x, kind in zip(sums, kinds, strict=True)
    )
    return dq, dk, dv, dprecision, ddecay, dnoise, prior_mean, prior_var
