"""Scores of queries against keys, and their derivatives, for tiles of any size.

All computations are elementwise in the dot product of a query and a key, their squared norms and the lag. Shapes: R
rows of the layout, H heads, t queries, s keys.

For a key later than its query (only if not causal), the decay exp(-rate lag) exceeds 1 and could overflow. There the
query is moved forward to the key instead: residual and variances are divided by exp(2 rate |lag|), and the logarithm of
this divisor is added to the logarithms of variances. "Unscaled" below means before this division.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from kalmix.ops._attend.dynamics import (
    Dynamics,
    Weighting,
    accumulated_noise_slope,
    kappa_without_checks,
    zero_with_grad,
)
from kalmix.ops._attend.kv_layout import RANK_STRIDE


class NoiseParams(NamedTuple):
    """Decay rate and variances of the noises of each head, `[H, 1, 1]` each."""

    rate: Tensor
    process: Tensor
    key: Tensor
    query: Tensor


class ScoreConfig(NamedTuple):
    """Options that do not depend on the head, and the mask that they imply.

    Attributes:
        shared_dynamics: values have the dynamics of keys.
        rational: weights are rational; otherwise exponential.
        causal: later keys are masked.
        window: keys are masked if their rank differs from the query's by `window` or more.
    """

    shared_dynamics: bool
    rational: bool
    causal: bool
    window: int

    def visible(self, query_rank: Tensor, key_rank: Tensor) -> Tensor:
        """Return the mask of keys that queries attend to, `[R, 1, t, s]`, from ranks `[R, t]` and `[R, s]`."""
        rank_difference = query_rank[:, None, :, None] - key_rank[:, None, None, :]
        if not self.causal:
            return rank_difference.abs() < self.window
        return (rank_difference >= 0) & (rank_difference < self.window)

    def any_visible(self, query_rank: Tensor, key_rank: Tensor, marked: Tensor) -> Tensor:
        """Return which queries attend to a marked key, `[R, t]`; `marked` is a mask of keys `[R, s]`."""
        ranks = torch.where(marked, key_rank, torch.iinfo(torch.int64).max).sort(1).values
        last = query_rank if self.causal else query_rank + (self.window - 1)
        bounds = (x.contiguous() for x in (last, query_rank - self.window))
        count_to_last, count_before = (torch.searchsorted(ranks, x, right=True) for x in bounds)
        return count_to_last > count_before

    def slot_range(self, queries: slice, tokens: int, slots: int) -> tuple[int, int]:
        """Return the first slot that some of the queries may attend to, and the last one plus 1.

        A row has `slots` slots, and its last `tokens` slots have queries.
        """
        past_length = slots - tokens  # a history may have empty slots, so a window may span more slots than tokens
        start = 0 if past_length else max(0, queries.start + 1 - self.window)
        return start, past_length + queries.stop if self.causal else slots


def score_config(values: Dynamics | None, weighting: Weighting) -> ScoreConfig:
    """Build the options of the scores; `values` is `None` if values have the dynamics of keys."""
    window = RANK_STRIDE // 2 if weighting.window is None else weighting.window
    return ScoreConfig(values is None, weighting.rational, weighting.causal, window)


def stack_head_params(
    keys: Dynamics, values: Dynamics | None, weighting: Weighting, dtype: torch.dtype, detach_shared: bool = False
) -> Tensor:
    """Stack the parameters of all heads in the order of `HeadParams`, `[11, H]`.

    With `detach_shared`, parameters of values that equal those of keys pass no gradient.
    """

    def noise(x: Dynamics) -> list[Tensor]:
        return [y.to(dtype) for y in (-x.log_decay, x.process_noise, x.key_noise, x.query_noise)]

    key_params = noise(keys)  # one tensor for both, so that autograd adds their gradients in `dtype`
    value_params = key_params if values is None else noise(values)
    if values is None and detach_shared:
        value_params = [x.detach() for x in key_params]
    return torch.stack([*key_params, *value_params, *(x.to(dtype) for x in weighting[:3])])


class HeadParams(NamedTuple):
    """Parameters of the heads, `[H, 1, 1]` each."""

    keys: NoiseParams
    values: NoiseParams
    nu: Tensor
    temperature: Tensor
    floor: Tensor

    @classmethod
    def of(cls, head_params: Tensor) -> HeadParams:
        rows = head_params[..., None, None].unbind(0)
        return cls(NoiseParams(*rows[:4]), NoiseParams(*rows[4:8]), *rows[8:])


@dataclass
class LagVariance:
    """Decay and variances after a lag, `[R, H, t, s]`; for later keys divided by exp(2 rate |lag|).

    Autograd treats that divisor as a constant. Otherwise the gradient of the rate would be a difference of two
    gradients that nearly cancel if the query noise is large.

    Attributes:
        noise: parameters of the heads.
        distance: |lag|.
        future: mask of keys later than the query; `None` if causal.
        future_growth: 1, which for later keys carries the derivatives of exp(rate |lag|).
        decay: exp(-rate |lag|).
        accumulated: variance that unit process noise adds.
        key_weight: factor of the key noise.
        query_weight: factor of the query noise.
        state: variance without the query noise.
        total: variance with the query noise.
    """

    noise: NoiseParams
    distance: Tensor
    future: Tensor | None
    future_growth: Tensor | float
    decay: Tensor
    accumulated: Tensor
    key_weight: Tensor | float
    query_weight: Tensor | float
    state: Tensor
    total: Tensor

    @classmethod
    def after(cls, noise: NoiseParams, distance: Tensor, future: Tensor | None) -> LagVariance:
        decay, accumulated, future_growth = (
            torch.exp(-noise.rate * distance),
            kappa_without_checks(noise.rate, distance),
            1.0,
        )
        zero_rate = None if future is None else zero_with_grad(noise.rate)
        if future is not None and zero_rate is not None:
            future_growth = (zero_rate * distance).exp().where(future, 1.0)
            decay, accumulated = decay.where(~future, decay.detach()), accumulated * future_growth**2
        square = decay * decay
        key_weight, query_weight = square, 1.0
        if future is not None:
            key_weight, query_weight = square.where(~future, future_growth**2), square.where(future, 1.0)
        state = noise.process * accumulated + noise.key * key_weight
        total, tiny = state + noise.query * query_weight, torch.finfo(decay.dtype).tiny
        state, total = state.clamp(min=tiny), total.clamp(min=tiny)
        return cls(noise, distance, future, future_growth, decay, accumulated, key_weight, query_weight, state, total)

    def log(self, variance: Tensor) -> Tensor:
        """Return the logarithm of `state`, `total` or their sum with a residual, unscaled."""
        if self.future is None:
            return variance.log()
        return variance.log() + 2 * self.noise.rate.detach() * self.distance * self.future

    @property
    def start(self) -> Tensor:
        """Return the variance at lag 0, `[H, 1, 1]`."""
        return self.noise.key + self.noise.query

    def relative_growth(self) -> Tensor:
        """Compute total / start - 1 without cancellation."""
        noise, accumulated = self.noise, self.accumulated
        past, future = ((noise.process - 2 * noise.rate * x) / self.start for x in (noise.key, noise.query))
        if self.future is None or not isinstance(self.future_growth, Tensor):
            return (past if self.future is None else future.where(self.future, past)) * accumulated
        growth = noise.process * accumulated - 2 * noise.query * (noise.rate * accumulated).detach()  # constant divisor
        return (past * accumulated).where(~self.future, (growth + noise.key * (self.future_growth**2 - 1)) / self.start)

    def log_relative(self) -> Tensor:
        """Compute log(total / start), unscaled, and its gradients; without cancellation where the two are close."""
        growth = self.relative_growth()
        small = growth > -0.5
        log = torch.where(small, growth.clamp(min=-0.5).log1p(), self.total.log() - self.start.log())
        return log if self.future is None else log + 2 * self.noise.rate.detach() * self.distance * self.future

    def factors(self, floor: Tensor) -> tuple[Tensor | float, Tensor]:
        """Return the factors of the query and of the key in the residual."""
        if self.future is None:
            return 1.0, self.decay + floor
        key_factor = (self.decay + floor).where(~self.future, self.future_growth + floor * self.decay)
        return self.decay.where(self.future, 1.0), key_factor

    def log_query_noise_ratio(self) -> Tensor:
        """Compute log(total / state) as log1p of the ratio of query noise and state variance."""
        return (self.noise.query * self.query_weight / self.state).clamp(max=torch.finfo(self.decay.dtype).max).log1p()

    def noise_vjp(
        self, grad_total: Tensor, grad_state: Tensor, grad_log_decay: Tensor | float, grad_rate: Tensor | float
    ) -> Tensor:
        """Return the gradients of rate, process, key and query noise, `[4, H]`, summed over pairs.

        The terms of a pair are added before the sum over pairs, because they nearly cancel. Later keys are treated as
        unscaled: their variance is query noise + state / decay^2. So the gradient of the rate contains no difference of
        the effects of the query noise on variance and divisor.

        Args:
            grad_total: gradient of `total`, which only the query noise receives.
            grad_state: gradient that all other parameters receive: that of `total` plus that of `state`.
            grad_log_decay: gradient of log(decay) through residuals.
            grad_rate: gradient of the rate from elsewhere.
        """
        tiny = torch.finfo(self.decay.dtype).tiny
        grad_total, grad_state = grad_total.where(self.total > tiny, 0), grad_state.where(self.state > tiny, 0)
        grad_decay_square = self.noise.key * self.decay.square() * grad_state
        if self.future is not None:
            grad_decay_square = grad_decay_square.where(~self.future, -self.state * grad_total)
        grad_rate = grad_rate - self.distance * (grad_log_decay + 2 * grad_decay_square)
        grad_rate = grad_rate + self.noise.process * grad_state * accumulated_noise_slope(
            self.noise.rate, self.distance
        )
        terms = (grad_rate, self.accumulated * grad_state, self.key_weight * grad_state, self.query_weight * grad_total)
        return torch.stack([_sum_per_head(x) for x in terms])

    def growth_vjp(self, grad_total: Tensor) -> Tensor:
        """Return the gradients of key and query noise, `[2, H]`, if the sum of grad_total * total is 0 for each query.

        Then the gradient through log(start) is 0 up to rounding, and is omitted.
        """
        noise, tiny = self.noise, self.total <= torch.finfo(self.decay.dtype).tiny
        clamped = torch.where(tiny, -self.total / self.start, 0) * grad_total  # pairs whose variance was clamped
        found = []
        for key_first in (True, False) if self.future is not None else (True,):
            own, other = (noise.key, noise.query) if key_first else (noise.query, noise.key)
            pair_grad = self.accumulated * grad_total.masked_fill(
                tiny if self.future is None else tiny | (self.future == key_first), 0
            )
            slopes = noise.process + 2 * noise.rate * other, noise.process - 2 * noise.rate * own
            decay_terms, constant_terms = (-_sum_per_head(pair_grad) * (x / self.start)[:, 0, 0] for x in slopes)
            found.append(torch.stack([decay_terms, constant_terms] if key_first else [constant_terms, decay_terms]))
        return sum(found, _sum_per_head(clamped))


@dataclass
class Scores:
    """Scores of a tile of queries and keys, `[R, H, t, s]`.

    A small key noise enters a score through two terms that nearly cancel: the logarithms of the weight and of the
    variance of the value. So both terms are simplified analytically, in forward and backward formulas, instead of
    added numerically.

    Attributes:
        params: parameters of the heads.
        config: options and mask.
        lag: time of the query minus time of the key, `[R, 1, t, s]`; clamped to >= 0 if causal.
        qk: dot products.
        squared_norms: those of queries `[R, H, t, 1]` and keys `[R, H, 1, s]`.
        key_var: decay and variances by the dynamics of keys.
        value_var: decay and variances by the dynamics of values.
        factors: factors of queries and keys in the residual.
        residual: squared norm of the residual.
        cost: log(variance of the value / weight); relative to its value at lag 0 if values have their own dynamics.
        neg_log_weight: -log(weight); `None` if weights are rational and dynamics shared.
        score: input of the softmax, -temperature * cost.
        log_value_decay: logarithm of the decay of values.
    """

    params: HeadParams
    config: ScoreConfig
    lag: Tensor
    qk: Tensor
    squared_norms: tuple[Tensor, Tensor]
    key_var: LagVariance
    value_var: LagVariance
    factors: tuple[Tensor | float, Tensor]
    residual: Tensor
    cost: Tensor
    neg_log_weight: Tensor | None
    score: Tensor
    log_value_decay: Tensor

    @classmethod
    def of(
        cls, params: HeadParams, config: ScoreConfig, lag: Tensor, qk: Tensor, query_norm: Tensor, key_norm: Tensor
    ) -> Scores:
        """Compute the scores from lags, dot products and squared norms; shapes as in `Attributes`."""
        future = None if config.causal else lag < 0
        lag = lag.clamp(min=0) if config.causal else lag
        key_var = LagVariance.after(params.keys, lag.abs(), future)
        value_var = key_var if config.shared_dynamics else LagVariance.after(params.values, lag.abs(), future)
        factors = key_var.factors(params.floor)
        query_factor, key_factor = factors
        residual = query_factor**2 * query_norm + key_factor**2 * key_norm - 2 * query_factor * key_factor * qk
        residual = residual + (residual.clamp(min=0) - residual).detach()  # only rounding makes it negative
        squared_norms, log_value_decay = (query_norm, key_norm), -params.values.rate * lag
        neg_log_weight = None
        if config.rational and config.shared_dynamics:
            cost = key_var.log(key_var.total + residual / params.nu)
        else:
            ratio = residual / (params.nu * key_var.total)
            neg_log_weight = ratio.clamp(max=torch.finfo(ratio.dtype).max).log1p() if config.rational else ratio
            cost = neg_log_weight + (
                value_var.log(value_var.total) if config.shared_dynamics else value_var.log_relative()
            )
        score = -params.temperature * cost
        inputs, variances = (params, config, lag, qk, squared_norms), (key_var, value_var)
        return cls(*inputs, *variances, factors, residual, cost, neg_log_weight, score, log_value_decay)

    def log_precision(self) -> Tensor:
        """Return the logarithm of the term of each key in the total precision, log(weight / state variance)."""
        if self.neg_log_weight is None:
            return self.value_var.log_query_noise_ratio() - self.cost
        return -self.neg_log_weight - self.value_var.log(self.value_var.state)

    def vjp(
        self, grad_score: Tensor, grad_log_value_decay: Tensor, grad_log_precision: Tensor | None, log_weight: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Compute gradients of `qk` and of the norms of queries and keys, `[R, H, t, s]`, and of parameters `[11, H]`.

        Args:
            grad_score: gradient of `score`; for each query its sum over keys must be 0.
            grad_log_value_decay: gradient of `log_value_decay`.
            grad_log_precision: gradient of `log_precision()`, or `None`.
            log_weight: `score` minus any finite number per query, such as the logarithm of the softmax weights.
        """
        params, key_var, value_var, (query_factor, key_factor) = self.params, self.key_var, self.value_var, self.factors
        grad_softmax = grad_cost = -params.temperature * grad_score
        if grad_log_precision is not None:
            grad_cost = grad_softmax - grad_log_precision
        shared, rational, scaled_total = self.config.shared_dynamics, self.config.rational, params.nu * key_var.total
        inverse = (scaled_total + self.residual if rational else scaled_total).reciprocal()
        grad_residual, weight_slope = grad_cost * inverse, inverse * self.residual
        grad_factor = 2 * grad_residual * (key_factor * self.squared_norms[1] - query_factor * self.qk)
        grad_log_decay, grad_floor = key_var.decay * grad_factor, grad_factor
        if key_var.future is not None:  # unscaled, the factors are 1 and 1 / decay + floor
            causal = ~key_var.future
            grad_log_decay, grad_floor = (
                grad_log_decay.where(causal, -grad_factor),
                grad_factor.where(causal, grad_log_decay),
            )
        grad_rate = -self.lag * grad_log_value_decay
        if value_var.future is not None and grad_log_precision is not None:
            grad_rate = grad_rate - 2 * value_var.distance * value_var.future * grad_log_precision
        # Derivative of cost by the variance.
        slope = params.nu * inverse if rational else (1 - weight_slope) / key_var.total
        slope = slope if shared else value_var.total.reciprocal()
        grad_total = grad_state = grad_cost * slope
        if grad_log_precision is not None:
            query_noise_ratio = value_var.noise.query * value_var.query_weight / value_var.state
            grad_state = grad_state - grad_log_precision * query_noise_ratio / value_var.total
            grad_total = grad_softmax * slope
            grad_total = grad_total + grad_log_precision * weight_slope / value_var.total if shared else grad_total
        if shared:
            grad_keys = key_var.noise_vjp(grad_total, grad_state, grad_log_decay, grad_rate)
            grad_values = torch.zeros_like(grad_keys)
        else:
            grad_key_total = -grad_cost * weight_slope / key_var.total
            grad_keys = key_var.noise_vjp(grad_key_total, grad_key_total, grad_log_decay, 0.0)
            grad_values = value_var.noise_vjp(grad_total, grad_state, 0.0, grad_rate)
            grad_values[2:] = value_var.growth_vjp(grad_total)
            if grad_log_precision is not None:
                unclamped = value_var.state > torch.finfo(scaled_total.dtype).tiny
                grad_precision_state = (grad_log_precision / value_var.state).where(unclamped, 0)
                grad_values[2] -= _sum_per_head(value_var.key_weight * grad_precision_state)
        terms = (-grad_cost * weight_slope / params.nu, grad_score * log_weight / params.temperature, grad_floor)
        grad_params = torch.cat([grad_keys, grad_values, torch.stack([_sum_per_head(x) for x in terms])])
        grad_qk = -2 * query_factor * key_factor * grad_residual
        return grad_qk, query_factor**2 * grad_residual, key_factor**2 * grad_residual, grad_params


def variance_from_log_precision(log_precision: Tensor) -> Tensor:
    """Return exp(-log_precision), clamped to a finite value."""
    return (-log_precision).clamp(max=math.log(torch.finfo(log_precision.dtype).max) - 1).exp()


def _sum_per_head(x: Tensor) -> Tensor:
    """Sum `[R, H, t, s]` over all dims but heads."""
    return x.sum((0, 2, 3))
