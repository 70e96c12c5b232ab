"""A sweep runs each cell once, also after kills and next to other sweeps, and names errors of its file."""

from __future__ import annotations

import errno
import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Hashable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from kalmix import ArgumentError
from kalmix.files import FORMAT
from kalmix_bench.runner import scheduler, workers
from kalmix_bench.runner.cells import Results, digest
from kalmix_bench.runner.experiment import Experiment
from kalmix_bench.runner.workers import CellError

CPU = torch.device("cpu")
Work = Callable[..., Any]


@dataclass(frozen=True)
class Square:
    """Number to square, and a tuple, which JSON does not represent."""

    number: int
    sizes: tuple[int, ...] = (1, 2)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        return f"square of {self.number}"


class Squares(Experiment[Square]):
    """An experiment that runs cells by a function of the test's own."""

    name, keys = "squares", frozenset(("number", "sizes"))

    def __init__(self, work: Work, together: Callable[[Square], Hashable] | None) -> None:
        super().__init__()
        self.work, self.join = work, together

    def commands(self):
        return {}

    def run(self, cells, results, device, on_progress):
        return self.work(cells, on_progress)

    def group_key(self, cell):
        return self.join(cell) if self.join else cell

    def report(self, rows, output, console):
        return []

    def findings(self, rows):
        return []


def run(cells, results: Results, work: Work, device: torch.device, *, together=None, **options: Any):
    return scheduler.run(Squares(work, together), cells, results, device, **options)


def squared(cells, on_progress, notes: Path, seconds: float = 0.0):
    """Squares, with a note of each that was begun."""
    with notes.open("a") as file:
        file.write("".join(f"{cell.number}\n" for cell in cells))
    if any(cell.number < 0 for cell in cells):
        raise ArgumentError("number", got=min(cell.number for cell in cells), expected="at least 0")
    on_progress(0.5, "half")
    time.sleep(seconds)
    return [{"square": cell.number**2} for cell in cells]


def places(folder: Path) -> tuple[Results, Path]:
    return Results(folder / "results.jsonl"), folder / "notes"


def test_cells_are_run_once_and_found_by_their_definition(tmp_path: Path) -> None:
    results, notes = places(tmp_path)
    reports = []

    def progress_factory(piece, pieces):
        return lambda done, how: reports.append((str(piece[0]), pieces, done, how))

    cells = [Square(2), Square(3), Square(2)]
    rows = run(cells, results, partial(squared, notes=notes), CPU, progress_factory=progress_factory)
    assert [(cell.number, row["square"]) for cell, row in rows.items()] == [(2, 4), (3, 9)]
    assert reports == [(f"square of {n}", 2, done, "half") for n in (2, 3) for done in (0.5, 1.0)]
    (first, _) = (json.loads(line) for line in results.path.read_text().splitlines())
    assert first["sizes"] == [1, 2] and first["versions"]["torch"] and first["device"] and "commit" in first
    again = run([*cells, Square(2, (1,))], results, partial(squared, notes=notes), CPU)
    assert [row["square"] for row in again.values()] == [4, 9, 4]
    assert notes.read_text().split() == ["2", "3", "2"]
    assert len({digest(cell) for cell in again}) == 3


def test_cells_of_a_group_run_together_and_only_missing_ones_run(tmp_path: Path) -> None:
    results, _ = places(tmp_path)
    pieces = []

    def work(cells, on_progress):
        pieces.append([cell.number for cell in cells])
        return [{} for _ in cells]

    def sizes(cell):
        return cell.sizes

    run([Square(1), Square(2), Square(3, ())], results, work, CPU, together=sizes)
    run([Square(1), Square(4), Square(5), Square(3, ())], results, work, CPU, together=sizes)
    assert pieces == [[1, 2], [3], [4, 5]]


def test_a_cell_claimed_by_another_sweep_is_waited_for(tmp_path: Path) -> None:
    results, notes = places(tmp_path)
    claim = results.claim(Square(1))
    order = []

    def work(cells, on_progress):
        order.append(cells[0].number)
        if cells[0].number == 2:  # the other sweep finishes meanwhile
            results.add([{**Square(1).to_dict(), "seconds": 1.0, "versions": {}, "square": "another's"}])
            claim.release()
        return [{"square": cells[0].number ** 2}]

    with claim.acquire():
        rows = run([Square(1), Square(2), Square(3)], results, work, CPU)
    assert order == [2, 3]
    assert [row["square"] for row in rows.values()] == ["another's", 4, 9]
    assert not notes.exists()


