"""Beliefs: the state of a filter, one type for each form of it. The first axis of every tensor is sequences.

A belief is a `NamedTuple`: immutable, a pytree for torch, and accepted by `torch.compile` and
`torch.load(weights_only=True)`. `kalmix.Belief` describes its methods.

In shapes, N is the number of sequences, H and G key and value heads, K and V key and value widths. A memory has K rows,
one for each element of a key, and V columns, one for each element of a value.
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from kalmix.errors import ArgumentError

_B = TypeVar("_B", bound=tuple)


def take(belief: _B, index: Tensor) -> _B:
    """Return the sequences `index` of a belief or layer state.

    Args:
        belief: belief or layer state of N sequences.
        index: int64 or int32 `[M]`, from 0 to N - 1, in any order, repeated or not.

    Raises:
        ArgumentError: `index` is not such a tensor, or is on another device. Its values are not checked.
    """
    if not isinstance(index, Tensor):
        raise ArgumentError("index", got=f"a {type(index).__name__}", expected="an int64 tensor [M]")
    if index.ndim != 1 or index.dtype not in (torch.int64, torch.int32):
        problem = f"has dtype {index.dtype} and shape {list(index.shape)}"
        raise ArgumentError("index", problem=problem, expected="int64 [M]")
    return type(belief)(*(_select(x, index) if isinstance(x, Tensor) else x.take(index) for x in belief))


def _select(x: Tensor, index: Tensor) -> Tensor:
    if x.device != index.device:
        raise ArgumentError("index", problem=f"is on {index.device}", expected=f"a tensor on {x.device}, as the belief")
    return x.index_select(0, index)


def to(belief: _B, *args: Any, **kwargs: Any) -> _B:
    """Apply `Tensor.to` to every tensor of a belief or layer state; integer tensors keep their dtype."""

    def move(x: Any) -> Any:
        moved = x.to(*args, **kwargs)
        return x.to(moved.device) if isinstance(x, Tensor) and not x.is_floating_point() else moved

    return type(belief)(*map(move, belief))


def detach(belief: _B) -> _B:
    """Return a belief or layer state without its autograd history, for truncated backpropagation through time."""
    return type(belief)(*(x.detach() for x in belief))


def loadable(kind: type[_B]) -> type[_B]:
    """Allow `torch.load(weights_only=True)` to load instances of a class of tensors; a class decorator."""
    torch.serialization.add_safe_globals([kind])
    return kind


@loadable
class PointBelief(NamedTuple):
    """Memory matrix without uncertainty: the belief of the ops `additive` and `delta`.

    Fields are not checked here. The op raises `ArgumentError` for a wrong shape, dtype or device and, where values are
    checked (see `kalmix.checks`), for NaN and infinity. `kalmix.Belief` describes the methods, such as `take`.

    Attributes:
        mean: `[N, G, K, V]`, the memory, for N sequences (the batch rows, or the segments), G value heads, key width K
            and value width V. Its dtype is float32, or float64 if q, k and v of the op are float64; an op does not
            accept or return another.

    Example:
        >>> from kalmix import PointBelief
        >>> belief = PointBelief(torch.zeros(2, 1, 4, 8))
        >>> belief.take(torch.tensor([1, 1, 0])).mean.shape
        torch.Size([3, 1, 4, 8])
    """

    mean: Tensor

    take = take
    to = to
    detach = detach


@loadable
class DiagonalBelief(NamedTuple):
    """Independent Gaussian cells: the belief of the op `diagonal`. A cell is one entry of the K x V memory.

    A belief is the prior of a call if you pass it to the op, and the posterior after the last token if the op returns
    it. Without one, the op starts from mean 0 and variance 1.

    Fields are not checked here. The op raises `ArgumentError` for a wrong shape, dtype or device and, where values are
    checked (see `kalmix.checks`), for NaN, infinity and a negative variance. Elsewhere these give wrong results.

    Attributes:
        mean: `[N, G, K, V]`, mean of each cell, for N sequences (the batch rows, or the segments), G value heads, key
            width K and value width V. Its dtype is float32, or float64 if q, k and v of the op are float64; the op does
            not accept or return another.
        variance: `[N, G, K, V]`, variance of each cell, >= 0, in the same dtype.

    Example:
        >>> from kalmix import DiagonalBelief, ops
        >>> prior = DiagonalBelief(torch.zeros(2, 1, 4, 8), torch.full((2, 1, 4, 8), 0.5))
        >>> q, k, v = torch.randn(2, 5, 1, 4), torch.randn(2, 5, 1, 4), torch.randn(2, 5, 1, 8)
        >>> dynamics = {"log_decay": torch.zeros(1, 4, 8), "process_noise": torch.zeros(1, 4, 8)}
        >>> y = ops.diagonal(q, k, v, precision=torch.ones(2, 5, 1, 8), **dynamics, belief=prior)
        >>> (y.belief.variance <= prior.variance).all()  # each observation reduces it
        tensor(True)
    """

    mean: Tensor
    variance: Tensor

    take = take
    to = to
    detach = detach


@loadable
class DenseBelief(NamedTuple):
    """Gaussian distribution of a memory matrix: the belief of the op `kalmix.ops.dense`.

    A memory has K rows, one for each element of a key, and V columns, one for each element of a value. Its columns are
    independent of each other and have the same K x K covariance. A belief is the prior of a call if you pass it to the
    op, and the posterior after the last token if the op returns it. Without one, the op starts from mean 0 and
    covariance I.

    Fields are not checked here. The op raises `ArgumentError` for a wrong shape, dtype or device and, where values are
    checked (see `kalmix.checks`), for NaN and infinity. It does not check that the covariance is symmetric and positive
    semidefinite: with another covariance its results are wrong.

    Attributes:
        mean: `[N, G, K, V]`, mean of the memory, for N sequences (the batch rows, or the segments) and G heads of v
            (value heads). Its dtype is float32, or float64 if q, k and v of the op are float64; the op accepts and
            returns no other dtype.
        covariance: `[N, G, K, K]`, covariance of each column, between rows, in the same dtype; symmetric and positive
            semidefinite.

    Example:
        >>> from kalmix import DenseBelief, ops
        >>> prior = DenseBelief(torch.zeros(2, 1, 4, 8), torch.eye(4).expand(2, 1, 4, 4))
        >>> q, k, v = torch.randn(2, 5, 1, 4), torch.randn(2, 5, 1, 4), torch.randn(2, 5, 1, 8)
        >>> noise = {"obs_noise": torch.ones(2, 5, 1), "process_noise": torch.zeros(2, 5, 1)}
        >>> y = ops.dense(q, k, v, **noise, belief=prior)
        >>> y.belief.mean.shape, y.belief.covariance.shape
        (torch.Size([2, 1, 4, 8]), torch.Size([2, 1, 4, 4]))
    """

    mean: Tensor
    covariance: Tensor

    take = take
    to = to
    detach = detach


@loadable
class RidgeBelief(NamedTuple):
    """Discounted sums over past tokens, the sufficient statistics of ridge regression: the belief of the op `ridge`.

    Token t multiplies both sums by its decay a_t = exp(log_decay) and adds a product with its gain g_t:

        gram_t = a_t gram_{t-1} + g_t k_t k_t',   cross_t = a_t cross_{t-1} + g_t k_t v_t'

    Here k' is the transpose of k. Without a belief, the op starts from 0. The memory is (gram + lambda I)^{-1} cross.
    The argument `ridge` of the op determines lambda, which is not stored here: `Adaptive(a)` or a number a means a
    times the Frobenius norm of gram (a = 0.02 by default), and `Fixed(c)` means c.

    Fields are not checked here. The op raises `ArgumentError` for a wrong shape, dtype or device and, where values are
    checked (see `kalmix.checks`), for NaN and infinity. It does not check that gram is symmetric and positive
    semidefinite: with another gram its results are wrong.

    Attributes:
        cross: `[N, G, K, V]`, for N sequences (the batch rows, or the segments), G value heads, key width K and value
            width V. Its dtype is float32, or float64 if q, k and v of the op are float64; the op does not accept or
            return another.
        gram: `[N, G, K, K]`, in the same dtype; symmetric and positive semidefinite.

    Example:
        >>> from kalmix import ops
        >>> k, v = torch.randn(2, 5, 1, 4), torch.randn(2, 5, 1, 8)
        >>> belief = ops.ridge(k, k, v, ridge=0.02).belief  # gains and decays are 1 by default
        >>> torch.allclose(belief.gram[0, 0], k[0, :, 0].T @ k[0, :, 0], atol=1e-5)
        True
    """

    cross: Tensor
    gram: Tensor

    take = take
    to = to
    detach = detach


@loadable
class HistoryBelief(NamedTuple):
    """Keys, values and times of past tokens, like a key-value cache: the belief of the op `attend`.

    It has S slots for each of N sequences (the batch rows, or the segments). A slot stores one token or is empty.
    Without a belief, the op starts from 0 slots. A call with T tokens appends T slots to each sequence, empty for
    tokens that are not its own; with more segments than batch rows, up to B T slots. With `window`, it keeps the newest
    `window` tokens of each sequence.

    `lengths` is the number of stored tokens, int64 `[N]`. `newest(count)` returns the belief with the newest `count`
    tokens (an integer >= 0) of each sequence, or all if it has fewer, in at most `count` slots, empty ones first.
    `compact()` keeps as many slots as the longest sequence has tokens.

    Fields are not checked here. `attend` raises `ArgumentError` for a wrong shape, dtype or device and, where values
    are checked (see `kalmix.checks`), for NaN and infinity, in empty slots too. The order of positions is not checked.

    Attributes:
        keys: `[N, S, H, K]`, keys as `attend` received them, for H key heads: K / 2 real parts, then K / 2 imaginary
            parts. In float32, or float64 if q, k and v of the op are float64; the op does not accept or return another.
        values: `[N, S, G, V]`, values for G value heads, in the same dtype: V / 2 real parts, then V / 2 imaginary
            parts.
        times: float64 `[N, S]` in every case, time of each token, in the unit of the op's `times`.
        positions: int64 `[N, S]`, index of the token in its sequence, from 0, or -1 for an empty slot. Tokens are
            ordered by time along S, with empty slots anywhere.

    Raises:
        ArgumentError: `count` of `newest` is not an integer >= 0.

    Example:
        >>> from kalmix import HistoryBelief
        >>> keys, values = torch.randn(1, 3, 2, 8), torch.randn(1, 3, 2, 8)
        >>> times, positions = torch.tensor([[0.0, 0.5, 2.0]]).double(), torch.tensor([[-1, 0, 1]])
        >>> belief = HistoryBelief(keys, values, times, positions)  # the first slot is empty
        >>> belief.lengths, belief.newest(1).keys.shape
        (tensor([2]), torch.Size([1, 1, 2, 8]))
    """

    keys: Tensor
    values: Tensor
    times: Tensor
    positions: Tensor

    take = take
    detach = detach

    def to(self, *args: Any, **kwargs: Any) -> HistoryBelief:
        """Apply `Tensor.to` to keys and values; times and positions change device only, not dtype."""
        keys, values = (x.to(*args, **kwargs) for x in self[:2])
        return HistoryBelief(keys, values, self.times.to(keys.device), self.positions.to(keys.device))

    @property
    def lengths(self) -> Tensor:
        """Number of stored tokens of each sequence, `[N]`."""
        return (self.positions >= 0).sum(1)

    def newest(self, count: int) -> HistoryBelief:
        """Return the last `count` tokens of every sequence (or all, if it has fewer), aligned to the last slots.

        Raises:
            ArgumentError: `count` is not an integer >= 0.
        """
        if not isinstance(count, int | torch.SymInt) or isinstance(count, bool) or count < 0:
            raise ArgumentError("count", got=repr(count), expected="an integer of at least 0")
        empty_first = self.positions.argsort(dim=1, stable=True)
        slots = empty_first[:, max(0, self.positions.shape[1] - count) :]
        row = torch.arange(slots.shape[0], device=slots.device)[:, None]
        return HistoryBelief(*(leaf[row, slots] for leaf in self))

    def compact(self) -> HistoryBelief:
        """Keep as many slots as the longest sequence has tokens, and set empty ones to 0.

        Reads values, so it synchronises a GPU.
        """
        keys, values, times, positions = self.newest(int(self.lengths.max()) if self.positions.numel() else 0)
        occupied = positions >= 0
        keys, values = (torch.where(occupied[..., None, None], x, 0) for x in (keys, values))
        return HistoryBelief(keys, values, torch.where(occupied, times, 0), positions)
