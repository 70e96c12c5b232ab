"""What a query makes of keys pulled forward to it: scores, along which values are averaged, and precisions.

Elementwise in the product of query and key, their squares and the lag, so that tiles may have any size: `L` lanes, `H`
heads, `t` queries, `s` keys. What lies ahead of a query would be pulled back, and grow; so the query is pulled forward
to it instead, and what both sides are divided by is added to the logarithm of the variance.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from kalmix.ops._attend.dynamics import Dynamics, Weighting, accumulated_noise_slope, kappa, zero_with_grad
from kalmix.ops._attend.kv_layout import RANK_STRIDE


class NoiseParams(NamedTuple):
    """How sure one is of something after a lag: `[H, 1, 1]` each."""

    rate: Tensor
    process: Tensor
    key: Tensor
    query: Tensor


class ScoreConfig(NamedTuple):
    """What of a model is no number of a head.

    Attributes:
        shared: whether values move as keys do.
        rational: the kind of weight.
        causal: whether queries see what lies ahead.
        window: how much less than its own a rank may be to be seen.
    """

    shared_dynamics: bool
    rational: bool
    causal: bool
    window: int

    def visible(self, query_rank: Tensor, key_rank: Tensor) -> Tensor:
        """Which keys queries see, `[L, 1, t, s]`, given ranks `[L, t]` and `[L, s]`."""
        rank_difference = query_rank[:, None, :, None] - key_rank[:, None, None, :]
        if not self.causal:
            return rank_difference.abs() < self.window
        return (rank_difference >= 0) & (rank_difference < self.window)

    def any_visible(self, query_rank: Tensor, key_rank: Tensor, marked: Tensor) -> Tensor:
        """Which queries see one of the chosen keys, `[L, t]`, given ranks and a mask of keys `[L, s]`; O(s log s)."""
        ranks = torch.where(marked, key_rank, torch.iinfo(torch.int64).max).sort(1).values
        last = query_rank if self.causal else query_rank + (self.window - 1)
        bounds = (x.contiguous() for x in (last, query_rank - self.window))
        until, before = (torch.searchsorted(ranks, x, right=True) for x in bounds)
        return until > before

    def slot_range(self, queries: slice, tokens: int, slots: int) -> tuple[int, int]:
        """From where to where in a lane of slots, the last of them tokens with queries, some queries may see keys."""
        past_length = slots - tokens  # may have empty slots, so that a window may reach further back
        start = 0 if past_length else max(0, queries.start + 1 - self.window)
        return start, past_length + queries.stop if self.causal else slots


def score_config(values: Dynamics | None, weighting: Weighting) -> ScoreConfig:
    window = RANK_STRIDE // 2 if weighting.window is None else weighting.window
    return ScoreConfig(values is None, weighting.rational, weighting.causal, window)


def stack_head_params(keys: Dynamics, values: Dynamics | None, weighting: Weighting, dtype: torch.dtype) -> Tensor:
    """The numbers of all heads, `[11, H]`: see `Model`."""

    def noise(x: Dynamics) -> list[Tensor]:
        return [y.to(dtype) for y in (-x.log_decay, x.process_noise, x.key_noise, x.query_noise)]

    key_params = noise(keys)  # shared by both, so that their gradients add up in `dtype`
    value_params = key_params if values is None else noise(values)
    return torch.stack([*key_params, *value_params, *(x.to(dtype) for x in weighting[:3])])


class HeadParams(NamedTuple):
    """The numbers of heads, `[H, 1, 1]` each."""

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
    """Decay and variance after a lag, `[L, H, t, s]`, what is ahead divided by exp(2 rate lag).

    For automatic differentiation that divisor is a constant. Otherwise the rate's gradient would be the difference of
    those of the variance and of the divisor: a small one where the query noise is large.
    """

    noise: NoiseParams
    distance: Tensor  # the lag, >= 0
    future: Tensor | None
    future_growth: Tensor | float  # 1, ahead with the derivatives of exp(rate lag)
    decay: Tensor
    accumulated: Tensor
    key_weight: Tensor | float  # what the key noise is weighed by
    query_weight: Tensor | float  # what the query noise is weighed by
    state: Tensor  # the variance without the query noise
    total: Tensor

    @classmethod
    def after(cls, noise: NoiseParams, distance: Tensor, future: Tensor | None) -> LagVariance:
        decay, accumulated, future_growth = torch.exp(-noise.rate * distance), kappa(noise.rate, distance), 1.0
        zero_rate = None if future is None else zero_with_grad(noise.rate)
        if future is not None and zero_rate is not None:
            future_growth = (zero_rate * distance).exp().where(future, 1.0)
            decay, accumulated = decay.where(~future, decay.detach()), accumulated * future_growth**2
        square = decay * decay
        key_weight, query_weight = square, 1.0
        if future is not None:
            key_weight, query_weight = square.where(~future, future_growth**2), square.where(future, 1.0)
        state = noise.process * accumulated + noise.key * key_weight
        total, least = state + noise.query * query_weight, torch.finfo(decay.dtype).tiny
        state, total = state.clamp(min=least), total.clamp(min=least)
        return cls(noise, distance, future, future_growth, decay, accumulated, key_weight, query_weight, state, total)

    def log(self, variance: Tensor) -> Tensor:
        """The logarithm of `certain` or `whole`, undivided."""
        if self.future is None:
            return variance.log()
        return variance.log() + 2 * self.noise.rate.detach() * self.distance * self.future

    @property
    def start(self) -> Tensor:
        """Return the variance at lag 0, `[H, 1, 1]`."""
        return self.noise.key + self.noise.query

    def relative_growth(self) -> Tensor:
        """Return whole / start - 1."""
        noise, accumulated = self.noise, self.accumulated
        past, future = ((noise.process - 2 * noise.rate * x) / self.start for x in (noise.key, noise.query))
        if self.future is None or not isinstance(self.future_growth, Tensor):
            return (past if self.future is None else future.where(self.future, past)) * accumulated
        fixed = noise.process * accumulated - 2 * noise.query * (noise.rate * accumulated).detach()  # constant divisor
        return (past * accumulated).where(~self.future, (fixed + noise.key * (self.future_growth**2 - 1)) / self.start)

    def log_relative(self) -> Tensor:
        """Return log(whole / start), undivided; where they are close, not as a difference, nor are its gradients."""
        growth = self.relative_growth()
        small = growth > -0.5
        log = torch.where(small, growth.clamp(min=-0.5).log1p(), self.total.log() - self.start.log())
        return log if self.future is None else log + 2 * self.noise.rate.detach() * self.distance * self.future

    def factors(self, floor: Tensor) -> tuple[Tensor | float, Tensor]:
        """What a query, and what a key pulled forward to it, are multiplied by."""
        if self.future is None:
            return 1.0, self.decay + floor
        key_factor = (self.decay + floor).where(~self.future, self.future_growth + floor * self.decay)
        return self.decay.where(self.future, 1.0), key_factor

    def log_query_noise_ratio(self) -> Tensor:
        """Return log(whole / certain), the share of the query noise, without the difference of two logarithms."""
        return (self.noise.query * self.query_weight / self.state).clamp(max=torch.finfo(self.decay.dtype).max).log1p()

    def noise_vjp(
        self, grad_total: Tensor, grad_state: Tensor, grad_log_decay: Tensor | float, grad_rate: Tensor | float
    ) -> Tensor:
        """Return gradients of the noise, `[4, H]`: sums over pairs, whose terms are added up before.

        What is ahead counts here as not divided: its variance is query noise + certain / decay^2. So the rate's
        gradient is no difference of what query noise adds to the variance and to the divisor.

        Args:
            to_whole: gradient of `whole`, through which the query noise acts.
            to_sure: gradient of all but the query noise: that of `whole` plus that of `certain`.
            to_fall: gradient of the logarithm of `decay` through residuals.
            to_rate: gradient of the rate through anything else.
        """
        least = torch.finfo(self.decay.dtype).tiny
        grad_total, grad_state = grad_total.where(self.total > least, 0), grad_state.where(self.state > least, 0)
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
        """Return gradients of key and query noise, `[2, H]`, where `to_whole` times `whole` adds up to 0 for a query.

        So the gradient of log(start) is left out, of which next to nothing would be left over.
        """
        noise, least = self.noise, self.total <= torch.finfo(self.decay.dtype).tiny
        clamped = torch.where(least, -self.total / self.start, 0) * grad_total  # no variance is less
        found = []
        for key_first in (True, False) if self.future is not None else (True,):
            own, other = (noise.key, noise.query) if key_first else (noise.query, noise.key)
            pair_grad = self.accumulated * grad_total.masked_fill(
                least if self.future is None else least | (self.future == key_first), 0
            )
            slopes = noise.process + 2 * noise.rate * other, noise.process - 2 * noise.rate * own
            decaying, constant = (-_sum_per_head(pair_grad) * (x / self.start)[:, 0, 0] for x in slopes)
            found.append(torch.stack([decaying, constant] if key_first else [constant, decaying]))
        return sum(found, _sum_per_head(clamped))


@dataclass
class Scores:
    """Queries against keys that were pulled forward, `[L, H, t, s]`.

    The key noise is in two terms of a score that nearly cancel where it is small: the weight's and the value's
    variance. So both terms of a pair are added up as formulas, here and backwards, and never as numbers.

    Attributes:
        cost: log(variance of the value / weight); where values have their own dynamics, less that at lag 0.
        doubts: -log(weight), where the two terms do not cancel.
        score: what the softmax is taken of, minus temperature times cost.
        log_reach: the logarithm of the decay of values.
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
        """Scores of queries `[L, H, t, 1]` and keys `[L, H, 1, s]`, given as their squares, and `gram`, their products.

        `lag` is `[L, 1, t, s]`, how much later queries are than keys.
        """
        future = None if config.causal else lag < 0
        lag = lag.clamp(min=0) if config.causal else lag
        key_var = LagVariance.after(params.keys, lag.abs(), future)
        value_var = key_var if config.shared_dynamics else LagVariance.after(params.values, lag.abs(), future)
        factors = key_var.factors(params.floor)
        query_factor, key_factor = factors
        residual = query_factor**2 * query_norm + key_factor**2 * key_norm - 2 * query_factor * key_factor * qk
        residual = residual + (residual.clamp(min=0) - residual).detach()  # below 0 by rounding alone
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
        """The logarithm of what a token adds to the total precision: its weight by the variance of its value."""
        if self.neg_log_weight is None:
            return self.value_var.log_query_noise_ratio() - self.cost
        return -self.neg_log_weight - self.value_var.log(self.value_var.state)

    def vjp(
        self, grad_score: Tensor, grad_log_value_decay: Tensor, grad_log_precision: Tensor | None, log_weight: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Gradients of `gram`, of the squares of queries and of keys, each `[L, H, t, s]`, and of numbers `[11, H]`.

        `log_share` is the score less a number of the query's, finite: `to_score` adds up to 0 for each query.
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
        if key_var.future is not None:  # the residual, not divided either, has the factors 1 and 1 / decay + floor
            causal = ~key_var.future
            grad_log_decay, grad_floor = (
                grad_log_decay.where(causal, -grad_factor),
                grad_factor.where(causal, grad_log_decay),
            )
        grad_rate = -self.lag * grad_log_value_decay
        if value_var.future is not None and grad_log_precision is not None:
            grad_rate = grad_rate - 2 * value_var.distance * value_var.future * grad_log_precision
        slope = params.nu * inverse if rational else (1 - weight_slope) / key_var.total  # of cost for the variance
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
    """exp(-log_precision), or as much as its dtype holds where weights leave next to nothing."""
    return (-log_precision).clamp(max=math.log(torch.finfo(log_precision.dtype).max) - 1).exp()


def _sum_per_head(x: Tensor) -> Tensor:
    """The sum over all but heads."""
    return x.sum((0, 2, 3))
