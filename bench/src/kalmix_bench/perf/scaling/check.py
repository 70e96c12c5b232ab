"""Compare models on several GPUs with one process: loss and gradients of all parameters, on every rank.

    torchrun --nproc-per-node 4 -m kalmix_bench.perf.scaling.check --output build/scaling
    torchrun --nproc-per-node 2 -m kalmix_bench.perf.scaling.check --layers kla,attention      # CPUs, with gloo

Each layer is tried in a model of two blocks: DDP, FSDP2, tensor parallelism by heads, context parallelism in both
layouts, whole and packed, and context parallelism with FSDP2 if the number of ranks is even. NaN and infinity count as
an infinite error.

Each row compares twice, both sides in the same format:

- In float64, by the kernels that take it. The largest relative error must be at most 1e-9. A layer without float64 says
  so in its row (`no_float64`), and only float32 counts.
- In float32 without TF32, by the default kernels. The loss and each gradient have a budget (`budgets_of`), which
  follows from the format and from how much the exact gradient changes when values are rounded to it. `of_budget` is
  the largest error as a fraction of its budget, and must be at most 1.

Writes one row per layer and method as soon as it is known. If a rank fails, it writes why and ends the program, since
the others might wait for it; so does a row that takes longer than `--limit`. Start it again with the same output folder
to continue: it repeats no row, except those that the limit cut, if it is longer now. Exits with 1 if a row is wrong,
failed or missing.
"""

from __future__ import annotations

import argparse
import math
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from kalmix import ArgumentError, KernelError
from kalmix.layers import MIXERS
from kalmix_bench.perf.scaling.budget import budgets_of
from kalmix_bench.perf.scaling.group import (
    BEGUN,
    RESULTS,
    Ranks,
    check_names,
    end_process,
    has_ended,
    process_group,
    time_limit,
    too_long,
)
from kalmix_bench.perf.scaling.methods import (
    CHECKS,
    Case,
    Errors,
    build,
    count_rows,
    errors_between,
    expect,
    make_batch,
)
from kalmix_bench.runner.json_lines import append_rows

BOUND_64 = 1e-9  # largest relative error of the loss and of a gradient, in float64


class Options(NamedTuple):
    """Folder of rows, time of `time.monotonic` after which no row begins, and seconds after which a row is given up."""

    output: Path
    stop: float
    limit: float


def check(layer: str, method: str, ranks: Ranks, options: Options) -> dict[str, Any]:
    """Return the row of a layer and a method: the largest errors of all ranks and their tensors, or why there are none.

    If some ranks fail and others do not, or if it takes longer than the limit, the program ends.
    """
    begin, during = time.perf_counter(), "in float32"
    row: dict[str, Any] = {"layer": layer, "method": method, "ranks": ranks.world}

    def give_up() -> None:
        reason = too_long(options.limit, during)
        write(row | {"status": "failed", "reason": reason, "limit": options.limit}, options)

    with time_limit(options.limit, ranks, give_up):
        found = ranks.collect(attempt(Case(layer, ranks.device), method))
        row |= merge(found)
        if row["status"] == "compared":
            errors, during = largest(found), "in float64"
            found = ranks.collect(attempt(Case(layer, ranks.device, torch.float64), method))
            during = "in one process, while computing budgets"
            budgets = ranks.from_first(budgets_of(layer, method) if ranks.rank == 0 else None)
            row = judge(row | compare_with_budgets(errors, budgets), merge(found))
        if row.get("of_budget", 0.0) > 1 and row["status"] == "wrong" and "no_float64" not in row:
            row["float32_error"] = rounding_of(layer, method, ranks.device)
        row["seconds"] = round(time.perf_counter() - begin, 2)
    unusual = [status for status, _ in found if status != "compared"]
    if unusual and len(unusual) < len(found):
        if ranks.rank == 0:
            write(row | {"status": "failed"}, options)
        print(f"rank {ranks.rank}: {len(unusual)} ranks failed; start the program again to continue", flush=True)
        ranks.wait()
        os._exit(1)
    return row


def attempt(case: Case, method: str) -> tuple[str, Any]:
    """Run a method on this rank; return "compared", the error and its tensor, or else a status and the reason."""
    try:
        return "compared", CHECKS[method](case)
    except (ArgumentError, KernelError, RuntimeError) as error:
        if "cannot take part" in str(error):
            status = "refused"
        else:
            status = "no float64" if case.dtype == torch.float64 and refuses_float64(error) else "failed"
        return status, f"{type(error).__name__}: {error}".split("\n")[0][:300]


def refuses_float64(error: Exception) -> bool:
    """Return whether an error of a float64 model says that a kernel of kalmix or of PyTorch does not take float64."""
    if isinstance(error, KernelError):
        return "not float64" in str(error)
    return "not implemented for 'Double'" in str(error)


def largest(found: Sequence[tuple[str, Any]]) -> Errors:
    """Return the largest error of all ranks for the loss and each gradient."""
    return {name: max(errors[name] for _, errors in found) for name in found[0][1]}


def worst(errors: Errors) -> tuple[float, str]:
    """Return the largest error and the name of its tensor."""
    return max((error, name) for name, error in errors.items())


