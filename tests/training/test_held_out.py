"""Held-out text on which runs on token shards are evaluated."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kalmix.training.run import train
from kalmix.training.run_data import ShardSource
from kalmix.training.shards import Order, Preparation, TokenLoader, prepare


def test_mixture_is_evaluated_on_the_folders_with_held_out_documents(small, shards: Path, tmp_path: Path) -> None:
    (tmp_path / "more.txt").write_text("a filter is a recurrence. " * 200)
    prepare(Preparation(str(tmp_path / "more.txt"), tokenizer=str(shards / "tokenizer"), held_out=0), tmp_path / "more")
    alone, mixed = (
        ShardSource(small(shards=given)).load(None, 1, 0)
        for given in (str(shards), {str(shards): 1.0, str(tmp_path / "more"): 3.0})
    )
    assert alone.evaluation is not None and mixed.evaluation is not None
    assert torch.equal(mixed.evaluation[0]["input_ids"], alone.evaluation[0]["input_ids"])
    assert mixed.tokens_per_byte["eval_loss"] == pytest.approx(alone.tokens_per_byte["eval_loss"])
    assert mixed.tokens_per_byte["loss"] != alone.tokens_per_byte["loss"]


@pytest.mark.parametrize("packing", ["stream", "best-fit"])
@pytest.mark.parametrize(("given", "used", "rows"), [(3, 3, 3), (5, 4, 4), (4, 4, 4)])
def test_runs_are_evaluated_on_the_same_text_with_any_number_of_processes(
    packing: str, given: int, used: int, rows: int, small
) -> None:
    """A prime number of sequences is cut to full batches, since its batches would have one row."""
    source = ShardSource(small(eval_tokens=given * 32, batch_size=4, batch_tokens=12 * 32, packing=packing))
    found = []
    for processes in (1, 2, 3, 4):
        batches = source.load(None, processes, 0).evaluation
        found.append([batch["input_ids"] for batch in batches or ()])
    assert found[0][0].numel() == rows * 32
    flat = [torch.cat([batch.flatten() for batch in batches]) for batches in found]
    assert len(flat[0]) == used * 32 and all(torch.equal(x, flat[0]) for x in flat)


@pytest.mark.parametrize("packing", ["stream", "best-fit"])
@pytest.mark.parametrize("mixed", [False, True])
def test_runs_are_evaluated_on_no_more_rows_than_are_held_out(
    packing: str, mixed: bool, small, shards: Path, tmp_path: Path
) -> None:
    """A loader has no end, so it would repeat a small split up to `eval_tokens`."""
    folders = {str(shards): 1.0}
    if mixed:
        (tmp_path / "texts").mkdir()
        for n in range(20):
            (tmp_path / "texts" / f"{n}.txt").write_text(f"{n}. a filter is a recurrence. " * 9)
        more = Preparation(str(tmp_path / "texts"), tokenizer=str(shards / "tokenizer"), held_out=0.5)
        prepare(more, tmp_path / "more")
        folders[str(tmp_path / "more")] = 1.0
    expected = 0
    for folder in folders:
        order = Order(32, packing, seed=None, split="held_out", epochs=1)
        expected += sum(1 for _ in TokenLoader(folder, order, batch_size=1))
    for limit in (1, expected - 1, expected, 512):
        recipe = small(shards=folders, eval_tokens=limit * 32, batch_size=1, batch_tokens=32, packing=packing)
        evaluation = ShardSource(recipe).load(None, 1, 0).evaluation
        assert evaluation is not None and len(evaluation) == min(limit, expected)


def test_missing_evaluation_gives_a_warning(small, tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    cases = {
        "`eval_tokens` is 16. ": {"eval_tokens": 16},
        "the data hold out fewer. ": {"eval_tokens": 2048, "seq_len": 2048, "batch_size": 1},
        "": {"eval_tokens": 0},
    }
    for reason, changes in cases.items():
        recwarn.clear()
        assert not train(small(steps=1, **changes), tmp_path / str(changes["eval_tokens"])).held_out
        told = [text for x in recwarn if "is not evaluated on held-out text" in (text := str(x.message))]
        assert len(told) == bool(reason) and all(reason in text for text in told)
