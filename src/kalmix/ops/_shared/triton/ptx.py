"""Functions that use single PTX instructions on NVIDIA GPUs, where Triton's own take several."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton import knobs


def supports_ptx() -> bool:
    """Return whether kernels are compiled for NVIDIA GPUs, so that they may use PTX."""
    return not knobs.runtime.interpret and torch.version.cuda is not None


@triton.jit
def reciprocal(x, PTX: tl.constexpr):
    # PTX: one instruction, with an error of one unit in the last place; a division takes eight.
    if PTX:
        inverse = tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        inverse = 1.0 / x
    return inverse


@triton.jit
def exp2(x, PTX: tl.constexpr):
    # PTX: one instruction, with an error of two units in the last place; Triton's function takes four, because it does
    # not flush subnormal results to 0.
    if PTX:
        power = tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        power = tl.exp2(x)
    return power


@triton.jit
def log2(x, PTX: tl.constexpr):
    # PTX: one instruction, with an error of 2^-22; Triton's logarithm takes twenty.
    if PTX:
        logarithm = tl.inline_asm_elementwise(
            "lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        logarithm = tl.log2(x)
    return logarithm


@triton.jit
def round_like(x, like, PTX: tl.constexpr):
    """Round float32 x to the dtype of `like`; return float32."""
    # PTX: rounds two numbers at once; Triton rounds one at a time, in about eight instructions.
    if PTX and like.dtype == tl.bfloat16:
        nearest = tl.inline_asm_elementwise(
            "{ .reg .b32 both; cvt.rn.bf16x2.f32 both, $3, $2; shl.b32 $0, both, 16; and.b32 $1, both, 0xffff0000; }",
            "=f,=f,f,f", [x], dtype=tl.float32, is_pure=True, pack=2,
        )  # fmt: skip
    else:
        nearest = x.to(like.dtype).to(tl.float32)
    return nearest
