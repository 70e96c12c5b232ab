"""`bench/recall_lease.sh`: cells of several commands run in order, continue in a later call, and rows come back."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import kalmix_bench.experiments.recall.trainer  # noqa: F401 - each process would import it
from kalmix_bench.runner import workers

from .warm_python import WarmPython

SCRIPT = Path(__file__).parents[2] / "recall_lease.sh"
COPYING = ("mad", "--preset", "laptop", "--task", "selective-copying", "--epochs", "1")


def command(python: str | Path, *arguments: object) -> list[str]:
    return ["bash", str(SCRIPT), "--python", str(python), "--wheels", "none", *map(str, arguments)]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("-- mad", "--out is missing"),
        ("--lease 3 --out x -- mad", "--lease is not an option"),
        ("--out {}/out --work {}/work", "no cells; add --"),
        ("--out {}/out --work {}/work -- mad --preset none", "preset"),
    ],
)
def test_wrong_calls_are_refused(options: str, words: str, tmp_path: Path) -> None:
    called = command(sys.executable, *options.replace("{}", str(tmp_path)).split())
    ended = subprocess.run(called, capture_output=True, text=True, check=False)
    assert ended.returncode == 2 and words in ended.stderr


@pytest.fixture
def python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[WarmPython]:
    """Python whose workers are forks, too, and end at once."""
    monkeypatch.setattr(workers, "START_METHOD", "fork")
    monkeypatch.setattr(workers, "SHUTDOWN_SECONDS", 0.05)
    python = WarmPython(tmp_path)
    yield python
    python.close()


def test_cells_of_two_commands_run_and_finished_ones_do_not_run_again(tmp_path: Path, python: WarmPython) -> None:
    out = tmp_path / "out"

    def call(*arguments: object, work: str = "work") -> subprocess.CompletedProcess[str]:
        return python.run(command(python.path, "--out", out, "--work", tmp_path / work, "--commit", "abc", *arguments))

    def rows() -> list[dict]:
        return [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]

    ended = call("--limit", "1", "--", *COPYING)
    assert ended.returncode == 3 and "too little time is left" in ended.stdout
    ended = call("--limit", "300", "--", *COPYING, "--layer", "kla", "--", *COPYING, "--layer", "kla-noise-free")
    assert ended.returncode == 0 and "2 cells" in ended.stdout, ended.stderr
    assert [row["layer"] for row in rows()] == ["kla", "kla-noise-free"]
    assert (out / "report.md").exists()
    before = rows()
    (tmp_path / "earlier").mkdir()
    (out / "results.jsonl").rename(tmp_path / "earlier" / "results.jsonl")
    ended = call("--rows", tmp_path / "earlier", "--", *COPYING, "--layer", "kla", work="another")
    assert ended.returncode == 0 and rows() == before
