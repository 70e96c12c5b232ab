"""Preparation of shards: contents, tokenizers, sources, resuming and one-line errors."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import datasets
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from kalmix import ArgumentError
from kalmix.training.corpus import train_tokenizer
from kalmix.training.data import wrap_tokenizer
from kalmix.training.shards import DatasetOptions, Manifest, Preparation, Shards, prepare, tokenize_part
from kalmix.training.shards.manifest import MANIFEST, TOKEN_DTYPES
from kalmix.training.shards.tokenizer import make_encoder

from .conftest import shard_files, texts, write_corpus

END = "<|endoftext|>"


def read_documents(folder: Path, manifest: Manifest, split: str) -> list[str]:
    """Return the texts of all documents of a split; check that each begins with the first token."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer" / "tokenizer.json"))
    found = []
    for shard in manifest.shards:
        if shard.split == split:
            tokens = np.fromfile(folder / shard.file, TOKEN_DTYPES[manifest.dtype])
            ends = np.fromfile(folder / f"{shard.file}.index", "<u8").astype(np.int64)
            assert len(tokens) == ends[-1] == shard.tokens and len(ends) == shard.documents
            for ids in np.split(tokens, ends[:-1]):
                assert ids[0] == manifest.bos_id and manifest.bos_id not in ids[1:]
                found.append(tokenizer.decode(ids[1:].tolist()))
    return found


def test_shards_hold_every_document_once(corpus: Path, prepared: tuple[Path, Manifest]) -> None:
    folder, manifest = prepared
    train, held_out = (read_documents(folder, manifest, split) for split in ("train", "held_out"))
    assert sorted(train + held_out) == sorted(texts(300))
    assert train == [text for text in texts(300) if text in set(train)]  # in the order of the source
    assert 15 <= len(held_out) <= 45
    assert manifest.count("train", "bytes") == sum(map(len, train))
    assert manifest == Manifest.load(folder)
    assert manifest.dtype == "uint16" and manifest.vocab_size == 300
    assert len(manifest.shards) > 3 and not list(folder.glob("p*"))  # neither plan nor parts
    for shard in manifest.shards:
        assert hashlib.sha256((folder / shard.file).read_bytes()).hexdigest() == shard.sha256
        assert hashlib.sha256((folder / f"{shard.file}.index").read_bytes()).hexdigest() == shard.index_sha256
    wanted = hashlib.sha256((folder / "tokenizer" / "tokenizer.json").read_bytes()).hexdigest()
    assert manifest.tokenizer_sha256 == wanted


