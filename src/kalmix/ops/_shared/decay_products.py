"""Products of decays between the tokens of a chunk, computed from numbers between 0 and 1 only.

For a chunk of L tokens, consider aligned groups of 2, 4, ..., L tokens (the levels). Two tokens s < t lie in the two
halves of exactly one group, and the decay from s to t is the decay from s to the middle of the group times the decay
from there to t. One matrix product per level then serves all pairs in opposite halves, and the factors of a level are
products of those of the level below. Nothing is divided or subtracted and no positive number is exponentiated, so
arbitrarily strong decays are safe. The gradient of a log-decay, a sum over the pairs on either side of its token, is
accumulated over the same halves.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

LevelGrads = list[tuple[Tensor, Tensor]]  # gradients of the logarithms of `Decays.levels`


class Decays:
    """Decays between the tokens of chunks.

    Args:
        log_decay: `[..., L, K]` (per key) or `[..., L, 1]` (per head), with L a power of two.

    Attributes:
        per_token: `[..., L, K or 1]`, decay of each token.
        from_start: `[..., L, K or 1]`, decay from the start of the chunk through each token.
        to_end: `[..., L, K or 1]`, decay from each token (excluding its own) through the end of the chunk.
        total: `[..., K or 1, 1]`, decay of the whole chunk.
        levels: for groups of 2, 4, ..., L tokens, `from_start` of the later and `to_end` of the earlier half.
        pairwise: `[..., L, L]`, decay from token s (column) to token t (row) if per head; otherwise `None`.
    """

    def __init__(self, log_decay: Tensor) -> None:
        self.per_token = from_start = log_decay.exp()
        to_end = torch.ones_like(from_start)
        self.levels: list[tuple[Tensor, Tensor]] = []
        for level in range(log_decay.shape[-2].bit_length() - 1):
            late, early = _half(from_start, level, 1), _half(to_end, level, 0)
            self.levels.append((late, early))
            first, second = _half(from_start, level, 0), _half(to_end, level, 1)
            from_start = _join_halves(first, late * first[..., -1:, :])
            to_end = _join_halves(early * late[..., -1:, :], second)
        self.from_start, self.to_end, self.total = from_start, to_end, from_start[..., -1:, :].mT
        self.pairwise = _pairwise_decays(from_start, self.levels) if log_decay.shape[-1] == 1 else None

    def products(self, xs: Sequence[Tensor], y: Tensor) -> list[Tensor]:
        """Compute `sum_k x_tk (decay of k from s to t) y_sk` for s <= t, else 0.

        Args:
            xs: tensors `[..., L, K]`.
            y: `[..., L, K]`.

        Returns:
            One `[..., L, L]` per x, with row t and column s.
        """
        if self.pairwise is not None:
            return [(x @ y.mT) * self.pairwise for x in xs]
        diagonals = [(x * y).sum(-1) for x in xs]
        heads = torch.broadcast_shapes(diagonals[0].shape[:-1], self.from_start.shape[:-2])
        results = [torch.diag_embed(x.expand(*heads, -1)) for x in diagonals]
        for level, (rows, columns) in enumerate(self._opposite_halves(xs, y)):
            blocks = (torch.cat(rows, -2) @ columns.mT).split(1 << level, -2)
            for result, block in zip(results, blocks, strict=True):
                _off_diagonal_blocks(result, level).copy_(block)
        return results

    def products_backward(
        self, xs: Sequence[Tensor], y: Tensor, gradients: Sequence[Tensor]
    ) -> tuple[list[Tensor], Tensor, LevelGrads]:
        """Compute gradients of `xs`, `y` and the logarithms of `levels` from those of `products`."""
        if self.pairwise is not None:
            gradients = [gradient * self.pairwise for gradient in gradients]
            pairs = sum_of_products(gradients, [x @ y.mT for x in xs])
            blocks = [_off_diagonal_blocks(pairs, level) for level in range(len(self.levels))]
            level_grads = [(block.sum(-1, keepdim=True), block.sum(-2)[..., None]) for block in blocks]
            grad_y = torch.cat(list(gradients), -2).mT @ torch.cat(list(xs), -2)
            return [gradient @ y for gradient in gradients], grad_y, level_grads
        diagonals = [gradient.diagonal(dim1=-2, dim2=-1)[..., None] for gradient in gradients]
        grad_xs = [diagonal * y for diagonal in diagonals]
        grad_y, level_grads = sum_of_products(diagonals, xs), []
        for level, (rows, columns) in enumerate(self._opposite_halves(xs, y)):
            late, early = self.levels[level]
            blocks = torch.cat([_off_diagonal_blocks(gradient, level) for gradient in gradients], -2)
            grad_rows = _matmul(blocks, columns).split(1 << level, -2)
            grad_columns = _matmul(blocks.mT, torch.cat(rows, -2))
            for grad_x, x in zip(grad_xs, grad_rows, strict=True):
                _half(grad_x, level, 1).addcmul_(x, late)
            _half(grad_y, level, 0).addcmul_(grad_columns, early)
            level_grads.append((sum_of_products(grad_rows, rows), grad_columns * columns))
        return grad_xs, grad_y, level_grads

    def _opposite_halves(self, xs: Sequence[Tensor], y: Tensor) -> Iterator[tuple[list[Tensor], Tensor]]:
        """Yield for every level the later halves of xs and the earlier halves of y, decayed to the middle."""
        for level, (late, early) in enumerate(self.levels):
            yield [_half(x, level, 1) * late for x in xs], _half(y, level, 0) * early

    def backward(self, from_start: Tensor, to_end: Tensor, total: Tensor, level_grads: LevelGrads) -> Tensor:
        """Compute the gradient of the log-decays, `[..., L, K or 1]`.

        Args:
            from_start, to_end: `[..., L, K]`, the gradient of the logarithm of the attribute of that name.
            total: `[..., K, 1]`, the gradient of the logarithm of `total`.
            level_grads: from `products_backward`.
        """
        width = self.from_start.shape[-1]
        late_sum, early_sum, end = (x.sum_to_size(*x.shape[:-1], width) for x in (from_start, to_end, total.mT))
        late_sum, early_sum = late_sum.clone(), early_sum.clone()
        late_sum[..., -1:, :] += end
        for level, (grad_late, grad_early) in reversed(list(enumerate(level_grads))):
            late, early = _half(late_sum, level, 1), _half(early_sum, level, 0)
            _half(late_sum, level, 0)[..., -1:, :] += late.sum(-2, keepdim=True)
            late[..., -1:, :] += early.sum(-2, keepdim=True)
            late += grad_late
            early += grad_early
        return late_sum


def _pairwise_decays(from_start: Tensor, levels: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Return the decays per head from each earlier to each later token, `[..., L, L]`: 1 on the diagonal, 0 above."""
    eye = torch.eye(from_start.shape[-2], dtype=from_start.dtype, device=from_start.device)
    matrix = eye.repeat(*from_start.shape[:-2], 1, 1)
    for level, (late, early) in enumerate(levels):
        _off_diagonal_blocks(matrix, level).copy_(late * early.mT)
    return matrix


