"""Killed runs of two processes under FSDP2 resume where they stopped."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from killing import check_script


@pytest.mark.slow
def test_killed_sharded_runs_lose_and_repeat_no_step(tmp_path: Path) -> None:
    output = tmp_path / "kills.json"
    check_script(Path(__file__).with_name("kills_sharded.py"), 2, "--output", str(output))
    stored = json.loads(output.read_text())
    assert (stored["kills"], stored["failures"]) == (2, 0)
    assert sum(len(run["kills"]) for run in stored["runs"]) == 2 and stored["versions"]["torch"]
