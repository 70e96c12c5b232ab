"""Killed training runs resume where they stopped: a few kills here, 100 in `make test-all`."""

from __future__ import annotations

from pathlib import Path

import pytest
from killing import check_script


@pytest.mark.parametrize("script", ["kills.py", "kills_on_shards.py"])
@pytest.mark.parametrize("kills", [2, pytest.param(100, marks=pytest.mark.slow)])
def test_killed_runs_lose_and_repeat_no_step(kills: int, script: str) -> None:
    check_script(Path(__file__).with_name(script), kills)
