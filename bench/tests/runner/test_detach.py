"""`bench/detach.sh`: a command outlives the call that starts it, and later calls bring files and wait for it."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "detach.sh"
Call = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def call(tmp_path: Path) -> Call:
    """Call the script in a working tree of its own."""
    (tmp_path / "tree" / "bench").mkdir(parents=True)
    shutil.copy(SCRIPT, tmp_path / "tree" / "bench")
    (tmp_path / "tree" / "code").write_text("first")

    def run(*options: object) -> subprocess.CompletedProcess[str]:
        places = ("--out", tmp_path / "out", "--work", tmp_path / "work")
        line = ["bash", str(tmp_path / "tree" / "bench" / SCRIPT.name), *map(str, (*places, *options))]
        return subprocess.run(line, capture_output=True, text=True, check=False, timeout=60)

    return run


@pytest.mark.parametrize(
    ("options", "words"), [(("--lease", 3), "--lease is not an option"), ((), "no command; add -- and a command")]
)
def test_wrong_calls_are_refused(options: tuple[object, ...], words: str, call: Call) -> None:
    ended = call(*options)
    assert ended.returncode == 2 and words in ended.stderr


@pytest.mark.slow
def test_a_command_outlives_its_call_and_reads_what_later_calls_bring(call: Call, tmp_path: Path) -> None:
    results = tmp_path / "results"
    script = (
        'mkdir -p "$0"; cat code > "$0/code"; until [ -f late/piece ]; do sleep 0.05; done; cp late/piece "$0"; exit 7'
    )
    started = call("--results", results, "--limit", 1, "--", "bash", "-c", script, results)
    assert started.returncode == 75 and "it still runs" in started.stdout, started.stderr
    (tmp_path / "tree" / "code").write_text("second")  # the next call's working tree
    (tmp_path / "tree" / "late").mkdir()
    (tmp_path / "tree" / "late" / "piece").write_text("piece")
    ended = call("--results", results, "--limit", 30, "--bring", "late")
    assert ended.returncode == 7, ended.stderr
    shutil.unpack_archive(tmp_path / "out" / "results.tgz", tmp_path / "unpacked")
    found = {file.name: file.read_text() for file in (tmp_path / "unpacked").iterdir()}
    assert found == {"code": "first", "piece": "piece"}


@pytest.mark.slow
def test_output_and_status_come_back(call: Call, tmp_path: Path) -> None:
    ended = call("--limit", 30, "--", "bash", "-c", "echo written; echo twice >&2; exit 0")
    assert ended.returncode == 0 and ended.stdout.splitlines() == ["written", "twice"]
    assert (tmp_path / "out" / "log.txt").read_text() == "written\ntwice\n"
    assert call("--limit", 30).stdout == ended.stdout
