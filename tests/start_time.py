"""Check of the CPU time that a command takes to start."""

from __future__ import annotations

import os
import subprocess
import sys

TRIALS = 5  # other work may share the machine


def check_start_time(line: str) -> None:
    """Check that `kalmix LINE` takes less than 1 s of CPU time beyond `import torch` in one of five trials.

    On a busy machine all CPU times are longer; then it may take as much as `import torch`.
    """
    command = ("-m", "kalmix.cli", *line.split())
    trials = ((_cpu_seconds(*command), _cpu_seconds("-c", "import torch")) for _ in range(TRIALS))
    assert any(whole - torch < max(1, torch) for whole, torch in trials), line


def _cpu_seconds(*arguments: str) -> float:
    """Return the CPU time of Python with these arguments, in seconds."""
    before = os.times()
    subprocess.run([sys.executable, *arguments], check=True, capture_output=True)
    after = os.times()
    return after.children_user + after.children_system - before.children_user - before.children_system
