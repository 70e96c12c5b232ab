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
    simulated = [setting for setting in map(SETTINGS.get, settings) if isinstance(setting, SimulatedSetting)]
    noises = dict.fromkeys((setting.system.process_noise, setting.system.obs_noise) for setting in simulated)
    costs = _table("attention that knows the system, last of 102 tokens: mean squared error, over")
    for name in ("the optimum", "what is claimed", "the optimum, all tokens"):
        costs.add_column(name, justify="right")
    honest = _table("how often the state is inside the interval of each level")
    for level in LEVELS:
        honest.add_column(f"{level:.0%}", justify="right")
    times = torch.arange(PUBLISHED.length, dtype=torch.float64) * PUBLISHED.interval
    for process, obs in noises:
        name = f"{process:g}, {obs:g}"
        variances = pooled_variances(System(((MODE.real,),), process, obs), times)
        ratio, overconfidence = variances.actual / variances.optimal, variances.actual / variances.claimed
        costs.add_row(name, *(f"{float(cell):.2f}" for cell in (ratio[-1], overconfidence[-1], ratio.mean())))
        for estimator, coverage in calibration(process, obs).items():
            honest.add_row(f"{name}: {estimator}", *(f"{part:.1%}" for part in coverage))
    for table in (costs, honest) if noises else ():
        console.print(table)


def write_report(rows: Sequence[Row], output: Path, console: Console) -> list[Path]:
    """Print a table per setting with means and standard deviations over seeds, and draw all in one figure."""
    ratios = {}
    for setting, errors in _by_setting(rows).items():
        reference, relative = _over_reference(errors)
        table = _table(f"{setting}: mean squared error of what comes next")
        for column in ("measurement", f"over {reference}", "state"):
            table.add_column(column, justify="right")
        for name, truths in errors.items():
            cells = (truths.get("measurement"), relative.get(name), truths.get("state"))
            table.add_row(name, *(_said([*cell.values()]) if cell else "" for cell in cells))
        console.print(table)
        ratios[setting] = {name: [*of.values()] for name, of in relative.items() if name not in (reference, "last")}
    title = "squared error of the next measurement, relative to the reference"
    return [Path(figures.ratios(output / "errors.png", ratios, title))]


def findings(rows: Sequence[Row]) -> list[Finding]:
    """Return every predictor's error of the next measurement relative to the reference."""
    results = []
    for setting, squared_errors in _by_setting(rows).items():
        reference, relative = _over_reference(squared_errors)
        for name, of in relative.items():
            value = Score.of([*of.values()])
            results.append(Finding(f"sde/{setting}", "", name, f"error over {reference}", value, len(of)))
    return results


def pictures(rows: Mapping[SdeCell, Row], results: Results, output: Path) -> list[Path]:
    """Draw Figures 1, 2 and 3 of one test trajectory per setting, by the models of the first seed; return the files."""
    files, paths, clouds = [], {}, []
    for setting in dict.fromkeys(cell.setting for cell in rows):
        maps, times = {}, torch.zeros(0)
        for cell in (cell for cell in rows if cell.setting == setting and cell.seed == 0 and cell.model != REFERENCES):
            example = _Example.of(cell, results)
            maps |= {
                f"{published_name(cell.model)}, layer {place}": weights
                for place, weights in enumerate(example.maps(), 1)
            }
            times = example.trajectory.times[0, :-1]
            if example.trajectory.state is not None:
                state, measurements = example.trajectory.state[0], example.trajectory.measurements[0]
                path2d = figures.Path2D(
                    _with_noises(setting), state, measurements, example.predictor.predict(example.trajectory, 1)[0]
                )
                paths.setdefault(cell.model, []).append(path2d)
                clouds.extend(() if clouds else example.clouds())
        labels = ["" if token % 10 else f"{time:.2g}" for token, time in enumerate(times.tolist())]
        if maps:
            path = output / f"maps-{setting}.png"
            attention_maps(
                path,
                torch.stack([*maps.values()]),
                labels,
                [*maps],
                title=f"Attention by time, {_with_noises(setting)}",
            )
            files.append(path)
    for model, path2d in paths.items():
        files.append(Path(figures.paths(output / f"paths-{model}.png", path2d[:3])))
    if clouds:
        files.append(Path(figures.clouds(output / "pulled.png", clouds)))
    return files


def _with_noises(name: str) -> str:
    """Return the name of a setting with its variances of process and measurement noise."""
    setting = SETTINGS[name]
    if not isinstance(setting, SimulatedSetting):
        return name
    return f"{name}: noises {setting.system.process_noise:g}, {setting.system.obs_noise:g}"


class _Example(NamedTuple):
    """A model, the first test trajectory of its setting, and that trajectory's tokens and times as model inputs."""

    predictor: TrainedPredictor
    trajectory: Trajectories
    tokens: torch.Tensor
    times: torch.Tensor

    @staticmethod
    def of(cell: SdeCell, results: Results) -> _Example:
        data, first = SETTINGS[cell.setting].draw(cell.protocol.sizes, cell.seed), torch.tensor([0])
        predictor = load_predictor(cell, data, results, torch.device("cpu"))
        ((tokens, times),) = predictor.batches(data.test, [first])
        return _Example(predictor, data.test.select(first), tokens, times)

    @torch.no_grad()
    def maps(self) -> torch.Tensor:
        """Return attention weights by layer, `[layers, T - 1, T - 1]`."""
        return self.predictor.model.maps(self.tokens[:, :-1], self.times[:, :-1], self.times.diff(dim=1))[:, 0]

    @torch.no_grad()
    def clouds(self) -> list[figures.Clouds]:
        """Return propagated estimates at four times, for every stored stage of training."""
        model, stages = self.predictor.model, []
        if not isinstance(model, FilterPredictor) or self.trajectory.state is None:
            return stages
        at = [part * (len(self.trajectory.state[0]) - 1) // 4 for part in range(1, 5)]
        for epochs, weights in sorted(self.predictor.snapshots.items()):
            model.load_state_dict(weights)
            estimates = [(model.propagate(self.tokens, self.times, then) @ self.predictor.rows.mT)[0] for then in at]
            stages.append(
                figures.Clouds(
                    f"after {epochs} epochs" if epochs else "before training", self.trajectory.state[0], at, estimates
                )
            )
        return stages


def _by_setting(rows: Sequence[Row]) -> dict[str, Errors]:
    """Group errors by setting, for settings that have a reference."""
    settings: dict[str, Errors] = {}
    for row in rows:
        for name, truths in row["errors"].items():
            for truth, error in truths.items():
                errors = settings.setdefault(row["setting"], {})
                errors.setdefault(name, {}).setdefault(truth, {})[row["seed"]] = error
    return {setting: errors for setting, errors in settings.items() if not errors.keys().isdisjoint(REFERENCE)}


def _over_reference(errors: Errors) -> tuple[str, dict[str, dict[int, float]]]:
    """Return the reference's name, and each predictor's error of the next measurement relative to it, by seed."""
    (reference,) = (name for name in REFERENCE if name in errors)
    best, relative = errors[reference]["measurement"], {}
    for name, of in errors.items():
        seeds = of.get("measurement", {}).keys() & best.keys()
        relative |= {name: {seed: of["measurement"][seed] / best[seed] for seed in sorted(seeds)}} if seeds else {}
    return reference, relative


def _said(values: Sequence[float]) -> str:
    return f"{mean(values):.4g}" + (f" ± {stdev(values):.2g}" if len(values) > 1 else "")


def _table(title: str) -> Table:
    return Table("", box=box.MARKDOWN, title=f"[bold]{title}", title_justify="left")
