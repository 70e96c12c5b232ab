"""Loss of each target under an output head, with the logits of one chunk of tokens in memory, forward and backward.

The forward pass stores no logits; the backward pass computes those of a chunk again. Two ops share the work: one has
the losses, the other is 0 and has their gradients. So activation checkpointing around them repeats the second only.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kalmix.layers.fused import dispatch
from kalmix.layers.fused.cross_entropy import (
    IGNORE_INDEX,
    Head,
    HeadGrads,
    check_head_inputs,
    empty_grads,
    score_chunks,
)
from kalmix.layers.fused.derivatives import differentiate, register_gradients
from kalmix.ops._shared.custom_op import custom_op, needs_grad, without_dispatcher
from kalmix.types import belief_dtype
from kalmix.validation import in_transform


def linear_nll(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None = None,
    cap: float | None = None,
) -> Tensor:
    """Compute the negative log-likelihood of each target under a linear head, without keeping the logits.

        loss of a target y = logsumexp_j z_j - z_y,   z = weight h + bias, or cap tanh((weight h + bias) / cap)

    Dtypes are those of `linear_cross_entropy`, which is faster if only the mean of the losses is needed. Derivatives of
    any order exist; those beyond the first keep all logits.

    Args:
        hidden: `[..., D]`, hidden states.
        weight: `[vocab_size, D]`, weight of the head.
        targets: `[...]` int64, from 0 to `vocab_size - 1`; -100 is ignored.
        bias: `[vocab_size]`, or `None`.
        cap: positive bound of the logits; `None` for no bound.

    Returns:
        `[...]`, float32 (float64 for float64); 0 for ignored targets.

    Raises:
        ArgumentError, IndexError: as `linear_cross_entropy`.

    Complexity: memory for N tokens, V words and width D is the logits of `min(N, 256 MiB / (V x bytes of a logit))`
    tokens, twice with a cap, and, in the backward pass, `N D` numbers in the dtype of the logits and `V D` in float32.

    Example:
        >>> from kalmix.layers.fused import linear_nll
        >>> hidden, weight = torch.randn(2, 5, 8), torch.randn(32, 8)
        >>> targets = torch.randint(32, (2, 5))
        >>> expected = torch.nn.functional.cross_entropy((hidden @ weight.T).mT, targets, reduction="none")
        >>> torch.allclose(linear_nll(hidden, weight, targets), expected, atol=1e-5)
        True
    """
    check_head_inputs(hidden, weight, targets, bias)
    dtype = dispatch.output_dtype(hidden.device, hidden.dtype)
    if in_transform():
        return _with_all_logits(hidden, weight, bias, targets, dtype, cap)
    needs = [needs_grad(x) for x in (hidden, weight, bias)]
    # First the op that stores inputs: checkpoints stop to compute again after the last stored tensor.
    gradients = _gradient_carrier(hidden, weight, bias, targets, dtype, cap, needs) if any(needs) else None
    with torch.no_grad():
        nll = _linear_nll(hidden, weight, bias, targets, dtype, cap)
    return nll if gradients is None else nll + gradients


def _with_all_logits(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, dtype: torch.dtype, cap: float | None
) -> Tensor:
    """Compute the losses with operations that have derivatives of every order."""
    logits = F.linear(hidden.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype))
    logits = logits if cap is None else cap * torch.tanh(logits / cap)
    logits = logits.to(belief_dtype(dtype)).reshape(-1, weight.shape[0])
    nll = F.cross_entropy(logits, targets.reshape(-1), ignore_index=IGNORE_INDEX, reduction="none")
    return nll.view(targets.shape)


def _inputs(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype, cap: float | None
) -> tuple[Tensor, Head]:
    """Return hidden states `[N, D]` and the head in the dtype of the logits."""
    head = Head(weight.to(dtype), None if bias is None else bias.to(dtype), cap)
    return hidden.reshape(-1, weight.shape[1]).to(dtype), head


def _forward(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, dtype: torch.dtype, cap: float | None
) -> Tensor:
    rows, head = _inputs(hidden, weight, bias, dtype, cap)
    nll = rows.new_empty(len(rows), dtype=belief_dtype(dtype))
    score_chunks(rows, head, targets.flatten(), nll, HeadGrads(None, None, None))
    return nll.view(targets.shape)


def _carrier(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    dtype: torch.dtype,
    cap: float | None,
    needs: list[bool],
) -> Tensor:
    """Return zeros like the losses. The backward pass returns the gradients of the losses."""
    return hidden.new_zeros(targets.shape, dtype=belief_dtype(dtype))


def _fake_losses(hidden, weight, bias, targets, dtype, cap, needs=None):
    """Return a tensor like the results of both ops, for a dry run."""
    return hidden.new_empty(targets.shape, dtype=belief_dtype(dtype))


def _backward(
    grad: Tensor,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    dtype: torch.dtype,
    cap: float | None,
    needs: list[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of hidden states, weight and bias (empty if not needed) from those of the losses."""
    rows, head = _inputs(hidden, weight, bias, dtype, cap)
    wide = belief_dtype(dtype)
    factors = grad.flatten().to(wide)
    largest = factors.abs().max() if factors.numel() else factors.new_ones(())
    largest = torch.where(largest > 0, largest, 1)
    nll = rows.new_empty(len(rows), dtype=wide)
    grads = empty_grads(rows, head, needs)
    # Factors of at most 1, so that products with a small upstream gradient do not underflow in half precision.
    score_chunks(rows, head, targets.flatten(), nll, grads, factors / largest)
    found = zip(grads, (hidden, weight, bias), strict=True)
    results = (
        hidden.new_empty(0) if x is None or like is None else (x.to(wide) * largest).to(like.dtype).view(like.shape)
        for x, like in found
    )
    hidden_grad, weight_grad, bias_grad = results
    return hidden_grad, weight_grad, bias_grad


def _backward_fake(grad, hidden, weight, bias, targets, dtype, cap, needs):
    pairs = zip((hidden, weight, bias), needs, strict=True)
    return tuple(x.new_empty(x.shape) if needed else hidden.new_empty(0) for x, needed in pairs)


_linear_nll = without_dispatcher(custom_op("kalmix::linear_nll", _forward, _fake_losses))
_run_backward = without_dispatcher(custom_op("kalmix::linear_nll_carrier_backward", _backward, _backward_fake))


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.dtype, ctx.cap, ctx.needs = inputs
    ctx.save_for_backward(*tensors)


def _gradients(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
    if grad is None:
        return (None,) * 7
    found = _run_backward(grad, *ctx.saved_tensors, ctx.dtype, ctx.cap, ctx.needs)
    return *(x if needed else None for x, needed in zip(found, ctx.needs, strict=True)), None, None, None, None


def _differentiable_gradients(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
    *inputs, targets = ctx.saved_tensors

    def losses(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor]:
        return (_with_all_logits(hidden, weight, bias, targets, ctx.dtype, ctx.cap),)

    return *differentiate(losses, inputs, (grad,)), None, None, None, None


_gradient_carrier = register_gradients(
    custom_op("kalmix::linear_nll_carrier", _carrier, _fake_losses), _setup, _gradients, _differentiable_gradients
)
