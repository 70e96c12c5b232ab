"""How the forward kernels of linear memories are launched: by rule, from widths and dtypes."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from kalmix.kernels.primitives.triton_decays import pace
from kalmix.kernels.primitives.triton_keys import fold
from kalmix.kernels.primitives.triton_memory import carry, read, solve
from kalmix.kernels.primitives.triton_tiles import Cut, cut_tokens, precision, rows
from kalmix.segments import Segments


class Signals(NamedTuple):
    """Signals as the kernels read them: rows contiguous, decays per key folded in.

    Attributes:
        q, k: `[B, T, H, K]`; per key, `[B, T, G, K]` with the decay since the tile's entry.
        writes: k, or the vector gains, `[B, T, H or G, K]`; per key, `[B, T, G, K]` with gain and decay to the exit.
        gain, log_decay: contiguous `[B, T, G]` where they are a number a token, else a placeholder.
        entering, leaving, across: of decays per head, `triton_decays.pace`; else what stands for it, or a placeholder.
        scores, corrections: S and N of decays per key, `[B, T, G, SIZE]`, or placeholders.
        flags: what the kernels compile for.
    """

    q: Tensor
    k: Tensor
    writes: Tensor
    gain: Tensor
    log_decay: Tensor
    entering: Tensor
    leaving: Tensor
    across: Tensor
    scores: Tensor
    corrections: Tensor
    cut: Cut
    decays: bool
    keyed: bool
    gains: bool
    vector: bool
    sizes: dict[str, Any]


def prepare(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gain: Tensor | None,
    log_decay: Tensor | None,
    segments: Segments | None,
    corrects: bool,
    size: int,
) -> Signals:
    """What both passes start from."""
    (batch, length, heads, width), keys = v.shape, k.shape[3]
    cut = cut_tokens(batch, length, size, segments, q)
    q, k = rows(q), rows(k)
    keyed, vector = log_decay is not None and log_decay.ndim == 4, gain is not None and gain.ndim == 4
    gains, decays = gain is not None and not vector, log_decay is not None and not keyed
    writes = rows(gain) if vector else k
    per_token = gain.contiguous() if gains else q
    block = min(64, max(16, triton.next_power_of_2(max(keys, width))))
    sizes = {
        "K": keys,
        "V": width,
        "BLOCK": block,
        "SIZE": size,
        "PACKED": segments is not None,
        "PRECISION": precision(v.dtype),
    }
    entering = across = log_decay_rows = scores = corrections = q
    leaving = per_token
    if decays:
        log_decay_rows = log_decay.contiguous()
        entering, leaving = torch.empty(2, batch, length, heads, dtype=torch.float32, device=v.device)
        across = torch.empty(cut.count, heads, dtype=torch.float32, device=v.device)
        pace[cut.count, heads](
            log_decay_rows, per_token, entering, leaving, across, cut.table, length, cut.tiles, heads,
            SIZE=size, PACKED=segments is not None, GAINS=gains, num_warps=1,
        )  # fmt: skip
    if keyed:
        log_decay_rows, inputs = rows(log_decay), (q, k, writes)
        like, shape = {"dtype": v.dtype, "device": v.device}, (batch, length, heads)
        q, writes = (torch.empty(*shape, keys, **like) for _ in range(2))
        k = torch.empty_like(q) if corrects else q
        scores = torch.empty(*shape, size, **like)
        corrections = torch.empty(*shape, size, dtype=torch.float32, device=v.device) if corrects else scores
        across = torch.empty(cut.count, heads, keys, dtype=torch.float32, device=v.device)
        whole = max(16, triton.next_power_of_2(keys))
        fold[cut.count, heads, size // 16](
            *inputs, per_token, log_decay_rows, q, k, writes, across, scores, corrections, cut.table, length, cut.tiles,
            *strides(*inputs, log_decay_rows), heads, heads // inputs[0].shape[2], heads // inputs[2].shape[2],
            K=keys, WIDTH=whole, SIZE=size, PACKED=segments is not None, GAINS=gains, CORRECTS=corrects,
            PRECISION=sizes["PRECISION"], num_warps=4 if whole > 64 else 2,
        )  # fmt: skip
    found = (q, k, writes, per_token, log_decay_rows, entering, leaving, across, scores, corrections)
    return Signals(*found, cut, decays, keyed, gains, vector, sizes)


def strides(*tensors: Tensor) -> list[int]:
    return [stride for x in tensors for stride in x.stride()[1:3]]


def columns(sequences: int, heads: int, width: int, block: int) -> int:
    """Columns of a memory a program carries: few enough that there are programs for every multiprocessor."""
    values = min(block, max(16, triton.next_power_of_2(width)))
    while values > 32 and sequences * heads * triton.cdiv(width, values) < 128:
        values //= 2
    return values


def stages(dtype: torch.dtype, keys: int) -> int:
    """Tiles on their way while one is worked on, as shared memory allows."""
    return 1 if dtype == torch.float32 and keys > 64 else 2


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gain: Tensor | None,
    log_decay: Tensor | None,
    prior: Tensor,
    segments: Segments | None,
    corrects: bool,
    size: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Means, the last memory, and of tiles: the memory at their entry, errors and inverses (empty if it adds only)."""
    (batch, length, heads, width), keys = v.shape, k.shape[3]
    s = prepare(q, k, v, gain, log_decay, segments, corrects, size)
    cut, v, own = s.cut, rows(v), heads // s.writes.shape[2]
    tiles, share = (cut.table, length, cut.tiles), heads // s.q.shape[2]
    like = {"dtype": v.dtype, "device": v.device}
    states = torch.empty(cut.count, heads, keys, width, **like)
    last = torch.empty(cut.sequences, heads, keys, width, dtype=prior.dtype, device=v.device)
    kinds = {"DECAYS": s.decays, "GAINS": s.gains and not s.keyed}
    errors, inverses, fast, free = v, v.new_empty(0), v, v
    if corrects:
        free, errors = (torch.empty(v.shape, **like) for _ in range(2))
        fast = torch.empty(batch, length, heads, keys, **like)
        inverses = torch.empty(batch, length, heads, size, **like)
        solve[cut.count, heads](
            s.k, s.writes, v, s.gain, s.log_decay, s.entering, s.corrections, inverses, fast, free, *tiles,
            *strides(s.k, s.writes, v), heads, share, own, **kinds, GIVEN=s.keyed, num_warps=4, **s.sizes,
        )  # fmt: skip
    values = columns(cut.sequences, heads, width, s.sizes["BLOCK"])
    carry[cut.sequences, heads, triton.cdiv(width, values)](
        s.writes, fast, free, errors, states, prior, last, s.leaving, s.across, cut.runs, length, cut.tiles,
        *strides(s.writes, free), *prior.stride(), heads, own,
        VALUES=values, DECAYS=s.decays, KEYED=s.keyed, SCALED=s.decays or (s.gains and not s.keyed), CORRECTS=corrects,
        STAGES=stages(v.dtype, keys), num_warps=4, **s.sizes,
    )  # fmt: skip
    mean = (torch.empty if segments is None else torch.zeros)(v.shape, **like)
    values = min(128, max(16, triton.next_power_of_2(width)))
    read[cut.count, heads, triton.cdiv(width, values)](
        s.q, s.writes, errors, s.gain, s.log_decay, s.scores, states, mean, *tiles,
        *strides(s.q, s.writes, errors), heads, share, own,
        VALUES=values, GIVEN=s.keyed, BACK=False, num_warps=4, **kinds, **s.sizes,
    )  # fmt: skip
    return mean, last, states, errors if corrects else v.new_empty(0), inverses
