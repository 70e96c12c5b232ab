"""`diagonal`, step by step: the recursion as it is written, for tests and for float64. Memory O(T K V)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kalmix.beliefs import DiagonalBelief
from kalmix.segments import Segments
from kalmix.types import Filtered


def diagonal(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    precision: Tensor,
    log_decay: Tensor,
    process_noise: Tensor,
    belief: DiagonalBelief,
    segments: Segments | None,
    variance: bool,
) -> Filtered:
    """Equations 16 to 23 of Kalman Linear Attention in the moment form, one token at a time, any autograd.

    Takes `log_decay` and `process_noise` as `[G, K, V]` or `[B, T, G, K, V]`. See `kalmix.ops.diagonal`.
    """
    batch, length, heads, _ = v.shape
    dtype = belief.mean.dtype
    q, k = (x.to(dtype).repeat_interleave(heads // x.shape[2], dim=2)[..., None] for x in (q, k))  # [B, T, G, K, 1]
    v_rows, w_rows = v.to(dtype)[..., None, :], precision.to(dtype)[..., None, :]  # [B, T, G, 1, V]
    decays, noises = (_per_token(x, length) for x in (log_decay.to(dtype).exp(), process_noise.to(dtype)))

    owner = None if segments is None else segments.owner(batch, length)  # [B, T]
    state, means, variances = belief, [], []
    # Unbound once: taking one token at a time out of a tensor would make its gradient O(T^2).
    for t, (query, key, value, weight) in enumerate(zip(*(x.unbind(1) for x in (q, k, v_rows, w_rows)), strict=True)):
        mean, var = state if owner is None else state.take(owner[:, t].clamp(min=0))
        mean, var = decays[t] * mean, decays[t] ** 2 * var + noises[t]
        write = key * weight
        var = var / (1 + key * write * var)
        mean = mean + var * write * (value - key * mean)
        means.append((query * mean).sum(-2))
        variances.append((query**2 * var).sum(-2))
        posterior = DiagonalBelief(mean, var)
        state = posterior if owner is None else _put(state, posterior, owner[:, t])

    read_mean, read_var = torch.stack(means, 1), torch.stack(variances, 1)
    if owner is not None:
        inside = (owner >= 0)[..., None, None]
        read_mean, read_var = torch.where(inside, read_mean, 0), torch.where(inside, read_var, 0)
    return Filtered(read_mean.to(v.dtype), read_var if variance else None, state)


def _per_token(x: Tensor, length: int) -> Sequence[Tensor]:
    return [x] * length if x.ndim == 3 else x.unbind(1)


def _put(state: DiagonalBelief, posterior: DiagonalBelief, owner: Tensor) -> DiagonalBelief:
    """Each sequence takes the posterior of the batch row that serves it now, if one does; nothing is overwritten."""
    serves = owner == torch.arange(state.mean.shape[0], device=owner.device)[:, None]  # [N, B]
    served, row = serves.any(1)[:, None, None, None], serves.int().argmax(1)
    return DiagonalBelief(*(torch.where(served, new[row], old) for old, new in zip(state, posterior, strict=True)))
