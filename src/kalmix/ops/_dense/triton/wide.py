"""`dense` in Triton, forward, for covariances too wide for a program's registers: bands of rows, a program each.

Token by token, in float32, a covariance that stays in the registers of the programs that share it:

    u = Pb k,    s = r^2 + k'u,    c = u / s,    P = Pb - u u' / s,    Pb = A P A + l^2 I

They need u of all bands, and tell each other: for two tokens at once, since telling takes long. The difference is
rounded alike on both sides of the diagonal: where evidence is certain and keys repeat, what is not symmetric grows.
Process noise is gathered apart and reaches the diagonal every 64 tokens, where the covariance is kept for the backward
pass; what is small beside the prior would be rounded away at every token.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kalmix.ops._dense.block_sizes import WINDOW, padded
from kalmix.ops._dense.triton.parts import COUNTS, decay_kind
from kalmix.ops._dense.triton.row_partition import (
    bands,
    by_columns,
    columns,
    dot,
    faded,
    layout,
    load,
    meeting,
    outer,
    seat,
    times,
    vector,
    zero_by_columns,
)
from kalmix.ops._shared.triton.compile_and_launch import Launch
from kalmix.ops._shared.triton.tiles import cut_tokens, rows, run_of
from kalmix.segments import Segments


@triton.jit
def _told(
    k, obs_noise, process_noise, log_decay, first, t, count, i, j, k_token, G, K: tl.constexpr, DECAY: tl.constexpr
):
    """What a token tells the covariance, as it is in memory; nothing if it is not there."""
    at, there = first + t * G, t < count
    key, own = load(k + t * k_token, j, K, there), load(k + t * k_token, i, K, there)
    observed, noise = tl.load(obs_noise + at, mask=there, other=1.0), tl.load(process_noise + at, mask=there, other=0.0)
    if DECAY == 2:
        logs, own_logs = load(log_decay + at * K, j, K, there), load(log_decay + at * K, i, K, there)
    elif DECAY == 1:
        logs = tl.load(log_decay + at, mask=there, other=0.0)
        own_logs = logs
    else:
        logs, own_logs = 0.0, 0.0
    return key, own, observed, noise, logs, own_logs


@triton.jit
def _understood(told, DECAY: tl.constexpr):
    """The same in float32, and decays for their logarithms."""
    key, own, observed, noise, logs, own_logs = told
    if DECAY:
        decay, own_decay = tl.exp(logs.to(tl.float32)), tl.exp(own_logs.to(tl.float32))
    else:
        decay, own_decay = 1.0, 1.0
    return key.to(tl.float32), own.to(tl.float32), observed.to(tl.float32), noise.to(tl.float32), decay, own_decay


@triton.jit
def _through(state, own_decay, decay, x, DECAY: tl.constexpr):
    """A state that decays, times a vector by columns."""
    if DECAY == 2:
        seen = own_decay * times(state, decay * x)
    elif DECAY == 1:
        seen = (decay * decay) * times(state, x)
    else:
        seen = times(state, x)
    return seen


@triton.jit(do_not_specialize=COUNTS)
def _advance(
    q, k, obs_noise, process_noise, log_decay, states, kept, gain, scale, read, places, tickets, runs, part, length,
    tiles, q_token, q_head, k_token, k_head, G, SHARE,
    K: tl.constexpr, P: tl.constexpr, BAND: tl.constexpr, COLUMNS: tl.constexpr, WINDOW: tl.constexpr,
    PACKED: tl.constexpr, KEEP: tl.constexpr, DECAY: tl.constexpr, VARIANCE: tl.constexpr,
):  # fmt: skip
    sequence, head, band = seat(tickets, G, P // BAND)
    tile, token, count = run_of(runs, sequence, length, tiles, PACKED)
    i, j = band * BAND + tl.arange(0, BAND), columns(P, COLUMNS)
    square, diagonal = i[:, None, None] * P + j[None, :, :], i[:, None, None] == j[None, :, :]
    places += (sequence * G + head) * (4 * P)
    states += (sequence * G + head) * (P * P)
    k += token * k_token + head // SHARE * k_head
    q += token * q_token + head // SHARE * q_head
    first = token * G + head
    state = tl.load(states + square)
    zero = zero_by_columns(state, i)
    spare = tl.zeros([BAND], tl.float32)  # process noise that is still to be added to the diagonal
    one = _told(k, obs_noise, process_noise, log_decay, first, 0, count, i, j, k_token, G, K, DECAY)
    two = _told(k, obs_noise, process_noise, log_decay, first, 1, count, i, j, k_token, G, K, DECAY)
    for t in range(0, count, 2):
        if t % WINDOW == 0:
            state += tl.where(diagonal, spare[:, None, None], 0.0)
            spare = tl.zeros([BAND], tl.float32)
            if KEEP:
                tl.store(kept + ((tile + t // WINDOW) * G + head) * (P * P) + square, state)
        key, own, observed, noise, decay, own_decay = _understood(one, DECAY)
        next_key, next_own, next_observed, next_noise, next_decay, next_own_decay = _understood(two, DECAY)
        one = _told(k, obs_noise, process_noise, log_decay, first, t + 2, count, i, j, k_token, G, K, DECAY)
        two = _told(k, obs_noise, process_noise, log_decay, first, t + 3, count, i, j, k_token, G, K, DECAY)
        before = own_decay * own_decay * spare + noise
        spare = next_own_decay * next_own_decay * before + next_noise
        own_reach, reach = own_decay * next_own_decay, decay * next_decay

        # both through the covariance before the first; the second then less what the first tells
        seen = _through(state, own_decay, decay, key, DECAY) + before * own
        next_seen = _through(state, own_reach, reach, next_key, DECAY) + spare * next_own
        turned, next_turned = by_columns(seen, next_seen, zero, places, band, t // 2, P, BAND)
        total = observed + tl.maximum(dot(key, turned), 0.0)
        inverse = 1.0 / total
        gains = turned * inverse
        seen, turned = next_own_decay * seen, next_decay * turned
        shared = dot(next_key, turned) * inverse
        rest = dot(next_key, next_turned) - shared * shared * total
        next_total = next_observed + tl.maximum(rest, 0.0)
        next_inverse = 1.0 / next_total
        next_seen -= shared * seen
        next_turned -= shared * turned
        both = t + tl.arange(0, 2)
        if VARIANCE:
            query, asking = vector(q + t * q_token, j, K, True), vector(q + t * q_token, i, K, True)
            answer = asking * (_through(state, own_decay, decay, query, DECAY) + before * asking)
            known = dot(query, gains)
            there = t + 1 < count
            query, asking = vector(q + (t + 1) * q_token, j, K, there), vector(q + (t + 1) * q_token, i, K, there)
            next_answer = asking * (_through(state, own_reach, reach, query, DECAY) + spare * asking)
            shared, next_known = dot(query, turned), dot(query, next_turned)
            less, next_less = known * known * total, shared * shared * inverse + next_known * next_known * next_inverse
            answers = tl.sum(tl.join(answer, next_answer), 0) - tl.where(band == 0, tl.join(less, next_less), 0.0)
            tl.store(read + band * part + first + both * G, answers, mask=both < count)
        state = faded(state, own_reach, reach, DECAY)
        root, next_root = tl.rsqrt(total), tl.rsqrt(next_total)
        state = state - outer(seen * root, turned * root) - outer(next_seen * next_root, next_turned * next_root)
        to = (first + both * G)[None, None, :] * K + j[:, :, None]
        live = (j < K)[:, :, None] & (both < count)[None, None, :] & (band == 0)
        tl.store(gain + to, tl.join(gains, next_turned * next_inverse), mask=live)
        tl.store(scale + first + both * G, tl.join(total, next_total), mask=both < count)
    state += tl.where(diagonal, spare[:, None, None], 0.0)
    tl.store(states + square, state)


def forward_wide(
    q: Tensor,
    k: Tensor,
    obs_noise: Tensor,
    process_noise: Tensor,
    log_decay: Tensor | None,
    covariance: Tensor,
    segments: Segments | None,
    variance: bool,
    kept: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As `triton.forward`."""
    (batch, length, shared, width), heads = k.shape, obs_noise.shape[2]
    like = {"dtype": torch.float32, "device": k.device}
    q, k, logs = rows(q), rows(k), k if log_decay is None else log_decay.contiguous()
    cut, lanes = cut_tokens(batch, length, WINDOW, segments, k), padded(width)
    states = torch.zeros(*covariance.shape[:2], lanes, lanes, **like)
    states[..., :width, :width] = (covariance + covariance.mT) / 2
    tokens = torch.empty if segments is None else torch.zeros  # tokens outside every segment write nothing
    gain, scale = tokens(batch, length, heads, width, **like), torch.empty(batch, length, heads, **like)
    read = tokens(bands(lanes), batch, length, heads, 1, **like) if variance else torch.empty(1, 0, **like)
    Launch(_advance, (cut.sequences, heads, bands(lanes)), (
        q, k, obs_noise.contiguous(), process_noise.contiguous(), logs, states, kept, gain, scale, read,
        *meeting(states), cut.runs, batch * length * heads, length, cut.tiles, *q.stride()[1:3], *k.stride()[1:3],
        heads, heads // shared,
    ), {
        "K": width, "WINDOW": WINDOW, "PACKED": segments is not None, "KEEP": kept.numel() > 0,
        "DECAY": decay_kind(log_decay), "VARIANCE": variance, **layout(lanes),
    }).run()  # fmt: skip
    return gain, read.sum(0).clamp_min_(0), states[..., :width, :width].contiguous(), scale
