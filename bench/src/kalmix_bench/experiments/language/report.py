"""Tables and figures of the comparison, from rows alone."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

from kalmix_bench.experiments.language.architectures import LAYERS, describe
from kalmix_bench.experiments.language.protocol import LONGER, MAIN, TUNE, RunSize, shared_device
from kalmix_bench.runner.cells import Row
from kalmix_bench.runner.line_panels import Curve, LinePanel, draw_line_panels
from kalmix_bench.runner.paper_claims import Finding
from kalmix_bench.runner.published_names import published_name
from kalmix_bench.runner.scores import Score

FIGURE = "language.png"
RANKS = {layer: rank for rank, layer in enumerate(LAYERS)}  # others come last


@dataclass(frozen=True)
class Group:
    """Seeds of one layer at one size, rate and corpus.

    Attributes:
        layer: name of the layer.
        rows: rows that did not diverge.
        diverged: number of rows that did.
        first: any of the rows.
    """

    layer: str
    rows: list[Row]
    diverged: int
    first: Row

    @property
    def alone(self) -> Group:
        """The group without rows whose model shared its device."""
        return replace(self, rows=[row for row in self.rows if not shared_device(row)])

    def score(self, value: Callable[[Row], float | None]) -> Score | None:
        """Return the mean and the standard error of a value; `None` if a row lacks it."""
        values = [value(row) for row in self.rows]
        found = [x for x in values if x is not None]
        return Score.of(found) if found and len(found) == len(values) else None


def write_report(rows: Sequence[Row], output: Path, console: Console) -> list[Path]:
    """Print the tables and draw the figure; return the files drawn."""
    tuning = [row for row in rows if row["stage"] == TUNE]
    if tuning:
        for condition in dict.fromkeys(map(_condition, tuning)):
            console.print(_tuning_table([row for row in tuning if _condition(row) == condition], condition))
    files = []
    groups = group_rows([row for row in rows if row["stage"] == MAIN])
    for number, condition in enumerate(dict.fromkeys(_condition(group.first) for group in groups)):
        here = [group for group in groups if _condition(group.first) == condition]
        console.print(_quality_table(here, condition))
        console.print(_cost_table(here, condition))
        sound = [group for group in here if group.rows]
        if sound:
            name = FIGURE if number == 0 else f"language-{number + 1}.png"
            files.append(Path(draw_line_panels(output / name, _panels(sound, condition), 3)))
    for condition in dict.fromkeys(_condition(group.first, tokens=False) for group in groups):
        here = [group for group in groups if group.rows and _condition(group.first, tokens=False) == condition]
        table = _equal_time_table(here, condition)
        if table is not None:
            console.print(table)
    return files


def group_rows(rows: Sequence[Row]) -> list[Group]:
    """Return groups of rows that differ in the seed alone, in the order of `LAYERS`."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        key = json.dumps(
            [row[name] for name in ("language", "size", "optimizer", "learning_rate", "corpus")], sort_keys=True
        )
        groups.setdefault(key, []).append(row)
    found = [
        Group(group[0]["language"], [x for x in group if "loss" in x], sum("loss" not in x for x in group), group[0])
        for group in groups.values()
    ]
    return sorted(found, key=lambda group: RANKS.get(group.layer, len(RANKS)))


def findings(rows: Sequence[Row]) -> list[Finding]:
    """Return the losses and probes of every layer that did not diverge."""
    found = []
    for group in group_rows([row for row in rows if row["stage"] == MAIN]):
        metadata = {
            "hidden_size": group.first["size"]["model"]["hidden_size"],
            "depth": sum(block["repeat"] for block in group.first["blocks"]),
            "diverged": group.diverged,
            "parameters": group.first["parameters"],
            "learning_rate": group.first["learning_rate"],
            "epochs": group.first.get("epochs"),
        }
        for name, value in SCORES.items():
            score = group.score(value)
            if score is not None:
                place = ("language", _condition(group.first), group.layer)
                found.append(Finding(*place, name, score, len(group.rows), metadata))
    return found


def _position(name: str) -> Callable[[Row], float | None]:
    return lambda row: row["positions"].get(name)


