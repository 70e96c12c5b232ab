"""Cross-entropy of rows of logits and its gradient: one program reads a row twice and writes it once."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kalmix.ops._shared.triton.compile_and_launch import Launch

MAX_BLOCK = 4096  # columns that one program holds


@triton.jit
def _kernel(
    logits, targets, nll, row_stride,
    V: tl.constexpr, BLOCK: tl.constexpr, IGNORED: tl.constexpr, GRADIENT: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(targets + row)
    start = logits + row * row_stride
    column = tl.arange(0, BLOCK)
    largest, total = -float("inf"), 0.0
    at_target = tl.zeros([BLOCK], tl.float32)
    for first in range(0, V, BLOCK):
        # Read and write padding, too: a mask that ends in the middle of a vector would split loads.
        x = tl.load(start + first + column, mask=first + column < row_stride, other=0.0).to(tl.float32)
        x = tl.where(first + column < V, x, -float("inf"))
        before, largest = largest, tl.maximum(largest, tl.max(x, axis=0))  # NaN reaches the result through the sum
        shift = tl.where(largest == -float("inf"), 0.0, largest)  # -inf - -inf is NaN
        total = total * tl.exp(before - shift) + tl.sum(tl.exp(x - shift), axis=0)
        # Do not load this logit again below: another thread may have overwritten it.
        at_target = tl.where(first + column == target, x, at_target)
    shift = tl.where(largest == -float("inf"), 0.0, largest)
    loss = tl.log(total) + shift - tl.sum(at_target, axis=0)
    loss = tl.where((target >= 0) & (target < V), loss, float("nan"))
    tl.store(nll + row, tl.where(target == IGNORED, 0.0, loss))
    if GRADIENT:
        for first in range(0, V, BLOCK):
            mask = first + column < row_stride
            x = tl.load(start + first + column, mask=mask, other=0.0).to(tl.float32)
            x = tl.where(first + column < V, x, -float("inf"))
            grad = tl.exp(x - shift) / total - tl.where(first + column == target, 1.0, 0.0)
            grad = tl.where(target == IGNORED, 0.0, grad)
            tl.store(start + first + column, grad.to(logits.dtype.element_ty), mask=mask)


def replace_with_gradient(logits: Tensor, targets: Tensor, nll: Tensor, ignored: int, gradient: bool) -> None:
    """Write the loss of each row to `nll`, NaN for a target outside the vocabulary, and its gradient over `logits`.

    Args:
        logits: `[n, vocab_size]`, adjacent columns. Memory between rows is padding, which the kernel may overwrite.
            Without `gradient` the logits are kept.
        targets: `[n]` int64.
        nll: `[n]` float32.
        ignored: target whose loss and gradient are 0.
        gradient: replace `logits` with the gradient.
    """
    rows, vocab_size = logits.shape
    block = min(MAX_BLOCK, triton.next_power_of_2(vocab_size))
    Launch(
        _kernel,
        (rows,),
        (logits, targets, nll, logits.stride(0)),
        {
            "V": vocab_size,
            "BLOCK": block,
            "IGNORED": ignored,
            "GRADIENT": gradient,
            "num_warps": max(1, min(8, block // 256)),
        },
    ).run()
