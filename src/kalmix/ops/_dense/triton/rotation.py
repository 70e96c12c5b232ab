"""Triton kernels that express a filter with rotations in coordinates that rotate with the memory, where it has none.

Let phi_t be the angle of a pair of rows, summed from the start of its sequence to token t. Turning the pair back by
phi_t removes the rotation from the transition. Decays commute with it, because both rows of a pair have the same decay.
Queries and keys turn with the rows. Process noise, which enters the first row of a pair, enters along the direction
(cos phi_t, -sin phi_t) instead. At the start of a sequence the coordinates agree, so only the final belief is turned.

Rows of a pair are adjacent in these coordinates: rows j and j + K / 2 become rows 2 j and 2 j + 1.

Angles are summed in float64 modulo 2 pi, by chunks of 64 tokens. An angle that is not finite affects its own token
only; the keys of that token carry the NaN to later tokens of the sequence.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from kalmix.ops._dense.block_sizes import CHUNK
from kalmix.ops._dense.triton.primitives import UNSPECIALIZED_ARGUMENTS
from kalmix.ops._shared.triton.compile_and_launch import Launch
from kalmix.ops._shared.triton.tiles import (
    Tiling,
    contiguous_rows,
    load_rows,
    locate_program,
    locate_sequence,
    locate_tile,
    store_rows,
    tile_sequences,
)
from kalmix.segments import Segments

BLOCK = 32  # pairs per program
FULL_TURN: tl.constexpr = tl.constexpr(2 * math.pi)


@triton.jit
def _load_angles(angle, stride, count, pair, PAIRS: tl.constexpr, SIZE: tl.constexpr):
    """Load angles `[SIZE, pairs]` in float64, modulo 2 pi; also return where they are finite. Others are 0."""
    angles = load_rows(angle, stride, count, pair, PAIRS, SIZE).to(tl.float64)
    finite = tl.abs(angles) < float("inf")
    return _reduce_angle(tl.where(finite, angles, 0.0)), finite


@triton.jit
def _reduce_angle(angle):
    """Return an angle modulo 2 pi, in float64."""
    full_turn = tl.full(angle.shape, FULL_TURN, tl.float64)
    return angle - tl.floor(angle / full_turn) * full_turn


@triton.jit(do_not_specialize=UNSPECIALIZED_ARGUMENTS)
def _sum_angles(
    angle, chunk_angles, total_angle, sequence_table, length, tiles, G,
    PAIRS: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Sum the angles of some pairs of one sequence and head from chunk to chunk."""
    sequence, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    pair = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    first_chunk, token, count = locate_sequence(sequence_table, sequence, length, tiles, PACKED)
    angle += (token * G + head) * PAIRS
    total = tl.zeros([BLOCK], tl.float64)
    for chunk in range(tl.cdiv(count, CHUNK)):
        tl.store(chunk_angles + ((first_chunk + chunk) * G + head) * PAIRS + pair, total, mask=pair < PAIRS)
        start = chunk * CHUNK
        angles, _ = _load_angles(angle + start.to(tl.int64) * (G * PAIRS), G * PAIRS, count - start, pair, PAIRS, CHUNK)
        total = _reduce_angle(total + tl.sum(angles, 0))
    tl.store(total_angle + (sequence * G + head) * PAIRS + pair, total, mask=pair < PAIRS)


@triton.jit
def _cos_sin(angle, chunk_angles, row, at, count, G, pair, PAIRS: tl.constexpr, SIZE: tl.constexpr):
    """Return cosine and sine of the summed angles of a chunk's tokens, `[SIZE, pairs]` in float32."""
    angles, finite = _load_angles(angle + row * PAIRS, G * PAIRS, count, pair, PAIRS, SIZE)
    start = tl.load(chunk_angles + at * PAIRS + pair, mask=pair < PAIRS, other=0.0)
    summed = _reduce_angle(start[None, :] + tl.cumsum(angles, 0)).to(tl.float32)
    summed = tl.where(finite, summed, float("nan"))
    return tl.cos(summed), tl.sin(summed)


@triton.jit
def _turn_back(x, stride, count, pair, cos, sin, PAIRS: tl.constexpr, SIZE: tl.constexpr):
    """Load rows with the members of a pair PAIRS apart, and turn the pairs back; return both members."""
    first = load_rows(x, stride, count, pair, PAIRS, SIZE).to(tl.float32)
    second = load_rows(x + PAIRS, stride, count, pair, PAIRS, SIZE).to(tl.float32)
    return cos * first + sin * second, cos * second - sin * first


@triton.jit
def _store_pairs(
    dest, stride, count, column, first, second, PAIRS: tl.constexpr, BLOCK: tl.constexpr, SIZE: tl.constexpr
):
    """Store rows with adjacent members of pairs."""
    x = tl.reshape(tl.join(first, second), (SIZE, 2 * BLOCK))
    store_rows(dest, stride, count, column, x, 2 * PAIRS, SIZE)


