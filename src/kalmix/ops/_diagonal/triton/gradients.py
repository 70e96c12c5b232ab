"""`diagonal` in Triton: backwards through each tile with its true adjoints; see `triton_backward`."""

from __future__ import annotations

import triton
import triton.language as tl

from kalmix.ops._diagonal.triton.cells import UNSPECIALIZED, cell_offsets, dynamics_of, keys_at, step, values_at
from kalmix.ops._diagonal.triton.plan import locate_tile
from kalmix.ops._shared.triton.ptx import reciprocal


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


@triton.jit(do_not_specialize=[*UNSPECIALIZED, "splits", "tokens"])
def gradients(
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
    _sequence, token, count, _last, kept_slot = locate_tile(table, index, length, size, tiles, SPACING, PACKED)
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
