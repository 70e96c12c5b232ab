"""PyTorch implementation of `attend_radial`.

Three dot products per pair of tokens, so O(T (S + T) C) operations. Memory is that of a block of queries.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kalmix.beliefs import HistoryBelief
from kalmix.ops._attend.assembly import attend_with
from kalmix.ops._attend.dynamics import Dynamics, frequency_grad_carrier, times_i
from kalmix.ops._attend.kv_layout import KVLayout
from kalmix.ops._attend.query_blocks import map_query_blocks
from kalmix.ops._attend.scores import LagVariance, NoiseParams, ScoreConfig, score_config, variance_from_log_precision
from kalmix.ops._attend.signals import AttendSignals
from kalmix.ops._shared.custom_op import recomputed_op
from kalmix.ops._shared.products import masked_product, product
from kalmix.segments import Segments
from kalmix.types import Filtered


def attend_radial(signals: AttendSignals, belief: HistoryBelief, segments: Segments | None, variance: bool) -> Filtered:
    """Compute `kalmix.ops.attend_radial`."""
    return attend_with(_attend, signals, belief, segments, variance)


def _attend(layout: KVLayout, signals: AttendSignals, variance: bool) -> tuple[Tensor, Tensor | None]:
    """Attend between rotated tokens; noises, nu and temperature are `[H, 2]`, along and across the direction."""
    *_, dynamics, _, weighting = signals
    config = score_config(None, weighting)
    tensors = [*layout[:5], *dynamics, *weighting[:3]]
    run = _compiled_op if torch.compiler.is_compiling() else _attend_tensors
    mean, *output_variance = run(tensors, [config.rational, config.causal, config.window, variance])
    return mean, output_variance[0] if variance else None


def _attend_tensors(tensors: list[Tensor], options: list[int]) -> tuple[Tensor, ...]:
    (q, k, v, times, rank), dynamics = tensors[:5], Dynamics(*tensors[5:10])
    rational, causal, window, variance = options
    nu, temperature, floor = tensors[10:]
    config = ScoreConfig(True, bool(rational), bool(causal), window)
    dtype, past_length = q.dtype, k.shape[1] - q.shape[1]
    rate = -dynamics.log_decay.to(dtype)[:, None, None]
    pairs = (x.to(dtype)[..., None, None].unbind(1) for x in (*dynamics[2:], nu, temperature))
    along, across = zip(*pairs, strict=True)  # process, key and query noise, nu, temperature: `[H, 1, 1]`
    floor = floor.to(dtype)[:, None, None]
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    token_values = v[:, :, past_length:]
    unit = unit_rows(token_values)  # [L, H, T, 2 C]
    unit_times_i, carrier = times_i(unit), frequency_grad_carrier(dynamics.frequency, dtype)

    def attend_block(queries: slice, slots: slice) -> tuple[Tensor, ...]:
        query_slots = slice(past_length + queries.start, past_length + queries.stop)
        lag = (times[:, query_slots, None] - times[:, None, slots]).to(dtype)[:, None]
        lag = lag.clamp(min=0) if config.causal else lag
        future = None if config.causal else lag < 0
        masked = ~config.visible(rank[:, query_slots], rank[:, slots])
        query, key, value, u, iu = (
            q[:, :, queries],
            k[:, :, slots],
            v[:, :, slots],
            unit[:, :, queries],
            unit_times_i[:, :, queries],
        )
        lag_variances = [
            LagVariance.after(NoiseParams(rate, *noise[:3]), lag.abs(), future) for noise in (along, across)
        ]
        query_factor, key_factor = lag_variances[0].factors(floor)

        def products(x: Tensor, y: Tensor) -> Tensor:
            result = product(x, y.mT)
            if carrier is None:
                return result
            first, second = product(carrier * x, times_i(y).mT), product(carrier.square() * x, y.mT)
            return result + lag * first - lag.square() / 2 * second

        def squared_projection(x: Tensor) -> Tensor:
            """Return the squared dot product of the residual and x."""
            return (query_factor * (x * query).sum(-1, keepdim=True) - key_factor * products(x, key)).square()

        squared_norms = query.square().sum(-1, keepdim=True), key.square().sum(-1)[..., None, :]
        residual = (
            query_factor**2 * squared_norms[0]
            + key_factor**2 * squared_norms[1]
            - 2 * query_factor * key_factor * products(query, key)
        )
        radial = squared_projection(u) + squared_projection(iu)
        tangential = residual - radial
        tangential = tangential + (tangential.clamp(min=0) - tangential).detach()  # only rounding makes it negative
        weights, variances = [], []
        for lag_variance, noise, square in zip(lag_variances, (along, across), (radial, tangential), strict=True):
            ratio = square / lag_variance.total / noise[3]
            log_weight = -ratio.log1p() if config.rational else -ratio
            score = (noise[4] * (log_weight - lag_variance.log(lag_variance.total))).masked_fill(masked, -torch.inf)
            weights.append((score.log_softmax(-1) - rate * lag).exp())
            log_precision = (log_weight - lag_variance.log(lag_variance.state)).masked_fill(masked, -torch.inf)
            variances.append(variance_from_log_precision(log_precision.logsumexp(-1, keepdim=True)))
        magnitude = (weights[0] * products(u, value).masked_fill(masked, 0)).sum(-1, keepdim=True)
        step = masked_product(weights[1], value)
        if carrier is not None:
            weight_lag = weights[1] * lag
            first, second = masked_product(weight_lag, times_i(value)), masked_product(weight_lag * lag, value)
            step = step + carrier * first - carrier.square() / 2 * second
        step = step - (u * step).sum(-1, keepdim=True) * u - (iu * step).sum(-1, keepdim=True) * iu
        mean = magnitude * unit_rows(token_values[:, :, queries] + step)
        if not variance:
            return (mean.transpose(1, 2),)
        radial_share = u.unflatten(-1, (2, -1)).square().sum(-2).repeat(1, 1, 1, 2)  # squared component of each channel
        return mean.transpose(1, 2), torch.lerp(variances[1], variances[0], radial_share).transpose(1, 2)

    return map_query_blocks(attend_block, config, rank, q.shape[2], q.shape[0] * q.shape[1] * k.shape[2])


def unit_rows(x: Tensor) -> Tensor:
    """Divide vectors `[..., 2 C]` by their norms; 0, without a derivative, where the squared norm is 0."""
    square = x.square().sum(-1, keepdim=True)
    return x / torch.where(square > 0, square, torch.inf).sqrt()


def _attend_fake(tensors, options):
    q, v = tensors[0], tensors[2]
    return [q.new_empty(*q.shape[:3], v.shape[3]) for _ in range(2 if options[3] else 1)]


_compiled_op = recomputed_op("kalmix::attend_radial", _attend_tensors, _attend_fake, "`attend_radial` when compiled")
