"""The measurement of token shards counts every token once."""

from pathlib import Path

import pytest

from kalmix_bench.perf import token_shards
from kalmix_bench.perf.token_shards import private_memory, run


@pytest.mark.slow
def test_rates_and_memory_of_every_step_are_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_shards, "BATCH_SIZE", 1)
    monkeypatch.setattr(token_shards, "WORDS", 1000)
    results = run(20_000, 1, tmp_path)
    for step in ("prepare", "best-fit", "stream"):
        assert results[step]["tokens/s"] > 0 and set(results[step]["MiB"]) == {"first tenth", "first half", "all"}
    tokens = results["prepare"]["tokens"]
    assert 0.95 * tokens < results["best-fit"]["tokens"] <= tokens
    assert 0.95 * tokens < results["stream"]["tokens"] <= tokens
    assert 50 < private_memory() < 10_000
