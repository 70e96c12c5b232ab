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
2. `_retreat`: the adjoint from block to block, last to first, noting E (in the row "cuda": `cuda/backward.cu`);
3. `pull_back`: du of every token, and what follows without the covariance, of all blocks at once;
4. `finish`: Pb du, from the covariance that the forward pass kept at the entry of a window, all windows at once.

As in `triton`, `triton_blocks` or `triton_tokens` have all but the second, and long sequences are cut into stretches:
while `_retreat` is under way in one, the gradients of the gains of the one before, by which `delta` reads values, and
its `gather` run beside it.

A decay's gradient needs no product of Q and P: rescaling a row of the state, its key and its gain changes nothing.
So with h = diag(Q P) after a token, diag(dPb Pb) = h + (dc c + dk k + dq q) / 2, and the gradient of its log-decay is
twice what is left of this when the process noise's share is gone. `_retreat` notes h at the entry of every window.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kalmix.ops._dense.block_sizes import BLOCK, NARROW, WINDOW, padded
from kalmix.ops._dense.cuda.compile import chain as cuda_chain
from kalmix.ops._dense.triton import scalar_decay as triton_blocks
from kalmix.ops._dense.triton import vector_decay as triton_tokens
from kalmix.ops._dense.triton.forward import Kept
from kalmix.ops._dense.triton.parts import (
    COUNTS,
    around,
    chain_options,
    decay_kind,
    faded,
    narrow_product,
    product,
    splits,
    stretches,
)
from kalmix.ops._dense.triton.wide_backward import backward_wide
from kalmix.ops._linear_memory.triton.backward import backward as to_signals
from kalmix.ops._linear_memory.triton.backward import blank
from kalmix.ops._linear_memory.triton.forward import Results
from kalmix.ops._shared.triton.compile_and_launch import Launch
from kalmix.ops._shared.triton.tiles import rows, run_of
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
    v: Tensor,
    obs_noise: Tensor,
    process_noise: Tensor,
    log_decay: Tensor | None,
    found: Kept,
    results: Results,
    segments: Segments | None,
    size: int,
    grad_mean: Tensor,
    grad_read: Tensor | None,
    grad_after: Tensor,
    grad_last: Tensor,
    cuda: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of signals, that of log_decay of size 0 where there is none, and of the prior's mean and covariance.

    `cuda` takes `cuda/backward.cu` in place of `_retreat`.
    """
    (_, length, shared, width), heads, lanes = k.shape, obs_noise.shape[2], padded(k.shape[3])
    (gain, rounded, scale, kept), kind, variance = found, decay_kind(log_decay), grad_read is not None
    spans, of_mean = stretches(k, heads, size, kind, segments), (q, k, v, rounded, log_decay)
    grads = blank(q, v, rounded, log_decay, segments is not None)
    states = results.states.split([tiles.count for _, tiles in spans])
    if width > NARROW:
        through = (results, spans[0][1], grad_mean, grad_after, True, grads)
        before, signals = to_signals(*of_mean, *through), (q, k, obs_noise, process_noise, log_decay)
        own = backward_wide(*signals, gain, scale, kept, segments, grads.gain.float(), grad_read, grad_last)
        by_query, by_key, by_obs, by_process, by_decay, grad_last = own
        dq, dk, dv, _, ddecay = grads.gathered(q, rounded, log_decay)
        dq = dq + by_query if variance else dq
        return dq, dk + by_key, dv, by_obs, by_process, ddecay + by_decay, before, grad_last
    like = {"dtype": torch.float32, "device": k.device}
    grad_last = ((grad_last + grad_last.mT) / 2).contiguous()
    to_read = scale if grad_read is None else grad_read.contiguous()
    process_noise, logs = process_noise.contiguous(), k if log_decay is None else log_decay.contiguous()
    q, k = rows(q), rows(k)
    orders = (*q.stride()[1:3], *k.stride()[1:3], heads, heads // shared)
    tokens = torch.empty if segments is None else torch.zeros  # tokens outside every segment have no gradient
    grad_obs, grad_process = (tokens(scale.shape, **like) for _ in range(2))
    grad_decay = tokens((0,) if log_decay is None else log_decay.shape, **like)
    parts, shape = splits(k.dtype), {"K": width, "P": lanes, "BLOCK": BLOCK, "WINDOW": WINDOW, "VARIANCE": variance}
    shape |= {"PACKED": spans[0][0].packed}
    stages = triton_tokens if kind == 2 else triton_blocks
    options = {stage: stages.options(stage, kind, lanes, parts) | shape for stage in ("gather", "pull_back", "finish")}
    if kind == 2:  # decays one a key
        dk = tokens(gain.shape, **like)
        dq = tokens(gain.shape, **like) if variance else dk
    else:
        dq, dk = grads.q, grads.k  # what they hold is added to
    across = {"DECAY": kind, **chain_options(lanes, splits()), **shape}
    ready, retreat = [], cuda_chain("backward") if cuda else _retreat
    room = kept.split([windows.count for windows, _ in spans])
    for (cut, tiles), entering, covariances in reversed(list(zip(spans, states, room, strict=True))):
        through = (results._replace(states=entering), tiles, grad_mean, grad_after, True, grads)
        grad_after = to_signals(*of_mean, *through)

        def scratch(*sizes: int, blocks: int = cut.count * (WINDOW // BLOCK)) -> Tensor:
            return torch.empty(blocks, heads, *sizes, **like)

        sizes = (cut.table, length, cut.tiles, *orders)
        keys, writes, local, exits = (scratch(BLOCK, lanes) for _ in range(4))
        asked = scratch(BLOCK, lanes) if variance else keys
        coefficients, edges, spreads = scratch(3, BLOCK, BLOCK), scratch(lanes), scratch(lanes)
        balance, grad_prior = torch.empty(cut.count, heads, lanes, **like), torch.empty(grad_last.shape, **like)
        blocks, windows = (len(keys) * heads,), (cut.count * heads,)
        changes, noises, flows, queries = keys, writes, local, asked  # what they held is spent
        before = Launch(stages.gather, blocks, (
            q, k, logs, gain, scale, grads.gain, keys, writes, local, asked, coefficients, edges, *sizes,
        ), options["gather"])  # fmt: skip
        chain = Launch(retreat, (cut.sequences, heads), (
            keys, writes, local, asked, to_read, edges, covariances, grad_last, exits, spreads, balance, grad_prior,
            cut.runs, length, cut.tiles, heads,
        ), across)  # fmt: skip
        if kind == 2:
            gathered = scratch(lanes)
            after = [Launch(stages.pull_back, blocks, (
                q, k, process_noise, logs, gain, scale, grads.gain, to_read, coefficients, exits, spreads,
                dk, dq, grad_obs, grad_process, changes, queries, noises, gathered, flows, *sizes,
            ), options["pull_back"]), Launch(stages.finish, windows, (
                q, k, logs, covariances, changes, queries, noises, gathered, edges, flows, balance, dk, dq, grad_decay,
                *sizes,
            ), options["finish"])]  # fmt: skip
        else:
            after = [Launch(stages.pull_back, blocks, (
                q, k, process_noise, logs, gain, scale, grads.gain, to_read, coefficients, exits, spreads,
                grad_obs, grad_process, grad_decay, changes, *sizes,
            ), options["pull_back"]), Launch(stages.finish, windows, (
                q, k, process_noise, logs, gain, scale, to_read, covariances, changes, balance, grad_obs, dk, dq,
                grad_decay, *sizes,
            ), options["finish"])]  # fmt: skip
        ready.append(around(before, chain, after, alone=len(spans) == 1))
        grad_last = grad_prior
    for finish in ready:
        finish()
    if kind == 2:
        grads.k.add_(dk)
        if variance:
            grads.q.add_(dq)
    dq, dk, dv, _, ddecay = grads.gathered(q, rounded, log_decay)
    ddecay.add_(grad_decay.to(ddecay.dtype))
    by_obs, by_process = (x.to(signal.dtype) for x, signal in ((grad_obs, obs_noise), (grad_process, process_noise)))
    return dq, dk, dv, by_obs, by_process, ddecay, grad_after, grad_last
