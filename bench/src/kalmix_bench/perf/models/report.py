"""Tables of rows: speed and memory of each model, ratios to the peers of the same run, and whether aims are met."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from rich import box
from rich.table import Table

from kalmix_bench.perf.models.protocol import FIRST, MODELS, MODES, OURS, PRESETS, ModelSize
from kalmix_bench.runner.cells import Row

GIB = 2**30
TWINS = {"gated-deltanet": "fla gated-deltanet", "kda": "fla kda"}


class Aim(NamedTuple):
    """Bound on the ratio of one measurement of two models.

    Attributes:
        model: model of kalmix.
        peer: model that it is compared with.
        mode: one of `MODES`.
        quantity: key of the measurement.
        bound: least ratio of speeds, or largest ratio of memories.
    """

    model: str
    peer: str
    mode: str
    quantity: str
    bound: float

    def is_met(self, ratio: float) -> bool:
        """Return whether a ratio keeps the bound."""
        return ratio >= self.bound if self.quantity == "tokens_per_s" else ratio <= self.bound


AIMS = (
    Aim("gated-deltanet", "fla gated-deltanet", "eager", "tokens_per_s", 1.2),
    *(Aim(name, "fla gated-deltanet", "eager", "peak_memory", 1.1) for name in FIRST),
    *(Aim(name, "llama", "compiled", "tokens_per_s", 0.85) for name in ("kla", "bayesian")),
    *(Aim(name, "llama", "compiled", "tokens_per_s", 1.05) for name in ("gated-deltanet", "kda")),
)


def latest(rows: Iterable[Row]) -> list[Row]:
    """Return the rows with the size and hardware of the last one; of several rows of one model and mode, the last."""
    found = list(rows)
    same = [row for row in found if all(row[name] == found[-1][name] for name in ("size", "hardware", "steps"))]
    return list({(row["model"], row["mode"]): row for row in same}.values())


def summary(row: Row) -> str:
    """Return one line of a row."""
    if row["status"] != "ok":
        return f"{row['status']}: {row['reason']}"
    kernels = f", {row['kernels']:,} kernels in {row['gpu_ms']:.1f} ms of the GPU" if "kernels" in row else ""
    return f"{row['tokens_per_s']:,.0f} tokens/s, {row['ms']:.1f} ms a step{kernels}"


def tables(rows: Sequence[Row]) -> list[Table]:
    """Return the tables of the rows of one size on one machine."""
    if not rows:
        return []
    found = {(row["model"], row["mode"]): row for row in rows}
    good = {key: row for key, row in found.items() if row["status"] == "ok"}
    steps = [_steps(mode, good) for mode in MODES if any(key[1] == mode for key in good)]
    aims = _aims(good) if ModelSize(**rows[0]["size"]) == PRESETS["paper"] else []
    return [*steps, *_ratios(good), *aims, *reasons(found)]


def make_table(title: str, *columns: str, caption: str | None = None) -> Table:
    table = Table(box=box.SIMPLE_HEAD, title=f"[bold]{title}", title_justify="left", caption=caption)
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number == 0 else "right")
    return table


def _steps(mode: str, good: dict[tuple[str, str], Row]) -> Table:
    rows = [good[name, mode] for name in MODELS if (name, mode) in good]
    last = rows[-1]
    versions = ", ".join(f"{name} {version}" for name, version in last["versions"].items() if version)
    commits = ", ".join(sorted({str(row["commit"]) for row in rows}))
    caption = (
        f"{last['hardware']}; {ModelSize(**last['size'])}; median of {last['steps']} steps with fused AdamW. "
        f"{versions}; commit {commits}. GPU ms: sum of the times of all kernels of a step. "
        "Peak GiB: weights and optimizer included; in brackets without them. "
        "Models of kalmix return no logits, as in `kalmix train`; others compute their own loss."
    )
    columns = (
        "layers",
        "parameters",
        "tokens/s",
        "ms a step",
        "GPU ms",
        "kernels",
        "peak GiB",
        "first step, s",
        "finite",
    )
    table = make_table(f"{mode} training steps", "model", *columns, caption=caption)
    for row in rows:
        peak = f"{row['peak_memory'] / GIB:.1f} ({row['step_memory'] / GIB:.1f})" if row.get("peak_memory") else "-"
        table.add_row(
            row["model"],
            str(row["layers"]),
            f"{row['parameters'] / 1e6:.1f} M",
            f"{row['tokens_per_s']:,.0f}",
            f"{row['ms']:.1f}",
            f"{row['gpu_ms']:.1f}" if "gpu_ms" in row else "-",
            f"{row['kernels']:,}" if "kernels" in row else "-",
            peak,
            f"{row['first_step_s']:.1f}",
            "yes" if row["finite"] else "no",
        )
    return table


def _ratio(good: dict[tuple[str, str], Row], name: str, peer: str, mode: str, quantity: str) -> float | None:
    one, other = good.get((name, mode)), good.get((peer, mode))
    if one is None or other is None or not one.get(quantity) or not other.get(quantity):
        return None
    return one[quantity] / other[quantity]


def _ratios(good: dict[tuple[str, str], Row]) -> list[Table]:
    """Return the table of ratios to peers, if there is a peer."""
    title = "ratios to other libraries, same run"
    table = make_table(title, "model", "mode", "speed / Llama", "speed / fla", "GPU time / fla", "memory / fla GDN")
    for name in OURS:
        for mode in MODES:
            twin = TWINS.get(name, "")
            ratios = (
                _ratio(good, name, "llama", mode, "tokens_per_s"),
                _ratio(good, name, twin, mode, "tokens_per_s"),
                _ratio(good, name, twin, mode, "gpu_ms"),
                _ratio(good, name, "fla gated-deltanet", mode, "peak_memory"),
            )
            if any(ratio is not None for ratio in ratios):
                table.add_row(name, mode, *("" if ratio is None else f"{ratio:.2f}" for ratio in ratios))
    return [table] if table.row_count else []


def _aims(good: dict[tuple[str, str], Row]) -> list[Table]:
    """Return the table of aims, if one can be judged."""
    table = make_table("aims", "model", "peer", "mode", "quantity", "ratio", "aim", "met")
    words = {"tokens_per_s": ("tokens/s", "at least"), "peak_memory": ("peak memory", "at most")}
    for aim in AIMS:
        quantity, direction = words[aim.quantity]
        ratio = _ratio(good, aim.model, aim.peer, aim.mode, aim.quantity)
        if ratio is not None:
            met = "yes" if aim.is_met(ratio) else "no"
            table.add_row(aim.model, aim.peer, aim.mode, quantity, f"{ratio:.2f}", f"{direction} {aim.bound}", met)
    return [table] if table.row_count else []


def reasons(found: dict[tuple[str, str], Row]) -> list[Table]:
    """Return the table of rows without measurements, if there are any."""
    table = make_table("rows without measurements", "model", "mode", "status", "reason")
    for row in found.values():
        if row["status"] != "ok":
            table.add_row(row["model"], row["mode"], row["status"], row["reason"].strip().splitlines()[-1])
    return [table] if table.row_count else []
