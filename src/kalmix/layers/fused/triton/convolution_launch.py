"""Launches of the kernels of the short convolution, and their sizes."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from kalmix.layers.fused.triton import convolution as kernels
from kalmix.layers.fused.triton import convolution_backward as backward_kernels
from kalmix.layers.fused.unit_norm import QueryKeyColumns, UnitNorm
from kalmix.ops._shared.triton.compile_and_launch import Launch
from kalmix.ops._shared.triton.ptx import supports_ptx

MIN_CHUNK = 8  # fewest tokens of a program
PROGRAMS = 2048  # chunks are shortened until there are as many programs
STATE_CHANNELS = 128  # most channels of a program of the kernels for states


class Sizes(NamedTuple):
    """Sizes of the programs of a kernel.

    Attributes:
        channels: most channels, unless a head has more.
        channels_per_warp: channels of a warp.
        unroll: tokens that are loaded at the same time; at least 3, since a token depends on the 3 before it.
        chunk: most tokens.
    """

    channels: int
    channels_per_warp: int
    unroll: int
    chunk: int


FORWARD, BACKWARD = Sizes(128, 128, 4, 128), Sizes(128, 128, 8, 128)  # fastest of those measured on an H200


class ConvolutionInputs(NamedTuple):
    """Tensors of a convolution and the activation after it; see `kalmix.layers.fused.short_convolution`.

    `rows` and `ids` are those of the segments; without packing, all three optional tensors are `None`.
    """

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    state: Tensor | None
    rows: Tensor | None
    ids: Tensor | None
    activation: str
    columns: QueryKeyColumns

    @classmethod
    def of(
        cls,
        x: Tensor,
        weight: Tensor,
        optional: tuple[Tensor | None, ...],
        activation: str,
        columns: QueryKeyColumns,
    ) -> ConvolutionInputs:
        """Build the inputs of kernels, with adjacent channels; `optional` are bias, state, rows and ids."""
        x = x if x.stride(2) == 1 else x.contiguous()
        optional = tuple(y if y is None else y.contiguous() for y in optional)
        return cls(x, weight.contiguous(), *optional, activation, columns)

    @property
    def sequences(self) -> int:
        """Number of sequences."""
        return self.x.shape[0] if self.rows is None else self.rows.shape[0]

    @property
    def norm_arguments(self) -> tuple[float, float]:
        """Length of queries and `eps`: the last arguments of kernels that scale queries and keys."""
        return self.columns.norm.query_length, self.columns.norm.eps

    def or_placeholder(self, tensor: Tensor | None) -> Tensor:
        """Return the tensor, or another one that a kernel does not read."""
        return self.x if tensor is None else tensor

    def constants(self, channels: int) -> dict[str, Any]:
        """Return constants of all kernels, for programs of at most `channels` channels."""
        count, taps = self.weight.shape
        block = max(pad_width(self.columns.norm), min(channels, max(32, 1 << (count - 1).bit_length())))
        flags = {"PACKED": self.rows is not None, "STATE": self.state is not None}
        return {"C": count, "S": taps, "BLOCK": block, **flags, "num_warps": 1}

    def column_constants(self) -> dict[str, Any]:
        """Return constants of the kernels that read or write queries, keys and values."""
        norm, flags = self.columns.norm, {"KIND": self.activation, "BIAS": self.bias is not None, "PTX": supports_ptx()}
        return {
            "KEYS": self.columns.keys,
            "K": norm.width,
            "P": pad_width(norm),
            "ON_LENGTH": norm.eps_on_length,
        } | flags

    def blocks(self, block: int) -> int:
        """Return the blocks of channels, none of which has columns of two tensors."""
        return count_blocks(self.x.shape[2], self.columns, block)

    def plan(self, sizes: Sizes) -> tuple[dict[str, Any], int, int]:
        """Return the constants of the forward or backward kernel, the tokens of a chunk, and the chunks of a row."""
        constants = self.constants(sizes.channels) | self.column_constants() | {"UNROLL": sizes.unroll}
        block, (batch, length, _), chunk = constants["BLOCK"], self.x.shape, sizes.chunk
        blocks, warps = self.blocks(block), max(1, block // sizes.channels_per_warp)
        while chunk > MIN_CHUNK and batch * -(-length // chunk) * blocks < PROGRAMS:
            chunk //= 2
        return constants | {"BLOCKS": blocks, "num_warps": warps}, chunk, -(-length // chunk)


def pad_width(norm: UnitNorm) -> int:
    """Return the columns of a head in a block, a power of two; 0 without norm."""
    return 1 << (norm.width - 1).bit_length() if norm.width else 0


def count_blocks(channels: int, columns: QueryKeyColumns, block: int) -> int:
    """Return the number of blocks of channels; none has columns of two tensors or, with a norm, a part of a head."""
    count, norm = columns
    per_block = block // pad_width(norm) * norm.width if norm.width else block
    return 2 * -(-count // per_block) + -(-(channels - 2 * count) // block)


def forward(inputs: ConvolutionInputs) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return queries, keys and values, and the final state `[N, S - 1, C]`."""
    x, taps, keys = inputs.x, inputs.weight.shape[1], inputs.columns.keys
    batch, length, channels = x.shape
    q, k, v = (x.new_empty(batch, length, width) for width in (keys, keys, channels - 2 * keys))
    final = x.new_empty(inputs.sequences, taps - 1, channels)
    bias, state, rows, ids = map(inputs.or_placeholder, inputs[2:6])
    constants, chunk, chunks = inputs.plan(FORWARD)
    places = length, chunk, x.stride(0), x.stride(1)
    Launch(
        kernels.forward_kernel,
        (chunks * constants["BLOCKS"], batch),
        (x, inputs.weight, bias, state, rows, ids, q, k, v, *places, *inputs.norm_arguments),
        constants,
    ).run()
    if taps > 1 and inputs.sequences:
        constants = inputs.constants(STATE_CHANNELS)
        Launch(
            kernels.final_state_kernel,
            (inputs.sequences, -(-channels // constants["BLOCK"])),
            (x, state, rows, final, length, x.stride(0), x.stride(1)),
            constants,
        ).run()
    return q, k, v, final


def backward(
    inputs: ConvolutionInputs, grads: tuple[Tensor | None, ...], final_grad: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return gradients of x, weight, bias and state; those of missing tensors are empty.

    `grads` are those of queries, keys and values; `None` for zeros.
    """
    x, weight, keys = inputs.x, inputs.weight, inputs.columns.keys
    batch, length, channels = x.shape
    bias, state, rows, ids = map(inputs.or_placeholder, inputs[2:6])
    dq, dk, dv = (
        x.new_zeros(batch, length, width) if grad is None else grad.contiguous()
        for grad, width in zip(grads, (keys, keys, channels - 2 * keys), strict=True)
    )
    constants, chunk, chunks = inputs.plan(BACKWARD)
    dx = x.new_empty(x.shape)
    dweight = x.new_empty((batch * chunks, *weight.shape), dtype=torch.float32)
    dbias = x.new_empty((batch * chunks, channels if inputs.bias is not None else 0), dtype=torch.float32)
    tensors = x, weight, bias, state, rows, ids, dq, dk, dv, dx, dweight, dbias
    Launch(
        backward_kernels.backward_kernel,
        (chunks * constants["BLOCKS"], batch),
        (*tensors, length, chunk, x.stride(0), x.stride(1), *inputs.norm_arguments),
        constants,
    ).run()
    dstate = x.new_empty(0 if inputs.state is None else inputs.state.shape)
    if (inputs.state is not None or final_grad is not None) and weight.shape[1] > 1 and inputs.sequences:
        final = x if final_grad is None else final_grad.contiguous()
        constants = inputs.constants(STATE_CHANNELS) | inputs.column_constants() | {"FINAL": final_grad is not None}
        places = length, x.stride(0), x.stride(1)
        Launch(
            backward_kernels.state_backward_kernel,
            (inputs.sequences, inputs.blocks(constants["BLOCK"])),
            (x, weight, bias, state, rows, dq, dk, dv, final, dx, dstate, *places, *inputs.norm_arguments),
            constants,
        ).run()
    return dx, dweight.sum(0).to(weight.dtype), dbias.sum(0).to(bias.dtype), dstate
