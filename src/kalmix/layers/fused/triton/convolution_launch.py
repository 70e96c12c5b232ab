"""Launches of the kernels of the short convolution, and their sizes."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from kalmix.layers.fused.triton import convolution as kernels
from kalmix.ops._shared.triton.compile_and_launch import Launch

FORWARD_CHANNELS, BACKWARD_CHANNELS, STATE_CHANNELS = 256, 128, 128  # most channels of a program, which is one warp
MAX_CHUNK, MIN_CHUNK = 64, 8  # tokens of a program
PROGRAMS = 2048  # chunks are shortened until there are as many programs


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

    @classmethod
    def of(cls, x: Tensor, weight: Tensor, *optional: Any) -> ConvolutionInputs:
        """Build the inputs of kernels, with adjacent channels."""
        x = x if x.stride(2) == 1 else x.contiguous()
        *tensors, activation = optional
        return cls(x, weight.contiguous(), *(y if y is None else y.contiguous() for y in tensors), activation)

    @property
    def sequences(self) -> int:
        """Number of sequences."""
        return self.x.shape[0] if self.rows is None else self.rows.shape[0]

    def or_placeholder(self, tensor: Tensor | None) -> Tensor:
        """Return the tensor, or another one that a kernel does not read."""
        return self.x if tensor is None else tensor

    def constants(self, channels: int) -> dict[str, Any]:
        """Return constants of all kernels, for programs of at most `channels` channels."""
        count, taps = self.weight.shape
        block = min(channels, max(32, 1 << (count - 1).bit_length()))
        flags = {"PACKED": self.rows is not None, "STATE": self.state is not None}
        return {"C": count, "S": taps, "BLOCK": block, **flags, "num_warps": 1}

    def chunking(self, block: int) -> tuple[int, int, int]:
        """Return the tokens of a chunk, the chunks of a batch row, and the blocks of channels."""
        batch, length, channels = self.x.shape
        blocks, chunk = -(-channels // block), MAX_CHUNK
        while chunk > MIN_CHUNK and batch * -(-length // chunk) * blocks < PROGRAMS:
            chunk //= 2
        return chunk, -(-length // chunk), blocks


def forward(inputs: ConvolutionInputs) -> tuple[Tensor, Tensor]:
    """Return the activated convolution `[B, T, C]` and the final state `[N, S - 1, C]`."""
    x, taps = inputs.x, inputs.weight.shape[1]
    batch, length, channels = x.shape
    y, final = x.new_empty(x.shape), x.new_empty(inputs.sequences, taps - 1, channels)
    bias, state, rows, ids = map(inputs.or_placeholder, inputs[2:6])
    constants = inputs.constants(FORWARD_CHANNELS)
    chunk, chunks, blocks = inputs.chunking(constants["BLOCK"])
    Launch(
        kernels.forward_kernel,
        (chunks * blocks, batch),
        (x, inputs.weight, bias, state, rows, ids, y, length, chunk, blocks, x.stride(0), x.stride(1)),
        constants | {"KIND": inputs.activation, "BIAS": inputs.bias is not None},
    ).run()
    if taps > 1 and inputs.sequences:
        constants = inputs.constants(STATE_CHANNELS)
        Launch(
            kernels.final_state_kernel,
            (inputs.sequences, -(-channels // constants["BLOCK"])),
            (x, state, rows, final, length, x.stride(0), x.stride(1)),
            constants,
        ).run()
    return y, final


def backward(
    inputs: ConvolutionInputs, grad: Tensor, final_grad: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return gradients of x, weight, bias and state; those of missing tensors are empty."""
    x, weight = inputs.x, inputs.weight
    batch, length, channels = x.shape
    bias, state, rows, ids = map(inputs.or_placeholder, inputs[2:6])
    grad = grad.contiguous()
    constants = inputs.constants(BACKWARD_CHANNELS) | {"KIND": inputs.activation, "BIAS": inputs.bias is not None}
    chunk, chunks, blocks = inputs.chunking(constants["BLOCK"])
    dx = x.new_empty(x.shape)
    dweight = x.new_empty((batch * chunks, *weight.shape), dtype=torch.float32)
    dbias = x.new_empty((batch * chunks, channels if inputs.bias is not None else 0), dtype=torch.float32)
    Launch(
        kernels.backward_kernel,
        (chunks * blocks, batch),
        (x, weight, bias, state, rows, ids, grad, dx, dweight, dbias, length, chunk, blocks, x.stride(0), x.stride(1)),
        constants,
    ).run()
    dstate = x.new_empty(0 if inputs.state is None else inputs.state.shape)
    if (inputs.state is not None or final_grad is not None) and weight.shape[1] > 1 and inputs.sequences:
        final = grad if final_grad is None else final_grad.contiguous()
        constants |= inputs.constants(STATE_CHANNELS) | {"FINAL": final_grad is not None}
        Launch(
            kernels.state_backward_kernel,
            (inputs.sequences, -(-channels // constants["BLOCK"])),
            (x, weight, bias, state, rows, grad, final, dx, dstate, length, x.stride(0), x.stride(1)),
            constants,
        ).run()
    return dx, dweight.sum(0).to(weight.dtype), dbias.sum(0).to(bias.dtype), dstate
