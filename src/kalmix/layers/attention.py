"""Softmax attention, for hybrid models and as a baseline."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kalmix.beliefs import detach, loadable, take, to
from kalmix.distributed.entry import past_tokens, share_keys
from kalmix.distributed.ring_attention import attend_ring
from kalmix.distributed.tensor_parallel import SHARED, Plan, Split, check_divides
from kalmix.errors import ArgumentError
from kalmix.layers.base import Mixer, check_state, check_state_tensor
from kalmix.layers.fused.attention_step import KeyValuePool, RotaryHeads, attention_step, can_fuse_attention
from kalmix.layers.modules import RMSNorm, apply_rotary, is_plain
from kalmix.layers.packed_attention import attend_packed, attend_runs, load_flash_attention
from kalmix.segments import Segments, mask_outside, of_tokens
from kalmix.steps import Slots, store_rows
from kalmix.types import Belief, Filtered, belief_dtype
from kalmix.validation import FLOATS, can_check_values, check_choice, check_number, check_positive_int, in_transform

IMPLEMENTATIONS = ("sdpa", "eager")


@loadable
class AttentionState(NamedTuple):
    """Key-value cache of an `Attention` layer: S slots, each with one token or empty, for each of N sequences.

    N is the batch size, or the number of segments. A first call gives T slots, or B T if it has more segments than
    batch rows. A later call adds T slots; with more segments than batch rows, as many as the longest one has tokens (T
    where values are not checked, see `kalmix.checks`). Slots with tokens of other sequences are empty.

    Fields are not checked here; `Attention` raises `ArgumentError` for a wrong shape, dtype or device.

    Attributes:
        keys: `[N, S, kv_heads, head_dim]`, with rotary positions applied, in the dtype of the parameters, or of
            autocast. The layer also accepts another floating-point dtype.
        values: `[N, S, kv_heads, head_dim]`, likewise.
        positions: int64 `[N, S]`, position of each token in its sequence, from 0; -1 for an empty slot, whose key and
            value have no effect, even if they are NaN.

    Example:
        >>> from kalmix.layers import Attention
        >>> _, state = Attention(64, heads=8, kv_heads=2)(torch.randn(3, 10, 64))
        >>> state.keys.shape, state.positions.shape
        (torch.Size([3, 10, 2, 8]), torch.Size([3, 10]))
    """

    keys: Tensor
    values: Tensor
    positions: Tensor

    take = take
    to = to
    detach = detach


class Attention(Mixer):
    """Causal softmax attention with rotary positions, QK norm and grouped heads, computed by PyTorch's SDPA.

    Paper: [Attention Is All You Need](https://arxiv.org/abs/1706.03762). Positions count the tokens of each sequence
    from 0 and continue from the state.

    The layer has no posterior: the `kalmix.Filtered` of `layer.filter(x, variance=True)` has variance `None`.

    Args:
        hidden_size: D.
        heads: number of query heads. Default: the largest number of at most D / 64 for which D / heads is an even
            integer; 1 if there is none.
        kv_heads: number of key and value heads, a divisor of `heads`; `heads` by default.
        head_dim: width of a head; even. Default: D / heads, which must be an even integer.
        rotary_base: the slowest pair of columns rotates once in about 2 pi `rotary_base` tokens.
        norm_eps: epsilon of the QK norm.

    Raises:
        ArgumentError: an option has the wrong type or value, `kv_heads` does not divide `heads`, or the width of a head
            is odd; or, in a call, x, state or segments has the wrong type, shape, dtype or device. x may contain NaN,
            which reaches later tokens of its sequence.
        TypeError: an option or argument has an unknown name.

    Attributes:
        implementation: "sdpa", PyTorch's fused attention, or "eager", a softmax over a stored `[T, S + T]` matrix of
            scores; initially "sdpa". Assign it after construction; another name raises `ArgumentError`. Inside a
            transform of `torch.func` or forward-mode differentiation, "eager" always runs: it has all derivatives.
            `attn_implementation` of a model for transformers sets it in all layers.

    Shape:
        In `y, state = layer(x, state=None, segments=None)`, x and y are `[B, T, D]`, in the dtype of the parameters;
        under autocast x may have another, and y has that of autocast.
        `segments` is a `kalmix.Segments` of N sequences in the B rows; by default each row is one, and N = B.
        `state` is an `AttentionState`: keys and values `[N, S, kv_heads, head_dim]` of all past tokens.

    Complexity: O(T (S + T) heads head_dim) for T tokens after S. Memory of "sdpa" O(T) without a
    state, packed or not; with a state, a mask `[T, S + T]` per sequence.

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
            heads = max((h for h in range(1, hidden_size // 64 + 1) if hidden_size % (2 * h) == 0), default=1)
        kv_heads = heads if kv_heads is None else kv_heads
        check_positive_int("heads", heads)
        check_positive_int("kv_heads", kv_heads)
        if head_dim is None:
            if hidden_size % (2 * heads):
                expected = f"a number of heads for which {hidden_size} / heads is an even integer"
                raise ArgumentError("heads", got=heads, expected=expected, hint="Or set `head_dim`")
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
        self._implementation = "sdpa"
        self.in_proj: nn.Linear = nn.Linear(hidden_size, (heads + 2 * kv_heads) * self.width, bias=False)
        self.query_norm: RMSNorm = RMSNorm(self.width, norm_eps)
        self.key_norm: RMSNorm = RMSNorm(self.width, norm_eps)
        self.out_proj: nn.Linear = nn.Linear(heads * self.width, hidden_size, bias=False)
        load_flash_attention()

    def head_plan(self, ranks: int) -> Plan:
        """Return how ranks divide the parameters: by heads of keys and values, with the query heads that share them."""
        check_divides(self, "heads of keys and values", self.kv_heads, ranks)
        columns, shared = self.heads * self.width, self.kv_heads * self.width
        plan: Plan = {"in_proj.weight": Split(0, (columns, shared, shared)), "out_proj.weight": Split(1, (columns,))}
        return plan | {"query_norm.weight": SHARED, "key_norm.weight": SHARED}

    def keep_heads(self, ranks: int, rank: int) -> None:
        """Change sizes to those of the heads of one rank."""
        self.heads //= ranks
        self.kv_heads //= ranks

    @property
    def implementation(self) -> str:
        """Name of the implementation of attention; see the class."""
        return self._implementation

    @implementation.setter
    def implementation(self, name: str) -> None:
        check_choice("implementation", name, IMPLEMENTATIONS)
        self._implementation = name

    def read(
        self, x: Tensor, state: Belief | None = None, segments: Segments | None = None, variance: bool = False
    ) -> tuple[Filtered, None]:
        """Return the outputs of all heads, `[B, T, heads * width]`; see `Mixer.read`."""
        batch, length, _ = x.shape
        previous = check_state(state, AttentionState, x, segments)
        if previous is not None:
            sizes = {"N": batch if segments is None else segments.count, "H": self.kv_heads, "K": self.width}
            check_state_tensor("keys", previous.keys, "N S H K", sizes, FLOATS, x)
            check_state_tensor("values", previous.values, "N S H K", sizes, FLOATS, x)
            check_state_tensor("positions", previous.positions, "N S", sizes, (torch.int64,), x)
        segment_ids = None if segments is None else segments.segment_ids(batch, length)
        token = torch.arange(length, device=x.device)
        offset = None  # number of earlier tokens of each sequence
        if previous is not None and previous.positions.shape[1]:
            offset = previous.positions.amax(1) + 1
        elif previous is None:
            offset = past_tokens()
        if segments is None or segment_ids is None:
            position = token.expand(batch, length) if offset is None else offset[:, None] + token
        else:
            first = (-segments.rows[:, 1] if offset is None else offset - segments.rows[:, 1]).long()
            position = torch.where(segment_ids >= 0, token + of_tokens(first, segment_ids), -1)

        q, k, v = self._heads(mask_outside(x, segment_ids))
        shared_position = token[None] if segments is None and offset is None else position
        q, k = apply_rotary(self.query_norm(q), self.key_norm(k), shared_position, self.rotary_base)
        new = AttentionState(k, v, position)
        ring = attend_ring(q, k, v) if previous is None else None  # with other ranks
        shared = share_keys(k, v) if previous is None and ring is None else None
        if ring is not None:
            output, final = ring, None
        elif shared is not None:
            output, positions = attend_runs(q, *shared), shared.positions()
            keys, values = (x.flatten(0, 1).expand(len(positions), *[-1] * 3) for x in shared[:2])
            final = AttentionState(keys, values, positions)
        elif segments is None or segment_ids is None:
            output, final = (self._attend(q, k, v, None), new) if previous is None else self._continue(q, new, previous)
        elif previous is None or segments.count == 0:  # a state of no sequences holds no tokens
            if self._is_eager():
                output = self._attend(q, k, v, (segment_ids[:, :, None] == segment_ids[:, None]).tril())
            else:
                output = attend_packed(q, k, v, segments, segment_ids)
            final = _state_per_sequence(new, segments, segment_ids)
        else:
            index, inside = _tokens_of_sequences(segments, batch, length)
            q, k, v, position = (x.flatten(0, 1)[index] for x in (q, *new))
            new = AttentionState(k, v, torch.where(inside, position, -1))
            output, final = self._continue(q, new, previous)
            within = (token - segments.rows[:, 1].long()[segment_ids.clamp(min=0)]).clamp(0, index.shape[1] - 1)
            output = output[segment_ids.clamp(min=0), within]
        return Filtered(mask_outside(output.flatten(2), segment_ids), None, final), None

    def read_step(self, x: Tensor, pool: AttentionState, slots: Slots) -> tuple[Tensor, None]:
        """Return the outputs of all heads for one token per row, `[B, 1, heads * width]`; update the pool in place.

        In a full slot the token replaces the oldest one, which it does not attend to.
        """
        norms = self.query_norm, self.key_norm
        projected, weights = self.in_proj(x), (self.query_norm.weight, self.key_norm.weight)
        fuses = not self._is_eager() and all(is_plain(norm, RMSNorm) for norm in norms)
        if fuses and can_fuse_attention(projected, weights, KeyValuePool(*pool)):
            epsilons = (norm.constants.eps for norm in norms)
            heads = RotaryHeads(self.heads, self.kv_heads, self.width, self.rotary_base, *epsilons)
            return attention_step(projected, weights, KeyValuePool(*pool), slots, heads), None
        state = pool.take(slots.read.clamp(min=0))
        position = state.positions.amax(1, keepdim=True) + 1
        index = position % state.positions.shape[1]
        q, k, v = self._split(projected)
        q, k = apply_rotary(self.query_norm(q), self.key_norm(k), position, self.rotary_base)
        row = torch.arange(len(index), device=index.device)[:, None]
        for buffer, y in zip(state, (k, v, position), strict=True):
            buffer[row, index] = y.to(buffer.dtype)
        occupied = state.positions >= 0
        keys, values = (torch.where(occupied[..., None, None], y, 0) for y in state[:2])  # 0 times NaN is NaN
        output = self._attend(q, keys, values, occupied[:, None])
        store_rows(pool, slots, state)
        return torch.where((slots.read >= 0)[:, None, None], output.flatten(2), 0), None

    def _continue(self, q: Tensor, new: AttentionState, previous: AttentionState) -> tuple[Tensor, AttentionState]:
        """Append new tokens, one row per sequence, to a state and attend to all its tokens."""
        keys = torch.cat([previous.keys.to(new.keys.dtype), new.keys], dim=1)
        values = torch.cat([previous.values.to(new.values.dtype), new.values], dim=1)
        positions = torch.cat([previous.positions, new.positions], dim=1)
        occupied = positions >= 0
        if not can_check_values(occupied) or not occupied.all():  # 0 times NaN is NaN
            keys, values = (torch.where(occupied[..., None, None], x, 0) for x in (keys, values))
        final = AttentionState(keys, values, positions)
        # Queries outside of the sequences attend to all keys; their output is not used.
        query = new.positions[..., None]
        visible = occupied[:, None] & (positions[:, None] <= query) | (query < 0)
        return self._attend(q, keys, values, visible), final

    def state_size(self, length: int) -> int:
        """Return the number of elements of keys and values."""
        return 2 * length * self.kv_heads * self.width

    def flops_per_token(self, length: int) -> float:
        """Return the FLOPs of scores and weighted sums over half of the tokens, which is the mean under causality."""
        return 2.0 * length * self.heads * self.width

    def attention_map(self, x: Tensor) -> Tensor:
        """Return the attention map of each query head."""
        q, k, v = self._heads(x)
        token = torch.arange(x.shape[1], device=x.device)[None]
        q, k = apply_rotary(self.query_norm(q), self.key_norm(k), token, self.rotary_base)
        identity = torch.eye(x.shape[1], dtype=v.dtype, device=v.device)[:, None].expand(*v.shape[:3], -1)
        return self._attend(q, k, identity, None).transpose(1, 2)

    def project_out(self, readout: Tensor, context: None) -> Tensor:
        """Apply the output projection."""
        return self.out_proj(readout)

    def _is_eager(self) -> bool:
        """Return whether this call stores scores. Fused attention lacks second and forward-mode derivatives."""
        return self.implementation == "eager" or in_transform()

    def _heads(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self._split(self.in_proj(x))

    def _split(self, projected: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values, `[B, T, heads, width]` each."""
        x = projected.unflatten(-1, (-1, self.width))
        q, k, v = x.split([self.heads, self.kv_heads, self.kv_heads], dim=2)
        return q, k, v

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None) -> Tensor:
        """Compute attention for `[B, T, heads, width]`; `visible` is `[B, T, S]`, causal by default."""
        q, k, v = (x.transpose(1, 2) for x in (q, k.to(q.dtype), v.to(q.dtype)))
        mask = None if visible is None else visible[:, None]
        grouped = self.heads != self.kv_heads
        if self._is_eager():
            return _attend_eagerly(q, k, v, mask).transpose(1, 2)
        output = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=grouped)
        return output.transpose(1, 2)


def _attend_eagerly(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """Compute attention for queries `[B, H, T, W]` and keys and values `[B, G, S, W]`, causal without a mask."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    scores = q @ k.mT * q.shape[3] ** -0.5
    if mask is None:
        mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril()
    scores = scores.masked_fill(mask.logical_not(), -torch.inf)
    return scores.softmax(-1, dtype=belief_dtype(q.dtype)).to(v.dtype) @ v


def _state_per_sequence(new: AttentionState, segments: Segments, segment_ids: Tensor) -> AttentionState:
    """Return the tokens of the batch row of each sequence, with positions of its own tokens only.

    If there are more sequences than rows, all share the tokens of the batch in one expanded row, without a copy.
    """
    count, leaves = segments.count, (*new, segment_ids)
    if count > segment_ids.shape[0]:
        leaves = tuple(x.flatten(0, 1)[None] for x in leaves)
    row = segments.rows[:, 0].long()
    keys, values, position, segment_ids = (x.expand(count, *x.shape[1:]) if x.shape[0] == 1 else x[row] for x in leaves)
    own = segment_ids == torch.arange(count, device=segment_ids.device)[:, None]
    return AttentionState(keys, values, torch.where(own, position, -1))


def _tokens_of_sequences(segments: Segments, batch: int, length: int) -> tuple[Tensor, Tensor]:
    """Return the index of each sequence's tokens in the flattened batch, `[N, L]`, and which of them it has.

    L is the number of tokens of the longest sequence; or `length`, if that number cannot be read, or if there are no
    more sequences than batch rows, so that a cache has the same slots in eager, compiled and exported code.
    """
    row, start, stop = segments.rows.long().unbind(1)
    count = stop - start
    longest = max(1, int(count.max())) if can_check_values(count) and segments.count > batch else length
    within = torch.arange(longest, device=row.device)
    inside = within < count[:, None]
    return torch.where(inside, (row * length + start)[:, None] + within, 0), inside
