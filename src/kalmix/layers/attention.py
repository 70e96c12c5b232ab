"""Softmax attention, for hybrid models and as a baseline."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kalmix.beliefs import detach, loadable, take, to
from kalmix.errors import ArgumentError
from kalmix.layers.base import Mixer, check_state, check_state_tensor, mask_outside
from kalmix.layers.modules import RMSNorm, apply_rotary
from kalmix.segments import Segments
from kalmix.types import Belief, Filtered
from kalmix.validation import FLOATS, check_number, check_positive_int


@loadable
class AttentionState(NamedTuple):
    """Key-value cache of an attention layer, with S slots for each of N sequences, some of them empty.

    Attributes:
        keys: `[N, S, kv_heads, width]`, with rotary positions applied.
        values: `[N, S, kv_heads, width]`.
        position: int64 `[N, S]`, position of each token in its sequence; -1 for an empty slot.

    Example:
        >>> from kalmix.layers import Attention
        >>> _, state = Attention(64, heads=8, kv_heads=2)(torch.randn(3, 10, 64))
        >>> state.keys.shape, state.position.shape
        (torch.Size([3, 10, 2, 8]), torch.Size([3, 10]))
    """

    keys: Tensor
    values: Tensor
    position: Tensor

    take = take
    to = to
    detach = detach


class Attention(Mixer):
    """Causal softmax attention with rotary positions, QK norm and grouped heads, computed by PyTorch's SDPA.

    Paper: [Attention Is All You Need](https://arxiv.org/abs/1706.03762). Positions count the tokens of each sequence
    from 0 and continue from the state. The layer has no posterior: `filter(..., variance=True)` returns no variance.

    Args:
        hidden_size: D.
        heads: number of query heads. Default: at most D / 64, a divisor of D.
        kv_heads: number of key and value heads, a divisor of `heads`; `heads` by default.
        head_dim: width of a head; even. Default: D / heads.
        rotary_base: the slowest pair of columns rotates once in about 2 pi `rotary_base` tokens.
        norm_eps: epsilon of the QK norm.

    Raises:
        ArgumentError: an option has the wrong type or value, or the sizes do not match; or, in a call, x, state or
            segments has the wrong type or shape.

    Shape:
        In `y, state = layer(x, state=None, segments=None)`, x and y are `[B, T, D]`.
        State: 2 `kv_heads` * `head_dim` floats per token.

    Complexity: O(T (S + T)) per column for T tokens after S. Packed sequences need a `[T, T]` mask.

    Example:
        >>> from kalmix.layers import Attention
        >>> y, state = Attention(64, heads=4, kv_heads=2)(torch.randn(2, 16, 64))
        >>> y.shape, state.keys.shape
        (torch.Size([2, 16, 64]), torch.Size([2, 16, 2, 16]))
    """

    repr_attributes = ("heads", "kv_heads", "width")

    def __init__(
        self,
        hidden_size: int,
        *,
        heads: int | None = None,
        kv_heads: int | None = None,
        head_dim: int | None = None,
        rotary_base: float = 10000.0,
        norm_eps: float = 1e-6,
    ) -> None:
        super().__init__(hidden_size)
        if heads is None:
            heads = max(h for h in range(1, max(1, hidden_size // 64) + 1) if hidden_size % h == 0)
        kv_heads = heads if kv_heads is None else kv_heads
        check_positive_int("heads", heads)
        check_positive_int("kv_heads", kv_heads)
        if head_dim is None:
            if hidden_size % (2 * heads):
                expected = f"a number of heads for which {hidden_size} / heads is an even integer"
                raise ArgumentError("heads", got=heads, expected=expected)
            head_dim = hidden_size // heads
        check_positive_int("head_dim", head_dim)
        if head_dim % 2:
            raise ArgumentError("head_dim", got=head_dim, expected="an even number")
        if heads % kv_heads:
            raise ArgumentError("kv_heads", got=kv_heads, expected=f"a divisor of {heads} (heads)")
        check_number("rotary_base", rotary_base)
        self.heads = heads
        self.kv_heads = kv_heads
        self.width = head_dim
        self.rotary_base = rotary_base
        self.in_proj: nn.Linear = nn.Linear(hidden_size, (heads + 2 * kv_heads) * self.width, bias=False)
        self.query_norm: RMSNorm = RMSNorm(self.width, norm_eps)
        self.key_norm: RMSNorm = RMSNorm(self.width, norm_eps)
        self.out_proj: nn.Linear = nn.Linear(heads * self.width, hidden_size, bias=False)

    def read(
        self, x: Tensor, state: Belief | None = None, segments: Segments | None = None, variance: bool = False
    ) -> tuple[Filtered, None]:
        """Return the outputs of all heads, `[B, T, heads * width]`; see `Mixer.read`."""
        batch, length, _ = x.shape
        runs = Segments.whole(batch, length, x.device) if segments is None else segments
        previous = check_state(state, AttentionState, x, segments)
        if previous is not None:
            sizes = {"N": runs.count, "H": self.kv_heads, "K": self.width}
            check_state_tensor("keys", previous.keys, "N S H K", sizes, FLOATS, x)
            check_state_tensor("values", previous.values, "N S H K", sizes, FLOATS, x)
            check_state_tensor("position", previous.position, "N S", sizes, (torch.int64,), x)
        row, start, stop = runs.rows.long().unbind(1)
        token = torch.arange(length, device=x.device)
        offset = torch.zeros_like(start)
        if previous is not None and previous.position.shape[1]:
            offset = previous.position.amax(1) + 1
        inside = (token >= start[:, None]) & (token < stop[:, None])
        position = torch.where(inside, token - start[:, None] + offset[:, None], -1)  # [N, T], -1 outside the sequence
        segment_ids = None if segments is None else segments.segment_ids(batch, length)
        token_position = position if segment_ids is None else position[segment_ids.clamp(min=0), token]  # [B, T]

        q, k, v = self._heads(mask_outside(x, segment_ids))
        q, k = (apply_rotary(x, token_position, self.rotary_base) for x in (self.query_norm(q), self.key_norm(k)))
        keys, values = (x if segment_ids is None else _rows(x, row) for x in (k, v))
        if previous is None:
            same_sequence = None if segment_ids is None else segment_ids[:, :, None] == segment_ids[:, None, :]
            output = self._attend(q, k, v, None if same_sequence is None else same_sequence.tril())
            final = AttentionState(keys, values, position)
        else:
            final = AttentionState(
                torch.cat([previous.keys.to(k.dtype), keys], dim=1),
                torch.cat([previous.values.to(v.dtype), values], dim=1),
                torch.cat([previous.position, position], dim=1),
            )
            # Each sequence attends in its own copy of the batch row. Queries outside it attend to all keys; their
            # output is not used.
            visible = (final.position[:, None] >= 0) & (final.position[:, None] <= position[..., None])
            output = self._attend(q if segment_ids is None else q[row], *final[:2], visible | (position < 0)[..., None])
            output = output if segment_ids is None else output[segment_ids.clamp(min=0), token]
        return Filtered(mask_outside(output.flatten(2), segment_ids), None, final), None

    def state_size(self, length: int) -> int:
        """Return the number of elements of keys and values."""
        return 2 * length * self.kv_heads * self.width

    def attention_map(self, x: Tensor) -> Tensor:
        """Return the attention map of each query head."""
        q, k, v = self._heads(x)
        token = torch.arange(x.shape[1], device=x.device).expand(x.shape[:2])
        q, k = (apply_rotary(x, token, self.rotary_base) for x in (self.query_norm(q), self.key_norm(k)))
        identity = torch.eye(x.shape[1], dtype=v.dtype, device=v.device)[:, None].expand(*v.shape[:3], -1)
        return self._attend(q, k, identity, None).transpose(1, 2)

    def project_out(self, readout: Tensor, context: None) -> Tensor:
        """Apply the output projection."""
        return self.out_proj(readout)

    def _heads(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x = self.in_proj(x).unflatten(-1, (-1, self.width))
        q, k, v = x.split([self.heads, self.kv_heads, self.kv_heads], dim=2)
        return q, k, v

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None) -> Tensor:
        """Call SDPA for `[B, T, heads, width]`; `visible` is `[B, T, S]`, causal by default."""
        q, k, v = (x.transpose(1, 2) for x in (q, k.to(q.dtype), v.to(q.dtype)))
        mask = None if visible is None else visible[:, None]
        grouped = self.heads != self.kv_heads
        output = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=grouped)
        return output.transpose(1, 2)


def _rows(x: Tensor, row: Tensor) -> Tensor:
    """Return the batch row of each sequence, without a copy if there is only one row."""
    return x.expand(row.shape[0], *x.shape[1:]) if x.shape[0] == 1 else x[row]
