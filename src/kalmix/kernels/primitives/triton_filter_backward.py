"""How the backward kernels of linear memories are launched: by rule, from widths and dtypes."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from kalmix.kernels.primitives.triton_filter import BLOCK, PIECE, carried, keyed_sizes, prepare, strides
from kalmix.kernels.primitives.triton_keys import unfold
from kalmix.kernels.primitives.triton_memory import read
from kalmix.kernels.primitives.triton_memory_backward import carry_back, gradients, pair_gradients, solve_back
from kalmix.kernels.primitives.triton_pieces import part
from kalmix.kernels.primitives.triton_tiles import rows
from kalmix.segments import Segments

PART = {"BLOCK": 64, "num_warps": 4, "num_stages": 1}
UNFOLD = {"BLOCK": 32, "num_warps": 1, "num_stages": 1}


def backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gain: Tensor | None,
    log_decay: Tensor | None,
    states: Tensor,
    errors: Tensor,
    inverses: Tensor,
    segments: Segments | None,
    grad_mean: Tensor,
    grad_last: Tensor,
    corrects: bool,
    size: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v, gain, log_decay (of size 0 where there is none) and the prior."""
    (batch, length, heads, width), (shared, keys) = v.shape, k.shape[2:]
    s = prepare(q, k, v, gain, log_decay, segments, corrects, size)
    cut, v, grad_mean, own = s.cut, rows(v), rows(grad_mean), heads // s.writes.shape[2]
    tiles, share = (cut.table, length, cut.tiles), heads // s.q.shape[2]
    like = {"dtype": v.dtype, "device": v.device}
    tokens = torch.empty if segments is None else torch.zeros  # tokens outside every segment have no gradient
    kinds = {"DECAYS": s.decays, "GAINS": s.gains and not s.keyed}
    dv = tokens(v.shape, **like)
    fast = free = v
    if corrects:
        fast, free = torch.empty(batch, length, heads, keys, **like), torch.empty(v.shape, **like)
        solve_back[cut.count, heads](
            s.q, s.writes, grad_mean, s.gain, s.log_decay, s.leaving, s.scores, inverses, fast, free, *tiles,
            *strides(s.q, s.writes, grad_mean), heads, share, own,
            **kinds, SCALED=s.decays or (s.gains and not s.keyed), GIVEN=s.keyed, num_warps=4, **s.sizes,
        )  # fmt: skip
    adjoints = torch.empty(states.shape, **like)
    dprior = torch.empty(grad_last.shape, dtype=grad_last.dtype, device=v.device)
    plan = carried(cut.sequences, heads, s.sizes, v.dtype, 3)
    carry_back[cut.sequences, heads, triton.cdiv(width, plan["VALUES"])](
        s.q, s.k, fast, free, grad_mean, dv, adjoints, grad_last, dprior, s.entering, s.across,
        cut.runs, length, cut.tiles, *strides(s.q, s.k, grad_mean), *grad_last.stride(), heads, share,
        DECAYS=s.decays, KEYED=s.keyed, CORRECTS=corrects, num_warps=4, **plan, **s.sizes,
    )  # fmt: skip
    if not corrects:
        errors = v
        wide = BLOCK if width <= BLOCK else 2 * BLOCK
        read[cut.count, heads, triton.cdiv(width, wide)](
            s.q, s.writes, grad_mean, s.gain, s.log_decay, s.scores, adjoints, dv, *tiles,
            *strides(s.q, s.writes, grad_mean), heads, share, own,
            VALUES=wide, GIVEN=s.keyed, BACK=True, num_warps=4, **kinds, **s.sizes,
        )  # fmt: skip
    parts, shape = triton.cdiv(keys, s.sizes["BLOCK"]), (batch, length, heads)
    signals, orders = (s.q, s.k, s.writes, errors, grad_mean, dv, s.gain, s.log_decay), (heads, share, own)
    float32 = {"dtype": torch.float32, "device": v.device}
    dscores, dcorrections = torch.empty(2, *shape, size, **like)
    dgain = tokens(parts, *shape, **float32)
    ddecay = tokens(1 if s.keyed else parts + 1, *shape, *([keys] if s.keyed else []), **float32)
    pair_gradients[cut.count, heads](
        *signals, dscores, dcorrections, ddecay, *tiles, *strides(*signals[:5]), *orders,
        CORRECTS=corrects, num_warps=4, **kinds, **s.sizes,
    )  # fmt: skip
    group = heads // shared  # value heads that share a key
    dq, dk = (tokens(*shape, keys, dtype=q.dtype if group == 1 else torch.float32, device=v.device) for _ in range(2))
    dwrites = tokens(*shape, keys, dtype=gain.dtype, device=v.device) if s.vector else dk
    found, dacross = (dq, dk, dwrites), ddecay
    if s.keyed:
        found, dacross = torch.empty(3, *shape, keys, **like), torch.empty(s.across.shape, **float32)
    gradients[cut.count, heads, parts](
        *signals, states, adjoints, dscores, dcorrections, *found, dgain, dacross,
        *tiles, batch * length, *strides(*signals[:5]), *orders,
        KEYED=s.keyed, VECTOR=s.vector, CORRECTS=corrects, num_warps=4, num_stages=2, **kinds, **s.sizes,
    )  # fmt: skip
    if s.keyed:
        kinds = keyed_sizes(s.sizes) | {"CORRECTS": corrects}
        pieces, whole = size // PIECE, found
        if pieces > 1:
            shares, found = torch.empty_like(s.pieces[3]), torch.empty_like(whole)
            part[cut.count, heads, triton.cdiv(keys, PART["BLOCK"])](
                *s.pieces, s.across, *whole, dacross, dscores, dcorrections, *found, shares, *tiles, heads,
                **kinds, **PART,
            )  # fmt: skip
        else:
            shares = s.across * dacross
        parts = triton.cdiv(keys, UNFOLD["BLOCK"])
        dgain = tokens(parts, *shape, **float32)
        inputs = (rows(q), rows(k), rows(gain) if s.vector else rows(k))
        unfold[cut.count * pieces, heads, parts](
            *inputs, s.gain, s.log_decay, *found, shares, dscores, dcorrections,
            dq, dk, dwrites, dgain, ddecay, *tiles, batch * length,
            *strides(*inputs, s.log_decay), heads, group, heads // inputs[2].shape[2],
            GAINS=s.gains, VECTOR=s.vector, **kinds, **UNFOLD,
        )  # fmt: skip
    if group > 1:
        dq, dk = (x.unflatten(2, (shared, group)).sum(3).to(q.dtype) for x in (dq, dk))
    dgain = v.new_empty(0) if gain is None else dwrites if s.vector else dgain.sum(0).to(gain.dtype)
    ddecay = v.new_empty(0) if log_decay is None else (ddecay[0] if s.keyed else ddecay.sum(0)).to(log_decay.dtype)
    return dq, dk, dv, dgain, ddecay, dprior
