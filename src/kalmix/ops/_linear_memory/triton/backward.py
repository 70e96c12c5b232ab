"""Launches of the backward kernels of linear memories. Block sizes follow from widths and dtypes; nothing is tuned."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kalmix.ops._linear_memory.scratch import SUBTILE
from kalmix.ops._linear_memory.triton.backward_kernels import (
    pair_gradients,
    scan_memory_backward,
    signal_gradients,
    solve_errors_backward,
)
from kalmix.ops._linear_memory.triton.forward import (
    BLOCK,
    ForwardResults,
    num_boundaries,
    per_key_options,
    per_key_sizes,
    prepare_signals,
    scan_options,
    strides,
)
from kalmix.ops._linear_memory.triton.forward_kernels import read_out
from kalmix.ops._linear_memory.triton.vector_decay_backward import unfold_decays
from kalmix.ops._linear_memory.triton.vector_decay_pairs import GROUP_KEYS
from kalmix.ops._shared.triton.compile_and_launch import Launch
from kalmix.ops._shared.triton.tiles import Tiling, contiguous_rows

UNFOLD_KEYS = GROUP_KEYS.value  # keys of a program of `unfold_decays`, unless its decays are moderate
# In half precision, and in float32: the fastest options that agreed with float64.
UNFOLD_OPTIONS = {"BLOCK": 16, "num_warps": 1, "num_stages": 2}, {"BLOCK": 32, "num_warps": 2, "num_stages": 1}
MODERATE_KEYS = 32  # keys of a program for moderate decays
MODERATE_OPTIONS = {"BLOCK": 32, "num_warps": 1, "num_stages": 1}


class Gradients(NamedTuple):
    """Gradients of the signals per value head; in float32 if they are still to be summed.

    Attributes:
        q, k: `[B, T, G, K]`.
        v: `[B, T, G, V]`.
        gain, log_decay: `[B, T, G, K]` for vectors; partial sums `[blocks, B, T, G]` for scalars; empty if there is no
            such signal.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    gain: Tensor
    log_decay: Tensor

    def reduce(self, q: Tensor, gain: Tensor | None, log_decay: Tensor | None) -> Gradients:
        """Sum partial sums, and sum over value heads that share a key head; return gradients shaped as the signals."""
        key_heads = q.shape[2]
        dq, dk = (x if x.shape[2] == key_heads else x.unflatten(2, (key_heads, -1)).sum(3) for x in (self.q, self.k))
        reduced = [
            x if signal is None else (x if signal.ndim == 4 else _sum_parts(x)).to(signal.dtype)
            for x, signal in ((self.gain, gain), (self.log_decay, log_decay))
        ]
        return Gradients(dq.to(q.dtype), dk.to(q.dtype), self.v, *reduced)


def _keys_per_gain_sum(dtype: torch.dtype) -> int:
    """Return the number of keys that a partial gradient of gains of `unfold_decays` covers."""
    return MODERATE_KEYS if dtype == torch.bfloat16 else UNFOLD_KEYS


def _sum_parts(x: Tensor) -> Tensor:
    """Sum over the first axis; a single part is returned without a copy."""
    return x[0] if x.shape[0] == 1 else x.sum(0)


