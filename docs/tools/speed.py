"""Tables of speed and accuracy from the result files in bench/results."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parents[2] / "bench" / "results"
GPU = "nvidia-h200"
# Files to show; other ops have the newest file of `GPU`.
FILES = {"diagonal": "2026-11-27-nvidia-h100-80gb-hbm3-diagonal.json"}
FLA = "flash-linear-attention 0.6.0"
LABELS = {
    "triton": "**kalmix** `triton`",
    "cuda": "**kalmix** `cuda`",
    "triton, mean alone": "**kalmix** `triton`, without variance",
    "triton, 24 iterations": "**kalmix** `triton`, 24 iterations",
    "chunked": "**kalmix** `chunked`",
    "reference": "**kalmix** `reference`",
    "fla": FLA,
    "fla, no covariance": f"{FLA}, gated delta rule (no covariance)",
    "fla delta": f"{FLA}, gated delta rule (solves nothing)",
    "fla mesa_net": f"{FLA}, MesaNet, 30 iterations",
    "fla gka": "flash-linear-attention, main branch, 30 iterations",
    "gka (authors)": "authors' kernels, 30 iterations",
    "kla (CUDA)": "authors' CUDA kernels",
    "kla (Triton)": "authors' Triton kernels",
    "kla (recurrence)": "authors' recurrence",
    "kla (PyTorch)": "authors' code with PyTorch's associative scan",
    "sdpa (cuDNN)": "PyTorch SDPA (cuDNN)",
    "sdpa (flash)": "PyTorch SDPA (flash attention)",
}


def result_file(op: str) -> Path:
    """Return the result file with an op's speed on the GPU."""
    return RESULTS / FILES[op] if op in FILES else max(RESULTS.glob(f"*-{GPU}-{op}.json"))


def speed_table(op: str) -> str:
    """Return the rows of an op's result file as a table, with its hardware, command and notes."""
    path = result_file(op)
    result = json.loads(path.read_text(encoding="utf-8"))
    rows = [
        "| shape | dtype | implementation | forward (ms) | forward + backward (ms) | output error | gradient error |",
        "|---|---|---|---|---|---|---|",
    ]
    previous = None
    for row in result["rows"]:
        size = ", ".join(map(str, row["shape"]))
        place = f"| {size} | {row['dtype']} " if (size, row["dtype"]) != previous else "| | "
        previous = size, row["dtype"]
        rows.append(f"{place}| {LABELS[row['kernel']]} | {_numbers(row)} |")
    command = result.get("command", f"python -m kalmix_bench.perf.ops --op {op}")
    notes = "".join(f" {note[0].upper()}{note[1:]}." for note in result.get("notes", ()))
    shapes = "batch, tokens, channels, slots" if op == "diagonal" else "batch, tokens, heads, width"
    about = f"Shapes are {shapes}. Errors are relative to float64; that of gradients is the largest of any input."
    source = f"{about} {result['hardware']}, torch {result['torch']}.{notes}"
    return "\n".join(rows) + f"\n\n{source} Source: `bench/results/{path.name}`; command: `{command}`."


def _numbers(row: dict[str, Any]) -> str:
    error, gradients = row.get("error"), row.get("gradient_errors") or {}
    errors = [f"{error:.0e}" if error else "", f"{max(gradients.values()):.0e}" if gradients else ""]
    return " | ".join([f"{row['forward_ms']:.2f}", f"{row['both_ms']:.2f}", *errors])


def ratio_rows(op: str, peer: str, dtype: str) -> list[str]:
    """Return one table row per shape with the times of our kernel and of a peer: `ours / theirs (ratio)`.

    Our kernel is `cuda` where the result file has it, as the ops choose it on Hopper, and otherwise `triton`.

    Args:
        op: name of the op.
        peer: name of the peer in the result file.
        dtype: rows of this dtype.
    """
    rows = json.loads(result_file(op).read_text(encoding="utf-8"))["rows"]
    found = {(r["kernel"], tuple(r["shape"])): r for r in rows if r["dtype"] == dtype}
    lines = []
    for shape in dict.fromkeys(shape for _, shape in found):
        kernel = next((name for name in ("cuda", "triton") if (name, shape) in found), None)
        if kernel is None or (peer, shape) not in found:
            continue
        ours, theirs = found[kernel, shape], found[peer, shape]
        cells = [f"`{op}`", ", ".join(map(str, shape))]
        for key in ("forward_ms", "both_ms"):
            digits = 3 if ours[key] < 0.1 else 2
            cells.append(f"{ours[key]:.{digits}f} / {theirs[key]:.{digits}f} ({ours[key] / theirs[key]:.2f})")
        lines.append(f"| {' | '.join(cells)} |")
    return lines


PEERS = {"additive": "fla", "delta": "fla", "diagonal": "kla (CUDA)", "ridge": "gka (authors)"}