def _mean_of(test: str, name: str) -> Callable[[Row], float | None]:
    """Return a function from a row to the mean of a score over all lengths or numbers of pairs."""

    def value(row: Row) -> float | None:
        return mean(entry[name] for entry in row[test].values()) if row[test] else None

    return value


SCORES: dict[str, Callable[[Row], float | None]] = {
    "held-out loss": lambda row: row["loss"],
    "loss to the training length": _position("trained_loss"),
    "loss beyond it": _position("longer_loss"),
    "copying accuracy": _mean_of("copying", "accuracy"),
    "recall accuracy": _mean_of("recall", "accuracy"),
    "recall choice": _mean_of("recall", "choice"),
}


def _condition(row: Row, *, tokens: bool = True) -> str:
    size = row["size"]
    parts = (
        f"{size['model']['parameters'] / 1e6:g}M parameters",
        *([f"{size['tokens'] / 1e6:g}M tokens"] if tokens else []),
        f"sequences of {size['seq_len']:,}",
        *(["zeros in output projections at first"] if size["model"].get("zero_init") else []),
        *(["norm of embeddings"] if size["model"].get("embedding_norm") else []),
        *([f"warmup of {100 * warmup:g}%"] if (warmup := row["optimizer"]["warmup"]) != RunSize.warmup else []),
        f"corpus {row['corpus'][:8]}",
    )
    return ", ".join(parts)


