"""Tiny run of `kalmix pretrain` under torchrun with FSDP2, for programs that kill and resume it."""

from __future__ import annotations

import sys
from pathlib import Path

from kalmix.training.shards import Preparation, prepare

VOCABULARY = 280
RECIPE = """
layers = [{{ mixer = "kla", slots = 4 }}, {{ mixer = "attention", heads = 2 }}]
shards = {shards!r}
packing = "best-fit"
vocab_size = {vocabulary}
hidden_size = {hidden_size}
seq_len = 16
batch_tokens = {batch_tokens}
batch_size = 2
steps = {steps}
save_steps = {save_steps}
eval_tokens = 64
fsdp = true
"""


def torchrun_command(ranks: int) -> list[str]:
    """Return the command of torchrun that starts `ranks` processes on this machine, without the program."""
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]


def prepare_shards(folder: Path) -> Path:
    """Prepare a tiny corpus; return the folder of its shards."""
    from training.conftest import WORDS

    (folder / "corpus").mkdir()
    for n in range(90):
        words = " ".join(WORDS[(n * k + k) % len(WORDS)] for k in range(3 + n % 20))
        (folder / "corpus" / f"{n}.txt").write_text(f"{n} {words}")
    prepare(Preparation(str(folder / "corpus"), vocab_size=VOCABULARY, held_out=0.1), folder / "shards")
    return folder / "shards"


def write_recipe(
    folder: Path, shards: Path, *, steps: int, save_steps: int, batch_tokens: int = 128, hidden_size: int = 8
) -> Path:
    """Write the recipe of a run; return its path."""
    sizes = {"steps": steps, "save_steps": save_steps, "batch_tokens": batch_tokens, "hidden_size": hidden_size}
    path = folder / "recipe.toml"
    path.write_text(RECIPE.format(shards=str(shards), vocabulary=VOCABULARY, **sizes))
    return path
