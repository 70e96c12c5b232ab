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

from kalmix.ops._shared.decay_products import Decays, inner
from kalmix.ops._shared.triangular import lower


class Tokens(NamedTuple):
    """Tokens of R tiles of a head, in the belief's dtype, or adjoints. An absent one has noise 1 and is 0 else."""

    q: Tensor  # [R, L, K]
    k: Tensor  # [R, L, K]
    v: Tensor  # [R, L, V]
    obs_noise: Tensor  # [R, L]
    process_noise: Tensor  # [R, L]
    log_decay: Tensor | None  # [R, L], or [R, L, K or K / 2]
    angle: Tensor | None  # [R, L, K / 2]


class Outlook(NamedTuple):
    """R tiles seen from the beliefs before them, or adjoints of this."""

    queries: Tensor  # [R, L, K], A_{t:0}' q_t
    keys: Tensor  # [R, L, K], A_{t:0}' k_t
    decay: Tensor  # [R, K, 1], A_{L:0}
    seen: Tensor  # [R, L, L], covariance of what is seen, had the belief none; symmetric
    read: Tensor  # [R, L, L], of what is read with what was seen until then; lower triangular
    spread: Tensor  # [R, L, 1], variance of what is read
    left: Tensor  # [R, K, L], covariance of the state after the tile with what was seen
    noise: Tensor  # [R, K, K], of the state after the tile
    turn: Tensor | None  # [R, K / 2, 1], the angle of pairs after the tile


class Path(NamedTuple):
    """What both ways need of R tiles; pairs turned back."""

    k: Tensor  # [R, L, K]
    q: Tensor  # [R, L, K]
    decays: Decays
    square: Tensor  # [R, L, 1, 1 or K], the decay of a variance at each token
    shape: Tensor  # [R, L, 2, K], the blocks of noise 1; [1, 1] without turns
    noise: Tensor  # [R, L, 1 or 2, 1 or K], N_t
    warped: Tensor  # [R, L, K], N_t k_t


def look(tokens: Tokens, path: Path) -> Outlook:
    """All that can be said of R tiles at once, before their beliefs are known."""
    q, since = path.q, path.decays.since
    seen, read = path.decays.products((path.k, q), path.warped)
    count, _, width = q.shape
    return Outlook(
        queries=q * since,
        keys=path.k * since,
        decay=path.decays.path.expand(count, width, 1),
        seen=seen + torch.diagonal_scatter(seen, tokens.obs_noise, dim1=-2, dim2=-1).mT,
        read=read,
        spread=(_times(path.noise, q) * q).sum(-1, keepdim=True),
        left=(path.warped * path.decays.until).mT,
        noise=_matrix(path.noise[..., -1, :, :].expand(count, -1, width)),
        turn=None if tokens.angle is None else tokens.angle.sum(-2)[..., None],
    )


def look_back(tokens: Tokens, path: Path, to: Outlook, to_v: Tensor) -> Tokens:
    """The adjoint of `look` and of the path, beside that of the values."""
    k, q = path.k, path.q
    since, until, to_left = path.decays.since, path.decays.until, to.left.mT
    to_obs = to.seen.diagonal(dim1=-2, dim2=-1)
    to_pairs = lower(to.seen) + lower(to.seen, -1), to.read
    (to_k, to_q), to_warped, levels = path.decays.products_backward((k, q), path.warped, to_pairs)
    to_warped = torch.addcmul(to_warped, to_left, until)
    to_noise = to_warped[..., None, :] * _images(k, path.noise)
    to_noise += (to.spread * q)[..., None, :] * _images(q, path.noise)
    to_noise[..., -1, :, :] += _diagonals(to.noise, path.noise)
    to_process, to_squares = _gathered_back(path, to_noise)
    to_k = torch.addcmul(to_k + _times(path.noise, to_warped), since, to.keys)
    to_q = torch.addcmul(torch.addcmul(to_q, to.spread, _times(path.noise, q), value=2), since, to.queries)

    to_log_decay = to_angle = None
    if tokens.log_decay is not None:
        arriving = inner((to.keys, to.queries), (k, q)) * since
        leaving = to_left * path.warped * until
        to_log_decay = to_squares + path.decays.backward(arriving, leaving, to.decay * path.decays.path, levels)
        if tokens.log_decay.ndim == 2:
            to_log_decay = to_log_decay.squeeze(-1)
        elif tokens.angle is not None:
            seen, hidden = to_log_decay.chunk(2, -1)
            to_log_decay = seen + hidden
    if tokens.angle is not None and to.turn is not None:
        angle = tokens.angle.cumsum(-2)
        to_angle = _slope_of_shape(to_process * tokens.process_noise[..., None, None], angle)
        to_angle -= slope(to_q.mT, q.mT).mT + slope(to_k.mT, k.mT).mT
        to_angle = to_angle.flip(-2).cumsum(-2).flip(-2) + to.turn.mT
        to_q, to_k = (turn(x.mT, angle.mT).mT for x in (to_q, to_k))
    return Tokens(to_q, to_k, to_v, to_obs, (to_process * path.shape).sum((-1, -2)), to_log_decay, to_angle)