def _half(x: Tensor, level: int, index: int) -> Tensor:
    """Return a view of the earlier (0) or later (1) halves of groups: `[..., L, K]` to `[..., groups, 2^level, K]`."""
    return x.unflatten(-2, (-1, 2, 1 << level)).select(-3, index)


def sum_of_products(xs: Sequence[Tensor], ys: Sequence[Tensor]) -> Tensor:
    """Return the sum of the elementwise products x y."""
    result = xs[0] * ys[0]
    for x, y in zip(xs[1:], ys[1:], strict=True):
        result = torch.addcmul(result, x, y)
    return result


def _matmul(x: Tensor, y: Tensor) -> Tensor:
    """Compute a matrix product; for tiny matrices as a sum of outer products, which is faster on a CPU."""
    if max(x.shape[-2:]) > 4:
        return x @ y
    return sum_of_products(x.split(1, -1), y.split(1, -2))


def _join_halves(early: Tensor, late: Tensor) -> Tensor:
    return torch.stack((early, late), -3).flatten(-4, -2)


def _off_diagonal_blocks(x: Tensor, level: int) -> Tensor:
    """Return a view of `[..., L, L]`: the blocks `[..., groups, 2^level, 2^level]` of later by earlier halves."""
    blocks = x.unflatten(-1, (-1, 2, 1 << level)).unflatten(-4, (-1, 2, 1 << level))
    return blocks.select(-5, 1).select(-2, 0).diagonal(dim1=-4, dim2=-2).movedim(-1, -3)
