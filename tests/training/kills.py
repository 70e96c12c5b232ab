"""Kill tiny runs of `kalmix train`, resume them, and check that no step is lost, repeated or stuck.

    python tests/training/kills.py --kills 100

Prints one line per failure, and the counts; exits with 1 after a failure.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
from killing import Run, main

from kalmix.analysis import plots  # noqa: F401 - imported once, before the sessions fork
from kalmix.files import PARTIAL
from kalmix.training import evaluation
from kalmix.training.trainer import KalmixTrainer
from training.conftest import WORDS


class Train(Run):
    """Run of `kalmix train` with 24 steps."""

    trainer = KalmixTrainer

    def next_command(self) -> list[str] | None:
        if not (self.output / "recipe.json").exists():
            text = self.folder / "text.txt"
            draw = random.Random(0)
            text.write_text("\n\n".join(" ".join(draw.choices(WORDS, k=40)) for _ in range(60)))
            layers = '[{"mixer": "kla", "slots": 4}]'
            sizes = [
                "--layers",
                layers,
                "--hidden-size",
                "8",
                "--seq-len",
                "16",
                "--batch-size",
                "2",
                "--vocab-size",
                "280",
            ]
            return ["train", "--text", str(text), *sizes, "--steps", "24", "--output", str(self.output)]
        if not self.finished():
            return ["train", "--resume", "--output", str(self.output)]
        last = self.output / "attention.png"  # a report draws it after everything else
        return None if last.exists() else ["report", str(self.output)]

    def finished(self) -> set[str]:
        try:
            history = json.loads((self.output / "history.json").read_text())
        except FileNotFoundError:
            return set()
        return {"train"} if history[-1]["progress"] >= 1 else set()

    def checkpoints(self) -> Iterator[tuple[str, Path]]:
        yield from (("train", path) for path in (self.output / "checkpoints").glob("checkpoint-*"))

    def results(self) -> dict[str, Any]:
        history = json.loads((self.output / "history.json").read_text())
        curve = [(row["tokens"], row["bits_per_byte"]) for row in history if "bits_per_byte" in row]
        result = json.loads((self.output / "result.json").read_text())
        weights = (self.output / "model" / "model.safetensors").read_bytes()
        left = list(self.output.rglob(f"{PARTIAL}*"))
        bits = result["bits_per_byte"]
        return {"curve": curve, "bits": bits, "weights": weights, "temporary files left": left}


if __name__ == "__main__":
    evaluation.EXCERPT_CHARS = 32  # labels of tokens take most of the time of a figure
    main(Train)