@triton.jit
def _load_pairs(x, stride, count, column, PAIRS: tl.constexpr, BLOCK: tl.constexpr, SIZE: tl.constexpr):
    """Load rows with adjacent members of pairs; return both members."""
    rows = load_rows(x, stride, count, column, 2 * PAIRS, SIZE).to(tl.float32)
    return tl.split(tl.reshape(rows, (SIZE, BLOCK, 2)))


@triton.jit(do_not_specialize=UNSPECIALIZED_ARGUMENTS)
def _rotate_signals(
    q, k, angle, chunk_angles, rotated_q, rotated_k, noise_axis, tile_table, length, tiles, q_token, q_head, k_token,
    k_head, G, SHARE,
    PAIRS: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, CHUNK: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Turn some pairs of queries, keys and noise of a chunk back by the summed angles."""
    index, head, block = locate_program(G, BLOCKS)
    token, count = locate_tile(tile_table, index, length, tiles, CHUNK, PACKED)
    if count <= 0:
        return
    pair, column = block * BLOCK + tl.arange(0, BLOCK), 2 * block * BLOCK + tl.arange(0, 2 * BLOCK)
    row, at = token * G + head, index.to(tl.int64) * G + head
    cos, sin = _cos_sin(angle, chunk_angles, row, at, count, G, pair, PAIRS, CHUNK)
    dest, stride = row * (2 * PAIRS), G * (2 * PAIRS)
    first, second = _turn_back(
        q + token * q_token + head // SHARE * q_head, q_token, count, pair, cos, sin, PAIRS, CHUNK
    )
    _store_pairs(rotated_q + dest, stride, count, column, first, second, PAIRS, BLOCK, CHUNK)
    first, second = _turn_back(
        k + token * k_token + head // SHARE * k_head, k_token, count, pair, cos, sin, PAIRS, CHUNK
    )
    _store_pairs(rotated_k + dest, stride, count, column, first, second, PAIRS, BLOCK, CHUNK)
    _store_pairs(noise_axis + dest, stride, count, column, cos, -sin, PAIRS, BLOCK, CHUNK)


@triton.jit(do_not_specialize=UNSPECIALIZED_ARGUMENTS)
def _rotate_signals_backward(
    q, k, angle, chunk_angles, grad_rotated_q, grad_rotated_k, grad_axis, exit_torques, grad_q, grad_k, grad_angle,
    tile_table, length, tiles, q_token, q_head, k_token, k_head, G, SHARE,
    PAIRS: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, CHUNK: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Compute gradients of q, k and angles; those of angles are sums over later tokens, and the torque at the end."""
    index, head, block = locate_program(G, BLOCKS)
    token, count = locate_tile(tile_table, index, length, tiles, CHUNK, PACKED)
    if count <= 0:
        return
    pair, column = block * BLOCK + tl.arange(0, BLOCK), 2 * block * BLOCK + tl.arange(0, 2 * BLOCK)
    row, at = token * G + head, index.to(tl.int64) * G + head
    cos, sin = _cos_sin(angle, chunk_angles, row, at, count, G, pair, PAIRS, CHUNK)
    source, stride = row * (2 * PAIRS), G * (2 * PAIRS)
    grad_first, grad_second = _load_pairs(grad_axis + source, stride, count, column, PAIRS, BLOCK, CHUNK)
    grad = -sin * grad_first - cos * grad_second
    q += token * q_token + head // SHARE * q_head
    first, second = _turn_back(q, q_token, count, pair, cos, sin, PAIRS, CHUNK)
    grad_first, grad_second = _load_pairs(grad_rotated_q + source, stride, count, column, PAIRS, BLOCK, CHUNK)
    grad += grad_first * second - grad_second * first
    store_rows(grad_q + source, stride, count, pair, cos * grad_first - sin * grad_second, PAIRS, CHUNK)
    store_rows(grad_q + source + PAIRS, stride, count, pair, sin * grad_first + cos * grad_second, PAIRS, CHUNK)
    k += token * k_token + head // SHARE * k_head
    first, second = _turn_back(k, k_token, count, pair, cos, sin, PAIRS, CHUNK)
    grad_first, grad_second = _load_pairs(grad_rotated_k + source, stride, count, column, PAIRS, BLOCK, CHUNK)
    grad += grad_first * second - grad_second * first
    store_rows(grad_k + source, stride, count, pair, cos * grad_first - sin * grad_second, PAIRS, CHUNK)
    store_rows(grad_k + source + PAIRS, stride, count, pair, sin * grad_first + cos * grad_second, PAIRS, CHUNK)
    torque = tl.load(exit_torques + at * PAIRS + pair, mask=pair < PAIRS, other=0.0)
    grad = torque[None, :] + tl.cumsum(tl.where((tl.arange(0, CHUNK) < count)[:, None], grad, 0.0), 0, reverse=True)
    store_rows(grad_angle + row * PAIRS, G * PAIRS, count, pair, grad, PAIRS, CHUNK)


def sum_angles(angle: Tensor, segments: Segments | None) -> tuple[Tensor, Tensor]:
    """Return angles summed from the start of each sequence, in float64 and modulo 2 pi.

    Returns:
        `[chunks * G * K / 2]` at the start of every chunk, and `[N, G, K / 2]` at the end of every sequence.
    """
    cut, _, grid, options = _plan(angle, segments)
    (_, length, heads, pairs), like = angle.shape, {"dtype": torch.float64, "device": angle.device}
    chunk_angles = torch.empty(cut.num_tiles * heads * pairs, **like)
    total_angle = torch.empty(cut.num_sequences, heads, pairs, **like)
    Launch(_sum_angles, grid, (
        angle.contiguous(), chunk_angles, total_angle, cut.sequence_table, length, cut.tiles, heads,
    ), options).run()  # fmt: skip
    return chunk_angles, total_angle


def rotate_signals(
    q: Tensor, k: Tensor, angle: Tensor, chunk_angles: Tensor, segments: Segments | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Turn queries and keys back by the summed angles.

    Returns:
        q and k of value heads in rotating coordinates, `[B, T, G, K]`, and `noise_axis`, `[B, T, G, K]` in float32: the
        unit vector of each pair of rows along which process noise enters.
    """
    cut, grid, (_, _, blocks), options = _plan(angle, segments)
    (batch, length, heads, pairs), like = angle.shape, {"device": angle.device}
    q, k = contiguous_rows(q), contiguous_rows(k)
    shape = (batch, length, heads, 2 * pairs)
    rotated_q, rotated_k = (torch.empty(shape, dtype=x.dtype, **like) for x in (q, k))
    noise_axis = torch.empty(shape, dtype=torch.float32, **like)
    Launch(_rotate_signals, grid, (
        q, k, angle.contiguous(), chunk_angles, rotated_q, rotated_k, noise_axis, cut.tile_table, length, cut.tiles,
        *q.stride()[1:3], *k.stride()[1:3], heads, heads // k.shape[2],
    ), {**options, "BLOCKS": blocks}).run()  # fmt: skip
    return rotated_q, rotated_k, noise_axis


def rotate_signals_backward(
    q: Tensor,
    k: Tensor,
    angle: Tensor,
    chunk_angles: Tensor,
    segments: Segments | None,
    grads: tuple[Tensor, Tensor, Tensor],
    exit_torques: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and angles from those of rotated q, rotated k and the noise axis.

    `exit_torques` is described in `belief_torques`.
    """
    cut, grid, (_, _, blocks), options = _plan(angle, segments)
    (batch, length, heads, pairs), like, key_heads = angle.shape, {"device": angle.device}, k.shape[2]
    dtype, angle, q, k = angle.dtype, angle.contiguous(), contiguous_rows(q), contiguous_rows(k)
    tokens, shape = torch.empty if segments is None else torch.zeros, (batch, length, heads, 2 * pairs)
    kind = q.dtype if heads == key_heads else torch.float32
    grad_q, grad_k = (tokens(shape, dtype=kind, **like) for _ in range(2))
    grad_angle = tokens(angle.shape, dtype=torch.float32, **like)
    Launch(_rotate_signals_backward, grid, (
        q, k, angle, chunk_angles, *(x.contiguous() for x in grads), exit_torques, grad_q, grad_k, grad_angle,
        cut.tile_table, length, cut.tiles, *q.stride()[1:3], *k.stride()[1:3], heads, heads // key_heads,
    ), {**options, "BLOCKS": blocks}).run()  # fmt: skip
    if heads != key_heads:
        grad_q, grad_k = (x.unflatten(2, (key_heads, -1)).sum(3).to(q.dtype) for x in (grad_q, grad_k))
    return grad_q, grad_k, grad_angle.to(dtype)


def _plan(
    angle: Tensor, segments: Segments | None
) -> tuple[Tiling, tuple[int, ...], tuple[int, int, int], dict[str, int]]:
    """Return the chunks, the grids over chunks and over sequences, and the options of the kernels."""
    batch, length, heads, pairs = angle.shape
    cut = tile_sequences(batch, length, CHUNK, segments, angle)
    block = min(BLOCK, triton.next_power_of_2(pairs))
    blocks = -(-pairs // block)
    options = {"PAIRS": pairs, "BLOCK": block, "CHUNK": CHUNK, "PACKED": cut.packed, "num_warps": 4}
    return cut, (cut.num_tiles * heads * blocks,), (cut.num_sequences, heads, blocks), options


def pair_decays(log_decay: Tensor | None, angle: Tensor) -> Tensor:
    """Return the log-decays of all rows, `[B, T, G, K]`, from those per pair, per head, or none."""
    if log_decay is None:
        log_decay = angle.new_zeros((), dtype=torch.float32).expand(angle.shape[:3])
    decays = log_decay[..., None, None] if log_decay.ndim == 3 else log_decay[..., None]
    return decays.expand(*angle.shape, 2).flatten(-2)


def pair_decays_backward(grad: Tensor, log_decay: Tensor | None) -> Tensor:
    """Return the gradient of the log-decays of `pair_decays`; empty if there are none."""
    if log_decay is None:
        return grad.new_empty(0)
    return grad.sum(-1) if log_decay.ndim == 3 else grad.unflatten(-1, (-1, 2)).sum(-1)
