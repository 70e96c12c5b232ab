"""What decays leave, at a later token of a chunk, of what an earlier one wrote: products of numbers between 0 and 1.

Between tokens s < t stands the boundary where the two halves of some block meet, for blocks of 2, 4, ... L tokens. The
decay from s to t is that from s to the boundary times that from there to t, so that all pairs of two halves are one
matrix product, and the next blocks' factors are products of these. Nothing is divided or subtracted, and no positive
number exponentiated: no decay is too strong. Gradients for log-decays are sums over the pairs that a token stands
between, gathered by the same halves.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

Logs = list[tuple[Tensor, Tensor]]  # gradients for the logarithms of `Decays.levels`


class Decays:
    """Decays inside chunks of L tokens (a power of two), given their logarithms `[..., L, K]`, or `[..., L, 1]` a head.

    Attributes:
        each: `[..., L, K or 1]`, of each token.
        since: `[..., L, K or 1]`, from before the chunk to after each token's own decay.
        until: `[..., L, K or 1]`, from each token (its own decay excluded) to the end of the chunk.
        path: `[..., K or 1, 1]`, through the whole chunk.
        levels: `since` of the later and `until` of the earlier half of every block of 2, 4, ..., L tokens.
    """

    def __init__(self, log_decay: Tensor) -> None:
        self.each = since = log_decay.exp()
        until = torch.ones_like(since)
        self.levels: list[tuple[Tensor, Tensor]] = []
        for level in range(log_decay.shape[-2].bit_length() - 1):
            late, early = _half(since, level, 1), _half(until, level, 0)
            self.levels.append((late, early))
            first, second = _half(since, level, 0), _half(until, level, 1)
            since = _joined(first, late * first[..., -1:, :])
            until = _joined(early * late[..., -1:, :], second)
        self.since, self.until, self.path = since, until, since[..., -1:, :].mT
        self.matrix = _between(since, self.levels) if log_decay.shape[-1] == 1 else None

    def products(self, xs: Sequence[Tensor], y: Tensor) -> list[Tensor]:
        """`sum_k x_tk (decay of k from s to t) y_sk` for s <= t, else 0: `[..., L, K]` to `[..., L, L]`, of each x."""
        if self.matrix is not None:
            return [(x @ y.mT) * self.matrix for x in xs]
        diagonals = [(x * y).sum(-1) for x in xs]
        heads = torch.broadcast_shapes(diagonals[0].shape[:-1], self.since.shape[:-2])
        results = [torch.diag_embed(x.expand(*heads, -1)) for x in diagonals]
        for level, (rows, columns) in enumerate(self._facing(xs, y)):
            corners = (torch.cat(rows, -2) @ columns.mT).split(1 << level, -2)
            for onto, corner in zip(results, corners, strict=True):
                _corners(onto, level).copy_(corner)
        return results

    def products_backward(
        self, xs: Sequence[Tensor], y: Tensor, gradients: Sequence[Tensor]
    ) -> tuple[list[Tensor], Tensor, Logs]:
        """Gradients for xs, y and the logarithms of the levels, from those for `products`."""
        if self.matrix is not None:
            gradients = [gradient * self.matrix for gradient in gradients]
            pairs = inner(gradients, [x @ y.mT for x in xs])
            corners = [_corners(pairs, level) for level in range(len(self.levels))]
            logs = [(corner.sum(-1, keepdim=True), corner.sum(-2)[..., None]) for corner in corners]
            to_y = torch.cat(list(gradients), -2).mT @ torch.cat(list(xs), -2)
            return [gradient @ y for gradient in gradients], to_y, logs
        diagonals = [gradient.diagonal(dim1=-2, dim2=-1)[..., None] for gradient in gradients]
        to_xs = [diagonal * y for diagonal in diagonals]
        to_y, logs = inner(diagonals, xs), []
        for level, (rows, columns) in enumerate(self._facing(xs, y)):
            late, early = self.levels[level]
            corners = torch.cat([_corners(gradient, level) for gradient in gradients], -2)
            to_rows = _times(corners, columns).split(1 << level, -2)
            to_columns = _times(corners.mT, torch.cat(rows, -2))
            for to_x, x in zip(to_xs, to_rows, strict=True):
                _half(to_x, level, 1).addcmul_(x, late)
            _half(to_y, level, 0).addcmul_(to_columns, early)
            logs.append((inner(to_rows, rows), to_columns * columns))
        return to_xs, to_y, logs

    def _facing(self, xs: Sequence[Tensor], y: Tensor) -> Iterator[tuple[list[Tensor], Tensor]]:
        """Of every level the later halves of xs and the earlier ones of y, decayed to the boundary between them."""
        for level, (late, early) in enumerate(self.levels):
            yield [_half(x, level, 1) * late for x in xs], _half(y, level, 0) * early

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
        _corners(matrix, level).copy_(late * early.mT)
    return matrix


def _half(x: Tensor, level: int, which: int) -> Tensor:
    """A view of the earlier (0) or later (1) halves of blocks: `[..., L, K]` to `[..., blocks, 2^level, K]`."""
    return x.unflatten(-2, (-1, 2, 1 << level)).select(-3, which)


def inner(xs: Sequence[Tensor], ys: Sequence[Tensor]) -> Tensor:
    """The sum of the products x y."""
    result = xs[0] * ys[0]
    for x, y in zip(xs[1:], ys[1:], strict=True):
        result = torch.addcmul(result, x, y)
    return result


def _times(x: Tensor, y: Tensor) -> Tensor:
    """A matrix product; by small matrices a sum of outer products, which a CPU makes sooner."""
    if max(x.shape[-2:]) > 4:
        return x @ y
    return inner(x.split(1, -1), y.split(1, -2))


def _joined(early: Tensor, late: Tensor) -> Tensor:
    return torch.stack((early, late), -3).flatten(-4, -2)


def _corners(x: Tensor, level: int) -> Tensor:
    """A view of `[..., L, L]`, later halves of blocks by their earlier halves: `[..., blocks, 2^level, 2^level]`."""
    blocks = x.unflatten(-1, (-1, 2, 1 << level)).unflatten(-4, (-1, 2, 1 << level))
    return blocks.select(-5, 1).select(-2, 0).diagonal(dim1=-4, dim2=-2).movedim(-1, -3)
