"""Gradients of the beliefs between spans of tokens, in a backward pass with two phases.

First, each span computes the gradient of the belief before it, as if nothing depended on the belief after it. Then
these gradients are passed from the last span to the first, through the updates by the spans.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def take_stored(ctx: Any) -> Any:
    """Return `ctx.stored` and free it: it holds a graph, which allows one backward pass.

    Raises:
        RuntimeError: it is free already.
    """
    stored, ctx.stored = ctx.stored, None
    if stored is None:
        raise RuntimeError("a second backward pass needs what the first one freed, also with retain_graph=True")
    return stored


def compute_gradients(
    outputs: Sequence[Tensor | None], grads: Sequence[Tensor | None], inputs: list[Tensor], *, retain: bool
) -> list[Tensor | None]:
    """Return the gradients of inputs; `None` for those that no output depends on."""
    pairs = [(x, g) for x, g in zip(outputs, grads, strict=True) if x is not None and g is not None and x.requires_grad]
    if not pairs or not inputs:
        return [None] * len(inputs)
    tensors, upstream = zip(*pairs, strict=True)
    return list(torch.autograd.grad(tensors, inputs, upstream, retain_graph=retain, allow_unused=True))


def entry_gradients(
    local: Sequence[Sequence[Tensor]], updates: Sequence[Any], entries: Sequence[Any], first: int
) -> list[list[Tensor]]:
    """Return the gradients of the beliefs before the spans `first`, `first + 1` and so on.

    Args:
        local: for each span, the gradient of the tensors of the belief before it, through the span's own outputs.
        updates: update by each span; that of the last one is not used.
        entries: belief before each span; may be `None` if updates are affine.
        first: the first span of the result.
    """
    found: list[list[Tensor]] = []
    for span in range(len(local) - 1, first - 1, -1):
        own = list(local[span])
        if found:
            passed = updates[span].pull_back(entries[span], *found[-1])
            own = [x + y for x, y in zip(own, passed, strict=True)]
        found.append(own)
    return found[::-1]
