"""`diagonal`, step by step: the recursion as it is written, for tests and for float64. Memory O(T K V)."""

from __future__ import annotations

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
    values, precision = v.to(dtype)[..., None, :], precision.to(dtype)[..., None, :]  # [B, T, G, 1, V]
    decay, noise = (
        x.expand(batch, length, *x.shape[-3:]) for x in (log_decay.to(dtype).exp(), process_noise.to(dtype))
    )

    where = Segments.whole(batch, length, v.device) if segments is None else segments
    owner = where.owner(batch, length)  # [B, T]
    sequences = torch.arange(where.count, device=v.device)[:, None]

    mean, var = belief
    means, variances = [], []
    for t in range(length):
        here, mine = owner[:, t], (owner[:, t] >= 0)[:, None, None, None]
        prior_mean, prior_var = mean[here], var[here]
        predicted_mean = decay[:, t] * prior_mean
        predicted_var = decay[:, t] ** 2 * prior_var + noise[:, t]
        write = k[:, t] * precision[:, t]
        posterior_var = predicted_var / (1 + k[:, t] * write * predicted_var)
        posterior_mean = predicted_mean + posterior_var * write * (values[:, t] - k[:, t] * predicted_mean)
        means.append((q[:, t] * posterior_mean * mine).sum(-2))
        variances.append((q[:, t] ** 2 * posterior_var * mine).sum(-2))
        # Scatter back without writing in place: a sequence takes the posterior of the row that serves it now.
        serves = here == sequences  # [N, B]
        served, source = serves.any(1)[:, None, None, None], serves.int().argmax(1)
        mean = torch.where(served, posterior_mean[source], mean)
        var = torch.where(served, posterior_var[source], var)

    if length == 0:
        empty = v.new_zeros(v.shape)
        return Filtered(empty, empty.to(dtype) if variance else None, DiagonalBelief(mean, var))
    read_mean = torch.stack(means, 1).to(v.dtype)
    return Filtered(read_mean, torch.stack(variances, 1) if variance else None, DiagonalBelief(mean, var))
