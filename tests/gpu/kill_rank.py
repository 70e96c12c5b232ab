"""Kill one process of a run of `kalmix pretrain` with FSDP2, and resume it.

    python tests/gpu/kill_rank.py --ranks 4

torchrun starts a process for each GPU, with NCCL; without GPUs, two or more on CPUs, with gloo. Once a checkpoint is
saved, one process is killed. The rest must end within a minute, and at least one process must say how to resume. The
next session must continue at the newest checkpoint and finish. Prints what happened; exits with 1 after a failure.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "distributed"))
sys.path.insert(0, str(Path(__file__).parents[1]))
from killing import KillError

GRACE = 60.0  # seconds in which the other processes must end after the kill
LIMIT = 240.0  # seconds of a session


def start(ranks: int, command: list[str], log: Path) -> subprocess.Popen[bytes]:
    """Start torchrun with a command of kalmix in each process."""
    from tiny_pretraining import torchrun_command

    with log.open("w") as file:
        return subprocess.Popen([*torchrun_command(ranks), __file__, "--process", *command], stdout=file, stderr=file)


def processes(parent: int) -> dict[int, int]:
    """Return the ids of the processes that torchrun has started, by rank."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            own = int((folder / "stat").read_text().rpartition(")")[2].split()[1]) == parent
            variables = (folder / "environ").read_bytes().decode(errors="replace").split("\0") if own else []
        except OSError:  # it has ended
            continue
        found |= {int(x.removeprefix("RANK=")): int(folder.name) for x in variables if x.startswith("RANK=")}
    return found


def finish(torchrun: subprocess.Popen[bytes], seconds: float, log: Path) -> float:
    """Wait for the end of torchrun; return the seconds."""
    begin = time.monotonic()
    try:
        torchrun.wait(seconds)
    except subprocess.TimeoutExpired:
        raise KillError(f"not ended after {seconds:.0f} s:\n{log.read_text()[-3000:]}") from None
    return time.monotonic() - begin


def kill_and_resume(ranks: int, victim: int, steps: int, folder: Path) -> None:
    """Run, kill, resume and check; print what happened."""
    from tiny_pretraining import prepare_shards, write_recipe

    from kalmix.training.checkpoints import checkpoint_step, newest_checkpoint

    sizes = {"batch_tokens": 32 * ranks, "hidden_size": 8 * ranks}  # so that each rank has rows of most parameters
    recipe = write_recipe(folder, prepare_shards(folder), steps=steps, save_steps=10, **sizes)
    output, logs = folder / "run", [folder / "first.log", folder / "second.log"]

    first = start(ranks, ["pretrain", str(recipe), "--output", str(output)], logs[0])
    try:
        begin = time.monotonic()
        while newest_checkpoint(output / "checkpoints") is None:
            if first.poll() is not None or time.monotonic() > begin + LIMIT:
                raise KillError(f"no checkpoint was saved:\n{logs[0].read_text()[-3000:]}")
            time.sleep(0.01)
        os.kill(processes(first.pid)[victim], signal.SIGKILL)
        print(f"killed process {victim} of {ranks}, {time.monotonic() - begin:.0f} s after the start", flush=True)
        seconds = finish(first, GRACE, logs[0])
    finally:
        stop(first)
    newest = newest_checkpoint(output / "checkpoints")
    assert newest is not None
    step = checkpoint_step(newest)
    said = [line.strip() for line in logs[0].read_text().splitlines() if "--resume" in line]
    print(f"the rest ended {seconds:.1f} s later, status {first.returncode}; newest checkpoint: step {step}")
    print("\n".join(said) or f"no process said how to resume:\n{logs[0].read_text()[-3000:]}", flush=True)
    if first.returncode == 0 or step >= steps:
        raise KillError("the run finished before the kill")

    second = start(ranks, ["pretrain", "--resume", "--output", str(output)], logs[1])
    try:
        seconds = finish(second, LIMIT, logs[1])
    finally:
        stop(second)
    if second.returncode:
        raise KillError(f"the resumed run ended with {second.returncode}:\n{logs[1].read_text()[-3000:]}")
    rows = json.loads((output / "history.json").read_text())
    print(f"resumed and finished in {seconds:.0f} s; last row: step {rows[-1]['step']}", flush=True)
    if rows[-1]["step"] != steps:
        raise KillError(f"the last step is {rows[-1]['step']}; expected {steps}")
    if not said:
        raise KillError("no process said how to resume")


def stop(torchrun: subprocess.Popen[bytes]) -> None:
    """Kill torchrun and its processes, if they are alive."""
    alive = processes(torchrun.pid).values() if torchrun.poll() is None else ()
    for process in alive:
        os.kill(process, signal.SIGKILL)
    if torchrun.poll() is None:
        torchrun.kill()
        torchrun.wait()


def run_process(command: list[str]) -> None:
    """Run a command of kalmix in one process of torchrun."""
    import torch

    from kalmix import cli

    if not torch.cuda.is_available():
        from fsdp_on_cpu import allow_fsdp_on_cpu

        torch.set_num_threads(1)
        allow_fsdp_on_cpu()
    sys.argv = ["kalmix", *command]
    cli.main()


def main() -> None:
    """Kill and resume a run, with options of the command line."""
    options = argparse.ArgumentParser(description="Kill one process of a run, and resume the run.")
    options.add_argument("--ranks", type=int, default=4, help="processes; one for each GPU")
    options.add_argument("--victim", type=int, default=1, help="rank of the process to kill")
    options.add_argument("--steps", type=int, default=60, help="optimizer steps; a checkpoint is saved every 10")
    given = options.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        try:
            kill_and_resume(given.ranks, given.victim, given.steps, Path(folder))
        except KillError as failure:
            print(f"FAILURE: {failure}")
            sys.exit(1)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--process"]:
        run_process(sys.argv[2:])
    else:
        main()