@pytest.mark.slow
def test_several_processes_share_the_cells(tmp_path: Path) -> None:
    results, notes = places(tmp_path)
    done = []

    def progress_factory(piece, pieces):
        return lambda part, how: done.append(piece[0].number) if part == 1 else None

    work = partial(squared, notes=notes)
    with pytest.raises(CellError, match="square of -1: `number` is -1"):
        run([Square(n) for n in (0, 1, 2, 3, -1)], results, work, CPU, jobs=2, progress_factory=progress_factory)
    assert done and set(done) <= {0, 1, 2, 3}
    rows = run([Square(n) for n in range(5)], results, work, CPU)
    assert [row["square"] for row in rows.values()] == [0, 1, 4, 9, 16]
    begun = [int(note) for note in notes.read_text().split()]
    assert all(begun.count(number) == 1 for number in done)


def out_of_memory(cells, on_progress, *, folder: Path, always: bool):
    """Run out of memory in cell 0 while cell 1 runs: each time, or once. Note the cells as they begin and end."""
    number, failed = cells[0].number, folder / "failed"
    with (folder / "notes").open("a") as notes:
        notes.write(f"+{number} ")
    if number == 0:
        while not (folder / "neighbour").exists():
            time.sleep(0.01)
        if always or not failed.exists():
            failed.touch()
            raise torch.OutOfMemoryError("tried to allocate 9 GiB")
    if number == 1:
        (folder / "neighbour").touch()
        while not failed.exists():
            time.sleep(0.01)
        time.sleep(0.5)  # cell 0 ends first
    with (folder / "notes").open("a") as notes:
        notes.write(f"-{number} ")
    return [{"square": cell.number**2} for cell in cells]


def test_a_cell_that_runs_out_of_memory_next_to_others_runs_again_with_fewer(tmp_path: Path) -> None:
    results, config = Results(tmp_path / "results.jsonl"), workers.WorkerConfig([None, None], failures={})
    work = partial(out_of_memory, folder=tmp_path, always=False)
    rows = run([Square(n) for n in range(4)], results, work, CPU, worker_config=config)
    assert len(rows) == 4 and not config.failures
    assert (tmp_path / "notes").read_text().split("-1 ")[1] == "+0 -0 +2 -2 +3 -3 "  # one at a time


@pytest.mark.slow
def test_a_cell_that_runs_out_of_memory_alone_fails(tmp_path: Path) -> None:
    results, config = Results(tmp_path / "results.jsonl"), workers.WorkerConfig([None, None], failures={})
    work = partial(out_of_memory, folder=tmp_path, always=True)
    rows = run([Square(0), Square(1)], results, work, CPU, worker_config=config)
    assert list(rows) == [Square(1)]
    assert config.failures is not None and "tried to allocate 9 GiB" in config.failures[Square(0)]


