"""Killed runs go on where they were: a handful of kills here, 100 in `make test-all`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize("kills", [4, pytest.param(100, marks=pytest.mark.slow)])
def test_kills_lose_nothing_and_repeat_nothing(kills: int) -> None:
    script = Path(__file__).with_name("kills.py")
    told = subprocess.run(
        [sys.executable, str(script), "--kills", str(kills), "--seed", str(kills)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert told.returncode == 0, told.stdout + told.stderr
    assert f"{kills} kills" in told.stdout and ", 0 failures" in told.stdout
