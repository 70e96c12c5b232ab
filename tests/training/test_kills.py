"""Killed training runs resume where they stopped: two kills in `make test`, 12 of each script in `make test-all`."""

from __future__ import annotations

from pathlib import Path

import pytest
from killing import check_script


@pytest.mark.parametrize(
    ("script", "kills"),
    [("kills.py", 2), *(pytest.param(x, 12, marks=pytest.mark.slow) for x in ("kills.py", "kills_on_shards.py"))],
)
def test_killed_runs_lose_and_repeat_no_step(script: str, kills: int) -> None:
    check_script(Path(__file__).with_name(script), kills)
