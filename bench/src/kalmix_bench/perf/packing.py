"""Time ops on a row of tokens that is one sequence, or many packed ones.

    python -m kalmix_bench.perf.packing                     # a GPU if there is one
    python -m kalmix_bench.perf.packing --ops attend --tokens 4096

Work and memory should follow the sum of the lengths: a row of short sequences should not take longer than one of a
single sequence. Prints a table and writes it after each row, with hardware, versions and commit, to
<output>/<date>-<hardware>-packing.json.
"""

from __future__ import annotations

import argparse
import json
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch

from kalmix import Segments
from kalmix.ops import OPS
from kalmix.training.provenance import provenance
from kalmix_bench.perf.result_file import dated_file
from kalmix_bench.perf.timing import measure
from kalmix_bench.perf.workloads import Signals, signals

HEADS, WIDTH = 8, 128
SLOTS = 32  # of `diagonal`, with as many channels as other ops have values
DTYPE = {"cuda": torch.bfloat16, "cpu": torch.float32}


def time_row(op: str, tokens: int, length: int, device: str) -> dict[str, Any]:
    """Return times and peak bytes of a call, forward and with the backward pass, on sequences of `length` tokens."""
    shape = (1, tokens, HEADS * WIDTH, SLOTS) if op == "diagonal" else (1, tokens, HEADS, WIDTH)
    x = signals(op, "head", shape, device, DTYPE[device])
    segments = Segments.packed(torch.arange(0, tokens + 1, length, device=device, dtype=torch.int32))
    call = partial(_call, op, x, segments)
    calls = {
        "forward_ms": torch.no_grad()(call),
        "both_ms": lambda: torch.autograd.grad(call().sum(), list(x.values())),
    }
    row = {"op": op, "sequences": tokens // length, "length": length, "dtype": str(DTYPE[device])[6:]}
    for name, timing in measure(calls, device).items():
        row |= {name: timing.ms, name.replace("_ms", "_peak"): timing.peak}
    return row


def _call(op: str, x: Signals, segments: Segments) -> torch.Tensor:
    return OPS[op].function(**x, segments=segments).mean


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ops", nargs="+", choices=OPS, default=list(OPS))
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument(
        "--lengths", nargs="+", type=int, help="lengths of sequences. Default: all tokens, 64, 16 and 1"
    )
    parser.add_argument("--output", type=Path, default=Path("results"))
    given = parser.parse_args()
    for length in given.lengths or (given.tokens,):
        if length < 1 or given.tokens % length:
            parser.error(f"--lengths has {length}, which does not divide {given.tokens} tokens")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    origin = provenance(torch.device(device))
    names = {"op": 10, "sequences": 9, "length": 6, "fwd ms": 9, "f+b ms": 9, "fwd MiB": 9, "f+b MiB": 9}
    print(origin["device"] + "\n" + " ".join(f"{name:>{width}}" for name, width in names.items()))
    file = dated_file(given.output, origin["device"], "packing")
    file.parent.mkdir(parents=True, exist_ok=True)
    rows = []
    for op, length in product(given.ops, given.lengths or (given.tokens, 64, 16, 1)):
        row = time_row(op, given.tokens, length, device)
        times = [row.get(name, float("nan")) for name in ("forward_ms", "both_ms")]
        peaks = [row.get(name, float("nan")) / 2**20 for name in ("forward_peak", "both_peak")]
        print(
            f"{op:>10} {row['sequences']:9} {length:6} {times[0]:9.3f} {times[1]:9.3f} {peaks[0]:9.0f} {peaks[1]:9.0f}",
            flush=True,
        )
        rows.append(row)
        file.write_text(json.dumps(origin | {"tokens": given.tokens, "rows": rows}, indent=1) + "\n")
    print(f"wrote {file}")


if __name__ == "__main__":
    main()
