"""`diagonal` in Triton: the backward pass, exact and parallel over time.

With adjoints (gm, gs) of a posterior (mean, variance), one token takes them to those of its predecessor, and over a
tile that is affine in the adjoints leaving the tile:

    gm_in = gm + D_m gm_out,   gs_in = gs + D_x gm_out + D_m^2 gs_out

where D_m and D_x are the derivatives of the mean leaving by the mean and the variance entering. Three launches again:

1. `_map_adjoints`: `gm`, `gs`, `D_m` and `D_x` of every tile. Derivatives by the entry belief accumulate *forwards*
   in time, so nothing has to be kept;
2. `_enter_adjoints`: the adjoints leaving every tile, from the last to the first, and the prior's gradient;
3. `_gradients`: backwards through each tile with its true adjoints. Beliefs are recomputed from the kept ones, and
   those of the few tokens at hand stay in registers.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kalmix.kernels.diagonal.scratch import SPACING, padded
from kalmix.kernels.diagonal.triton import (
    LOOSE,
    STRIDES,
    WINDOW,
    belief_of,
    block,
    cell_offsets,
    dynamics_of,
    keys_at,
    multiprocessors,
    plan,
    ragged,
    rows,
    step,
    tile_of,
    values_at,
)
from kalmix.kernels.primitives.triton_launch import Launch
from kalmix.kernels.primitives.triton_ptx import hardware, reciprocal
from kalmix.segments import Segments

_RESIDENT = 8  # warps of `_gradients` that fit on a multiprocessor: all the registers a thread can have


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


@triton.jit(do_not_specialize=LOOSE)
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
    _sequence, token, count, _last, kept_slot = tile_of(table, index, length, size, tiles, SPACING, PACKED)
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


@triton.jit(do_not_specialize=[*LOOSE, *STRIDES])
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


@triton.jit
def back_through(
    start, states, q, k, v, precision, grad_mean, grad_var, dv, dprecision, dqk, again,
    gm, gs, by_noise, by_decay, decay, noise, slot, channel,
    q_token, k_token, v_token, p_token, gm_token, gv_token, out_token, dqk_token, V,
    K: tl.constexpr, P: tl.constexpr, EVERY: tl.constexpr, SPACING: tl.constexpr, WINDOW: tl.constexpr,
    EVEN: tl.constexpr, VARIANCE: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Back through the tokens [start, start + WINDOW) of a tile, from a belief stored at most EVERY tokens before."""
    states += start % SPACING // EVERY * 2 * channel.shape[0] * slot.shape[0]
    mean = tl.load(states)
    var = tl.load(states + channel.shape[0] * slot.shape[0])
    if WINDOW < EVERY:
        for t in range(start // EVERY * EVERY, start):
            keys = keys_at(t, t + 1, k, k_token, slot, channel, K, P, 1)
            values = values_at(t, t + 1, v, v_token, channel, V, EVEN, 1)
            weights = values_at(t, t + 1, precision, p_token, channel, V, EVEN, 1)
            key, value, weight = keys[0].to(tl.float32), values[0].to(tl.float32), weights[0].to(tl.float32)
            mean, var, _shrink, _surprise = step(mean, var, key, weight, value, decay, noise, PTX)
    # All loads together, ahead of the stores that they could not overtake.
    end = start + WINDOW
    queries = keys_at(start, end, q, q_token, slot, channel, K, P, WINDOW)
    keys = keys_at(start, end, k, k_token, slot, channel, K, P, WINDOW)
    values = values_at(start, end, v, v_token, channel, V, EVEN, WINDOW)
    weights = values_at(start, end, precision, p_token, channel, V, EVEN, WINDOW)
    grads = values_at(start, end, grad_mean, gm_token, channel, V, EVEN, WINDOW)
    pair = tl.arange(0, 2)[None, :]
    real = (slot < K)[:, None] & (pair >= 0)
    sums = dqk + start * dqk_token + 2 * slot[:, None] + pair
    before, others = (), ()
    for i in tl.static_range(WINDOW):
        others += (tl.load(sums + i * dqk_token, mask=real, other=0.0),)
    for i in tl.static_range(WINDOW):
        key, value, weight = keys[i].to(tl.float32), values[i].to(tl.float32), weights[i].to(tl.float32)
        before += (mean, var)
        mean, var, _shrink, _surprise = step(mean, var, key, weight, value, decay, noise, PTX)
    for i in tl.static_range(WINDOW - 1, -1, -1):
        t = start + i
        after = mean
        mean, var = before[2 * i], before[2 * i + 1]
        query, key, value = queries[i].to(tl.float32), keys[i].to(tl.float32), values[i].to(tl.float32)
        weight, grad = weights[i].to(tl.float32), grads[i].to(tl.float32)

        predicted = decay * decay * var + noise
        write = key * weight
        shrink = reciprocal(1.0 + key * write * predicted, PTX)
        posterior = predicted * shrink
        carried = decay * mean
        error = value - key * carried
        gain = posterior * write

        gm += query * grad
        dquery = grad * after
        if VARIANCE:
            asks = values_at(t, t + 1, grad_var, gv_token, channel, V, EVEN, 1)
            asked = asks[0].to(tl.float32)
            gs += query * query * asked
            dquery += 2.0 * query * asked * posterior
        # mean' = carried + gain error; gain = posterior write; posterior = predicted / (1 + key write predicted)
        dgain = gm * error
        derror = gm * gain
        part = gs * posterior
        dwrite = posterior * (dgain * shrink - key * part)  # 1 - key gain is `shrink`: nothing cancels
        dkey = weight * dwrite - gain * (part + dgain * gain) - carried * derror
        dpredicted = (gs + dgain * write) * shrink * shrink
        by_noise += dpredicted
        gm = decay * (gm * shrink)
        gs = decay * decay * dpredicted
        by_decay += 2.0 * var * gs + mean * gm

        to = t * out_token + channel
        tl.store(dv + to, tl.sum(derror, 1).to(dv.dtype.element_ty), mask=channel < V)
        tl.store(dprecision + to, tl.sum(key * dwrite, 1).to(dprecision.dtype.element_ty), mask=channel < V)
        both = tl.sum(tl.join(dquery, dkey), 0) + tl.where(again, others[i], 0.0)  # and those of the channels before
        tl.store(sums + i * dqk_token, both, mask=real)
    return gm, gs, by_noise, by_decay


@triton.jit(do_not_specialize=[*LOOSE, "splits", "tokens"])
def _gradients(
    q, k, v, precision, log_decay, noise, kept, states, leaving, grad_mean, grad_var, dv, dprecision, dqk, table,
    length, size, tiles, splits, tokens, q_token, q_head, k_token, k_head, v_token, v_head, p_token, p_head,
    gm_token, gm_head, gv_token, gv_head, G, V, SHARE,
    K: tl.constexpr, P: tl.constexpr, BLOCK: tl.constexpr, SPACING: tl.constexpr, WINDOW: tl.constexpr,
    PACKED: tl.constexpr, EVEN: tl.constexpr, RAGGED: tl.constexpr, VARIANCE: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0) // splits
    split = tl.program_id(0) % splits
    head = tl.program_id(1)
    slot = tl.arange(0, P)
    _sequence, token, count, _last, kept_slot = tile_of(table, index, length, size, tiles, SPACING, PACKED)
    plane = G * V * P
    index = index.to(tl.int64)
    q += token * q_token + head // SHARE * q_head
    k += token * k_token + head // SHARE * k_head
    v += token * v_token + head * v_head
    precision += token * p_token + head * p_head
    grad_mean += token * gm_token + head * gm_head
    grad_var += token * gv_token + head * gv_head
    dv += (token * G + head) * V
    dprecision += (token * G + head) * V
    dqk += ((split * tokens + token) * G + head) * K * 2
    states += (tl.program_id(0).to(tl.int64) * G + head) * (SPACING // WINDOW * 2 * BLOCK * P)
    states += tl.arange(0, BLOCK)[:, None] * P + slot[None, :]
    for first in range(split * BLOCK, V, splits * BLOCK):
        channel = first + tl.arange(0, BLOCK)
        inside = (channel < V)[:, None] & (slot < P)[None, :]
        at = cell_offsets(head, channel, V, P)
        gm = tl.load(leaving + index * 2 * plane + at, mask=inside & (count > 0), other=0.0)
        gs = tl.load(leaving + (index * 2 + 1) * plane + at, mask=inside & (count > 0), other=0.0)
        decay, process = dynamics_of(log_decay, noise, head, channel, V, K, P)
        by_noise = tl.zeros([BLOCK, P], tl.float32)
        by_decay = tl.zeros([BLOCK, P], tl.float32)
        again = first > split * BLOCK
        groups = tl.cdiv(count, SPACING)
        for back in range(groups):
            group = groups - 1 - back
            mean = tl.load(kept + (kept_slot + group) * 2 * plane + at, mask=inside, other=0.0)
            var = tl.load(kept + ((kept_slot + group) * 2 + 1) * plane + at, mask=inside, other=0.0)
            start, end = group * SPACING, tl.minimum(count, (group + 1) * SPACING)
            windows = (end - start) // WINDOW
            to = states
            next_keys = keys_at(start, end, k, k_token, slot, channel, K, P, WINDOW)
            next_values = values_at(start, end, v, v_token, channel, V, EVEN, WINDOW)
            next_weights = values_at(start, end, precision, p_token, channel, V, EVEN, WINDOW)
            for window in range(start, end, WINDOW):
                tl.store(to, mean)
                tl.store(to + BLOCK * P, var)
                to += 2 * BLOCK * P
                keys, values, weights = next_keys, next_values, next_weights
                next_keys = keys_at(window + WINDOW, end, k, k_token, slot, channel, K, P, WINDOW)
                next_values = values_at(window + WINDOW, end, v, v_token, channel, V, EVEN, WINDOW)
                next_weights = values_at(window + WINDOW, end, precision, p_token, channel, V, EVEN, WINDOW)
                for i in tl.static_range(WINDOW):
                    key, value, weight = keys[i].to(tl.float32), values[i].to(tl.float32), weights[i].to(tl.float32)
                    mean, var, _shrink, _surprise = step(mean, var, key, weight, value, decay, process, PTX)
            tl.debug_barrier()  # what one thread stored another may load
            if RAGGED:
                for i in range(end - start - windows * WINDOW):
                    gm, gs, by_noise, by_decay = back_through(
                        end - 1 - i, states, q, k, v, precision, grad_mean, grad_var, dv, dprecision, dqk, again,
                        gm, gs, by_noise, by_decay, decay, process, slot, channel,
                        q_token, k_token, v_token, p_token, gm_token, gv_token, G * V, 2 * G * K, V,
                        K, P, WINDOW, SPACING, 1, EVEN, VARIANCE, PTX,
                    )  # fmt: skip
            for i in range(windows):
                gm, gs, by_noise, by_decay = back_through(
                    start + (windows - 1 - i) * WINDOW, states, q, k, v, precision, grad_mean, grad_var, dv, dprecision,
                    dqk, again, gm, gs, by_noise, by_decay, decay, process, slot, channel,
                    q_token, k_token, v_token, p_token, gm_token, gv_token, G * V, 2 * G * K, V,
                    K, P, WINDOW, SPACING, WINDOW, EVEN, VARIANCE, PTX,
                )  # fmt: skip
            tl.debug_barrier()
        # The dynamics' share takes the place of the adjoints it came from.
        tl.store(leaving + index * 2 * plane + at, by_decay, mask=inside)
        tl.store(leaving + (index * 2 + 1) * plane + at, by_noise, mask=inside)


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
    q, k, v, precision, grad_mean = rows(q), rows(k), rows(v), rows(precision), rows(grad_mean)
    variance = grad_var is not None
    grad_var = rows(grad_var) if grad_var is not None else grad_mean
    log_decay, process_noise = log_decay.contiguous(), process_noise.contiguous()
    width = padded(slots)

    # One round of warps: a tile and every `splits`-th block of channels each.
    resident = _RESIDENT * multiprocessors(v.device)
    cut = plan(batch, length, max(64, triton.cdiv(batch * length * heads, resident)), segments, q)
    size = block(slots, 8)
    splits = min(triton.cdiv(channels, size), channels // (2 * slots), resident // (cut.count * heads))
    splits = max(1, splits)  # and their sums of dq and dk no larger than the values

    common = {"K": slots, "P": width, "PACKED": segments is not None}
    cells = {"SPACING": SPACING, "RAGGED": ragged(length, segments), "VARIANCE": variance, "PTX": hardware()}
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
    Launch(_gradients, (cut.count * splits, heads), arguments, options).run()
    del states, arguments
    ddynamics = leaving.sum(0)[..., :slots].transpose(-1, -2)  # `_gradients` left them where the adjoints were
    sums = (*dqk.sum((0, 4)).unbind(-1), *ddynamics.unbind(0))
    dq, dk, ddecay, dnoise = (
        torch.empty(x.shape, dtype=kind, device=x.device).copy_(x) for x, kind in zip(sums, kinds, strict=True)
    )
    return dq, dk, dv, dprecision, ddecay, dnoise, prior_mean, prior_var
