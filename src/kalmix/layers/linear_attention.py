"""Linear attention: a memory that only adds, read as a weighted mean."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kalmix import designs, ops
from kalmix.designs import Design
from kalmix.layers.head_sizes import Heads
from kalmix.layers.memory_base import MemoryLayer
from kalmix.layers.modules import to_state_dtype
from kalmix.types import Filtered


class LinearAttention(MemoryLayer):
    """Linear attention (Katharopoulos et al., 2020): features elu + 1 of q and k, the read-out divided by its weight.

    The sum of weights is one more column of the memory, in which every value is 1. There is neither convolution nor
    norm nor gate: the read-out is a mean of values.

    Args:
        hidden_size: D.
        heads, head_dim, expand_v: value heads, key width, value width over key width; see `Heads.of`.
        kernel: pin a kernel of `kalmix.ops.additive`.

    Cost: O(T K V) a head and the projections; the state is `[G, K, V + 1]`.
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
        """Positive features, so that weights are."""
        return F.elu(q) + 1, F.elu(k) + 1

    @property
    def memory_shape(self) -> tuple[int, int]:
        """Rows and columns of a value head's memory, the sum of weights included."""
        return self.sizes.key_width, self.sizes.value_width + 1

    def signals(self, x: Tensor) -> dict[str, Tensor]:
        """Nothing beside q, k and v."""
        return {}

    def op(self, q: Tensor, k: Tensor, v: Tensor, **arguments: Any) -> Filtered:
        """`kalmix.ops.additive`, over the weights; 0 where nothing was ever written."""
        found = ops.additive(q, k, torch.cat([v, torch.ones_like(v[..., :1])], dim=-1), **arguments)
        value, weight = to_state_dtype(found.mean).split([v.shape[-1], 1], dim=-1)
        return found._replace(mean=(value / (weight + 1e-6)).to(v.dtype))