def _table(title: str, columns: Sequence[str]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left")
    table.add_column("layer", no_wrap=True)
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    return table


def _tuning_table(rows: Sequence[Row], condition: str) -> Table:
    """Return the held-out losses by learning rate; the best one of a layer is chosen for the larger size."""
    rates = sorted({row["learning_rate"] for row in rows})
    table = _table(
        f"[bold]learning rates[/]  {condition}; held-out loss (nats)", [f"{rate:g}" for rate in rates] + ["chosen"]
    )
    edges = False
    for layer in sorted({row["language"] for row in rows}, key=lambda x: (RANKS.get(x, len(RANKS)), x)):
        losses: dict[float, Score | None] = {}
        for group in group_rows([row for row in rows if row["language"] == layer]):
            losses[group.first["learning_rate"]] = None if group.diverged else group.score(SCORES["held-out loss"])
        finite = {rate: loss.mean for rate, loss in losses.items() if loss is not None}
        best = min(finite, key=lambda rate: finite[rate]) if finite else None
        edge = best is not None and len(rates) > 1 and best in (rates[0], rates[-1])
        edges |= edge
        cells = [
            "" if rate not in losses else "diverged" if losses[rate] is None else _number(losses[rate])
            for rate in rates
        ]
        table.add_row(layer, *cells, "" if best is None else f"{best:g}" + (" *" if edge else ""))
    if edges:
        table.caption = "* the best rate is the smallest or the largest: run --rates further out"
    return table


def _quality_table(groups: Sequence[Group], condition: str) -> Table:
    columns = ("blocks", "parameters", "rate", "seeds", "loss", "bits/byte", "loss to T", f"T to {LONGER}T")
    table = _table(
        f"[bold]losses and probes[/]  {condition}", (*columns, "copying %", "recall %", "choice %", "epochs")
    )
    for group in groups:
        first = group.first
        seeds = f"{len(group.rows)}" + (f" of {len(group.rows) + group.diverged}" if group.diverged else "")
        head = (describe(first["blocks"]), f"{first['parameters']:,}", f"{first['learning_rate']:g}", seeds)
        if not group.rows:
            table.add_row(group.layer, *head, "diverged")
            continue
        losses = (
            SCORES["held-out loss"],
            lambda row: row["bits_per_byte"],
            SCORES["loss to the training length"],
            SCORES["loss beyond it"],
        )
        percents = (SCORES["copying accuracy"], SCORES["recall accuracy"], SCORES["recall choice"])
        table.add_row(
            group.layer,
            *head,
            *(_number(group.score(value)) for value in losses),
            *("" if (score := group.score(value)) is None else str(score) for value in percents),
            f"{first['epochs']:.2f}",
        )
    table.caption = (
        f"T: training length. Losses in nats a token: of held-out text in sequences of T; of long held-out documents. "
        f"Copying, recall: accuracy, mean over lengths. {_devices(groups)}"
    )
    return table


def _cost_table(groups: Sequence[Group], condition: str) -> Table:
    columns = ("tokens/s", "MFU", "training s", "memory GiB", "state at T", f"at {LONGER}T", "decoding ms")
    table = _table(f"[bold]cost[/]  {condition}", columns)
    for group in (group for group in groups if group.rows):
        state = list(group.first.get("state_bytes", {}).values()) or [None, None]
        table.add_row(
            group.layer,
            *(
                _number(group.alone.score(lambda row, name=name: row.get(name)), style)
                for name, style in (
                    ("tokens_per_second", ",.0f"),
                    ("mfu", ".3f"),
                    ("training_seconds", ",.1f"),
                )
            ),
            _number(group.score(lambda row: row.get("training_memory_gib")), ".1f"),
            *("" if size is None else f"{size / 1024:,.0f} KiB" for size in state),
            _number(group.alone.score(lambda row: row.get("decode_ms")), ".2f"),
        )
    rows = next((group.first.get("decode_rows") for group in groups if group.rows), None)
    table.caption = (
        f"Seconds of training steps, without compilation and tests. State of one sequence. Decoding: a token of {rows} "
        f"sequences by `generate`. {_devices(groups)}"
    )
    if any(shared_device(row) for group in groups for row in group.rows):
        table.caption += " Times and speeds leave out models that shared a device."
    notes = dict.fromkeys((group.layer, row["note"]) for group in groups for row in group.rows if row.get("note"))
    table.caption += "".join(f" {layer}: {note}" for layer, note in notes)
    return table


def loss_at(tokens: float, losses: Mapping[float, float]) -> float | None:
    """Return the loss after a number of tokens, or `None` outside the finished runs.

    Args:
        tokens: training tokens. At a constant speed they are proportional to time.
        losses: losses of finished runs, by tokens; interpolated linearly in the logarithm of tokens.
    """
    known = sorted(losses)
    if not known or not known[0] * (1 - 1e-9) <= tokens <= known[-1] * (1 + 1e-9):
        return None
    return float(np.interp(np.log(tokens), np.log(known), [losses[n] for n in known]))


def _equal_time_table(groups: Sequence[Group], condition: str) -> Table | None:
    """Return the losses at equal training time; `None` if all finished runs have the same number of tokens.

    Groups may differ in layer, learning rate and number of tokens alone. Speeds are those of the longest runs. The
    times are those in which attention and the fastest layer train on as many tokens.
    """
    budgets = sorted({group.first["size"]["tokens"] for group in groups})
    if len(budgets) < 2:
        return None
    longest = {_model(group): group for group in groups if group.first["size"]["tokens"] == budgets[-1]}
    speeds = {key: x.mean for key, group in longest.items() if (x := group.alone.score(_speed)) is not None}
    if not speeds:
        return None
    fastest = max(speeds, key=lambda key: speeds[key])
    times = {
        key[0]: longest[key].first["tokens"] / speeds[key]
        for key in speeds
        if key == fastest or (key[0] == "attention" and speeds[key] < speeds[fastest])
    }
    columns = [f"{tokens / 1e6:g}M tokens" for tokens in budgets]
    for seconds in sorted(times.values()):
        columns += [f"tokens in {seconds:.1f} s", "loss"]
    table = _table(f"[bold]losses at equal training time[/]  {condition}", ["rate", "tokens/s", *columns])
    for key in dict.fromkeys(map(_model, groups)):
        found = {group.first["size"]["tokens"]: group for group in groups if _model(group) == key}
        losses = {tokens: group.score(SCORES["held-out loss"]) for tokens, group in found.items()}
        ends = {found[tokens].first["tokens"]: loss.mean for tokens, loss in losses.items() if loss is not None}
        speed = speeds.get(key)
        cells = ["" if speed is None else f"{speed:,.0f}", *(_number(losses.get(tokens)) for tokens in budgets)]
        for seconds in sorted(times.values()):
            loss = None if speed is None else loss_at(speed * seconds, ends)
            cells.append("" if speed is None else f"{speed * seconds / 1e6:.3g}M")
            cells.append("not measured" if loss is None else f"{loss:.4f}")
        table.add_row(key[0], f"{key[1]:g}", *cells)
    reached = "; ".join(f"{layer} trains on {budgets[-1] / 1e6:g}M tokens in {s:.1f} s" for layer, s in times.items())
    table.caption = (
        f"{reached}. Tokens in these times at the speed of the longest runs, without models that shared a device. "
        "Losses are interpolated between finished runs, linearly in log tokens; outside them they are not measured."
    )
    return table


def _model(group: Group) -> tuple[str, float]:
    return group.layer, group.first["learning_rate"]


def _speed(row: Row) -> float | None:
    return row.get("tokens_per_second")


def _devices(groups: Sequence[Group]) -> str:
    rows = [row for group in groups for row in (*group.rows, group.first)]
    devices, commits = (sorted({str(row[name]) for row in rows}) for name in ("device", "commit"))
    return f"{', '.join(devices)}; commit {', '.join(commits)}."


def _number(score: Score | None, style: str = ".4f") -> str:
    if score is None or score.mean != score.mean:
        return ""
    return f"{score.mean:{style}}" + ("" if score.error != score.error else f" ± {score.error:{style}}")


def _panels(groups: Sequence[Group], condition: str) -> list[LinePanel]:
    """Return panels of losses by tokens, seconds and position, and of the probes."""
    trained = groups[0].first["size"]["seq_len"]

    def panel(
        title: str, label: str, y_label: str, curve: Callable[[Group], Curve | None], **options: Any
    ) -> LinePanel:
        found = {published_name(group.layer): curve(group) for group in groups}
        known = {name: values for name, values in found.items() if values is not None}
        return LinePanel(title, condition, label, y_label, known, **options)

    panels = [
        panel(
            "by tokens", "training tokens (millions)", "held-out loss (nats)", lambda x: _held_out(x, "tokens", 1e-6)
        ),
        panel("by time", "seconds of training", "held-out loss (nats)", lambda x: _held_out(x, "seconds", 1.0)),
        panel(
            "by position",
            f"position in a document (training length {trained:,})",
            "held-out loss (nats)",
            _by_position,
            log_x=True,
        ),
        panel(
            "copying",
            "tokens of the copied text",
            "accuracy (%)",
            lambda x: _by_number(x, "copying", "accuracy"),
            log_x=True,
        ),
        panel("recall", "pairs", "accuracy (%)", lambda x: _by_number(x, "recall", "accuracy"), log_x=True),
    ]
    return [one for one in panels if one.curves]


def _held_out(group: Group, axis: str, factor: float) -> Curve | None:
    curves = [row["held_out"] for row in (group.alone if axis == "seconds" else group).rows]
    if not curves:
        return None
    length = min(len(curve["loss"]) for curve in curves)
    x = [factor * mean(curve[axis][n] for curve in curves) for n in range(length)]
    if not np.isfinite(x).all():
        return None
    return x, *_scores([[curve["loss"][n] for curve in curves] for n in range(length)])


def _by_position(group: Group) -> Curve | None:
    found = [row["positions"] for row in group.rows]
    if not all(entry["documents"] for entry in found):
        return None
    edges = found[0]["edges"]
    x = [(low + high) / 2 for low, high in pairwise(edges)]
    return x, *_scores([[entry["loss"][n] for entry in found] for n in range(len(x))])


def _by_number(group: Group, test: str, name: str) -> Curve | None:
    keys = list(group.rows[0][test])
    if not keys:
        return None
    return [int(key) for key in keys], *_scores([[100 * row[test][key][name] for row in group.rows] for key in keys])


def _scores(values: Sequence[Sequence[float]]) -> tuple[list[float], list[float]]:
    scores = [Score.of(list(seeds)) for seeds in values]
    return [score.mean for score in scores], [score.error for score in scores]
