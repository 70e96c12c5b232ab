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

from kalmix.ops._attend.dynamics import Dynamics, Weighing, grown_slope, kappa, zero_of
from kalmix.ops._attend.kv_layout import FAR


class Noise(NamedTuple):
    """How sure one is of something after a lag: `[H, 1, 1]` each."""

    rate: Tensor
    process: Tensor
    key: Tensor
    query: Tensor


class Rules(NamedTuple):
    """What of a model is no number of a head.

    Attributes:
        shared: whether values move as keys do.
        rational: the kind of weight.
        causal: whether queries see what lies ahead.
        window: how much less than its own a rank may be to be seen.
    """

    shared: bool
    rational: bool
    causal: bool
    window: int

    def sees(self, of_queries: Tensor, of_keys: Tensor) -> Tensor:
        """Which keys queries see, `[L, 1, t, s]`, given ranks `[L, t]` and `[L, s]`."""
        behind = of_queries[:, None, :, None] - of_keys[:, None, None, :]
        if not self.causal:
            return behind.abs() < self.window
        return (behind >= 0) & (behind < self.window)

    def sees_any(self, of_queries: Tensor, of_keys: Tensor, chosen: Tensor) -> Tensor:
        """Which queries see one of the chosen keys, `[L, t]`, given ranks and a mask of keys `[L, s]`; O(s log s)."""
        ranks = torch.where(chosen, of_keys, torch.iinfo(torch.int64).max).sort(1).values
        last = of_queries if self.causal else of_queries + (self.window - 1)
        ends = (x.contiguous() for x in (last, of_queries - self.window))
        until, before = (torch.searchsorted(ranks, x, right=True) for x in ends)
        return until > before

    def reach(self, queries: slice, tokens: int, slots: int) -> tuple[int, int]:
        """From where to where in a lane of slots, the last of them tokens with queries, some queries may see keys."""
        past = slots - tokens  # may have empty slots, so that a window may reach further back
        start = 0 if past else max(0, queries.start + 1 - self.window)
        return start, past + queries.stop if self.causal else slots


def rules_of(values: Dynamics | None, weighing: Weighing) -> Rules:
    window = FAR // 2 if weighing.window is None else weighing.window
    return Rules(values is None, weighing.rational, weighing.causal, window)


def numbers_of(keys: Dynamics, values: Dynamics | None, weighing: Weighing, dtype: torch.dtype) -> Tensor:
    """The numbers of all heads, `[11, H]`: see `Model`."""

    def noise(x: Dynamics) -> list[Tensor]:
        return [y.to(dtype) for y in (-x.log_decay, x.process_noise, x.key_noise, x.query_noise)]

    of_keys = noise(keys)  # shared by both, so that their gradients add up in `dtype`
    of_values = of_keys if values is None else noise(values)
    return torch.stack([*of_keys, *of_values, *(x.to(dtype) for x in weighing[:3])])


class Model(NamedTuple):
    """The numbers of heads, `[H, 1, 1]` each."""

    keys: Noise
    values: Noise
    nu: Tensor
    temperature: Tensor
    floor: Tensor

    @classmethod
    def of(cls, numbers: Tensor) -> Model:
        rows = numbers[..., None, None].unbind(0)
        return cls(Noise(*rows[:4]), Noise(*rows[4:8]), *rows[8:])


