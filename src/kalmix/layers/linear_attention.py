"""Linear attention: a memory without decay, read as a weighted mean."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kalmix import designs
from kalmix.designs import Design
from kalmix.distributed import ops
from kalmix.layers.head_sizes import Heads
from kalmix.layers.memory_base import MemoryLayer
from kalmix.layers.modules import to_state_dtype
from kalmix.types import Filtered, replace_fields


class LinearAttention(MemoryLayer):
    """Linear attention with features elu + 1, normalised by the sum of its weights.

    Paper: [Transformers are RNNs](https://arxiv.org/abs/2006.16236).

        q, k = elu(project(x)) + 1;  v = project(x);  M_t = M_{t-1} + k_t [v_t, 1]'
        [value_t, weight_t] = M_t' q_t;  y_t = out(value_t / (weight_t + 1e-6))

    M' is the transpose of M, and M_0 = 0. The last column of the memory gives the sum of weights. The layer has no
    convolution, norm or gate.

    The layer has no posterior: `layer.filter(x, variance=True)` returns `None` as variance.

    Args:
        hidden_size: D.
        heads: number of heads, G. Default: D / K, rounded, at least 1.
        head_dim: key width, K. Default: D / G, rounded down, at least 1, if `heads` is given; otherwise the largest
            power of two that is at most min(D / 4, 128), but at least 2.
        expand_v: V / K, value width divided by key width, > 0. V must be an integer.
        kernel: name of a kernel of `kalmix.ops.additive`; by default chosen by device, dtype and shape.

    Raises:
        ArgumentError: an option has the wrong type or value; or, in a call, x, state or segments has the wrong type,
            shape, dtype or device, or x is not finite (checked on a CPU).
        TypeError: an option or argument has an unknown name.
        KernelError: the requested kernel does not support the call. An unknown name is an `ArgumentError`.

    Shape:
        In `y, state = layer(x, state=None, segments=None)`, x and y are `[B, T, D]`, in the dtype of the parameters;
        under autocast x may have another, and y has that of autocast.
        `segments` is a `kalmix.Segments` of N sequences in the B rows; by default each row is one, and N = B.
        `state` is a `MemoryState`: `belief.mean` is M, `[N, G, K, V + 1]` in float32 (float64 for float64 inputs), and
        `conv_state` is empty, `[N, 0]`.

    Complexity: O(T K V) per head, and the projections.

    Example:
        >>> from kalmix.layers import LinearAttention
        >>> y, state = LinearAttention(64, heads=2)(torch.randn(2, 16, 64))
        >>> y.shape, state.belief.mean.shape
        (torch.Size([2, 16, 64]), torch.Size([2, 2, 32, 33]))
    """

    design: Design | None = designs.LINEAR_ATTENTION

    def __init__(
        self,
        hidden_size: int,
        *,
        heads: int | None = None,
        head_dim: int | None = None,
        expand_v: float = 1.0,
        kernel: str | None = None,
    ) -> None:
        sizes = Heads.of(hidden_size, heads=heads, head_dim=head_dim, expand_v=expand_v)
        super().__init__(hidden_size, sizes, conv=0, activate=False, norm_width=0, kernel=kernel)

    def normalize_qk(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Apply elu + 1, so that weights are positive."""
        return F.elu(q) + 1, F.elu(k) + 1

    @property
    def memory_shape(self) -> tuple[int, int]:
        """Rows and columns of the memory of one value head, with the sum of weights."""
        return self.sizes.key_width, self.sizes.value_width + 1

    def signals(self, x: Tensor) -> dict[str, Tensor]:
        """Return no arguments beside q, k and v."""
        return {}

    def op(self, q: Tensor, k: Tensor, v: Tensor, **arguments: Any) -> Filtered:
        """Call `kalmix.ops.additive` and divide by the sum of weights; 0 before the first token."""
        output = ops.additive(q, k, torch.cat([v, torch.ones_like(v[..., :1])], dim=-1), **arguments)
        value, weight = to_state_dtype(output.mean).split([v.shape[-1], 1], dim=-1)
        return replace_fields(output, mean=(value / (weight + 1e-6)).to(v.dtype))
