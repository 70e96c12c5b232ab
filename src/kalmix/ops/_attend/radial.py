"""Radial-tangential Adaptive Filter Attention: one noise along each token's direction, another across it."""

from __future__ import annotations

from torch import Tensor

from kalmix.beliefs import HistoryBelief
from kalmix.errors import ArgumentError
from kalmix.ops._attend.api import Weight, check_channels, check_dynamics, check_history, empty_output, make_weighting
from kalmix.ops._attend.dynamics import Dynamics
from kalmix.ops._attend.kernels import RADIAL_KERNELS
from kalmix.ops._attend.signals import AttendSignals
from kalmix.ops._shared.dispatch import select_kernel
from kalmix.ops._shared.kernel import KernelRequest
from kalmix.ops._shared.validation import check_tokens
from kalmix.segments import Segments
from kalmix.types import Filtered


def attend_radial(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    log_decay: Tensor,
    frequency: Tensor,
    process_noise: Tensor,
    key_noise: Tensor,
    query_noise: Tensor,
    nu: Tensor | float = 1.0,
    temperature: Tensor | float = 1.0,
    times: Tensor | None = None,
    weight: Weight = "rational",
    window: int | None = None,
    floor: Tensor | float = 0.0,
    causal: bool = True,
    belief: HistoryBelief | None = None,
    variance: bool = False,
    segments: Segments | None = None,
    kernel: str | None = None,
) -> Filtered:
    r"""Compute Adaptive Filter Attention with separate noises along and across the direction of each value.

    This is the radial-tangential form (Algorithm 2 of *Attention as an Adaptive Filter*). Queries, keys and values are
    vectors of the same space C^C. With E and tau as in `kalmix.ops.attend`, key and value j predict

        k_ij = (E + floor) exp(i w tau) k_j,   v_ij = E exp(i w tau) v_j

    at time t_i. Let u_i = v_i / |v_i| be the direction of the query's own value (0, without a gradient, if v_i is 0),
    and u^* the conjugate transpose of u. Residual and estimate are split into a component along u_i and the rest:

        e_along  = |u_i^* (q_i - k_ij)|^2,    e_across = |q_i - k_ij|^2 - e_along
        m_i      = sum_j A_along Re(u_i^* v_ij)
        w_i      = (I - u_i u_i^*) sum_j A_across v_ij
        mean_i   = m_i (v_i + w_i) / |v_i + w_i|,   0 if v_i is 0

    Each component has its own noises, and so its own V, r = e / V, weight, A and variance, as in `kalmix.ops.attend`.
    So magnitude and direction are averaged separately. Misprints of the paper are corrected; the documentation of
    `kalmix.layers.RadialTangentialAttention` lists them.

    B is the batch size, T the number of tokens, H the number of heads, C the number of complex channels. Complex
    numbers are stored as real columns: first all real parts, then all imaginary parts. Tensors other than q, k, v and
    `times` are in the dtype of `v` or of the belief.

    Args:
        q: `[B, T, H, 2 C]`, queries, in float64, float32, bfloat16 or float16. They are not scaled.
        k: `[B, T, H, 2 C]`, keys, in the dtype of `q`.
        v: `[B, T, H, 2 C]`, values, in the dtype of `q`.
        log_decay: `[H]`, negative decay rate, natural logarithm per unit of time, <= 0.
        frequency: `[H, C]`, angular frequency in radians per unit of time.
        process_noise: `[H, 2]`, variance per unit of time, >= 0. Column 0 is along the direction and column 1 across
            it, here and below.
        key_noise: `[H, 2]`, observation variance, >= 0; must be positive if `variance` is true.
        query_noise: `[H, 2]`, variance of the query, >= 0. `key_noise + query_noise` must be positive.
        nu: Scale of the residual, > 0 and finite, a number or `[H, 2]`.
        temperature: Factor of the logarithm in the softmax, > 0, a number or `[H, 2]`. Larger values sharpen the
            softmax.
        times, weight, window, floor, causal, belief, segments: as in `kalmix.ops.attend`.
        variance: also return the variance.
        kernel: "triton" (on a GPU; up to 128 columns in bfloat16, 64 in other dtypes) or "reference" (PyTorch
            operations); by default chosen by device, dtype and shape.

    Returns:
        `Filtered` with mean `[B, T, H, 2 C]` in the dtype of `v`, variance `[B, T, H, 2 C]` in the dtype of the belief
        (`None` unless `variance=True`), and the `HistoryBelief` as from `kalmix.ops.attend` (`None` if not `causal`).
        The variance of channel c is |u_c|^2 times the variance along the direction plus (1 - |u_c|^2) times the
        one across, the same for real and imaginary part. Tokens outside every segment have mean and variance 0.

    Raises:
        ArgumentError: an argument has a shape, dtype, device or value other than described; the message names it.
        KernelError: `kernel` is unknown or does not support the call, or "triton" is differentiated twice.

    Kernel "triton" has first derivatives only, "reference" those of every order. Compiled code has those of first order
    only; PyTorch does not always raise an error for higher ones there. Values are checked as in `kalmix.ops.attend`.

    Complexity: O(T (S + T) C) operations with S slots of the belief; memory O((S + T) C).

    Example:
        >>> from kalmix import ops
        >>> batch, tokens, heads, channels = 2, 16, 4, 8
        >>> q, k, v = torch.randn(3, batch, tokens, heads, 2 * channels)
        >>> one = torch.ones(heads, 2)
        >>> mean, variance, belief = ops.attend_radial(
        ...     q, k, v, log_decay=-0.1 * one[:, 0], frequency=torch.rand(heads, channels),
        ...     process_noise=0.1 * one, key_noise=one, query_noise=one, variance=True)
        >>> mean.shape, variance.shape
        (torch.Size([2, 16, 4, 16]), torch.Size([2, 16, 4, 16]))
    """
    sizes, dynamics = (
        check_tokens(q, k, v, variance),
        Dynamics(log_decay, frequency, process_noise, key_noise, query_noise),
    )
    check_channels(q, v, sizes)
    if v.shape[2:] != k.shape[2:]:
        raise ArgumentError("v", problem=f"has shape {list(v.shape)}", expected=f"the shape of `k`, {list(k.shape)}")
    sizes["R"] = 2
    check_dynamics("", dynamics, ("H", "H C", "H R"), sizes, v, positive_key_noise=variance)
    weighting = make_weighting((nu, temperature, floor), weight, window, causal, ("H R", "H R", "H"), sizes, v)
    belief = check_history(belief, times, segments, causal, sizes, v)
    request = KernelRequest(q.device.type, q.dtype, sizes["K"], sizes["V"], sizes["T"])
    kernel_function = select_kernel("attend_radial", RADIAL_KERNELS, request, kernel)
    signals = AttendSignals(q, k, v, times, dynamics, None, weighting)
    if min(sizes.values()) == 0:
        return empty_output(signals, belief, causal, v.shape[3] if variance else None)
    return kernel_function(signals, belief, segments, variance)
