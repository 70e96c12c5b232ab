"""Update of the op `dense`: a Gaussian observation of the memory before the tokens, and a noisy affine map."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.utils.checkpoint import checkpoint

from kalmix.beliefs import DenseBelief, detach, loadable, take, to
from kalmix.errors import ArgumentError
from kalmix.ops._additive.api import additive
from kalmix.ops._dense.api import LEAST_NOISE, check_dense_signals
from kalmix.ops._dense.api import dense as filter_dense
from kalmix.ops._dense.joseph import symmetrize
from kalmix.ops._dense.solve import solve
from kalmix.ops._dense.tile_statistics import rotate
from kalmix.ops._shared.step_loop import fill_outside, optional_segment_ids
from kalmix.ops._shared.update import check_update_tokens, identity_matrix, multiply, to_state_dtype
from kalmix.segments import Segments
from kalmix.types import belief_dtype
from kalmix.validation import check_range

SPAN = 4096  # tokens whose information is summed at once


@loadable
class DenseUpdate(NamedTuple):
    """Update of a `DenseBelief` by tokens.

    A memory with mean M and covariance P becomes:

        M' = A (I + P J)^-1 (M + P eta) + b,   P' = A (I + P J)^-1 P A' + C

    `kalmix.updates.dense` computes it. See `kalmix.updates.Update` for the methods. Fields are not checked.

    Attributes:
        transition: `[N, G, K, K]`, A, the map of the mean if the covariance before the tokens is 0. In float32, or
            float64 if the inputs are.
        covariance: `[N, G, K, K]`, C, covariance after the tokens if it is 0 before, in the same dtype; symmetric.
        information: `[N, G, K, K]`, J, inverse covariance that the tokens contribute to the memory before them;
            symmetric. Always in float64: a rounding of J would pass for observations along all directions.
        mean: `[N, G, K, V]`, b, mean after the tokens if mean and covariance are 0 before, in the dtype of A.
        information_mean: `[N, G, K, V]`, eta, inverse covariance times mean that the tokens contribute; in float64.

    Example:
        >>> from kalmix import DenseBelief, updates
        >>> belief = DenseBelief(torch.zeros(1, 1, 4, 8), torch.eye(4).expand(1, 1, 4, 4))
        >>> update = updates.DenseUpdate.identity(belief)
        >>> update.apply(belief).covariance.equal(belief.covariance)
        True
    """

    transition: Tensor
    covariance: Tensor
    information: Tensor
    mean: Tensor
    information_mean: Tensor

    take = take
    to = to
    detach = detach
    is_affine = False

    @classmethod
    def identity(cls, belief: DenseBelief) -> DenseUpdate:
        """Return the update that changes no belief of the shape of `belief`."""
        mean, covariance = (torch.zeros_like(x) for x in belief)
        return cls(identity_matrix(mean, mean.shape[2]), covariance, covariance.double(), mean, mean.double())

    @classmethod
    def constant(cls, belief: DenseBelief) -> DenseUpdate:
        """Return the update that replaces every belief by `belief`."""
        mean, covariance = (torch.zeros_like(x) for x in belief)
        return cls(covariance, belief.covariance, covariance.double(), belief.mean, mean.double())

    def then(self, other: DenseUpdate) -> DenseUpdate:
        """Return the update by the tokens of this update and then those of `other`."""
        dtype, width = torch.promote_types(self.mean.dtype, other.mean.dtype), self.mean.shape[2]
        transition, covariance, information, mean, information_mean = (x.double() for x in self)
        next_transition, next_covariance, next_information, next_mean, next_information_mean = (
            x.double() for x in other
        )
        known = torch.cat([transition, covariance, mean + covariance @ next_information_mean], -1)
        solved = _condition(covariance, next_information, known)
        mapped = next_transition @ solved
        error = next_information_mean - next_information @ mean
        return DenseUpdate(
            mapped[..., :width].to(dtype),
            symmetrize(mapped[..., width : 2 * width] @ next_transition.mT + next_covariance).to(dtype),
            symmetrize(information + transition.mT @ next_information @ solved[..., :width]),
            (mapped[..., 2 * width :] + next_mean).to(dtype),
            information_mean + solved[..., :width].mT @ error,
        )

    def apply(self, belief: DenseBelief) -> DenseBelief:
        """Return the belief after the tokens, given the one before them."""
        dtype, width = torch.promote_types(self.mean.dtype, belief.mean.dtype), self.mean.shape[2]
        mean, covariance, information, information_mean = (
            x.double()
            for x in (*belief, self.information, self.information_mean)  # `to` may have rounded these two
        )
        known = torch.cat([covariance, mean + covariance @ information_mean], -1)
        mapped = multiply(self.transition, _condition(covariance, information, known))
        covariance = symmetrize(multiply(mapped[..., :width], self.transition.mT) + self.covariance)
        return DenseBelief((mapped[..., width:] + self.mean).to(dtype), covariance.to(dtype))

    @torch.no_grad()
    def pull_back(self, belief: DenseBelief, *grads: Tensor) -> tuple[Tensor, ...]:
        """Return the gradients of the belief before the tokens, given that belief and those of the one after them."""
        transition, information, information_mean = (
            x.double() for x in (self.transition, self.information, self.information_mean)
        )
        mean, covariance, mean_grad, covariance_grad = (x.double() for x in (*belief, *grads))
        system = _system(covariance, information)
        solved = solve(system, torch.cat([covariance, mean + covariance @ information_mean], -1))
        mapped_grad = torch.cat([symmetrize(covariance_grad) @ transition, mean_grad], -1)  # of `mapped` in `apply`
        known_grad = solve(system.mT, transition.mT @ mapped_grad)
        direct, through_mean = known_grad.split([covariance.shape[-1], mean.shape[-1]], -1)
        through_system = known_grad @ solved.mT @ information.mT
        before = direct + through_mean @ information_mean.mT - through_system
        return through_mean.to(belief.mean.dtype), before.to(belief.covariance.dtype)


def _condition(covariance: Tensor, information: Tensor, right: Tensor) -> Tensor:
    """Compute (I + P J)^-1 right."""
    return solve(_system(covariance, information), right)


def _system(covariance: Tensor, information: Tensor) -> Tensor:
    """Compute I + P J, which has an inverse, since P and J have no negative eigenvalues."""
    eye = torch.eye(covariance.shape[-1], dtype=covariance.dtype, device=covariance.device)
    return eye + covariance @ information


def dense(
    k: Tensor,
    v: Tensor,
    *,
    obs_noise: Tensor,
    process_noise: Tensor,
    log_decay: Tensor | None = None,
    angle: Tensor | None = None,
    segments: Segments | None = None,
) -> DenseUpdate:
    """Compute what tokens do to any belief of the op `dense`.

    `dense(k, v, ...).apply(belief)` is the belief that `kalmix.ops.dense(q, k, v, ..., belief=belief)` returns. The
    function calls the op once, with the values [v, 0], the prior mean [0, I] and the prior covariance 0. Its queries
    are the keys of the next tokens, so that it returns the predicted values, from which J and eta follow.

    Args:
        k, v, process_noise, log_decay, angle, segments: as `kalmix.ops.dense` takes them. With N segments there are N
            updates.
        obs_noise: `[B, T, G]`, variance of the observation. Values below 1e-4 (2e-13 if the inputs are float64) raise
            `ArgumentError` where values are checked: it is the limit of the op for a prior variance of 1.

    Returns:
        `DenseUpdate`. It has gradients of first order.

    Raises:
        ArgumentError: an argument has a shape, dtype, device or value other than described; the message names it.

    Complexity: that of the op with values of width V + K, in float32 (float64 for float64 inputs), and O(T K (K + V))
    in float64. `then` and `apply` take O(K^2 (K + V)) in float64.

    Example:
        >>> from kalmix import DenseBelief, ops, updates
        >>> k = torch.nn.functional.normalize(torch.randn(1, 32, 1, 4), dim=-1)
        >>> v, noise = torch.randn(1, 32, 1, 8), torch.full((1, 32, 1), 0.1)
        >>> signals = {"obs_noise": noise, "process_noise": 0.01 * noise}
        >>> update = updates.dense(k, v, **signals)
        >>> prior = DenseBelief(torch.randn(1, 1, 4, 8), torch.eye(4).expand(1, 1, 4, 4))
        >>> belief = ops.dense(k, k, v, **signals, belief=prior).belief
        >>> torch.allclose(update.apply(prior).covariance, belief.covariance, atol=1e-5)
        True
    """
    sizes = check_update_tokens(k, v, segments)
    if angle is not None and sizes["K"] % 2:
        raise ArgumentError("k", problem=f"has width {sizes['K']}", expected="an even width when `angle` is given")
    check_dense_signals(v, sizes, obs_noise, process_noise, log_decay, angle)
    least = LEAST_NOISE[belief_dtype(v.dtype)] * (1 - torch.finfo(v.dtype).eps)
    k, v, *signals = to_state_dtype(v, k, v, obs_noise, process_noise, log_decay, angle)
    segment_ids = optional_segment_ids(segments, sizes["B"], sizes["T"])
    k, v, process_noise, log_decay, angle = fill_outside(segment_ids, k, v, signals[1], signals[2], signals[3])
    (obs_noise,) = fill_outside(segment_ids, signals[0], fill=1.0)
    check_range("obs_noise", obs_noise, minimum=least)
    zero = v.new_zeros(*(sizes[x] for x in "NGKV"))
    eye = identity_matrix(zero, sizes["K"])
    signals = {"obs_noise": obs_noise, "process_noise": process_noise, "log_decay": log_decay, "angle": angle}
    observed = torch.cat([v, v.new_zeros(*v.shape[:3], sizes["K"])], -1)  # of the columns [b, A] of the memory
    prior = DenseBelief(torch.cat([zero, eye], -1), torch.zeros_like(eye))
    keys = k.repeat_interleave(sizes["G"] // sizes["H"], 2)
    predictors = _predictors(keys, log_decay, angle)
    is_first = _first_tokens(segment_ids, sizes["T"], k.device)
    after, var, final = filter_dense(
        _shift(predictors, -1),
        keys,
        observed,
        **signals,
        belief=prior,
        variance=True,
        segments=segments,
    )
    assert var is not None
    predicted = torch.where(is_first, pad(predictors, (sizes["V"], 0)), _shift(after, 1))
    memory_var = torch.where(is_first, 0.0, _shift(var, 1))[..., 0]
    diffusing = keys if angle is None else keys[..., : sizes["K"] // 2]
    diffusion = process_noise * diffusing.square().sum(-1)
    weight = 1 / (obs_noise + diffusion + memory_var)  # inverse variance of the innovation
    innovation = observed - predicted
    sums = _sum_information(innovation, weight, sizes["V"], segments)
    mean, transition = final.mean.split([sizes["V"], sizes["K"]], -1)
    information = -symmetrize(sums[..., sizes["V"] :])
    return DenseUpdate(transition, final.covariance, information, mean, sums[..., : sizes["V"]])


def _sum_information(innovation: Tensor, weight: Tensor, width: int, segments: Segments | None) -> Tensor:
    """Return [eta, -J] of each sequence, `[N, G, K, V + K]`, in float64.

    Args:
        innovation: `[B, T, G, V + K]`, of the values and of zeros; the latter is the negated derivative of a prediction
            with respect to the memory before the tokens.
        weight: `[B, T, G]`, inverse variance of the innovations of the values.
        width: V.
        segments: runs of tokens that form sequences, or `None`.
    """

    def add(innovation: Tensor, weight: Tensor) -> Tensor:
        innovation, weight = innovation.double(), weight.double()
        sensitivity = -innovation[..., width:]
        if segments is not None:
            return additive(sensitivity, sensitivity, innovation, gain=weight, segments=segments).belief.mean
        return (weight[..., None] * sensitivity).permute(0, 2, 3, 1) @ innovation.transpose(1, 2)

    batch, _, heads, columns = innovation.shape
    batch = batch if segments is None else segments.count
    total = innovation.new_zeros(batch, heads, columns - width, columns, dtype=torch.float64)
    spans = [(innovation, weight)]
    if segments is None:
        spans = zip(innovation.split(SPAN, 1), weight.split(SPAN, 1), strict=True)
    for span in spans:  # float64 copies of tokens are not stored for the backward pass
        total = total + checkpoint(add, *span, use_reentrant=False, preserve_rng_state=False)
    return total


def _predictors(keys: Tensor, log_decay: Tensor | None, angle: Tensor | None) -> Tensor:
    """Return A_t'k_t, `[B, T, G, K]`: what predicts the value of a token from the memory before it."""
    if log_decay is not None:
        decay = (log_decay if log_decay.ndim == 4 else log_decay[..., None]).exp()
        repeats = keys.shape[-1] // decay.shape[-1] if decay.shape[-1] > 1 else 1
        keys = keys * decay.repeat(1, 1, 1, repeats)
    return keys if angle is None else rotate(keys[..., None], -angle[..., None])[..., 0]


def _first_tokens(segment_ids: Tensor | None, length: int, device: torch.device) -> Tensor:
    """Return which tokens are the first of their sequence, `[B or 1, T, 1, 1]`."""
    if segment_ids is None:
        return (torch.arange(length, device=device) == 0)[None, :, None, None]
    previous = pad(segment_ids, (1, 0), value=-1)[:, :-1]
    return (segment_ids != previous)[..., None, None]


def _shift(x: Tensor, tokens: int) -> Tensor:
    """Move `[B, T, G, *]` by 1 token to later ones, or by -1 to earlier ones; zeros enter."""
    before = max(tokens, 0)
    return pad(x, (0, 0, 0, 0, before, before - tokens))[:, before - tokens : x.shape[1] + before - tokens]