def allocate_gradients(q: Tensor, v: Tensor, gain: Tensor | None, log_decay: Tensor | None, packed: bool) -> Gradients:
    """Allocate gradients; they are zero where tokens may lie outside every sequence."""
    tokens, like, shape = torch.zeros if packed else torch.empty, {"device": v.device}, (*v.shape[:3], q.shape[3])
    exact = {"dtype": torch.float32, **like}
    dq, dk = (tokens(shape, dtype=q.dtype if v.shape[2] == q.shape[2] else torch.float32, **like) for _ in range(2))
    dv, dgain, ddecay = tokens(v.shape, dtype=v.dtype, **like), torch.empty(0, **exact), torch.empty(0, **exact)
    per_key = log_decay is not None and log_decay.ndim == 4
    blocks = -(-shape[3] // (_keys_per_gain_sum(v.dtype) if per_key else BLOCK))
    if gain is not None:
        dgain = tokens(shape, dtype=gain.dtype, **like) if gain.ndim == 4 else tokens(blocks, *shape[:3], **exact)
    if log_decay is not None:
        ddecay = tokens(*shape if per_key else (blocks + 1, *shape[:3]), **exact)
    return Gradients(dq, dk, dv, dgain, ddecay)


def backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gain: Tensor | None,
    log_decay: Tensor | None,
    stored: ForwardResults,
    tiling: Tiling,
    grad_mean: Tensor,
    grad_final: Tensor | None,
    corrects: bool,
    grads: Gradients | None,
    adjoints: Tensor | None = None,
    no_prior: bool = False,
) -> Tensor:
    """Differentiate `forward` at the tokens of `tiling`: write to `grads`, and return the gradient of the prior.

    Args:
        q, k, v, gain, log_decay: signals.
        stored: results of `forward`.
        tiling: the tiles.
        grad_mean: gradient of the means.
        grad_final: gradient of the final memories; `None` for zeros, with packed sequences only.
        corrects: whether to differentiate `delta`.
        grads: gradients of the signals. If `None`, only the gradient of the prior is computed.
        adjoints: tensor to write the gradients of the memories at the end of each tile to, shaped as `stored.states`,
            or `None`.
        no_prior: see `forward`. There is no gradient of the prior then: the result is empty.
    """
    (batch, length, heads, width), keys, size = v.shape, k.shape[3], tiling.size
    s = prepare_signals(q, k, v, gain, log_decay, tiling, corrects, stored, stored=True)
    v, grad_mean, write_group = contiguous_rows(v), contiguous_rows(grad_mean), heads // s.writes.shape[2]
    tiles, group = (tiling.tile_table, length, tiling.tiles), heads // s.q.shape[2]
    like = {"dtype": v.dtype, "device": v.device}
    _, states, errors, inverses, *_ = stored
    dq, dk, dv, dgain, ddecay = (v,) * 5 if grads is None else grads
    features = {"DECAYS": s.scalar_decays, "GAINS": s.scalar_gains and not s.per_key}
    exit_map, local_grads, has_final = v, v, grad_final is not None
    if corrects:
        exit_map = torch.empty(batch, length, heads, keys, **like)
        local_grads = torch.empty(v.shape, **like) if has_final or grads is None else dv
        scaled = s.scalar_decays or (s.scalar_gains and not s.per_key)
        options = {"SCALED": scaled, "PRECOMPUTED": s.per_key, "num_warps": 4}
        Launch(solve_errors_backward, (tiling.num_tiles * heads,), (
            s.q, s.writes, grad_mean, s.gain, s.log_decay, s.to_end, s.scores, inverses, exit_map, local_grads, *tiles,
            *strides(s.q, s.writes, grad_mean), heads, group, write_group,
        ), {**features, **options, **s.sizes}).run()  # fmt: skip
    if adjoints is None:
        num_adjoints = (tiling.num_tiles if has_final else num_boundaries(v, size)) if grads is not None else 0
        adjoints = torch.empty(num_adjoints * heads * keys * width, **like)
    prior_shape = (0,) if no_prior else (tiling.num_sequences, heads, keys, width)
    grad_prior = torch.empty(prior_shape, dtype=torch.float32, device=v.device)
    if grad_final is None:
        grad_final = grad_prior.view(*grad_prior.shape, *[1] * (4 - grad_prior.ndim))  # is not read
    plan = scan_options(tiling.num_sequences, v, s.sizes, 3)
    options = {"DECAYS": s.scalar_decays, "PER_KEY": s.per_key, "CORRECTS": corrects, "num_warps": 4}
    options |= {"STORE": grads is not None, "NO_PRIOR": no_prior, "FINAL": has_final}
    Launch(scan_memory_backward, (tiling.num_sequences, heads, -(-width // plan["VALUES"])), (
        s.q, s.k, exit_map, local_grads, grad_mean, dv, adjoints, grad_final, grad_prior, s.from_start, s.tile_decay,
        tiling.sequence_table, length, tiling.tiles, *strides(s.q, s.k, grad_mean), *grad_final.stride(), heads, group,
    ), {**options, **plan, **s.sizes}).run()  # fmt: skip
    if grads is None:
        return grad_prior
    if not corrects:
        errors = v
        values = BLOCK if width <= BLOCK else 2 * BLOCK
        options = {"VALUES": values, "PRECOMPUTED": s.per_key, "BACKWARD": True, "INNER": not has_final, "num_warps": 4}
        Launch(read_out, (tiling.num_tiles * heads * -(-width // values),), (
            s.q, s.writes, grad_mean, s.gain, s.log_decay, s.scores, adjoints, dv, *tiles,
            *strides(s.q, s.writes, grad_mean), heads, group, write_group,
        ), {**options, **features, **s.sizes}).run()  # fmt: skip
    blocks, shape = -(-keys // s.sizes["BLOCK"]), (batch, length, heads)
    signals = (s.q, s.k, s.writes, errors, grad_mean, dv, s.gain, s.log_decay)
    groups = heads, group, write_group
    dscores, dcorrections = torch.empty(2, *shape, size, **like)
    Launch(pair_gradients, (tiling.num_tiles * heads,), (
        *signals, dscores, dcorrections, ddecay, *tiles, *strides(*signals[:5]), *groups,
    ), {"CORRECTS": corrects, "num_warps": 4, **features, **s.sizes}).run()  # fmt: skip
    folded_grads, decay_grads = (dq, dk, dgain if s.vector_gains else dk), ddecay
    if s.per_key:
        folded_grads, decay_grads = torch.empty(3, *shape, keys, **like), torch.empty_like(s.subtiles[3])
    options = {
        "PER_KEY": s.per_key,
        "VECTOR": s.vector_gains,
        "CORRECTS": corrects,
        "NO_PRIOR": no_prior,
        "FINAL": has_final,
    }
    options |= {"num_warps": 4, "num_stages": 2}
    Launch(signal_gradients, (tiling.num_tiles * heads * blocks,), (
        *signals, s.tile_decay, states, adjoints, dscores, dcorrections, *folded_grads, dgain, decay_grads,
        *tiles, batch * length, *strides(*signals[:5]), *groups,
    ), {**options, **features, **s.sizes}).run()  # fmt: skip
    if s.per_key:
        inputs = (
            contiguous_rows(q),
            contiguous_rows(k),
            contiguous_rows(gain) if s.vector_gains else contiguous_rows(k),
        )
        options = per_key_sizes(s.sizes, corrects) | {"GAINS": s.scalar_gains, "VECTOR": s.vector_gains}
        kinds = {"any": (UNFOLD_KEYS, per_key_options(UNFOLD_OPTIONS, keys, v))}
        if v.dtype == torch.bfloat16:
            kinds = {"moderate": (MODERATE_KEYS, MODERATE_OPTIONS), "strong": kinds["any"]}
        for kind, (program_keys, kind_options) in kinds.items():
            key_blocks = -(-keys // program_keys)
            Launch(unfold_decays, (tiling.num_tiles * (size // SUBTILE) * key_blocks, heads), (
                *inputs, s.gain, s.log_decay, *s.subtiles, *folded_grads, decay_grads, dscores, dcorrections,
                dq, dk, dgain if s.vector_gains else dk, dgain, ddecay, *tiles, batch * length,
                *strides(*inputs, s.log_decay), heads, heads // q.shape[2], heads // inputs[2].shape[2],
            ), {
                "DECAY_KIND": kind, "KEYS": program_keys,
                "GAIN_SUMS": program_keys // _keys_per_gain_sum(v.dtype), **options, **kind_options,
            }).run()  # fmt: skip
    return grad_prior
