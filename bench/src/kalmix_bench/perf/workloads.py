"""Shapes to time each op on, and signals like those of its layers."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

Signals = dict[str, Tensor]
Shape = tuple[int, int, int, int]
unit = partial(F.normalize, dim=-1)

# `diagonal`: (batch, tokens, channels, slots) of the authors' models; smaller ones for a CPU.
DIAGONAL_SHAPES = {
    "cuda": [(8, 2048, 496, 32), (4, 2048, 1360, 32), (1, 16384, 1360, 32), (8, 2048, 128, 16)],
    "cpu": [(1, 2048, 128, 16), (1, 16384, 128, 16), (1, 65536, 128, 16)],
}
# Other ops: (batch, tokens, heads, head dimension).
MEMORY_SHAPES = {
    "cuda": [(4, 4096, 16, 128), (8, 2048, 8, 128), (4, 4096, 4, 256), (1, 16384, 16, 128)],
    "cpu": [(1, 2048, 4, 64), (1, 16384, 4, 64)],
}
RIDGE_SHAPES = MEMORY_SHAPES | {"cuda": [*MEMORY_SHAPES["cuda"][:3], (4, 4096, 10, 64)]}
ATTEND_SHAPES = MEMORY_SHAPES | {"cuda": [(8, 2048, 8, 128), (1, 16384, 16, 128)]}
SHAPES = {
    "diagonal": DIAGONAL_SHAPES,
    "additive": MEMORY_SHAPES,
    "delta": MEMORY_SHAPES,
    "dense": MEMORY_SHAPES,
    "ridge": RIDGE_SHAPES,
    "attend": ATTEND_SHAPES,
}
CURVES = {  # longest shape of each curve
    op: {"cuda": (1, 2**17, 960, 16), "cpu": (1, 2**16, 128, 16)}
    if op == "diagonal"
    else {"cuda": (1, 2**16, 16, 128), "cpu": (1, 2**14, 4, 64)}
    for op in SHAPES
}
COLUMNS = {op: "(B, T, channels, slots)" if op == "diagonal" else "(B, T, heads, width)" for op in SHAPES}


def diagonal(shape: Shape, device: str, dtype: torch.dtype) -> Signals:
    """Draw signals like KLA's at initialization: normalized keys, decays over three decades."""
    batch, length, channels, slots = shape
    step = torch.empty(1, slots, channels, device=device).uniform_(-6.9, -2.3).exp()
    return {
        "q": unit(torch.randn(batch, length, 1, slots, device=device)).to(dtype),
        "k": unit(torch.randn(batch, length, 1, slots, device=device)).to(dtype),
        "v": torch.randn(batch, length, 1, channels, device=device).to(dtype),
        "precision": 1 / (F.softplus(torch.randn(batch, length, 1, channels, device=device)) + 1e-4),
        "log_decay": -step,
        "process_noise": -0.01 / 2 * torch.expm1(-2 * step),
    }


def memory(shape: Shape, device: str, dtype: torch.dtype) -> Signals:
    """Draw normalized keys and queries, and a decay per head, as in Mamba-2 and Gated DeltaNet."""
    batch, length, heads, width = shape
    q, k, v = (torch.randn(batch, length, heads, width, device=device) for _ in range(3))
    step = torch.empty(heads, device=device).uniform_(-6.9, -2.3).exp() * torch.rand(heads, device=device) * 16
    log_decay = -step * F.softplus(torch.randn(batch, length, heads, device=device))
    return {"q": unit(q).to(dtype), "k": unit(k).to(dtype), "v": v.to(dtype), "log_decay": log_decay}


def delta(shape: Shape, device: str, dtype: torch.dtype) -> Signals:
    """Draw signals like Gated DeltaNet's, with a gain between 0 and 1."""
    return memory(shape, device, dtype) | {"gain": torch.rand(shape[:3], device=device)}


def dense(shape: Shape, device: str, dtype: torch.dtype) -> Signals:
    """Draw signals like the Bayesian Layer's, with noises that vary from token to token."""
    noises = (F.softplus(torch.randn(shape[:3], device=device) - shift) + 1e-3 for shift in (0, 4))
    return memory(shape, device, dtype) | dict(zip(("obs_noise", "process_noise"), noises, strict=True))


def ridge(shape: Shape, device: str, dtype: torch.dtype) -> Signals:
    """Draw signals like Gated KalmaNet's: Gated DeltaNet's, and a share of the solution between 0 and 1."""
    return delta(shape, device, dtype) | {"mix": torch.rand(shape[:3], device=device)}


def attend(shape: Shape, device: str, dtype: torch.dtype) -> Signals:
    """Draw signals like Adaptive Filter Attention's: normalized keys and queries, and dynamics per head."""
    x, heads, channels = memory(shape, device, dtype), shape[2], shape[3] // 2
    noises = ("process_noise", "key_noise", "query_noise", "nu")
    return x | {
        "log_decay": -torch.empty(heads, device=device).uniform_(-6.9, -2.3).exp(),
        "frequency": torch.randn(heads, channels, device=device).mul(2).exp() * 1e-2,
        **{name: F.softplus(torch.randn(heads, device=device)) for name in noises},
    }


SIGNALS = {"diagonal": diagonal, "additive": memory, "delta": delta, "dense": dense, "ridge": ridge, "attend": attend}
WITH_VARIANCE = {"diagonal", "dense"}  # ops with a variance of the read-out


def signals(op: str, decay: str, shape: Shape, device: str, dtype: torch.dtype) -> Signals:
    """Draw signals with gradients.

    `decay` is "head"; "key" (per key dimension, as in GLA and KDA); or, of `dense`, "pair" (per pair of key dimensions,
    which rotates, as in the paper's Bayesian Layer).
    """
    torch.manual_seed(0)
    x = SIGNALS[op](shape, device, dtype)
    if decay == "pair":
        pairs = *shape[:3], shape[3] // 2
        x["log_decay"] = x["log_decay"][..., None] * torch.rand(*pairs, device=device)
        x["angle"] = torch.randn(*pairs, device=device) / 10
    if decay == "key" and op not in ("diagonal", "ridge", "attend"):
        x["log_decay"] = x["log_decay"][..., None] * torch.rand(*shape, device=device)
    return {name: leaf.requires_grad_() for name, leaf in x.items()}
