"""Sources of shards: failures of disks and networks, `.json` files, wrong columns and options of datasets."""

from __future__ import annotations

import errno
import gzip
import io
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import pytest
from transformers import Trainer, TrainingArguments

from kalmix import ArgumentError
from kalmix.models import KalmixConfig, KalmixForCausalLM
from kalmix.training.corpus import train_tokenizer
from kalmix.training.data import wrap_tokenizer
from kalmix.training.shards import (
    DatasetOptions,
    Order,
    Preparation,
    TokenLoader,
    columns,
    dataset_source,
    documents,
    json_values,
    parts,
    prepare,
    sources,
    tokenize_part,
)
from kalmix.training.shards.documents import FileSlice, file_kind, read_slice, row_groups
from kalmix.training.shards.manifest import MANIFEST, Manifest

from .conftest import shard_files, texts
from .test_preparation import read_documents

GOOD = b'{"text": "good"}\n'


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("tokenizer")
    wrap_tokenizer(train_tokenizer(texts(50), vocab_size=300)).save_pretrained(folder)
    return str(folder)


class Stream:
    """Streamed dataset with one shard, whose connection fails after `fails` rows unless that is `None`."""

    num_shards = 1
    fails: int | None = None

    def shard(self, num_shards: int, index: int) -> Iterator[dict[str, Any]]:
        for number, text in enumerate(texts(100)):
            if number == self.fails:
                raise ConnectionError("the peer\nhas gone")
            yield {"text": text if number != 5 else 5}


