"""Tile statistics that do not depend on the incoming belief, and their backward pass.

Let A_{t:s} be the product of the transitions after token s up to t, and N_t the process noise accumulated since the
tile began. Every covariance of a read-out or of the final state with an observation has two parts: one from the
incoming belief, through A_{t:0}, and one from the noise, through A_{t:s} N_s. This module computes the second.

For rotations, keys, queries and noise are rotated back to the beginning of the tile. Their noise consists of 2 x 2
blocks, stored as two diagonals: of a row with itself, and with its partner.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kalmix.ops._shared.decay_products import Decays, sum_of_products
from kalmix.ops._shared.triangular import lower_triangle


class Tokens(NamedTuple):
    """Signals of the tokens of R tiles of one head, in the dtype of the belief, or adjoints of them."""

    q: Tensor  # [R, L, K]
    k: Tensor  # [R, L, K]
    v: Tensor  # [R, L, V]
    obs_noise: Tensor  # [R, L]
    process_noise: Tensor  # [R, L]
    log_decay: Tensor | None  # [R, L], or [R, L, K or K / 2]
    angle: Tensor | None  # [R, L, K / 2]


class TileStatistics(NamedTuple):
    """Statistics of R tiles that do not depend on the incoming belief, or adjoints of them."""

    queries: Tensor  # [R, L, K], A_{t:0}' q_t
    keys: Tensor  # [R, L, K], A_{t:0}' k_t
    decay: Tensor  # [R, K, 1], A_{L:0}
    obs_cov: Tensor  # [R, L, L], covariance of the observations; symmetric
    readout_obs_cov: Tensor  # [R, L, L], of read-outs with earlier observations; lower triangular
    readout_var: Tensor  # [R, L, 1], variance of the read-outs
    state_obs_cov: Tensor  # [R, K, L], of the final state with the observations
    noise_cov: Tensor  # [R, K, K], of the final state
    rotation: Tensor | None  # [R, K / 2, 1], total angle of each pair


class TileTransitions(NamedTuple):
    """Decays and accumulated noise of R tiles, used in both passes; pairs are rotated back."""

    k: Tensor  # [R, L, K]
    q: Tensor  # [R, L, K]
    decays: Decays
    decay_squared: Tensor  # [R, L, 1, 1 or K], decay of a variance at each token
    noise_blocks: Tensor  # [R, L, 2, K], blocks of unit noise; [1, 1] without rotations
    accumulated_noise: Tensor  # [R, L, 1 or 2, 1 or K], N_t
    noise_keys: Tensor  # [R, L, K], N_t k_t


def tile_statistics(tokens: Tokens, transitions: TileTransitions) -> TileStatistics:
    """Compute the statistics of R tiles."""
    q, entry_decay = transitions.q, transitions.decays.from_start
    obs_cov, readout_obs_cov = transitions.decays.products((transitions.k, q), transitions.noise_keys)
    count, _, width = q.shape
    return TileStatistics(
        queries=q * entry_decay,
        keys=transitions.k * entry_decay,
        decay=transitions.decays.total.expand(count, width, 1),
        obs_cov=obs_cov + torch.diagonal_scatter(obs_cov, tokens.obs_noise, dim1=-2, dim2=-1).mT,
        readout_obs_cov=readout_obs_cov,
        readout_var=(_multiply_noise(transitions.accumulated_noise, q) * q).sum(-1, keepdim=True),
        state_obs_cov=(transitions.noise_keys * transitions.decays.to_end).mT,
        noise_cov=_noise_matrix(transitions.accumulated_noise[..., -1, :, :].expand(count, -1, width)),
        rotation=None if tokens.angle is None else tokens.angle.sum(-2)[..., None],
    )


def tile_statistics_backward(
    tokens: Tokens, transitions: TileTransitions, grad: TileStatistics, grad_v: Tensor
) -> Tokens:
    """Return the adjoints of the tokens from those of the statistics and of the values."""
    k, q = transitions.k, transitions.q
    entry_decay, exit_decay, grad_state_obs = (
        transitions.decays.from_start,
        transitions.decays.to_end,
        grad.state_obs_cov.mT,
    )
    grad_obs_noise = grad.obs_cov.diagonal(dim1=-2, dim2=-1)
    grad_pairs = lower_triangle(grad.obs_cov) + lower_triangle(grad.obs_cov, -1), grad.readout_obs_cov
    (grad_k, grad_q), grad_noise_keys, levels = transitions.decays.products_backward(
        (k, q), transitions.noise_keys, grad_pairs
    )
    grad_noise_keys = torch.addcmul(grad_noise_keys, grad_state_obs, exit_decay)
    grad_noise = grad_noise_keys[..., None, :] * _with_partners(k, transitions.accumulated_noise)
    grad_noise += (grad.readout_var * q)[..., None, :] * _with_partners(q, transitions.accumulated_noise)
    grad_noise[..., -1, :, :] += _noise_matrix_backward(grad.noise_cov, transitions.accumulated_noise)
    grad_process, grad_squares = _accumulate_noise_backward(transitions, grad_noise)
    grad_k = torch.addcmul(
        grad_k + _multiply_noise(transitions.accumulated_noise, grad_noise_keys), entry_decay, grad.keys
    )
    grad_q = torch.addcmul(
        torch.addcmul(grad_q, grad.readout_var, _multiply_noise(transitions.accumulated_noise, q), value=2),
        entry_decay,
        grad.queries,
    )

    grad_log_decay = grad_angle = None
    if tokens.log_decay is not None:
        entry_terms = sum_of_products((grad.keys, grad.queries), (k, q)) * entry_decay
        exit_terms = grad_state_obs * transitions.noise_keys * exit_decay
        grad_log_decay = grad_squares + transitions.decays.backward(
            entry_terms, exit_terms, grad.decay * transitions.decays.total, levels
        )
        if tokens.log_decay.ndim == 2:
            grad_log_decay = grad_log_decay.squeeze(-1)
        elif tokens.angle is not None:
            grad_observed, grad_hidden = grad_log_decay.chunk(2, -1)
            grad_log_decay = grad_observed + grad_hidden
    if tokens.angle is not None and grad.rotation is not None:
        angle = tokens.angle.cumsum(-2)
        grad_angle = _observed_noise_blocks_backward(grad_process * tokens.process_noise[..., None, None], angle)
        grad_angle -= rotation_angle_grad(grad_q.mT, q.mT).mT + rotation_angle_grad(grad_k.mT, k.mT).mT
        grad_angle = grad_angle.flip(-2).cumsum(-2).flip(-2) + grad.rotation.mT
        grad_q, grad_k = (rotate(x.mT, angle.mT).mT for x in (grad_q, grad_k))
    return Tokens(
        grad_q,
        grad_k,
        grad_v,
        grad_obs_noise,
        (grad_process * transitions.noise_blocks).sum((-1, -2)),
        grad_log_decay,
        grad_angle,
    )


def rotate(rows: Tensor, angle: Tensor) -> Tensor:
    """Rotate every pair of rows of `[..., K, *]` by its angle, `[..., K / 2, *]`."""
    (observed, hidden), cos, sin = rows.chunk(2, -2), angle.cos(), angle.sin()
    return torch.cat([cos * observed - sin * hidden, sin * observed + cos * hidden], -2)


def rotation_angle_grad(grad: Tensor, rotated: Tensor) -> Tensor:
    """Return the adjoint of the angles `[..., K / 2, *]` from the adjoint of the rotated rows."""
    (grad_observed, grad_hidden), (observed, hidden) = grad.chunk(2, -2), rotated.chunk(2, -2)
    return grad_hidden * observed - grad_observed * hidden


def tile_transitions(tokens: Tokens) -> TileTransitions:
    """Compute the decays and the accumulated noise of R tiles."""
    k, q, log_decay, noise_blocks = tokens.k, tokens.q, tokens.log_decay, tokens.q.new_ones(1, 1)
    if tokens.angle is not None:
        angle = tokens.angle.cumsum(-2)
        k, q, noise_blocks = rotate(k.mT, -angle.mT).mT, rotate(q.mT, -angle.mT).mT, _observed_noise_blocks(angle)
    if log_decay is None:
        log_decay = torch.zeros_like(tokens.obs_noise)
    if log_decay.ndim == 2:
        log_decay = log_decay[..., None]
    elif log_decay.shape[-1] < k.shape[-1]:
        log_decay = log_decay.repeat(1, 1, 2)
    decays = Decays(log_decay)
    decay_squared = decays.per_token.square()[..., None, :]
    accumulated_noise = _accumulate_noise(decay_squared, tokens.process_noise[..., None, None] * noise_blocks)
    return TileTransitions(
        k, q, decays, decay_squared, noise_blocks, accumulated_noise, _multiply_noise(accumulated_noise, k)
    )


def _accumulate_noise(decay_squared: Tensor, process: Tensor) -> Tensor:
    """Return the noise accumulated since the tile began, after every token."""
    sums = [process[:, 0].expand(torch.broadcast_shapes(process[:, 0].shape, decay_squared[:, 0].shape))]
    for t in range(1, process.shape[1]):
        sums.append(torch.addcmul(process[:, t], decay_squared[:, t], sums[-1]))
    return torch.stack(sums, 1)


def _accumulate_noise_backward(transitions: TileTransitions, grad_noise: Tensor) -> tuple[Tensor, Tensor]:
    """Return the adjoints of the noise of every token, and of its log-decay, `[R, L, 1 or K]`."""
    sums = [grad_noise[:, -1]]
    for t in range(grad_noise.shape[1] - 1, 0, -1):
        sums.append(torch.addcmul(grad_noise[:, t - 1], transitions.decay_squared[:, t], sums[-1]))
    grad_process = torch.stack(sums[::-1], 1)
    grad_squares = torch.zeros_like(grad_process)
    grad_squares[:, 1:] = (
        2 * transitions.decay_squared[:, 1:] * transitions.accumulated_noise[:, :-1] * grad_process[:, 1:]
    )
    return grad_process, grad_squares.sum_to_size(transitions.decay_squared.shape).squeeze(-2)


def _observed_noise_blocks(angle: Tensor) -> Tensor:
    """Return the blocks of unit noise on observed rows, rotated back by `[..., K / 2]`: `[..., 2, K]`."""
    cos, sin = angle.cos(), angle.sin()
    return torch.stack([torch.cat([cos * cos, sin * sin], -1), (-cos * sin).repeat(1, 1, 2)], -2)


def _observed_noise_blocks_backward(grad: Tensor, angle: Tensor) -> Tensor:
    """Return the adjoint of the angles of `_observed_noise_blocks`."""
    (observed, cross), (hidden, cross_hidden) = (x.unbind(-2) for x in grad.chunk(2, -1))
    return (hidden - observed) * (2 * angle).sin() - (cross + cross_hidden) * (2 * angle).cos()


def _with_partners(x: Tensor, noise: Tensor) -> Tensor:
    """Return rows and, if noise has blocks, their partners: `[..., K]` to `[..., 1 or 2, K]`."""
    return x[..., None, :] if noise.shape[-2] == 1 else torch.stack([x, x.roll(x.shape[-1] // 2, -1)], -2)


def _multiply_noise(noise: Tensor, x: Tensor) -> Tensor:
    """Return the product of noise `[..., 1 or 2, K]` and vectors `[..., K]`."""
    return sum_of_products(noise.unbind(-2), _with_partners(x, noise).unbind(-2))


def _noise_matrix(noise: Tensor) -> Tensor:
    """Convert blocks `[..., 1 or 2, K]` to a matrix `[..., K, K]`."""
    matrix = torch.diag_embed(noise[..., 0, :])
    if noise.shape[-2] == 2:
        matrix = matrix + torch.diag_embed(noise[..., 1, :]).roll(noise.shape[-1] // 2, -1)
    return matrix


def _noise_matrix_backward(matrix: Tensor, noise: Tensor) -> Tensor:
    """Return the adjoint of the blocks of `_noise_matrix`."""
    partners = matrix.roll(matrix.shape[-1] // 2, -1)
    return torch.stack([x.diagonal(dim1=-2, dim2=-1) for x in (matrix, partners)][: noise.shape[-2]], -2)
