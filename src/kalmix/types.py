"""Types shared by ops and layers: `Belief`, `Filtered`, and the dtype of beliefs."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, Protocol, Self, TypeVar, runtime_checkable

import torch
from torch import Tensor


@runtime_checkable
class Belief(Protocol):
    """Protocol of beliefs and layer states: an immutable pytree of tensors whose first axis is sequences.

    To continue sequences, pass the belief of one call to the next: as `belief` to an op, `kalmix.filter` or
    `kalmix.oracle`, or the state as `state` to a layer. Each method returns a new belief:

    - `take(index)` selects sequences: `index` is an int64 or int32 tensor `[M]`, from 0 to N - 1, in any order,
      repeated or not, on the device of the belief.
    - `to(...)` applies `Tensor.to` to its tensors. Integer tensors and the times of a `HistoryBelief` keep their dtype.
    - `detach()` removes the autograd history.

    `isinstance(x, Belief)` only tests for these methods, so it is true for tensors, too.

    Raises:
        ArgumentError: `index` is not such a tensor, or is on another device.
        IndexError: on the CPU, an entry of `index` is negative or too large. On a GPU, an assertion of the device.

    Example:
        >>> from kalmix import Belief, PointBelief
        >>> belief = PointBelief(torch.zeros(3, 1, 4, 8))  # 3 sequences
        >>> isinstance(belief, Belief), belief.take(torch.tensor([0, 0])).mean.shape
        (True, torch.Size([2, 1, 4, 8]))
    """

    def take(self, index: Tensor) -> Self: ...
    def to(self, *args: Any, **kwargs: Any) -> Self: ...
    def detach(self) -> Self: ...


class Filtered(NamedTuple):
    """Output of every op, of `kalmix.filter`, `kalmix.oracle` and of a layer's `filter` method.

    A named tuple of three fields; fields are not checked here. A read-out is the memory applied to a query: M'q for a
    memory matrix M `[K, V]` and its transpose M'. The shapes below are those of ops, with batch size B, T tokens, G
    value heads and value width V. For `layer.filter(x)`, mean and variance are those of the layer's output,
    `[B, T, D]`, and `belief` is the state of the layer; calling the layer, `layer(x)`, returns only the pair of mean
    and state.

    Attributes:
        mean: `[B, T, G, V]`, posterior mean of the read-out at each token, given the tokens up to and including it (all
            tokens in `attend` with `causal=False`). In the dtype of v (float64 from `kalmix.oracle`); 0 at tokens
            outside every segment.
        variance: posterior variance of the read-out, without observation noise: `[B, T, G, V]`, or `[B, T, G, 1]` if
            all columns share it (`dense`, `ridge`, `attend`); 0 at tokens outside every segment. It has the dtype of
            the belief. `None` unless the call had `variance=True`, and always `None` from a layer without posterior
            (`has_posterior` is False). `kalmix.filter` raises `DesignError` if the design has no variance; the ops
            `additive` and `delta` do not have the argument.
        belief: belief after the last token of each sequence. Its dtype is float32, or float64 if the inputs are
            float64; from `kalmix.oracle` it is always float64. Times of a history are float64, its positions int64.
            `None` from `attend` with `causal=False`. Pass it to the next call of the same function to continue the
            sequences.

    Example:
        >>> from kalmix import ops
        >>> x = torch.randn(2, 16, 1, 4)
        >>> mean, variance, belief = ops.additive(x, x, x)
        >>> mean.shape, variance, belief.mean.shape
        (torch.Size([2, 16, 1, 4]), None, torch.Size([2, 1, 4, 4]))
    """

    mean: Tensor
    variance: Tensor | None
    belief: Any  # a Belief: type checkers cannot narrow a protocol inside a NamedTuple


Record = TypeVar("Record", bound=tuple[Any, ...])  # a named tuple


def replace_fields(record: Record, **fields: Any) -> Record:
    """Return a copy of a named tuple in which `fields` have new values.

    `record._replace` does not work in compiled code: with torch 2.11, a graph returns an empty tuple in place of its
    result.
    """
    old: Any = record
    return type(old)(**(old._asdict() | fields))


torch.serialization.add_safe_globals([Filtered])  # for `torch.load(weights_only=True)`


def without_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """Return a context without autocast on `device`, so that beliefs keep their dtype."""
    # PyTorch cannot build an autocast context for the device "meta", which has no autocast.
    return nullcontext() if device.type == "meta" else torch.autocast(device.type, enabled=False)


def belief_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of beliefs for inputs of `dtype`: float64 for float64, otherwise float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def dependent_zero(*tensors: Tensor | None) -> Tensor:
    """Return 0, in the dtype of the first floating-point tensor; its gradients with respect to all of them are 0.

    Add it to a result without tokens. Otherwise parameters would have no gradient on a rank without tokens, and the
    other ranks would wait for it. The 0 is a sum of no elements, so NaN in the tensors does not matter.
    """
    present = [x for x in tensors if x is not None and x.is_floating_point()]
    return torch.stack([x.reshape(-1)[:0].sum(dtype=present[0].dtype) for x in present]).sum()
