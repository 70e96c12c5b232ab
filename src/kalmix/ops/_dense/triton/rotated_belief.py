"""Triton kernels for beliefs in coordinates that rotate with the memory (`rotation`)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kalmix.ops._dense.block_sizes import CHUNK
from kalmix.ops._dense.triton.primitives import UNSPECIALIZED_ARGUMENTS
from kalmix.ops._shared.triton.compile_and_launch import Launch
from kalmix.ops._shared.triton.tiles import Tiling, locate_sequence, tile_sequences
from kalmix.segments import Segments


@triton.jit(do_not_specialize=["row_stride", "column_stride", "matrix_stride", "head_stride", "G"])
def _turn_rows(
    x, total_angle, turned, matrix_stride, head_stride, row_stride, column_stride, G,
    PAIRS: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Turn pairs of adjacent rows of a matrix by their total angles, and store the members of pairs PAIRS apart."""
    matrix, pair = tl.program_id(0).to(tl.int64), tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    angle = tl.load(total_angle + matrix * PAIRS + pair, mask=pair < PAIRS, other=0.0).to(tl.float32)
    cos, sin = tl.cos(angle)[:, None], tl.sin(angle)[:, None]
    valid = (pair < PAIRS)[:, None] & (column < COLUMNS)[None, :]
    x += matrix // G * matrix_stride + matrix % G * head_stride
    x += 2 * pair[:, None] * row_stride + column[None, :] * column_stride
    first, second = tl.load(x, mask=valid, other=0.0), tl.load(x + row_stride, mask=valid, other=0.0)
    turned += (matrix * (2 * PAIRS) + pair[:, None]) * COLUMNS + column[None, :]
    tl.store(turned, cos * first - sin * second, mask=valid)
    tl.store(turned + PAIRS * COLUMNS, sin * first + cos * second, mask=valid)


@triton.jit(do_not_specialize=["row_stride", "column_stride", "matrix_stride", "head_stride", "G"])
def _turn_rows_backward(
    grad, x, total_angle, grad_x, grad_angle, matrix_stride, head_stride, row_stride, column_stride, G,
    PAIRS: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, ANGLES: tl.constexpr,
):  # fmt: skip
    """Compute the gradient of x from that of `_turn_rows`, and add that of the angles if `ANGLES`."""
    matrix, pair = tl.program_id(0).to(tl.int64), tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    angle = tl.load(total_angle + matrix * PAIRS + pair, mask=pair < PAIRS, other=0.0).to(tl.float32)
    cos, sin = tl.cos(angle)[:, None], tl.sin(angle)[:, None]
    grad += matrix // G * matrix_stride + matrix % G * head_stride
    torque = tl.zeros([ROWS], tl.float32)
    for start in range(0, COLUMNS, BLOCK):
        column = start + tl.arange(0, BLOCK)
        valid = (pair < PAIRS)[:, None] & (column < COLUMNS)[None, :]
        grad_at = grad + pair[:, None] * row_stride + column[None, :] * column_stride
        first, second = (
            tl.load(grad_at, mask=valid, other=0.0),
            tl.load(grad_at + PAIRS * row_stride, mask=valid, other=0.0),
        )
        first, second = cos * first + sin * second, cos * second - sin * first
        at = (matrix * (2 * PAIRS) + 2 * pair[:, None]) * COLUMNS + column[None, :]
        tl.store(grad_x + at, first, mask=valid)
        tl.store(grad_x + at + COLUMNS, second, mask=valid)
        if ANGLES:
            torque += tl.sum(second * tl.load(x + at, mask=valid, other=0.0), 1)
            torque -= tl.sum(first * tl.load(x + at + COLUMNS, mask=valid, other=0.0), 1)
    if ANGLES:
        at = grad_angle + matrix * PAIRS + pair
        tl.store(at, tl.load(at, mask=pair < PAIRS, other=0.0) + ANGLES * torque, mask=pair < PAIRS)