def turn(rows: Tensor, angle: Tensor) -> Tensor:
    """Every pair of rows of `[..., K, *]` turned by its angle, `[..., K / 2, *]`."""
    (seen, hidden), cos, sin = rows.chunk(2, -2), angle.cos(), angle.sin()
    return torch.cat([cos * seen - sin * hidden, sin * seen + cos * hidden], -2)


def slope(to: Tensor, turned: Tensor) -> Tensor:
    """The adjoint of the angle by which pairs of rows were turned, `[..., K / 2, *]`, from that of the turned rows."""
    (to_seen, to_hidden), (seen, hidden) = to.chunk(2, -2), turned.chunk(2, -2)
    return to_hidden * seen - to_seen * hidden


def follow(tokens: Tokens) -> Path:
    """The path of R tiles."""
    k, q, log_decay, shape = tokens.k, tokens.q, tokens.log_decay, tokens.q.new_ones(1, 1)
    if tokens.angle is not None:
        angle = tokens.angle.cumsum(-2)
        k, q, shape = turn(k.mT, -angle.mT).mT, turn(q.mT, -angle.mT).mT, _shape(angle)
    if log_decay is None:
        log_decay = torch.zeros_like(tokens.obs_noise)
    if log_decay.ndim == 2:
        log_decay = log_decay[..., None]
    elif log_decay.shape[-1] < k.shape[-1]:
        log_decay = log_decay.repeat(1, 1, 2)
    decays = Decays(log_decay)
    square = decays.each.square()[..., None, :]
    noise = _gathered(square, tokens.process_noise[..., None, None] * shape)
    return Path(k, q, decays, square, shape, noise, _times(noise, k))


def _gathered(square: Tensor, process: Tensor) -> Tensor:
    """The noise since the tile began, after every token."""
    sums = [process[:, 0].expand(torch.broadcast_shapes(process[:, 0].shape, square[:, 0].shape))]
    for t in range(1, process.shape[1]):
        sums.append(torch.addcmul(process[:, t], square[:, t], sums[-1]))
    return torch.stack(sums, 1)


def _gathered_back(path: Path, to_noise: Tensor) -> tuple[Tensor, Tensor]:
    """The adjoints of the noise at every token and of the log-decays of `square`, the latter `[R, L, 1 or K]`."""
    sums = [to_noise[:, -1]]
    for t in range(to_noise.shape[1] - 1, 0, -1):
        sums.append(torch.addcmul(to_noise[:, t - 1], path.square[:, t], sums[-1]))
    to_process = torch.stack(sums[::-1], 1)
    to_squares = torch.zeros_like(to_process)
    to_squares[:, 1:] = 2 * path.square[:, 1:] * path.noise[:, :-1] * to_process[:, 1:]
    return to_process, to_squares.sum_to_size(path.square.shape).squeeze(-2)


def _shape(angle: Tensor) -> Tensor:
    """The blocks of unit noise on observed rows, turned back by `[..., K / 2]`: `[..., 2, K]`."""
    cos, sin = angle.cos(), angle.sin()
    return torch.stack([torch.cat([cos * cos, sin * sin], -1), (-cos * sin).repeat(1, 1, 2)], -2)


def _slope_of_shape(to: Tensor, angle: Tensor) -> Tensor:
    """The adjoint of the angle in `_shape`."""
    (seen, cross), (hidden, same) = (x.unbind(-2) for x in to.chunk(2, -1))
    return (hidden - seen) * (2 * angle).sin() - (cross + same) * (2 * angle).cos()


def _images(x: Tensor, noise: Tensor) -> Tensor:
    """Rows, and where noise has blocks their partners: `[..., K]` to `[..., 1 or 2, K]`."""
    return x[..., None, :] if noise.shape[-2] == 1 else torch.stack([x, x.roll(x.shape[-1] // 2, -1)], -2)


def _times(noise: Tensor, x: Tensor) -> Tensor:
    """The product of noise, `[..., 1 or 2, K]`, and x, `[..., K]`."""
    return inner(noise.unbind(-2), _images(x, noise).unbind(-2))


def _matrix(noise: Tensor) -> Tensor:
    """Blocks `[..., 1 or 2, K]` as a matrix `[..., K, K]`."""
    whole = torch.diag_embed(noise[..., 0, :])
    if noise.shape[-2] == 2:
        whole = whole + torch.diag_embed(noise[..., 1, :]).roll(noise.shape[-1] // 2, -1)
    return whole


def _diagonals(matrix: Tensor, noise: Tensor) -> Tensor:
    """The adjoint of `_matrix`."""
    partners = matrix.roll(matrix.shape[-1] // 2, -1)
    return torch.stack([x.diagonal(dim1=-2, dim2=-1) for x in (matrix, partners)][: noise.shape[-2]], -2)
