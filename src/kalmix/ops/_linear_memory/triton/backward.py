"""How the backward kernels of linear memories are launched: by rule, from widths and dtypes."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kalmix.ops._linear_memory.triton.backward_kernels import carry_back, gradients, pair_gradients, solve_back
from kalmix.ops._linear_memory.triton.forward import BLOCK, PIECE, Results, carried, keyed_sizes, prepare, strides
from kalmix.ops._linear_memory.triton.forward_kernels import read
from kalmix.ops._linear_memory.triton.vector_decay import unfold
from kalmix.ops._linear_memory.triton.vector_decay_tiles import part
from kalmix.ops._shared.triton.compile_and_launch import Launch
from kalmix.ops._shared.triton.tiles import Tiling, contiguous_rows

PART = {"BLOCK": 64, "num_warps": 4, "num_stages": 1}
UNFOLD = {"BLOCK": 32, "num_warps": 1, "num_stages": 1}


class Gradients(NamedTuple):
    """Of signals, a value head: room that the backward pass fills, in float32 where it is still to be added up.

    Attributes:
        q, k, v: as the signals, but for their heads.
        gain, log_decay: as the signals if they are vectors, else shares `[shares, B, T, G]`; empty if there are none.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    gain: Tensor
    log_decay: Tensor

    def gathered(self, q: Tensor, gain: Tensor | None, log_decay: Tensor | None) -> Gradients:
        """As the signals: added up over value heads that share a key."""
        shared = q.shape[2]
        dq, dk = (x if x.shape[2] == shared else x.unflatten(2, (shared, -1)).sum(3) for x in (self.q, self.k))
        own = [
            x if signal is None else (x if signal.ndim == 4 else x.sum(0)).to(signal.dtype)
            for x, signal in ((self.gain, gain), (self.log_decay, log_decay))
        ]
        return Gradients(dq.to(q.dtype), dk.to(q.dtype), self.v, *own)


