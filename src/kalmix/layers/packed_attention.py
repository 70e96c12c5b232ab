"""Causal softmax attention within packed sequences, and of runs of tokens to keys of other ranks."""

from __future__ import annotations

import inspect
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kalmix.distributed.attention_blocks import Tile, attend_tiles, group_rows, has_fused_kernel
from kalmix.distributed.layout import KeyRuns
from kalmix.segments import Segments, of_tokens
from kalmix.types import dependent_zero
from kalmix.validation import in_transform

_FLASH: dict[str, Any] = {}  # PyTorch's function, and its options if query heads share keys; see `load_flash_attention`
_SCORE = 2.0**15  # largest power of two in float16; scores of other sequences are at most minus its square
_BITS = 20  # of the index of a sequence, where its largest value is unknown
_TILES = 4  # largest number of tiles whose separate calls replace one variable-length call: two runs of unpacked rows


def attend_packed(q: Tensor, k: Tensor, v: Tensor, segments: Segments, segment_ids: Tensor) -> Tensor:
    """Compute causal softmax attention within each sequence, without a synchronization.

    Flash attention for sequences of different lengths computes it in half precision on a GPU. Elsewhere, PyTorch's SDPA
    computes it without a mask: columns are added to queries and keys so that scores between two sequences are below
    -10^9 and the scores within one do not change. Its time is that of one sequence as long as the row.

    Complexity: memory O(B T); time O(B T L) on a GPU in half precision, for sequences of L tokens, O(B T^2) elsewhere.

    Args:
        q: queries `[B, T, H, W]`, finite outside the sequences.
        k: keys `[B, T, G, W]`, like `q`. G divides H.
        v: values `[B, T, G, W]`, like `q`. Queries and keys are converted to their dtype.
        segments: the sequences.
        segment_ids: `segments.segment_ids(B, T)`.

    Returns:
        `[B, T, H, W]`; of no meaning outside the sequences. NaN in a sequence does not reach others.
    """
    q, k = q.to(v.dtype), k.to(v.dtype)  # under autocast, the norms of queries and keys return float32
    if _can_use_flash(q):
        batch, length = q.shape[:2]
        bounds = sequence_bounds(segments, batch, length)
        query, key, value = (x.flatten(0, 1) for x in (q, k, v))
        options = {"window_size": (-1, 0), **(_FLASH["shared"] if q.shape[2] != k.shape[2] else {})}
        return _FLASH["attend"](query, key, value, bounds, bounds, length, length, **options).view(q.shape)
    finite = torch.stack([x.isfinite().flatten(2).all(2) for x in (q, k, v)]).all(0)
    q, k, v = (torch.where(finite[..., None, None], x, 0) for x in (q, k, v))
    output = _attend_with_codes(q, k, v, segments, segment_ids)
    not_finite = F.pad(finite.logical_not().cumsum(1), (1, 0))  # such tokens before each token of the row
    row, start = segments.rows[:, :2].long().unbind(1)
    reached = not_finite[:, 1:] > of_tokens(not_finite[row, start], segment_ids)
    return output + torch.zeros_like(reached, dtype=output.dtype).masked_fill(reached, torch.nan)[..., None, None]


def attend_runs(q: Tensor, k: Tensor, v: Tensor, runs: KeyRuns) -> Tensor:
    """Compute causal softmax attention of runs of tokens to the keys of their documents.

    Runs of unpacked rows are cut into keys that all queries see, and a causal square: cuDNN's kernel, the fastest on
    Hopper, does not support causal masks whose last query sees all of a larger number of keys. These runs have no
    second derivative.

    Args:
        q: queries `[B, T, H, W]`.
        k: keys `[B, S, G, W]`. G divides H.
        v: values `[B, S, G, W]`. Queries and keys are converted to their dtype.
        runs: runs in `q` and the tokens in `k` to which they attend.

    Returns:
        `[B, T, H, W]`, 0 outside the runs.

    Complexity: memory linear in the number of queries and of keys, on a GPU in half precision.
    """
    q, k = q.to(v.dtype), k.to(v.dtype)
    batch, length = q.shape[:2]
    if not runs.queries:
        return torch.zeros_like(q) + dependent_zero(q, k, v)
    tiles = tiles_of_runs(runs)
    if len(tiles) <= _TILES and has_fused_kernel(q) and not in_transform():
        with torch.autocast(q.device.type, enabled=False):
            return attend_tiles(q, k, v, tiles)
    flat = q.new_zeros(batch * length, *q.shape[2:])
    query = [q[row, start:stop] for row, start, stop in runs.queries]
    key, value = ([x[row, start:stop] for row, start, stop in runs.visible] for x in (k, v))
    if _can_use_flash(q):
        lengths = (max(map(len, parts)) for parts in (query, key))
        options = {"window_size": (-1, 0), **(_FLASH["shared"] if q.shape[2] != k.shape[2] else {})}
        tensors = [torch.cat(x) for x in (query, key, value)]
        output = _FLASH["attend"](*tensors, runs.query_bounds, runs.key_bounds, *lengths, **options)
    else:
        output = torch.cat([_attend_to_earlier(*x) for x in zip(query, key, value, strict=True)])
    places = [(row * length + start, row * length + stop) for row, start, stop in runs.queries]
    index = torch.cat([torch.arange(first, end, device=q.device) for first, end in places])
    return flat.index_copy(0, index, output).view(q.shape)


