"""Scores of cells that the time ended, from their checkpoints.

    python -m kalmix_bench.experiments.recall.unfinished cells.jsonl RUN unfinished.jsonl --commit ID --tf32

RUN is the output folder of `kalmix bench run`. A line has the cell, commit, TF32, and curves and scores up to its last
epoch. Such lines are no results: a report does not read them, and the cell runs again.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from pathlib import Path

from kalmix.files import read_json, write_text
from kalmix.training.checkpoints import newest_checkpoint
from kalmix_bench.experiments.recall.cell_line import parse_cell
from kalmix_bench.experiments.recall.protocol import RecallCell
from kalmix_bench.runner import cell_file
from kalmix_bench.runner.cells import Row, digest


def unfinished_rows(
    cells: Iterable[RecallCell], run: Path, commit: str | None = None, *, tf32: bool = False
) -> list[Row]:
    """Return the cells with a checkpoint in the folder `run` that has scores of an epoch or more.

    Args:
        cells: cells of the run.
        run: output folder of `kalmix bench run`.
        commit: commit that ran them; rows store it.
        tf32: whether operands of matrix products were rounded to TF32; rows store it if so.
    """
    rows = []
    for cell in cells:
        checkpoint = newest_checkpoint(run / "checkpoints" / digest(cell))
        if checkpoint is not None:
            callbacks = read_json(checkpoint / "trainer_state.json")["stateful_callbacks"]
            found = callbacks["EvaluationCallback"]["attributes"]
            if found["curves"]:
                curves = {name: [float(f"{x:.6g}") for x in curve] for name, curve in found["curves"].items()}
                seconds = {f"{name}_seconds": round(value, 2) for name, value in found["seconds"].items()}
                so_far = {"epochs_so_far": len(curves["loss"]), **seconds, "slices": found["slices"], "curves": curves}
                origin = {"commit": commit, **({"tf32": True} if tf32 else {})}
                rows.append({**cell.to_dict(), **origin, **so_far})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description="Write curves and scores of cells that the time ended.")
    parser.add_argument("cells", type=Path, help="cell file")
    parser.add_argument("run", type=Path, help="output folder of `kalmix bench run`")
    parser.add_argument("file", type=Path, help="file to write")
    parser.add_argument("--commit", help="commit that ran the cells")
    parser.add_argument("--tf32", action="store_true", help="operands of matrix products were rounded to TF32")
    given = parser.parse_args()
    rows = unfinished_rows(cell_file.read(given.cells, parse_cell), given.run, given.commit, tf32=given.tf32)
    write_text(given.file, "".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main()
