"""Tables (Markdown) and figures of the backward studies: gradients and reversed iterations."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from kalmix_bench.experiments.solvers import figures
from kalmix_bench.experiments.solvers.tables import FACTOR, average_seeds, mean, select, table_of
from kalmix_bench.runner.cells import Row


def gradient(rows: Sequence[Row], path: Path, console: Console) -> Path:
    """Report relative errors of gradients by depth, as means over seeds (Figures 1c and 1e)."""
    errors = average_seeds([row["found"]["rows"] for row in rows], ("parameters", "inputs"))
    scaled = average_seeds([row["found"]["scaled"] for row in rows], ("parameters",))
    depths = sorted({row["layers"] for row in errors})
    groups = list(dict.fromkeys((row["arithmetic"], row["solver"]) for row in errors))
    parts = ("parameters", "inputs")
    columns = [f"{part}, {depth} layer{'s' * (depth > 1)}" for part in parts for depth in depths]
    table = table_of("relative error of gradients against float64", ("arithmetic", "solver"), columns)
    for arithmetic, solver in groups:
        of = {row["layers"]: row for row in select(errors, arithmetic=arithmetic, solver=solver)}
        table.add_row(arithmetic, solver, *(f"{of[depth][part]:.1e}" for part in parts for depth in depths))
    console.print(table)
    solvers = list(dict.fromkeys(row["solver"] for row in scaled))
    scales = sorted({row["scale"] for row in scaled if row["scale"] is not None})
    columns = [*(f"loss times {scale:g}" for scale in scales), "one op, unit normal gradients"]
    title = f"relative error of gradients, {depths[-1]} layers, float32, loss multiplied; and of the op alone"
    table = table_of(title, ("solver",), columns)
    for solver in solvers:
        of = {row["scale"]: row["parameters"] for row in select(scaled, solver=solver)}
        table.add_row(solver, *(f"{of[scale]:.1e}" if scale in of else "" for scale in (*scales, None)))
    console.print(table)
    y_label, panels = "relative error of all gradients", []
    for arithmetic in dict.fromkeys(row["arithmetic"] for row in errors):
        curves = {}
        for solver in (solver for name, solver in groups if name == arithmetic):
            of = select(errors, arithmetic=arithmetic, solver=solver)
            curves[solver] = [row["layers"] for row in of], [row["parameters"] for row in of]
        panels.append(figures.Panel(arithmetic, "layers", y_label, curves, legend_above=True))
    curves = {}
    for solver in solvers:
        of = [row for row in select(scaled, solver=solver) if row["scale"] is not None]
        if of:
            curves[solver] = [row["scale"] for row in of], [row["parameters"] for row in of]
    title = f"{depths[-1]} layers, float32"
    panels.append(figures.Panel(title, "loss multiplied by", y_label, curves, log_x=True))
    figures.panels(path, panels, columns=2)
    return path


def reversal(rows: Sequence[Row], path: Path, console: Console) -> Path:
    """Report divisors of reversed iterations and the growth of rounding errors (Figure 5); curves of the first seed."""
    first = rows[0]["found"]
    lemma, conjugate, growth = first["chebyshev"], first["conjugate"], first["growth"]
    title = "divisors of a reversed iteration, smallest and largest of any token and step"
    table = table_of(title, ("a",), ["Chebyshev, w - 1", "CG, last direction's share", "CG, r'r", "CG, p'S p"])
    for number, of in enumerate(conjugate):
        seeds = [row["found"]["conjugate"][number] for row in rows]
        pairs = [[x for one in seeds for x in one[name]] for name in ("direction_ratio", "square", "curvature")]
        ranges = [f"{min(low for low, _ in of):.1e} to {max(high for _, high in of):.1e}" for of in pairs]
        low, high = of["weights"]
        table.add_row(f"{of['factor']:g}", f"{low:.3f} to {high:.3f}", *ranges)
    console.print(table)
    steps = len(growth[0]["error"])
    back = [step for step in (1, 5, 10, 20) if step < steps] + [steps]
    columns = [*(f"{step} back" for step in back), "growth a step", "predicted", "1 / sqrt(w* - 1)"]
    table = table_of("error of iterates run backwards, relative to the solution", ("a", "arithmetic"), columns)
    for number, of in enumerate(growth):
        seeds = [row["found"]["growth"][number] for row in rows]
        errors = [f"{mean(one['error'][step - 1] for one in seeds):.1e}" for step in back]
        measured = mean(one["measured"] for one in seeds)
        tail = (f"{measured:.3f}", f"{of['predicted']:.3f}", f"{of['root']:.3f}")
        table.add_row(f"{of['factor']:g}", of["arithmetic"], *errors, *tail)
    console.print(table)
    at = lemma["condition"]
    divisors = {
        "largest": (at, lemma["largest"]),
        "smallest": (at, lemma["smallest"]),
        "w* - 1, after endless steps": (at, lemma["limit"]),
    }
    (one,) = select(conjugate, factor=FACTOR)
    along = range(1, 1 + len(one["direction_ratio"]))
    shares = {
        f"{which} {name}": (along, [pair[index] for pair in one[key]])
        for key, name in (("direction_ratio", "share"), ("square", "r'r"))
        for index, which in enumerate(("smallest", "largest"))
    }
    steps_back = range(1, 1 + steps)
    lines = {of["arithmetic"]: (steps_back, of["error"]) for of in select(growth, factor=FACTOR)}
    (single,) = select(growth, factor=FACTOR, arithmetic="float32")
    lines["float32, predicted"] = steps_back, [single["error"][0] * j * single["root"] ** (j - 1) for j in steps_back]
    others = {f"a = {of['factor']:g}": (steps_back, of["error"]) for of in select(growth, arithmetic="float32")}
    figures.panels(
        path,
        [
            figures.Panel("Divisors of Chebyshev", "condition number", "divisor w - 1", divisors, log_x=True),
            figures.Panel(f"Divisors of CG, a = {FACTOR:g}, float32", "iteration", "divisor", shares),
            figures.Panel(f"Reversed Chebyshev, a = {FACTOR:g}", "steps back", "error of the iterate", lines),
            figures.Panel("Reversed Chebyshev, float32", "steps back", "error of the iterate", others),
        ],
        columns=2,
    )
    return path
