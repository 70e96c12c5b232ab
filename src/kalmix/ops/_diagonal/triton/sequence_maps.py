"""Maps of beliefs by whole sequences, for `kalmix.updates`: combine the maps of their tiles one after another."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kalmix.ops._diagonal.scratch import CHUNK, padded_slots
from kalmix.ops._diagonal.triton.forward import map_tiles
from kalmix.ops._diagonal.triton.loads_and_filter_step import UNSPECIALIZED, cell_offsets
from kalmix.ops._diagonal.triton.plan import PREFETCH, channels_per_warp, forward_tile_size, is_ragged, plan_tiles
from kalmix.ops._shared.triton.compile_and_launch import Launch
from kalmix.ops._shared.triton.ptx import supports_ptx
from kalmix.ops._shared.triton.tiles import contiguous_rows
from kalmix.segments import Segments


@triton.jit(do_not_specialize=UNSPECIALIZED)
def _combine_tiles(
    maps, result, sequence_table, tiles, G, V,
    K: tl.constexpr, P: tl.constexpr, BLOCK: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Combine the maps of the tiles of a sequence, for a block of channels of one head."""
    sequence = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    channel = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.arange(0, P)
    inside = (channel < V)[:, None] & (slot < P)[None, :]
    real = (channel < V)[:, None] & (slot < K)[None, :]
    if PACKED:
        first, end = tl.load(sequence_table + 5 * sequence), tl.load(sequence_table + 5 * sequence + 3)
    else:
        first, end = sequence * tiles, sequence * tiles + tiles
    var_offset = tl.zeros([BLOCK, P], tl.float32)
    mean_offset = tl.zeros([BLOCK, P], tl.float32)
    factor = tl.full([BLOCK, P], 1.0, tl.float32)
    information = tl.zeros([BLOCK, P], tl.float32)
    info_mean = tl.zeros([BLOCK, P], tl.float32)
    plane = G * V * P
    at = cell_offsets(head, channel, V, P)
    for index in tl.range(first, end, num_stages=4):
        next_factor = tl.load(maps + index * 5 * plane + at, mask=inside, other=0.0)
        next_information = tl.load(maps + (index * 5 + 1) * plane + at, mask=inside, other=0.0)
        next_info_mean = tl.load(maps + (index * 5 + 2) * plane + at, mask=inside, other=0.0)
        next_var_offset = tl.load(maps + (index * 5 + 3) * plane + at, mask=inside, other=0.0)
        next_mean_offset = tl.load(maps + (index * 5 + 4) * plane + at, mask=inside, other=0.0)
        shrinkage = 1.0 / (1.0 + var_offset * next_information)
        entry, exit_factor = factor * shrinkage, next_factor * shrinkage
        information += entry * factor * next_information
        info_mean += entry * (next_info_mean - next_information * mean_offset)
        mean_offset = next_mean_offset + exit_factor * (mean_offset + var_offset * next_info_mean)
        var_offset = next_var_offset + exit_factor * next_factor * var_offset
        factor = exit_factor * factor
    at = (sequence * G + head) * K * V + slot[None, :] * V + channel[:, None]
    plane = tl.num_programs(0).to(tl.int64) * G * K * V
    tl.store(result + at, factor, mask=real)
    tl.store(result + plane + at, information, mask=real)
    tl.store(result + 2 * plane + at, info_mean, mask=real)
    tl.store(result + 3 * plane + at, mean_offset, mask=real)
    tl.store(result + 4 * plane + at, var_offset, mask=real)


def map_sequences(
    k: Tensor, v: Tensor, precision: Tensor, log_decay: Tensor, process_noise: Tensor, segments: Segments | None
) -> Tensor:
    """Return the fields of the `DiagonalUpdate` of each sequence, `[5, N, G, K, V]` in float32."""
    (batch, length, heads, channels), (shared, slots) = v.shape, k.shape[2:]
    k, v, precision = contiguous_rows(k), contiguous_rows(v), contiguous_rows(precision)
    width, size = padded_slots(slots), channels_per_warp(slots, 4)
    blocks = -(-channels // size)
    plan = plan_tiles(batch, length, forward_tile_size(v, slots), segments, k)
    sequences = batch if segments is None else segments.count
    common = {"BLOCK": size, "K": slots, "P": width, "PACKED": segments is not None}
    like = {"dtype": torch.float32, "device": v.device}
    maps = torch.empty(plan.num_tiles, 5, heads, channels, width, **like)
    arguments = (
        k, v, precision, log_decay.contiguous(), process_noise.contiguous(), maps, plan.tile_table, length, plan.size,
        plan.tiles, *k.stride()[1:3], *v.stride()[1:3], *precision.stride()[1:3], heads, channels, heads // shared,
    )  # fmt: skip
    cells = {"EVEN": channels % size == 0, "RAGGED": is_ragged(length, segments), "CHUNK": CHUNK, "PREFETCH": PREFETCH}
    options = {"num_warps": 1, "PTX": supports_ptx(), "EVERY": True, **cells, **common}
    Launch(map_tiles, (plan.num_tiles * blocks, heads), arguments, options).run()
    result = torch.empty(5, sequences, heads, slots, channels, **like)
    arguments = (maps, result, plan.sequence_table, plan.tiles, heads, channels)
    Launch(_combine_tiles, (sequences, heads, blocks), arguments, {"num_warps": 4, **common}).run()
    return result
