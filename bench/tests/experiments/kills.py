"""Kill tiny runs of `kalmix bench mad`, resume them, and check that nothing is lost, repeated or stuck.

    python bench/tests/experiments/kills.py --kills 100

Prints a line for every failure, and the counts; exits with 1 if there was a failure.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[3] / "tests"))
from killing import Run, Session, main

import kalmix_bench.experiments.recall.report  # noqa: F401 - each session would import it, and matplotlib
from kalmix.files import PARTIAL
from kalmix_bench.experiments.recall import ModelShape, Part, RecallProtocol, evaluation_callback, presets
from kalmix_bench.experiments.recall.trainer import CellTrainer
from kalmix_bench.runner.cells import digest

TINY = (
    presets.RecallStudy(
        "mad/selective-copying",
        (Part.of(8, 4, seq_len=12, num_tokens_to_copy=2),),
        (ModelShape(8, state_size=32, heads=2),),
        RecallProtocol(epochs=4, batch_size=4, learning_rate=1e-3),
        ("kla", "gated-deltanet", "linear-attention"),
    ),
)


class Bench(Run):
    """`kalmix bench mad` of three cells, each of four epochs of two steps."""

    trainer = CellTrainer
    ended = False

    def next_command(self) -> list[str] | None:
        return None if self.ended else ["bench", "mad", "--device", "cpu", "--output", str(self.output)]

    def session(self, command: list[str], *, event: int | None = None, after: float | None = None) -> Session:
        found = super().session(command, event=event, after=after)
        self.ended = found.status == 0
        return found

    def rows(self) -> list[dict[str, Any]]:
        """Return the complete rows of the results."""
        file, rows = self.output / "results.jsonl", []
        for line in file.read_text().split("\n") if file.exists() else ():
            try:
                rows.append(json.loads(line))
            except ValueError:  # cut off by a kill
                continue
        return rows

    def finished(self) -> set[str]:
        return {f"{row['layer']}-{row['seed']}" for row in self.rows()}

    def checkpoints(self) -> Iterator[tuple[str, Path]]:
        names = {digest(cell): f"{cell.layer}-{cell.seed}" for cell in presets.make_cells(TINY, (), (), 1)}
        for path in (self.output / "checkpoints").glob("*/checkpoint-*"):
            yield names[path.parent.name], path

    def results(self) -> dict[str, Any]:
        names = ("layer", "seed", "scores", "slices", "curves", "epochs", "parameters")
        rows = sorted(([row[name] for name in names] for row in self.rows()), key=str)
        weights = sorted(path.read_bytes() for path in (self.output / "models").glob("*.safetensors"))
        left = list((self.output / "checkpoints").glob("*"))
        return {
            "rows": rows,
            "weights": weights,
            "report": (self.output / "report.md").exists(),
            "checkpoints left": left,
            "temporary files left": list(self.output.rglob(f"{PARTIAL}*")),
        }


if __name__ == "__main__":
    evaluation_callback.CHECKPOINT_SECONDS = 0.0
    presets.BENCHES["mad"]["laptop"] = TINY
    main(Bench)
