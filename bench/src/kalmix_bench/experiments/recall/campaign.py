"""Cells of the papers' tasks for a GPU that is lent for half an hour, the most useful ones first.

    python -m kalmix_bench.experiments.recall.campaign cells.jsonl --seeds 3

Cells of one seed come before those of the next. Within a seed: MAD, first the tasks on which layers differ; recall of
keys that are written again; recall with one vocabulary, and in blocks; words of A5.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from kalmix_bench.experiments.recall.presets import BENCHES, make_cells
from kalmix_bench.experiments.recall.protocol import RecallCell
from kalmix_bench.runner import cell_file

NEGATIVE_DELTANET = 'gated-deltanet:{"negative_eigenvalues": true}'
MAD_LAYERS = ("kla", "kla-noise-free", "gated-deltanet", "mamba2", "bayesian", "gla", "kda", "gated-kalmanet")


class _Stage(NamedTuple):
    """Cells of one task: a benchmark, its preset, layers and depths."""

    bench: str
    preset: str
    task: str
    layers: Sequence[str]
    depths: Sequence[int] = ()


STAGES = (
    *(
        _Stage("mad", "paper", task, MAD_LAYERS)
        for task in (
            "compression",
            "selective-copying",
            "fuzzy-recall",
            "noisy-recall",
            "in-context-recall",
            "memorization",
        )
    ),
    _Stage("mqar", "short", "update", ("bayesian", "gated-deltanet", "kda", "bayesian-slow")),
    _Stage("mqar", "short", "shared", ("bayesian", "gated-deltanet", "kda")),
    _Stage("mqar", "short", "block", ("bayesian", "gated-deltanet", "kda")),
    _Stage("a5", "short", "a5", ("kla", "mamba2", NEGATIVE_DELTANET, "attention"), (1,)),
    _Stage("a5", "short", "a5", ("kla", "mamba2", NEGATIVE_DELTANET, "attention"), (2,)),
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
        for cell in make_cells(studies, [stage.task], stage.layers, seeds, depths=stage.depths):
            protocol = replace(cell.protocol, validation=validation if stage.bench == "mad" else 0)
            yield replace(cell, protocol=protocol)

    every = [cell for stage in STAGES for cell in cells(stage)]
    return sorted(every, key=lambda cell: cell.seed)


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the cells of a machine that is lent, in order.")
    parser.add_argument("file", type=Path, help="cell file to write, for `kalmix bench run`")
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds")
    parser.add_argument("--validation", type=int, default=1280, help="validation rows of MAD's tasks; 0 for none")
    given = parser.parse_args()
    cell_file.write(campaign_cells(given.seeds, given.validation), given.file)


if __name__ == "__main__":
    main()