def merge(found: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """Return the part of a row that follows from the attempts of all ranks."""
    unusual = [(status, reason) for status, reason in found if status != "compared"]
    if unusual:
        return dict(zip(("status", "reason"), unusual[0], strict=True))
    error, where = worst(largest(found))
    return {"status": "compared", "error": error, "where": where}


def compare_with_budgets(errors: Errors, budgets: Errors) -> dict[str, Any]:
    """Return the part of a row that compares errors in float32 with their budgets."""
    fraction, where = worst({name: error / budgets[name] for name, error in errors.items()})
    return {"of_budget": fraction, "of_budget_where": where}


def judge(row: dict[str, Any], found: dict[str, Any]) -> dict[str, Any]:
    """Return a row that was compared in float32 with its result in float64, and with its final status."""
    if found["status"] == "no float64":
        row = row | {"no_float64": found["reason"]}
    elif found["status"] != "compared":
        return row | {"status": "failed", "reason": f"in float64: {found['reason']}"}
    else:
        row = row | {"error_float64": found["error"], "where_float64": found["where"]}
    right = row["of_budget"] <= 1 and row.get("error_float64", 0.0) <= BOUND_64
    return row | {"status": "ok" if right else "wrong"}


def rounding_of(layer: str, method: str, device: torch.device) -> float:
    """Return the error of one process in float32 against float64, on the data of a method.

    It shows how much of an error in float32 rounding explains.
    """
    data, segments = make_batch(device, count_rows(method), "packed" in method)
    expected = expect(build(Case(layer, device, torch.float64)), data, segments)
    found = expect(build(Case(layer, device)), data, segments)
    return worst(errors_between(found, expected))[0]


def write(row: dict[str, Any], options: Options) -> None:
    """Append a row to the folder, and print it."""
    append_rows(options.output / RESULTS, [row])
    print(describe(row), flush=True)


def describe(row: dict[str, Any]) -> str:
    """Return a row as one line of text."""
    shown = [f"{row['error']:.1e} ({row['where']})"] if "error" in row else []
    if "of_budget" in row:
        shown.append(f"{row['of_budget']:.2f} of budget ({row['of_budget_where']})")
    if "float32_error" in row:
        shown.append(f"float32 itself {row['float32_error']:.1e}")
    if "error_float64" in row:
        shown.append(f"in float64 {row['error_float64']:.1e} ({row['where_float64']})")
    if "no_float64" in row:
        shown.append(f"not in float64: {row['no_float64']}")
    if "reason" in row:
        shown.append(row["reason"])
    return f"{row['layer']:18} {row['method']:38} {row['status']:8} {', '.join(shown)}"


def run_all(cells: list[tuple[str, str]], ranks: Ranks, options: Options) -> list[dict[str, Any]]:
    """Check all layers and methods that have no row in the folder and did not end an earlier run.

    Returns:
        The last row of each layer and method that has one, also from earlier runs.
    """
    rows, begun = (ranks.read_rows(options.output / name) for name in (RESULTS, BEGUN))
    for cell in cells:
        own = [row for row in rows if _is_of(cell, row)]
        if has_ended(own, sum(_is_of(cell, row) for row in begun), options.limit):
            continue
        if not ranks.from_first(time.monotonic() < options.stop):
            break
        if ranks.rank == 0:
            append_rows(options.output / BEGUN, [dict(zip(("layer", "method"), cell, strict=True))])
        row = check(*cell, ranks, options)
        rows.append(row)
        if ranks.rank == 0:
            write(row, options)
    last = {(row["layer"], row["method"]): row for row in rows}
    return [last[cell] for cell in cells if cell in last]


def _is_of(cell: tuple[str, str], row: dict[str, Any]) -> bool:
    return (row["layer"], row["method"]) == cell


def summary(rows: Sequence[dict[str, Any]], count: int) -> str:
    """Return how many of `count` rows are right, and how many of them were compared in float64."""
    right = [row for row in rows if row["status"] == "ok"]
    refused = sum(row["status"] == "refused" for row in rows)
    double = sum("error_float64" in row for row in right)
    return f"of {count} rows, {len(right)} are right ({double} of them compared in float64, too), {refused} refused"


def main() -> int:
    begin = time.monotonic()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", default=",".join([*MIXERS, "hybrid"]), help="layers, separated by commas")
    parser.add_argument("--methods", default=";".join(CHECKS), help="methods, separated by semicolons")
    parser.add_argument("--output", type=Path, default=Path("runs/scaling-check"), help="folder for results.jsonl")
    parser.add_argument("--deadline", type=float, default=math.inf, help="seconds after which no row begins")
    parser.add_argument("--limit", type=float, default=300, help="seconds of a row; then the program ends")
    arguments = parser.parse_args()
    layers, methods = arguments.layers.split(","), arguments.methods.split(";")
    check_names(parser, "--layers", layers, [*MIXERS, "hybrid"])
    check_names(parser, "--methods", methods, CHECKS)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    options = Options(arguments.output, begin + arguments.deadline, arguments.limit)
    with process_group(options.limit) as ranks:
        even = ranks.world % 2 == 0
        cells = [(x, method) for x in layers for method in methods if even or method != "fsdp2 and context"]
        rows = run_all(cells, ranks, options)
        if ranks.rank == 0:
            print(summary(rows, len(cells)), flush=True)
        every = len(rows) == len(cells) and all(row["status"] in ("ok", "refused") for row in rows)
    return int(not every)


if __name__ == "__main__":
    end_process(main())
