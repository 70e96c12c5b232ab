"""Step of softmax attention with QK norm and rotary positions, in place on a pool of keys and values."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from kalmix.layers.fused.dispatch import LEAST_ROWS, uses_triton
from kalmix.ops._shared.custom_op import needs_grad, with_launch_cache
from kalmix.ops._shared.step import Slots
from kalmix.validation import FLOAT32_STATE_DTYPES


class RotaryHeads(NamedTuple):
    """Constants of the heads of softmax attention.

    Attributes:
        heads: number of query heads.
        kv_heads: number of key heads, a divisor of `heads`; adjacent query heads share a key head.
        width: columns of a head, an even number.
        rotary_base: columns j and j + width / 2 rotate by `rotary_base`^(-2 j / width) radians per position.
        query_eps: number added to the mean square of a query.
        key_eps: number added to the mean square of a key.
    """

    heads: int
    kv_heads: int
    width: int
    rotary_base: float
    query_eps: float
    key_eps: float


class KeyValuePool(NamedTuple):
    """Keys and values of N slots with room for S tokens each; tensors of a slot are contiguous.

    The token at position p of its sequence is at index p modulo S. A slot stores the newest tokens of a sequence, at
    most S, without gaps.

    Attributes:
        keys: rotated keys, `[N, S, kv_heads, width]`.
        values: `[N, S, kv_heads, width]`.
        positions: int64 `[N, S]`, -1 without a token.
    """

    keys: Tensor
    values: Tensor
    positions: Tensor


def can_fuse_attention(x: Tensor, norms: tuple[Tensor, Tensor], pool: KeyValuePool) -> bool:
    """Return whether `attention_step` accepts these arguments. It computes in float32, without gradients."""
    tensors = (x, *norms, *pool[:2])
    kv_heads, width = pool.keys.shape[2:]
    repeat = x.shape[-1] // (kv_heads * width) - 2  # query heads of a key head
    tile = LEAST_ROWS * (1 << (repeat - 1).bit_length()) * (1 << (width - 1).bit_length())
    return (
        uses_triton("attention_step", x, tile)
        and not torch.compiler.is_compiling()
        and all(y.dtype in FLOAT32_STATE_DTYPES and y.stride(-1) == 1 for y in tensors)
        and all(y[:1].is_contiguous() for y in pool)
        and all(type(y) in (Tensor, nn.Parameter) for y in norms)  # not sharded
        and not needs_grad(x, *norms)
    )


def attention_step(
    x: Tensor, norms: tuple[Tensor, Tensor], pool: KeyValuePool, slots: Slots, heads: RotaryHeads
) -> Tensor:
    """Attend with one token for each row of a batch, in place on a pool of keys and values, in two kernels.

        q, k = rotate(norm(q), position), rotate(norm(k), position);   y = sum_j softmax_j(q k_j / sqrt(width)) v_j

    j runs over the tokens in the slot and the token itself, in total at most S: in a full slot, the token replaces the
    oldest one. The kernels compute in float32, with angles in float64, and round keys and the result once. Launches
    depend on sizes only, so that a CUDA graph may contain the step. Rounding depends on the size of the batch, which
    decides in how many parts a history is read. `kalmix.steps` describes slots.

    Args:
        x: projected tokens `[B, 1, (heads + 2 kv_heads) width]`: queries, then keys, then values.
        norms: weights of the RMS norms of queries and of keys, `[width]` each.
        pool: keys and values of N slots; updated in place.
        slots: slots that each row reads and writes.
        heads: constants.

    Returns:
        y `[B, 1, heads width]` in the dtype of `x`; 0 in rows of padding.
    """
    return _step(x, list(norms), list(pool), list(slots), heads)


@with_launch_cache
def _step(x: Tensor, norms: list[Tensor], pool: list[Tensor], slots: list[Tensor], heads: RotaryHeads) -> Tensor:
    from kalmix.layers.fused.triton.attention_step import step

    return step(x, norms, pool, slots, heads)
