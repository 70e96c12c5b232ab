"""What a tile of tokens does to a belief that is not known yet, and the way back to the tokens.

With A_{t:s} the product of the transitions after token s up to t, and N_t the noise that has come in since the tile
began, every covariance of what is read or left with what is seen has a part from the belief before the tile, by
A_{t:0}, and a part from the noise, by A_{t:s} N_s. Pairs of rows that turn are looked at from the tile's beginning:
their keys, queries and noise are turned back. The 2 x 2 blocks of that noise are kept as two diagonals, of a row with
itself and with its partner.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kalmix.ops._shared.decay_products import Decays, sum_of_products
from kalmix.ops._shared.triangular import lower_triangle


class Tokens(NamedTuple):
    """Tokens of R tiles of a head, in the belief's dtype, or adjoints. An absent one has noise 1 and is 0 else."""

    q: Tensor  # [R, L, K]
    k: Tensor  # [R, L, K]
    v: Tensor  # [R, L, V]
    obs_noise: Tensor  # [R, L]
    process_noise: Tensor  # [R, L]
    log_decay: Tensor | None  # [R, L], or [R, L, K or K / 2]
    angle: Tensor | None  # [R, L, K / 2]


class TileStatistics(NamedTuple):
    """R tiles seen from the beliefs before them, or adjoints of this."""

    queries: Tensor  # [R, L, K], A_{t:0}' q_t
    keys: Tensor  # [R, L, K], A_{t:0}' k_t
    decay: Tensor  # [R, K, 1], A_{L:0}
    obs_cov: Tensor  # [R, L, L], covariance of what is seen, had the belief none; symmetric
    readout_obs_cov: Tensor  # [R, L, L], of what is read with what was seen until then; lower triangular
    readout_var: Tensor  # [R, L, 1], variance of what is read
    state_obs_cov: Tensor  # [R, K, L], covariance of the state after the tile with what was seen
    noise_cov: Tensor  # [R, K, K], of the state after the tile
    rotation: Tensor | None  # [R, K / 2, 1], the angle of pairs after the tile


class TileTransitions(NamedTuple):
    """What both ways need of R tiles; pairs turned back."""

    k: Tensor  # [R, L, K]
    q: Tensor  # [R, L, K]
    decays: Decays
    decay_squared: Tensor  # [R, L, 1, 1 or K], the decay of a variance at each token
    noise_blocks: Tensor  # [R, L, 2, K], the blocks of noise 1; [1, 1] without turns
    accumulated_noise: Tensor  # [R, L, 1 or 2, 1 or K], N_t
    noise_keys: Tensor  # [R, L, K], N_t k_t


def tile_statistics(tokens: Tokens, transitions: TileTransitions) -> TileStatistics:
    """All that can be said of R tiles at once, before their beliefs are known."""
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
    """The adjoint of `look` and of the path, beside that of the values."""
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
    """Every pair of rows of `[..., K, *]` turned by its angle, `[..., K / 2, *]`."""
    (observed, hidden), cos, sin = rows.chunk(2, -2), angle.cos(), angle.sin()
    return torch.cat([cos * observed - sin * hidden, sin * observed + cos * hidden], -2)


def rotation_angle_grad(grad: Tensor, rotated: Tensor) -> Tensor:
    """The adjoint of the angle by which pairs of rows were turned, `[..., K / 2, *]`, from that of the turned rows."""
    (grad_observed, grad_hidden), (observed, hidden) = grad.chunk(2, -2), rotated.chunk(2, -2)
    return grad_hidden * observed - grad_observed * hidden


def tile_transitions(tokens: Tokens) -> TileTransitions:
    """The path of R tiles."""
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
    """The noise since the tile began, after every token."""
    sums = [process[:, 0].expand(torch.broadcast_shapes(process[:, 0].shape, decay_squared[:, 0].shape))]
    for t in range(1, process.shape[1]):
        sums.append(torch.addcmul(process[:, t], decay_squared[:, t], sums[-1]))
    return torch.stack(sums, 1)


def _accumulate_noise_backward(transitions: TileTransitions, grad_noise: Tensor) -> tuple[Tensor, Tensor]:
    """The adjoints of the noise at every token and of the log-decays of `square`, the latter `[R, L, 1 or K]`."""
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
    """The blocks of unit noise on observed rows, turned back by `[..., K / 2]`: `[..., 2, K]`."""
    cos, sin = angle.cos(), angle.sin()
    return torch.stack([torch.cat([cos * cos, sin * sin], -1), (-cos * sin).repeat(1, 1, 2)], -2)


def _observed_noise_blocks_backward(grad: Tensor, angle: Tensor) -> Tensor:
    """The adjoint of the angle in `_shape`."""
    (observed, cross), (hidden, cross_hidden) = (x.unbind(-2) for x in grad.chunk(2, -1))
    return (hidden - observed) * (2 * angle).sin() - (cross + cross_hidden) * (2 * angle).cos()


def _with_partners(x: Tensor, noise: Tensor) -> Tensor:
    """Rows, and where noise has blocks their partners: `[..., K]` to `[..., 1 or 2, K]`."""
    return x[..., None, :] if noise.shape[-2] == 1 else torch.stack([x, x.roll(x.shape[-1] // 2, -1)], -2)


def _multiply_noise(noise: Tensor, x: Tensor) -> Tensor:
    """The product of noise, `[..., 1 or 2, K]`, and x, `[..., K]`."""
    return sum_of_products(noise.unbind(-2), _with_partners(x, noise).unbind(-2))


def _noise_matrix(noise: Tensor) -> Tensor:
    """Blocks `[..., 1 or 2, K]` as a matrix `[..., K, K]`."""
    matrix = torch.diag_embed(noise[..., 0, :])
    if noise.shape[-2] == 2:
        matrix = matrix + torch.diag_embed(noise[..., 1, :]).roll(noise.shape[-1] // 2, -1)
    return matrix


def _noise_matrix_backward(matrix: Tensor, noise: Tensor) -> Tensor:
    """The adjoint of `_matrix`."""
    partners = matrix.roll(matrix.shape[-1] // 2, -1)
    return torch.stack([x.diagonal(dim1=-2, dim2=-1) for x in (matrix, partners)][: noise.shape[-2]], -2)
