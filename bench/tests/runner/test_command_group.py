"""Start of `kalmix bench`: its help imports what it needs only."""

from __future__ import annotations

import pytest
from start_time import check_start_time

SLOW = ("accelerate", "matplotlib", "pandas", "safetensors", "scipy", "sklearn", "statsmodels", "transformers")


@pytest.mark.slow
def test_help_starts_quickly_without_slow_packages() -> None:
    modules = check_start_time("bench --help")
    assert "kalmix_bench.cli" in modules and not modules.intersection(SLOW)