SWEEP = """
import signal, sys
from functools import partial
from pathlib import Path
from tests.runner.test_scheduler import CPU, Square, places, run, squared
if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job begins by ignoring it
    results, notes = places(Path(sys.argv[1]))
    run([Square(n) for n in range(4)], results, partial(squared, notes=notes, seconds=0.3), CPU, jobs=int(sys.argv[2]))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("jobs", "how"),
    [
        (1, signal.SIGKILL),
        (2, signal.SIGKILL),
        (2, signal.SIGINT),
    ],
)
def test_killing_a_sweep_loses_nothing_and_repeats_nothing(tmp_path: Path, jobs: int, how: signal.Signals) -> None:
    script = tmp_path / "sweep.py"
    script.write_text(SWEEP)
    results, notes = places(tmp_path)
    command = [sys.executable, str(script), str(tmp_path), str(jobs)]
    paths = (str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")]))
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    first = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL, start_new_session=True)
    deadline = time.monotonic() + 300
    while not results.path.exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    os.kill(first.pid, how)
    first.wait(timeout=30)
    finished = {json.loads(line)["number"] for line in results.path.read_text().splitlines()}
    assert 0 < len(finished) < 4
    begun = notes.read_text().split()
    rows = run([Square(n) for n in range(4)], results, partial(squared, notes=notes), CPU)
    assert [row["square"] for row in rows.values()] == [0, 1, 4, 9]
    written = [json.loads(line)["number"] for line in results.path.read_text().splitlines()]
    assert sorted(written) == [0, 1, 2, 3]
    repeated = {int(note) for note in notes.read_text().split()[len(begun) :]}
    assert not repeated & finished


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"\x89PNG\r\n\x1a\n\xff\xfe", "not UTF-8 text"),
        (b"loss,step\n1,2\n", "line 1 is not JSON"),
        (b'{"seconds": 1.0, "versions": {}}\n[1, 2]\n', "line 2 is not a result"),
        (b'{"loss": 1.0}\n', "line 1 is not a result"),
        (b'{"task": "mqar", "layer": "kla", "versions": {}}\n', "line 1 is not a result"),
    ],
)
def test_another_file_is_refused_and_left_alone(tmp_path: Path, content: bytes, says: str) -> None:
    results, notes = places(tmp_path)
    results.path.write_bytes(content)
    with pytest.raises(ArgumentError, match=says):
        run([Square(1)], results, partial(squared, notes=notes), CPU)
    assert results.path.read_bytes() == content and not notes.exists()


@pytest.mark.parametrize(
    ("damage", "lines"),
    [
        (b"\0" * 4096, "line 3"),
        (b"\n\n", "lines 3, 4"),
        (b'{"number": 5, "si', "line 3"),
        (b'{"number": 5, "si' + b"\0" * 100 + b"\n", "line 3"),
    ],
    ids=["NULs", "blank", "torn", "torn and NULs"],
)
def test_damaged_lines_are_skipped(tmp_path: Path, damage: bytes, lines: str) -> None:
    results, notes = places(tmp_path)
    work = partial(squared, notes=notes)
    run([Square(1), Square(2)], results, work, CPU)
    with results.path.open("ab") as file:
        file.write(damage)
    with pytest.warns(UserWarning, match=f"skipping {lines} of .*results.jsonl"):
        rows = run([Square(1), Square(2), Square(3)], results, work, CPU)
    assert [row["square"] for row in rows.values()] == [1, 4, 9]
    with pytest.warns(UserWarning, match="skipping"):
        assert [row["number"] for row in results.read()] == [1, 2, 3]
    assert notes.read_text().split() == ["1", "2", "3"]


def onto_a_full_disk(cells, on_progress):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_full_disk_is_reported_with_its_path(tmp_path: Path, jobs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "START_METHOD", "fork")  # other processes would import torch
    results, _ = places(tmp_path)
    with pytest.raises(OSError, match=f"No space left on device: '{tmp_path}'") as raised:
        run([Square(1), Square(2)], results, onto_a_full_disk, CPU, jobs=jobs)
    assert raised.value.filename == str(tmp_path)


def test_a_row_that_does_not_fit_is_not_written_in_part(tmp_path: Path) -> None:
    results, notes = places(tmp_path)
    run([Square(1)], results, partial(squared, notes=notes), CPU)
    before, limit = results.path.read_bytes(), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 50, limit[1]))
    try:
        with pytest.raises(OSError, match=f"'{results.path}'"):
            run([Square(2)], results, partial(squared, notes=notes), CPU)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert results.path.read_bytes() == before


def test_rows_of_a_newer_version_are_refused(tmp_path: Path) -> None:
    results, notes = places(tmp_path)
    run([Square(1)], results, partial(squared, notes=notes), CPU)
    (row,) = results.read()
    assert row["format"] == FORMAT
    results.path.write_text(json.dumps({**row, "format": FORMAT + 1}) + "\n")
    says = rf"`format` is {FORMAT + 1} in '.*results.jsonl'; expected at most {FORMAT}"
    with pytest.raises(ArgumentError, match=says):
        run([Square(1)], results, partial(squared, notes=notes), CPU)
