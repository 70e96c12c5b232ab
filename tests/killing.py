"""Kill tiny runs of a command, resume them, and check that nothing is lost, repeated or stuck.

Every other run is killed at file events in the output folder: the n-th open for writing, rename, deletion, new folder
or fsync, with n drawn from the events of an undisturbed run. The others are killed at random times. A run is killed up
to three times; each session resumes the one before, and the last one ends undisturbed. After each kill, the next
session must start at the last saved checkpoint and must not repeat finished work. The final results must equal those of
the undisturbed run bit for bit.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file

from kalmix import cli

EVENTS = {"open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate", "shutil.rmtree"}
KILLS = 3  # of one run, at most
LIMIT = 120.0  # seconds of a session
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT
FILES = ("optimizer.pt", "scheduler.pt", "rng_state.pth")


class KillError(Exception):
    """Raised when saved work is lost, finished work is repeated, or a run cannot be resumed."""


class Session(NamedTuple):
    """One process: exit status (minus the signal's number if a signal ended it), seconds, number of file events."""

    status: int
    seconds: float
    events: int


class Run(ABC):
    """Command with its output folder and a log of the steps and checkpoints of its sessions (the notes)."""

    trainer: type  # class whose steps and checkpoints are logged

    def __init__(self, folder: Path) -> None:
        self.folder, self.output = folder, folder / "run"
        self.notes, self.log, self.counted = folder / "notes", folder / "log", folder / "events"
        folder.mkdir()
        self.notes.touch()

    @abstractmethod
    def next_command(self) -> list[str] | None:
        """Return the command that starts or resumes this run; `None` if the run has ended."""

    @abstractmethod
    def finished(self) -> set[str]:
        """Return the names of finished work."""

    @abstractmethod
    def checkpoints(self) -> Iterator[tuple[str, Path]]:
        """Yield the checkpoints in the output folder: name of the work, path."""

    @abstractmethod
    def results(self) -> dict[str, Any]:
        """Return the results of the run by name; kills must not change them."""

    def noted(self) -> list[tuple[str, str, int]]:
        """Return the log: name of the work, "step" or "saved", and number of the step."""
        lines = (line.rsplit(" ", 2) for line in self.notes.read_text().splitlines())
        return [(name, what, int(number)) for name, what, number in lines]

    def saved(self) -> dict[str, int]:
        """Return the step of the newest checkpoint ever saved, by name of the work."""
        steps = [(name, number) for name, what, number in self.noted() if what == "saved"]
        steps += [(name, int(path.name.split("-")[1])) for name, path in self.checkpoints() if complete(path)]
        return {name: max(step for other, step in steps if other == name) for name, _ in steps}

    def session(self, command: list[str], *, event: int | None = None, after: float | None = None) -> Session:
        """Run a command in a new process; kill it at its `event`-th file event, or `after` this many seconds."""
        began, deadline = time.monotonic(), LIMIT if after is None else after
        child = os.fork()
        if child == 0:
            try:
                self._child(command, event)
            finally:
                os._exit(70)
        while True:
            ended, status = os.waitpid(child, os.WNOHANG)
            seconds = time.monotonic() - began
            if ended:
                events = int(self.counted.read_text()) if self.counted.exists() else 0
                return Session(os.waitstatus_to_exitcode(status), seconds, events)
            if seconds > deadline:
                os.kill(child, signal.SIGKILL)
                _, status = os.waitpid(child, 0)
                if after is None:
                    raise KillError(f"stuck: {' '.join(command)}")
                return Session(os.waitstatus_to_exitcode(status), seconds, 0)
            time.sleep(0.002)

    def _child(self, command: list[str], event: int | None) -> None:
        with self.log.open("a") as log:
            log.write(f"--- {' '.join(command)}\n")
            log.flush()
            for stream in (1, 2):
                os.dup2(log.fileno(), stream)
        self.counted.unlink(missing_ok=True)
        count = count_events(self.output, event)
        note_steps(self.trainer, self.notes)
        sys.argv = ["kalmix", *command]
        status = 0
        try:
            cli.main()
        except SystemExit as ended:
            status = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        sys.stdout.flush()
        self.counted.write_text(str(count()))
        os._exit(status)


def complete(checkpoint: Path) -> bool:
    """Return whether a Trainer can read all files of a checkpoint."""
    try:
        load_file(checkpoint / "model.safetensors")
        json.loads((checkpoint / "trainer_state.json").read_text())
        for name in FILES:
            torch.load(checkpoint / name, weights_only=False)
    except Exception:
        return False
    return True


def note_steps(trainer: Any, notes: Path, work: str = "train") -> None:
    """Make a trainer log each step when it begins and each checkpoint when it is saved; `work` is its name."""
    step, save = trainer.training_step, trainer._save_checkpoint

    def note(self: Any, what: str) -> None:
        name = f"{self.cell.layer}-{self.cell.seed}" if hasattr(self, "cell") else work
        with notes.open("a") as file:
            file.write(f"{name} {what} {self.state.global_step}\n")

    def training_step(self: Any, *given: Any, **options: Any) -> Any:
        note(self, "step")
        return step(self, *given, **options)

    def save_checkpoint(self: Any, *given: Any, **options: Any) -> None:
        save(self, *given, **options)
        note(self, "saved")

    trainer.training_step, trainer._save_checkpoint = training_step, save_checkpoint


def kill_self(event: str) -> None:
    """Kill this process."""
    os.kill(os.getpid(), signal.SIGKILL)


def count_events(output: Path, stop: int | None, kill: Callable[[str], None] = kill_self) -> Callable[[], int]:
    """Count file events under `output`; return a function of the count.

    Args:
        output: folder to watch.
        stop: number of the event before which `kill` is called; `None` for none.
        kill: function that kills this process; its argument describes the event.
    """
    events, folder, fsync = 0, str(output), os.fsync

    def count(event: str) -> None:
        nonlocal events
        events += 1
        if events == stop:
            kill(event)

    def hook(name: str, given: tuple[Any, ...]) -> None:
        if name not in EVENTS:
            return
        if name == "open":
            writes = set(given[1]) & set("wax+") if isinstance(given[1], str) else given[2] & WRITES
            inside = bool(writes) and str(given[0]).startswith(folder)
        else:  # shutil.rmtree passes names relative to an open folder
            inside = str(given[0]).startswith(folder) or (name in ("os.remove", "os.rmdir") and given[1] != -1)
        if inside:
            count(f"{name} {given[0]}")

    def synced(handle: int) -> None:
        count(f"fsync {Path(f'/proc/self/fd/{handle}').readlink()}")
        fsync(handle)

    sys.addaudithook(hook)
    os.fsync = synced
    return lambda: events


def check_next(run: Run, finished: set[str], saved: dict[str, int], notes: int) -> None:
    """Check that a session's log repeats no work that was finished or saved before it."""
    first: dict[str, int] = {}
    for name, what, number in run.noted()[notes:]:
        if what == "step":
            first.setdefault(name, number)
    for name, number in first.items():
        if name in finished:
            raise KillError(f"{name} was finished, and is run again")
        if number < saved.get(name, 0):
            raise KillError(f"{name} had saved step {saved[name]}, and resumed from step {number}")


def kill_and_resume(run: Run, kills: list[dict[str, Any]], wanted: dict[str, Any]) -> int:
    """Kill a run at these places, resume it and compare its results with `wanted`; return the number of kills."""
    hits = 0
    for place in [*kills, None, None, None]:  # a run that has ended may lack its report
        command = run.next_command()
        if command is None:
            break
        finished, saved, notes = run.finished(), run.saved(), len(run.noted())
        found = run.session(command, **(place or {}))
        check_next(run, finished, saved, notes)
        hits += found.status == -signal.SIGKILL
        if found.status not in (0, -signal.SIGKILL):
            raise KillError(f"`{' '.join(command)}` ended with {found.status}:\n{run.log.read_text()[-1500:]}")
    results = run.results()
    for name, value in wanted.items():
        if results[name] != value:
            raise KillError(f"{name} differ from those of the undisturbed run")
    return hits


def places(draw: random.Random, whole: Session, index: int) -> list[dict[str, Any]]:
    """Draw the places of a run's kills: file events if `index` is even, times if it is odd."""
    count = draw.randint(1, KILLS)
    if index % 2:
        return [{"after": draw.uniform(0.02, whole.seconds)} for _ in range(count)]
    return [{"event": draw.randint(1, whole.events)} for _ in range(count)]


def run_kills(kind: type[Run], kills: int, seed: int, folder: Path) -> tuple[int, int, int]:
    """Kill runs until there were `kills` kills; print failures; return the numbers of kills, runs and failures."""
    draw = random.Random(seed)
    hits = runs = failures = 0
    undisturbed = kind(folder / "whole")
    command = undisturbed.next_command()
    assert command is not None
    whole = undisturbed.session(command)
    if whole.status:
        raise KillError(f"the undisturbed run ended with {whole.status}:\n{undisturbed.log.read_text()}")
    wanted = undisturbed.results()
    print(f"{whole.events} file events, {whole.seconds:.1f} s", flush=True)
    while hits < kills:
        run, planned = kind(folder / f"{runs}"), places(draw, whole, runs)[: kills - hits]
        try:
            hits += kill_and_resume(run, planned, wanted)
        except KillError as failure:
            failures += 1
            hits += len(planned)
            print(f"run {runs}, killed at {planned}: {failure}", flush=True)
        runs += 1
    return hits, runs, failures


def main(kind: type[Run]) -> None:
    """Kill runs of one kind, with options of the command line; exit with 1 if there was a failure."""
    options = argparse.ArgumentParser(description=kind.__doc__)
    options.add_argument("--kills", type=int, default=100)
    options.add_argument("--seed", type=int, default=0)
    given = options.parse_args()
    torch.set_num_threads(1)
    gc.freeze()  # each session is a fork that collects garbage several times
    with tempfile.TemporaryDirectory() as folder:
        kills, runs, failures = run_kills(kind, given.kills, given.seed, Path(folder))
    print(f"{kills} kills of {runs} runs, {failures} failures")
    sys.exit(failures > 0)


def check_script(script: Path, kills: int, *options: str) -> None:
    """Run a script that calls `main`; check that it made `kills` kills without a failure."""
    command = [sys.executable, str(script), "--kills", str(kills), "--seed", str(kills), *options]
    told = subprocess.run(command, capture_output=True, text=True, check=False)
    assert told.returncode == 0, told.stdout + told.stderr
    assert f"{kills} kills" in told.stdout and ", 0 failures" in told.stdout
