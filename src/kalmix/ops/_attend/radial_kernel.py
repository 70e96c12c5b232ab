"""`attend_radial`: one noise along each token's own direction, another across it.

Three products of tokens a pair; O(T^2 C) work; memory is that of a tile of queries.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import normalize

from kalmix.beliefs import HistoryBelief
from kalmix.ops._attend.assembly import assemble
from kalmix.ops._attend.dynamics import owed, quarter
from kalmix.ops._attend.kv_layout import Lanes
from kalmix.ops._attend.query_blocks import some_at_a_time
from kalmix.ops._attend.scores import Noise, Spread, rules_of, variance_of
from kalmix.ops._attend.signals import AttendSignals
from kalmix.segments import Segments
from kalmix.types import Filtered


def attend_radial(signals: AttendSignals, belief: HistoryBelief, segments: Segments | None, variance: bool) -> Filtered:
    """Radial-tangential Adaptive Filter Attention. See `kalmix.ops.attend_radial`."""
    return assemble(_attend, signals, belief, segments, variance)


def _attend(lanes: Lanes, signals: AttendSignals, variance: bool) -> tuple[Tensor, Tensor | None]:
    """Noises, nu and temperature are `[H, 2]`: along and across."""
    (q, k, v, times, rank, *_), (*_, dynamics, _, weighing) = lanes, signals
    rules, dtype, past = rules_of(None, weighing), q.dtype, k.shape[1] - q.shape[1]
    rate = -dynamics.log_decay.to(dtype)[:, None, None]
    pairs = (x.to(dtype)[..., None, None].unbind(1) for x in (*dynamics[2:], *weighing[:2]))
    along, across = zip(*pairs, strict=True)  # process, key and query noise, nu, temperature: `[H, 1, 1]`
    floor = weighing.floor.to(dtype)[:, None, None]
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    here = v[:, :, past:]
    unit = normalize(here, dim=-1)  # `[L, H, T, 2 C]`, as what is across it `other`, where real and imaginary swap
    other, slip = quarter(unit), owed(dynamics.frequency, dtype)

    def read(queries: slice, slots: slice) -> tuple[Tensor, ...]:
        own = slice(past + queries.start, past + queries.stop)
        lag = (times[:, own, None] - times[:, None, slots]).to(dtype)[:, None]
        lag = lag.clamp(min=0) if rules.causal else lag
        ahead = None if rules.causal else lag < 0
        hidden = ~rules.sees(rank[:, own], rank[:, slots])
        query, key, value, u, iu = (
            q[:, :, queries],
            k[:, :, slots],
            v[:, :, slots],
            unit[:, :, queries],
            other[:, :, queries],
        )
        spreads = [Spread.after(Noise(rate, *noise[:3]), lag.abs(), ahead) for noise in (along, across)]
        of_query, of_key = spreads[0].factors(floor)

        def products(x: Tensor, y: Tensor) -> Tensor:
            if slip is None:
                return x @ y.mT
            return x @ y.mT + lag * ((slip * x) @ quarter(y).mT) - lag.square() / 2 * ((slip.square() * x) @ y.mT)

        def apart(x: Tensor) -> Tensor:
            """What of the residual lies along x, squared."""
            return (of_query * (x * query).sum(-1, keepdim=True) - of_key * products(x, key)).square()

        squares = query.square().sum(-1, keepdim=True), key.square().sum(-1)[..., None, :]
        whole = of_query**2 * squares[0] + of_key**2 * squares[1] - 2 * of_query * of_key * products(query, key)
        radial = apart(u) + apart(iu)
        tangential = whole - radial
        tangential = tangential + (tangential.clamp(min=0) - tangential).detach()  # below 0 by rounding alone
        weights, variances = [], []
        for spread, noise, square in zip(spreads, (along, across), (radial, tangential), strict=True):
            ratio = square / spread.whole / noise[3]
            log_weight = -ratio.log1p() if rules.rational else -ratio
            score = (noise[4] * (log_weight - spread.log(spread.whole))).masked_fill(hidden, -torch.inf)
            weights.append((score.log_softmax(-1) - rate * lag).exp())
            log_precision = (log_weight - spread.log(spread.certain)).masked_fill(hidden, -torch.inf)
            variances.append(variance_of(log_precision.logsumexp(-1, keepdim=True)))
        length = (weights[0] * products(u, value)).sum(-1, keepdim=True)
        turned = weights[1] @ value
        if slip is not None:
            late = weights[1] * lag
            turned = turned + slip * (late @ quarter(value)) - slip.square() / 2 * ((late * lag) @ value)
        turned = turned - (u * turned).sum(-1, keepdim=True) * u - (iu * turned).sum(-1, keepdim=True) * iu
        mean = length * normalize(here[:, :, queries] + turned, dim=-1)
        if not variance:
            return (mean.transpose(1, 2),)
        share = u.unflatten(-1, (2, -1)).square().sum(-2).repeat(1, 1, 1, 2)  # of each channel in the direction
        return mean.transpose(1, 2), torch.lerp(variances[1], variances[0], share).transpose(1, 2)

    mean, *spread = some_at_a_time(read, rules, times[:, past:], k.shape[2], q.shape[0] * q.shape[1] * k.shape[2])
    return mean, spread[0] if variance else None
