"""`dense` in Triton, backward: the adjoint of the covariance and of every token's gain.

With Q the adjoint of the covariance after a token, c its gain, s its innovation variance and F = I - c k' (so that the
covariance after it is F Pb), the token's own gradients and the adjoint before it are

    w = F' dc / s,   e = Q c,   m = c'Q c,   du = w - 2 e + m k,   ds = m - dc'c / s
    dk = ds s c + Pb du,   d obs_noise = ds,   dPb = F'Q F + sym(w k') = Q + sym(du k'),   d process_noise = tr dPb

and dP = A dPb A. Over a block this is linear in Q: with W the block's own gains at its exit (what each value adds to
the mean there), E = W Q and Z = E A - E W' K~ / 2 - Y,

    dP = A Q A - K~' Z - Z' K~

where Y holds what the tokens of the block add. Only that is sequential. So there are four launches:

1. `gather`: W and Y of every block, at once;
2. `_retreat`: the adjoint from block to block, last to first, noting E (on Hopper `retreat.cu`);
3. `pull_back`: du of every token, and what follows without the covariance, of all blocks at once;
4. `finish`: Pb du, from the covariance that the forward pass kept at the entry of a window, all windows at once.

As in `triton`, `triton_blocks` or `triton_tokens` have all but the second.

A decay's gradient needs no product of Q and P: rescaling a row of the state, its key and its gain changes nothing.
So with h = diag(Q P) after a token, diag(dPb Pb) = h + (dc c + dk k + dq q) / 2, and the gradient of its log-decay is
twice what is left of this when the process noise's share is gone. `_retreat` notes h at the entry of every window.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kalmix.kernels.dense import triton_blocks, triton_tokens
from kalmix.kernels.dense.cuda import on_hopper
from kalmix.kernels.dense.triton_parts import (
    COUNTS,
    Launch,
    as_inputs,
    chain_warps,
    decay_kind,
    faded,
    launch,
    narrow_product,
    product,
    splits,
)
from kalmix.kernels.dense.triton_wide_backward import backward_wide
from kalmix.kernels.dense.windows import BLOCK, NARROW, WINDOW, padded
from kalmix.kernels.primitives.triton_tiles import cut_tokens, rows, run_of
from kalmix.segments import Segments


@triton.jit(do_not_specialize=COUNTS)
def _retreat(
    keys, writes, local, asked, grad_read, edges, kept, grad_last, exits, spreads, balance, grad_prior, runs,
    length, tiles, G,
    K: tl.constexpr, P: tl.constexpr, BLOCK: tl.constexpr, WINDOW: tl.constexpr, PACKED: tl.constexpr,
    DECAY: tl.constexpr, VARIANCE: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    sequence, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    tile, token, count = run_of(runs, sequence, length, tiles, PACKED)
    PIECES: tl.constexpr = WINDOW // BLOCK
    i, j, row = tl.arange(0, P), tl.arange(0, P), tl.arange(0, BLOCK)
    inside = (i < K)[:, None] & (j < K)[None, :]
    whole = (sequence * G + head) * (K * K) + i[:, None] * K + j[None, :]
    adjoint = tl.load(grad_last + whole, mask=inside, other=0.0)
    spread = tl.sum(tl.where(i[:, None] == j[None, :], adjoint, 0.0), 1)  # the diagonal
    flat, turn = row[:, None] * P + j[None, :], row[None, :] * P + i[:, None]
    windows = tl.cdiv(count, WINDOW)
    for away in range(windows):
        window = windows - 1 - away
        start, end = window * PIECES, tl.minimum((window + 1) * PIECES, tl.cdiv(count, BLOCK))
        for back in range(end - start):
            block = end - 1 - back
            slot = (tile * PIECES + block) * G + head
            base = slot * (BLOCK * P)
            write, written = tl.load(writes + base + flat), tl.load(writes + base + turn)
            key, turned = tl.load(keys + base + flat), tl.load(keys + base + turn)
            added = tl.load(local + base + turn)
            reach = tl.load(edges + slot * P + i)
            tl.store(spreads + slot * P + i, spread)
            leaving = product(adjoint, written, SPLIT)
            tl.store(exits + base + turn, leaving)
            twice = narrow_product(write, leaving, SPLIT, BLOCK, P)
            change = added - leaving * reach[:, None] + product(turned, 0.5 * twice, SPLIT)
            spread = spread * reach * reach + 2.0 * tl.sum(turned * change, 1)
            adjoint = faded(adjoint, edges + slot * P, i, j, DECAY)
            adjoint += product(turned, tl.trans(change), SPLIT, product(change, key, SPLIT))
            if VARIANCE:
                t = block * BLOCK + row
                weight = tl.load(grad_read + (token + t) * G + head, mask=t < count, other=0.0).to(tl.float32)
                query = tl.load(asked + base + turn)
                spread += tl.sum(query * query * weight[None, :], 1)
                adjoint += product(query * weight[None, :], tl.load(asked + base + flat), SPLIT)
        if DECAY:
            here = (tile + window) * G + head
            state = tl.load(kept + here * (P * P) + i[:, None] * P + j[None, :])
            tl.store(balance + here * P + i, tl.sum(adjoint * state, 1))
    tl.store(grad_prior + whole, adjoint, mask=inside)


def backward(
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
    """Gradients of q, k, obs_noise, process_noise, log_decay and the prior's covariance."""
    (batch, length, shared, width), heads = k.shape, obs_noise.shape[2]
    if width > NARROW:
        signals = (q, k, obs_noise, process_noise, log_decay)
        return backward_wide(*signals, gain, scale, kept, segments, grad_gain, grad_read, grad_last)
    like = {"dtype": torch.float32, "device": k.device}
    kinds = [x.dtype for x in (q, k, obs_noise, process_noise, k if log_decay is None else log_decay)]
    q, k, variance = rows(q), rows(k), grad_read is not None
    grad_gain, process_noise = grad_gain.contiguous(), process_noise.contiguous()
    grad_last = ((grad_last + grad_last.mT) / 2).contiguous()
    grad_read = grad_read.contiguous() if grad_read is not None else scale
    kind, logs = decay_kind(log_decay), k if log_decay is None else log_decay.contiguous()
    cut, lanes = cut_tokens(batch, length, WINDOW, segments, k), padded(width)
    blocks = cut.count * (WINDOW // BLOCK)
    shape = {"K": width, "P": lanes, "BLOCK": BLOCK, "WINDOW": WINDOW, "PACKED": segments is not None}
    shape |= {"VARIANCE": variance}
    sizes = (cut.table, length, cut.tiles, *q.stride()[1:3], *k.stride()[1:3], heads, heads // shared)
    steps = []

    def scratch(*sizes: int) -> Tensor:
        return torch.empty(blocks, heads, *sizes, **like)

    keys, writes, local, exits = (scratch(BLOCK, lanes) for _ in range(4))
    asked = scratch(BLOCK, lanes) if variance else keys
    coefficients, edges, spreads = scratch(3, BLOCK, BLOCK), scratch(lanes), scratch(lanes)
    if kind == 2:  # decays one a key
        gather, options = triton_tokens.gather, triton_tokens.options(lanes) | {"SPLIT": splits()}
    else:
        gather, options = triton_blocks.gather, triton_blocks.options(kind, lanes)
    steps.append(Launch(gather, (blocks, heads), (
        q, k, logs, gain, scale, grad_gain, keys, writes, local, asked, coefficients, edges, *sizes,
    ), options | shape))  # fmt: skip
    balance = torch.empty(cut.count, heads, lanes, **like)
    chain = {"SPLIT": splits(), "num_warps": chain_warps(lanes), "num_stages": 1, "DECAY": kind, **shape}
    grad_prior = torch.empty(grad_last.shape, **like)
    steps.append(Launch(on_hopper("retreat", _retreat, k, lanes), (cut.sequences, heads), (
        keys, writes, local, asked, grad_read, edges, kept, grad_last, exits, spreads, balance, grad_prior,
        cut.runs, length, cut.tiles, heads,
    ), chain))  # fmt: skip
    tokens = torch.empty if segments is None else torch.zeros  # tokens outside every segment have no gradient
    alone = heads == shared and kind < 2  # else gradients are added up before they are rounded
    dk = tokens(gain.shape, dtype=kinds[1] if alone else torch.float32, device=k.device)
    dq = tokens(gain.shape, dtype=kinds[0] if alone else torch.float32, device=k.device) if variance else dk
    grad_obs, grad_process = (tokens(scale.shape, **like) for _ in range(2))
    grad_decay = torch.empty(0, **like) if log_decay is None else tokens(log_decay.shape, **like)
    changes, noises, flows, queries = keys, writes, local, asked  # what they held is spent
    if kind == 2:
        gathered = scratch(lanes)
        steps.append(Launch(triton_tokens.pull_back, (blocks, heads), (
            q, k, process_noise, logs, gain, scale, grad_gain, grad_read, coefficients, exits, spreads,
            dk, dq, grad_obs, grad_process, changes, queries, noises, gathered, flows, *sizes,
        ), triton_tokens.options(lanes) | shape))  # fmt: skip
        steps.append(Launch(triton_tokens.finish, (cut.count, heads), (
            q, k, logs, kept, changes, queries, noises, gathered, edges, flows, balance, dk, dq, grad_decay, *sizes,
        ), triton_tokens.window_options(lanes) | shape))  # fmt: skip
    else:
        steps.append(Launch(triton_blocks.pull_back, (blocks, heads), (
            q, k, process_noise, logs, gain, scale, grad_gain, grad_read, coefficients, exits, spreads,
            grad_obs, grad_process, grad_decay, changes, *sizes,
        ), options | shape))  # fmt: skip
        steps.append(Launch(triton_blocks.finish, (cut.count, heads), (
            q, k, process_noise, logs, gain, scale, grad_read, kept, changes, balance, grad_obs, dk, dq, grad_decay,
            *sizes,
        ), triton_blocks.window_options(kind, lanes) | shape))  # fmt: skip
    launch(steps)

    grads = (dq if variance else None, dk, grad_obs, grad_process, grad_decay)
    return *as_inputs(grads, kinds, shared), grad_prior
