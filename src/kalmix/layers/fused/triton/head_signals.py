"""Signals of heads: projections of tokens to a few columns, and an activation for each group of columns.

There are at most three groups of columns, each with its own weight. A program of the forward pass computes all columns
of a tile of tokens; a program of the backward pass serves a block of input columns and a strip of tiles. With few
tokens, as in decoding, a program computes a few columns of one token instead.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _round(x, DOT: tl.constexpr, EXACT: tl.constexpr):
    """Round the operand of a product to `DOT`."""
    rounded = x.to(DOT)
    if EXACT:
        rounded = rounded.to(tl.float32)  # Triton's interpreter treats bfloat16 as integers
    return rounded


@triton.jit
def _weights(w0, w1, w2, column, k, D: tl.constexpr, N0: tl.constexpr, N1: tl.constexpr, N2: tl.constexpr):
    """Load a tile of the weights of all groups; 0 beyond them."""
    inside = (column >= 0) & (k < D)
    tile = tl.load(w0 + column * D + k, mask=inside & (column < N0), other=0.0)
    if N1 > 0:
        mask = inside & (column >= N0) & (column < N0 + N1)
        tile += tl.load(w1 + (column - N0) * D + k, mask=mask, other=0.0).to(tile.dtype)
    if N2 > 0:
        mask = inside & (column >= N0 + N1) & (column < N0 + N1 + N2)
        tile += tl.load(w2 + (column - N0 - N1) * D + k, mask=mask, other=0.0).to(tile.dtype)
    return tile


@triton.jit
def _vector(
    p0, p1, p2, column, N0: tl.constexpr, N1: tl.constexpr, N2: tl.constexpr,
    H0: tl.constexpr, H1: tl.constexpr, H2: tl.constexpr,
):  # fmt: skip
    """Load a number for each column; 0 in groups without such numbers."""
    value = tl.zeros(column.shape, tl.float32)
    if H0:
        value += tl.load(p0 + column, mask=column < N0, other=0.0).to(tl.float32)
    if H1:
        value += tl.load(p1 + column - N0, mask=(column >= N0) & (column < N0 + N1), other=0.0).to(tl.float32)
    if H2:
        begin: tl.constexpr = N0 + N1
        value += tl.load(p2 + column - begin, mask=(column >= begin) & (column < begin + N2), other=0.0).to(tl.float32)
    return value


@triton.jit
def softplus(raw):
    """Compute max(raw, 0) + log(1 + exp(-|raw|)), to a relative error of about 2e-7."""
    s = tl.exp(-tl.abs(raw))
    # log(1 + s) / s for s in [0, 1]; its relative error is at most 5e-9
    ratio = -0.0032440091017633677 * s + 0.01985139027237892
    ratio = ratio * s - 0.056959398090839386
    ratio = ratio * s + 0.10603640973567963
    ratio = ratio * s - 0.1530558466911316
    ratio = ratio * s + 0.19675935804843903
    ratio = ratio * s - 0.24954132735729218
    ratio = ratio * s + 0.3332996368408203
    ratio = ratio * s - 0.4999990165233612
    return tl.where(raw > 0.0, raw, 0.0) + s * (ratio * s + 1.0)


@triton.jit
def _activate(raw, rate, constant, KIND: tl.constexpr):
    """Return the signal, its derivative, and the softplus of `raw`; `KIND` is one of `head_signals_launch.KINDS`."""
    weight = tl.sigmoid(raw)
    step = softplus(raw)
    if KIND == 1:
        value, slope = constant * weight, constant * weight * (1.0 - weight)
    elif KIND == 2:
        root = weight + constant
        value, slope = root * root, 2.0 * root * weight * (1.0 - weight)
    elif KIND == 3:
        value, slope = step + constant, weight
    else:
        value, slope = -rate * step, -rate * weight
    return value, slope, step


@triton.jit
def _signals(
    raw, rate, column, c0, c1, c2, N0: tl.constexpr, N1: tl.constexpr, N2: tl.constexpr,
    K0: tl.constexpr, K1: tl.constexpr, K2: tl.constexpr,
):  # fmt: skip
    """Return the signals of all columns, their derivatives, and the softplus of `raw`."""
    value, slope, step = _activate(raw, rate, c0, K0)
    if N1 > 0:
        value1, slope1, _ = _activate(raw, rate, c1, K1)
        later = column >= N0
        value, slope = tl.where(later, value1, value), tl.where(later, slope1, slope)
    if N2 > 0:
        value2, slope2, _ = _activate(raw, rate, c2, K2)
        last = column >= N0 + N1
        value, slope = tl.where(last, value2, value), tl.where(last, slope2, slope)
    return value, slope, step


@triton.jit
def _store(y0, y1, y2, row, column, value, mask, N0: tl.constexpr, N1: tl.constexpr, N2: tl.constexpr):
    """Store signals into the tensor of each group."""
    tl.store(y0 + row * N0 + column, value, mask=mask & (column < N0))
    if N1 > 0:
        tl.store(y1 + row * N1 + (column - N0), value, mask=mask & (column >= N0) & (column < N0 + N1))
    if N2 > 0:
        begin: tl.constexpr = N0 + N1
        tl.store(y2 + row * N2 + (column - begin), value, mask=mask & (column >= begin) & (column < begin + N2))


@triton.jit
def _store_steps(
    steps, row, column, step, mask, N0: tl.constexpr, N1: tl.constexpr, N2: tl.constexpr,
    K0: tl.constexpr, K1: tl.constexpr, K2: tl.constexpr,
):  # fmt: skip
    """Store the steps of the group of kind 5, "decay-step"."""
    if K0 == 5:
        tl.store(steps + row * N0 + column, step, mask=mask & (column < N0))
    if K1 == 5:
        tl.store(steps + row * N1 + (column - N0), step, mask=mask & (column >= N0) & (column < N0 + N1))
    if K2 == 5:
        begin: tl.constexpr = N0 + N1
        tl.store(steps + row * N2 + (column - begin), step, mask=mask & (column >= begin) & (column < begin + N2))


@triton.jit
def _load_grads(
    g0, g1, g2, row, column, mask, N0: tl.constexpr, N1: tl.constexpr, N2: tl.constexpr,
    H0: tl.constexpr, H1: tl.constexpr, H2: tl.constexpr,
):  # fmt: skip
    """Load the gradients of all signals; 0 for groups without gradients."""
    grad = tl.zeros(mask.shape, tl.float32)
    if H0:
        grad += tl.load(g0 + row * N0 + column, mask=mask & (column < N0), other=0.0)
    if H1:
        inside = mask & (column >= N0) & (column < N0 + N1)
        grad += tl.load(g1 + row * N1 + (column - N0), mask=inside, other=0.0)
    if H2:
        inside = mask & (column >= N0 + N1) & (column < N0 + N1 + N2)
        grad += tl.load(g2 + row * N2 + (column - N0 - N1), mask=inside, other=0.0)
    return grad


@triton.jit(do_not_specialize=["rows"])
def head_signals_forward(
    x, w0, w1, w2, b0, b1, b2, r0, r1, r2, y0, y1, y2, steps, raw, rows, stride, c0, c1, c2,
    D: tl.constexpr, NP: tl.constexpr, N0: tl.constexpr, N1: tl.constexpr, N2: tl.constexpr,
    K0: tl.constexpr, K1: tl.constexpr, K2: tl.constexpr, B0: tl.constexpr, B1: tl.constexpr, B2: tl.constexpr,
    R0: tl.constexpr, R1: tl.constexpr, R2: tl.constexpr, DOT: tl.constexpr, EXACT: tl.constexpr,
    BM: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Compute all columns of `BM` tokens."""
    row, column = (tl.program_id(0) * BM + tl.arange(0, BM)).to(tl.int64), tl.arange(0, NP)
    exists = (row < rows)[:, None]
    total = tl.zeros((BM, NP), tl.float32)
    for begin in range(0, D, BD):
        k = begin + tl.arange(0, BD)
        tokens = tl.load(x + row[:, None] * stride + k[None, :], mask=exists & (k < D)[None, :], other=0.0)
        weights = _weights(w0, w1, w2, column[None, :], k[:, None], D, N0, N1, N2)
        total = tl.dot(_round(tokens, DOT, EXACT), _round(weights, DOT, EXACT), total)
    total += _vector(b0, b1, b2, column, N0, N1, N2, B0, B1, B2)[None, :]
    rate = tl.exp(_vector(r0, r1, r2, column, N0, N1, N2, R0, R1, R2))
    value, _, step = _signals(total, rate[None, :], column[None, :], c0, c1, c2, N0, N1, N2, K0, K1, K2)
    at, mask = row[:, None], exists & (column < N0 + N1 + N2)[None, :]
    tl.store(raw + at * (N0 + N1 + N2) + column[None, :], total, mask=mask)
    _store(y0, y1, y2, at, column[None, :], value, mask, N0, N1, N2)
    _store_steps(steps, at, column[None, :], step, mask, N0, N1, N2, K0, K1, K2)