def test_a_failing_stream_stops_the_preparation_and_can_be_continued(
    tokenizer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = Stream()
    monkeypatch.setattr(dataset_source, "_load", lambda source: stream)
    monkeypatch.setattr(tokenize_part, "_BATCH_DOCUMENTS", 16)
    options = DatasetOptions(stream=True)
    for given in ({"tokenizer": tokenizer}, {"vocab_size": 270}):
        settings = Preparation("hf:a", shard_tokens=500, skip_damaged=True, dataset=options, **given)
        folders = [tmp_path / f"{name}-{len(given)}-{next(iter(given))}" for name in ("whole", "parts")]
        stream.fails = None
        assert prepare(settings, folders[0]).skipped == 1  # row 5
        stream.fails = 60
        message = r"`datasets` failed to read 'hf:a' after row 59 of shard 0 \(the peer\); repeat the command"
        with pytest.raises(OSError, match=message) as raised:
            prepare(settings, folders[1])
        assert "skip" not in str(raised.value) and not (folders[1] / MANIFEST).exists()
        assert any(folders[1].glob("*.ds")) == ("tokenizer" in given)  # else it failed in training the tokenizer
        stream.fails = None
        prepare(settings, folders[1])
        assert shard_files(folders[1]) == shard_files(folders[0])


def test_a_failing_stream_is_one_error_line(
    kalmix, tokenizer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = Stream()
    stream.fails = 0
    monkeypatch.setattr(dataset_source, "_load", lambda source: stream)
    line = ("--stream", "--skip-damaged", "--tokenizer", tokenizer, "--workers", 1, "--output", tmp_path / "s")
    result = kalmix("data", "prepare", "hf:a", *line)
    errors = [x for x in result.errors.splitlines() if x.startswith("error: ")]
    assert result.status == 1 and len(errors) == 1
    assert "failed to read 'hf:a' before row 0 of shard 0 (the peer); repeat the command" in errors[0]


def test_a_failing_disk_is_not_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.jsonl").write_bytes(GOOD)
    part = FileSlice(str(tmp_path / "a.jsonl"), "jsonl", 0, len(GOOD))

    codes = [errno.EIO, errno.ETIMEDOUT, errno.EACCES]

    def fail(path: str) -> Any:
        raise OSError(codes.pop(0), "no luck")

    monkeypatch.setattr(documents, "_open", fail)
    for _ in range(2):
        with pytest.raises(OSError, match=r"a.jsonl' cannot be read \(no luck\); repeat the command"):
            list(read_slice(part, "text"))
    assert [x.damage for x in read_slice(part, "text")] == ["which cannot be read (no luck)"]
    with pytest.raises(OSError, match="cannot be read"):
        row_groups(str(tmp_path / "missing.parquet"))


JSON = {
    # content, documents, clause of the damage
    "lines": (b"\xef\xbb\xbf\n  \n" + GOOD * 2, 2, None),
    "one line": (GOOD.strip(), 1, None),
    "empty": (b"", 0, None),
    "array": (b'\xef\xbb\xbf \n [{"text": "good"},\n{"a": [1], "text": "good"}\n]\n ', 2, None),
    "empty array": (b"[ ]", 0, None),
    "object": (b'{\n "text": "good"\n}\n', 1, None),
    "array without the column": (b'[{"body": "a"}]', 0, "whose object 1 lacks the column 'text'; it has 'body'"),
    "array of several kinds": (b'[{"text": "good"}, 5]', 1, "whose object 2 has the type int in place of an object"),
    "array that is cut": (b'[{"text": "good"}, {"text": "go', 1, "where value 2 is not JSON (Unterminated string"),
    "array without an end": (b'[{"text": "good"}', 1, "where value 2 is not JSON (no ',' or ']' before it)"),
    "array and more": (b'[{"text": "good"}] 5', 1, "where value 2 is not JSON (it follows the end)"),
    "array in Latin-1": (b'[{"text": "\xe9"}]', 0, "where value 1 is not UTF-8"),
    "array nested deep": (b"[" * 99999, 0, "where value 1 is not JSON (nested too deep)"),
    "object and more": (GOOD.replace(b":", b":\n") * 2, 1, "where value 2 is not JSON (it follows the end)"),
    "damaged line": (b'{"text": "a\n' + GOOD, 1, "whose line 1 is not JSON"),
    "end is missing": (b'{"text": ', 0, "whose line 1 is not JSON"),
    "text": (b"words\n", 0, "whose line 1 is not JSON"),
}
LEFT_OUT = {
    "package.json": (b'{\n "name": "a",\n "version": "1"\n}\n', "one JSON object without a text in the column 'text'"),
    "one line": (b'{"name": "a"}', "one JSON object without a text in the column 'text'"),
    "another type": (b'{"version": 2,\n "text": ["a"]}\n', "one JSON object without a text in the column 'text'"),
    "numbers": (b"[1, 2]", "a JSON array without objects"),
}


def read_json_file(path: Path, content: bytes, pack: Any) -> list[documents.Document]:
    path.write_bytes(pack(content) if pack else content)
    assert file_kind(path.name) == "json"
    return list(read_slice(FileSlice(str(path), "json", 0, path.stat().st_size), "text"))


@pytest.mark.parametrize("pack", [None, gzip.compress])
@pytest.mark.parametrize("case", JSON)
def test_json_files_are_json_lines_an_array_or_an_object(case: str, pack: Any, tmp_path: Path) -> None:
    content, count, clause = JSON[case]
    found = read_json_file(tmp_path / ("a.json.gz" if pack else "A.JSON"), content, pack)
    assert [x.text for x in found if x.damage is None] == ["good"] * count
    damage = [x for x in found if x.damage is not None]
    assert len(damage) == (clause is not None) and not any(x.left_out for x in found)
    if clause is not None:
        assert clause in damage[0].damage and ("`--column`" in damage[0].hint) == ("lacks the column" in clause)


@pytest.mark.parametrize("case", LEFT_OUT)
def test_json_files_without_text_are_left_out(case: str, tmp_path: Path) -> None:
    content, clause = LEFT_OUT[case]
    (found,) = read_json_file(tmp_path / "a.json", content, None)
    assert found.left_out and found.damage == f"which is {clause}"
    (tmp_path / "b.jsonl").write_bytes(GOOD)
    settings = Preparation(str(tmp_path), vocab_size=260, held_out=0)
    manifest = prepare(settings, tmp_path / "s")
    assert (manifest.skipped, manifest.count("train", "documents")) == (1, 1)
    with pytest.raises(ArgumentError, match=r"contains no text \(1 left out\); .*`--column` names the column"):
        prepare(Preparation(str(tmp_path / "a.json"), vocab_size=260), tmp_path / "t")


@pytest.mark.parametrize("piece", [1, 7, 1000])
def test_values_of_an_array_do_not_depend_on_the_pieces(piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_values, "_PIECE", piece)
    values = [{"text": text, "n": [n, -1.5e3, None, True]} for n, text in enumerate(texts(20))] + [12345, "a\n\u00e9"]
    for indent in (None, 1):
        assert list(json_values.json_values(io.StringIO(json.dumps(values, indent=indent)))) == values
    assert list(json_values.json_values(io.StringIO(" 12345 "))) == [12345]


def test_json_lines_are_read_in_ranges_and_lists_of_licences_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts, "_SMALLEST", 500)
    (tmp_path / "c").mkdir()
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts(100))
    (tmp_path / "c" / "a.json").write_text(lines)
    (tmp_path / "c" / "licences.json").write_text('[{"licence": "MIT"}]')
    manifest = prepare(Preparation(str(tmp_path / "c"), vocab_size=260, held_out=0), tmp_path / "s")
    assert len(manifest.shards) > 5
    assert read_documents(tmp_path / "s", manifest, "train") == texts(100)


