"""Mutate ops, layers, training and benchmarks, and print the mutants that no test detects.

    python tests/mutation/run.py --count 240 --seed 0 --jobs 2 --out mutants.json

Run it in the root of the repository, with the library's packages and pytest. First, all mapped tests run on the
unchanged source; those that fail or cannot be imported are printed and not used. Then each mutant's tests run with `-x`
in a copy of the source. A mutant that passes all its tests has survived.

Other tools do not fit. mutmut cannot draw mutants from a seed, and runs all tests that touch a function. cosmic-ray
changes the working tree, so each process needs its own checkout, and it accepts a single test command.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import queue
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from operators import Mutant, mutants_of
from targets import AREAS, LAWS, Tests, files_of, module_of, tests_of

FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+?)(?: - |$)", re.MULTILINE)
NO_TESTS = 5  # pytest's exit status


def draw(count: int, seed: int, only: str) -> list[Mutant]:
    """Draw mutants without replacement, equally many from each area."""
    chosen, areas = [], [area for area in AREAS if area.startswith(only) or "/" in only]
    for index, area in enumerate(areas):
        files = [path for path in files_of(area) if path.startswith(only) or "/" not in only]
        every = [mutant for path in files for mutant in mutants_of(path, Path(path).read_text())]
        share = (count + index) // len(areas)
        chosen += random.Random(f"{seed} {area}").sample(every, min(share, len(every)))
    return chosen


class Copies:
    """Copies of the source, one per job, which tests import because they come first in PYTHONPATH."""

    def __init__(self, jobs: int) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="mutants-"))
        self.free: queue.Queue[Path] = queue.Queue()
        for job in range(jobs):
            copy = self.folder / str(job)
            for source in ("src", "bench/src"):
                shutil.copytree(source, copy, ignore=shutil.ignore_patterns("__pycache__"), dirs_exist_ok=True)
            self.free.put(copy)

    def run(self, mutant: Mutant | None, arguments: list[str], seconds: float) -> tuple[int, str]:
        """Run pytest on a mutant, or on the unchanged source; return its status (-1 after `seconds`) and output."""
        copy = self.free.get()
        try:
            if mutant is None:
                return _pytest(copy, arguments, seconds)
            path = copy / module_of(mutant.path)
            text = path.read_text()
            try:
                _write(path, mutant.applied(text))
                return _pytest(copy, arguments, seconds)
            finally:
                _write(path, text)
        finally:
            self.free.put(copy)


def _write(path: Path, text: str) -> None:
    for compiled in path.parent.glob(f"__pycache__/{path.stem}.*.pyc"):
        compiled.unlink()
    path.write_text(text)


def _pytest(copy: Path, arguments: list[str], seconds: float) -> tuple[int, str]:
    scratch = copy.parent / f"{copy.name}.tmp"
    scratch.mkdir(exist_ok=True)
    given = {"PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "TMPDIR": str(scratch)}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-rfE", "--tb=line", *arguments]
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            command, env=os.environ | given, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            status = process.wait(seconds)
        except subprocess.TimeoutExpired:
            status = -1
        finally:
            _end(process)
        output.seek(0)
        text = output.read()
    shutil.rmtree(scratch, ignore_errors=True)
    return status, text[-6000:]


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill a test run and its child processes."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


class Baseline:
    """Results of the tests on the unchanged source: seconds per file, files that cannot run, and failing tests."""

    def __init__(self, mutants: list[Mutant], copies: Copies, jobs: int, limit: float) -> None:
        tests = [tests_of(mutant.path) for mutant in mutants]
        files = sorted({file for one in tests for file in one.files} | {one.laws for one in tests if one.laws})
        self.seconds: dict[str, float] = {}
        self.left_out: dict[str, str] = {}
        self.deselected: list[str] = []
        with ThreadPoolExecutor(jobs) as pool:
            for file in pool.map(lambda file: self._try(file, copies, limit), files):
                print(f"baseline {file}: {self.left_out.get(file, f'{self.seconds[file]:.0f} s')}", flush=True)

    def _try(self, file: str, copies: Copies, limit: float) -> str:
        began = time.monotonic()
        arguments = [file] if Path(file).exists() else [LAWS, "-k", file]
        status, output = copies.run(None, arguments, limit)
        self.seconds[file] = time.monotonic() - began
        failed = [name for name in FAILED.findall(output) if "::" in name]
        if status == 1 and failed:
            self.deselected += failed
        elif status != 0:
            why = {-1: f"more than {limit:.0f} s", NO_TESTS: "no tests"}.get(status, "cannot be imported")
            self.left_out[file] = f"left out: {why}: {output.strip().splitlines()[-1:]}"
        return file

    def calls(self, tests: Tests) -> list[tuple[list[str], float]]:
        """Return the pytest runs of a mutant, laws last: arguments, and seconds on the unchanged source."""
        files = [file for file in tests.files if file not in self.left_out]
        skipped = [f"--deselect={name}" for name in self.deselected]
        calls = [([*files, *skipped], sum(self.seconds[file] for file in files))] if files else []
        if tests.laws and tests.laws not in self.left_out:
            calls.append(([LAWS, "-k", tests.laws, *skipped], self.seconds[tests.laws]))
        return calls


def judge(mutant: Mutant, baseline: Baseline, copies: Copies, limit: float) -> dict[str, Any]:
    """Run a mutant's tests until one fails; return the mutant with its verdict."""
    began, verdict, noticed = time.monotonic(), "untested", ""
    for arguments, seconds in baseline.calls(tests_of(mutant.path)):
        status, output = copies.run(mutant, ["-x", *arguments], min(limit, 30 + 3 * seconds))
        verdict = {0: "survived", -1: "timeout", NO_TESTS: verdict}.get(status, "killed")
        if verdict in ("killed", "timeout"):
            noticed = next(iter(FAILED.findall(output)), output[-300:] if verdict == "killed" else "")
            break
    seconds = round(time.monotonic() - began, 1)
    return {**mutant._asdict(), "verdict": verdict, "noticed": noticed, "seconds": seconds}


