"""Start of `kalmix bench`: its help imports what it needs only."""

from __future__ import annotations

import subprocess
import sys

from start_time import check_start_time

SLOW = ("accelerate", "matplotlib", "pandas", "safetensors", "scipy", "sklearn", "statsmodels", "transformers")


def test_help_starts_quickly() -> None:
    check_start_time("bench --help")


def test_commands_are_defined_without_slow_packages() -> None:
    code = f"import sys, kalmix_bench.cli; print(*set({SLOW}) & set(sys.modules))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.split() == []
