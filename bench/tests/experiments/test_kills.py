"""Killed benchmarks go on where they were: 12 kills, in `make test-all`."""

from __future__ import annotations

from pathlib import Path

import pytest
from killing import check_script


@pytest.mark.slow
def test_kills_lose_nothing_and_repeat_nothing() -> None:
    check_script(Path(__file__).with_name("kills.py"), 12)