def blank(q: Tensor, v: Tensor, gain: Tensor | None, log_decay: Tensor | None, packed: bool) -> Gradients:
    """Room for gradients; 0 where tokens may lie outside every sequence."""
    tokens, like, shape = torch.zeros if packed else torch.empty, {"device": v.device}, (*v.shape[:3], q.shape[3])
    exact = {"dtype": torch.float32, **like}
    dq, dk = (tokens(shape, dtype=q.dtype if v.shape[2] == q.shape[2] else torch.float32, **like) for _ in range(2))
    dv, dgain, ddecay = tokens(v.shape, dtype=v.dtype, **like), torch.empty(0, **exact), torch.empty(0, **exact)
    keyed = log_decay is not None and log_decay.ndim == 4
    shares = -(-shape[3] // (UNFOLD["BLOCK"] if keyed else BLOCK))
    if gain is not None:
        dgain = tokens(shape, dtype=gain.dtype, **like) if gain.ndim == 4 else tokens(shares, *shape[:3], **exact)
    if log_decay is not None:
        ddecay = tokens(*shape if keyed else (shares + 1, *shape[:3]), **exact)
    return Gradients(dq, dk, dv, dgain, ddecay)


def backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gain: Tensor | None,
    log_decay: Tensor | None,
    kept: Results,
    cut: Tiling,
    grad_mean: Tensor,
    grad_last: Tensor,
    corrects: bool,
    grads: Gradients,
) -> Tensor:
    """Fill the gradients of some tiles, and return that of the prior."""
    (batch, length, heads, width), keys, size = v.shape, k.shape[3], cut.size
    s = prepare(q, k, v, gain, log_decay, cut, corrects)
    v, grad_mean, own = contiguous_rows(v), contiguous_rows(grad_mean), heads // s.writes.shape[2]
    tiles, share = (cut.tile_table, length, cut.tiles), heads // s.q.shape[2]
    like = {"dtype": v.dtype, "device": v.device}
    _, states, errors, inverses = kept
    dq, dk, dv, dgain, ddecay = grads
    kinds = {"DECAYS": s.decays, "GAINS": s.gains and not s.keyed}
    fast, free = v, v
    if corrects:
        fast, free = torch.empty(batch, length, heads, keys, **like), torch.empty(v.shape, **like)
        options = {"SCALED": s.decays or (s.gains and not s.keyed), "GIVEN": s.keyed, "num_warps": 4}
        Launch(solve_back, (cut.num_tiles * heads,), (
            s.q, s.writes, grad_mean, s.gain, s.log_decay, s.leaving, s.scores, inverses, fast, free, *tiles,
            *strides(s.q, s.writes, grad_mean), heads, share, own,
        ), {**kinds, **options, **s.sizes}).run()  # fmt: skip
    adjoints = torch.empty(states.shape, **like)
    dprior = torch.empty(grad_last.shape, dtype=grad_last.dtype, device=v.device)
    plan = carried(cut.num_sequences, heads, s.sizes, v.dtype, 3)
    options = {"DECAYS": s.decays, "KEYED": s.keyed, "CORRECTS": corrects, "num_warps": 4}
    Launch(carry_back, (cut.num_sequences, heads, -(-width // plan["VALUES"])), (
        s.q, s.k, fast, free, grad_mean, dv, adjoints, grad_last, dprior, s.entering, s.across,
        cut.sequence_table, length, cut.tiles, *strides(s.q, s.k, grad_mean), *grad_last.stride(), heads, share,
    ), {**options, **plan, **s.sizes}).run()  # fmt: skip
    if not corrects:
        errors = v
        wide = BLOCK if width <= BLOCK else 2 * BLOCK
        Launch(read, (cut.num_tiles * heads * -(-width // wide),), (
            s.q, s.writes, grad_mean, s.gain, s.log_decay, s.scores, adjoints, dv, *tiles,
            *strides(s.q, s.writes, grad_mean), heads, share, own,
        ), {"VALUES": wide, "GIVEN": s.keyed, "BACK": True, "num_warps": 4, **kinds, **s.sizes}).run()  # fmt: skip
    parts, shape = -(-keys // s.sizes["BLOCK"]), (batch, length, heads)
    signals, orders = (s.q, s.k, s.writes, errors, grad_mean, dv, s.gain, s.log_decay), (heads, share, own)
    float32 = {"dtype": torch.float32, "device": v.device}
    dscores, dcorrections = torch.empty(2, *shape, size, **like)
    Launch(pair_gradients, (cut.num_tiles * heads,), (
        *signals, dscores, dcorrections, ddecay, *tiles, *strides(*signals[:5]), *orders,
    ), {"CORRECTS": corrects, "num_warps": 4, **kinds, **s.sizes}).run()  # fmt: skip
    found, across = (dq, dk, dgain if s.vector else dk), ddecay
    if s.keyed:
        found, across = torch.empty(3, *shape, keys, **like), torch.empty(s.across.shape, **float32)
    options = {"KEYED": s.keyed, "VECTOR": s.vector, "CORRECTS": corrects, "num_warps": 4, "num_stages": 2}
    Launch(gradients, (cut.num_tiles * heads * parts,), (
        *signals, states, adjoints, dscores, dcorrections, *found, dgain, across,
        *tiles, batch * length, *strides(*signals[:5]), *orders,
    ), {**options, **kinds, **s.sizes}).run()  # fmt: skip
    if s.keyed:
        kinds = keyed_sizes(s.sizes, corrects)
        pieces, whole = size // PIECE, found
        if pieces > 1:
            shares, found = torch.empty_like(s.pieces[3]), torch.empty_like(whole)
            Launch(part, (cut.num_tiles, heads, -(-keys // PART["BLOCK"])), (
                *s.pieces, s.across, *whole, across, dscores, dcorrections, *found, shares, *tiles, heads,
            ), {**kinds, **PART}).run()  # fmt: skip
        else:
            shares = s.across * across
        inputs = (
            contiguous_rows(q),
            contiguous_rows(k),
            contiguous_rows(gain) if s.vector else contiguous_rows(k),
        )
        Launch(unfold, (cut.num_tiles * pieces, heads, -(-keys // UNFOLD["BLOCK"])), (
            *inputs, s.gain, s.log_decay, *found, shares, dscores, dcorrections,
            dq, dk, dgain if s.vector else dk, dgain, ddecay, *tiles, batch * length,
            *strides(*inputs, s.log_decay), heads, heads // q.shape[2], heads // inputs[2].shape[2],
        ), {"GAINS": s.gains, "VECTOR": s.vector, **kinds, **UNFOLD}).run()  # fmt: skip
    return dprior
