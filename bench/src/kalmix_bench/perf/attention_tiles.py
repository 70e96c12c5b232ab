"""Compare tiles of the step of `Attention` with float64, and time them on a GPU.

    python -m kalmix_bench.perf.attention_tiles    # on a GPU
    TRITON_INTERPRET=1 python -m kalmix_bench.perf.attention_tiles --batches 2 --tokens 40 --widths 16    # on a CPU

A row is a size, a dtype and the constants of the kernels: elements of a tile, elements of a tile for each warp, and how
many parts a history has. It has the largest relative error of the outputs and of the stored token, in norm, and whether
that is within the bound; on a GPU also microseconds of both kernels and of a copy that moves as many bytes as all keys
and values have. A row is written when it ends. Constants whose rows are all right may become the constants of
`kalmix.layers.fused.triton.attention_step`.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor

from kalmix.layers.fused.attention_step import RotaryHeads
from kalmix.layers.fused.triton import attention_step
from kalmix.training.provenance import provenance
from kalmix_bench.perf.timing import measure
from kalmix_bench.runner.json_lines import append_rows

# Rounding gives 2e-7 in float32 and, where the result is rounded to bfloat16, 3e-3 to 5e-3. Wrong code gives far more.
BOUNDS = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
STEPS = 16  # steps in a timed call, because one is too short
EPS, BASE = 1e-6, 10_000.0


class Tiles(NamedTuple):
    """Constants of the kernels; see `kalmix.layers.fused.triton.attention_step`."""

    tile: int
    warp: int
    parts: int
    least: int

    def __str__(self) -> str:
        return f"tile {self.tile}, {self.warp} a warp, {self.parts} parts of {self.least} tokens or more"


NOW = Tiles(attention_step.TILE, attention_step.ELEMENTS_PER_WARP, attention_step.PARTS, attention_step.LEAST)
TILES = [
    NOW,
    Tiles(1024, 1024, 64, 16),
    Tiles(4096, 1024, 64, 64),
    Tiles(2048, 1024, 128, 32),
    Tiles(1024, 512, 128, 16),
]


class Problem:
    """A step of a batch whose histories are full, partly filled or empty.

    Args:
        batch: sequences.
        tokens: room of a history.
        width: columns of a head.
        repeat: query heads of a key head.
        dtype: of the token, of keys and of values.
        device: device.
        full: whether all histories are full; otherwise their lengths differ.
        heads: query heads.
    """

    def __init__(
        self, batch: int, tokens: int, width: int, repeat: int, dtype: torch.dtype, device: str, full: bool, heads: int
    ) -> None:
        generator = torch.Generator(device).manual_seed(0)

        def draw(*shape: int) -> Tensor:
            return torch.randn(shape, dtype=torch.float32, device=device, generator=generator).to(dtype)

        self.heads = RotaryHeads(heads, heads // repeat, width, BASE, EPS, EPS)
        self.x = draw(batch, 1, (heads + 2 * self.heads.kv_heads) * width)
        self.norms = [1 + 0.1 * draw(width).abs(), 1 + 0.1 * draw(width).abs()]
        lengths = (
            torch.arange(batch, device=device) * (2 * tokens + 3) // batch
        )  # the longest have begun the ring again
        lengths = torch.full_like(lengths, tokens + 5) if full else lengths
        index = torch.arange(tokens, device=device)
        newest = lengths[:, None] - 1
        positions = newest - (newest - index) % tokens
        self.positions = torch.where((positions >= 0) & (newest >= 0), positions, -1)
        self.keys, self.values = (draw(batch, tokens, self.heads.kv_heads, width) for _ in range(2))
        self.slots = [torch.arange(batch, dtype=torch.int32, device=device)] * 2

    def pool(self) -> list[Tensor]:
        """Return a copy of the histories."""
        return [self.keys.clone(), self.values.clone(), self.positions.clone()]

    def run(self, pool: list[Tensor]) -> Tensor:
        """Run both kernels, in place on `pool`."""
        return attention_step.step(self.x, self.norms, pool, self.slots, self.heads)

    def expected(self) -> tuple[Tensor, Tensor]:
        """Return outputs and stored keys in float64, by equations."""
        heads, groups, width = self.heads.heads, self.heads.kv_heads, self.heads.width
        q, k, v = self.x[:, 0].double().split([heads * width, groups * width, groups * width], -1)
        position = self.positions.amax(1) + 1
        q = self._turned(q.unflatten(-1, (heads, width)), self.norms[0], position)
        k = self._turned(k.unflatten(-1, (groups, width)), self.norms[1], position).to(self.keys.dtype)
        outputs = []
        for row in range(len(q)):  # one history in float64 at a time
            past = (self.positions[row] >= 0) & (self.positions[row] > position[row] - self.keys.shape[1])
            keys, values = (
                torch.cat([x[row, past], new[row, None]]).double()
                for x, new in ((self.keys, k), (self.values, v.unflatten(-1, (groups, width))))
            )
            scores = torch.einsum("grw,sgw->grs", q[row].unflatten(0, (groups, -1)), keys) * width**-0.5
            outputs.append(torch.einsum("grs,sgw->grw", scores.softmax(-1), values).flatten())
        return torch.stack(outputs)[:, None], k

    def _turned(self, x: Tensor, weight: Tensor, position: Tensor) -> Tensor:
        x = x * (x.square().mean(-1, keepdim=True) + EPS).rsqrt() * weight.double()
        half = x.shape[-1] // 2
        rates = BASE ** (-torch.arange(half, dtype=torch.float64, device=x.device) / half)
        angle = (position[:, None] * rates)[:, None]
        a, b = x[..., :half], x[..., half:]
        return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1)


def errors(problem: Problem, expected: tuple[Tensor, Tensor]) -> dict[str, float]:
    """Return relative errors of the outputs and of the stored key; the largest of all rows of the batch."""
    pool = problem.pool()
    y = problem.run(pool)
    rows, place = torch.arange(len(y), device=y.device), (problem.positions.amax(1) + 1) % problem.keys.shape[1]
    found = {"error": (y.double(), expected[0]), "key_error": (pool[0][rows, place].double(), expected[1].double())}
    return {
        name: float(((a - b).flatten(1).norm(dim=1) / b.flatten(1).norm(dim=1)).max()) for name, (a, b) in found.items()
    }


def microseconds(problem: Problem) -> dict[str, float]:
    """Return microseconds of a step, and those of a copy that moves as many bytes as all keys and values have."""
    pool, half = problem.pool(), problem.keys.flatten()
    target = torch.empty_like(half)

    def steps() -> None:
        for _ in range(STEPS):
            problem.run(pool)

    def copies() -> None:  # reads the keys and writes as much: the bytes of keys and values
        for _ in range(STEPS):
            target.copy_(half)

    timings = measure({"us": steps, "copy_us": copies}, "cuda")
    return {name: timing.ms * 1e3 / STEPS for name, timing in timings.items()}


def constants(tiles: Tiles) -> ExitStack:
    """Return a context in which the kernels have these constants."""
    stack = ExitStack()
    for name, value in zip(("TILE", "ELEMENTS_PER_WARP", "PARTS", "LEAST"), tiles, strict=True):
        stack.enter_context(patch.object(attention_step, name, value))
    return stack


def problems(given: argparse.Namespace, device: str) -> Iterator[tuple[dict[str, Any], Problem]]:
    """Yield the sizes of each problem, and the problem; full histories in bfloat16 first, which are timed."""
    for full, dtype in ((True, torch.bfloat16), (False, torch.bfloat16), (False, torch.float32)):
        for batch, tokens, width, repeat in product(given.batches, given.tokens, given.widths, given.repeats):
            if not full and batch * tokens > given.most:
                continue
            sizes = {"batch": batch, "tokens": tokens, "width": width, "repeat": repeat, "full": full}
            made = Problem(batch, tokens, width, repeat, dtype, device, full, max(repeat, given.columns // width))
            yield sizes | {"dtype": str(dtype).removeprefix("torch.")}, made


def main() -> None:
    begin = time.monotonic()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 64])
    parser.add_argument("--tokens", nargs="+", type=int, default=[512, 8192], help="room of a history")
    parser.add_argument("--widths", nargs="+", type=int, default=[64, 128], help="columns of a head")
    parser.add_argument("--repeats", nargs="+", type=int, default=[1, 4], help="query heads of a key head")
    parser.add_argument("--columns", type=int, default=1024, help="columns of all query heads")
    parser.add_argument("--most", type=int, default=2**17, help="tokens of histories of several lengths, at most")
    parser.add_argument("--deadline", type=float, default=float("inf"), help="seconds after which no size begins")
    parser.add_argument("--commit", help="commit for the rows, where git is absent")
    parser.add_argument("--output", type=Path, default=Path("results/attention-tiles.jsonl"), help="file to append to")
    given = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    origin = provenance(torch.device(device), given.commit)
    right: dict[Tiles, list[bool]] = {tiles: [] for tiles in TILES}
    for sizes, problem in problems(given, device):
        if time.monotonic() - begin >= given.deadline:
            print(f"{given.deadline:.0f} seconds have passed; not begun: {sizes} and later sizes")
            break
        expected = problem.expected()
        for tiles in TILES:
            with constants(tiles):
                row = sizes | tiles._asdict() | errors(problem, expected)
                if device == "cuda" and sizes["full"]:
                    row |= microseconds(problem)
            row["right"] = max(row["error"], row["key_error"]) <= BOUNDS[problem.x.dtype]
            append_rows(given.output, [row | origin])
            right[tiles].append(row["right"])
            print({name: f"{x:.3g}" if isinstance(x, float) else x for name, x in row.items()}, flush=True)
    for tiles, found in right.items():
        print(f"{tiles}: {sum(found)} of {len(found)} rows are right")


if __name__ == "__main__":
    main()
