"""Preparations that are killed: repeating the command gives the shards of an undisturbed one."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from .conftest import shard_files, texts

KILLS = 4


def command(source: Path, output: Path) -> list[str]:
    options = ["--vocab-size", "300", "--shard-tokens", "20000", "--held-out", "0.05", "--workers", "2"]
    return [sys.executable, "-m", "kalmix.cli", "data", "prepare", str(source), "--output", str(output), *options]


def finished_shards(output: Path) -> set[str]:
    """Return the names of the shards that have a record."""
    records = [json.loads(path.read_text()) for path in (output / "parts").glob("[!.]*.json")]
    return {shard["file"] for record in records for shard in record["shards"]}


@pytest.mark.slow
def test_preparations_killed_at_several_moments_give_the_same_shards(tmp_path: Path) -> None:
    with (tmp_path / "a.jsonl").open("w") as file:
        file.writelines(json.dumps({"text": text}) + "\n" for text in texts(10_000))
    undisturbed = subprocess.run(command(tmp_path / "a.jsonl", tmp_path / "whole"), capture_output=True, text=True)
    assert undisturbed.returncode == 0, undisturbed.stderr
    draw, kills, runs = random.Random(0), 0, 0
    while kills < KILLS:
        output = tmp_path / f"{runs}"
        runs += 1
        kept: dict[str, int] = {}
        for _ in range(4):
            process = subprocess.Popen(command(tmp_path / "a.jsonl", output), stderr=subprocess.PIPE, text=True)
            before = finished_shards(output)
            wait = draw.choice([0.0, draw.uniform(0, 3)])  # after the next shard, or at any time from the start
            deadline = time.monotonic() + (wait or 60)
            while process.poll() is None and time.monotonic() < deadline:
                if not wait and finished_shards(output) - before:
                    time.sleep(draw.uniform(0, 0.3))
                    break
                time.sleep(0.02)
            os.kill(process.pid, signal.SIGKILL)
            process.communicate()
            kills += process.returncode == -signal.SIGKILL
            for name, changed in kept.items():
                assert (output / name).stat().st_mtime_ns == changed, f"{name} was written twice"
            kept = {name: (output / name).stat().st_mtime_ns for name in finished_shards(output)}
        last = subprocess.run(command(tmp_path / "a.jsonl", output), capture_output=True, text=True)
        assert last.returncode == 0, last.stderr
        assert shard_files(output) == shard_files(tmp_path / "whole")
        assert not list(output.rglob(".kalmix-partial*"))
    assert kills >= KILLS
