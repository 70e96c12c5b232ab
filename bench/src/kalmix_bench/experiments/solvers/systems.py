"""Normal equations of every token, stored in chunks as in kernels, never as T matrices."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from kalmix_bench.experiments.solvers.tokens import Tokens

CHUNK = 64  # tokens per chunk, as in the Triton kernels


class Arithmetic(NamedTuple):
    """Precision of an iteration.

    Attributes:
        dtype: dtype of vectors, sums and products.
        products: round operands of products with H to bfloat16 and sum in `dtype`, as tensor cores do.
        vectors: also round every vector that the iteration stores.
    """

    dtype: torch.dtype
    products: bool = False
    vectors: bool = False

    def round_operand(self, x: Tensor) -> Tensor:
        return _rounded(x) if self.products else x

    def round_vector(self, x: Tensor) -> Tensor:
        return _rounded(x) if self.vectors else x


ARITHMETICS = {
    "float64": Arithmetic(torch.float64),
    "float32": Arithmetic(torch.float32),
    "bfloat16 products": Arithmetic(torch.float32, products=True),
    "bfloat16 throughout": Arithmetic(torch.float32, products=True, vectors=True),
}


def _rounded(x: Tensor) -> Tensor:
    return x.bfloat16().to(x.dtype)


class Systems(NamedTuple):
    """Systems S_t = H_t / ||H_t||_F + a I of n sequences in C chunks of L tokens; eigenvalues are in [a, 1 + a].

    H_t = since_t entry + sum_s weights_ts k_s k_s', with s in the chunk of t. Differentiable with respect to the keys.
    """

    entry: Tensor  # [n, C, D, D], H before the chunk
    keys: Tensor  # [n, C, L, D]
    weights: Tensor  # [n, C, L, L]
    since: Tensor  # [n, C, L, 1]
    norm: Tensor  # [n, C, L, 1], ||H_t||_F
    factor: float  # a

    @staticmethod
    def of(tokens: Tokens, factor: float, chunk: int = CHUNK) -> Systems:
        """Build the systems of some tokens; T must be a multiple of `chunk` or less than it."""
        keys = _cut(tokens.k, chunk)
        zero = torch.zeros_like(tokens.k[..., :1])
        log = _cut(zero if tokens.log_decay is None else tokens.log_decay[..., None], chunk).cumsum(-2)
        since = log.exp()
        weights = (log - log.mT).tril().exp().tril()
        gram = (keys * (log[..., -1:, :] - log).exp()).mT @ keys
        entries = [torch.zeros_like(gram[:, 0])]
        for number in range(keys.shape[1] - 1):
            entries.append(since[:, number, -1:] * entries[-1] + gram[:, number])
        entry = torch.stack(entries, 1)
        within = (keys @ keys.mT).square()
        square = since.square() * entry.square().sum((-2, -1))[..., None, None]
        square = square + 2 * since * (weights @ (keys @ entry * keys).sum(-1, keepdim=True))
        square = square + (weights @ within * weights).sum(-1, keepdim=True)
        return Systems(entry, keys, weights, since, square.sqrt(), factor)

    def to(self, dtype: torch.dtype) -> Systems:
        """Return the systems in another precision."""
        return self._made(lambda x: x.to(dtype))

    def detach(self) -> Systems:
        """Return the systems without gradients."""
        return self._made(Tensor.detach)

    def _made(self, of: Callable[[Tensor], Tensor]) -> Systems:
        return self._replace(**{name: of(x) for name, x in zip(self._fields, self[:5], strict=False)})

    def with_factor(self, factor: float) -> Systems:
        """Return the same systems with another a."""
        return self._replace(factor=factor)

    def to_chunks(self, x: Tensor) -> Tensor:
        """Return a signal `[n, T, D]` in chunks, `[n, C, L, D]`."""
        return _cut(x, self.keys.shape[2])

    def apply(self, x: Tensor, arithmetic: Arithmetic = ARITHMETICS["float64"]) -> Tensor:
        """Return S x of every token, `[n, C, L, D]`."""
        operand = arithmetic.round_operand
        keys, vector = operand(self.keys), operand(x)
        recent = operand(self.weights / self.norm * (vector @ keys.mT)) @ keys
        return self.since / self.norm * (vector @ operand(self.entry)) + recent + self.factor * x

    def grams(self) -> Iterator[Tensor]:
        """Yield H / ||H||_F of each chunk, `[n, L, D, D]`."""
        for number in range(self.keys.shape[1]):
            entry, keys, weights, since, norm = (x[:, number] for x in self[:5])
            pairs = torch.einsum("nts,nsi,nsj->ntij", weights, keys, keys)
            yield (since[..., None] * entry[:, None] + pairs) / norm[..., None]

    def exact(self, rhs: Tensor) -> Tensor:
        """Return S^{-1} rhs by Cholesky factorization, `[n, C, L, D]`."""
        eye = self.factor * torch.eye(rhs.shape[-1], dtype=rhs.dtype, device=rhs.device)
        factors = (torch.linalg.cholesky(gram + eye) for gram in self.grams())
        return torch.stack(
            [torch.cholesky_solve(b[..., None], f)[..., 0] for f, b in zip(factors, rhs.unbind(1), strict=True)], 1
        )


def _cut(x: Tensor, chunk: int) -> Tensor:
    return x.unflatten(1, (-1, min(chunk, x.shape[1])))
