"""Tables (Markdown) and pictures of learning linear stochastic differential equations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean, stdev

import torch
from rich import box
from rich.console import Console
from rich.table import Table

from kalmix import plots
from kalmix.tasks.sde.calibration import MODE, calibration
from kalmix.tasks.sde.independence import pooled
from kalmix.tasks.sde.scores import LEVELS
from kalmix.tasks.sde.settings import PUBLISHED, SETTINGS, Simulated
from kalmix.tasks.sde.systems import System
from kalmix.tasks.sde.trajectories import Trajectories
from kalmix.training.lines import Row
from kalmix.training.sde import REFERENCES, Cell, Protocol, Results, learned

REFERENCE = ("kalman", "structural")  # whose error others are divided by
Errors = dict[str, dict[str, list[float]]]  # by predictor and truth, one a seed


def unlearned(settings: Sequence[str], console: Console) -> None:
    """What weighing observations as if they were independent costs, and what its variance is worth, by noises."""
    named = [setting for setting in map(SETTINGS.get, settings) if isinstance(setting, Simulated)]
    noises = dict.fromkeys((setting.system.process_noise, setting.system.obs_noise) for setting in named)
    costs = _table("attention that knows the system, last of 102 tokens: mean squared error, over")
    for name in ("the optimum", "what is claimed", "the optimum, all tokens"):
        costs.add_column(name, justify="right")
    honest = _table("how often the state is inside the interval of each level")
    for level in LEVELS:
        honest.add_column(f"{level:.0%}", justify="right")
    times = torch.arange(PUBLISHED.length, dtype=torch.float64) * PUBLISHED.interval
    for process, obs in noises:
        name = f"{process:g}, {obs:g}"
        found = pooled(System(((MODE.real,),), process, obs), times)
        ratio, boast = found.actual / found.optimal, found.actual / found.claimed
        costs.add_row(name, *(f"{float(cell):.2f}" for cell in (ratio[-1], boast[-1], ratio.mean())))
        for whose, covered in calibration(process, obs).items():
            honest.add_row(f"{name}: {whose}", *(f"{part:.1%}" for part in covered))
    for table in (costs, honest) if noises else ():
        console.print(table)


def errors(rows: Mapping[Cell, Row], output: Path, console: Console) -> Path:
    """A table a setting, means over seeds with their standard deviations; and all of them in one picture."""
    drawn = {}
    for setting in dict.fromkeys(cell.setting for cell in rows):
        found = _collected([row for cell, row in rows.items() if cell.setting == setting])
        (whose,) = (name for name in REFERENCE if name in found)
        best = found[whose]["measurement"]
        over = {name: _over(truths["measurement"], best) for name, truths in found.items() if "measurement" in truths}
        table = _table(f"{setting}: mean squared error of what comes next")
        for column in ("measurement", f"over {whose}", "state"):
            table.add_column(column, justify="right")
        for name, truths in found.items():
            table.add_row(name, *(_said(x) for x in (truths.get("measurement"), over.get(name), truths.get("state"))))
        console.print(table)
        drawn[setting] = {name: values for name, values in over.items() if name not in (whose, "last")}
    return Path(
        plots.ratios(output / "errors.png", drawn, "squared error of the next measurement, over the reference's")
    )


def pictures(rows: Mapping[Cell, Row], protocol: Protocol, results: Results, output: Path) -> list[Path]:
    """What models of the first seed predict of a trajectory, a picture a model, and attend to in it, one a setting."""
    written = []
    models = {cell.model: None for cell in rows if cell.model != REFERENCES}
    for model in models:
        shown = []
        for cell in rows:
            setting = SETTINGS[cell.setting]
            if cell.model == model and cell.seed == 0 and isinstance(setting, Simulated):
                seen, predicted = _one(cell, protocol, results)[:2]
                assert seen.state is not None
                shown.append(plots.Path2D(cell.setting, seen.state[0], seen.measured[0], predicted[0]))
        if shown:
            written.append(Path(plots.paths(output / f"paths-{model}.png", shown[:3])))
    for setting in dict.fromkeys(cell.setting for cell in rows):
        maps, names, times = [], [], torch.zeros(0)
        for model in models:
            seen, _, weights = _one(Cell(setting, model, 0), protocol, results)
            maps.extend(weights)
            names.extend(f"{model}, layer {place}" for place in range(1, 1 + len(weights)))
            times = seen.times[0, :-1]
        if maps:
            labels = ["" if token % 10 else f"{time:.2g}" for token, time in enumerate(times.tolist())]
            title = f"Attention, {setting}"
            written.append(
                Path(
                    plots.attention_maps(output / f"maps-{setting}.png", torch.stack(maps), labels, names, title=title)
                )
            )
    return written


@torch.no_grad()
def _one(cell: Cell, protocol: Protocol, results: Results) -> tuple[Trajectories, torch.Tensor, torch.Tensor]:
    """The first test trajectory, its predictions `[1, T - 1, d]` and the maps `[layers, T - 1, T - 1]` behind them."""
    given = SETTINGS[cell.setting].draw(protocol.sizes, cell.seed)
    model, first = learned(cell, given, protocol, results, torch.device("cpu")), torch.tensor([0])
    seen = given.test.take(first)
    (x, times), *_ = model.batches(seen, [first])
    maps = model.model.maps(x[:, :-1], times[:, :-1], times.diff(dim=1))[:, 0]
    return seen, model.predict(seen, 1), maps


def _collected(rows: Sequence[Row]) -> Errors:
    found: Errors = {}
    for row in rows:
        for name, truths in row["errors"].items():
            for truth, error in truths.items():
                found.setdefault(name, {}).setdefault(truth, []).append(error)
    return found


def _over(values: Sequence[float], best: Sequence[float]) -> list[float]:
    return [value / least for value, least in zip(values, best, strict=True)]


def _said(values: Sequence[float] | None) -> str:
    if values is None:
        return ""
    return f"{mean(values):.4g}" + (f" ± {stdev(values):.2g}" if len(values) > 1 else "")


def _table(title: str) -> Table:
    return Table("", box=box.MARKDOWN, title=f"[bold]{title}", title_justify="left")
