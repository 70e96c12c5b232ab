"""Killed training runs resume where they stopped."""

from __future__ import annotations

from pathlib import Path

import pytest
from killing import check_script


@pytest.mark.slow
@pytest.mark.parametrize("script", ["kills.py", "kills_on_shards.py"])
def test_killed_runs_lose_and_repeat_no_step(script: str) -> None:
    check_script(Path(__file__).with_name(script), 6)