@triton.jit
def head_signals_step(
    x, w0, w1, w2, b0, b1, b2, r0, r1, r2, y0, y1, y2, steps, raw, stride, c0, c1, c2,
    D: tl.constexpr, N0: tl.constexpr, N1: tl.constexpr, N2: tl.constexpr,
    K0: tl.constexpr, K1: tl.constexpr, K2: tl.constexpr, B0: tl.constexpr, B1: tl.constexpr, B2: tl.constexpr,
    R0: tl.constexpr, R1: tl.constexpr, R2: tl.constexpr, E: tl.constexpr, EP: tl.constexpr,
    NB: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Compute `NB` columns of one token; with E > 1, group 0 has E rates and decays for each column."""
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * NB + tl.arange(0, NB)
    products = tl.zeros((NB, BD), tl.float32)
    for begin in range(0, D, BD):
        k = begin + tl.arange(0, BD)
        token = tl.load(x + row * stride + k, mask=k < D, other=0.0).to(tl.float32)
        weights = _weights(w0, w1, w2, column[:, None], k[None, :], D, N0, N1, N2).to(tl.float32)
        products += weights * token[None, :]
    total = tl.sum(products, axis=1) + _vector(b0, b1, b2, column, N0, N1, N2, B0, B1, B2)
    rate = tl.exp(_vector(r0, r1, r2, column, N0, N1, N2, R0 and E == 1, R1, R2))
    value, _, step = _signals(total, rate, column, c0, c1, c2, N0, N1, N2, K0, K1, K2)
    mask = column < N0 + N1 + N2
    tl.store(raw + row * (N0 + N1 + N2) + column, total, mask=mask)
    if E == 1:
        _store(y0, y1, y2, row, column, value, mask, N0, N1, N2)
    else:
        key, empty = tl.arange(0, EP), column < 0
        inside = (column < N0)[:, None] & (key < E)[None, :]
        log_rate = tl.load(r0 + column[:, None] * E + key[None, :], mask=inside, other=0.0).to(tl.float32)
        tl.store(y0 + (row * N0 + column[:, None]) * E + key[None, :], -tl.exp(log_rate) * step[:, None], mask=inside)
        _store(y0, y1, y2, row, column, value, mask & (empty | (column >= N0)), N0, N1, N2)
    _store_steps(steps, row, column, step, mask, N0, N1, N2, K0, K1, K2)


@triton.jit(do_not_specialize=["rows"])
def head_signals_gradients(
    raw, r0, r1, r2, g0, g1, g2, gsteps, draw, sums, rows, c0, c1, c2,
    NP: tl.constexpr, N0: tl.constexpr, N1: tl.constexpr, N2: tl.constexpr,
    K0: tl.constexpr, K1: tl.constexpr, K2: tl.constexpr, R0: tl.constexpr, R1: tl.constexpr, R2: tl.constexpr,
    G0: tl.constexpr, G1: tl.constexpr, G2: tl.constexpr, GS: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of the inputs of activations for a tile of tokens.

    Store also their sums over the tile, which are gradients of biases, and the gradients of log-rates.
    """
    row, column = (tl.program_id(0) * BM + tl.arange(0, BM)).to(tl.int64), tl.arange(0, NP)
    TOTAL: tl.constexpr = N0 + N1 + N2
    at, exists, inside = row[:, None], (row < rows)[:, None], column < TOTAL
    mask = exists & inside[None, :]
    rate = tl.exp(_vector(r0, r1, r2, column, N0, N1, N2, R0, R1, R2))[None, :]
    total = tl.load(raw + at * TOTAL + column[None, :], mask=mask, other=0.0)
    grad = _load_grads(g0, g1, g2, at, column[None, :], mask, N0, N1, N2, G0, G1, G2)
    value, slope, _ = _signals(total, rate, column[None, :], c0, c1, c2, N0, N1, N2, K0, K1, K2)
    drate = tl.sum(grad * value, axis=0)
    grad *= slope
    if GS:
        dstep = _load_grads(gsteps, gsteps, gsteps, at, column[None, :], mask, N0, N1, N2, K0 == 5, K1 == 5, K2 == 5)
        grad += dstep * tl.sigmoid(total)
    tl.store(draw + at * NP + column[None, :], grad.to(draw.dtype.element_ty), mask=exists)
    sums += tl.program_id(0).to(tl.int64) * (2 * TOTAL) + column
    tl.store(sums, tl.sum(grad, axis=0), mask=inside)
    tl.store(sums + TOTAL, drate, mask=inside)


@triton.jit(do_not_specialize=["rows", "tiles", "summands"])
def head_signals_backward(
    x, w0, w1, w2, draw, sums, dx, partial, rows, tiles, summands, stride,
    D: tl.constexpr, NP: tl.constexpr, N0: tl.constexpr, N1: tl.constexpr, N2: tl.constexpr,
    DOT: tl.constexpr, EXACT: tl.constexpr, BM: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Compute the gradient of a block of input columns, and add up those of weights over a strip of tiles.

    The programs of the first block also add up rows of `sums`, the results of `head_signals_gradients`.
    """
    column, k = tl.arange(0, NP), tl.program_id(1) * BD + tl.arange(0, BD)
    weights = _round(_weights(w0, w1, w2, column[:, None], k[None, :], D, N0, N1, N2), DOT, EXACT)
    dweights = tl.zeros((BD, NP), tl.float32)
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        row = (tile * BM + tl.arange(0, BM)).to(tl.int64)
        exists, at = (row < rows)[:, None], row[:, None]
        inside = exists & (k < D)[None, :]
        grad = _round(tl.load(draw + at * NP + column[None, :], mask=exists, other=0.0), DOT, EXACT)
        tokens = _round(tl.load(x + at * stride + k[None, :], mask=inside, other=0.0), DOT, EXACT)
        tl.store(dx + at * D + k[None, :], tl.dot(grad, weights).to(dx.dtype.element_ty), mask=inside)
        dweights = tl.dot(tl.trans(tokens), grad, dweights)
    TOTAL: tl.constexpr = N0 + N1 + N2
    partial += tl.program_id(0).to(tl.int64) * (TOTAL * (D + 2))
    mask = (column < TOTAL)[None, :] & (k < D)[:, None]
    tl.store(partial + column[None, :] * D + k[:, None], dweights, mask=mask)
    if tl.program_id(1) == 0:
        at = tl.arange(0, 2 * NP)
        total = tl.zeros((2 * NP,), tl.float32)
        for i in range(tl.program_id(0), summands, tl.num_programs(0)):
            total += tl.load(sums + i * (2 * TOTAL) + at, mask=at < 2 * TOTAL, other=0.0)
        tl.store(partial + TOTAL * D + at, total, mask=at < 2 * TOTAL)
