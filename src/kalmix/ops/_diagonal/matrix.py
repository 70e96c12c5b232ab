"""Attention matrix of the op `diagonal`."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from kalmix.beliefs import DiagonalBelief
from kalmix.ops._diagonal.api import default_prior
from kalmix.ops._shared.validation import check_belief, check_signal, check_tokens


class KalmanMatrix(NamedTuple):
    """Matrix form of the op `diagonal`: `mean[b, :, g, d] = weights[b, g, d] @ v[b, :, g, d] + initial[b, :, g, d]`.

    `kalmix.ops.diagonal_matrix` returns it, for B sequences of T tokens, G value heads and value width V. The fields
    are not checked here.

    Attributes:
        weights: `[B, G, V, T, T]`, lower triangular: weight of the value at each token (column) in the mean at each
            token (row). In float32, or float64 if the inputs are.
        initial: `[B, T, G, V]`, contribution of the prior's mean to the mean at each token, in the same dtype. 0 if the
            prior's mean is 0.

    Example:
        >>> from kalmix import ops
        >>> q, k, v = torch.randn(2, 6, 1, 4), torch.randn(2, 6, 1, 4), torch.randn(2, 6, 1, 3)
        >>> constants = {"log_decay": torch.zeros(1, 4, 3), "process_noise": torch.zeros(1, 4, 3)}
        >>> matrix = ops.diagonal_matrix(q, k, v, precision=torch.ones(2, 6, 1, 3), **constants)
        >>> matrix.weights.shape, matrix.initial.shape
        (torch.Size([2, 1, 3, 6, 6]), torch.Size([2, 6, 1, 3]))
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
    r"""Compute the lower triangular matrix by which `kalmix.ops.diagonal` multiplies values, for plots and tests.

    A cell is an entry (n, d) of the memory `[K, V]`. Its mean mu is an affine function of the values (appendix E.4 of
    *Kalman Linear Attention*). Let p_t be the predicted and s_t the posterior variance of the cell at token t, and
    a = exp(log_decay). Then

        p_t = a^2 s_{t-1} + process_noise,   f_t = 1 / (1 + k_{t,n}^2 precision_{t,d} p_t)
        s_t = f_t p_t,   c_t = s_t k_{t,n} precision_{t,d},   mu_t = a f_t mu_{t-1} + c_t v_{t,d}
        weights[t, j] = sum_n q_{t,n} (prod_{i=j+1}^{t} a f_i) c_j   for j <= t, otherwise 0
        initial[t] = sum_n q_{t,n} (prod_{i=1}^{t} a f_i) mu_0

    All divisors are at least 1, so results are accurate for strong decays and precise observations.

    Args:
        q, k, v, precision, belief: as in `kalmix.ops.diagonal`. Every batch row is one sequence, so N is B. The values
            of `v` do not change the result, but must be finite.
        log_decay, process_noise: `[G, K, V]`, the same for all tokens, in a dtype as in `kalmix.ops.diagonal`.

    Returns:
        `KalmanMatrix` with weights `[B, G, V, T, T]` and initial `[B, T, G, V]`, in the dtype of the belief: float32,
        or float64 if the inputs are.

    Raises:
        ArgumentError: an argument has a shape, dtype, device or value other than described; the message names it.

    Values, NaN and infinity included, are checked on CPUs, and on GPUs inside `kalmix.checks()`; never in compiled code
    or inside a transform of `torch.func`. The result has derivatives of every order.

    Complexity: O(T^2 K V) time, O(T^2 V + T K V) memory; with gradients O(T^2 K V) memory.

    Example:
        >>> from kalmix import ops
        >>> q, k, v = torch.randn(3, 1, 6, 2, 4)
        >>> signals = {"precision": torch.rand(1, 6, 2, 4)}
        >>> signals |= {"log_decay": -torch.rand(2, 4, 4), "process_noise": torch.rand(2, 4, 4)}
        >>> weights, initial = ops.diagonal_matrix(q, k, v, **signals)
        >>> weights.shape
        torch.Size([1, 2, 4, 6, 6])
        >>> mean = torch.einsum("bgdts,bsgd->btgd", weights, v) + initial
        >>> torch.allclose(mean, ops.diagonal(q, k, v, **signals).mean, atol=1e-5)
        True
    """
    sizes = check_tokens(q, k, v)
    check_signal("precision", precision, ("B T G V",), sizes, v, minimum=0.0)
    check_signal("log_decay", log_decay, ("G K V",), sizes, v, maximum=0.0)
    check_signal("process_noise", process_noise, ("G K V",), sizes, v, minimum=0.0)
    sizes["N"] = sizes["B"]
    mean, var = check_belief(belief, default_prior(v, sizes), ("N G K V", "N G K V"), sizes)
    length, group, dtype, cells = sizes["T"], sizes["G"] // sizes["H"], mean.dtype, mean.shape

    queries, keys = (x.to(dtype).repeat_interleave(group, 2)[..., None] for x in (q, k))  # [B, T, G, K, 1]
    decay, noise, precision = log_decay.to(dtype).exp(), process_noise.to(dtype), precision.to(dtype)[..., None, :]
    history = v.new_zeros(*cells, 0, dtype=dtype)  # derivative of mu with respect to each value so far
    rows, initial = [v.new_zeros(sizes["B"], sizes["G"], 0, sizes["V"], length, dtype=dtype)], []
    for t in range(length):
        query, key = queries[:, t], keys[:, t]
        write = key * precision[:, t]
        predicted = decay**2 * var + noise
        shrinkage = 1 / (1 + key * write * predicted)
        var, gate = predicted * shrinkage, decay * shrinkage
        mean = gate * mean
        history = torch.cat([history * gate[..., None], (var * write)[..., None]], -1)
        rows.append(pad((query[..., None] * history).sum(2), (0, length - t - 1))[:, :, None])
        initial.append((query * mean).sum(2))
    weights = torch.cat(rows, 2).transpose(2, 3)
    return KalmanMatrix(weights, torch.stack(initial, 1) if initial else torch.zeros_like(v, dtype=dtype))