def test_a_json_array_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "_SMALLEST", 500)
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "a.json").write_text(json.dumps([{"text": text} for text in texts(100)], indent=1))
    (tmp_path / "c" / "b.json").write_text(json.dumps([{"text": "b"}, {"body": "c"}]))
    settings = {"source": str(tmp_path / "c"), "vocab_size": 260, "held_out": 0.0}
    with pytest.raises(ArgumentError, match=r"b.json', whose object 2 lacks the column 'text'.*--skip-damaged"):
        prepare(Preparation(**settings), tmp_path / "s")
    manifest = prepare(Preparation(**settings, skip_damaged=True), tmp_path / "s")
    assert manifest.skipped == 1
    assert read_documents(tmp_path / "s", manifest, "train") == [*texts(100), "b"]


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
@pytest.mark.parametrize("trained", [False, True])
def test_a_wrong_column_names_the_columns_and_does_not_block_another(
    kind: str, trained: bool, kalmix, tokenizer: str, tmp_path: Path
) -> None:
    dataset = datasets.Dataset.from_dict({"body": texts(30), "id": list(range(30))})
    source = tmp_path / f"other.{kind}"
    dataset.to_json(source) if kind == "jsonl" else dataset.to_parquet(source)
    given = ("--vocab-size", 260) if trained else ("--tokenizer", tokenizer)
    line = ("data", "prepare", source, "--output", tmp_path / "s", "--workers", 1, *given)
    result = kalmix(*line)
    (error,) = (x for x in result.errors.splitlines() if x.startswith("error: "))
    assert result.status == 2 and "lacks the column 'text'; it has 'body', 'id'" in error
    assert "`column` (`--column`) names the column" in error and "skip" not in error
    result = kalmix(*line, "--column", "title", "--skip-damaged")
    assert result.status == 2 and "contains no text" in result.errors and "`--column`" in result.errors
    result = kalmix(*line, "--column", "body", "--held-out", 0)
    assert result.status == 0, result.errors
    assert read_documents(tmp_path / "s", Manifest.load(tmp_path / "s"), "train") == texts(30)