def ratio_table() -> str:
    """Return the table of times next to the fastest peer that computes the same."""
    head = ["| op | shape | forward (ms) | forward + backward (ms) |", "|---|---|---|---|"]
    rows = [ratio_rows(op, peer, "float32" if op == "diagonal" else "bfloat16") for op, peer in PEERS.items()]
    return "\n".join(head + [line for lines in rows for line in lines])


def cpu_table() -> str:
    """Return the times of `diagonal` on a CPU for 2,048 tokens."""
    path = RESULTS / "2026-11-21-amd-epyc-2-threads-diagonal.json"
    rows = ["| kernel | forward (ms) | forward + backward (ms) |", "|---|---|---|"]
    timed = [row for row in json.loads(path.read_text(encoding="utf-8"))["rows"] if row["shape"][1] == 2048]
    rows += [f"| {row['kernel']} | {row['forward_ms']:.1f} | {row['both_ms']:.1f} |" for row in timed]
    source = f"Source: `bench/results/{path.name}`; command: `python -m kalmix_bench.perf.ops --device cpu --compile`."
    return "\n".join(rows) + f"\n\n{source}"


def _model_rows(kind: str) -> list[tuple[Path, dict[tuple[Any, ...], dict[str, Any]]]]:
    """Return result files of whole models, the newest first; rows by model, mode, batch and tokens of a sequence."""
    found, sizes = [], ("batch_size", "seq_len")
    for path in sorted(RESULTS.glob(f"*-{GPU}-{kind}/results.jsonl"), reverse=True):
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        keyed = {(x["model"], x["mode"], *(x["size"][y] for y in sizes)): x for x in rows if x["status"] == "ok"}
        found.append((path, keyed))
    return found


def training_table() -> str:
    """Return rates, GPU time and memory of training steps; from the file before where the newest lacks a row."""
    (newest, rows), (before, earlier) = _model_rows("models")[:2]
    table = [
        "| model | tokens/s, eager | GPU ms | kernels | peak GiB | tokens/s, compiled | GPU ms | kernels | peak GiB |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for model in dict.fromkeys(name for name, *_ in (*earlier, *rows)):
        cells = [f"`{model}`"]
        for mode in ("eager", "compiled"):
            found = [x for given in (rows, earlier) for key, x in given.items() if key[:2] == (model, mode)]
            if not found:
                cells += ["", "", "", ""]
                continue
            row, mark = found[0], "" if found[0] in rows.values() else " *"
            cells += [f"{row['tokens_per_s']:,.0f}{mark}", f"{row['gpu_ms']:.0f}", f"{row['kernels']:,}"]
            cells.append(f"{row['peak_memory'] / 2**30:.1f}")
        table.append(f"| {' | '.join(cells)} |")
    sources = f"Source: `{_relative(newest)}`."
    if any(" *" in line for line in table):
        sources += f" * `{_relative(before)}`, with earlier kernels."
    return "\n".join(table) + f"\n\n{sources}"


def _relative(path: Path) -> str:
    return path.relative_to(RESULTS.parents[1]).as_posix()


def decoding_table() -> str:
    """Return the times of a generated token, for each number and length of prompts."""
    path = max(RESULTS.glob("*-decode/results.jsonl"))
    found = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    sizes = sorted({(x["size"]["batch_size"], x["size"]["seq_len"]) for x in found})
    rows: dict[tuple[str, str], dict[tuple[int, int], dict[str, Any]]] = {}
    for row in found:
        size = row["size"]["batch_size"], row["size"]["seq_len"]
        rows.setdefault((row["model"], row["mode"]), {})[size] = row
    head = [f"{batch} x {tokens:,}" for batch, tokens in sizes]
    lengths = sorted({tokens for _, tokens in sizes})
    head.append(f"state of a sequence, MiB, after {' and '.join(f'{x:,}' for x in lengths)} tokens")
    table = [f"| model | cache | {' | '.join(head)} |", "|---|---|" + "---|" * len(head)]
    for (model, mode), timed in rows.items():
        cells = [_token(timed[size]) if size in timed else "" for size in sizes]
        bytes_after = {tokens: x["state_bytes"] for (_, tokens), x in timed.items() if x["status"] == "ok"}
        states = [f"{bytes_after[x] / 2**20:,.1f}" if x in bytes_after else "?" for x in lengths]
        table.append(f"| `{model}` | {mode} | {' | '.join(cells)} | {', '.join(states)} |")
    return "\n".join(table) + f"\n\nSource: `{_relative(path)}`."


def _token(row: dict[str, Any]) -> str:
    """Return the milliseconds of a token, and in brackets those of the replayed graph and of the limit."""
    if row["status"] != "ok":
        return row["status"]
    replay = f"{row['replay_ms']:.2f}, " if "replay_ms" in row else ""
    return f"{row['ms']:.2f} ({replay}{row['memory_ms']:.2f})"
