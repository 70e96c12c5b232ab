"""Linear diffusions observed with noise: filter variance in closed form, and posterior samples of trajectories."""

from __future__ import annotations

import torch
from torch import Tensor

from kalmix.errors import ArgumentError
from kalmix.validation import check_dtype_and_device, check_positive_int, check_range


def riccati(rate: Tensor, lag: Tensor, process_noise: Tensor, obs_noise: Tensor, start: Tensor | float = 0.0) -> Tensor:
    """Return the filter variance of dx = -rate x dt + dw after continuous observation for a time `lag`.

    It solves V' = -2 rate V + s^2 - V^2 / r (Adaptive Filter Attention, appendix A.3; a misprint is corrected). With
    b = sqrt(rate^2 + s^2 / r) and u = tanh(b lag) / b,
    V = (V_0 + u (s^2 - rate V_0)) / (1 + u (rate + V_0 / r)). For V_0 = 0 this equals the paper's
    r (b tanh(b lag - atanh(-rate / b)) - rate), without its cancellation, and it holds at b = 0. The precision is
    1 / V. Complex modes have the same variance. All arguments broadcast.

    Args:
        rate: decay rate per unit of time, >= 0.
        lag: time since the variance was `start`, >= 0.
        process_noise: s^2, variance per unit of time.
        obs_noise: r > 0, variance times time: n measurements per unit of time with variance n r each, n large.
        start: V_0 >= 0.

    Example:
        >>> from kalmix.analysis.diffusions import riccati
        >>> one = torch.ones(())
        >>> riccati(0 * one, 50 * one, one, one)  # converges to sqrt(process_noise * obs_noise)
        tensor(1.)
    """
    bandwidth = (rate.square() + process_noise / obs_noise).sqrt()
    angle = bandwidth * lag
    u = torch.where(angle > 0, lag * torch.tanh(angle) / torch.where(angle > 0, angle, 1.0), lag)
    return (start + u * (process_noise - rate * start)) / (1 + u * (rate + start / obs_noise))


def sample_backwards(
    mean: Tensor,
    covariance: Tensor,
    transition: Tensor,
    noise: Tensor,
    count: int = 1,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Sample trajectories given all measurements, from a filter's beliefs (Adaptive Filter Attention, B.1).

    The last state is drawn from the last belief. Then each x_t is drawn from the belief at t, conditioned on x_{t+1}.
    Samples have the mean and covariance of the Rauch-Tung-Striebel smoother, including covariances between tokens. The
    state is real: represent a complex number by two of the d rows. Leading dimensions of the matrices broadcast to
    those of `mean`. The time is O(T d^3 + n T d^2), in T sequential steps.

    Args:
        mean: `[..., T, d]` means after each token, T >= 1, in float32 or float64.
        covariance: `[..., T, d, d]` covariances after each token, in the dtype of `mean`, positive semi-definite. This
            is not checked: negative eigenvalues count as 0.
        transition: `[..., T - 1, d, d]`, of x_{t+1} = transition_t x_t + noise, in the dtype of `mean`.
        noise: `[..., T - 1, d, d]` covariances of that noise, like `covariance`.
        count: number of trajectories, n >= 1.
        generator: random numbers, on the device of `mean`; torch's default generator if absent.

    Returns:
        `[n, ..., T, d]`, also for n = 1, in the dtype of `mean`.

    Raises:
        ArgumentError: a tensor has another shape, dtype or device, or, on the CPU, NaN or infinity; `count` is not a
            positive integer; or `generator` is on another device or not a `torch.Generator`.

    Example:
        >>> from kalmix.analysis.diffusions import sample_backwards
        >>> eye = torch.eye(2).expand(5, 2, 2)
        >>> sample_backwards(torch.zeros(5, 2), eye, eye[1:], eye[1:], count=3).shape
        torch.Size([3, 5, 2])
    """
    _check_beliefs(mean, {"covariance": covariance, "transition": transition, "noise": noise})
    check_positive_int("count", count)
    if generator is not None and getattr(generator, "device", None) != mean.device:
        got = f"on {generator.device}" if isinstance(generator, torch.Generator) else f"a {type(generator).__name__}"
        raise ArgumentError("generator", got=got, expected=f"a torch.Generator on {mean.device}")
    normal = torch.randn(count, *mean.shape, generator=generator, dtype=mean.dtype, device=mean.device)
    state = mean[..., -1, :] + _apply(root(covariance[..., -1, :, :]), normal[..., -1, :])
    path = [state]
    for t in range(mean.shape[-2] - 2, -1, -1):
        matrix, belief = transition[..., t, :, :], covariance[..., t, :, :]
        cross = matrix @ belief
        # The predicted covariance is singular where the state is certain. The pseudo-inverse leaves it there.
        gain = (torch.linalg.pinv(cross @ matrix.mT + noise[..., t, :, :], hermitian=True) @ cross).mT
        # Joseph form keeps the conditional covariance positive.
        factor = torch.eye(mean.shape[-1]).to(mean) - gain @ matrix
        conditional = factor @ belief @ factor.mT + gain @ noise[..., t, :, :] @ gain.mT
        innovation = state - _apply(matrix, mean[..., t, :])
        state = mean[..., t, :] + _apply(gain, innovation) + _apply(root(conditional), normal[..., t, :])
        path.append(state)
    return torch.stack(path[::-1], -2)


def _check_beliefs(mean: Tensor, matrices: dict[str, Tensor]) -> None:
    """Check the arguments of `sample_backwards`."""
    for name, tensor in {"mean": mean, **matrices}.items():
        if not isinstance(tensor, Tensor):
            raise ArgumentError(name, got=f"a {type(tensor).__name__}", expected="a tensor")
    if mean.ndim < 2:
        raise ArgumentError("mean", problem=f"has shape {list(mean.shape)}", expected="[..., T, d]")
    *batch, steps, rows = mean.shape
    if steps == 0:
        raise ArgumentError("mean", problem="has 0 tokens", expected="at least 1")
    check_dtype_and_device("mean", mean, (torch.float32, torch.float64), mean.device)
    check_range("mean", mean)
    for name, tensor in matrices.items():
        length = steps if name == "covariance" else steps - 1
        leading, wanted = tensor.shape[:-3], (length, rows, rows)
        sizes = zip(reversed(leading), reversed(batch), strict=False)
        if tensor.shape[-3:] != wanted or len(leading) > len(batch) or any(n not in (1, size) for n, size in sizes):
            problem = f"has shape {list(tensor.shape)}"
            expected = f"[..., {length}, {rows}, {rows}]" + (f", where ... broadcasts to {batch}" if leading else "")
            raise ArgumentError(name, problem=problem, expected=expected)
        check_dtype_and_device(name, tensor, (mean.dtype,), mean.device)
        check_range(name, tensor)


def _apply(matrix: Tensor, x: Tensor) -> Tensor:
    return (matrix @ x[..., None])[..., 0]


def root(covariance: Tensor) -> Tensor:
    """Return R with R R' = covariance, which may be singular."""
    values, vectors = torch.linalg.eigh(covariance)
    return vectors * values.clamp(min=0).sqrt()[..., None, :]
