"""Reading of shards: packing, streams, mixtures, any number of processes and workers, exact positions."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from contextlib import suppress
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Trainer, TrainingArguments

from kalmix import ArgumentError
from kalmix.files import FORMAT
from kalmix.models import KalmixConfig, KalmixForCausalLM
from kalmix.training.shards import Manifest, Order, Preparation, Shards, TokenLoader, prepare, rows
from kalmix.training.shards.packing import best_fit
from kalmix.training.shards.permutation import permute
from kalmix.training.shards.trainer_position import DataPosition

from .conftest import texts, write_corpus

PACKED, STREAM = Order(seq_len=64), Order(seq_len=64, packing="stream")


@pytest.fixture(autouse=True)
def small_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "_DOCUMENTS", 32)
    monkeypatch.setattr(rows, "_WINDOWS", 16)


@pytest.fixture(scope="session")
def folder(prepared: tuple[Path, Manifest]) -> Path:
    return prepared[0]


@pytest.fixture(scope="session")
def documents(folder: Path) -> list[list[int]]:
    """Return the tokens of all training documents."""
    shards = Shards(folder)
    lengths = shards.lengths(np.arange(shards.documents))
    return [shards.read(n, 0, length).tolist() for n, length in enumerate(lengths)]


def take(loader: TokenLoader, count: int) -> list[dict[str, torch.Tensor]]:
    return list(islice(loader, count))


def equal(a: Any, b: Any) -> bool:
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)
    return len(a) == len(b) and all(map(equal, a, b))


def test_windows_and_documents_agree(folder: Path, documents: list[list[int]]) -> None:
    shards = Shards(folder)
    stream = [token for each in documents for token in each]
    assert shards.tokens == len(stream) and shards.documents == len(documents)
    assert shards.window(0, shards.tokens).tolist() == stream
    for start in (0, 1990, 2000, 5000, len(stream) - 300):  # shards end after 2,000 tokens
        assert shards.window(start, 300).tolist() == stream[start : start + 300]
    assert len(shards._maps) > 3


@pytest.mark.parametrize("size", [1, 2, 3, 5, 64, 1000])
def test_permutations_are_one_to_one_and_depend_on_the_key(size: int) -> None:
    index = np.arange(size)
    found = [permute(index, size, key) for key in range(4)]
    assert all(sorted(each) == index.tolist() for each in found)
    assert size < 60 or len({tuple(each) for each in found}) == 4
    assert all(permute(index[size // 2 :], size, 1) == found[1][size // 2 :])
    if size == 1000:
        images = np.stack([permute(index, size, key) for key in range(200)])
        assert abs(np.corrcoef(images[:, :-1].ravel(), images[:, 1:].ravel())[0, 1]) < 0.01
        counts = np.bincount(images.ravel() // 100 + 10 * np.tile(index // 100, 200), minlength=100)
        assert abs(counts - 2000).max() < 6 * 2000**0.5


def test_best_fit_places_every_item_once_and_leaves_little_space() -> None:
    draw = np.random.default_rng(0)
    lengths = np.minimum(draw.lognormal(3, 1.2, 500).astype(int) + 1, 256)
    packed = best_fit(lengths, 256)
    assert sorted(item for row in packed for item in row) == list(range(500))
    filled = [lengths[row].sum() for row in packed]
    assert max(filled) <= 256 and len(packed) <= -(-lengths.sum() // 256) + 1
    assert best_fit(np.array([6, 5, 4, 3, 2]), 10) == [[0, 2], [1, 3, 4]]


def segments(batch: dict[str, torch.Tensor]) -> list[list[int]]:
    ends = batch["cu_seq_lens_q"].tolist()
    return [batch["input_ids"][0, a:b].tolist() for a, b in pairwise(ends)]


def test_packed_rows_hold_every_document_once_an_epoch(folder: Path, documents: list[list[int]]) -> None:
    orders = []
    for seed in (0, 1, None):
        loader = TokenLoader(folder, Order(seq_len=64, seed=seed, epochs=1), batch_size=1)
        found = [segment for batch in loader for segment in segments(batch)]
        cut = Counter(tuple(each[start : start + 64]) for each in documents for start in range(0, len(each), 64))
        assert Counter(map(tuple, found)) == cut
        orders.append(found)
    assert orders[0] != orders[1] != orders[2]


def test_epochs_have_different_orders(folder: Path) -> None:
    for order in (PACKED, STREAM):
        once = len(list(TokenLoader(folder, Order(64, order.packing, epochs=1), batch_size=1)))
        batches = take(TokenLoader(folder, order, batch_size=1), 2 * once)
        assert not equal(batches[0], batches[once]) and not equal(batches[1], batches[once + 1])


def test_packed_batches_have_targets_positions_and_unused_tokens_at_the_end(
    folder: Path, documents: list[list[int]]
) -> None:
    begin = Shards(folder).manifest.bos_id
    whole = {tuple(each) for each in documents}
    kinds: Counter[str] = Counter()
    for batch in take(TokenLoader(folder, PACKED, batch_size=3), 40):
        ids, labels, targets, positions = (
            batch[name][0].tolist() for name in ("input_ids", "labels", "shift_labels", "position_ids")
        )
        ends = batch["cu_seq_lens_q"].tolist()
        assert len(ids) == 192 and ends[0] == 0 and ends[-1] <= 192 and batch["cu_seq_lens_q"].dtype == torch.int32
        for a, b in pairwise(ends):
            assert positions[a:b] == list(range(b - a)) and targets[a : b - 1] == ids[a + 1 : b]
            kind = "whole" if tuple(ids[a:b]) in whole else "rest" if targets[b - 1] == begin else "cut"
            kinds[kind] += 1
            assert targets[b - 1] == (begin if kind != "cut" else -100)
            assert labels[a:b] == ([-100, *ids[a + 1 : b]] if kind == "cut" else ids[a:b])
            assert kind == "rest" or kind == "cut" or ids[a] == begin
        assert set(targets[ends[-1] :]) <= {-100} and set(labels[ends[-1] :]) <= {-100}
        assert sum(x >= 0 for x in labels) == sum(x >= 0 for x in targets)
    assert min(kinds[kind] for kind in ("whole", "rest", "cut")) > 5


def test_models_take_packed_batches(folder: Path) -> None:
    """The loss is the mean over all documents, each scored alone."""
    model = KalmixForCausalLM(
        KalmixConfig(vocab_size=300, hidden_size=16, layers=["kla", "attention"], initializer_range=0.5)
    ).eval()
    (batch,) = take(TokenLoader(folder, PACKED, batch_size=2), 1)
    with torch.no_grad():
        loss, total, count = model(**batch).loss, 0.0, 0
        ends = batch["cu_seq_lens_q"].tolist()
        for a, b in pairwise(ends):
            targets = batch["shift_labels"][:, a:b]
            logits = model(batch["input_ids"][:, a:b]).logits
            total += torch.nn.functional.cross_entropy(logits[0], targets[0], reduction="sum").item()
            count += int((targets >= 0).sum())
    assert loss.item() == pytest.approx(total / count, rel=1e-5)


def test_stream_rows_are_all_windows(folder: Path, documents: list[list[int]]) -> None:
    stream = [token for each in documents for token in each]
    wanted = [stream[start : start + 65] for start in range(0, len(stream) - 64, 64)]
    for seed in (None, 0):
        batches = list(TokenLoader(folder, Order(64, "stream", seed=seed, epochs=1), batch_size=1))
        found = [[*x["input_ids"][0].tolist(), x["shift_labels"][0, -1].item()] for x in batches]
        assert (found == wanted) == (seed is None) and sorted(found) == sorted(wanted)
    assert batches[0]["input_ids"].shape == batches[0]["labels"].shape == (1, 64)


@pytest.mark.parametrize("order", [PACKED, STREAM], ids=["packed", "stream"])
def test_rows_do_not_depend_on_processes_or_batch_size(folder: Path, order: Order) -> None:
    def read(batch_size: int, world_size: int, batches: int) -> list[set[bytes]]:
        """Return the rows of each global batch."""
        ranks = [
            take(TokenLoader(folder, order, batch_size=batch_size, rank=rank, world_size=world_size), batches)
            for rank in range(world_size)
        ]
        pieces = [[segments(x) if order is PACKED else x["input_ids"].tolist() for x in rank] for rank in ranks]
        return [{bytes(str(row), "ascii") for rank in pieces for row in rank[n]} for n in range(batches)]

    wanted = read(8, 1, 6)
    assert read(4, 2, 6) == read(2, 4, 6) == read(1, 8, 6) == wanted
    halves = read(4, 1, 12)
    assert [a | b for a, b in zip(halves[::2], halves[1::2], strict=True)] == wanted


def test_the_number_of_workers_does_not_change_the_batches(folder: Path) -> None:
    for order in (PACKED, STREAM):
        wanted = take(TokenLoader(folder, order, batch_size=2), 7)
        loader = TokenLoader(folder, order, batch_size=2, workers=2)
        assert equal(take(loader, 4), wanted[:4])
        resumed = TokenLoader(folder, order, batch_size=2, workers=1)
        resumed.load_state_dict(json.loads(json.dumps(loader.state_dict())))
        assert equal(take(resumed, 3), wanted[4:])


def mixture(folder: Path, other: Path) -> dict[Any, float]:
    return {folder: 3.0, other: 1.0}


@pytest.fixture(scope="session")
def other(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return shards of another corpus with the same tokenizer."""
    output = tmp_path_factory.mktemp("other")
    source = write_corpus(output / "texts", [text.upper() for text in texts(50, seed=3)])
    prepare(Preparation(str(source), str(folder / "tokenizer"), held_out=0), output / "shards")
    return output / "shards"


