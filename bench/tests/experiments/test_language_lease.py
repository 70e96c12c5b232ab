"""`bench/language_lease.sh`: pieces that arrive with several calls, and rows in the output folder."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

import kalmix_bench.experiments.language.run  # noqa: F401 - each process would import it
from kalmix_bench.datasets.corpus_pieces import pack
from kalmix_bench.experiments.language.protocol import PRESETS
from kalmix_bench.runner import workers
from kalmix_bench.runner.json_lines import read_rows

from .warm_python import WarmPython

SCRIPT = Path(__file__).parents[2] / "language_lease.sh"


def command(python: str | Path, *arguments: object) -> list[str]:
    return ["bash", str(SCRIPT), "--python", str(python), "--wheels", "none", *map(str, arguments)]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("", "--out is missing"),
        ("--lease 3 --out x", "--lease is not an option"),
        ("--work {}/work --out {}/out --pieces {}/none", "has no pieces.json"),
    ],
)
def test_wrong_calls_are_refused(options: str, words: str, tmp_path: Path) -> None:
    called = command(sys.executable, *options.replace("{}", str(tmp_path)).split())
    ended = subprocess.run(called, capture_output=True, text=True, check=False)
    assert ended.returncode == 2 and words in ended.stderr


@pytest.mark.parametrize(
    ("commands", "layers"),
    [
        (["--", "--layer", "kla", "--layer", 'kla:{"slots": 8}'], ["--layer", "kla", "--layer", 'kla:{"slots": 8}']),
        (["--", "--layer", "kla", "--", "--stage", "main", "--layer", "gla"], ["--layer", "kla", "--layer", "gla"]),
        (["--", "--stage", "tune", "--", "--layer", "kla"], []),
    ],
)
@pytest.mark.slow
def test_only_layers_that_are_trained_are_compiled(commands: list[str], layers: list[str], tmp_path: Path) -> None:
    """A script that prints its arguments takes the place of Python. The piece that the call waits for never comes."""
    (tmp_path / "pieces").mkdir()
    (tmp_path / "pieces" / "pieces.json").write_text('{"pieces": 1}')
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nprintf '%s\\n' \"$@\"\n")
    python.chmod(0o755)
    places = [word for name in ("work", "out", "pieces") for word in (f"--{name}", tmp_path / name)]
    lease = command(python, *places, "--wait", "1", "--precompile", "medium")
    ended = subprocess.run([*lease, *commands], capture_output=True, text=True, check=False)
    assert ended.returncode == 3 and "0 of 1 pieces are here" in ended.stdout
    log, until = tmp_path / "out" / "precompile.log", time.monotonic() + 20
    while not log.read_text().endswith(f"{['medium', *layers][-1]}\n") and time.monotonic() < until:
        time.sleep(0.05)  # the lease does not wait for it
    module = "kalmix_bench.experiments.language.precompile"
    assert log.read_text().splitlines() == ["-m", module, "--preset", "medium", *layers]


@pytest.fixture
def python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[WarmPython]:
    """Python whose workers are forks, too, and end at once; the preset `laptop` takes fewer tokens at a time."""
    few = {"batch_tokens": 1024, "eval_tokens": 1024, "probe_rows": 2}
    monkeypatch.setitem(PRESETS, "laptop", PRESETS["laptop"]._replace(main=replace(PRESETS["laptop"].main, **few)))
    monkeypatch.setattr(workers, "START_METHOD", "fork")
    monkeypatch.setattr(workers, "SHUTDOWN_SECONDS", 0.05)
    python = WarmPython(tmp_path)
    yield python
    python.close()


@pytest.mark.slow
def test_pieces_arrive_with_several_calls_and_rows_come_back(
    tmp_path: Path, word_texts: Path, python: WarmPython
) -> None:
    def call(*arguments: object) -> subprocess.CompletedProcess[str]:
        return python.run(command(python.path, *arguments))

    first, second = pack(word_texts.parent, tmp_path / "pieces", limit=10**7, pieces=2, vocab_size=512)
    late = second.rename(tmp_path / second.name)
    places = ("--work", tmp_path / "work", "--out", tmp_path / "out", "--pieces", tmp_path / "pieces")
    ended = call(*places, "--", "--preset", "laptop")
    assert ended.returncode == 3 and "1 of 2 pieces are here" in ended.stdout
    few = ("--work", tmp_path / "few", "--out", tmp_path / "few-out", "--pieces", tmp_path / "pieces", "--use", "1")
    ended = call(*few, "--limit", "1", "--", "--preset", "laptop")
    assert ended.returncode == 3 and "too little time" in ended.stdout and (tmp_path / "few" / "shards").exists()
    first.unlink()
    threading.Timer(1, late.rename, [second]).start()  # while the call waits
    study = ("--preset", "laptop", "--layer", "attention", "--rates", "2e-2", "--tokens", "20000", "--devices", "cpu")
    short = ("variations", "--preset", "laptop", "--tokens", "10000", "--rate", "2e-2", "attention")
    lease = (*places, "--wait", "60", "--commit", "abc", "--limit", "300")
    asked = (*lease, "--", *study, "--", *study, "--seeds", "2", "--", *short)
    ended = call(*asked)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("ended with status 0") == 3
    (variation,) = read_rows(tmp_path / "out" / "variations.jsonl")
    assert (variation["commit"], variation["variation"]) == ("abc", "attention") and variation["loss"] < 7
    rows = [json.loads(line) for line in (tmp_path / "out" / "results.jsonl").read_text().splitlines()]
    assert [row["seed"] for row in rows] == [0, 1]
    for row in rows:
        assert (row["commit"], row["language"], row["stage"]) == ("abc", "attention", "main")
        assert row["positions"]["documents"] and row["copying"]
    assert (tmp_path / "out" / "language.svg").exists() and (tmp_path / "out" / "report.md").exists()
    shutil.rmtree(tmp_path / "out")
    again = call(*asked)  # on the same machine nothing runs again
    assert again.returncode == 0, again.stderr
    assert len((tmp_path / "out" / "results.jsonl").read_text().splitlines()) == 2
