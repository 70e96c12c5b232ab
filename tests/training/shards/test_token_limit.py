"""Limit on training tokens: the same shards for any number of workers and after any interruption."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import datasets
import pytest

from kalmix import ArgumentError
from kalmix.training.shards import DatasetOptions, Manifest, Preparation, prepare, token_limit, tokenize_part

from .conftest import shard_files, texts, write_corpus
from .test_preparation import Killed, read_documents

LONGEST = 400  # tokens of a document, at most


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kalmix.training.shards.parts._SMALLEST", 2000)
    monkeypatch.setattr(token_limit, "_SMALLEST_SHARE", 500)
    monkeypatch.setattr(tokenize_part, "_BATCH_DOCUMENTS", 16)


def settings(source: Path, max_tokens: int | None, **given: Any) -> Preparation:
    options = {"vocab_size": 300, "held_out": 0.1, "shard_tokens": 400, **given}
    return Preparation(str(source), max_tokens=max_tokens, **options)


@pytest.mark.parametrize("max_tokens", [1, 900, 5000])
def test_each_part_stops_after_the_document_that_reaches_its_share(
    max_tokens: int, corpus: Path, tmp_path: Path
) -> None:
    manifest = prepare(settings(corpus, max_tokens), tmp_path / "s")
    parts = max(1, max_tokens // 500)
    assert max_tokens <= manifest.count("train", "tokens") < max_tokens + parts * LONGEST
    found = read_documents(tmp_path / "s", manifest, "train")
    assert len(set(found)) == len(found) and set(found) < set(texts(300))
    assert manifest.settings["max_tokens"] == max_tokens
    if parts == 1:  # the beginning of the source
        whole = prepare(settings(corpus, None), tmp_path / "whole")
        assert found == read_documents(tmp_path / "whole", whole, "train")[: len(found)]
        last = manifest.count("train", "tokens")
        assert last - max_tokens < LONGEST


@pytest.mark.slow
def test_a_limit_above_the_source_reads_all_of_it(corpus: Path, tmp_path: Path) -> None:
    limited = prepare(settings(corpus, 10**9), tmp_path / "limited")
    whole = prepare(settings(corpus, None), tmp_path / "whole")
    for split in ("train", "held_out"):
        found = read_documents(tmp_path / "limited", limited, split)
        assert found == read_documents(tmp_path / "whole", whole, split)


def test_parts_that_end_early_are_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """First by further parts, then by those that have not ended."""
    monkeypatch.setattr("kalmix.training.shards.parts.MANY", 10**9)  # a limit of 3,000 bytes a part
    source = write_corpus(tmp_path / "c", ["short"] * 12 + ["\n".join(texts(40))])
    with (source / "9999.jsonl").open("w") as file:
        file.writelines(f'{{"text": "{text}"}}\n' for text in texts(100))
    monkeypatch.setattr("kalmix.training.shards.parts._SMALLEST", 3000)
    whole = prepare(settings(source, None, held_out=0.0), tmp_path / "whole").count("train", "tokens")
    for max_tokens in (whole // 2, whole - 10):
        folder = tmp_path / f"{max_tokens}"
        manifest = prepare(settings(source, max_tokens, held_out=0.0), folder)
        assert max_tokens <= manifest.count("train", "tokens") <= whole
    assert len(read_documents(folder, manifest, "train")) == 113


@pytest.mark.slow
def test_the_number_of_workers_does_not_change_limited_shards(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenize_part, "_BATCH_DOCUMENTS", 1024)  # as in worker processes
    for workers in (1, 2):
        prepare(settings(corpus, 4000), tmp_path / f"{workers}", workers=workers)
    assert shard_files(tmp_path / "1") == shard_files(tmp_path / "2")


@pytest.mark.slow
def test_an_interrupted_preparation_with_a_limit_continues(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = settings(corpus, 8000)  # more than one list of parts
    prepare(made, tmp_path / "whole")
    write, count = tokenize_part.write_text, 0

    def stop(path: Path, text: str) -> None:
        nonlocal count
        count += 1
        if count % 4 == 0:
            raise Killed
        write(path, text)

    monkeypatch.setattr(tokenize_part, "write_text", stop)
    interruptions = 0
    while True:
        try:
            prepare(made, tmp_path / "s")
            break
        except Killed:
            interruptions += 1
    assert interruptions > 4
    assert shard_files(tmp_path / "s") == shard_files(tmp_path / "whole")
    with pytest.raises(ArgumentError, match="holds finished shards with another max_tokens"):
        prepare(settings(corpus, 8001), tmp_path / "s")


def test_damage_after_the_limit_is_not_read(tmp_path: Path) -> None:
    source = tmp_path / "a.jsonl"
    source.write_text("".join(f'{{"text": "{text}"}}\n' for text in texts(10)) + "{oops\n")
    tokenizer = tmp_path / "t"
    prepare(settings(write_corpus(tmp_path / "c", texts(30)), None), tokenizer)
    given = {"tokenizer": str(tokenizer / "tokenizer"), "held_out": 0.0}
    manifest = prepare(settings(source, 1, **given), tmp_path / "s")
    assert read_documents(tmp_path / "s", manifest, "train") == texts(10)[:1]
    with pytest.raises(ArgumentError, match=r"whose line at byte \d+ is not JSON"):
        prepare(settings(source, 10**6, **given), tmp_path / "other")


def test_streams_stop_at_the_limit(kalmix, tmp_path: Path) -> None:
    datasets.Dataset.from_dict({"text": texts(300)}).save_to_disk(tmp_path / "d")
    line = ("data", "prepare", f"hf:{tmp_path / 'd'}", "--stream", "--vocab-size", 300, "--workers", 1)
    result = kalmix(*line, "--max-tokens", "1_000", "--output", tmp_path / "s")
    assert result.status == 0, result.errors
    manifest = Manifest.load(tmp_path / "s")
    assert 1000 <= manifest.count("train", "tokens") < 1000 + 2 * LONGEST
    result = kalmix(*line, "--max-tokens", 0, "--output", tmp_path / "t")
    assert result.status == 2 and "`max_tokens` is 0; expected a positive integer" in result.errors
    assert DatasetOptions(stream=True).given() == {"config": None, "split": "train", "stream": True}
