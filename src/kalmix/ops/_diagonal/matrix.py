"""The matrix by which the op `diagonal` multiplies values."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from kalmix.beliefs import DiagonalBelief
from kalmix.ops._diagonal.api import default_prior
from kalmix.ops._shared.validation import check_belief, check_signal, check_tokens


class KalmanMatrix(NamedTuple):
    """The op `diagonal` as a matrix: `mean[b, :, g, d] = weights[b, g, d] @ v[b, :, g, d] + initial[b, :, g, d]`.

    Attributes:
        weights: `[B, G, V, T, T]`, lower triangular: what the read-out at one token (row) makes of an earlier value.
        initial: `[B, T, G, V]`, what it still makes of the prior's mean.
    """

    weights: Tensor
    initial: Tensor


def diagonal_matrix(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    precision: Tensor,
    log_decay: Tensor,
    process_noise: Tensor,
    belief: DiagonalBelief | None = None,
) -> KalmanMatrix:
    r"""The lower-triangular matrix the op `diagonal` multiplies values by (appendix E.4), for pictures and tests.

    The mean of a cell is affine in the values: with r = 1 / (1 + k_n w s~) and c = s' w,

        mu_t = a r_t mu_{t-1} + c_t v_t,   weights[t, j] = sum_n q_{t,n} (prod_{i=j+1}^{t} a r_i) c_j.

    Nothing is divided by a small number, so fast decays and sure observations are safe.

    Args:
        q, k, v, precision, log_decay, process_noise, belief: as in `kalmix.ops.diagonal`; of `v` only shape, dtype
            and device count, for the weights do not depend on it.

    Returns:
        `KalmanMatrix`, in the dtype of the belief.

    Raises:
        ArgumentError: a shape, dtype, device or value that is not as in `kalmix.ops.diagonal`.

    Complexity: O(T^2 K V) work; memory O(T^2 V + T K V), to differentiate O(T^2 K V).
    """
    sizes = check_tokens(q, k, v)
    check_signal("precision", precision, ("B T G V",), sizes, v, least=0.0)
    check_signal("log_decay", log_decay, ("G K V",), sizes, v, most=0.0)
    check_signal("process_noise", process_noise, ("G K V",), sizes, v, least=0.0)
    sizes["N"] = sizes["B"]
    mean, var = check_belief(belief, default_prior(v, sizes), ("N G K V", "N G K V"), sizes)
    length, group, dtype, cells = sizes["T"], sizes["G"] // sizes["H"], mean.dtype, mean.shape

    queries, keys = (x.to(dtype).repeat_interleave(group, 2)[..., None] for x in (q, k))  # [B, T, G, K, 1]
    decay, noise, precision = log_decay.to(dtype).exp(), process_noise.to(dtype), precision.to(dtype)[..., None, :]
    history = v.new_zeros(*cells, 0, dtype=dtype)  # what mu makes of each value so far
    rows, initial = [v.new_zeros(sizes["B"], sizes["G"], 0, sizes["V"], length, dtype=dtype)], []
    for t in range(length):
        query, key = queries[:, t], keys[:, t]
        write = key * precision[:, t]
        predicted = decay**2 * var + noise
        shrink = 1 / (1 + key * write * predicted)
        var, gate = predicted * shrink, decay * shrink
        mean = gate * mean
        history = torch.cat([history * gate[..., None], (var * write)[..., None]], -1)
        rows.append(pad((query[..., None] * history).sum(2), (0, length - t - 1))[:, :, None])
        initial.append((query * mean).sum(2))
    weights = torch.cat(rows, 2).transpose(2, 3)
    return KalmanMatrix(weights, torch.stack(initial, 1) if initial else torch.zeros_like(v, dtype=dtype))
