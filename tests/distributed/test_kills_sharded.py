"""Killed runs of two processes under FSDP2 resume where they stopped."""

from __future__ import annotations

from pathlib import Path

import pytest
from killing import check_script


@pytest.mark.slow
def test_killed_sharded_runs_lose_and_repeat_no_step() -> None:
    check_script(Path(__file__).with_name("kills_sharded.py"), 2)
