"""What decays leave, at a later token of a chunk, of what an earlier one wrote: products of numbers between 0 and 1.

Between tokens s < t stands the boundary where the two halves of some block meet, for blocks of 2, 4, ... L tokens. The
decay from s to t is that from s to the boundary times that from there to t, so that all pairs of two halves are one
matrix product, and the next blocks' factors are products of these. Nothing is divided or subtracted, and no positive
number exponentiated: no decay is too strong. Gradients for log-decays are sums over the pairs that a token stands
between, gathered by the same halves.
"""

from __future__ import annotations

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
        while 1 << len(self.levels) < log_decay.shape[-2]:
            (since_early, since_late), (until_early, until_late) = (
                _halves(x, len(self.levels)) for x in (since, until)
            )
            self.levels.append((since_late, until_early))
            since = _joined(since_early, since_late * since_early[..., -1:, :])
            until = _joined(until_early * since_late[..., -1:, :], until_late)
        self.since, self.until, self.path = since, until, since[..., -1:, :].mT
        self.matrix = _between(since, self.levels) if log_decay.shape[-1] == 1 else None

    def products(self, x: Tensor, y: Tensor) -> Tensor:
        """`sum_k x_tk (decay of k from s to t) y_sk` for s <= t, else 0: `[..., L, K]` twice to `[..., L, L]`."""
        if self.matrix is not None:
            return (x @ y.mT) * self.matrix
        heads = torch.broadcast_shapes(x.shape[:-2], self.since.shape[:-2])
        out = x.new_zeros(*heads, x.shape[-2], x.shape[-2])
        out.diagonal(dim1=-2, dim2=-1).copy_((x * y).sum(-1))
        for level, (late, early) in enumerate(self.levels):
            rows, columns = _halves(x, level)[1] * late, _halves(y, level)[0] * early
            _corners(out, level).copy_(rows @ columns.mT)
        return out

    def products_backward(self, x: Tensor, y: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor, Logs]:
        """Gradients for x, y and the logarithms of the levels, from one `[..., L, L]` for `products`."""
        if self.matrix is not None:
            gradient = gradient * self.matrix
            pairs = gradient * (x @ y.mT)
            corners = [_corners(pairs, level) for level in range(len(self.levels))]
            logs = [(pair.sum(-1, keepdim=True), pair.sum(-2)[..., None]) for pair in corners]
            return gradient @ y, gradient.mT @ x, logs
        diagonal, logs = gradient.diagonal(dim1=-2, dim2=-1)[..., None], []
        to_x, to_y = diagonal * y, diagonal * x
        for level, (late, early) in enumerate(self.levels):
            corner = _corners(gradient, level)
            rows, columns = _halves(x, level)[1] * late, _halves(y, level)[0] * early
            to_rows, to_columns = corner @ columns, corner.mT @ rows
            _halves(to_x, level)[1].addcmul_(to_rows, late)
            _halves(to_y, level)[0].addcmul_(to_columns, early)
            logs.append((to_rows.mul_(rows), to_columns.mul_(columns)))
        return to_x, to_y, logs

    def backward(self, arriving: Tensor, leaving: Tensor, carried: Tensor, *levels: Logs) -> Tensor:
        """The gradient for log-decays, `[..., L, K or 1]`.

        Args:
            arriving, leaving: `[..., L, K]`, what was multiplied by `since`, or by `until`, times its gradient.
            carried: `[..., K, 1]`, what was multiplied by `path`, times its gradient.
            levels: from `products_backward`.
        """
        since, until, end = (
            x.sum_to_size(*x.shape[:-1], self.since.shape[-1]) for x in (arriving, leaving, carried.mT)
        )
        since, until = since.clone(), until.clone()
        since[..., -1:, :] += end
        for level in reversed(range(len(self.levels))):
            (since_early, since_late), until_early = _halves(since, level), _halves(until, level)[0]
            since_early[..., -1:, :] += since_late.sum(-2, keepdim=True)
            since_late[..., -1:, :] += until_early.sum(-2, keepdim=True)
            for logs in levels:
                since_late += logs[level][0]
                until_early += logs[level][1]
        return since


def _between(since: Tensor, levels: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Decays a head, from each earlier to each later token: `[..., L, L]`, 1 on the diagonal, 0 above."""
    matrix = torch.eye(since.shape[-2], dtype=since.dtype, device=since.device).repeat(*since.shape[:-2], 1, 1)
    for level, (late, early) in enumerate(levels):
        _corners(matrix, level).copy_(late * early.mT)
    return matrix


def _halves(x: Tensor, level: int) -> tuple[Tensor, Tensor]:
    """The earlier and the later halves of blocks of tokens: `[..., L, K]` to twice `[..., blocks, 2^level, K]`."""
    early, late = x.unflatten(-2, (-1, 2, 1 << level)).unbind(-3)
    return early, late


def _joined(early: Tensor, late: Tensor) -> Tensor:
    return torch.stack((early, late), -3).flatten(-4, -2)


def _corners(x: Tensor, level: int) -> Tensor:
    """A view of `[..., L, L]`, later halves of blocks by their earlier halves: `[..., blocks, 2^level, 2^level]`."""
    blocks = x.unflatten(-1, (-1, 2, 1 << level)).unflatten(-4, (-1, 2, 1 << level))
    return blocks.select(-5, 1).select(-2, 0).diagonal(dim1=-4, dim2=-2).movedim(-1, -3)
