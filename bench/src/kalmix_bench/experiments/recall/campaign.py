"""Cells of the papers' tasks for a GPU that is lent for half an hour, the most useful ones first.

    python -m kalmix_bench.experiments.recall.campaign cells.jsonl --seeds 3

Cells of one seed come before those of the next. Within a seed, the first cells are from MAD, MQAR and A5, so that an
early end leaves rows of each; MAD's long tasks come before its short ones; then more layers and depths. MAD with layers
of other packages comes last, with one seed; these cells are left out if the package is not installed.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from kalmix_bench.experiments.recall.presets import BENCHES, make_cells
from kalmix_bench.experiments.recall.protocol import RecallCell
from kalmix_bench.runner import cell_file

NEGATIVE_DELTANET = 'gated-deltanet:{"negative_eigenvalues": true}'
MAD_FIRST = ("kla", "kla-noise-free", "gated-deltanet", "mamba2", "bayesian")
MAD_OTHERS = ("gla", "kda", "gated-kalmanet", "kla-zoh")
LONG = ("compression", "selective-copying")
FAST = ("fuzzy-recall", "noisy-recall", "in-context-recall", "memorization")
PACKAGES = {"mamba-1": "mambapy", "mlstm": "xlstm"}  # layers of MAD with one seed, and the packages that they need
WORDS = ("kla", "mamba2", NEGATIVE_DELTANET, "attention")


class _Stage(NamedTuple):
    """Cells of some tasks: a benchmark, its preset, tasks, layers and depths."""

    bench: str
    preset: str
    tasks: Sequence[str]
    layers: Sequence[str]
    depths: Sequence[int] = ()


STAGES = (
    # 16 cells, which begin at once with 8 processes on each of two GPUs: some of each benchmark
    _Stage("mqar", "short", ("update",), ("bayesian", "gated-deltanet")),
    _Stage("a5", "short", ("a5",), WORDS, (1,)),
    _Stage("mad", "paper", LONG, MAD_FIRST),
    _Stage("mqar", "short", ("block", "shared"), ("bayesian", "gated-deltanet")),
    _Stage("mad", "paper", FAST, MAD_FIRST),
    _Stage("a5", "short", ("a5",), WORDS, (2,)),
    _Stage("mqar", "short", ("update",), ("kda", "bayesian-slow")),
    _Stage("mqar", "short", ("rewrite",), ("bayesian", "gated-deltanet")),
    _Stage("mad", "paper", LONG, MAD_OTHERS),
    _Stage("mad", "paper", FAST, MAD_OTHERS),
    _Stage("mqar", "short", ("block",), ("bayesian-no-conv", "gated-deltanet-no-conv", "kda")),
    _Stage("mqar", "short", ("shared",), ("kda",)),
    _Stage("a5", "short", ("a5",), WORDS, (3, 4)),
    _Stage("mad", "paper", (*LONG, *FAST), ("kla-plus",)),
)
BASELINES = _Stage("mad", "paper", (*LONG, *FAST), tuple(PACKAGES))


def campaign_cells(seeds: int = 3, validation: int = 1280) -> list[RecallCell]:
    """Return the cells in the order in which they run.

    Args:
        seeds: number of seeds.
        validation: validation rows of MAD's tasks, which choose the epoch; rows of results have the scores of the epoch
            that test rows choose, too. With 0 the cells equal those of `kalmix bench mad --preset paper`.
    """

    def cells(stage: _Stage, seeds: int) -> Iterator[RecallCell]:
        studies = BENCHES[stage.bench][stage.preset]
        for task in stage.tasks:
            for cell in make_cells(studies, [task], stage.layers, seeds, depths=stage.depths):
                protocol = replace(cell.protocol, validation=validation if stage.bench == "mad" else 0)
                yield replace(cell, protocol=protocol)

    every = [cell for stage in STAGES for cell in cells(stage, seeds)]
    return [*sorted(every, key=lambda cell: cell.seed), *cells(BASELINES, min(seeds, 1))]


def absent_packages() -> dict[str, str]:
    """Return layers of the campaign that cannot run here, each with the package that is not installed."""
    return {layer: package for layer, package in PACKAGES.items() if find_spec(package) is None}


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the cells of a machine that is lent, in order.")
    parser.add_argument("file", type=Path, help="cell file to write, for `kalmix bench run`")
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds")
    parser.add_argument("--validation", type=int, default=1280, help="validation rows of MAD's tasks; 0 for none")
    given = parser.parse_args()
    absent = absent_packages()
    cells = [cell for cell in campaign_cells(given.seeds, given.validation) if cell.layer not in absent]
    cell_file.write(cells, given.file)
    for layer, package in absent.items():
        print(f"skipped: cells of {layer}, because {package} is not installed; bring its wheel (bench/recall_lease.sh)")


if __name__ == "__main__":
    main()
