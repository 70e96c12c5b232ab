"""Tables of generation: each model's token at one batch and prompt, and whether aims are met."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from kalmix_bench.perf.decode.protocol import CACHES, MODELS
from kalmix_bench.perf.models.protocol import OURS, PRESETS, ModelSize
from kalmix_bench.perf.models.report import GIB, make_table, reasons
from kalmix_bench.runner.cells import Row

# Milliseconds of a token with a static cache or captured steps, one prompt of the preset `paper`.
AIMS = {"gated-deltanet": 3.0, "kda": 3.0, "gated-kalmanet": 3.0, "bayesian": 3.0, "kla": 5.0, "afa": 5.0}
# Layers whose state grows with the text, and the others.
HISTORIES = ("attention", "afa", "rt-afa", "afa-transformer", "controlled-afa")
RECURRENT = tuple(name for name in OURS if name not in HISTORIES)
# Aims of recurrent layers with 64 prompts: times the time of reading weights and state, and writing the state; and GiB
# above the weights, for prompts of 8,192 tokens.
MEMORY_AIM, PREFILL_AIM = 1.3, 20.0


def latest(rows: Sequence[Row]) -> list[Row]:
    """Return the rows with the hardware and commit of the last one; of several of one cell, the last."""
    same = [row for row in rows if all(row[name] == rows[-1][name] for name in ("hardware", "steps", "commit"))]
    return list({(row["model"], row["mode"], str(row["size"])): row for row in same}.values())


def summary(row: Row) -> str:
    """Return one line of a row."""
    if row["status"] != "ok":
        return f"{row['status']}: {row['reason']}"
    launches = f", {row['launches']:,} launches, {row['gpu_ms']:.2f} ms of the GPU" if "launches" in row else ""
    return f"{row['ms']:.2f} ms a token{launches}"


def tables(rows: Sequence[Row]) -> list[Table]:
    """Return a table for each batch and prompt, one of aims, and one of rows without measurements."""
    sizes = list(dict.fromkeys(ModelSize(**row["size"]) for row in rows))
    found = {(row["model"], row["mode"], ModelSize(**row["size"])): row for row in rows}
    good = {key: row for key, row in found.items() if row["status"] == "ok"}
    tokens = [_tokens(size, good) for size in sizes if any(key[2] == size for key in good)]
    aims = _aims(good)
    failed = reasons({(f"{model}, {_prompts(size)}", mode): row for (model, mode, size), row in found.items()})
    return [*tokens, *([aims] if aims.row_count else []), *failed]


def _prompts(size: ModelSize) -> str:
    return f"{size.batch_size} x {size.seq_len:,}"


def _tokens(size: ModelSize, good: dict[tuple[str, str, ModelSize], Row]) -> Table:
    rows = [good[name, mode, size] for name in MODELS for mode in CACHES if (name, mode, size) in good]
    last = rows[-1]
    versions = ", ".join(f"{name} {version}" for name, version in last["versions"].items() if version)
    caption = (
        f"{last['hardware']}; {size.layers} layers of width {size.hidden_size:,}, {size.vocab_size:,} words, weights "
        f"in {size.dtype}; median of {last['steps'] - 1} tokens of `generate`. {versions}; commit {last['commit']}. "
        "Launches: calls that start kernels or a CUDA graph. Graph: time of a captured step on the GPU; the rest of a "
        "token is work of the host. Memory: the largest during prompt and tokens, above weights. Limit: time of "
        "reading the weights, reading the state and writing it, at the speed of a copy."
    )
    columns = (
        "ms a token", "graph, ms", "tokens/s", "GPU ms", "kernels", "launches", "limit, ms", "prompt, ms",
        "memory, GiB", "state a sequence, MiB", "first, s",
    )  # fmt: skip
    title = f"tokens after prompts of {_prompts(size)} tokens"
    table = make_table(title, "model", "cache", *columns, caption=caption)
    for row in rows:
        gpu = "launches" in row
        table.add_row(
            row["model"],
            row["mode"],
            f"{row['ms']:.2f}",
            f"{row['replay_ms']:.2f}" if "replay_ms" in row else "-",
            f"{row['tokens_per_s']:,.0f}",
            f"{row['gpu_ms']:.2f}" if gpu else "-",
            f"{row['kernels']:,}" if gpu else "-",
            f"{row['launches']:,}" if gpu else "-",
            f"{row['memory_ms']:.2f}" if gpu else "-",
            f"{row['prefill_ms']:,.0f}",
            f"{row['extra_memory'] / GIB:.2f}" if gpu else "-",
            f"{row['state_bytes'] / 2**20:.2f}",
            f"{row['first_s']:.1f}",
        )
    return table


def _aims(good: dict[tuple[str, str, ModelSize], Row]) -> Table:
    """Return the table of aims that can be judged."""
    table = make_table("aims", "model", "prompts", "quantity", "value", "aim", "met")
    for (model, mode, size), row in good.items():
        paper = (size.layers, size.hidden_size) == (PRESETS["paper"].layers, PRESETS["paper"].hidden_size)
        if mode == "dynamic" or not paper or "memory_ms" not in row:
            continue
        if size.batch_size == 1 and model in AIMS:
            met, aim = row["ms"] <= AIMS[model], f"at most {AIMS[model]}"
            quantity = "ms a token" if mode == "static" else f"ms a token, {mode}"
            table.add_row(model, _prompts(size), quantity, f"{row['ms']:.2f}", aim, "yes" if met else "no")
        if size.batch_size == 64 and model in RECURRENT:
            ratio = row["ms"] / row["memory_ms"]
            met = "yes" if ratio <= MEMORY_AIM else "no"
            quantity = "time / limit" if mode == "static" else f"time / limit, {mode}"
            table.add_row(model, _prompts(size), quantity, f"{ratio:.2f}", f"at most {MEMORY_AIM}", met)
        if (size.batch_size, size.seq_len) == (64, 8192) and model in RECURRENT:
            memory = row["extra_memory"] / GIB
            met = "yes" if memory <= PREFILL_AIM else "no"
            table.add_row(model, _prompts(size), f"memory, GiB, {mode}", f"{memory:.2f}", f"at most {PREFILL_AIM}", met)
    return table