def main(options: argparse.Namespace) -> None:
    began, mutants = time.monotonic(), draw(options.count, options.seed, options.only)
    random.Random(options.seed).shuffle(mutants)  # an interrupted run has mutants of every area
    mutants = mutants[options.skip :]
    copies = Copies(options.jobs)
    lock, results = threading.Lock(), []
    try:
        baseline = Baseline(mutants, copies, options.jobs, options.limit)
        told = {"seed": options.seed, "left_out": baseline.left_out, "deselected": baseline.deselected}

        def run(mutant: Mutant) -> None:
            if options.seconds and time.monotonic() - began > options.seconds:
                return
            result = judge(mutant, baseline, copies, options.limit)
            with lock:
                results.append(result)
                counts = {x: sum(r["verdict"] == x for r in results) for x in sorted({r["verdict"] for r in results})}
                told.update(drawn=len(mutants), counts=counts, baseline=baseline.seconds, mutants=results)
                Path(options.out).write_text(json.dumps(told, indent=1))
                print(f"{result['verdict']:9} {result['seconds']:5.0f} s  {mutant}", flush=True)

        with ThreadPoolExecutor(options.jobs) as pool:
            for future in as_completed([pool.submit(run, mutant) for mutant in mutants]):
                future.result()
    finally:
        shutil.rmtree(copies.folder, ignore_errors=True)
    print(f"{len(results)} of {len(mutants)} mutants: {told.get('counts')}; {time.monotonic() - began:.0f} s")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--count", type=int, default=240, help="mutants, as many from each area")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--only", default="", help="an area, or the beginning of a path such as src/kalmix/ops")
    parser.add_argument("--limit", type=float, default=120.0, help="seconds of one pytest run at most")
    parser.add_argument("--seconds", type=float, default=0.0, help="begin no mutant after this time")
    parser.add_argument("--skip", type=int, default=0, help="mutants to leave out, in the order of the draw")
    parser.add_argument("--out", default="mutants.json")
    return parser.parse_args()


if __name__ == "__main__":
    main(parse())
