"""Tables and figures of the experiment on linear stochastic differential equations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import NamedTuple

import torch
from rich import box
from rich.console import Console
from rich.table import Table

from kalmix.analysis.plots import attention_maps
from kalmix_bench.datasets.sde.scores import LEVELS
from kalmix_bench.datasets.sde.settings import PUBLISHED, SETTINGS, SimulatedSetting
from kalmix_bench.datasets.sde.systems import System
from kalmix_bench.datasets.sde.trajectories import Trajectories
from kalmix_bench.experiments.sde import figures
from kalmix_bench.experiments.sde.calibration import MODE, calibration
from kalmix_bench.experiments.sde.checkpoints import load_predictor
from kalmix_bench.experiments.sde.independence import pooled_variances
from kalmix_bench.experiments.sde.models import FilterPredictor
from kalmix_bench.experiments.sde.protocol import REFERENCES, SdeCell
from kalmix_bench.experiments.sde.trainer import TrainedPredictor
from kalmix_bench.runner.cells import Results, Row
from kalmix_bench.runner.paper_claims import Finding
from kalmix_bench.runner.published_names import published_name
from kalmix_bench.runner.scores import Score

REFERENCE = ("kalman", "structural")  # errors are divided by theirs
Errors = dict[str, dict[str, dict[int, float]]]  # by predictor, target and seed


def report_untrained(settings: Sequence[str], console: Console) -> None:
    """Print the error of attention with known parameters relative to the optimum, and its coverage, for each pair of
    noises.
    """
    named = [setting for setting in map(SETTINGS.get, settings) if isinstance(setting, SimulatedSetting)]
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
        found = pooled_variances(System(((MODE.real,),), process, obs), times)
        ratio, boast = found.actual / found.optimal, found.actual / found.claimed
        costs.add_row(name, *(f"{float(cell):.2f}" for cell in (ratio[-1], boast[-1], ratio.mean())))
        for whose, covered in calibration(process, obs).items():
            honest.add_row(f"{name}: {whose}", *(f"{part:.1%}" for part in covered))
    for table in (costs, honest) if noises else ():
        console.print(table)


def write_report(rows: Sequence[Row], output: Path, console: Console) -> list[Path]:
    """Print a table per setting with means and standard deviations over seeds, and draw all in one figure."""
    drawn = {}
    for setting, found in _by_setting(rows).items():
        whose, over = _over_reference(found)
        table = _table(f"{setting}: mean squared error of what comes next")
        for column in ("measurement", f"over {whose}", "state"):
            table.add_column(column, justify="right")
        for name, truths in found.items():
            cells = (truths.get("measurement"), over.get(name), truths.get("state"))
            table.add_row(name, *(_said([*cell.values()]) if cell else "" for cell in cells))
        console.print(table)
        drawn[setting] = {name: [*of.values()] for name, of in over.items() if name not in (whose, "last")}
    title = "squared error of the next measurement, relative to the reference"
    return [Path(figures.ratios(output / "errors.png", drawn, title))]


def findings(rows: Sequence[Row]) -> list[Finding]:
    """Return every predictor's error of the next measurement relative to the reference."""
    found = []
    for setting, squared_errors in _by_setting(rows).items():
        whose, over = _over_reference(squared_errors)
        for name, of in over.items():
            value = Score.of([*of.values()])
            found.append(Finding(f"sde/{setting}", "", name, f"error over {whose}", value, len(of)))
    return found


