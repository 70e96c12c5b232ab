"""Cross-entropy of an output head, computed from hidden states without keeping the logits.

The op computes logits of a chunk of tokens, replaces them with their gradient in place, and multiplies it with the head
and with the hidden states at once. So memory holds the logits of one chunk, and the backward pass only scales.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from kalmix.layers.fused import dispatch
from kalmix.layers.fused.derivatives import differentiate, register_gradients
from kalmix.ops._shared.custom_op import custom_op, needs_grad, with_launch_cache
from kalmix.types import belief_dtype
from kalmix.validation import FLOATS, can_check_values, check_dtype_and_device, check_shape, in_transform, require

IGNORE_INDEX = -100
CHUNK_BYTES = 2**28  # largest size of the logits of a chunk
ALIGNMENT = 64  # columns by which rows of logits are aligned, since matrix products with odd row strides are slow


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None = None,
    count: Tensor | int | None = None,
) -> Tensor:
    """Compute the mean negative log-likelihood of targets under a linear head, without keeping the logits.

        loss = sum over targets y of (logsumexp_j z_j - z_y) / count,   z = weight h + bias

    The result is that of `cross_entropy(linear(hidden, weight, bias), targets)`. Logits have the dtype of the inputs or
    of autocast. The softmax, and gradients of weight and bias, which are sums over tokens, are computed in float32
    (float64 for float64). Derivatives of any order exist; those beyond the first keep all logits.

    Args:
        hidden: `[..., D]`, hidden states.
        weight: `[vocab_size, D]`, weight of the head.
        targets: `[...]` int64, from 0 to `vocab_size - 1`; -100 is ignored.
        bias: `[vocab_size]`, or `None`.
        count: divides the sum of the losses. Default: the number of targets that are not ignored.

    Returns:
        A scalar, float32 (float64 for float64); 0 if all targets are ignored.

    Raises:
        ArgumentError: a tensor has the wrong shape, dtype or device.
        IndexError: a target is outside the vocabulary. On a GPU the loss is NaN instead, or an assertion of the device
            fails.

    Complexity: memory for N tokens, V words and width D is the logits of `min(N, 256 MiB / (V x bytes of a logit))`
    tokens and, for gradients, `N D` numbers in the dtype of the logits and `V D` in float32. They are computed with the
    loss; the backward pass multiplies them by the upstream gradient.

    Example:
        >>> from kalmix.layers.fused import linear_cross_entropy
        >>> hidden, weight = torch.randn(2, 5, 8), torch.randn(32, 8)
        >>> targets = torch.randint(32, (2, 5))
        >>> loss = linear_cross_entropy(hidden, weight, targets)
        >>> expected = torch.nn.functional.cross_entropy((hidden @ weight.T).flatten(0, 1), targets.flatten())
        >>> torch.allclose(loss, expected)
        True
    """
    check_head_inputs(hidden, weight, targets, bias)
    dtype = dispatch.output_dtype(hidden.device, hidden.dtype)
    if in_transform():
        total = _with_all_logits(hidden, weight, bias, targets, dtype)
    else:
        needs = [needs_grad(x) for x in (hidden, weight, bias)]
        total = _linear_cross_entropy(hidden, weight, bias, targets, dtype, needs)[0]
    return divide_by_count(total, targets, count)


def divide_by_count(total: Tensor, targets: Tensor, count: Tensor | int | None) -> Tensor:
    """Divide a sum of losses by `count` or, if it is `None`, by the number of targets that are not ignored."""
    if count is None:
        return total / (targets != IGNORE_INDEX).sum().clamp(min=1)
    return total / (count.to(total.device) if isinstance(count, Tensor) else count)


def check_head_inputs(hidden: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None) -> None:
    """Check shapes, dtypes and devices and, on a CPU, that targets are in the vocabulary."""
    sizes: dict[str, int] = {}
    check_shape("weight", weight, "V D", sizes)
    check_dtype_and_device("hidden", hidden, FLOATS, hidden.device)
    require(
        hidden.ndim > 0 and hidden.shape[-1] == sizes["D"],
        *("hidden", f"shape {list(hidden.shape)}", f"shape [..., {sizes['D']}], the columns of `weight`"),
    )
    # Linear layers accept other dtypes under autocast only.
    half = dispatch.output_dtype(hidden.device, torch.float32) != torch.float32
    dtypes = FLOATS[1:] if half and hidden.dtype != torch.float64 else (hidden.dtype,)
    check_dtype_and_device("weight", weight, dtypes, hidden.device)
    if bias is not None:
        check_shape("bias", bias, "V", sizes)
        check_dtype_and_device("bias", bias, dtypes, hidden.device)
    check_dtype_and_device("targets", targets, (torch.int64,), hidden.device)
    require(
        targets.shape == hidden.shape[:-1],
        *("targets", f"shape {list(targets.shape)}", f"shape {list(hidden.shape[:-1])}, as `hidden`"),
    )
    if can_check_values(targets):
        outside = targets[(targets != IGNORE_INDEX) & ((targets < 0) | (targets >= sizes["V"]))]
        if outside.numel():
            expected = f"tokens from 0 to {sizes['V'] - 1}, or {IGNORE_INDEX}"
            raise IndexError(f"`targets` contains {int(outside[0])}; expected {expected}")


def _with_all_logits(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, dtype: torch.dtype
) -> Tensor:
    """Compute the sum of the losses with operations that have derivatives of every order."""
    logits = F.linear(hidden.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype))
    logits = logits.to(belief_dtype(dtype)).reshape(-1, weight.shape[0])
    return F.cross_entropy(logits, targets.reshape(-1), ignore_index=IGNORE_INDEX, reduction="sum")


def _forward_fake(hidden, weight, bias, targets, dtype, needs):
    wide = belief_dtype(dtype)
    return (
        hidden.new_empty((), dtype=wide),
        hidden.new_empty(hidden.shape if needs[0] else 0, dtype=dtype),
        hidden.new_empty(weight.shape if needs[1] else 0, dtype=wide),
        hidden.new_empty(bias.shape if needs[2] else 0, dtype=wide),
    )


def _forward(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, dtype: torch.dtype, needs: list[bool]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the sum of the losses, and its gradients of hidden states, weight and bias (empty if not needed).

    Args:
        dtype: dtype of logits, and of the gradient of the hidden states. The other results are at least float32.
        needs: which gradients are needed.
    """
    wide = belief_dtype(dtype)
    head = Head(weight.to(dtype), None if bias is None else bias.to(dtype))
    rows = hidden.reshape(-1, weight.shape[1]).to(dtype)
    nll = rows.new_empty(len(rows), dtype=wide)
    grads = empty_grads(rows, head, needs)
    score_chunks(rows, head, targets.flatten(), nll, grads)
    hidden_grad = rows.new_empty(0) if grads.rows is None else grads.rows.view(hidden.shape)
    weight_grad, bias_grad = (rows.new_empty(0, dtype=wide) if x is None else x for x in grads[1:])
    return nll.sum(), hidden_grad, weight_grad, bias_grad


