"""`share` of `bench/lease_common.sh`: processes share a GPU where the multi-process service works."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

FUNCTIONS = Path(__file__).parents[2] / "lease_common.sh"


@pytest.mark.parametrize(
    ("service", "process", "shared"),
    [(127, 0, False), (1, 0, False), (0, 1, False), (0, 0, True)],
    ids=["absent", "refused", "unusable", "works"],
)
def test_processes_take_turns_and_say_so_unless_the_service_works(
    tmp_path: Path, service: int, process: int, shared: bool
) -> None:
    for name, status in (("nvidia-cuda-mps-control", service), ("python", process)):
        if status != 127:
            (tmp_path / name).write_text(f"#!/bin/sh\nexit {status}\n")
            (tmp_path / name).chmod(0o755)
    script = f"set -euo pipefail; source {FUNCTIONS}; python={tmp_path}/python; share; echo $sharing"
    ended = subprocess.run(
        ["bash", "-c", script], env={"PATH": f"{tmp_path}:/usr/bin:/bin"}, capture_output=True, text=True, timeout=60
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines()[-1] == str(shared).lower()
    assert ("take turns" in ended.stdout) != shared