@dataclass
class Spread:
    """Decay and variance after a lag, `[L, H, t, s]`, what is ahead divided by exp(2 rate lag).

    For automatic differentiation that divisor is a constant. Otherwise the rate's gradient would be the difference of
    those of the variance and of the divisor: a small one where the query noise is large.
    """

    noise: Noise
    away: Tensor  # the lag, >= 0
    ahead: Tensor | None
    rise: Tensor | float  # 1, ahead with the derivatives of exp(rate lag)
    decay: Tensor
    grown: Tensor
    seen: Tensor | float  # what the key noise is weighed by
    asked: Tensor | float  # what the query noise is weighed by
    certain: Tensor  # the variance without the query noise
    whole: Tensor

    @classmethod
    def after(cls, noise: Noise, away: Tensor, ahead: Tensor | None) -> Spread:
        decay, grown, rise = torch.exp(-noise.rate * away), kappa(noise.rate, away), 1.0
        slip = None if ahead is None else zero_of(noise.rate)
        if ahead is not None and slip is not None:
            rise = (slip * away).exp().where(ahead, 1.0)
            decay, grown = decay.where(~ahead, decay.detach()), grown * rise**2
        square = decay * decay
        seen, asked = (square, 1.0) if ahead is None else (square.where(~ahead, rise**2), square.where(ahead, 1.0))
        certain = noise.process * grown + noise.key * seen
        whole, least = certain + noise.query * asked, torch.finfo(decay.dtype).tiny
        certain, whole = certain.clamp(min=least), whole.clamp(min=least)
        return cls(noise, away, ahead, rise, decay, grown, seen, asked, certain, whole)

    def log(self, variance: Tensor) -> Tensor:
        """The logarithm of `certain` or `whole`, undivided."""
        if self.ahead is None:
            return variance.log()
        return variance.log() + 2 * self.noise.rate.detach() * self.away * self.ahead

    @property
    def start(self) -> Tensor:
        """Return the variance at lag 0, `[H, 1, 1]`."""
        return self.noise.key + self.noise.query

    def growth(self) -> Tensor:
        """Return whole / start - 1."""
        noise, grown = self.noise, self.grown
        behind, ahead = ((noise.process - 2 * noise.rate * x) / self.start for x in (noise.key, noise.query))
        if self.ahead is None or not isinstance(self.rise, Tensor):
            return (behind if self.ahead is None else ahead.where(self.ahead, behind)) * grown
        fixed = noise.process * grown - 2 * noise.query * (noise.rate * grown).detach()  # by the constant divisor
        return (behind * grown).where(~self.ahead, (fixed + noise.key * (self.rise**2 - 1)) / self.start)

    def log_grown(self) -> Tensor:
        """Return log(whole / start), undivided; where they are close, not as a difference, nor are its gradients."""
        more = self.growth()
        near = more > -0.5
        log = torch.where(near, more.clamp(min=-0.5).log1p(), self.whole.log() - self.start.log())
        return log if self.ahead is None else log + 2 * self.noise.rate.detach() * self.away * self.ahead

    def factors(self, floor: Tensor) -> tuple[Tensor | float, Tensor]:
        """What a query, and what a key pulled forward to it, are multiplied by."""
        if self.ahead is None:
            return 1.0, self.decay + floor
        of_key = (self.decay + floor).where(~self.ahead, self.rise + floor * self.decay)
        return self.decay.where(self.ahead, 1.0), of_key

    def excess(self) -> Tensor:
        """Return log(whole / certain), the share of the query noise, without the difference of two logarithms."""
        return (self.noise.query * self.asked / self.certain).clamp(max=torch.finfo(self.decay.dtype).max).log1p()

    def pull_back(self, to_whole: Tensor, to_sure: Tensor, to_fall: Tensor | float, to_rate: Tensor | float) -> Tensor:
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
        to_whole, to_sure = to_whole.where(self.whole > least, 0), to_sure.where(self.certain > least, 0)
        to_square = self.noise.key * self.decay.square() * to_sure
        if self.ahead is not None:
            to_square = to_square.where(~self.ahead, -self.certain * to_whole)
        to_rate = to_rate - self.away * (to_fall + 2 * to_square)
        to_rate = to_rate + self.noise.process * to_sure * grown_slope(self.noise.rate, self.away)
        weighed = (to_rate, self.grown * to_sure, self.seen * to_sure, self.asked * to_whole)
        return torch.stack([_per_head(x) for x in weighed])

    def pull_back_growth(self, to_whole: Tensor) -> Tensor:
        """Return gradients of key and query noise, `[2, H]`, where `to_whole` times `whole` adds up to 0 for a query.

        So the gradient of log(start) is left out, of which next to nothing would be left over.
        """
        noise, least = self.noise, self.whole <= torch.finfo(self.decay.dtype).tiny
        lost = torch.where(least, -self.whole / self.start, 0) * to_whole  # no variance is less
        found = []
        for seen in (True, False) if self.ahead is not None else (True,):
            own, other = (noise.key, noise.query) if seen else (noise.query, noise.key)
            there = self.grown * to_whole.masked_fill(least if self.ahead is None else least | (self.ahead == seen), 0)
            fading, steady = (-_per_head(there) * (x / self.start)[:, 0, 0] for x in (
                noise.process + 2 * noise.rate * other, noise.process - 2 * noise.rate * own))  # fmt: skip
            found.append(torch.stack([fading, steady] if seen else [steady, fading]))
        return sum(found, _per_head(lost))


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

    model: Model
    rules: Rules
    lag: Tensor
    gram: Tensor
    squares: tuple[Tensor, Tensor]
    near: Spread
    far: Spread
    factors: tuple[Tensor | float, Tensor]
    residual: Tensor
    cost: Tensor
    doubts: Tensor | None
    score: Tensor
    log_reach: Tensor

    @classmethod
    def of(cls, model: Model, rules: Rules, lag: Tensor, gram: Tensor, of_query: Tensor, of_key: Tensor) -> Scores:
        """Scores of queries `[L, H, t, 1]` and keys `[L, H, 1, s]`, given as their squares, and `gram`, their products.

        `lag` is `[L, 1, t, s]`, how much later queries are than keys.
        """
        ahead = None if rules.causal else lag < 0
        lag = lag.clamp(min=0) if rules.causal else lag
        near = Spread.after(model.keys, lag.abs(), ahead)
        far = near if rules.shared else Spread.after(model.values, lag.abs(), ahead)
        factors = near.factors(model.floor)
        residual = factors[0] ** 2 * of_query + factors[1] ** 2 * of_key - 2 * factors[0] * factors[1] * gram
        residual = residual + (residual.clamp(min=0) - residual).detach()  # below 0 by rounding alone
        squares, log_reach = (of_query, of_key), -model.values.rate * lag
        doubts = None
        if rules.rational and rules.shared:
            cost = near.log(near.whole + residual / model.nu)
        else:
            ratio = residual / (model.nu * near.whole)
            doubts = ratio.clamp(max=torch.finfo(ratio.dtype).max).log1p() if rules.rational else ratio
            cost = doubts + (far.log(far.whole) if rules.shared else far.log_grown())
        score = -model.temperature * cost
        return cls(model, rules, lag, gram, squares, near, far, factors, residual, cost, doubts, score, log_reach)

    def log_precision(self) -> Tensor:
        """The logarithm of what a token adds to the total precision: its weight by the variance of its value."""
        return self.far.excess() - self.cost if self.doubts is None else -self.doubts - self.far.log(self.far.certain)

    def pull_back(
        self, to_score: Tensor, to_log_reach: Tensor, to_log_precision: Tensor | None, log_share: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Gradients of `gram`, of the squares of queries and of keys, each `[L, H, t, s]`, and of numbers `[11, H]`.

        `log_share` is the score less a number of the query's, finite: `to_score` adds up to 0 for each query.
        """
        model, near, far, (of_query, of_key) = self.model, self.near, self.far, self.factors
        tempered = to_cost = -model.temperature * to_score
        if to_log_precision is not None:
            to_cost = tempered - to_log_precision
        shared, rational, level = self.rules.shared, self.rules.rational, model.nu * near.whole
        inverse = (level + self.residual if rational else level).reciprocal()
        to_residual, doubt = to_cost * inverse, inverse * self.residual  # doubt: the derivative of -log(weight)
        to_key = 2 * to_residual * (of_key * self.squares[1] - of_query * self.gram)
        to_fall, to_floor = near.decay * to_key, to_key
        if near.ahead is not None:  # the residual, not divided either, has the factors 1 and 1 / decay + floor
            to_fall, to_floor = to_fall.where(~near.ahead, -to_key), to_key.where(~near.ahead, to_fall)
        to_rate = -self.lag * to_log_reach
        if far.ahead is not None and to_log_precision is not None:
            to_rate = to_rate - 2 * far.away * far.ahead * to_log_precision
        slope = model.nu * inverse if rational else (1 - doubt) / near.whole  # of cost for the variance
        slope = slope if shared else far.whole.reciprocal()
        to_whole = to_sure = to_cost * slope
        if to_log_precision is not None:
            to_sure = to_sure - to_log_precision * (far.noise.query * far.asked / far.certain) / far.whole
            to_whole = tempered * slope
            to_whole = to_whole + to_log_precision * doubt / far.whole if shared else to_whole
        if shared:
            of_keys = near.pull_back(to_whole, to_sure, to_fall, to_rate)
            of_values = torch.zeros_like(of_keys)
        else:
            to_near = -to_cost * doubt / near.whole
            of_keys = near.pull_back(to_near, to_near, to_fall, 0.0)
            of_values = far.pull_back(to_whole, to_sure, 0.0, to_rate)
            of_values[2:] = far.pull_back_growth(to_whole)
            if to_log_precision is not None:
                to_certain = (to_log_precision / far.certain).where(far.certain > torch.finfo(level.dtype).tiny, 0)
                of_values[2] -= _per_head(far.seen * to_certain)
        weighed = (-to_cost * doubt / model.nu, to_score * log_share / model.temperature, to_floor)
        numbers = torch.cat([of_keys, of_values, torch.stack([_per_head(x) for x in weighed])])
        return -2 * of_query * of_key * to_residual, of_query**2 * to_residual, of_key**2 * to_residual, numbers


def variance_of(log_precision: Tensor) -> Tensor:
    """exp(-log_precision), or as much as its dtype holds where weights leave next to nothing."""
    return (-log_precision).clamp(max=math.log(torch.finfo(log_precision.dtype).max) - 1).exp()


def _per_head(x: Tensor) -> Tensor:
    """The sum over all but heads."""
    return x.sum((0, 2, 3))