def tiles_of_runs(runs: KeyRuns) -> list[Tile]:
    """Return tiles of queries and the keys that all of them see, and causal squares of queries and their own keys."""
    rectangles = []
    for (row, start, stop), (_, first, last) in zip(runs.queries, runs.visible, strict=True):
        own = last - (stop - start)
        rectangles.append((row, start, stop, own, last, True))
        if first < own:
            rectangles.append((row, start, stop, first, own, False))
    return group_rows(rectangles)


def _attend_to_earlier(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Compute causal attention of queries `[L, H, W]`, the last of which attends to all keys `[S, G, W]`."""
    mask = torch.ones(len(q), len(k), dtype=torch.bool, device=q.device).tril(len(k) - len(q))
    grouped = q.shape[1] != k.shape[1]
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=grouped)[0].transpose(0, 1)


def sequence_bounds(segments: Segments, batch: int, length: int) -> Tensor:
    """Return cumulative lengths of sequences that cover the flattened batch, int32 `[N + B + 1]`.

    Tokens after a sequence count to it: a causal sequence does not see them. Tokens before the first sequence of a row
    form one of their own.
    """
    row, start, stop = segments.rows.long().unbind(1)
    total = batch * length
    begin = torch.where(stop > start, row * length + start, total)
    rows = torch.arange(0, batch + 1, device=begin.device) * length
    return torch.cat([begin, rows]).sort().values.to(torch.int32)


def load_flash_attention() -> None:
    """Import PyTorch's flash attention for sequences of different lengths, if PyTorch was built with it.

    The import takes a second, because it imports the compiler.
    """
    if not _FLASH and torch.version.cuda and torch.backends.cuda.is_flash_attention_available():
        from torch.nn.attention.varlen import varlen_attn

        named = "enable_gqa" in inspect.signature(varlen_attn).parameters  # earlier versions need no such option
        _FLASH.update(attend=varlen_attn, shared={"enable_gqa": True} if named else {})


def _can_use_flash(q: Tensor) -> bool:
    """Return whether flash attention supports these queries."""
    if not _FLASH or not q.is_cuda or q.dtype not in (torch.float16, torch.bfloat16):
        return False
    return q.shape[3] % 8 == 0 and q.shape[3] <= 256


def _attend_with_codes(q: Tensor, k: Tensor, v: Tensor, segments: Segments, segment_ids: Tensor) -> Tensor:
    """Attend with columns that encode the index of the sequence in binary.

    Each bit takes two columns. Their product is 0 if query and key agree in it, and -2^30 otherwise.
    """
    width = q.shape[3]
    bits = _BITS if torch.compiler.is_compiling() else max(1, segments.count.bit_length())
    one = (segment_ids[..., None] + 1) >> torch.arange(bits, device=q.device) & 1
    missing = -2 * bits % 8
    query_code = F.pad(torch.cat([one, 1 - one], 2), (0, missing)).to(q.dtype)[:, :, None] * _SCORE
    key_code = F.pad(torch.cat([1 - one, one], 2), (0, missing)).to(k.dtype)[:, :, None] * -_SCORE
    q = torch.cat([q, query_code.expand(-1, -1, q.shape[2], -1)], dim=3)
    k = torch.cat([k, key_code.expand(-1, -1, k.shape[2], -1)], dim=3)
    v = F.pad(v, (0, 2 * bits + missing))  # fused kernels need values as wide as keys
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    grouped = q.shape[1] != k.shape[1]
    output = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=width**-0.5, enable_gqa=grouped)
    return output.transpose(1, 2)[..., :width]
