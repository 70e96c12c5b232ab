"""Several sources in one preparation: order, one manifest, licences, resuming, copies and one-line errors."""

from __future__ import annotations

import json
import os
from pathlib import Path

import datasets
import pytest

from kalmix import ArgumentError
from kalmix.training.shards import (
    DatasetOptions,
    Manifest,
    Preparation,
    Shards,
    prepare,
    sources,
    token_limit,
    tokenize_part,
)

from .conftest import shard_files, texts, write_corpus
from .test_preparation import Killed, read_documents


@pytest.fixture
def mixed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[tuple[str, ...], list[str]]:
    """Return several sources in the current folder, in small parts, and their documents in order."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("kalmix.training.shards.parts._SMALLEST", 1000)
    documents = texts(100)
    Path("a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in documents[:30]))
    write_corpus(Path("b", "texts"), documents[30:50])
    for number in range(2):
        rows = documents[50 + 10 * number : 60 + 10 * number]
        datasets.Dataset.from_dict({"text": rows}).to_parquet(f"b/{number}.parquet")
    (tmp_path / "d").mkdir()
    datasets.Dataset.from_dict({"text": documents[70:90]}).to_parquet("d/train.parquet")
    Path("e.txt").write_text(documents[90])
    return ("a.jsonl", "b/texts", str(tmp_path / "b/*.parquet"), "hf:d", "e.txt"), documents[:91]


def test_sources_are_read_in_order_into_one_manifest(mixed: tuple[tuple[str, ...], list[str]], tmp_path: Path) -> None:
    sources, documents = mixed
    licences = {name: (f"licence of {name}", "MIT") for name in sources}
    settings = Preparation(sources, vocab_size=300, held_out=0, licences=licences)
    manifest = prepare(settings, tmp_path / "s")
    assert read_documents(tmp_path / "s", manifest, "train") == documents
    assert manifest.source == sources and manifest.licences == licences
    assert manifest == Manifest.load(tmp_path / "s") == prepare(settings, tmp_path / "s")
    Shards(tmp_path / "s").verify()
    with pytest.raises(ArgumentError, match="holds finished shards with another source"):
        prepare(Preparation(sources[::-1], vocab_size=300, held_out=0), tmp_path / "s")
    Path("b/2.parquet").write_bytes(Path("b/1.parquet").read_bytes())  # matches the pattern, too
    with pytest.raises(ArgumentError, match="holds finished shards of the source before it changed"):
        prepare(settings, tmp_path / "s")


def test_a_tuple_of_one_source_is_that_source(corpus: Path, tmp_path: Path) -> None:
    manifest = prepare(Preparation((str(corpus),), vocab_size=300), tmp_path / "s")
    assert prepare(Preparation(str(corpus), vocab_size=300), tmp_path / "s") == manifest
    assert manifest.source == manifest.settings["source"] == str(corpus)


def test_an_interrupted_preparation_of_several_sources_continues(
    mixed: tuple[tuple[str, ...], list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = Preparation(mixed[0], vocab_size=300, held_out=0.1, shard_tokens=500)
    prepare(settings, tmp_path / "whole")
    write, count = tokenize_part.write_text, 0

    def stop(path: Path, text: str) -> None:
        nonlocal count
        count += 1
        if count in (3, 6):
            raise Killed
        write(path, text)

    monkeypatch.setattr(tokenize_part, "write_text", stop)
    for _ in range(2):
        with pytest.raises(Killed):
            prepare(settings, tmp_path / "parts")
    prepare(settings, tmp_path / "parts")
    assert shard_files(tmp_path / "parts") == shard_files(tmp_path / "whole")


@pytest.mark.slow
def test_the_number_of_workers_does_not_change_the_shards(
    mixed: tuple[tuple[str, ...], list[str]], tmp_path: Path
) -> None:
    settings = Preparation(mixed[0], vocab_size=300, held_out=0.1, dataset=DatasetOptions(stream=True))
    for workers in (1, 2):
        prepare(settings, tmp_path / f"{workers}", workers=workers)
    assert shard_files(tmp_path / "1") == shard_files(tmp_path / "2")


def test_copies_in_several_sources_are_kept_on_one_side(tmp_path: Path) -> None:
    documents = texts(60)
    sources = tuple(str(write_corpus(tmp_path / name, documents)) for name in "ab")
    manifest = prepare(Preparation(sources, vocab_size=260, held_out=0.2), tmp_path / "s")
    train, held_out = (read_documents(tmp_path / "s", manifest, split) for split in ("train", "held_out"))
    assert sorted(train + held_out) == sorted(2 * documents)
    assert not set(train) & set(held_out) and held_out


def test_a_limit_counts_tokens_of_all_sources(
    mixed: tuple[tuple[str, ...], list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(token_limit, "_SMALLEST_SHARE", 100)
    settings = Preparation(mixed[0], vocab_size=300, held_out=0, max_tokens=10**9)
    assert read_documents(tmp_path / "all", prepare(settings, tmp_path / "all"), "train") == mixed[1]
    manifest = prepare(Preparation(mixed[0], vocab_size=300, held_out=0, max_tokens=2000), tmp_path / "s")
    assert 2000 <= manifest.count("train", "tokens") < 2000 + 20 * 400
    assert len({shard.file.split("-")[1] for shard in manifest.shards}) > 2


def test_patterns_leave_out_the_output_and_what_is_inside_another_match(
    mixed: tuple[tuple[str, ...], list[str]], tmp_path: Path
) -> None:
    Path("b/texts/more.bin").write_bytes(b"\0")  # no format that is read from a folder
    manifest = prepare(Preparation("b/**", vocab_size=300, held_out=0), "b/shards")
    assert sorted(read_documents(Path("b/shards"), manifest, "train")) == sorted(mixed[1][30:70])
    assert prepare(Preparation("b/**", vocab_size=300, held_out=0), "b/shards") == manifest


@pytest.mark.parametrize("source", ["b", "b/*"])
@pytest.mark.parametrize("output", ["b/shards", "c/../b/shards", "linked/shards"])
def test_an_output_inside_the_source_is_left_out_by_any_path(
    source: str, output: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("b").mkdir()
    Path("c").mkdir()
    Path("linked").symlink_to("b")
    for n in range(3):
        Path(f"b/{n}.txt").write_text(f"document {n}")
    for _ in range(2):  # the second call finds the files of the first
        manifest = prepare(Preparation(source, vocab_size=257, held_out=0), output)
        assert manifest.count("train", "documents") == 3


@pytest.mark.parametrize("source", ["b", "b/*.txt", "b/c", "[b]"])
@pytest.mark.parametrize("output", [".", "b"])
def test_an_output_that_holds_the_source_is_refused(
    source: str, output: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_corpus(Path("b/c"), ["a document"])
    Path("b/a.txt").write_text("another")
    message = (
        rf"`output` is '{(tmp_path / output).resolve()}', which holds the source '.*b.*'; expected a folder without"
    )
    with pytest.raises(ArgumentError, match=message):
        prepare(Preparation(source, vocab_size=257), output)


def test_a_pattern_that_also_matches_the_output_is_not_refused_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_corpus(Path("shards"), ["a document"])
    Path("image.png").write_bytes(b"PNG")
    with pytest.raises(ArgumentError, match=r"'\*', which matches no text files"):
        prepare(Preparation("*", vocab_size=257), "shards")


def test_a_pattern_takes_the_formats_of_a_folder(tmp_path: Path) -> None:
    folder = write_corpus(tmp_path / "b", texts(30))
    (folder / "licences.json").write_text('[{"licence": "MIT"}]')
    (folder / "image.png").write_bytes(b"\x89PNG")
    os.mkfifo(folder / "pipe.txt")
    (folder / "link.txt").symlink_to("missing")
    write_corpus(folder / "empty", [])
    write_corpus(folder / "images", [])
    (folder / "images" / "image.png").write_bytes(b"\x89PNG")
    write_corpus(folder / "more", texts(5, seed=1))
    for number, source in enumerate((folder, folder / "*")):
        manifest = prepare(Preparation(str(source), vocab_size=260, held_out=0), tmp_path / f"{number}")
        assert read_documents(tmp_path / f"{number}", manifest, "train") == texts(30) + texts(5, seed=1)
    for pattern in ("*.png", "lic*.json", "e*", "im*/", "pipe*"):
        with pytest.raises(ArgumentError, match=r"which matches no text files; expected a folder or file of text"):
            prepare(Preparation(str(folder / pattern), vocab_size=260), tmp_path / "s")


def test_a_file_named_without_a_pattern_needs_no_known_format(tmp_path: Path) -> None:
    (tmp_path / "words").write_text("some words")
    manifest = prepare(Preparation(str(tmp_path / "words"), vocab_size=260, held_out=0), tmp_path / "s")
    assert read_documents(tmp_path / "s", manifest, "train") == ["some words"]


def test_command_takes_several_sources(kalmix, mixed: tuple[tuple[str, ...], list[str]]) -> None:
    line = ("data", "prepare", *mixed[0], "--output", "s", "--vocab-size", 300, "--held-out", 0, "--workers", 1)
    result = kalmix(*line, "--licence", "MIT", "--licence", "b/texts=CC0-1.0")
    assert result.status == 0, result.errors
    assert "reading a.jsonl, b/texts, " in result.output and "hf:d and 1 more" in result.output
    manifest = Manifest.load(Path("s"))
    assert manifest.licences == {name: ("MIT", "CC0-1.0") if name == "b/texts" else ("MIT",) for name in mixed[0]}
    assert kalmix(*line, "--licence", "MIT", "--licence", "b/texts=CC0-1.0").status == 0


URL = "https://spdx.org/?id=MIT&v=3"


@pytest.mark.parametrize(
    ("sources", "given", "licences"),
    [
        ("year=24.txt", [URL, "MIT"], (URL, "MIT")),
        ("year=24.txt", [f"year=24.txt={URL}"], {"year=24.txt": (URL,)}),
        ("year=24.txt year", [URL, "MIT"], (URL, "MIT")),
        ("year=24.txt year", ["year=MIT", f"year=24.txt={URL}"], {"year=24.txt": (URL,), "year": ("MIT",)}),
    ],
)
def test_licences_and_sources_may_hold_an_equals_sign(
    sources: str, given: list[str], licences: object, kalmix, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for source in sources.split():
        Path(source).write_text(source)
    options = [x for licence in given for x in ("--licence", licence)]
    line = ("data", "prepare", *sources.split(), "--output", "s", "--vocab-size", 260, "--held-out", 0, "--workers", 1)
    result = kalmix(*line, *options)
    assert result.status == 0, result.errors
    assert Manifest.load(Path("s")).licences == licences


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("a.jsonl a.jsonl", "`source` names '{path}/a.jsonl' twice; expected each file and dataset once"),
        ("b/texts b/texts/0000.txt", "`source` names '{path}/b/texts/0000.txt' twice"),
        ("b/texts b/../b/texts/0000.txt", "`source` names '{path}/b/texts/0000.txt' twice"),
        ("e.txt link.txt", "`source` names '{path}/e.txt' twice"),
        ("link.txt ../*/e.txt", "`source` names '{path}/e.txt' twice"),
        ("e.txt hf:d linked", "`source` names '{path}/e.txt' twice"),
        ("hf:d a.jsonl hf:d", "`source` names 'hf:d' twice"),
        ("a.jsonl c/*.jsonl", "`source` is 'c/*.jsonl', which matches no file"),
        ("a.jsonl nothing", "`source` is 'nothing', which does not exist"),
        ("e.txt --licence e.tx=MIT", "`licence` is 'e.tx=MIT'; expected LICENCE, or SOURCE=LICENCE"),
        ("a.jsonl e.txt --licence c=MIT", "`licence` is 'c=MIT'; expected LICENCE, or SOURCE=LICENCE"),
        ("a.jsonl e.txt --licence e.tx=https://a.b/?c=d", "`licence` is 'e.tx=https://a.b/?c=d'; expected LICENCE"),
    ],
)
def test_mistakes_are_one_error_line(
    line: str, message: str, kalmix, mixed: tuple[tuple[str, ...], list[str]], tmp_path: Path
) -> None:
    Path("link.txt").symlink_to("e.txt")
    Path("linked").mkdir()
    Path("linked/link.txt").symlink_to(tmp_path / "e.txt")
    result = kalmix("data", "prepare", *line.split(), "--output", "s", "--workers", 1)
    (error,) = (x for x in result.errors.splitlines() if x.startswith("error: "))
    assert result.status == 2 and message.format(path=tmp_path.resolve()) in error


def test_links_inside_one_source_are_read(tmp_path: Path) -> None:
    folder = write_corpus(tmp_path / "a", texts(20))
    (folder / "link.txt").symlink_to("0003.txt")
    (tmp_path / "b.txt").write_text("other words")
    for number, source in enumerate((folder, folder / "*")):
        settings = Preparation((str(source), str(tmp_path / "b.txt")), vocab_size=260, held_out=0)
        manifest = prepare(settings, tmp_path / f"{number}")
        assert read_documents(tmp_path / f"{number}", manifest, "train") == [*texts(20), texts(20)[3], "other words"]


@pytest.mark.parametrize("pattern", ["b/*/../*.txt", "b/[cd]/..", "[bl]*/*.txt", "[bl]*", "b/**/../*.txt", "[l-m]*/"])
def test_a_pattern_reads_each_file_once(pattern: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_corpus(Path("b"), texts(3))
    Path("b/c").mkdir()
    Path("b/d").mkdir()
    for name in ("link", "more"):
        Path(name).symlink_to("b")
    source = sources.open_source([pattern], "text", exclude=tmp_path / "s", dataset=DatasetOptions())
    assert [document.text for part in source.parts() for _, document in source.read(part)] == texts(3)


def test_wrong_types_are_refused() -> None:
    for source in ((), 3, ("a", 3), ("a", "")):
        with pytest.raises(ArgumentError, match="`source` is"):
            Preparation(source)  # type: ignore[arg-type]
    with pytest.raises(
        ArgumentError, match=r"`licences` is {'a': \('MIT',\)}; expected licences of each source \(a, b"
    ):
        Preparation(("a", "b"), licences={"a": ("MIT",)})
