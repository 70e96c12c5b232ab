"""`dense` in Triton, backward, for covariances too wide for a program's registers: bands of rows, a program each.

Token by token, with the adjoint Q of the covariance after a token, its gain c and innovation variance s as in
`triton_backward`, and its decays A:

1. `_retreat`: ds = c'Q c - dc'c / s, du = dc / s - 2 Q c + ds k, and the adjoint before it A (Q + sym(du k')) A. That
   needs Q c of all bands: the programs that share an adjoint tell each other.
2. `_finish`: dk = ds s c + Pb du, the covariance stepping through a window from where it was kept, all windows and
   bands at once. With what came to the diagonal of dPb at every token follow the gradients of noises and decays.

What tokens bring is touched some tokens ahead.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kalmix.ops._dense.block_sizes import NEAR, WINDOW, padded
from kalmix.ops._dense.triton.parts import COUNTS, as_inputs, decay_kind
from kalmix.ops._dense.triton.row_partition import (
    bands,
    by_columns,
    columns,
    dot,
    faded,
    layout,
    meeting,
    outer,
    seat,
    times,
    vector,
    zero_by_columns,
)
from kalmix.ops._shared.triton.compile_and_launch import Launch
from kalmix.ops._shared.triton.tiles import cut_tokens, rows, run_of, tile_of
from kalmix.segments import Segments


@triton.jit
def _decays(log_decay, at, i, j, K: tl.constexpr, DECAY: tl.constexpr):
    """Of a token, by rows and by columns."""
    if DECAY == 2:
        by_row, decay = tl.exp(vector(log_decay + at * K, i, K, True)), tl.exp(vector(log_decay + at * K, j, K, True))
    elif DECAY == 1:
        decay = tl.exp(tl.load(log_decay + at).to(tl.float32))
        by_row = decay
    else:
        by_row, decay = 1.0, 1.0
    return by_row, decay


@triton.jit
def _touch(x, stride, t, count, K: tl.constexpr, P: tl.constexpr, TOKENS: tl.constexpr):
    """A number of every 32 bytes of the vectors of some tokens, so that they are near when they are asked for."""
    row, lane = t + tl.arange(0, TOKENS)[:, None], tl.arange(0, P // 8)[None, :] * 8
    return tl.load(x + row.to(tl.int64) * stride + lane, mask=(row >= 0) & (row < count) & (lane < K), other=0.0)


@triton.jit
def _touch_signals(
    x, y, log_decay, at, t, count, G, K: tl.constexpr, P: tl.constexpr, NEAR: tl.constexpr, DECAY: tl.constexpr
):
    """The same of two numbers a token, and of decays."""
    xs, ys = _touch(x + at, G, t, count, 1, 8, NEAR), _touch(y + at, G, t, count, 1, 8, NEAR)
    if DECAY == 2:
        logs = _touch(log_decay + at * K, G * K, t, count, K, P, NEAR)
    elif DECAY == 1:
        logs = _touch(log_decay + at, G, t, count, 1, 8, NEAR)
    else:
        logs = ys
    return xs, ys, logs


@triton.jit
def _arrived(sink, touched, count):
    """Wait for what was touched: stores it nowhere, which the compiler cannot know."""
    for n in tl.static_range(len(touched)):
        x = touched[n]
        tl.store(sink + tl.zeros(x.shape, tl.int32), x.to(sink.dtype.element_ty), mask=count < 0)


@triton.jit(do_not_specialize=COUNTS)
def _retreat(
    q, k, log_decay, gain, scale, grad_gain, grad_read, kept, adjoints, changes, grad_obs, ends, balance,
    places, tickets, runs, length, tiles, q_token, q_head, k_token, k_head, G, SHARE,
    K: tl.constexpr, P: tl.constexpr, BAND: tl.constexpr, COLUMNS: tl.constexpr, NEAR: tl.constexpr,
    WINDOW: tl.constexpr, PACKED: tl.constexpr, DECAY: tl.constexpr, VARIANCE: tl.constexpr,
):  # fmt: skip
    sequence, head, band = seat(tickets, G, P // BAND)
    tile, token, count = run_of(runs, sequence, length, tiles, PACKED)
    i, j = band * BAND + tl.arange(0, BAND), columns(P, COLUMNS)
    square, diagonal = i[:, None, None] * P + j[None, :, :], i[:, None, None] == j[None, :, :]
    places += (sequence * G + head) * (4 * P)
    adjoints += (sequence * G + head) * (P * P)
    k += token * k_token + head // SHARE * k_head
    q += token * q_token + head // SHARE * q_head
    first = token * G + head
    adjoint = tl.load(adjoints + square)
    zero = zero_by_columns(adjoint, i)
    near = (count - 1) // NEAR * NEAR
    signals = _touch_signals(scale, scale, log_decay, first, near, count, G, K, P, NEAR, DECAY)
    vectors = _touch_vectors(k, gain, grad_gain, first, near, count, k_token, G, K, P, NEAR)
    for back in range(count):
        t = count - 1 - back
        at = first + t * G
        if (t % NEAR == NEAR - 1) | (back == 0):
            _arrived(scale, signals, count)
            _arrived(scale, vectors, count)
            near = t // NEAR * NEAR - NEAR
            signals = _touch_signals(scale, scale, log_decay, first, near, count, G, K, P, NEAR, DECAY)
            vectors = _touch_vectors(k, gain, grad_gain, first, near, count, k_token, G, K, P, NEAR)
        if (t % WINDOW == WINDOW - 1) | (back == 0):
            end = tl.sum(tl.sum(tl.where(diagonal, adjoint, 0.0), 1), 1)
            tl.store(ends + ((tile + t // WINDOW) * G + head) * P + i, end)
        key, own = vector(k + t * k_token, j, K, True), vector(k + t * k_token, i, K, True)
        write = vector(gain + at * K, j, K, True)
        inverse = 1.0 / tl.load(scale + at)
        given = inverse * vector(grad_gain + at * K, j, K, True)
        own_given = inverse * vector(grad_gain + at * K, i, K, True)
        by_row, decay = _decays(log_decay, at, i, j, K, DECAY)
        if VARIANCE:
            asking = tl.load(grad_read + at).to(tl.float32) * vector(q + t * q_token, i, K, True)
            adjoint += outer(asking, vector(q + t * q_token, j, K, True))
        leaving = times(adjoint, write)
        turned, _ = by_columns(leaving, leaving, zero, places, band, back, P, BAND)
        straight = dot(write, turned - given)
        change, own_change = given + straight * key - 2.0 * turned, own_given + straight * own - 2.0 * leaving
        tl.store(changes + at * K + i, own_change, mask=i < K)
        tl.store(grad_obs + at, straight)
        adjoint = adjoint + outer(0.5 * own_change, key) + outer(own, 0.5 * change)
        adjoint = faded(adjoint, by_row, decay, DECAY)
        if DECAY and t % WINDOW == 0:
            here = (tile + t // WINDOW) * G + head
            state = tl.load(kept + here * (P * P) + square)
            tl.store(balance + here * P + i, tl.sum(tl.sum(adjoint * state, 1), 1))
    tl.store(adjoints + square, adjoint)


@triton.jit
def _touch_vectors(k, gain, grad_gain, at, t, count, k_token, G, K: tl.constexpr, P: tl.constexpr, NEAR: tl.constexpr):
    """The same of what the adjoint meets."""
    writes = _touch(gain + at * K, G * K, t, count, K, P, NEAR)
    grads = _touch(grad_gain + at * K, G * K, t, count, K, P, NEAR)
    return _touch(k, k_token, t, count, K, P, NEAR), writes, grads


@triton.jit(do_not_specialize=COUNTS)
def _finish(
    q, k, process_noise, log_decay, gain, scale, grad_gain, grad_read, kept, changes, grad_obs, ends, balance,
    dk, dq, grad_process, grad_decay, table, part, length, tiles, q_token, q_head, k_token, k_head, G, SHARE,
    K: tl.constexpr, P: tl.constexpr, BAND: tl.constexpr, COLUMNS: tl.constexpr, NEAR: tl.constexpr,
    WINDOW: tl.constexpr, PACKED: tl.constexpr, DECAY: tl.constexpr, VARIANCE: tl.constexpr,
):  # fmt: skip
    window, head, band = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    token, count = tile_of(table, window, length, tiles, WINDOW, PACKED)
    if count <= 0:
        return
    i, j = band * BAND + tl.arange(0, BAND), columns(P, COLUMNS)
    k += token * k_token + head // SHARE * k_head
    q += token * q_token + head // SHARE * q_head
    here, first = window * G + head, token * G + head
    signals = _touch_signals(process_noise, scale, log_decay, first, 0, count, G, K, P, WINDOW, DECAY)
    changed = _touch(changes + first * K, G * K, 0, count, K, P, WINDOW)
    writes = _touch(gain + first * K, G * K, 0, count, K, P, WINDOW)
    state = tl.load(kept + here * (P * P) + i[:, None, None] * P + j[None, :, :])
    spare = tl.zeros([BAND], tl.float32)
    _arrived(scale, (changed, writes), count)
    _arrived(scale, signals, count)
    for t in range(count):
        at = first + t * G
        change, own_change = vector(changes + at * K, j, K, True), vector(changes + at * K, i, K, True)
        write, own_write = vector(gain + at * K, j, K, True), vector(gain + at * K, i, K, True)
        total = tl.load(scale + at)
        by_row, decay = _decays(log_decay, at, i, j, K, DECAY)
        spare = by_row * by_row * spare + tl.load(process_noise + at).to(tl.float32)
        state = faded(state, by_row, decay, DECAY)
        by_key = times(state, change) + spare * own_change + tl.load(grad_obs + at) * total * own_write
        tl.store(dk + at * K + i, by_key, mask=i < K)
        root = tl.sqrt(total)
        state -= outer(own_write * root, write * root)
        if VARIANCE:
            asked = times(state, vector(q + t * q_token, j, K, True)) + spare * vector(q + t * q_token, i, K, True)
            tl.store(dq + at * K + i, 2.0 * tl.load(grad_read + at).to(tl.float32) * asked, mask=i < K)

    t = tl.arange(0, WINDOW)
    at, live = first + t * G, t < count
    of_key, of_token = at[:, None] * K + i[None, :], live[:, None] & (i < K)[None, :]
    key = tl.load(k + t[:, None] * k_token + i[None, :], mask=of_token, other=0.0).to(tl.float32)
    came = tl.load(changes + of_key, mask=of_token, other=0.0) * key  # to the diagonal of dPb, at each token
    if VARIANCE:
        query = tl.load(q + t[:, None] * q_token + i[None, :], mask=of_token, other=0.0).to(tl.float32)
        came += tl.load(grad_read + at, mask=live, other=0.0).to(tl.float32)[:, None] * query * query
    came += tl.where((t == count - 1)[:, None], tl.load(ends + here * P + i)[None, :], 0.0)
    later = t + 1 < count
    if DECAY == 2:
        logs = tl.load(log_decay + of_key + G * K, mask=of_token & later[:, None], other=0.0).to(tl.float32)
        spread = tl.associative_scan((tl.exp(2.0 * logs), came), 0, _then, reverse=True)[1]
        trace = tl.sum(spread, 1)
    elif DECAY == 1:
        logs = tl.load(log_decay + at + G, mask=later, other=0.0).to(tl.float32)
        trace = tl.associative_scan((tl.exp(2.0 * logs), tl.sum(came, 1)), 0, _then, reverse=True)[1]
    else:
        trace = tl.cumsum(tl.sum(came, 1), 0, reverse=True)
    tl.store(grad_process + band * part + at, trace, mask=live)
    if DECAY:
        tl.debug_barrier()  # what one thread stored another may load
        rest = tl.load(grad_gain + of_key, mask=of_token, other=0.0) * tl.load(gain + of_key, mask=of_token, other=0.0)
        rest += tl.load(dk + of_key, mask=of_token, other=0.0) * key
        if VARIANCE:
            rest += tl.load(dq + of_key, mask=of_token, other=0.0) * query
        noise = tl.load(process_noise + at, mask=live, other=0.0).to(tl.float32)
        flow = tl.load(balance + here * P + i)
        if DECAY == 2:
            change = noise[:, None] * spread - 0.5 * rest
            before = 2.0 * (flow[None, :] + tl.cumsum(change, 0) - change)
            tl.store(grad_decay + of_key, before, mask=of_token)
        else:
            change = noise * trace - 0.5 * tl.sum(rest, 1)
            before = 2.0 * (tl.sum(flow, 0) + tl.cumsum(change, 0) - change)
            tl.store(grad_decay + band * part + at, before, mask=live)


@triton.jit
def _then(later_decay, later, decay, came):
    """Two stretches of what fades backwards in time, as one."""
    return later_decay * decay, decay * later + came


def backward_wide(
    q: Tensor,
    k: Tensor,
    obs_noise: Tensor,
    process_noise: Tensor,
    log_decay: Tensor | None,
    gain: Tensor,
    scale: Tensor,
    kept: Tensor,
    segments: Segments | None,
    grad_gain: Tensor,
    grad_read: Tensor | None,
    grad_last: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """As `triton_backward.backward`."""
    (batch, length, shared, width), heads = k.shape, obs_noise.shape[2]
    like = {"dtype": torch.float32, "device": k.device}
    kinds = [x.dtype for x in (q, k, obs_noise, process_noise, k if log_decay is None else log_decay)]
    q, k, logs = rows(q), rows(k), k if log_decay is None else log_decay.contiguous()
    grad_gain, process_noise = grad_gain.contiguous(), process_noise.contiguous()
    variance, to_read = grad_read is not None, scale if grad_read is None else grad_read.contiguous()
    cut, lanes = cut_tokens(batch, length, WINDOW, segments, k), padded(width)
    adjoints = torch.zeros(*grad_last.shape[:2], lanes, lanes, **like)
    adjoints[..., :width, :width] = (grad_last + grad_last.mT) / 2
    tokens = torch.empty if segments is None else torch.zeros  # tokens outside every segment have no gradient
    changes, ends, balance = torch.empty_like(gain), *(torch.empty(cut.count, heads, lanes, **like) for _ in range(2))
    dk = tokens(gain.shape, **like)
    dq = tokens(gain.shape, **like) if variance else dk
    count = bands(lanes)
    grad_obs, grad_process = tokens(scale.shape, **like), tokens(count, *scale.shape, **like)
    grad_decay = torch.empty(1, 0, **like)
    if log_decay is not None:  # that of a head is summed over bands of keys
        grad_decay = tokens(count if log_decay.ndim == 3 else 1, *log_decay.shape, **like)
    options = {"K": width, "NEAR": NEAR, "WINDOW": WINDOW, "PACKED": segments is not None, **layout(lanes)}
    options |= {"DECAY": decay_kind(log_decay), "VARIANCE": variance}
    sizes = (length, cut.tiles, *q.stride()[1:3], *k.stride()[1:3], heads, heads // shared)
    Launch(_retreat, (cut.sequences, heads, count), (
        q, k, logs, gain, scale, grad_gain, to_read, kept, adjoints, changes, grad_obs, ends, balance,
        *meeting(adjoints), cut.runs, *sizes,
    ), options).run()  # fmt: skip
    Launch(_finish, (cut.count, heads, count), (
        q, k, process_noise, logs, gain, scale, grad_gain, to_read, kept, changes, grad_obs, ends, balance,
        dk, dq, grad_process, grad_decay, cut.table, scale.numel(), *sizes,
    ), options).run()  # fmt: skip
    grads = (dq if variance else None, dk, grad_obs, grad_process.sum(0), grad_decay.sum(0))
    return *as_inputs(grads, kinds, shared), adjoints[..., :width, :width].contiguous()