@pytest.fixture(scope="session")
def nested(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a dataset of nested rows, one of which has no object, in several formats."""
    folder = tmp_path_factory.mktemp("nested")
    rows: list[dict[str, Any]] = [{"id": n, "meta": {"text": str(n), "in": {"a.b": f"-{n}"}}} for n in range(3)]
    dataset = datasets.Dataset.from_list([*rows, {"id": 3, "meta": None}])
    dataset.to_json(folder / "a.jsonl")
    dataset.to_parquet(folder / "a.parquet")
    dataset.save_to_disk(folder / "a")
    features = datasets.Features({"translation": datasets.Translation(["en", "de"])})
    datasets.Dataset.from_list([{"translation": {"en": "one", "de": "eins"}}], features).save_to_disk(folder / "pairs")
    (folder / "a.json").write_text(json.dumps(rows[0] | {"end": "\n"}, indent=1))
    return folder


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet", "a.json", "hf:a", "stream"])
def test_a_dot_selects_a_field_of_an_object(
    name: str, nested: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(nested)
    options = DatasetOptions(stream=name == "stream")

    def read(column: str) -> list[documents.Document]:
        path = "hf:a" if name == "stream" else name
        source = sources.open_source([path], column, exclude=tmp_path, dataset=options)
        return [document for part in source.parts() for _, document in source.read(part)]

    count = 1 if name == "a.json" else 3
    nothing = [""] * (count > 1)  # a row whose object is null is an empty document
    for column, sign in (("meta.text", ""), ("meta.in.a.b", "-")):
        assert [x.text for x in read(column)] == [f"{sign}{n}" for n in range(count)] + nothing
    if name == "a.json":
        assert read("meta.body")[0].left_out  # as any object without a text
        return
    message = "holds an object with 'text', 'in.a.b' in place of a text"
    assert message in str(read("meta")[0].damage)
    for column in ("text", "meta.body", "meta.text.more"):
        try:
            message = str(read(column)[0].damage)
        except ArgumentError as error:
            message = str(error)
        assert "'id', 'meta.text', 'meta.in.a.b'" in message


@pytest.mark.parametrize("stream", [False, True])
def test_a_translation_is_an_object(stream: bool, nested: Path, tmp_path: Path) -> None:
    options = DatasetOptions(stream=stream)
    source = sources.open_source([f"hf:{nested / 'pairs'}"], "translation.de", exclude=tmp_path, dataset=options)
    assert [document.text for part in source.parts() for _, document in source.read(part)] == ["eins"]


def test_an_object_that_is_null_hides_no_other_column() -> None:
    assert columns.read_column({"a": None, "a.b": {"c": "text"}}, "a.b.c") == "text"
    assert columns.read_column({"a": None}, "a.b.c") is None


def test_a_column_whose_name_has_a_dot_is_preferred(tmp_path: Path) -> None:
    row = {"a": {"b": "nested"}, "a.b": "flat"}
    datasets.Dataset.from_list([row]).to_parquet(tmp_path / "a.parquet")
    (tmp_path / "a.jsonl").write_text(json.dumps(row))
    for kind, stop in (("parquet", 1), ("jsonl", 99)):
        found = read_slice(FileSlice(str(tmp_path / f"a.{kind}"), kind, 0, stop), "a.b")  # type: ignore[arg-type]
        assert [x.text for x in found] == ["flat"]


def test_names_of_a_deep_row_are_cut(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"a":' * 400 + "1" + "}" * 400)
    (found,) = read_slice(FileSlice(str(tmp_path / "a.jsonl"), "jsonl", 0, 1), "text")
    assert found.damage == "whose line 1 lacks the column 'text'; it has 'a.a.a.a'"


def test_a_row_without_the_column_among_others_is_damage(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(GOOD + b'{"body": "a"}\n')
    with pytest.raises(ArgumentError, match=r"whose line 2 lacks the column 'text'; it has 'body'.*--skip-damaged"):
        prepare(Preparation(str(tmp_path / "a.jsonl"), vocab_size=260), tmp_path / "s")


def test_options_of_datasets_choose_files(kalmix, tmp_path: Path) -> None:
    for folder in ("a", "b"):
        (tmp_path / "d" / folder).mkdir(parents=True)
        for number in range(2):
            rows = [f"{text} of {folder}{number}" for text in texts(20)]
            datasets.Dataset.from_dict({"text": rows}).to_parquet(tmp_path / "d" / folder / f"{number}.parquet")
    line = ("data", "prepare", f"hf:{tmp_path / 'd'}", "--vocab-size", 260, "--held-out", 0, "--workers", 1)
    cases = {
        "data-dir": (("--data-dir", "b"), {"b0", "b1"}),
        "data-files": (("--data-files", "a/0.parquet", "--data-files", "b/1.*"), {"a0", "b1"}),
    }
    for name, (options, files) in cases.items():
        result = kalmix(*line, *options, "--output", tmp_path / name)
        assert result.status == 0, result.errors
        manifest = Manifest.load(tmp_path / name)
        found = {text.split(" of ")[1] for text in read_documents(tmp_path / name, manifest, "train")}
        assert found == files
        assert manifest.settings["dataset"].keys() == {"config", "split", "stream", name.replace("-", "_")}


def test_the_revision_of_a_dataset_is_passed_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def load_dataset(*given: Any, **options: Any) -> Any:
        assert given == ("a/b", None) and options == {"split": "train", "streaming": False, "revision": "v1"}
        return datasets.Dataset.from_dict({"text": texts(20)})

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    manifest = prepare(Preparation("hf:a/b", vocab_size=260, dataset=DatasetOptions(revision="v1")), tmp_path / "s")
    assert manifest.settings["dataset"]["revision"] == "v1"
    with pytest.raises(ArgumentError, match=r"`data_files` is 'a\.parquet'; expected a tuple"):
        Preparation("hf:a/b", dataset=DatasetOptions(data_files="a.parquet"))  # type: ignore[arg-type]


def test_a_saved_dataset_has_the_split_that_is_named(tmp_path: Path) -> None:
    one, two = (datasets.Dataset.from_dict({"text": [text]}) for text in ("one", "two"))
    datasets.DatasetDict({"train": one, "test": two}).save_to_disk(tmp_path / "both")
    two.save_to_disk(tmp_path / "alone")
    datasets.Dataset.from_dict({"text": ["named"]}, split="test").save_to_disk(tmp_path / "named")

    def read(name: str, split: str, config: str | None = None, stream: bool = False) -> list[str]:
        options = DatasetOptions(config, split, stream)
        source = sources.open_source([f"hf:{tmp_path / name}"], "text", exclude=tmp_path / "s", dataset=options)
        return [document.text for part in source.parts() for _, document in source.read(part)]

    for stream in (False, True):
        assert read("both", "train", stream=stream) == ["one"]
        assert read("both", "test", stream=stream) == read("alone", "train", stream=stream) == ["two"]
        assert read("named", "train", stream=stream) == read("named", "test", stream=stream) == ["named"]
    wrong = [("both", "'train' or 'test'"), ("alone", "'train'"), ("named", "'test'")]
    for name, expected in wrong:
        with pytest.raises(
            ArgumentError, match=rf"`split` is 'valid', which 'hf:.*{name}' lacks.*; expected {expected}"
        ):
            read(name, "valid")
    (tmp_path / "both" / "dataset_dict.json").write_text('{"splits": 5}')
    with pytest.raises(ArgumentError, match=r"`source` is 'hf:.*both', which `datasets` cannot load"):
        read("both", "train")
    with pytest.raises(ArgumentError, match=r"`config` is 'en', which 'hf:.*both' lacks.*; expected no configuration"):
        read("both", "train", "en")


def test_the_snippet_for_the_trainer_starts_and_resumes(
    prepared: tuple[Path, Manifest], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (Path(__file__).parents[3] / "docs" / "data.md").read_text()
    (snippet,) = re.findall(r"```python no-run\n(from kalmix.training.shards.trainer_position.*?)```", page, re.DOTALL)
    monkeypatch.chdir(tmp_path)
    for steps in (1, 2):
        model = KalmixForCausalLM(KalmixConfig(vocab_size=300, hidden_size=8, layers=["deltanet"]))
        loader = TokenLoader(prepared[0], Order(64), batch_size=2)
        short = snippet.replace("max_steps=1000", f"max_steps={steps}, save_steps=1, use_cpu=True, report_to='none'")
        scope = {"model": model, "loader": loader}
        exec(short, scope)
        trainer = scope["trainer"]
        assert isinstance(trainer, Trainer) and isinstance(trainer.args, TrainingArguments)
        assert trainer.state.global_step == steps
    assert (tmp_path / "runs" / "mine" / "checkpoint-2").is_dir()
