"""Time ops on long sequences with few heads, called once and on spans by `kalmix.updates.filter_in_spans`.

    python -m kalmix_bench.perf.spans                     # dense and delta, 65,536 tokens, 8 heads of 128
    python -m kalmix_bench.perf.spans --length 256 --heads 2 --width 16 --spans 1 4    # seconds on a CPU

A row is an op and a number of spans; 1 is the op itself. It has the times, kernels and peak memory above the inputs of
the forward pass, and of forward with backward. On a GPU, times are medians of device times; if the sum of the times of
all kernels ("forward_gpu_ms", "both_gpu_ms") is much smaller, the GPU waited for the host. A row also has relative
errors of the mean and of all gradients, in norm. They compare with the op on the whole sequence in float64, or in
float32 if float64 fails, takes too long or is not wanted (`--reference`); "reference" says which. Each row is written
when it ends. Then prints a table, and the numbers of spans that are faster than the op itself.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from kalmix.ops import OPS
from kalmix.training.provenance import provenance
from kalmix.updates import filter_in_spans
from kalmix_bench.perf.ops import Reference, backward
from kalmix_bench.perf.packing import SLOTS
from kalmix_bench.perf.peers import Run
from kalmix_bench.perf.row_status import row_or_reason
from kalmix_bench.perf.timing import kernels_launched, measure
from kalmix_bench.perf.workloads import WITH_VARIANCE, Signals, signals
from kalmix_bench.runner.json_lines import append_rows

LIMIT = 300.0  # seconds of a row
REFERENCE_LIMIT = 60.0  # seconds of a reference in float64; a backward pass that has begun is not interrupted
PASSES = {"forward": "forward", "both": "forward + backward"}
# Factors of random signals. Decays per token become 0.9 to 0.9999, noise variances of observations about 0.1 and of the
# process about 0.001.
FACTORS = {"log_decay": 1 / 16, "obs_noise": 1 / 8, "process_noise": 1 / 32}
DIAGONAL_FACTORS = {"precision": 8.0}  # its decays are near 1, and its process noises small


def long_signals(op: str, shape: tuple[int, int, int, int], device: str, dtype: torch.dtype) -> Signals:
    """Draw signals whose memory lasts for many tokens; `shape` is (batch, tokens, heads, width)."""
    batch, tokens, heads, width = shape
    x = signals(op, "head", (batch, tokens, heads * width, SLOTS) if op == "diagonal" else shape, device, dtype)
    factors = DIAGONAL_FACTORS if op == "diagonal" else FACTORS
    return {name: (leaf.detach() * factors.get(name, 1)).requires_grad_() for name, leaf in x.items()}


def filtered(op: str, spans: int, x: Signals) -> tuple[Tensor]:
    """Return the mean by the op, or by `filter_in_spans` if there are several spans."""
    return ((OPS[op].function(**x) if spans == 1 else filter_in_spans(op, **x, spans=spans)).mean,)


def find_reference(op: str, x: Signals, dtypes: Sequence[torch.dtype]) -> tuple[str | None, Reference | None]:
    """Return the dtype and the results of a reference, in the first dtype that works; nothing if all fail."""
    for dtype in dtypes:
        found = row_or_reason(partial(_reference, op, x, dtype), REFERENCE_LIMIT)
        if "reference" in found:
            return str(dtype).removeprefix("torch."), found["reference"]
        print(f"    ({op}, reference in {dtype}: {found['status']}, {found['reason']})", flush=True)
        torch.cuda.empty_cache()
    return None, None


def _reference(op: str, x: Signals, dtype: torch.dtype) -> dict[str, Any]:
    reference = Reference(op, x, dtype, **({"variance": False} if op in WITH_VARIANCE else {}))
    reference.gradients(1)
    return {"reference": reference}


def measure_row(op: str, spans: int, x: Signals, reference: Reference | None) -> dict[str, Any]:
    """Return the measurements of a row, with a "status" and, after a failure, its "reason".

    Args:
        op: op.
        spans: number of spans.
        x: signals of the op.
        reference: results to compare with, if any.
    """
    run = partial(filtered, op, spans)
    row = row_or_reason(partial(_times, run, x), LIMIT)
    if reference is not None and row["status"] == "ok":
        row |= row_or_reason(partial(_errors, run, x, reference), LIMIT)
    torch.cuda.empty_cache()
    return row


def _times(run: Run, x: Signals) -> dict[str, Any]:
    device, upstream = x["v"].device.type, [torch.ones_like(x["v"].detach())]
    calls = {"both": partial(backward, run, x, upstream), "forward": torch.no_grad()(partial(run, x))}
    timings = measure(calls, device)
    row: dict[str, Any] = {"status": "ok" if len(timings) == len(calls) else "out of memory"}
    for name, timing in timings.items():
        row |= {f"{name}_ms": timing.ms, f"{name}_peak": timing.peak, f"{name}_first_s": timing.first}
        if device == "cuda":
            row[f"{name}_kernels"], row[f"{name}_gpu_ms"] = kernels_launched(calls[name])
    return row


def _errors(run: Run, x: Signals, reference: Reference) -> dict[str, Any]:
    error, gradient_errors = reference.errors(run, x)
    return {"error": error, "gradient_errors": gradient_errors}


def table(rows: list[dict[str, Any]]) -> Table:
    """Return the table of rows; a speedup is the time of the op itself divided by that of the row."""
    shown = Table("op", "spans", "fwd ms", "speedup", "f+b ms", "speedup", "kernels", "f+b MiB", "error", "d error")
    shown.add_column("status")
    for row in rows:
        cells = [row["op"], str(row["spans"])]
        for name in PASSES:
            factor = speedup(row, rows, name)
            cells += [f"{row[f'{name}_ms']:.3f}" if f"{name}_ms" in row else "", f"{factor:.2f}" if factor else ""]
        cells.append(" / ".join(str(row[f"{name}_kernels"]) for name in PASSES if f"{name}_kernels" in row))
        cells.append(f"{row['both_peak'] / 2**20:,.0f}" if "both_peak" in row else "")
        worst = [row.get("error"), max(row.get("gradient_errors", {}).values(), default=None)]
        shown.add_row(*cells, *("" if x is None else f"{x:.1e}" for x in worst), row["status"])
    return shown


def speedup(row: dict[str, Any], rows: list[dict[str, Any]], name: str) -> float | None:
    """Return the time of the op itself divided by that of a row; `None` if either is missing.

    Args:
        row: the row.
        rows: rows with that of the op.
        name: "forward" or "both".
    """
    key = f"{name}_ms"
    own = next((x[key] for x in rows if (x["op"], x["spans"]) == (row["op"], 1) and key in x), None)
    return own / row[key] if own is not None and key in row else None


def summary(op: str, rows: list[dict[str, Any]], name: str) -> str:
    """Return a sentence with the numbers of spans that are faster than the op itself."""
    pairs = [(row["spans"], speedup(row, rows, name)) for row in rows if row["op"] == op and row["spans"] > 1]
    known = {spans: factor for spans, factor in pairs if factor is not None}
    faster = sorted(spans for spans, factor in known.items() if factor > 1)
    start = f"{op}, {PASSES[name]}: "
    if not faster:
        return start + ("no number of spans is faster than the op" if known else "not compared")
    best = max(known, key=lambda spans: known[spans])
    return f"{start}faster with {', '.join(map(str, faster))} spans; with {best}, {known[best]:.2f} times as fast"


def main() -> None:
    begin = time.monotonic()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ops = [name for name, op in OPS.items() if op.update is not None]
    parser.add_argument("--op", nargs="+", choices=ops, default=["dense", "delta"])
    parser.add_argument("--batch", type=int, default=1, help="sequences")
    parser.add_argument("--length", type=int, default=65_536, help="tokens of a sequence")
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--width", type=int, default=128, help="width of a head's keys and values")
    parser.add_argument("--spans", nargs="+", type=int, default=[1, 4, 8, 16, 32], help="1 is the op itself")
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], default="bfloat16", help="of q, k and v")
    parser.add_argument(
        "--reference", choices=["float64", "float32"], default="float64", help="float64 can take minutes"
    )
    parser.add_argument("--deadline", type=float, default=float("inf"), help="seconds after which no row begins")
    parser.add_argument("--commit", help="commit for the rows, where git is absent")
    parser.add_argument("--output", type=Path, default=Path("results/spans.jsonl"), help="file to append rows to")
    given = parser.parse_args()
    for spans in given.spans:
        if spans < 1 or given.length % spans:
            parser.error(f"--spans has {spans}, which does not divide {given.length} tokens")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    origin = provenance(torch.device(device), given.commit)
    origin |= {name: getattr(given, name) for name in ("batch", "length", "heads", "width", "dtype")}
    dtypes = [torch.float32] if given.reference == "float32" else [torch.float64, torch.float32]
    shape, rows = (given.batch, given.length, given.heads, given.width), []
    prepared, x, found = "", {}, (None, None)
    for op, spans in product(given.op, given.spans):
        if time.monotonic() - begin >= given.deadline:
            print(f"{op}, spans {spans}: not begun, since {given.deadline:.0f} seconds have passed", flush=True)
            continue
        if op != prepared:
            prepared, found = op, (None, None)  # frees the last reference before the next is computed
            x = row_or_reason(partial(long_signals, op, shape, device, getattr(torch, given.dtype)), LIMIT)
            found = find_reference(op, x, dtypes) if "status" not in x else (None, None)
        row = x if "status" in x else measure_row(op, spans, x, found[1])
        rows.append({"op": op, "spans": spans, "reference": found[0], **row})
        append_rows(given.output, [rows[-1] | origin])
        print(f"{op}, spans {spans}: {rows[-1]['status']} {rows[-1].get('reason', '')}".rstrip(), flush=True)
    Console(width=130).print(table(rows))
    for op, name in product(given.op, PASSES):
        print(summary(op, rows, name))


if __name__ == "__main__":
    main()