@pytest.mark.parametrize("order", [PACKED, STREAM], ids=["packed", "stream"])
def test_every_position_resumes_exactly(folder: Path, other: Path, order: Order) -> None:
    """In every group and over several epochs; also with other batch sizes and numbers of processes."""
    for source in (folder, mixture(folder, other)):
        loader = TokenLoader(source, order, batch_size=8)
        positions, batches = [loader.state_dict()], []
        for batch in islice(loader, 70):
            batches.append(batch)
            positions.append(loader.state_dict())
        assert positions[-1]["cursors"][0][0] >= 1
        for at in (0, 1, 23, 41, 69):
            resumed = TokenLoader(source, order, batch_size=8)
            resumed.load_state_dict(json.loads(json.dumps(positions[at])))
            assert equal(take(resumed, 1), batches[at : at + 1])
            half = TokenLoader(source, order, batch_size=4, rank=0, world_size=2)
            half.load_state_dict(positions[at])
            ids = take(half, 1)[0]["input_ids"]
            if order is STREAM:
                assert torch.equal(ids, batches[at]["input_ids"][:4])
            else:
                used = int(batches[at]["cu_seq_lens_q"][1])
                assert torch.equal(ids[:, :used], batches[at]["input_ids"][:, :used])


def test_iterating_goes_on_after_the_last_batch(folder: Path) -> None:
    wanted = take(TokenLoader(folder, PACKED, batch_size=2), 6)
    loader = TokenLoader(folder, PACKED, batch_size=2)
    assert equal([*take(loader, 2)], wanted[:2])
    once = TokenLoader(folder, Order(64, epochs=1), batch_size=4)
    assert equal(list(once), list(once))


