"""Kill tiny runs of `kalmix pretrain` on token shards, resume them, and check that no step is lost, repeated or stuck.

    python tests/training/kills_on_shards.py --kills 100

Prints one line per failure, and the counts; exits with 1 after a failure.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
from killing import main

from kalmix.files import PARTIAL
from kalmix.training.shards import Preparation, prepare
from training.conftest import WORDS
from training.kills import Train

RECIPE = """
layers = [{{ mixer = "kla", slots = 4 }}]
shards = {shards!r}
packing = "best-fit"
vocab_size = 280
hidden_size = 8
seq_len = 16
batch_tokens = 64
batch_size = 2
steps = 24
save_steps = 7
eval_tokens = 64
"""


class Pretrain(Train):
    """Run of `kalmix pretrain` with 24 steps on shards."""

    def next_command(self) -> list[str] | None:
        if not (self.output / "recipe.json").exists():
            self._prepare()
            return ["pretrain", str(self.folder / "recipe.toml"), "--output", str(self.output)]
        return None if self.finished() else ["pretrain", "--resume", "--output", str(self.output)]

    def _prepare(self) -> None:
        corpus, shards = self.folder / "corpus", self.folder / "shards"
        if not corpus.exists():
            corpus.mkdir()
            for n in range(90):
                words = " ".join(WORDS[(n * k + k) % len(WORDS)] for k in range(3 + n % 20))
                (corpus / f"{n}.txt").write_text(f"{n} {words}")
            prepare(Preparation(str(corpus), vocab_size=280, held_out=0.1), shards)
        (self.folder / "recipe.toml").write_text(RECIPE.format(shards=str(shards)))

    def results(self) -> dict[str, Any]:
        history = json.loads((self.output / "history.json").read_text())
        names = ("loss", "grad_norm", "eval_loss", "epoch")
        curve = [(row["tokens"], *(row.get(name) for name in names)) for row in history if "train_runtime" not in row]
        weights = (self.output / "model" / "model.safetensors").read_bytes()
        return {"curve": curve, "weights": weights, "temporary files left": list(self.output.rglob(f"{PARTIAL}*"))}


if __name__ == "__main__":
    main(Pretrain)
