"""A full disk ends a sweep with one sentence that names the path; once there is space, the sweep goes on."""

from __future__ import annotations

import pytest
from full_disk import SIZES, check_refusal

from kalmix_bench.experiments.recall import ModelShape, Part, RecallProtocol, evaluation_callback, presets

STUDY = presets.RecallStudy(
    "mad/selective-copying",
    (Part.of(8, 4, seq_len=12, num_tokens_to_copy=2),),
    (ModelShape(8, state_size=32, heads=2),),
    RecallProtocol(epochs=3, batch_size=4, learning_rate=1e-3),
    ("kla",),
)


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(presets.BENCHES["mad"], "laptop", (STUDY,))
    monkeypatch.setattr(evaluation_callback, "CHECKPOINT_SECONDS", 0.0)


@pytest.mark.parametrize(("size", "mount"), SIZES)
@pytest.mark.slow
def test_a_full_disk_ends_a_sweep_with_a_sentence(kalmix, disk, size: int, mount: bool) -> None:
    space = disk(size, mount=mount)
    bench = ("bench", "mad", "--device", "cpu", "--output", space.folder / "run")
    check_refusal(kalmix(*bench), space.folder / "run")
    space.grow()
    result = kalmix(*bench)
    assert result.status == 0 and "report.md" in result.output, result.errors
