"""Backward pass inside the tiles of `diagonal`, in Triton; see `backward`."""

from __future__ import annotations

import triton
import triton.language as tl

from kalmix.ops._diagonal.triton.loads_and_filter_step import (
    UNSPECIALIZED,
    cell_offsets,
    filter_step,
    load_dynamics,
    load_keys,
    load_values,
)
from kalmix.ops._diagonal.triton.plan import locate_tile


@triton.jit
def backward_tokens(
    start, states, q, k, v, precision, grad_mean, grad_var, dv, dprecision, dqk, accumulate,
    gm, gs, grad_noise, grad_log_decay, decay, noise, slot, channel,
    q_token, k_token, v_token, p_token, gm_token, gv_token, out_token, dqk_token, V,
    K: tl.constexpr, P: tl.constexpr, SAVED_EVERY: tl.constexpr, CHUNK: tl.constexpr, PREFETCH: tl.constexpr,
    EVEN: tl.constexpr, VARIANCE: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Differentiate `PREFETCH` tokens from `start` on, given a belief saved at most SAVED_EVERY tokens before them."""
    states += start % CHUNK // SAVED_EVERY * 2 * channel.shape[0] * slot.shape[0]
    mean = tl.load(states)
    var = tl.load(states + channel.shape[0] * slot.shape[0])
    if PREFETCH < SAVED_EVERY:
        for t in range(start // SAVED_EVERY * SAVED_EVERY, start):
            keys = load_keys(t, t + 1, k, k_token, slot, channel, K, P, 1, False)
            values = load_values(t, t + 1, v, v_token, channel, V, EVEN, 1, False)
            weights = load_values(t, t + 1, precision, p_token, channel, V, EVEN, 1, False)
            key, value, weight = keys[0].to(tl.float32), values[0].to(tl.float32), weights[0].to(tl.float32)
            mean, var, _shrinkage, _innovation = filter_step(mean, var, key, weight, value, decay, noise, PTX)
    # All loads come before the stores, which they could not overtake.
    end = start + PREFETCH
    queries = load_keys(start, end, q, q_token, slot, channel, K, P, PREFETCH, False)
    keys = load_keys(start, end, k, k_token, slot, channel, K, P, PREFETCH, False)
    values = load_values(start, end, v, v_token, channel, V, EVEN, PREFETCH, False)
    weights = load_values(start, end, precision, p_token, channel, V, EVEN, PREFETCH, False)
    grads = load_values(start, end, grad_mean, gm_token, channel, V, EVEN, PREFETCH, False)
    var_grads = load_values(start, end, grad_var, gv_token, channel, V, EVEN, PREFETCH, False)
    pair = tl.arange(0, 2)[None, :]
    real = (slot < K)[:, None] & (pair >= 0)
    sums = dqk + start * dqk_token + 2 * slot[:, None] + pair
    beliefs, shrinkages, previous_sums = (), (), ()
    for i in tl.static_range(PREFETCH):
        previous_sums += (tl.load(sums + i * dqk_token, mask=real & accumulate, other=0.0),)
    for i in tl.static_range(PREFETCH):
        key, value, weight = keys[i].to(tl.float32), values[i].to(tl.float32), weights[i].to(tl.float32)
        beliefs += (mean, var)
        mean, var, shrinkage, _innovation = filter_step(mean, var, key, weight, value, decay, noise, PTX)
        shrinkages += (shrinkage,)
    for i in tl.static_range(PREFETCH - 1, -1, -1):
        t = start + i
        posterior_mean, posterior = mean, var
        mean, var, shrinkage = beliefs[2 * i], beliefs[2 * i + 1], shrinkages[i]
        query, key, value = queries[i].to(tl.float32), keys[i].to(tl.float32), values[i].to(tl.float32)
        weight, grad = weights[i].to(tl.float32), grads[i].to(tl.float32)

        gm += query * grad
        dquery = grad * posterior_mean
        if VARIANCE:
            grad_read_var = var_grads[i].to(tl.float32)
            gs += query * query * grad_read_var
            dquery += (2.0 * grad_read_var) * (query * posterior)
        # In terms of the information 1 / posterior and of posterior_mean / posterior, to which the token adds
        # key^2 weight and key weight value. Errors after the update are errors before it times `shrinkage`.
        grad_predicted_mean = gm * shrinkage
        error_grad = grad_predicted_mean * (value - key * (decay * mean))
        var_grad = gs * posterior
        gain = key * posterior
        change = error_grad - key * var_grad
        dkey = weight * posterior * (change - key * (gm * posterior_mean + var_grad))
        dpredicted = shrinkage * (gs * shrinkage + key * weight * error_grad)

        to = t * out_token + channel
        dvalue = tl.sum(gain * gm, 1) * tl.sum(weight, 1)
        tl.store(dv + to, dvalue.to(dv.dtype.element_ty), mask=channel < V)
        tl.store(dprecision + to, tl.sum(gain * change, 1).to(dprecision.dtype.element_ty), mask=channel < V)
        pair_grads = tl.sum(tl.join(dquery, dkey), 0) + previous_sums[i]  # adds earlier channels
        tl.store(sums + i * dqk_token, pair_grads, mask=real)

        grad_noise += dpredicted
        gm = decay * grad_predicted_mean
        gs = decay * decay * dpredicted
        grad_log_decay += 2.0 * var * gs + mean * gm
    return gm, gs, grad_noise, grad_log_decay


@triton.jit(do_not_specialize=[*UNSPECIALIZED, "splits", "tokens"])
def tile_gradients(
    q, k, v, precision, log_decay, noise, stored, states, grad_exits, grad_mean, grad_var, dv, dprecision, dqk,
    tile_table, length, size, tiles, splits, tokens,
    q_token: tl.constexpr, q_head, k_token: tl.constexpr, k_head, v_token: tl.constexpr, v_head,
    p_token: tl.constexpr, p_head, gm_token: tl.constexpr, gm_head, gv_token: tl.constexpr, gv_head,
    G: tl.constexpr, V: tl.constexpr, GROUP,
    K: tl.constexpr, P: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr, PREFETCH: tl.constexpr,
    PACKED: tl.constexpr, EVEN: tl.constexpr, RAGGED: tl.constexpr, VARIANCE: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0) // splits
    split = tl.program_id(0) % splits
    head = tl.program_id(1)
    slot = tl.arange(0, P)
    _sequence, token, count, _begins, _last, stored_index = locate_tile(
        tile_table, index, length, size, tiles, CHUNK, PACKED
    )
    plane = G * V * P
    index = index.to(tl.int64)
    q += token * q_token + head // GROUP * q_head
    k += token * k_token + head // GROUP * k_head
    v += token * v_token + head * v_head
    precision += token * p_token + head * p_head
    grad_mean += token * gm_token + head * gm_head
    grad_var += token * gv_token + head * gv_head
    dv += (token * G + head) * V
    dprecision += (token * G + head) * V
    dqk += ((split * tokens + token) * G + head) * K * 2
    states += (tl.program_id(0).to(tl.int64) * G + head) * (CHUNK // PREFETCH * 2 * BLOCK * P)
    states += tl.arange(0, BLOCK)[:, None] * P + slot[None, :]
    for first in range(split * BLOCK, V, splits * BLOCK):
        channel = first + tl.arange(0, BLOCK)
        inside = (channel < V)[:, None] & (slot < P)[None, :]
        at = cell_offsets(head, channel, V, P)
        gm = tl.load(grad_exits + index * 2 * plane + at, mask=inside & (count > 0), other=0.0)
        gs = tl.load(grad_exits + (index * 2 + 1) * plane + at, mask=inside & (count > 0), other=0.0)
        decay, process = load_dynamics(log_decay, noise, head, channel, V, K, P)
        grad_noise = tl.zeros([BLOCK, P], tl.float32)
        grad_log_decay = tl.zeros([BLOCK, P], tl.float32)
        accumulate = first > split * BLOCK
        chunks = tl.cdiv(count, CHUNK)
        for i_chunk in range(chunks):
            chunk = chunks - 1 - i_chunk
            mean = tl.load(stored + (stored_index + chunk) * 2 * plane + at, mask=inside, other=0.0)
            var = tl.load(stored + ((stored_index + chunk) * 2 + 1) * plane + at, mask=inside, other=0.0)
            start, end = chunk * CHUNK, tl.minimum(count, (chunk + 1) * CHUNK)
            full_groups = (end - start) // PREFETCH
            to = states
            next_keys = load_keys(start, end, k, k_token, slot, channel, K, P, PREFETCH, RAGGED)
            next_values = load_values(start, end, v, v_token, channel, V, EVEN, PREFETCH, RAGGED)
            next_weights = load_values(start, end, precision, p_token, channel, V, EVEN, PREFETCH, RAGGED)
            for group_start in range(start, end, PREFETCH):
                tl.store(to, mean)
                tl.store(to + BLOCK * P, var)
                to += 2 * BLOCK * P
                keys, values, weights = next_keys, next_values, next_weights
                after = group_start + PREFETCH
                next_keys = load_keys(after, end, k, k_token, slot, channel, K, P, PREFETCH, RAGGED)
                next_values = load_values(after, end, v, v_token, channel, V, EVEN, PREFETCH, RAGGED)
                next_weights = load_values(after, end, precision, p_token, channel, V, EVEN, PREFETCH, RAGGED)
                for i in tl.static_range(PREFETCH):
                    key, value, weight = keys[i].to(tl.float32), values[i].to(tl.float32), weights[i].to(tl.float32)
                    mean, var, _shrinkage, _innovation = filter_step(mean, var, key, weight, value, decay, process, PTX)
            tl.debug_barrier()  # a thread may load what another stored
            if RAGGED:
                for i in range(end - start - full_groups * PREFETCH):
                    gm, gs, grad_noise, grad_log_decay = backward_tokens(
                        end - 1 - i, states, q, k, v, precision, grad_mean, grad_var, dv, dprecision, dqk, accumulate,
                        gm, gs, grad_noise, grad_log_decay, decay, process, slot, channel,
                        q_token, k_token, v_token, p_token, gm_token, gv_token, G * V, 2 * G * K, V,
                        K, P, PREFETCH, CHUNK, 1, EVEN, VARIANCE, PTX,
                    )  # fmt: skip
            for i in range(full_groups):
                gm, gs, grad_noise, grad_log_decay = backward_tokens(
                    start + (full_groups - 1 - i) * PREFETCH, states, q, k, v, precision, grad_mean, grad_var, dv,
                    dprecision, dqk, accumulate, gm, gs, grad_noise, grad_log_decay, decay, process, slot, channel,
                    q_token, k_token, v_token, p_token, gm_token, gv_token, G * V, 2 * G * K, V,
                    K, P, PREFETCH, CHUNK, PREFETCH, EVEN, VARIANCE, PTX,
                )  # fmt: skip
            tl.debug_barrier()
        # The gradients of the dynamics replace the gradients at the end of the tile.
        tl.store(grad_exits + index * 2 * plane + at, grad_log_decay, mask=inside)
        tl.store(grad_exits + (index * 2 + 1) * plane + at, grad_noise, mask=inside)
