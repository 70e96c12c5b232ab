"""Signals of heads: narrow projections of tokens, each followed by an activation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from kalmix.layers.fused.derivatives import differentiate, register_gradients
from kalmix.layers.fused.dispatch import HALF, STEP_ROWS, uses_triton
from kalmix.ops._shared.custom_op import custom_op, needs_grad, with_launch_cache, without_dispatcher

MAX_GROUPS = 3
MAX_COLUMNS = 128  # of all groups


class HeadSignal(NamedTuple):
    """Group of columns with one activation. For z = x weight' + bias it returns

        "sigmoid":     constant * sigmoid(z)
        "squared":     (sigmoid(z) + constant)^2
        "softplus":    softplus(z) + constant
        "decay":       -exp(log_rate) softplus(z)
        "decay-step":  as "decay", and softplus(z) as a second signal

    Attributes:
        kind: activation.
        weight: `[columns, D]`.
        bias: `[columns]`, or `None`.
        log_rate: `[columns]`, or `None`. Or `[columns * E]`, for E decays per column, `[..., columns, E]`; the group
            must be the first, and neither its parameters nor x may need gradients.
        constant: scale or lower bound.
    """

    kind: str
    weight: Tensor
    bias: Tensor | None = None
    log_rate: Tensor | None = None
    constant: float = 1.0

    @property
    def decays_per_column(self) -> int:
        """Number of decays per column."""
        return 1 if self.log_rate is None else self.log_rate.numel() // self.weight.shape[0]


def can_fuse_signals(x: Tensor, signals: Sequence[HeadSignal]) -> bool:
    """Return whether `head_signals` accepts these arguments; otherwise compute signals with PyTorch.

    Products in half precision are fused. In decoding, those in float32 are fused, too.
    """
    weights = [signal.weight for signal in signals]
    if not (signals and len(signals) <= MAX_GROUPS and uses_triton("head_signals", x)):
        return False
    dtype, stored = _dot_dtype(x), weights[0].dtype
    if any(w.dtype != stored for w in weights) or sum(w.shape[0] for w in weights) > MAX_COLUMNS:
        return False
    if stored == torch.float64 or not (stored == x.dtype or _autocasts(x.device.type)):
        return False
    if torch.compiler.is_compiling():
        return dtype in HALF and all(signal.decays_per_column == 1 for signal in signals)
    parameters = [tensor for signal in signals for tensor in (signal.weight, signal.bias, signal.log_rate)]
    decodes = x.numel() <= STEP_ROWS * x.shape[-1] and not needs_grad(x, *parameters)
    return decodes or (dtype in HALF and all(signal.decays_per_column == 1 for signal in signals))


def head_signals(x: Tensor, signals: Sequence[HeadSignal]) -> list[Tensor]:
    """Compute the signals of heads from tokens.

    Args:
        x: `[..., D]`.
        signals: up to three groups of columns, for which `can_fuse_signals` returns True.

    Returns:
        One tensor `[..., columns]` per group, or two for "decay-step", in float32. Sums are in float32, also under
        autocast.

    Complexity: O(D) per column. Training stores x, the weights and `[..., columns]`.
    """
    padded = [*signals, *[None] * (MAX_GROUPS - len(signals))]
    weights, biases, log_rates = (
        [None if s is None else getattr(s, name) for s in padded] for name in ("weight", "bias", "log_rate")
    )
    kinds = ",".join("" if s is None else s.kind for s in padded)
    constants = [1.0 if s is None else s.constant for s in padded]
    *values, steps, _ = _head_signals(x, *weights, *biases, *log_rates, kinds, *constants, _dot_dtype(x))
    results = []
    for signal, value in zip(signals, values, strict=False):
        results += [value, steps] if signal.kind == "decay-step" else [value]
    return results


def _dot_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype of operands of products: that of autocast if it is active."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if _autocasts(device) else x.dtype


def _autocasts(device: str) -> bool:
    return device != "meta" and torch.is_autocast_enabled(device)


def eager_signal(x: Tensor, signal: HeadSignal, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return a signal, and the softplus of the input of its activation, with PyTorch."""
    raw = F.linear(x.to(dtype), signal.weight.to(dtype)).float()
    raw = raw if signal.bias is None else raw + signal.bias.float()
    step = F.softplus(raw)
    if signal.kind == "sigmoid":
        return signal.constant * raw.sigmoid(), step
    if signal.kind == "squared":
        return (raw.sigmoid() + signal.constant).square(), step
    if signal.kind == "softplus":
        return step + signal.constant, step
    assert signal.log_rate is not None
    return -signal.log_rate.float().exp() * step, step


