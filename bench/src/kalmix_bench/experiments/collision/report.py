"""Tables and figures of the collision experiments."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table

from kalmix.files import write_text
from kalmix_bench.experiments.collision import figures
from kalmix_bench.experiments.collision import mechanism as mech
from kalmix_bench.experiments.collision.models import UPDATES
from kalmix_bench.experiments.collision.predictions import Prediction, predictions
from kalmix_bench.experiments.collision.protocol import OVERLAP
from kalmix_bench.runner.cells import Row
from kalmix_bench.runner.paper_claims import Finding
from kalmix_bench.runner.scores import Score

OVERLAPS = (0.30, 0.45, 0.60, 0.75, 0.85, 0.90, 0.92, 0.95, 0.98, 0.99)
PUBLISHED = {  # margins after the flood, table E.4.3, at the first nine of `OVERLAPS`
    "covariance reset": (0.40, 0.32, 0.20, 0.01, -0.16, -0.26, -0.30, -0.36, -0.42),
    "Bayesian Layer": (0.46, 0.46, 0.46, 0.46, 0.46, 0.45, 0.45, 0.43, 0.34),
}
PRIORS = (0.01, 0.05, 0.1, 0.5, 1.0, 3.0)
# Axes of each study: the coordinate, the fixed values of the others, the label, and the range of training.
AXES = {
    "recall": (
        ("flood", {"overlap": 0.8}, "writes at A, at overlap 0.8", (1, 8)),
        ("overlap", {"flood": 64}, "overlap, at 64 writes at A", (0.6, 0.8)),
    ),
    "crowding": (("writes", {}, "addresses in a memory of 16 rows", (16, 64)),),
}
MEASURED = ("margin", "label_margin", "accuracy", "cross_entropy")
LEVELS = {"boost": "47", "flood": "57", "slope": "16", "gain": "42"}  # equation of each level that is drawn
SCORES = {"recall": ("margin", "accuracy"), "crowding": ("cross_entropy", "accuracy")}  # printed; the first is drawn
Scores = list[dict[str, Any]]


def write_report(rows: Sequence[Row], output: Path, console: Console) -> list[Path]:
    """Report the deterministic experiment and the trained models; return the files written."""
    return mechanism(mech.MechanismSetting(), OVERLAP, output, console) + learned(rows, output, console)


def findings(rows: Sequence[Row]) -> list[Finding]:
    """Return every score of every test of every model."""
    models = dict.fromkeys((row["study"], row["model"]) for row in rows)
    results = []
    for study, model in models:
        seeds = [row["scores"] for row in rows if (row["study"], row["model"]) == (study, model)]
        for tests in zip(*seeds, strict=True):
            condition = ", ".join(f"{name} {value:g}" for name, value in tests[0].items() if name not in MEASURED)
            for name in (name for name in MEASURED if name in tests[0]):
                value = Score.of([test[name] for test in tests])
                results.append(Finding(f"collision/{study}", condition, model, name, value, len(tests)))
    return results


def mechanism(setting: mech.MechanismSetting, overlap: float, output: Path, console: Console) -> list[Path]:
    """Run the deterministic experiment and print it next to the closed forms; return the files written."""
    at = torch.tensor([overlap], dtype=torch.float64)
    traces = {name: mech.trace(rule, setting, at) for name, rule in mech.rules(setting).items()}
    closed_forms = predictions(setting, overlap, traces)
    overlaps = torch.tensor(OVERLAPS, dtype=torch.float64)
    margins = {name: 2 * last - 1 for name, last in mech.final_retrievals(setting, overlaps).items()}
    sweep = mech.sweep_priors(setting, overlap, torch.tensor(PRIORS, dtype=torch.float64))
    console.print(_predictions(closed_forms, overlap))
    console.print(_by_overlap(overlaps, margins))
    console.print(_swept(sweep, traces["Bayesian Layer"], setting, overlap))
    num_signals, picture = output / "mechanism.json", output / "mechanism.png"
    summary = {
        "overlap": overlap,
        "predictions": [row._asdict() | {"difference": row.difference} for row in closed_forms],
        "margins": {"overlap": OVERLAPS, **{name: row.tolist() for name, row in margins.items()}},
        "constant_priors": {name: column.tolist() for name, column in sweep._asdict().items()},
    }
    write_text(num_signals, json.dumps(summary, indent=1) + "\n")
    _draw(picture, setting, overlap, traces, closed_forms)
    return [num_signals, picture]


def learned(rows: Sequence[Row], output: Path, console: Console) -> list[Path]:
    """Print and draw the models' scores beyond their training range; return one file per study."""
    studies = dict.fromkeys(row["study"] for row in rows)
    return [_learned(study, [row for row in rows if row["study"] == study], output, console) for study in studies]


