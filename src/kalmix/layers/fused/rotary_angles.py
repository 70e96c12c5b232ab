"""Cosines and sines of rotary positions, which are as exact at late positions as at early ones."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kalmix.ops._shared.constants import shared
from kalmix.ops._shared.custom_op import custom_op


def rotary_cos_sin(position: Tensor, pairs: int, base: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return cosines and sines of position * base^(-j / pairs) for j < pairs, `[..., pairs]`.

    Angles are int64 in units of 2^-64 turns. So they overflow modulo one turn, and the product of a position and a
    frequency has no rounding error. Only the frequencies are computed in float64, which is slow on many GPUs.

    Args:
        position: int64 `[...]`, of either sign.
        pairs: number of frequencies.
        base: base of the frequencies.
        dtype: float32 or float64.
    """
    angle = position[..., None] * _frequencies(pairs, base, position.device)
    if dtype == torch.float64:
        angle = angle.to(dtype) * (2 * math.pi / 2.0**64)
    else:  # GPUs convert the upper 32 bits faster than all 64
        angle = (angle >> 32).int().to(dtype) * (2 * math.pi / 2.0**32)
    return angle.cos(), angle.sin()


def _frequencies(pairs: int, base: float, device: torch.device) -> Tensor:
    """Return the frequencies as int64 `[pairs]`, in units of 2^-64 turns per position, modulo one turn.

    In compiled code they are a custom op: Inductor would compute them again for each entry of queries and keys.
    Programs of `torch.export` have no such op, so that other software can run them.
    """
    exporting = torch.compiler._is_exporting_flag  # the compiler of torch 2.11 takes `is_exporting()` for true
    if torch.compiler.is_compiling() and not exporting:
        return _frequencies_op(pairs, base, device)
    return shared((pairs, base, "rotary", device), lambda: _compute_frequencies(pairs, base, device))


def _compute_frequencies(pairs: int, base: float, device: torch.device) -> Tensor:
    on = "cpu" if device.type == "mps" else device  # MPS has no float64
    turns = base ** (-torch.arange(pairs, dtype=torch.float64, device=on) / pairs) / (2 * math.pi)
    return ((turns - turns.round()) * 2.0**63).long().to(device) * 2  # 0.5 * 2^64 would exceed int64


def _frequencies_fake(pairs: int, base: float, device: torch.device) -> Tensor:
    return torch.empty(pairs, dtype=torch.int64, device=device)


_frequencies_op = custom_op("kalmix::rotary_frequencies", _compute_frequencies, _frequencies_fake)