@triton.jit(do_not_specialize=[*UNSPECIALIZED_ARGUMENTS, "mean_tiles"])
def _belief_torques(
    adjoint_cov_diag, states, adjoints, exit_torques, sequence_table, mean_sequence_table, length, tiles, mean_tiles, G,
    PAIRS: tl.constexpr, V: tl.constexpr, P: tl.constexpr, BLOCK: tl.constexpr, COLUMNS: tl.constexpr,
    SIZE: tl.constexpr, CHUNK: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Compute the torques at the ends of all chunks but the last, of some pairs of one sequence and head."""
    sequence, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    pair = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    first_chunk, _token, count = locate_sequence(sequence_table, sequence, length, tiles, PACKED)
    first_tile, _token, _count = locate_sequence(mean_sequence_table, sequence, length, mean_tiles, PACKED)
    rows = 2 * pair[:, None] * V
    for chunk in range(1, tl.cdiv(count, CHUNK)):
        at = (first_chunk + chunk) * G + head
        cov_torques = adjoint_cov_diag + at * (2 * P) + P + 2 * pair
        torque = 2.0 * (
            tl.load(cov_torques + 1, mask=pair < PAIRS, other=0.0) - tl.load(cov_torques, mask=pair < PAIRS, other=0.0)
        )
        tile = first_tile + chunk * (CHUNK // SIZE)
        state, adjoint = (
            states + (tile * G + head) * (2 * PAIRS * V) + rows,
            adjoints + ((tile - 1) * G + head) * (2 * PAIRS * V) + rows,
        )
        for start in range(0, V, COLUMNS):
            column = (start + tl.arange(0, COLUMNS))[None, :]
            valid = (pair < PAIRS)[:, None] & (column < V)
            first = tl.load(state + column, mask=valid, other=0.0).to(tl.float32)
            second = tl.load(state + V + column, mask=valid, other=0.0).to(tl.float32)
            grad_first = tl.load(adjoint + column, mask=valid, other=0.0).to(tl.float32)
            grad_second = tl.load(adjoint + V + column, mask=valid, other=0.0).to(tl.float32)
            torque += tl.sum(grad_second * first - grad_first * second, 1)
        tl.store(exit_torques + (at - G) * PAIRS + pair, torque, mask=pair < PAIRS)


def turn_belief(mean: Tensor, covariance: Tensor, total_angle: Tensor) -> tuple[Tensor, Tensor]:
    """Return a belief in fixed coordinates."""
    return _turn(mean, total_angle), _turn(_turn(covariance, total_angle).mT, total_angle)


def _turn(x: Tensor, total_angle: Tensor) -> Tensor:
    sequences, heads, width, columns = x.shape
    turned = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    options = {"PAIRS": width // 2, "COLUMNS": columns, "ROWS": 16, "BLOCK": 64, "num_warps": 4}
    Launch(_turn_rows, (sequences * heads, -(-width // 32), -(-columns // 64)), (
        x, total_angle, turned, *x.stride(), heads,
    ), options).run()  # fmt: skip
    return turned


def turn_belief_backward(
    grad_mean: Tensor, grad_covariance: Tensor, mean: Tensor, covariance: Tensor, total_angle: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of a belief in rotating coordinates (mean, covariance), and of the total angle.

    The covariance is symmetric; so is the returned gradient.
    """
    grad_covariance = (grad_covariance + grad_covariance.mT) / 2
    grad_angle = torch.zeros(total_angle.shape, dtype=torch.float32, device=total_angle.device)
    grad_mean = _turn_backward(grad_mean, mean, total_angle, grad_angle, 1)
    grad_rows = _turn_backward(grad_covariance, covariance, total_angle, grad_angle, 0)
    return grad_mean, _turn_backward(grad_rows.mT, covariance, total_angle, grad_angle, 2), grad_angle


def _turn_backward(grad: Tensor, x: Tensor, total_angle: Tensor, grad_angle: Tensor, angles: int) -> Tensor:
    """Return the gradient of x, and add `angles` times that of the total angle to `grad_angle`."""
    sequences, heads, width, columns = grad.shape
    grad_x = torch.empty(grad.shape, dtype=grad.dtype, device=grad.device)
    options = {"PAIRS": width // 2, "COLUMNS": columns, "ROWS": 16, "BLOCK": 64, "ANGLES": angles, "num_warps": 4}
    Launch(_turn_rows_backward, (sequences * heads, -(-width // 32)), (
        grad, x, total_angle, grad_x, grad_angle, *grad.stride(), heads,
    ), options).run()  # fmt: skip
    return grad_x


def interleave(x: Tensor, dims: tuple[int, ...] = (-2, -1)) -> Tensor:
    """Make the members of pairs adjacent on some of the last two dimensions (-2 or -1)."""
    for dim in dims:
        x = x.unflatten(dim, (2, -1)).transpose(dim - 1, dim).flatten(dim - 1, dim)
    return x


def separate(x: Tensor, dims: tuple[int, ...] = (-2, -1)) -> Tensor:
    """Invert `interleave`."""
    for dim in dims:
        x = x.unflatten(dim, (-1, 2)).transpose(dim - 1, dim).flatten(dim - 1, dim)
    return x


def allocate_torques(grad_total: Tensor, angle: Tensor, segments: Segments | None) -> Tensor:
    """Return `exit_torques` of `belief_torques`, with those of final beliefs: the gradient of the total angles."""
    batch, length, heads, pairs = angle.shape
    cut = tile_sequences(batch, length, CHUNK, segments, angle)
    torques = torch.empty(cut.num_tiles, heads, pairs, dtype=torch.float32, device=angle.device)
    if not cut.packed:
        torques.unflatten(0, (batch, -1))[:, -1] = grad_total
        return torques
    first, counts = cut.sequence_table[:, 0], (cut.sequence_table[:, 2] + CHUNK - 1) // CHUNK
    # A sequence without tokens has no chunk: it writes the number after the last of all, which is not used.
    padded = torch.cat([torques, torques.new_empty(1, heads, pairs)])
    return padded.index_copy_(0, torch.where(counts > 0, first + counts - 1, len(torques)), grad_total)


def belief_torques(
    adjoint_cov_diag: Tensor,
    states: Tensor,
    adjoints: Tensor,
    cut: Tiling,
    mean_cut: Tiling,
    length: int,
    exit_torques: Tensor,
) -> None:
    """Compute the gradients of angles at the end of every chunk but the last of a sequence.

    They are the torques of the belief there: turning a pair of its rows is like turning all earlier tokens. Summing
    gradients over all later tokens instead would give the same, but accumulates rounding errors.

    Args:
        adjoint_cov_diag: `[chunks, G, 2, P]`; `[..., 1, :]` holds the sums of adjoint times covariance over the columns
            of a row and its partner, at the start of chunks.
        states, adjoints: `[tiles, G, K, V]`, flattened: memories at the start of tiles of the mean, and their adjoints
            at the end.
        cut, mean_cut: chunks, and tiles of the mean.
        length: tokens per batch row.
        exit_torques: output, `[chunks, G, K / 2]`.
    """
    heads, pairs = exit_torques.shape[1:]
    block = min(16, triton.next_power_of_2(pairs))
    values = states.numel() // (mean_cut.num_tiles * heads * 2 * pairs)
    options = {"PAIRS": pairs, "V": values, "P": adjoint_cov_diag.shape[3], "BLOCK": block, "COLUMNS": 64}
    options |= {"SIZE": mean_cut.size, "CHUNK": CHUNK, "PACKED": cut.packed, "num_warps": 4}
    Launch(_belief_torques, (cut.num_sequences, heads, -(-pairs // block)), (
        adjoint_cov_diag, states, adjoints, exit_torques, cut.sequence_table, mean_cut.sequence_table, length,
        cut.tiles, mean_cut.tiles, heads,
    ), options).run()  # fmt: skip