def _learned(study: str, rows: Sequence[Row], output: Path, console: Console) -> Path:
    trained = {row["model"] for row in rows}
    models = [name for name in UPDATES if name in trained]
    panels = []
    for axis, fixed, heading, training_range in AXES[study]:
        tests = {name: [_along(row["scores"], axis, fixed) for row in rows if row["model"] == name] for name in models}
        at = [score[axis] for score in next(iter(tests.values()))[0]]
        for score in SCORES[study]:
            curves, title = {name: _over_seeds(seeds, score) for name, seeds in tests.items()}, score.replace("_", " ")
            console.print(_sweep(f"{title} by {heading}", at, curves))
            if score == SCORES[study][0]:
                panels.append(figures.Sweep(heading, title, at, curves, training_range, log_x=axis != "overlap"))
    path = output / f"{study}.png"
    figures.sweeps(path, panels)
    return path


def _along(scores: Scores, axis: str, fixed: dict[str, float]) -> Scores:
    """Return the tests along one axis, in order."""
    return sorted((test for test in scores if fixed.items() <= test.items()), key=lambda test: test[axis])


def _over_seeds(seeds: Sequence[Scores], score: str) -> torch.Tensor:
    """Return mean and standard deviation over seeds, `[2, n]`."""
    values = torch.tensor([[test[score] for test in tests] for tests in seeds], dtype=torch.float64)
    return torch.stack([values.mean(0), values.std(0, correction=int(len(values) > 1))])


def _sweep(title: str, at: Sequence[float], curves: dict[str, torch.Tensor]) -> Table:
    table = _table(title, "", *(name.replace("-", " ") for name in curves))
    for index, value in enumerate(at):
        cells = (curve[:, index].tolist() for curve in curves.values())
        table.add_row(f"{value:g}", *(f"{mean:.2f}±{spread:.2f}" for mean, spread in cells))
    return table


def _predictions(rows: Sequence[Prediction], overlap: float) -> Table:
    table = _table(f"closed forms, overlap {overlap:g}", "equation", "quantity", "predicted", "measured", "difference")
    table.columns[1].justify = "left"
    for row in rows:
        table.add_row(
            row.equation, row.quantity, f"{row.predicted:.5f}", f"{row.measured:.5f}", f"{row.difference:.0e}"
        )
    return table


def _by_overlap(overlaps: torch.Tensor, margins: dict[str, torch.Tensor]) -> Table:
    table = _table("margin after the flood, by overlap", "", *margins, *(f"{name} (E.4.3)" for name in PUBLISHED))
    for index, rho in enumerate(overlaps.tolist()):
        published_score = (f"{column[index]:+.2f}" if index < len(column) else "" for column in PUBLISHED.values())
        table.add_row(f"{rho:.2f}", *(f"{column[index]:+.2f}" for column in margins.values()), *published_score)
    return table


def _swept(sweep: mech.PriorSweep, bayes: mech.Trace, setting: mech.MechanismSetting, overlap: float) -> Table:
    table = _table(f"constant priors, overlap {overlap:g}", "c", "gain", "margin in the end", "below 0 after")
    for prior, gain, margin, crossing in zip(*(column.tolist() for column in sweep), strict=True):
        table.add_row(f"{prior:.2f}", f"{gain:.2f}", f"{margin:+.2f}", str(crossing or "never"))
    crossing = int(mech.crossing(bayes, setting))
    table.add_row("Bayesian Layer", "varies", f"{float(bayes.margin()[-1]):+.2f}", str(crossing or "never"))
    return table


def _table(title: str, first: str, *columns: str) -> Table:
    table = Table(first, box=box.SIMPLE_HEAD, title=f"[bold]{title}", title_justify="left")
    for column in columns:
        table.add_column(column, justify="right")
    return table


def _draw(
    path: Path,
    setting: mech.MechanismSetting,
    overlap: float,
    traces: dict[str, mech.Trace],
    forms: Sequence[Prediction],
) -> None:
    """Draw Figures 3a, 3b and 6, without the reset ablation, which equals the DeltaNet-style curve."""
    curves_by_name = {name: trace for name, trace in traces.items() if name != "covariance reset"}
    overlaps = torch.linspace(0, 0.99, 100, dtype=torch.float64)
    final = mech.final_retrievals(setting, overlaps)
    by_equation = {row.equation: row.predicted for row in forms}
    curves = figures.MechanismCurves(
        retrieval={name: trace.retrieval()[:, 0] for name, trace in curves_by_name.items()},
        uncertainty={
            name: (curves_by_name[name].uncertainty(mech.A)[:, 0], curves_by_name[name].uncertainty(mech.B)[:, 0])
            for name in ("Bayesian Layer", "diagonal ablation")
        },
        gain={name: trace.gain[:, 0] for name, trace in curves_by_name.items()},
        overlaps=overlaps,
        final={name: final[name] for name in curves_by_name},
        phases=(setting.writes_before_flood - setting.boost, setting.writes_before_flood),
        crossings={name: int(mech.crossing(trace, setting)) for name, trace in curves_by_name.items()},
        levels={name: by_equation[number] for name, number in LEVELS.items()},
    )
    figures.mechanism(path, curves)
