"""Cells of the papers' tasks for a GPU that is lent for half an hour, the most useful ones first.

    python -m kalmix_bench.experiments.recall.campaign cells.jsonl --seeds 3

Cells of one seed come before those of the next. Within a seed, the first sixteen cells are from MAD, MQAR and A5, so
that an early end leaves rows of each; then come more tasks, depths and layers, and long-context recall. KLA+, layers of
other packages, and deeper models of MAD come last, with one seed; cells whose package is not installed are left out.
`--last RUN` is for the last call on a machine: it leaves out cells of MAD's long tasks that have neither a row nor a
checkpoint in RUN, because they would not end.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from kalmix_bench.experiments.recall.presets import BENCHES, make_cells
from kalmix_bench.experiments.recall.protocol import RecallCell
from kalmix_bench.runner import cell_file
from kalmix_bench.runner.cells import Results, digest

NEGATIVE_DELTANET = 'gated-deltanet:{"negative_eigenvalues": true}'
MAD_FIRST = ("kla", "kla-noise-free", "gated-deltanet", "gla")  # layers of the paper's figure and table
MAD_OTHERS = ("kla-zoh", "mamba2", "bayesian", "kda", "gated-kalmanet")
LONG = ("selective-copying", "compression")  # they take about 750 epochs, the others 100
FAST = ("fuzzy-recall", "noisy-recall", "in-context-recall", "memorization")
PACKAGES = {"mamba-1": "mambapy", "mlstm": "xlstm"}  # layers of MAD with one seed, and the packages that they need
WORDS = ("kla", "mamba2", NEGATIVE_DELTANET, "attention")
SOLVERS = ("kalmanet-bare", "gated-deltanet", "mamba2", "deltanet", "mesanet")


class _Stage(NamedTuple):
    """Cells of some tasks: a benchmark, its preset, tasks, layers (those of the preset if empty) and depths."""

    bench: str
    preset: str
    tasks: Sequence[str]
    layers: Sequence[str]
    depths: Sequence[int] = ()
    one_seed: bool = False


STAGES = (
    # The first 16 cells begin at once with 8 processes on each of two GPUs: some of each benchmark.
    _Stage("a5", "short", ("a5",), WORDS, (1,)),
    _Stage("mad", "paper", LONG, MAD_FIRST),
    _Stage("mqar", "short", ("update",), ("bayesian", "gated-deltanet")),
    _Stage("mad", "encoder", ("selective-copying",), ("kla", "kla-noise-free"), one_seed=True),
    _Stage("a5", "short", ("a5",), WORDS, (2, 3, 4)),
    _Stage("mad", "paper", LONG, MAD_OTHERS),  # long tasks begin early enough to end
    _Stage("mad", "paper", FAST, (*MAD_FIRST, *MAD_OTHERS)),
    _Stage("mqar", "short", ("block", "shared", "rewrite"), ("bayesian", "gated-deltanet")),
    _Stage("mad", "encoder", ("fuzzy-recall",), ("kla", "kla-noise-free"), one_seed=True),
    _Stage("mqar", "short", ("update", "shared", "rewrite"), ("bayesian-no-conv",)),
    _Stage("mqar", "short", ("update",), ("kda", "bayesian-slow", "mamba2")),
    _Stage("mqar", "short", ("block",), ("bayesian-no-conv", "gated-deltanet-no-conv", "kda")),
    _Stage("mqar", "short", ("shared",), ("kda",)),
    _Stage("mad", "short", ("long",), ()),
    _Stage("mqar", "short", ("mqar",), SOLVERS),
    _Stage("mad", "paper", FAST, ("kla-plus", *PACKAGES), one_seed=True),
    _Stage("mad", "paper", LONG, ("kla-plus", *PACKAGES), one_seed=True),
    _Stage("mad", "paper", LONG[:1], ("kla", "kla-zoh"), (2, 4), one_seed=True),
)


def campaign_cells(seeds: int = 3, validation: int = 1280) -> list[RecallCell]:
    """Return the cells in the order in which they run.

    Args:
        seeds: number of seeds.
        validation: validation rows of MAD's tasks, which choose the epoch; rows of results have the scores of the epoch
            that test rows choose, too. With 0 the cells equal those of `kalmix bench mad --preset paper`.
    """

    def cells(stage: _Stage) -> Iterator[RecallCell]:
        studies = BENCHES[stage.bench][stage.preset]
        for task in stage.tasks:
            count = min(seeds, 1) if stage.one_seed else seeds
            for cell in make_cells(studies, [task], stage.layers, count, depths=stage.depths):
                is_mad = cell.task.startswith("mad/")
                yield replace(cell, protocol=replace(cell.protocol, validation=validation if is_mad else 0))

    return sorted((cell for stage in STAGES for cell in cells(stage)), key=lambda cell: cell.seed)


def is_long(cell: RecallCell) -> bool:
    """Return whether a cell takes so long that it cannot begin in the last call on a machine."""
    return cell.task in {f"mad/{task}" for task in LONG}


def last_cells(cells: Iterable[RecallCell], run: Path) -> list[RecallCell]:
    """Return the cells of the last call: no long one that has neither a row nor a checkpoint in the folder `run`.

    Finished cells stay, because the report is on the listed cells only; their checkpoints are deleted.
    """
    cells = list(cells)
    finished = Results(run / "results.jsonl").rows(cells)

    def can_end(cell: RecallCell) -> bool:
        return not is_long(cell) or cell in finished or (run / "checkpoints" / digest(cell)).exists()

    return [cell for cell in cells if can_end(cell)]


def absent_packages() -> dict[str, str]:
    """Return layers of the campaign that cannot run here, each with the package that is not installed."""
    return {layer: package for layer, package in PACKAGES.items() if find_spec(package) is None}


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the cells of a machine that is lent, in order.")
    parser.add_argument("file", type=Path, help="cell file to write, for `kalmix bench run`")
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds")
    parser.add_argument("--validation", type=int, default=1280, help="validation rows of MAD's tasks; 0 for none")
    parser.add_argument("--last", type=Path, metavar="RUN", help="folder of the run whose last call this is")
    given = parser.parse_args()
    absent = absent_packages()
    cells = [cell for cell in campaign_cells(given.seeds, given.validation) if cell.layer not in absent]
    cells = cells if given.last is None else last_cells(cells, given.last)
    cell_file.write(cells, given.file)
    for layer, package in absent.items():
        print(f"skipped: cells of {layer}, because {package} is not installed; bring its wheel (bench/recall_lease.sh)")


if __name__ == "__main__":
    main()
