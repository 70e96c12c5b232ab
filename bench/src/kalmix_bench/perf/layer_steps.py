"""Time forward and backward passes of stacked layers, without a model around them.

    python -m kalmix_bench.perf.layer_steps --layer rt-afa --layer recurrent-afa    # a GPU if there is one
    python -m kalmix_bench.perf.layer_steps --layer afa --hidden-size 64 --tokens 128

Prints a row per layer and number of heads, and writes all rows to <output>/<date>-<hardware>-layer-steps.json. Wall
times are medians and include the host. The number of kernels, their time and the peak of memory are those of one step.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from kalmix.layers import MIXERS
from kalmix_bench.perf.result_file import write_rows
from kalmix_bench.perf.timing import kernels_launched

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def step_of(layers: nn.ModuleList, x: Tensor, dtype: torch.dtype) -> Callable[[], None]:
    """Return a function that runs a forward and a backward pass; layers have residual connections."""

    def step() -> None:
        with torch.autocast(x.device.type, dtype, enabled=dtype != torch.float32):
            y = x
            for layer in layers:
                y = y + layer(y)[0]
        y.float().square().mean().backward()

    return step


def measure(step: Callable[[], None], device: torch.device, repeats: int) -> dict[str, Any]:
    """Return wall milliseconds of a step and, on a GPU, its kernels, their milliseconds and the bytes it allocates."""
    gpu = device.type == "cuda"
    for _ in range(2):
        step()
    times = []
    before = torch.cuda.memory_allocated() if gpu else 0
    if gpu:
        torch.cuda.reset_peak_memory_stats()
    for _ in range(repeats):
        if gpu:
            torch.cuda.synchronize()
        start = time.perf_counter()
        step()
        if gpu:
            torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - start))
    row: dict[str, Any] = {"ms": statistics.median(times)}
    if gpu:
        row["peak"] = torch.cuda.max_memory_allocated() - before
        row["kernels"], row["gpu_ms"] = kernels_launched(step)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layer", action="append", choices=MIXERS, required=True, help="repeatable")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="of autocast")
    parser.add_argument("--depth", type=int, default=2, help="number of layers")
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--hidden-size", type=int, default=512)
    parser.add_argument("--heads", type=int, action="append", help="repeatable; default: the layer's own number")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--output", type=Path, default=Path("results"))
    parser.add_argument("--commit", help="commit for the rows, where git is absent")
    arguments = parser.parse_args()
    device, size, rows = torch.device(arguments.device), arguments.hidden_size, []
    for name in arguments.layer:
        for heads in arguments.heads or [None]:
            torch.manual_seed(0)
            layers = nn.ModuleList(MIXERS[name](size, heads=heads) for _ in range(arguments.depth)).to(device)
            x = torch.randn(arguments.batch, arguments.tokens, size, device=device, requires_grad=True)
            found = measure(step_of(layers, x, DTYPES[arguments.dtype]), device, arguments.repeats)
            rows.append({"layer": name, "heads": heads} | found)
            print(rows[-1], flush=True)
    write_rows(rows, device, "layer-steps", arguments)


if __name__ == "__main__":
    main()