class Head(NamedTuple):
    """Linear head in the dtype of its logits.

    Attributes:
        weight: `[vocab_size, D]`.
        bias: `[vocab_size]`, or `None`.
        cap: logits z are replaced by cap tanh(z / cap); `None` keeps them.
    """

    weight: Tensor
    bias: Tensor | None = None
    cap: float | None = None


class HeadGrads(NamedTuple):
    """Gradients that `score_chunks` writes or adds to; `None` for those that are not needed.

    Attributes:
        rows: `[N, D]` of the hidden states, in the dtype of the logits.
        weight: `[vocab_size, D]`, at least float32.
        bias: `[vocab_size]`, at least float32.
    """

    rows: Tensor | None
    weight: Tensor | None
    bias: Tensor | None


def empty_grads(rows: Tensor, head: Head, needs: list[bool]) -> HeadGrads:
    """Return memory for the needed gradients of hidden states `[N, D]`, weight and bias; sums begin at 0."""
    wide = belief_dtype(rows.dtype)
    return HeadGrads(
        torch.empty_like(rows) if needs[0] else None,
        rows.new_zeros(head.weight.shape, dtype=wide) if needs[1] else None,
        rows.new_zeros(len(head.weight), dtype=wide) if needs[2] else None,
    )


def score_chunks(
    rows: Tensor, head: Head, targets: Tensor, nll: Tensor, grads: HeadGrads, factors: Tensor | None = None
) -> None:
    """Compute losses of targets and gradients of their sum, with the logits of one chunk of tokens in memory.

    Args:
        rows: `[N, D]`, hidden states in the dtype of the logits.
        head: head.
        targets: `[N]` int64; -100 is ignored.
        nll: `[N]`, at least float32; the losses are written to it.
        grads: gradients to write to.
        factors: `[N]`, factor of each loss in the sum whose gradients are computed; `None` for 1.
    """
    vocab_size, dtype = len(head.weight), rows.dtype
    targets = targets.contiguous()  # a flat view of a column has a stride
    needs_any = any(x is not None for x in grads)
    size = _chunk_size(len(rows), vocab_size * dtype.itemsize)
    padded = rows.new_empty(size, -(-vocab_size // ALIGNMENT) * ALIGNMENT)
    padded[:, vocab_size:] = 0  # some CPUs read these columns and multiply them by 0, which NaN would survive
    buffer = padded[:, :vocab_size]
    for start in range(0, len(rows), size):
        chunk = slice(start, start + size)
        x = rows[chunk]
        logits = buffer[: len(x)]
        if head.bias is None:
            torch.mm(x, head.weight.mT, out=logits)
        else:
            torch.addmm(head.bias, x, head.weight.mT, out=logits)
        slope = None
        if head.cap is not None:
            logits.div_(head.cap).tanh_()
            slope = torch.addcmul(logits.new_ones(()), logits, logits, value=-1) if needs_any else None
            logits.mul_(head.cap)
        _replace_with_gradient(logits, targets[chunk], nll[chunk], needs_any)
        if slope is not None:
            logits.mul_(slope)
        if factors is not None:
            logits.mul_(factors[chunk, None])
        if grads.rows is not None:
            torch.mm(logits, head.weight, out=grads.rows[chunk])
        if grads.weight is not None:
            _add_product(grads.weight, logits.mT, x)
        if grads.bias is not None:
            grads.bias.add_(logits.sum(0, dtype=grads.bias.dtype))


def _chunk_size(rows: int, row_bytes: int) -> int:
    """Return the tokens of a chunk: as many as `CHUNK_BYTES` hold, and about as many in the last chunk."""
    chunks = -(-rows // max(1, CHUNK_BYTES // row_bytes))
    return -(-rows // chunks) if chunks else 1


def _replace_with_gradient(logits: Tensor, targets: Tensor, nll: Tensor, gradient: bool) -> None:
    """Write the loss of each target to `nll`, and its gradient over the logits `[n, vocab_size]`.

    Without `gradient`, the values left in `logits` are undefined.
    """
    if dispatch.uses_triton("linear_cross_entropy", logits):
        _run_kernel(logits, targets, nll, gradient)
        return
    scored = targets != IGNORE_INDEX
    index = torch.where(scored, targets, 0)[:, None]
    wide = logits.to(nll.dtype)
    wide.sub_(wide.amax(1, keepdim=True))
    shifted_target = wide.gather(1, index)
    total = wide.exp_().sum(1, keepdim=True)
    nll.copy_(torch.where(scored, (total.log() - shifted_target)[:, 0], 0))
    if gradient:
        wide.div_(total).scatter_add_(1, index, wide.new_full((), -1).expand(index.shape))
        logits.copy_(wide.masked_fill_(~scored[:, None], 0))


@with_launch_cache
def _run_kernel(logits: Tensor, targets: Tensor, nll: Tensor, gradient: bool) -> None:
    from kalmix.layers.fused.triton.cross_entropy import replace_with_gradient

    replace_with_gradient(logits, targets, nll, IGNORE_INDEX, gradient)


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add `left @ right` to `total`, whose dtype may be wider, without rounding the product to theirs."""
    if left.dtype == total.dtype:
        total.addmm_(left, right)
    elif total.is_cuda:
        torch.ops.aten.addmm.dtype_out(total, left, right, total.dtype, out=total)
    else:
        total.addmm_(left.to(total.dtype), right.to(total.dtype))


_linear_cross_entropy_op = custom_op("kalmix::linear_cross_entropy", _forward, _forward_fake)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, ctx.dtype, ctx.needs = inputs
    ctx.save_for_backward(*tensors)
    ctx.mark_non_differentiable(*output[1:])
    ctx.found = output[1:]


def _gradients(ctx: Any, grad: Tensor | None, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    """Scale the gradients that the forward pass computed, in place; a second backward pass computes them again."""
    if grad is None:
        return (None,) * 6
    found, ctx.found = ctx.found, None
    tensors = ctx.saved_tensors
    if found is None:
        found = _linear_cross_entropy(*tensors, ctx.dtype, ctx.needs)[1:]
    results = zip(found, tensors[:3], ctx.needs, strict=True)
    return *(_scale(x, grad, like.dtype) if needed else None for x, like, needed in results), None, None, None


def _scale(x: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return `x` times `factor` in `dtype`; except while tracing, in the memory of `x`."""
    factor = factor.reshape(1)  # a factor without axes would be rounded to the dtype of `x`
    if type(x) is not Tensor:  # a tracer's
        return (x * factor).to(dtype)
    x = x.to(dtype) if x.dtype.itemsize < dtype.itemsize else x
    return x.mul_(factor).to(dtype)


def _differentiable_gradients(ctx: Any, grad: Tensor | None, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    *inputs, targets = ctx.saved_tensors

    def total(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor]:
        return (_with_all_logits(hidden, weight, bias, targets, ctx.dtype),)

    return *differentiate(total, inputs, (grad,)), None, None, None


_linear_cross_entropy = register_gradients(_linear_cross_entropy_op, _setup, _gradients, _differentiable_gradients)
