"""Kill tiny runs of `kalmix pretrain` on two processes with FSDP2, resume them, and compare them with a whole run.

    python tests/distributed/kills_sharded.py --kills 10 --output kills.json

torchrun starts two processes on CPUs, with gloo. Kills take turns: process 0, process 1, or both with torchrun. Every
other kill comes before a random file event of the process, the others come at a random time in a random step. After a
kill, the rest of the run must end within a minute. The next session must continue at the newest saved checkpoint.
Every row that any session logs must equal the row of the undisturbed run at this step, and so must the final weights.

Prints one line per run with its kills, and the counts; exits with 1 after a failure. `--output` also stores them, with
date, commit and versions.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))
from killing import KillError, Run, check_next, count_events, note_steps

from distributed.tiny_pretraining import prepare_shards, torchrun_command, write_recipe
from kalmix import cli
from kalmix.files import PARTIAL
from kalmix.training.checkpoints import checkpoint_step, newest_checkpoint

VICTIMS = {"process 0": slice(0, 1), "process 1": slice(1, 2), "all": slice(0, 2)}  # which of the two processes
NAMES = tuple(VICTIMS)
LIMIT = 300.0  # seconds of a session
GRACE = 60.0  # seconds in which the rest of a killed run must end
STEPS = 12
COMPARED = "logged rows of all sessions, final weights and number of temporary files left, with an undisturbed run"
# Values of a row that depend on the clock.
CLOCK = ("tokens_per_second", "eval_runtime", "eval_samples_per_second", "eval_steps_per_second")


class Kill(NamedTuple):
    """Plan of a kill.

    Attributes:
        victim: one of `NAMES`.
        by_event: the kill comes before a file event; otherwise some time after the beginning of a step.
        fraction: number of the event or step, as a fraction of those that the session has before it.
        delay: seconds after the beginning of the step.
    """

    victim: str
    by_event: bool
    fraction: float
    delay: float


class Ended(NamedTuple):
    """End of a session.

    Attributes:
        status: exit status of torchrun.
        seconds: seconds of the session.
        moment: description of the moment of the kill; `None` without one.
        rest: description of the end of the process that was not killed.
    """

    status: int
    seconds: float
    moment: str | None = None
    rest: str = ""


class Sharded(Run):
    """Run of `kalmix pretrain` in two processes under torchrun, with FSDP2."""

    def __init__(self, folder: Path, shards: Path) -> None:
        super().__init__(folder)
        self.losses = folder / "losses"
        self.losses.touch()
        self.recipe = write_recipe(folder, shards, steps=STEPS, save_steps=2)

    def next_command(self) -> list[str] | None:
        if not (self.output / "recipe.json").exists():
            return ["pretrain", str(self.recipe), "--output", str(self.output)]
        return None if self.finished() else ["pretrain", "--resume", "--output", str(self.output)]

    def finished(self) -> set[str]:
        rows = self._history()
        return set(NAMES[:2]) if rows and rows[-1]["progress"] >= 1 else set()

    def checkpoints(self) -> Iterator[tuple[str, Path]]:
        newest = newest_checkpoint(self.output / "checkpoints")
        yield from () if newest is None else (("process 0", newest),)

    def saved(self) -> dict[str, int]:
        steps = [number for _, what, number in self.noted() if what == "saved"]
        steps += [checkpoint_step(path) for _, path in self.checkpoints()]
        return dict.fromkeys(NAMES[:2], max(steps, default=0))

    def results(self) -> dict[str, Any]:
        weights = (self.output / "model" / "model.safetensors").read_bytes()
        rows = [_steady(row) for row in self._history() if "train_runtime" not in row]
        left = [str(path) for path in self.output.rglob(f"{PARTIAL}*")]
        return {"logged rows": rows, "weights": weights, "temporary files": left}

    def logged(self) -> list[dict[str, Any]]:
        """Return the rows that all sessions logged, also those of steps that were lost."""
        return [json.loads(line) for line in self.losses.read_text().splitlines()]

    def _history(self) -> list[dict[str, Any]]:
        try:
            return json.loads((self.output / "history.json").read_text())
        except FileNotFoundError:
            return []

    def run_session(self, command: list[str], kill: Kill | None, whole: dict[str, float]) -> Ended:
        """Run torchrun with a command; carry out a kill; return after all processes have ended."""
        for name in ("kill", "killed", *(f"{x}-{n}" for x in ("began", "ended") for n in range(2))):
            (self.folder / name).unlink(missing_ok=True)
        notes, left = len(self.noted()), 1 - self.saved()["process 0"] / STEPS
        if kill is not None and kill.by_event:
            watched = 1 if kill.victim == "process 1" else 0
            event = 1 + int(kill.fraction * left * whole[f"events {watched}"])
            (self.folder / "kill").write_text(json.dumps([watched, event, kill.victim == "all"]))
        step = STEPS - (1 - kill.fraction) * left * STEPS if kill is not None and not kill.by_event else None
        with self.log.open("a") as log:
            torchrun = subprocess.Popen(
                [*torchrun_command(2), __file__, "--process", str(self.folder), *command], stdout=log, stderr=log
            )
            try:
                return self._watch(torchrun, kill, step, notes)
            finally:
                if torchrun.poll() is None:
                    torchrun.kill()
                    torchrun.wait()
                self._kill(*self._processes())

    def _watch(self, torchrun: subprocess.Popen[bytes], kill: Kill | None, step: float | None, notes: int) -> Ended:
        started, moment = time.monotonic(), None
        due = killed = None
        while torchrun.poll() is None:
            now = time.monotonic()
            if killed is None and (self.folder / "killed").exists():
                killed = now
            if due is None and kill is not None and step is not None:
                due = now + kill.delay if any(note[2] >= int(step) for note in self.noted()[notes:]) else None
            if kill is not None and killed is None and due is not None and now > due:
                killed = now
                if kill.victim == "all":
                    torchrun.kill()
                if self._kill(*self._processes()[VICTIMS[kill.victim]]):
                    moment = f"{kill.delay:.2f} s into step {int(step or 0)}"
            if now > started + LIMIT or (killed is not None and now > killed + GRACE):
                raise KillError(f"stuck {'after a kill ' if killed else ''}:\n{self._last_log()}")
            time.sleep(0.01)
        now = time.monotonic()
        if moment is None and (self.folder / "killed").exists():
            moment = "before " + (self.folder / "killed").read_text().replace(f"{self.output}/", "")
        rest = "" if moment is None or kill is None else self._rest(kill, now - (killed or now))
        return Ended(torchrun.returncode, now - started, moment, rest)

    def _rest(self, kill: Kill | None, seconds: float) -> str:
        """Return how the processes that were not killed ended."""
        if kill is None or kill.victim == "all":
            return ""
        survivor = 1 - NAMES.index(kill.victim)
        ended = self.folder / f"ended-{survivor}"
        if ended.exists():
            how = f"process {survivor} ended by itself ({ended.read_text()})"
        else:
            forced = "via SIGKILL" in self._last_log(5000)
            how = f"torchrun ended process {survivor} with {'SIGKILL' if forced else 'SIGTERM'}"
        return f"{how}, torchrun ended after {seconds:.1f} s"

    def _processes(self) -> list[int]:
        """Return the ids of the two processes that train, once both have begun."""
        files = [self.folder / f"began-{n}" for n in range(2)]
        return [int(file.read_text()) for file in files] if all(file.exists() for file in files) else []

    def _kill(self, *processes: int) -> bool:
        """Kill these processes, wait for their end, and return whether any was alive."""
        alive = [process for process in processes if self._alive(process)]
        for process in alive:
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        while any(self._alive(process) for process in alive):
            time.sleep(0.005)
        return bool(alive)

    def _alive(self, process: int) -> bool:
        """Return whether this process of the run is alive; a zombie is not."""
        try:
            return str(self.folder) in Path(f"/proc/{process}/cmdline").read_text()
        except (FileNotFoundError, ProcessLookupError):
            return False

    def _last_log(self, length: int = 2000) -> str:
        return self.log.read_text().rsplit("--- ", 1)[-1][-length:]


def _steady(row: dict[str, Any]) -> str:
    """Return the values of a logged row that do not depend on the clock, as JSON."""
    return json.dumps({name: row[name] for name in sorted(row) if name not in CLOCK})


def train_in_process(folder: Path, command: list[str]) -> None:
    """Run a command in one of the two processes, with its share of the notes and of the kill."""
    import torch

    from distributed.fsdp_on_cpu import allow_fsdp_on_cpu
    from kalmix.training.trainer import KalmixTrainer

    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    log = KalmixTrainer.log

    def log_and_note(self: Any, *given: Any, **options: Any) -> None:
        log(self, *given, **options)
        if rank == 0:
            with (folder / "losses").open("a") as file:
                file.write(json.dumps(self.state.log_history[-1]) + "\n")

    def kill(event: str) -> None:
        (folder / "kill-note").write_text(event)
        (folder / "kill-note").rename(folder / "killed")
        if kills_all:
            os.kill(os.getppid(), signal.SIGKILL)  # torchrun
            os.kill(int((folder / f"began-{1 - rank}").read_text()), signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)

    plan = folder / "kill"
    watched, event, kills_all = json.loads(plan.read_text()) if plan.exists() else (0, None, False)
    allow_fsdp_on_cpu()
    KalmixTrainer.log = log_and_note
    note_steps(KalmixTrainer, folder / "notes", NAMES[rank])
    count = count_events(folder / "run", event if rank == watched else None, kill)
    began = folder / f"began-{rank}"
    began.with_suffix(".part").write_text(str(os.getpid()))
    began.with_suffix(".part").rename(began)
    while not (folder / f"began-{1 - rank}").exists():
        time.sleep(0.005)
    sys.argv = ["kalmix", *command]
    end = "finished"
    try:
        cli.main()
    except SystemExit as ended:
        end = "finished" if not ended.code else f"exit status {ended.code}"
        raise
    except BaseException as error:
        end = f"traceback of {type(error).__name__}"
        raise
    finally:
        (folder / f"events-{rank}").write_text(str(count()))
        (folder / f"ended-{rank}").write_text(end)


def kill_and_resume(run: Sharded, kills: list[Kill], whole: dict[str, float]) -> Iterator[str]:
    """Run and resume with these kills until the run has finished; yield a description of each kill that hit."""
    sessions = iter([*kills, None, None])
    while (command := run.next_command()) is not None:
        kill = next(sessions)
        finished, saved, notes = run.finished(), run.saved(), len(run.noted())
        with run.log.open("a") as log:
            log.write(f"--- {' '.join(command)}\n")
        ended = run.run_session(command, kill, whole)
        check_next(run, finished, saved, notes)
        first = next((number for _, what, number in run.noted()[notes:] if what == "step"), None)
        if first is not None and first > saved["process 0"]:
            raise KillError(f"resumed at step {first}, but step {saved['process 0']} was the newest that was saved")
        if ended.moment is not None and kill is not None:
            began = f"in a session from step {saved['process 0']}"
            yield f"{kill.victim} {ended.moment}, {began}; {ended.rest or 'none is left'}"
        elif ended.status:
            raise KillError(f"`{' '.join(command)}` ended with {ended.status}:\n{run.log.read_text()[-3000:]}")


def compare(run: Sharded, wanted: dict[str, Any]) -> int:
    """Compare a run with the results of the undisturbed one; return the number of rows that all sessions logged."""
    read = [json.loads(row) for row in wanted["logged rows"]]
    rows = {(row["step"], "eval_loss" in row): text for row, text in zip(read, wanted["logged rows"], strict=True)}
    logged = [row for row in run.logged() if "train_runtime" not in row]
    for row in logged:
        expected = rows[row["step"], "eval_loss" in row]
        if _steady(row) != expected:
            raise KillError(f"a session logged {_steady(row)}; expected {expected}")
    for name, value in run.results().items():
        if value != wanted[name]:
            raise KillError(f"{name} differ from those of the undisturbed run")
    return len(logged)


def run_kills(kills: int, seed: int, folder: Path) -> dict[str, Any]:
    """Kill runs until there were `kills` kills; print a line per run; return the counts, and the kills of each run."""
    draw, shards = random.Random(seed), prepare_shards(folder)
    undisturbed = Sharded(folder / "whole", shards)
    command = undisturbed.next_command()
    assert command is not None
    ended = undisturbed.run_session(command, None, {})
    if ended.status:
        raise KillError(f"the undisturbed run ended with {ended.status}:\n{undisturbed.log.read_text()}")
    wanted = undisturbed.results()
    whole = {f"events {n}": float((undisturbed.folder / f"events-{n}").read_text()) for n in range(2)}
    print(f"undisturbed: {whole['events 0']:.0f} and {whole['events 1']:.0f} file events, {ended.seconds:.1f} s")
    compare(undisturbed, wanted)
    hits = failures = planned = 0
    runs: list[dict[str, Any]] = []
    while hits < kills:
        run, plan, hit = Sharded(folder / f"{len(runs)}", shards), [], []
        for _ in range(min(draw.randint(2, 4), kills - hits)):
            plan.append(Kill(NAMES[planned % 3], planned % 2 == 0, draw.random(), draw.uniform(0, 0.5)))
            planned += 1
        began = time.monotonic()
        try:
            hit.extend(kill_and_resume(run, plan, whole))
            result = f"{compare(run, wanted)} logged rows and the weights are equal"
        except KillError as failure:
            failures += 1
            result = f"FAILURE: {failure}"
        seconds = round(time.monotonic() - began)
        print(f"run {len(runs)}: {len(hit)} kills, {seconds} s, {result}", flush=True)
        for description in hit:
            print(f"  {description}", flush=True)
        hits += len(hit) if result[0] != "F" else max(1, len(hit))
        runs.append({"seconds": seconds, "result": result, "kills": hit})
    return {"kills": hits, "failures": failures, "runs": runs}


def describe_session() -> dict[str, Any]:
    """Return date, machine, commit and versions of this session."""
    import torch

    from kalmix.training.provenance import provenance

    origin = provenance(torch.device("cpu"))
    machine = f"{platform.machine()}, {os.cpu_count()} CPU cores"
    return {"date": date.today().isoformat(), **origin, "device": machine}


def main() -> None:
    """Kill runs, with options of the command line; exit with 1 if there was a failure."""
    options = argparse.ArgumentParser(description="Kill sharded runs, resume them, and compare them with a whole run.")
    options.add_argument("--kills", type=int, default=10)
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--output", type=Path, help="JSON file to write")
    given = options.parse_args()
    began, session = time.monotonic(), describe_session()
    with tempfile.TemporaryDirectory() as folder:
        found = run_kills(given.kills, given.seed, Path(folder))
    seconds = round(time.monotonic() - began)
    kills, runs, failures = found["kills"], found["runs"], found["failures"]
    print(f"{kills} kills of {len(runs)} runs, {failures} failures, {seconds} s")
    if given.output is not None:
        told = {**session, "seed": given.seed, "seconds": seconds, "compared": COMPARED, **found}
        given.output.write_text(json.dumps(told, indent=1) + "\n")
    sys.exit(failures > 0)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--process"]:
        train_in_process(Path(sys.argv[2]), sys.argv[3:])
    else:
        main()
