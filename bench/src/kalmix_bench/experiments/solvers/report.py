"""Tables (Markdown) and figures of the forward studies: residuals, errors and condition numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from kalmix_bench.experiments.solvers import figures
from kalmix_bench.experiments.solvers.backward_report import gradient, reversal
from kalmix_bench.experiments.solvers.convergence import ROUNDED
from kalmix_bench.experiments.solvers.tables import (
    FACTOR,
    Curve,
    add_iterations,
    by_iteration,
    lines_by,
    mean,
    merge_seeds,
    select,
    table_of,
)
from kalmix_bench.runner.cells import Row
from kalmix_bench.runner.paper_claims import Finding
from kalmix_bench.runner.scores import Score

CARRIED = "Chebyshev by residuals"  # the form of the Triton kernels


def residual(rows: Sequence[Row], path: Path, console: Console) -> Path:
    """Report the largest residual norm over tokens and seeds by iteration (Figures 1a and 9)."""
    curves = merge_seeds(rows, "residual", max)
    medians = merge_seeds(rows, "median", mean)
    for name in ROUNDED:
        table = by_iteration(f"largest residual norm of any token, {name}, by iterations", ("a", "solver"))
        for curve in select(curves, arithmetic=name):
            add_iterations(table, (f"{curve['factor']:g}", curve["solver"]), curve["residual"])
        console.print(table)
    table = by_iteration(f"median residual norm, a = {FACTOR:g}, by iterations", ("arithmetic", "solver"))
    for curve in select(medians, factor=FACTOR):
        add_iterations(table, (curve["arithmetic"], curve["solver"]), curve["median"])
    console.print(table)
    x_label, y_label = "iterations", "largest residual norm"
    solvers = [
        figures.Panel(
            f"a = {FACTOR:g}, {name}",
            x_label,
            y_label,
            lines_by(select(curves, arithmetic=name, factor=FACTOR), "solver"),
        )
        for name in ROUNDED
    ]
    strengths = []
    for name in ROUNDED:
        lines = lines_by(select(curves, arithmetic=name, solver="Chebyshev"), "factor")
        dashed = list(lines_by(select(curves, arithmetic=name, solver="CG"), "factor").values())
        strengths.append(figures.Panel(f"by a (CG dashed), {name}", x_label, y_label, lines, dashed))
    figures.panels(path, [*solvers, *strengths])
    return path


def precision(rows: Sequence[Row], path: Path, console: Console) -> Path:
    """Report relative errors by iteration, as means over seeds, and the fewest iterations that reach the rounding
    limit.
    """
    curves = merge_seeds(rows, "error", mean)
    for keys in dict.fromkeys(curve["keys"] for curve in curves):
        table = by_iteration(
            f"relative error of the solution, {keys} keys, by iterations", ("a", "solver", "arithmetic")
        )
        of = select(curves, keys=keys)
        others = [curve for curve in select(of, arithmetic="bfloat16 products") if curve["solver"] != "Chebyshev"]
        for curve in select(of, solver="Chebyshev") + others:
            add_iterations(table, (f"{curve['factor']:g}", curve["solver"], curve["arithmetic"]), curve["error"])
        console.print(table)
    table = by_iteration(
        f"relative error of the read-out of random values, a = {FACTOR:g}", ("keys", "arithmetic", "solver")
    )
    for number, curve in enumerate(rows[0]["found"]["curves"]):
        if curve["factor"] == FACTOR:
            seeds = [dict(row["found"]["curves"][number]["read"]) for row in rows]
            cells = (mean(read[i] for read in seeds) for i in seeds[0])
            table.add_row(curve["keys"], curve["arithmetic"], curve["solver"], *(f"{cell:.1e}" for cell in cells))
    console.print(table)
    console.print(_enough(curves))
    x_label, y_label = "iterations", "relative error"
    panels = []
    for keys in dict.fromkeys(curve["keys"] for curve in curves):
        at = {"keys": keys, "factor": FACTOR}
        lines = lines_by(select(curves, solver="Chebyshev", **at), "arithmetic")
        dashed = list(lines_by(select(curves, solver="CG", **at), "arithmetic").values())
        panels.append(figures.Panel(f"{keys} keys, a = {FACTOR:g} (CG dashed)", x_label, y_label, lines, dashed))
    figures.panels(path, panels)
    return path


def _enough(curves: Sequence[Curve]) -> Table:
    """Return a table of iterations until the error is within 10%, or a factor of 2, of the last one."""
    title = f"iterations of {CARRIED}, bfloat16 products, until the error is within 10% (a factor of 2) of the last"
    strengths = sorted({curve["factor"] for curve in curves})
    table = table_of(title, ("keys",), [f"a = {a:g}" for a in strengths])
    for keys in dict.fromkeys(curve["keys"] for curve in curves):
        cells = []
        for a in strengths:
            (curve,) = select(curves, keys=keys, factor=a, solver=CARRIED, arithmetic="bfloat16 products")
            error = curve["error"]
            first, second = (next(i for i, e in enumerate(error) if e <= of * error[-1]) for of in (1.1, 2.0))
            cells.append(f"{first} ({second})")
        table.add_row(keys, *cells)
    return table


def condition(rows: Sequence[Row], path: Path, console: Console) -> Path:
    """Report condition numbers of all seeds next to their bound; curves of the first seed."""
    kinds = rows[0]["found"]["kinds"]
    strengths = [of["factor"] for of in kinds[0]["adaptive"]]
    columns = [f"a = {of['factor']:g}, at most {of['bound']:g}" for of in kinds[0]["adaptive"]]
    ridge = kinds[0]["fixed"]["ridge"]
    title = "largest (median) condition number, and tokens above the bound"
    table = table_of(title, ("keys", "tokens"), [*columns, "above", f"ridge {ridge:g}"])
    for number, kind in enumerate(kinds):
        same = [row["found"]["kinds"][number] for row in rows]
        cells, above = [], 0
        for place in range(len(strengths)):
            of = [one["adaptive"][place] for one in same]
            cells.append(f"{max(x['largest'] for x in of):.4g} ({mean(x['median'] for x in of):.3g})")
            above += sum(x["above"] for x in of)
        fixed = [one["fixed"] for one in same]
        cells += [str(above), f"{max(x['largest'] for x in fixed):.4g} ({mean(x['median'] for x in fixed):.3g})"]
        name = kind["keys"] + (", forgetting" if kind["with_decay"] else "")
        table.add_row(name, str(sum(one["tokens"] for one in same)), *cells)
    console.print(table)
    panels = []
    for keys in dict.fromkeys(kind["keys"] for kind in kinds):
        pair = {kind["with_decay"]: kind for kind in select(kinds, keys=keys)}
        adaptive = {with_decay: select(kind["adaptive"], factor=FACTOR)[0] for with_decay, kind in pair.items()}
        at, bound = pair[False]["at"], adaptive[False]["bound"]
        curves = {
            f"ridge {FACTOR:g} ||H||": (at, adaptive[False]["curve"]),
            f"ridge {ridge:g}": (at, pair[False]["fixed"]["curve"]),
        }
        dashed = [(at, adaptive[True]["curve"]), (at, pair[True]["fixed"]["curve"])]
        title, levels = f"{keys} keys (forgetting dashed)", {f"(a + 1) / a = {bound:g}": bound}
        panels.append(figures.Panel(title, "token", "condition number", curves, dashed, levels, log_x=True))
    figures.panels(path, panels)
    return path


REPORTS: dict[str, Callable[[Sequence[Row], Path, Console], Path]] = {
    "residual": residual,
    "gradient": gradient,
    "condition": condition,
    "reversal": reversal,
    "precision": precision,
}


def write_report(rows: Sequence[Row], output: Path, console: Console) -> list[Path]:
    """Report every study; return the files drawn."""
    studies = dict.fromkeys(row["study"] for row in rows)
    of = {study: [row for row in rows if row["study"] == study] for study in studies}
    return [REPORTS[study](study_rows, output / f"{study}.png", console) for study, study_rows in of.items()]


def findings(rows: Sequence[Row]) -> list[Finding]:
    """Return residuals after all iterations, and errors of gradients."""
    results = []
    for study, curves, described, score, of in (
        ("residual", "curves", "{arithmetic}, a = {factor:g}", "residual", lambda curve: curve["residual"][-1]),
        ("gradient", "rows", "{arithmetic}, {layers} layers", "error", lambda row: row["parameters"]),
    ):
        seeds = [row["found"][curves] for row in rows if row["study"] == study]
        for same in zip(*seeds, strict=True):
            value = Score.of([of(one) for one in same])
            condition = described.format(**same[0])
            results.append(Finding(f"solvers/{study}", condition, same[0]["solver"], score, value, len(same)))
    return results
