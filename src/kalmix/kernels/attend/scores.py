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

from kalmix.kernels.attend.dynamics import Dynamics, Weighing, grown_slope, kappa
from kalmix.kernels.attend.lanes import FAR


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
        return [-x.log_decay, x.process_noise, x.key_noise, x.query_noise]

    of_keys = noise(keys)
    rows = [*of_keys, *(of_keys if values is None else noise(values)), *weighing[:3]]
    return torch.stack([x.to(dtype) for x in rows])


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
    """Decay and variance after a lag, `[L, H, t, s]`, what is ahead divided by exp(2 rate lag)."""

    noise: Noise
    away: Tensor  # the lag, >= 0
    ahead: Tensor | None
    decay: Tensor
    grown: Tensor
    seen: Tensor | float  # what the key noise is weighed by
    asked: Tensor | float  # what the query noise is weighed by
    certain: Tensor  # the variance without the query noise
    whole: Tensor

    @classmethod
    def after(cls, noise: Noise, away: Tensor, ahead: Tensor | None) -> Spread:
        decay, grown = torch.exp(-noise.rate * away), kappa(noise.rate, away)
        square = decay * decay
        seen, asked = (square, 1.0) if ahead is None else (square.where(~ahead, 1.0), square.where(ahead, 1.0))
        certain = noise.process * grown + noise.key * seen
        whole, least = certain + noise.query * asked, torch.finfo(decay.dtype).tiny
        return cls(noise, away, ahead, decay, grown, seen, asked, certain.clamp(min=least), whole.clamp(min=least))

    def log(self, variance: Tensor) -> Tensor:
        """The logarithm of `certain` or `whole`, undivided."""
        if self.ahead is None:
            return variance.log()
        return variance.log() + 2 * self.noise.rate * self.away * self.ahead

    def factors(self, floor: Tensor) -> tuple[Tensor | float, Tensor]:
        """What a query, and what a key pulled forward to it, are multiplied by."""
        if self.ahead is None:
            return 1.0, self.decay + floor
        return self.decay.where(self.ahead, 1.0), (self.decay + floor).where(~self.ahead, 1 + floor * self.decay)

    def pull_back(self, to_certain: Tensor | float, to_whole: Tensor, to_log: Tensor, to_decay: Tensor) -> Tensor:
        """Gradients of the noise, `[4, H]`, given those of the two variances, of what `log` adds, and of the decay."""
        least = torch.finfo(self.decay.dtype).tiny
        to_whole = to_whole.where(self.whole > least, 0)
        to_certain = to_whole + (to_certain.where(self.certain > least, 0) if isinstance(to_certain, Tensor) else 0)
        to_square = self.noise.key * to_certain
        if self.ahead is not None:
            to_square = to_square.where(~self.ahead, self.noise.query * to_whole)
        to_rate = -self.away * self.decay * (to_decay + 2 * self.decay * to_square)
        to_rate = to_rate + self.noise.process * to_certain * grown_slope(self.noise.rate, self.away)
        if self.ahead is not None:
            to_rate = to_rate + 2 * self.away * self.ahead * to_log
        weighed = (to_rate, self.grown * to_certain, self.seen * to_certain, self.asked * to_whole)
        return torch.stack([_per_head(x) for x in weighed])


@dataclass
class Scores:
    """Queries against keys that were pulled forward, `[L, H, t, s]`.

    Attributes:
        score: what the softmax is taken of.
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
    whole: Tensor
    log_weight: Tensor
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
        whole = near.whole + residual / model.nu
        log_weight = near.whole.log() - whole.log() if rules.rational else -residual / (model.nu * near.whole)
        score = model.temperature * (log_weight - far.log(far.whole))
        squares, log_reach = (of_query, of_key), -model.values.rate * lag
        return cls(model, rules, lag, gram, squares, near, far, factors, residual, whole, log_weight, score, log_reach)

    def log_precision(self) -> Tensor:
        """The logarithm of what a token adds to the total precision: its weight by the variance of its value."""
        return self.log_weight - self.far.log(self.far.certain)

    def pull_back(
        self, to_score: Tensor, to_log_reach: Tensor, to_log_precision: Tensor | float
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Gradients of `gram`, of the squares of queries and of keys, each `[L, H, t, s]`, and of numbers `[11, H]`."""
        model, near, far, (of_query, of_key) = self.model, self.near, self.far, self.factors
        tempered = model.temperature * to_score
        to_weight = tempered + to_log_precision
        if self.rules.rational:
            to_whole = -to_weight / self.whole
            to_near, to_residual = to_weight / near.whole + to_whole, to_whole / model.nu
        else:
            to_residual = -to_weight / (model.nu * near.whole)
            to_near = -to_residual * self.residual / near.whole
        to_nu = -to_residual * self.residual / model.nu
        to_key = 2 * to_residual * (of_key * self.squares[1] - of_query * self.gram)
        to_decay = to_floor = to_key
        if near.ahead is not None:
            to_query = 2 * to_residual * (of_query * self.squares[0] - of_key * self.gram)
            to_decay = to_key.where(~near.ahead, to_query + model.floor * to_key)
            to_floor = to_key.where(~near.ahead, near.decay * to_key)
        none = torch.zeros_like(to_weight)
        of_keys = near.pull_back(0.0, to_near, none, to_decay)
        of_values = far.pull_back(-to_log_precision / far.certain, -tempered / far.whole, -to_weight, none)
        of_values[0] -= _per_head(self.lag * to_log_reach)
        to_temperature = to_score * (self.log_weight - far.log(far.whole))
        others = torch.stack([_per_head(x) for x in (to_nu, to_temperature, to_floor)])
        to_numbers = torch.cat([of_keys, of_values, others])
        to_gram = -2 * of_query * of_key * to_residual
        return to_gram, of_query**2 * to_residual, of_key**2 * to_residual, to_numbers


def variance_of(log_precision: Tensor) -> Tensor:
    """exp(-log_precision), or as much as its dtype holds where weights leave next to nothing."""
    return (-log_precision).clamp(max=math.log(torch.finfo(log_precision.dtype).max) - 1).exp()


def _per_head(x: Tensor) -> Tensor:
    """The sum over all but heads."""
    return x.sum((0, 2, 3))