def _groups(tensors: Sequence[Tensor | None], kinds: str, constants: Sequence[float]) -> Any:
    from kalmix.layers.fused.triton.head_signals_launch import Groups

    return Groups(tensors[:3], tensors[3:6], tensors[6:9], kinds.split(","), constants)


def _forward_fake(x, w0, w1, w2, b0, b1, b2, r0, r1, r2, kinds, c0, c1, c2, dtype):
    sizes = [None if w is None else w.shape[0] for w in (w0, w1, w2)]
    steps = next((n for n, kind in zip(sizes, kinds.split(","), strict=True) if kind == "decay-step"), None)
    shapes = [(0,) if n is None else (*x.shape[:-1], n) for n in (*sizes, steps)]
    rows = x.numel() // x.shape[-1]
    shapes.append((rows, sum(n for n in sizes if n is not None)))
    return tuple(x.new_empty(shape, dtype=torch.float32) for shape in shapes)


def _forward(
    x: Tensor,
    w0: Tensor,
    w1: Tensor | None,
    w2: Tensor | None,
    b0: Tensor | None,
    b1: Tensor | None,
    b2: Tensor | None,
    r0: Tensor | None,
    r1: Tensor | None,
    r2: Tensor | None,
    kinds: str,
    c0: float,
    c1: float,
    c2: float,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the signals of three groups, steps, and inputs of activations; see `triton/head_signals_launch.py`."""
    from kalmix.layers.fused.triton.head_signals_launch import forward

    found = forward(x, _groups((w0, w1, w2, b0, b1, b2, r0, r1, r2), kinds, (c0, c1, c2)), dtype)
    return found[0], found[1], found[2], found[3], found[4]


def _backward_fake(x, w0, w1, w2, r0, r1, r2, raw, g0, g1, g2, gs, kinds, c0, c1, c2, dtype):
    total = raw.shape[1] * (x.shape[-1] + 2)
    return x.new_empty(x.shape), x.new_empty(total, dtype=torch.float32)


def _backward(
    x: Tensor,
    w0: Tensor,
    w1: Tensor | None,
    w2: Tensor | None,
    r0: Tensor | None,
    r1: Tensor | None,
    r2: Tensor | None,
    raw: Tensor,
    g0: Tensor | None,
    g1: Tensor | None,
    g2: Tensor | None,
    gs: Tensor | None,
    kinds: str,
    c0: float,
    c1: float,
    c2: float,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Return the gradient of x, and one vector of all others."""
    from kalmix.layers.fused.triton.head_signals_launch import backward

    groups = _groups((w0, w1, w2, None, None, None, r0, r1, r2), kinds, (c0, c1, c2))
    return backward(x, groups, raw, (g0, g1, g2, gs), dtype)


_head_signals_op = custom_op("kalmix::head_signals", with_launch_cache(_forward), _forward_fake)
_head_signals_backward = without_dispatcher(
    custom_op("kalmix::head_signals_backward", with_launch_cache(_backward), _backward_fake)
)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*inputs[:10], output[4])
    ctx.mark_non_differentiable(output[4])
    ctx.options = inputs[10:]


def _gradients(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    x, *parameters, raw = ctx.saved_tensors
    weights, log_rates = parameters[:3], parameters[6:]
    received = [None if grad is None or not grad.numel() else grad for grad in grads[:4]]
    if all(grad is None for grad in received):
        return (None,) * 15
    dx, packed = _head_signals_backward(x, *weights, *log_rates, raw, *received, *ctx.options)
    columns, width = [0 if w is None else w.shape[0] for w in weights], x.shape[-1]
    found = packed.split([*(n * width for n in columns), *columns, *columns])
    results = [None if p is None else g.view(p.shape).to(p.dtype) for p, g in zip(parameters, found, strict=True)]
    return dx, *results, *[None] * 5


def _differentiable_gradients(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    *inputs, _ = ctx.saved_tensors
    kinds, *constants, dtype = ctx.options
    names = kinds.split(",")

    def function(x: Tensor, *parameters: Tensor | None) -> tuple[Tensor, ...]:
        values, steps = [x.new_empty(0)] * MAX_GROUPS, x.new_empty(0)
        for i, kind in enumerate(names):
            weight, bias, log_rate = parameters[i::3]
            if weight is not None:
                signal = HeadSignal(kind, weight, bias, log_rate, constants[i])
                values[i], step = eager_signal(x, signal, dtype)
                steps = step if kind == "decay-step" else steps
        return *values, steps

    return *differentiate(function, inputs, grads[:4]), *[None] * 5


_head_signals = register_gradients(_head_signals_op, _setup, _gradients, _differentiable_gradients)