def test_mixtures_keep_their_weights_at_all_times(folder: Path, other: Path) -> None:
    loader = TokenLoader(mixture(folder, other), STREAM, batch_size=1)
    counts = [0, 0]
    for number, _ in zip(range(1, 200), loader, strict=False):
        counts = loader.state_dict()["counts"]
        assert abs(counts[0] - 0.75 * number) < 1 and sum(counts) == number
    assert counts[1] > 40  # several epochs of the small corpus


def test_held_out_documents_are_never_read_in_training(folder: Path) -> None:
    def found(split: Any) -> set[tuple[int, ...]]:
        loader = TokenLoader(folder, Order(512, split=split, epochs=1), batch_size=1)
        return {tuple(segment) for batch in loader for segment in segments(batch)}

    assert not found("train") & found("held_out")
    assert len(found("held_out")) == Shards(folder, "held_out").documents > 10


class StopError(Exception):
    """End of a session of training."""


def train(loader: TokenLoader, output: Path, steps: int, resume: bool, **options: Any) -> list[tuple[float, float]]:
    """Train a tiny model to `steps`, and return its losses and epochs by step."""

    class LoaderTrainer(Trainer):
        def get_train_dataloader(self) -> Any:
            return loader

    torch.manual_seed(0)
    model = KalmixForCausalLM(KalmixConfig(vocab_size=300, hidden_size=8, layers=["deltanet"]))
    arguments = TrainingArguments(
        str(output), max_steps=8, save_steps=1, logging_steps=1, use_cpu=True, report_to="none", disable_tqdm=True,
        gradient_accumulation_steps=2, learning_rate=1e-2, lr_scheduler_type="constant", **options,
    )  # fmt: skip
    trainer = LoaderTrainer(model, arguments, train_dataset=loader.dataset, callbacks=[DataPosition(loader)])

    def save(*given: Any, **more: Any) -> None:
        Trainer._save_checkpoint(trainer, *given, **more)
        if trainer.state.global_step == steps:
            raise StopError

    trainer._save_checkpoint = save  # type: ignore[method-assign]
    with suppress(StopError):
        trainer.train(resume_from_checkpoint=resume)
    return [(row["loss"], row["epoch"]) for row in trainer.state.log_history if "loss" in row]


