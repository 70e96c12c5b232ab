"""One model is trained in two processes, which torchrun starts with the same command."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from distributed import sharded
from distributed.processes import run_ranks

from kalmix.training.checkpoints import list_checkpoints
from kalmix.training.recipe_files import read_recipe
from kalmix.training.run import train

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


@pytest.mark.slow
def test_torchrun_trains_one_model_in_two_processes(text_file: Path, tmp_path: Path) -> None:
    small = [
        "--layers",
        "kla",
        "--hidden-size",
        "8",
        "--seq-len",
        "16",
        "--batch-size",
        "2",
        "--vocab-size",
        "280",
        "--steps",
        "3",
    ]
    result = subprocess.run(
        [*TORCHRUN, "-m", "kalmix.cli", "train", "--text", str(text_file), *small],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("this model") == 1
    (output,) = (tmp_path / "runs").iterdir()
    assert (output / "model" / "model.safetensors").exists()
    history = json.loads((output / "history.json").read_text())
    assert history[-1]["progress"] == 1
    assert history[-1]["tokens"] == 3 * 2 * 2 * 16  # steps, processes, batch, block


RECIPE = """
layers = ["kla", {{ mixer = "attention", heads = 2 }}]
shards = {shards!r}
packing = {packing!r}
vocab_size = 280
hidden_size = 8
seq_len = 32
batch_size = 2
batch_tokens = 128
steps = 3
eval_tokens = 0
"""


@pytest.mark.slow
@pytest.mark.parametrize("packing", ["best-fit", "stream"])
def test_processes_that_divide_sequences_equal_one_process(packing: str, shards: Path, tmp_path: Path) -> None:
    (tmp_path / "recipe.toml").write_text(RECIPE.format(shards=str(shards), packing=packing))
    alone = train(read_recipe(str(tmp_path / "recipe.toml")), tmp_path / "alone")
    command = ["pretrain", "recipe.toml", "--set", "context_parallel=2", "--output", "both"]
    if packing == "stream":
        command += ["--set", "context_layout=head-tail", "--set", "context_attention=ring"]
    run_ranks(sharded.run_command, 2, tmp_path, *command)
    rows = [row for row in json.loads((tmp_path / "both" / "history.json").read_text()) if "loss" in row]
    expected = [row for row in alone.history if "loss" in row]
    for name in ("loss", "grad_norm", "tokens"):
        assert [row[name] for row in rows] == pytest.approx([row[name] for row in expected], rel=1e-4), name


def shorten(output: Path, steps: int) -> None:
    """Change the files of a run as if it had been started with fewer steps."""
    manifests = [path / "manifest.json" for path in list_checkpoints(output / "checkpoints")]
    for path in (output / "recipe.json", *manifests):
        written = json.loads(path.read_text())
        written.get("recipe", written)["steps"] = steps
        path.write_text(json.dumps(written))


@pytest.mark.slow
def test_a_killed_process_ends_the_run_which_resumes(text_file: Path, tmp_path: Path) -> None:
    """After `kill -9` of one process, the others end within a minute, with one sentence."""
    output = tmp_path / "run"
    small = "--layers kla --hidden-size 8 --seq-len 16 --batch-size 2 --tokenizer bytes --steps 400"
    command = [*TORCHRUN, "-m", "kalmix.cli", "train", "--output", str(output)]
    errors = tmp_path / "errors"
    with errors.open("w") as file:
        run = subprocess.Popen([*command, "--text", str(text_file), *small.split()], stderr=file, stdout=file)
        while not list_checkpoints(output / "checkpoints") and run.poll() is None:
            time.sleep(0.2)
        children = subprocess.run(["pgrep", "-P", str(run.pid)], capture_output=True, text=True, check=True)
        os.kill(int(children.stdout.split()[-1]), signal.SIGKILL)
        killed = time.monotonic()
        assert run.wait(timeout=60) != 0
    assert time.monotonic() - killed < 60
    said = [line for line in errors.read_text().splitlines() if line.startswith("error: ")]
    assert len(said) == 1 and "another process of this run has ended" in said[0] and "--resume" in said[0]
    step = max(int(path.name.split("-")[1]) for path in list_checkpoints(output / "checkpoints"))
    assert step >= 80
    shorten(output, step + 2)
    result = subprocess.run([*command, "--resume"], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    history = json.loads((output / "history.json").read_text())
    assert history[-1]["step"] == step + 2
