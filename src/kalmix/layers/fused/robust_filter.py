"""Robust Kalman filter of `recurrent-afa` as a custom op."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from kalmix.layers.fused.derivatives import differentiate, register_gradients
from kalmix.ops._shared.custom_op import custom_op, with_launch_cache, without_dispatcher
from kalmix.segments import segments_without_checks


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mean: Tensor,
    precision: Tensor,
    time: Tensor,
    params: Tensor,
    frequency: Tensor,
    times: Tensor | None,
    rows: Tensor | None,
    iterations: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return means, variances, the final state, and tensors for the backward pass."""
    from kalmix.layers.fused.triton.robust_filter import forward

    return forward(  # pyright: ignore[reportReturnType]
        q, k, v, mean, precision, time, params, frequency, times, rows, iterations
    )


def _forward_fake(_q, _k, v, mean, precision, time, _params, _frequency, _times, _rows, iterations):
    sizes = ((1,), (2 * v.shape[3],), (), (iterations,))
    variances, *saved = (precision.new_empty(*v.shape[:3], *x) for x in sizes)
    return v.new_empty(v.shape), variances, *(x.new_empty(x.shape) for x in (mean, precision, time)), *saved


def _backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mean: Tensor,
    precision: Tensor,
    time: Tensor,
    params: Tensor,
    frequency: Tensor,
    times: Tensor | None,
    rows: Tensor | None,
    saved: list[Tensor],
    grad_means: Tensor | None,
    grad_variances: Tensor | None,
    grad_mean: Tensor | None,
    grad_precision: Tensor | None,
    iterations: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Compute the gradients of q, k, v, mean, precision, params and frequency."""
    from kalmix.layers.fused.triton.robust_filter_backward import backward

    grads = [grad_means, grad_variances, grad_mean, grad_precision]
    return backward(  # pyright: ignore[reportReturnType]
        q, k, v, mean, precision, time, params, frequency, times, rows, saved, grads, iterations
    )


def _backward_fake(q, k, v, mean, precision, _time, params, frequency, *_):
    return tuple(x.new_empty(x.shape) for x in (q, k, v, mean, precision, params, frequency))


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, ctx.iterations = inputs
    ctx.save_for_backward(*tensors, *output[5:])
    ctx.mark_non_differentiable(*output[4:])


def _gradients(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    tensors = ctx.saved_tensors
    found = _filter_backward(*tensors[:10], list(tensors[10:]), *grads[:4], ctx.iterations)
    return *found[:5], None, *found[5:], None, None, None


_filter_op = custom_op("kalmix::recurrent_afa_triton", with_launch_cache(_forward), _forward_fake)
_filter_backward = without_dispatcher(
    custom_op("kalmix::recurrent_afa_triton_backward", with_launch_cache(_backward), _backward_fake)
)


def register_robust_filter(run_filter: Callable[[list[Tensor], list[int]], list[Tensor]]) -> Callable[..., Any]:
    """Return the op, whose second derivatives are those of its PyTorch form `run_filter`."""

    def differentiable_gradients(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        *inputs, times, rows = ctx.saved_tensors[:10]

        def run(*tensors: Tensor) -> tuple[Tensor, ...]:
            q, k, v, mean, precision, time, params, frequency = tensors
            rate, process, noise, *others = params
            segment_ids = None if rows is None else segments_without_checks(rows).segment_ids(*q.shape[:2])
            given = [q, k, v, mean, precision, time, -rate, frequency, process, noise, noise, *others]
            given += [x for x in (times, segment_ids) if x is not None]
            means, *rest = run_filter(given, [ctx.iterations, times is not None, rows is not None])
            return means.to(v.dtype), *rest[:3]

        return *differentiate(run, inputs, grads[:4]), None, None, None

    return register_gradients(_filter_op, _setup, _gradients, differentiable_gradients)