@pytest.mark.slow
def test_the_trainer_resumes_at_the_exact_batch(folder: Path, tmp_path: Path) -> None:
    def loader(workers: int = 0) -> TokenLoader:
        return TokenLoader(folder, PACKED, batch_size=2, workers=workers)

    whole = train(loader(), tmp_path / "whole", 8, False, ignore_data_skip=True)
    train(loader(workers=1), tmp_path / "parts", 3, False, ignore_data_skip=True)
    with pytest.raises(ArgumentError, match="`ignore_data_skip` is False; expected True"):
        train(loader(), tmp_path / "parts", 4, True)
    train(loader(), tmp_path / "parts", 5, True, ignore_data_skip=True)
    resumed = train(loader(), tmp_path / "parts", 8, True, ignore_data_skip=True)
    assert len(whole) == 8 and resumed == whole


def changed(**given: Any) -> Any:
    return lambda state: state | given


STATES = {
    "empty": (lambda state: {}, "`state` is damaged (KeyError('order')); expected a `state_dict()`"),
    "no cursors": (changed(cursors=[]), "`state` is damaged (ValueError('it does not fit the shards'))"),
    "far": (changed(cursors=[[0, 10**6, 0]]), "`state` is damaged (ValueError('it does not fit the shards'))"),
    "text": (changed(cursors="abc"), "`state` is damaged ("),
    "seed": (lambda state: state | {"order": state["order"] | {"seed": 5}}, "`state` belongs to another seed;"),
    "shards": (
        lambda state: state | {"order": state["order"] | {"shards": ["0"]}},
        "`state` belongs to another shards",
    ),
}


@pytest.mark.parametrize("name", STATES)
def test_wrong_positions_are_refused(name: str, folder: Path) -> None:
    change, message = STATES[name]
    loader = TokenLoader(folder, PACKED, batch_size=1)
    take(loader, 3)
    before = loader.state_dict()
    with pytest.raises(ArgumentError) as raised:
        loader.load_state_dict(change(before))
    assert str(raised.value).startswith(message) and loader.state_dict() == before


