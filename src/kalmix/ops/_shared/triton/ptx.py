"""Functions that an NVIDIA GPU has an instruction for, and Triton only code."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton import knobs


def hardware() -> bool:
    """Whether kernels are compiled for an NVIDIA GPU, so that PTX may be used."""
    return not knobs.runtime.interpret and torch.version.cuda is not None


@triton.jit
def reciprocal(x, PTX: tl.constexpr):
    # One instruction, right to the last bit but one; division takes eight.
    if PTX:
        inverse = tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        inverse = 1.0 / x
    return inverse


@triton.jit
def log2(x, PTX: tl.constexpr):
    # One instruction, right to 2^-22; the logarithm that Triton calls takes twenty.
    if PTX:
        logarithm = tl.inline_asm_elementwise(
            "lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        logarithm = tl.log2(x)
    return logarithm


@triton.jit
def rounded(x, like, PTX: tl.constexpr):
    """x in float32, as the dtype of `like` has it."""
    # Two numbers at once: Triton's own takes them one by one, each in the time of eight instructions.
    if PTX and like.dtype == tl.bfloat16:
        nearest = tl.inline_asm_elementwise(
            "{ .reg .b32 both; cvt.rn.bf16x2.f32 both, $3, $2; shl.b32 $0, both, 16; and.b32 $1, both, 0xffff0000; }",
            "=f,=f,f,f", [x], dtype=tl.float32, is_pure=True, pack=2,
        )  # fmt: skip
    else:
        nearest = x.to(like.dtype).to(tl.float32)
    return nearest