def pictures(rows: Mapping[SdeCell, Row], results: Results, output: Path) -> list[Path]:
    """Draw Figures 1, 2 and 3 of one test trajectory per setting, by the models of the first seed; return the files."""
    written, paths, clouds = [], {}, []
    for setting in dict.fromkeys(cell.setting for cell in rows):
        maps, times = {}, torch.zeros(0)
        for cell in (cell for cell in rows if cell.setting == setting and cell.seed == 0 and cell.model != REFERENCES):
            shown = _Example.of(cell, results)
            maps |= {
                f"{published_name(cell.model)}, layer {place}": weights for place, weights in enumerate(shown.maps(), 1)
            }
            times = shown.seen.times[0, :-1]
            if shown.seen.state is not None:
                state, measurements = shown.seen.state[0], shown.seen.measurements[0]
                drawn = figures.Path2D(setting, state, measurements, shown.load_predictor.predict(shown.seen, 1)[0])
                paths.setdefault(cell.model, []).append(drawn)
                clouds.extend(() if clouds else shown.clouds())
        labels = ["" if token % 10 else f"{time:.2g}" for token, time in enumerate(times.tolist())]
        if maps:
            path = output / f"maps-{setting}.png"
            attention_maps(path, torch.stack([*maps.values()]), labels, [*maps], title=f"Attention, {setting}")
            written.append(path)
    for model, drawn in paths.items():
        written.append(Path(figures.paths(output / f"paths-{model}.png", drawn[:3])))
    if clouds:
        written.append(Path(figures.clouds(output / "pulled.png", clouds)))
    return written


class _Example(NamedTuple):
    """A model, the first test trajectory of its setting, and that trajectory's tokens and times as model inputs."""

    load_predictor: TrainedPredictor
    seen: Trajectories
    tokens: torch.Tensor
    times: torch.Tensor

    @staticmethod
    def of(cell: SdeCell, results: Results) -> _Example:
        given, first = SETTINGS[cell.setting].draw(cell.protocol.sizes, cell.seed), torch.tensor([0])
        found = load_predictor(cell, given, results, torch.device("cpu"))
        ((tokens, times),) = found.batches(given.test, [first])
        return _Example(found, given.test.select(first), tokens, times)

    @torch.no_grad()
    def maps(self) -> torch.Tensor:
        """Return attention weights by layer, `[layers, T - 1, T - 1]`."""
        return self.load_predictor.model.maps(self.tokens[:, :-1], self.times[:, :-1], self.times.diff(dim=1))[:, 0]

    @torch.no_grad()
    def clouds(self) -> list[figures.Clouds]:
        """Return propagated estimates at four times, for every stored stage of training."""
        model, stages = self.load_predictor.model, []
        if not isinstance(model, FilterPredictor) or self.seen.state is None:
            return stages
        at = [part * (len(self.seen.state[0]) - 1) // 4 for part in range(1, 5)]
        for epochs, weights in sorted(self.load_predictor.snapshots.items()):
            model.load_state_dict(weights)
            estimates = [
                (model.propagate(self.tokens, self.times, then) @ self.load_predictor.rows.mT)[0] for then in at
            ]
            stages.append(figures.Clouds(f"after {epochs} epochs", self.seen.state[0], at, estimates))
        return stages


def _by_setting(rows: Sequence[Row]) -> dict[str, Errors]:
    """Group errors by setting, for settings that have a reference."""
    settings: dict[str, Errors] = {}
    for row in rows:
        for name, truths in row["errors"].items():
            for truth, error in truths.items():
                found = settings.setdefault(row["setting"], {})
                found.setdefault(name, {}).setdefault(truth, {})[row["seed"]] = error
    return {setting: found for setting, found in settings.items() if not found.keys().isdisjoint(REFERENCE)}


def _over_reference(found: Errors) -> tuple[str, dict[str, dict[int, float]]]:
    """Return the reference's name, and each predictor's error of the next measurement relative to it, by seed."""
    (whose,) = (name for name in REFERENCE if name in found)
    best, over = found[whose]["measurement"], {}
    for name, of in found.items():
        both = of.get("measurement", {}).keys() & best.keys()
        over |= {name: {seed: of["measurement"][seed] / best[seed] for seed in sorted(both)}} if both else {}
    return whose, over


def _said(values: Sequence[float]) -> str:
    return f"{mean(values):.4g}" + (f" ± {stdev(values):.2g}" if len(values) > 1 else "")


def _table(title: str) -> Table:
    return Table("", box=box.MARKDOWN, title=f"[bold]{title}", title_justify="left")
