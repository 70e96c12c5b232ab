"""Calls of steps on meta tensors, which reach the branches of their Triton kernels."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kalmix import DenseBelief, DiagonalBelief, PointBelief, RidgeBelief, steps
from kalmix.layers.fused import (
    GatedSkip,
    QueryKeyColumns,
    RawCellSignals,
    UnitNorm,
    cell_step,
    convolve_qkv_step,
    short_convolution_step,
    swiglu_linear,
)
from kalmix.layers.fused.trajectory_step import RawDynamics, RawWeights, predict_step, step_parameters
from kalmix.ops import ConjugateGradient, Dynamics, Fixed

ROWS, SLOTS, HEADS = 2, 4, 4
WIDTHS = ((128, 128), (256, 64), (33, 17))  # of keys and values
FLOAT = torch.float32


def _slots() -> steps.Slots:
    return steps.Slots(*torch.empty(2, ROWS, dtype=torch.int32, device="meta"))


def _empty(*shape: int, dtype: torch.dtype = FLOAT) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _signal(*shape: int) -> Tensor:
    return _empty(ROWS, 1, HEADS, *shape)


def _tokens(dtype: torch.dtype, keys: int, values: int) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (_empty(ROWS, 1, HEADS, width, dtype=dtype) for width in (keys, keys, values))
    return q, k, v


def _step(name: str, signals: Any, pool: Any, **options: Any) -> None:
    getattr(steps, name)(signals, pool, _slots(), **options, kernel="triton")


def _memories(dtype: torch.dtype) -> None:
    for keys, values in WIDTHS:
        tokens, pool = _tokens(dtype, keys, values), PointBelief(_empty(SLOTS, HEADS, keys, values))
        _step("additive", steps.AdditiveSignals(*tokens), pool)
        _step("additive", steps.AdditiveSignals(*tokens, _signal(keys), _signal()), pool)
        _step("delta", steps.DeltaSignals(*tokens, _signal(), _signal()), pool)
        _step("delta", steps.DeltaSignals(*tokens, _signal(keys), _signal(keys)), pool)


def _cells(dtype: torch.dtype) -> None:
    for keys, values in ((16, 1360), (3, 5)):
        tokens, shape = _tokens(dtype, keys, values), (HEADS, keys, values)
        pool = DiagonalBelief(_empty(SLOTS, *shape), _empty(SLOTS, *shape))
        signals = steps.DiagonalSignals(*tokens, _signal(values), _empty(*shape), _empty(*shape))
        for variance in (False, True):
            _step("diagonal", signals, pool, variance=variance)
    for slots, channels in ((16, 1024), (3, 5)):
        raw = RawCellSignals(*(_empty(ROWS, 1, width, dtype=dtype) for width in (slots, slots, channels, channels)))
        z, gate, scale = (_empty(*shape, channels, dtype=dtype) for shape in ((ROWS, 1), (ROWS, 1), ()))
        cells = [_empty(*shape, slots, channels) for shape in ((), (), (SLOTS, 1), (SLOTS, 1))]
        cell_step(raw, GatedSkip(z, scale, gate), (cells[0], cells[1]), DiagonalBelief(*cells[2:]), _slots())


def _projections(dtype: torch.dtype) -> None:
    for rows in (1, 64) if dtype != FLOAT else ():
        swiglu_linear(_empty(rows, 1, 1024, dtype=dtype), _empty(5472, 1024, dtype=dtype))


def _sums(dtype: torch.dtype) -> None:
    for keys, values in WIDTHS:
        pool = RidgeBelief(_empty(SLOTS, HEADS, keys, values), _empty(SLOTS, HEADS, keys, keys))
        signals = steps.RidgeSignals(*_tokens(dtype, keys, values), _signal(), _signal(), _signal())
        _step("ridge", signals, pool)
        _step("ridge", signals, pool, variance=True)
        _step("ridge", signals, pool, ridge=Fixed(1.0), solver=ConjugateGradient(10), variance=True)


def _beliefs(dtype: torch.dtype) -> None:
    for keys, values in (*WIDTHS, (34, 17)):
        pool = DenseBelief(_empty(SLOTS, HEADS, keys, values), _empty(SLOTS, HEADS, keys, keys))
        signals = steps.DenseSignals(*_tokens(dtype, keys, values), _signal(), _signal(), _signal(keys))
        _step("dense", signals, pool)
        _step("dense", signals, pool, variance=True)
        if keys % 2 == 0 and keys <= 128:
            turning = {"log_decay": _signal(keys // 2), "angle": _signal(keys // 2)}
            _step("dense", steps.DenseSignals(*signals[:5], **turning), pool, variance=True)


def _histories(dtype: torch.dtype) -> None:
    head = partial(_empty, HEADS)
    for keys, values, window in ((128, 128, None), (64, 48, 100)):
        q, k, v = _tokens(dtype, keys, values)

        def dynamics(width: int) -> Dynamics:
            return Dynamics(head(), head(width // 2), head(), head(), head())

        own = None if keys == values else dynamics(values)
        weighting = steps.Weighting(head(), head(), head(), rational=own is None, window=window, causal=True)
        times = None if own is None else _empty(ROWS, 1, dtype=torch.float64)
        signals = steps.AttendSignals(q, k, v, times, dynamics(keys), own, weighting)
        _step("attend", signals, steps.history_pool(SLOTS, 1000, k, v), variance=own is None)


def _convolution(dtype: torch.dtype) -> None:
    x, weight, pool = (_empty(*shape, dtype=dtype) for shape in ((ROWS, 1, 3072), (3072, 4), (SLOTS, 3, 3072)))
    for bias, activation in ((None, "silu"), (_empty(3072, dtype=dtype), None)):
        short_convolution_step(x, weight, bias, pool, _slots(), activation, kernel="triton")
    for width in (96, 128, 256):
        columns = QueryKeyColumns(768, UnitNorm(width))
        convolve_qkv_step(x, weight, None, pool, _slots(), "silu", columns, kernel="triton")


def _trajectories(dtype: torch.dtype) -> None:
    estimate, head = _signal(128).to(dtype), partial(_empty, HEADS, dtype=dtype)
    raw = RawDynamics(*(head() for _ in range(5)), head(32))
    for weights in (None, RawWeights(head(), head(), None), RawWeights(head(), head(), head())):
        dynamics, _ = step_parameters(raw, weights, (1e-6, 1e-4, 1e-4), 64)
    for predicts in (None, dynamics):
        predict_step(estimate, estimate, head(), predicts)


STEPS: dict[str, Callable[[torch.dtype], None]] = {
    "additive and delta": _memories,
    "diagonal": _cells,
    "ridge": _sums,
    "dense": _beliefs,
    "attend": _histories,
    "short convolution": _convolution,
    "trajectories": _trajectories,
    "projections": _projections,
}
