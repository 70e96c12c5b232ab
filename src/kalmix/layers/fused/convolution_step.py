"""Step of the short convolution: one token for each row of a batch, in place on a pool of last inputs."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from kalmix.layers.fused.convolution import fits_program, short_convolution
from kalmix.layers.fused.unit_norm import QueryKeyColumns
from kalmix.ops._shared.step import Slots, runs_triton, step_in_torch
from kalmix.types import Filtered


def short_convolution_step(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    pool: Tensor,
    slots: Slots,
    activation: str | None = None,
    *,
    out: Tensor | None = None,
    kernel: str | None = None,
) -> Tensor:
    """Convolve one token for each row of a batch, as `short_convolution` does, in place on a pool of last inputs.

    It has no gradients and does not check its arguments. `kalmix.steps` describes pools and slots. The output of a row
    of padding is 0.

    Args:
        x: `[B, 1, C]`. May be a view of a wider tensor.
        weight: `[C, S]`, S taps.
        bias: `[C]`, or `None`.
        pool: last S - 1 inputs in N slots, oldest first, `[N, S - 1, C]`; updated in place.
        slots: slots that each row reads and writes.
        activation: "silu", or `None`.
        out: tensor `[B, 1, C]` to write to. Default: a new one.
        kernel: "triton" or "torch". Default: "triton" on GPUs.

    Returns:
        y `[B, 1, C]` in the dtype of `x`.

    Example:
        >>> from kalmix.layers.fused import short_convolution_step
        >>> from kalmix.steps import Slots
        >>> pool, weight = torch.zeros(8, 1, 1), torch.tensor([[10.0, 1.0]])
        >>> slots = Slots(torch.tensor([5]), torch.tensor([5]))
        >>> for token in (1.0, 2.0, 3.0):
        ...     print(short_convolution_step(torch.tensor([[[token]]]), weight, None, pool, slots).item())
        1.0
        12.0
        23.0
    """
    if runs_triton((pool,), kernel):
        from kalmix.layers.fused.triton.convolution_step import step

        return step(x, weight, bias, pool, slots, activation, QueryKeyColumns(), out)[2]

    def convolve(signals: tuple[Tensor, Tensor, Tensor | None], state: _Inputs, segments: None) -> Filtered:
        inputs, taps, offset = signals
        y, final = short_convolution(inputs, taps, offset, state.inputs.to(inputs.dtype), None, activation)
        return Filtered(y[..., None], None, _Inputs(final))

    buffer = None if out is None else Filtered(out[..., None], None, None)
    return step_in_torch(convolve, (x, weight, bias), _Inputs(pool), slots, (), buffer).mean[..., 0]


def convolve_qkv_step(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    pool: Tensor,
    slots: Slots,
    activation: str | None,
    columns: QueryKeyColumns,
    kernel: str | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Convolve queries, keys and values of one token for each row of a batch, and scale heads of queries and keys.

    It is the step of `convolve_qkv`, as `short_convolution_step` is that of `short_convolution`; see there.

    Returns:
        q and k `[B, 1, n]` and v `[B, 1, C - 2 n]` in the dtype of `x`; n is `columns.keys`.
    """
    if not runs_triton((pool,), kernel):
        q, k, v = columns.split(short_convolution_step(x, weight, bias, pool, slots, activation, kernel=kernel))
        return *columns.normalize(q, k), v
    from kalmix.layers.fused.triton.convolution_step import step

    fits = fits_program(columns)
    q, k, v = step(x, weight, bias, pool, slots, activation, columns if fits else QueryKeyColumns(columns.keys))
    return *((q, k) if fits else columns.normalize(q, k)), v


class _Inputs(NamedTuple):
    """Pool of last inputs, as a state of one field."""

    inputs: Tensor