WRONG = {
    "no folder": ({"shards": "nowhere"}, "`shards` is 'nowhere', which holds no shards (manifest.json is missing)"),
    "no shards": ({"shards": {}}, "`shards` is {}; expected a folder, or a mapping from folders to weights"),
    "weight": ({"shards": {"a": -1.0}}, "`weight` is -1.0; expected a finite number above 0"),
    "long rows": ({"order": Order(10**6, "stream")}, "whose split 'train' has"),
    "order": ({"order": 64}, "`order` is a int; expected an Order"),
    "batch size": ({"batch_size": 0}, "`batch_size` is 0; expected a positive integer"),
    "workers": ({"workers": -1}, "`workers` is -1; expected an integer of at least 0"),
    "rank": ({"rank": 2, "world_size": 2}, "`rank` is 2; expected an integer from 0 to 1"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments_are_refused(name: str, folder: Path) -> None:
    given, message = WRONG[name]
    with pytest.raises(ArgumentError) as raised:
        TokenLoader(**{"shards": folder, "order": PACKED, "batch_size": 1, **given})
    assert message in str(raised.value)


def test_orders_and_mixtures_are_checked(folder: Path, tmp_path: Path) -> None:
    for wrong in ({"seq_len": 0}, {"seq_len": 8, "packing": "first-fit"}, {"seq_len": 8, "seed": "a"},
                  {"seq_len": 8, "split": "test"}, {"seq_len": 8, "epochs": 0}):  # fmt: skip
        with pytest.raises(ArgumentError):
            Order(**wrong)
    source = write_corpus(tmp_path / "texts", texts(20, seed=4))
    prepare(Preparation(str(source), vocab_size=270, held_out=0), tmp_path / "shards")
    both = {folder: 1.0, tmp_path / "shards": 1.0}
    with pytest.raises(ArgumentError, match="`shards` have 2 different tokenizers"):
        TokenLoader(both, PACKED, batch_size=1)
    prepare(Preparation(str(source), str(folder / "tokenizer"), bos="a", held_out=0), tmp_path / "begun")
    with pytest.raises(ArgumentError, match="`shards` begin documents with 2 different tokens"):
        TokenLoader({folder: 1.0, tmp_path / "begun": 1.0}, PACKED, batch_size=1)
    with pytest.raises(ArgumentError, match="`epochs` is 1; expected None for a mixture"):
        TokenLoader(both, Order(64, epochs=1), batch_size=1)
    with pytest.raises(ArgumentError, match="whose split 'held_out' has 0 tokens"):
        TokenLoader(tmp_path / "shards", Order(64, split="held_out"), batch_size=1)


def test_damage_is_found_by_size_and_by_hash(kalmix, folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "s")
    result = kalmix("data", "check", tmp_path / "s")
    assert result.status == 0 and "documents" in result.output, result.errors
    shard = Shards(folder).manifest.shards[2]
    for name, damage, message in (
        (shard.file, lambda data: data[:-2], "is missing or has another size"),
        (shard.file, lambda data: b"\xff" + data[1:], "is damaged (its SHA-256 hash is another)"),
        (f"{shard.file}.index", lambda data: data[:-8] + b"\xff" * 8, "is damaged"),
        ("tokenizer/tokenizer.json", lambda data: data + b" ", "is missing or damaged"),
        ("manifest.json", lambda data: data[:50], "whose manifest.json cannot be read (manifest.json is damaged"),
        ("manifest.json", lambda data: data.replace(b".ds", b"/ds"), "manifest.json is damaged: `file` is"),
        ("manifest.json", lambda data: data.replace(b'"bos_id": 0', b'"bos_id": "0"'), "`bos_id` is '0'"),
        ("manifest.json", lambda data: data.replace(b'"bos_id"', b'"first"'), "'bos_id' is missing"),
        ("manifest.json", lambda data: data.replace(f'"format": {FORMAT}'.encode(), b'"format": 99'), "`format` is 99"),
    ):
        path = tmp_path / "s" / name
        whole = path.read_bytes()
        path.write_bytes(damage(whole))
        result = kalmix("data", "check", tmp_path / "s")
        assert result.status == 2 and message in result.errors, (name, result.errors)
        assert len(result.errors.splitlines()) == 1
        path.write_bytes(whole)
    (tmp_path / "s" / "manifest.json").unlink()
    (tmp_path / "s" / "plan.json").write_text("{}")
    assert "whose shards are unfinished" in kalmix("data", "check", tmp_path / "s").errors
