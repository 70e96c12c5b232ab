"""pytest plugin for runs that a time limit may end: the longest tests begin first, failures are printed as they come.

Environment:
    OUT: folder of the results: TAG-durations.jsonl, TAG-failures.txt, TAG-not-ended.txt.
    TAG: name of the run. Tests are sorted by OUT/TAG-earlier.jsonl (durations of an earlier run), then by
        expected_seconds.json (regular expressions of test ids, with seconds).
    SHORT_PER_LONG: number of short tests between two long ones, so that a run that is ended has run most of them.
    EXCLUDE: regular expression of test ids to leave out.
    ONLY: file of the test ids to run, such as TAG-not-ended.txt of an earlier run. Default: all.
    SHARE: "i/n" for every n-th test, beginning with the i-th.

A worker whose GPU context is broken ends before its next test, so that xdist starts another one.
"""

from __future__ import annotations

import atexit
import json
import os
import re
import signal
import time
from collections import Counter
from pathlib import Path
from typing import Any

import psutil
import pytest

OUT, TAG = Path(os.environ.get("OUT", ".")), os.environ.get("TAG", "run")
LONG = 15  # seconds of a long test
SLOW = 6.0  # seconds of a test with the mark `slow` that no rule names
SHOWN = 60  # failures that are printed; the file has all
BROKEN = re.compile("CUDA error|AcceleratorError|illegal memory access|device-side assert|unspecified launch failure")


def read_durations() -> dict[str, float]:
    """Return the seconds of tests in an earlier run, by their ids."""
    path, found = OUT / f"{TAG}-earlier.jsonl", {}
    for line in path.read_text().splitlines() if path.exists() else []:
        row = json.loads(line)
        found[row["id"]] = max(found.get(row["id"], 0.0), row["seconds"])
    return found


def read_rules() -> list[tuple[re.Pattern[str], float]]:
    """Return regular expressions of test ids, with seconds."""
    rows = json.loads(Path(__file__).with_name("expected_seconds.json").read_text())
    return [(re.compile(pattern), seconds) for pattern, seconds in rows]


class Order:
    """Selection and order of the tests, the same in every worker."""

    def __init__(self) -> None:
        self.durations, self.rules = read_durations(), read_rules()

    def seconds(self, item: pytest.Item) -> float:
        """Return the expected duration of a test."""
        if item.nodeid in self.durations:
            return self.durations[item.nodeid]
        default = SLOW if item.get_closest_marker("slow") else 0.0
        return next((seconds for rule, seconds in self.rules if rule.search(item.nodeid)), default)

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        exclude = os.environ.get("EXCLUDE")
        only = set(Path(file).read_text().splitlines()) if (file := os.environ.get("ONLY")) else None
        chosen = [x for x in items if not (exclude and re.search(exclude, x.nodeid))]
        chosen = [x for x in chosen if only is None or x.nodeid in only]
        chosen.sort(key=self.seconds, reverse=True)  # stable
        if count := int(os.environ.get("SHORT_PER_LONG", "0")):
            long = [x for x in chosen if self.seconds(x) >= LONG]
            short, chosen = chosen[len(long) :], []
            for i, item in enumerate(long):
                chosen += [item, *short[i * count : (i + 1) * count]]
            chosen += short[len(long) * count :]
        part, parts = map(int, os.environ.get("SHARE", "0/1").split("/"))
        items[:] = chosen[part::parts]


class Worker:
    """End of a worker of xdist after an error that breaks its GPU context."""

    broken = False

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.broken |= report.failed and bool(BROKEN.search(str(report.longrepr)))

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self) -> None:
        if self.broken:
            os._exit(77)


class Report:
    """Results in files and lines, complete whenever the run ends."""

    def __init__(self, config: pytest.Config) -> None:
        self.config, self.begin = config, time.monotonic()
        self.durations = (OUT / f"{TAG}-durations.jsonl").open("w", buffering=1)
        self.failures = (OUT / f"{TAG}-failures.txt").open("w", buffering=1)
        self.all: set[str] = set()
        self.ended: set[str] = set()
        self.failed: dict[str, None] = {}
        self.skipped = 0
        atexit.register(self.finish)
        signal.signal(signal.SIGTERM, self.stop)

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self.begin

    def print(self, text: str) -> None:
        self.config.pluginmanager.getplugin("terminalreporter").write_line("\n" + text)

    def stop(self, *_: Any) -> None:
        """Print the results and end all processes, when the time limit is reached."""
        print(f"\n{TAG}: time limit reached")
        self.finish()
        for child in psutil.Process().children(recursive=True):
            child.kill()
        os._exit(124)

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: list[str]) -> None:
        if not self.all:
            self.print(f"{TAG}: {len(ids)} tests collected after {self.elapsed:.0f} s")
            self.all = set(ids)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.all = self.all or {item.nodeid for item in session.items}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        row = {"id": report.nodeid, "when": report.when, "seconds": round(report.duration, 2)}
        self.durations.write(json.dumps(row | {"outcome": report.outcome, "end": round(self.elapsed, 1)}) + "\n")
        if report.when == "call" or not report.passed:
            self.ended.add(report.nodeid)
        self.skipped += report.skipped
        if report.failed:
            self.failed[report.nodeid] = None
            text = str(report.longrepr)
            self.failures.write(f"==== {report.nodeid} ({report.when})\n{text}\n")
            if len(self.failed) <= SHOWN:
                last = [line[:220] for line in text.splitlines() if line.strip()][-4:]
                place = f"{TAG} FAILED {report.nodeid} ({report.when}, {self.elapsed:.0f} s)"
                self.print("\n    ".join([place, *last]))

    def finish(self) -> None:
        """Print the counts, and write the names of tests that did not end."""
        left = sorted(self.all - self.ended)
        counts = (
            f"{len(self.all)} collected, {len(self.ended)} ended, {len(self.failed)} failed, {self.skipped} skipped"
        )
        print(f"{TAG} END: {counts}, {len(left)} not ended, {self.elapsed:.0f} s")
        for name in list(self.failed)[:SHOWN]:
            print(f"{TAG} FAIL {name}"[:200])
        for file, count in Counter(name.split("::")[0] for name in left).most_common(15):
            print(f"{TAG} NOT ENDED {count:5d} of {file}", flush=True)
        (OUT / f"{TAG}-not-ended.txt").write_text("\n".join(left))


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Order())
    config.pluginmanager.register(Worker() if hasattr(config, "workerinput") else Report(config))
