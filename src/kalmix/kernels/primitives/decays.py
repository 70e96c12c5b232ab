"""What decays leave, at a later token of a chunk, of what an earlier one wrote: products of numbers between 0 and 1.

Between tokens s < t stands the boundary where the two halves of some block meet, for blocks of 2, 4, ... L tokens. The
decay from s to t is that from s to the boundary times that from there to t, so that all pairs of two halves are one
matrix product, and the next blocks' factors are products of these. Nothing is divided or subtracted, and no positive
number exponentiated: no decay is too strong. Gradients for log-decays are sums over the pairs that a token stands
between, gathered by the same halves.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

Logs = list[tuple[Tensor, Tensor]]  # gradients for the logarithms of `Decays.levels`


class Decays:
    """Decays inside chunks of L tokens (a power of two), given their logarithms `[..., L, K]`, or `[..., L, 1]` a head.

    Attributes:
        since: `[..., L, K or 1]`, from before the chunk to after each token's own decay.
        until: `[..., L, K or 1]`, from each token (its own decay excluded) to the end of the chunk.
        path: `[..., K or 1, 1]`, through the whole chunk.
        levels: `since` of the later and `until` of the earlier half of every block of 2, 4, ..., L tokens.
    """

    def __init__(self, log_decay: Tensor) -> None:
        since, until = log_decay.exp(), torch.ones_like(log_decay)
        self.levels: list[tuple[Tensor, Tensor]] = []
        for level in range(log_decay.shape[-2].bit_length() - 1):
            late, early = _half(since, level, 1), _half(until, level, 0)
            self.levels.append((late, early))
            first, second = _half(since, level, 0), _half(until, level, 1)
            since = _joined(first, late * first[..., -1:, :])
            until = _joined(early * late[..., -1:, :], second)
        self.since, self.until, self.path = since, until, since[..., -1:, :].mT
        self.matrix = _between(since, self.levels) if log_decay.shape[-1] == 1 else None

    def products(self, x: Tensor, y: Tensor) -> Tensor:
        """`sum_k x_trk (decay of k from s to t) y_sk` for s <= t, else 0: `[..., L, R, L]`.

        Args:
            x: `[..., L, R, K]`, R rows a token.  y: `[..., L, K]`.
        """
        if self.matrix is not None:
            return paired(x, y) * self.matrix[..., None, :]
        diagonal = (x * y[..., None, :]).sum(-1)
        heads = torch.broadcast_shapes(diagonal.shape[:-2], self.since.shape[:-2])
        out = diagonal.new_zeros(*heads, *diagonal.shape[-2:], diagonal.shape[-2])
        out.diagonal(dim1=-3, dim2=-1).copy_(diagonal.mT)
        for level, (rows, columns) in enumerate(self._facing(x, y)):
            _corners(out, level).copy_(paired(rows, columns))
        return out

    def products_backward(self, x: Tensor, y: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor, Logs]:
        """Gradients for x, y and the logarithms of the levels, from one `[..., L, R, L]` for `products`."""
        if self.matrix is not None:
            gradient = gradient * self.matrix[..., None, :]
            pairs = (gradient * paired(x, y)).sum(-2)
            corners = [_corners(pairs[..., None, :], level) for level in range(len(self.levels))]
            logs = [(corner.sum(-1), corner.sum((-3, -2))[..., None]) for corner in corners]
            return *_paired_backward(x, y, gradient), logs
        diagonal = gradient.diagonal(dim1=-3, dim2=-1).mT[..., None]
        to_x, to_y, logs = diagonal * y[..., None, :], (diagonal * x).sum(-2), []
        for level, (rows, columns) in enumerate(self._facing(x, y)):
            late, early = self.levels[level]
            to_rows, to_columns = _paired_backward(rows, columns, _corners(gradient, level))
            _rows_half(to_x, level, 1).addcmul_(to_rows, late[..., None, :])
            _half(to_y, level, 0).addcmul_(to_columns, early)
            logs.append(((to_rows * rows).sum(-2), to_columns * columns))
        return to_x, to_y, logs

    def _facing(self, x: Tensor, y: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Of every level the later halves of x and the earlier ones of y, decayed to the boundary between them."""
        for level, (late, early) in enumerate(self.levels):
            yield _rows_half(x, level, 1) * late[..., None, :], _half(y, level, 0) * early

    def backward(self, arriving: Tensor, leaving: Tensor, carried: Tensor, levels: Logs) -> Tensor:
        """The gradient for log-decays, `[..., L, K or 1]`.

        Args:
            arriving, leaving: `[..., L, K]`, what was multiplied by `since`, or by `until`, times its gradient.
            carried: `[..., K, 1]`, what was multiplied by `path`, times its gradient.
            levels: from `products_backward`.
        """
        width = self.since.shape[-1]
        since, until, end = (x.sum_to_size(*x.shape[:-1], width) for x in (arriving, leaving, carried.mT))
        since, until = since.clone(), until.clone()
        since[..., -1:, :] += end
        for level, (to_late, to_early) in reversed(list(enumerate(levels))):
            late, early = _half(since, level, 1), _half(until, level, 0)
            _half(since, level, 0)[..., -1:, :] += late.sum(-2, keepdim=True)
            late[..., -1:, :] += early.sum(-2, keepdim=True)
            late += to_late
            early += to_early
        return since


def _between(since: Tensor, levels: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Decays a head, from each earlier to each later token: `[..., L, L]`, 1 on the diagonal, 0 above."""
    matrix = torch.eye(since.shape[-2], dtype=since.dtype, device=since.device).repeat(*since.shape[:-2], 1, 1)
    for level, (late, early) in enumerate(levels):
        _corners(matrix[..., None, :], level).copy_((late * early.mT)[..., None, :])
    return matrix


def _half(x: Tensor, level: int, which: int) -> Tensor:
    """A view of the earlier (0) or later (1) halves of blocks: `[..., L, K]` to `[..., blocks, 2^level, K]`."""
    return x.unflatten(-2, (-1, 2, 1 << level)).select(-3, which)


def _rows_half(x: Tensor, level: int, which: int) -> Tensor:
    """As `_half`, of several rows a token: `[..., L, R, K]` to `[..., blocks, 2^level, R, K]`."""
    return x.unflatten(-3, (-1, 2, 1 << level)).select(-4, which)


def paired(x: Tensor, y: Tensor) -> Tensor:
    """`[..., L, R, K]` by `[..., S, K]`, `[..., L, R, S]`."""
    return (x.flatten(-3, -2) @ y.mT).unflatten(-2, x.shape[-3:-1])


def _paired_backward(x: Tensor, y: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
    """The adjoints of x and y in `paired`."""
    rows = gradient.flatten(-3, -2)
    return (rows @ y).unflatten(-2, x.shape[-3:-1]), rows.mT @ x.flatten(-3, -2)


def _joined(early: Tensor, late: Tensor) -> Tensor:
    return torch.stack((early, late), -3).flatten(-4, -2)


def _corners(x: Tensor, level: int) -> Tensor:
    """A view of `[..., L, R, L]`, later halves of blocks by their earlier: `[..., blocks, 2^level, R, 2^level]`."""
    blocks = x.unflatten(-1, (-1, 2, 1 << level)).unflatten(-5, (-1, 2, 1 << level))
    return blocks.select(-6, 1).select(-2, 0).diagonal(dim1=-5, dim2=-2).movedim(-1, -4)