@pytest.mark.slow
def test_the_number_of_workers_does_not_change_the_shards(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kalmix.training.shards.parts._SMALLEST", 5000)
    settings = Preparation(str(corpus), vocab_size=300, held_out=0.1, shard_tokens=2000)
    for workers in (1, 2):
        assert len(prepare(settings, tmp_path / f"{workers}", workers=workers).shards) > 10
    assert shard_files(tmp_path / "1") == shard_files(tmp_path / "2")


def test_parts_of_a_source_cover_it_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kalmix.training.shards.parts._SMALLEST", 500)
    make_encoder.cache_clear()
    documents = texts(200)
    write_corpus(tmp_path / "c", documents[:50])
    lines = [json.dumps({"text": text}) + "\n" for text in documents[50:]]
    (tmp_path / "c" / "b.jsonl").write_text("".join(lines[:50]))
    (tmp_path / "c" / "c.jsonl.gz").write_bytes(gzip.compress("".join(lines[50:100]).encode()))
    table = pyarrow.table({"text": documents[150:]})
    pyarrow.parquet.write_table(table, tmp_path / "c" / "d.parquet", row_group_size=5)
    manifest = prepare(Preparation(str(tmp_path / "c"), vocab_size=260, held_out=0), tmp_path / "s")
    assert len(manifest.shards) > 10
    assert make_encoder.cache_info().misses == 1  # deleted tokenizers keep memory
    assert read_documents(tmp_path / "s", manifest, "train") == documents


def test_documents_are_held_out_by_their_text_alone(tmp_path: Path) -> None:
    one, two = texts(60), texts(60)[::-1] + texts(40, seed=1)
    chosen = []
    for n, documents in enumerate((one, two)):
        source = write_corpus(tmp_path / f"c{n}", documents)
        manifest = prepare(Preparation(str(source), vocab_size=260, held_out=0.2), tmp_path / f"s{n}")
        chosen.append(set(read_documents(tmp_path / f"s{n}", manifest, "held_out")))
    assert chosen[0] == chosen[1] & set(one) and 3 <= len(chosen[0]) <= 25


@pytest.mark.parametrize("bos", [None, "filter"])
def test_any_fast_tokenizer_is_used_unchanged(bos: str | None, corpus: Path, tmp_path: Path) -> None:
    tokenizer = wrap_tokenizer(train_tokenizer([*texts(50), *["filter"] * 999], vocab_size=400))
    tokenizer.backend_tokenizer.enable_truncation(3)
    tokenizer.backend_tokenizer.enable_padding(length=50)
    tokenizer.save_pretrained(tmp_path / "t")
    manifest = prepare(Preparation(str(corpus), str(tmp_path / "t"), bos=bos, held_out=0), tmp_path / "s")
    assert manifest.tokenizer == str(tmp_path / "t") and manifest.vocab_size == len(tokenizer)
    assert manifest.bos_id == tokenizer.convert_tokens_to_ids(bos or END)
    if bos is None:
        assert read_documents(tmp_path / "s", manifest, "train") == texts(300)


@pytest.mark.parametrize(("last", "unknown"), [(7, "?"), (1 << 16, "?"), (7, None)])
def test_ids_of_a_tokenizer_may_have_gaps(last: int, unknown: str | None, corpus: Path, tmp_path: Path) -> None:
    tokenizer = Tokenizer(models.WordLevel({END: 0, "?": 2, "filter": last}, unk_token=unknown))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    wrap_tokenizer(tokenizer).save_pretrained(tmp_path / "t")
    settings = Preparation(str(corpus), str(tmp_path / "t"), held_out=0)
    if unknown is None:
        message = r"`tokenizer` cannot encode a text of the source \(WordLevel error: Missing .*; expected one that"
        with pytest.raises(ArgumentError, match=message):
            prepare(settings, tmp_path / "s")
        return
    manifest = prepare(settings, tmp_path / "s")
    assert (manifest.vocab_size, manifest.dtype) == (last + 1, "uint16" if last == 7 else "uint32")
    assert int(Shards(tmp_path / "s").window(0, manifest.count("train", "tokens")).max()) == last


@pytest.mark.slow
def test_large_vocabularies_have_32_bits(corpus: Path, tmp_path: Path) -> None:
    words = [*range(1 << 16), *{word for text in texts(300) for word in text.split()}]
    vocabulary = {str(word): n for n, word in enumerate([END, *words])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    wrap_tokenizer(tokenizer).save_pretrained(tmp_path / "t")
    manifest = prepare(Preparation(str(corpus), str(tmp_path / "t"), held_out=0), tmp_path / "s")
    assert manifest.dtype == "uint32"
    assert read_documents(tmp_path / "s", manifest, "train") == texts(300)


def test_special_tokens_in_a_text_are_ordinary_text(tmp_path: Path) -> None:
    documents = [f"before{END}after", END]
    source = write_corpus(tmp_path / "c", documents)
    manifest = prepare(Preparation(str(source), vocab_size=257, held_out=0), tmp_path / "s")
    assert read_documents(tmp_path / "s", manifest, "train") == documents


def test_long_texts_are_encoded_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wrap_tokenizer(train_tokenizer(texts(50), vocab_size=300)).save_pretrained(tmp_path)
    given = ["\n".join(texts(40)), "", "x" * 2500]
    whole = list(make_encoder(tmp_path, "")(given))
    monkeypatch.setattr("kalmix.training.shards.tokenizer._PIECE", 1000)
    pieces = list(make_encoder(tmp_path, "")(given))
    decode = Tokenizer.from_file(str(tmp_path / "tokenizer.json")).decode
    for a, b, text in zip(whole, pieces, given, strict=True):
        assert decode(a.tolist()) == decode(b.tolist()) == text
    assert (whole[0] == pieces[0]).all()  # a line break is a token of its own here


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("saved", [False, True])
def test_datasets_are_read(stream: bool, saved: bool, tmp_path: Path) -> None:
    documents = texts(100)
    dataset = datasets.Dataset.from_dict({"body": documents, "id": list(range(100))})
    if saved:
        dataset.save_to_disk(tmp_path / "d")
    else:
        (tmp_path / "d").mkdir()
        dataset.to_parquet(tmp_path / "d" / "train.parquet")
    options = DatasetOptions(split="train", stream=stream)
    settings = Preparation(f"hf:{tmp_path / 'd'}", column="body", vocab_size=260, held_out=0, dataset=options)
    manifest = prepare(settings, tmp_path / "s")
    assert sorted(read_documents(tmp_path / "s", manifest, "train")) == sorted(documents)
    with pytest.raises(ArgumentError, match=r"`column` is 'text', which 'hf:.*' lacks; expected one of .*'body', 'id'"):
        prepare(Preparation(f"hf:{tmp_path / 'd'}", dataset=options), tmp_path / "t")


class Killed(BaseException):
    """End of a process, at a place where nothing is cleaned up."""


def test_an_interrupted_preparation_continues(
    corpus: Path, prepared: tuple[Path, Manifest], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = Preparation(str(corpus), vocab_size=300, held_out=0.1, shard_tokens=2000)
    monkeypatch.setattr(tokenize_part, "_BATCH_DOCUMENTS", 16)
    whole = prepare(settings, tmp_path / "whole")
    assert len(whole.shards) > 6
    write, count = tokenize_part.write_text, 0

    def stop(path: Path, text: str) -> None:
        nonlocal count
        count += 1
        if count in (2, 5, 7):
            raise Killed
        write(path, text)

    monkeypatch.setattr(tokenize_part, "write_text", stop)
    for kept in (1, 3, 4):
        with pytest.raises(Killed):
            prepare(settings, tmp_path / "s")
        records = sorted((tmp_path / "s" / "parts").iterdir())
        assert len(records) == kept
        (tmp_path / "s" / ".kalmix-partial.1.train").touch()
        if kept == 4:  # damaged or missing files are written again
            records[-1].write_text('{"read": ')
            (tmp_path / "s" / json.loads(records[-2].read_text())["shards"][0]["file"]).unlink()
        times = {path: path.stat().st_mtime_ns for path in (tmp_path / "s").glob("*-000-000.ds")}
    prepare(settings, tmp_path / "s")
    assert all(path.stat().st_mtime_ns == time for path, time in times.items())
    assert shard_files(tmp_path / "s") == shard_files(tmp_path / "whole")
    assert not list((tmp_path / "s").rglob(".kalmix-partial*"))


def test_finished_shards_are_not_made_again(corpus: Path, prepared: tuple[Path, Manifest]) -> None:
    folder, manifest = prepared
    settings = Preparation(str(corpus), vocab_size=300, held_out=0.1, shard_tokens=2000)
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}
    assert prepare(settings, folder) == manifest
    assert before == {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}
    with pytest.raises(ArgumentError, match="holds finished shards with another vocab_size and held_out; expected a"):
        prepare(Preparation(str(corpus), vocab_size=301, shard_tokens=2000), folder)


def test_damaged_documents_stop_it_or_are_counted(tmp_path: Path) -> None:
    lines = [json.dumps({"text": text}) for text in texts(30)]
    (tmp_path / "a.jsonl").write_text("\n".join([*lines, "{oops", *lines[:3], '{"text": 3}', '{"text": "  "}']))
    settings = {"source": str(tmp_path / "a.jsonl"), "vocab_size": 260, "held_out": 0.0}
    with pytest.raises(ArgumentError, match=r"`source` holds '.*a.jsonl', whose line 31 is not JSON .*--skip-damaged"):
        prepare(Preparation(**settings), tmp_path / "s")
    manifest = prepare(Preparation(**settings, skip_damaged=True), tmp_path / "s")
    assert manifest.skipped == 2
    assert read_documents(tmp_path / "s", manifest, "train") == texts(30) + texts(30)[:3]


def test_shards_inside_the_source_are_not_part_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_corpus(tmp_path / "c", texts(5))
    monkeypatch.chdir(tmp_path / "c")
    settings = Preparation(".", vocab_size=260, held_out=0)
    assert prepare(settings, "shards") == prepare(settings, tmp_path / "c" / "shards")


def test_a_changed_source_is_noticed(tmp_path: Path) -> None:
    source = write_corpus(tmp_path / "c", texts(5))
    prepare(Preparation(str(source), vocab_size=260), tmp_path / "s")
    (source / "0001.txt").write_text("other")
    with pytest.raises(ArgumentError, match="holds finished shards of the source before it changed"):
        prepare(Preparation(str(source), vocab_size=260), tmp_path / "s")


def test_a_changed_tokenizer_is_noticed(corpus: Path, tmp_path: Path) -> None:
    settings = Preparation(str(corpus), str(tmp_path / "t"), held_out=0)
    for size in (257, 258):
        wrap_tokenizer(train_tokenizer(texts(9), vocab_size=size)).save_pretrained(tmp_path / "t")
        if size == 257:
            manifest = prepare(settings, tmp_path / "s")
            for unused in (settings.vocab_size, 300):  # it is for training a tokenizer
                assert prepare(replace(settings, vocab_size=unused), tmp_path / "s") == manifest
    with pytest.raises(ArgumentError, match=r"holds finished shards with another tokenizer\.json; expected"):
        prepare(settings, tmp_path / "s")


def test_shards_that_do_not_state_their_settings_are_refused(corpus: Path, tmp_path: Path) -> None:
    """Except for the hash of the tokenizer, which earlier versions did not store."""
    settings = Preparation(str(corpus), vocab_size=260)
    manifest = prepare(settings, tmp_path / "s")
    path = tmp_path / "s" / MANIFEST
    stored = json.loads(path.read_text())
    del stored["settings"]["tokenizer.json"]
    path.write_text(json.dumps(stored))
    assert prepare(settings, tmp_path / "s").shards == manifest.shards
    path.write_text(json.dumps(stored | {"settings": {}}))
    with pytest.raises(ArgumentError, match="holds finished shards with another source"):
        prepare(settings, tmp_path / "s")


def tokenizer_folder(content: str | None) -> Callable[[Path], object]:
    def make(path: Path) -> None:
        path.mkdir()
        if content is not None:
            (path / "tokenizer.json").write_text(content)

    return make


def no_first_token(path: Path) -> None:
    path.mkdir()
    train_tokenizer(["a"], vocab_size=257).save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')


def coded(path: Path) -> None:
    tokenizer_folder("{}")(path)
    config = {"auto_map": {"AutoTokenizer": ["code.T", "code.T"]}, "tokenizer_class": "T"}
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    (path / "code.py").write_text("import pathlib; pathlib.Path(__file__).with_name('ATTACKED').touch()\n")


MISTAKES = {
    # what makes the path, arguments with {path}, message
    "missing": (None, "{path}", "`source` is '{path}', which does not exist; expected a folder or file of text"),
    "fifo": (os.mkfifo, "{path}", "`source` is '{path}', which is not a regular file"),
    "link": (lambda path: path.symlink_to(path), "{path}", "`source` is '{path}', which is not a regular file"),
    "empty folder": (Path.mkdir, "{path}", "`source` is '{path}', which contains no text files"),
    "empty file": (Path.touch, "{path}", "`source` is '{path}', which contains no text; expected"),
    "dataset": (Path.mkdir, "hf:{path}", "`source` is 'hf:{path}', which `datasets` cannot load ("),
    "tokenizer missing": (None, "{text} --tokenizer {path}", "`tokenizer` is '{path}', which cannot be loaded ("),
    "tokenizer empty": (tokenizer_folder(None), "{text} --tokenizer {path}", "tokenizer.json is missing"),
    "tokenizer damaged": (tokenizer_folder("{"), "{text} --tokenizer {path}", "`tokenizer` is '{path}', which cannot"),
    "tokenizer is a file": (Path.touch, "{text} --tokenizer {path}", "`tokenizer` is '{path}', which cannot be loaded"),
    "tokenizer with code": (coded, "{text} --tokenizer {path}", "`tokenizer` is '{path}', which cannot be loaded"),
    "no first token": (no_first_token, "{text} --tokenizer {path}", "`bos` is missing, and the tokenizer has no token"),
    "unknown first token": (None, "{text} --vocab-size 260 --bos <s>", "`bos` is '<s>', which the tokenizer lacks"),
    "small vocabulary": (None, "{text} --vocab-size 256", "`vocab_size` is 256; expected at least 257"),
    "held out": (None, "{text} --held-out 1", "`held_out` is 1.0; expected a fraction of at least 0 and below 1"),
    "workers": (None, "{text} --workers -1", "`workers` is -1; expected a positive integer"),
    "no workers": (None, "{text} --workers 0", "`workers` is 0; expected a positive integer"),
    "empty name": (None, "hf:", "`source` is 'hf:' without a name; expected a folder or file"),
    "empty source": (None, "--column a =", "`source` is empty"),
    "empty output": (None, "{text} --output=", "`output` is empty"),
    "output is a file": (Path.touch, "{text} --output {path}", "`output` is '{path}', which is a file"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_one_error_line(name: str, kalmix, corpus: Path, tmp_path: Path, in_time: None) -> None:
    make, line, message = MISTAKES[name]
    path = tmp_path / "thing"
    if make is not None:
        make(path)
    arguments = [x.format(path=path, text=corpus) if x != "=" else "" for x in line.split()]
    output = [] if "--output" in line else ["--output", tmp_path / "s"]
    result = kalmix("data", "prepare", *arguments, *output)
    assert result.status == 2, result.errors
    errors = [x for x in result.errors.splitlines() if x.startswith("error: ")]
    assert len(errors) == 1 and message.format(path=path) in errors[0] and "Traceback" not in result.errors
    assert not list(tmp_path.rglob("ATTACKED")) and not list((tmp_path / "s").glob("*.ds*"))


def test_command_prints_the_counts(kalmix, corpus: Path, tmp_path: Path) -> None:
    folder = tmp_path / "[s]"
    line = ("data", "prepare", corpus, "--output", folder, "--vocab-size", 300, "--workers", 1)
    result = kalmix(*line, "--licence", "MIT", "--licence", "CC0-1.0")
    assert result.status == 0, result.errors
    manifest = Manifest.load(folder)
    assert f"{folder}: {len(manifest.shards)} shards" in result.output
    assert manifest.licences == ("MIT", "CC0-1.0")
    assert f"train: {manifest.count('train', 'documents'):,} documents" in result.output
    assert "warning" not in result.output


def test_command_warns_if_no_document_is_left_to_train_on(kalmix, tmp_path: Path) -> None:
    source = write_corpus(tmp_path / "c", texts(2))
    line = ("--vocab-size", 260, "--held-out", 0.999999, "--workers", 1, "--output", tmp_path / "s")
    result = kalmix("data", "prepare", source, *line)
    assert result.status == 0 and "warning: all documents are held out" in result.output, result.errors
    assert "training the tokenizer" in result.output and "tokenizing" in result.output


@pytest.mark.slow
def test_an_error_of_a_worker_is_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kalmix.training.shards.parts._SMALLEST", 500)
    source = write_corpus(tmp_path / "c", texts(40))
    (source / "0020.txt").write_bytes(b"\xff")
    with pytest.raises(ArgumentError, match=r"0020.txt', which is not UTF-8"):
        prepare(Preparation(str(source), vocab_size=260), tmp_path / "s", workers=2)
