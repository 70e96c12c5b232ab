"""Corpora and tokenizers: files that are read, held-out text, and lossless tokens."""

from __future__ import annotations

import math
import os
import random
import sys
from pathlib import Path

import pytest

from kalmix import ArgumentError
from kalmix.training import corpus as text

WORDS = ["the", "filter", "of", "a", "belief", "that", "decays", "is", "evidence", "for", "what", "comes", "next", "in"]


def paragraph(seed: int) -> str:
    return " ".join(random.Random(seed).choices(WORDS, k=24))


@pytest.fixture(scope="module")
def python() -> text.Corpus:
    """Load the default corpus, which takes seconds."""
    return text.load_corpus()


def test_folder_is_read_in_order_and_only_its_texts(tmp_path: Path) -> None:
    for name, content in {"b.txt": "two", "a/z.md": "one", ".git/x.txt": "no", "c.png": "no", "e.txt": " \n"}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content)
    assert text.read_documents(tmp_path) == {"a/z.md": "one", "b.txt": "two"}


def test_file_is_read_with_any_suffix(tmp_path: Path) -> None:
    (tmp_path / "novel").write_bytes("\ufeffChapter é".encode())
    assert list(text.read_documents(tmp_path / "novel").values()) == ["Chapter é"]


def test_names_of_files_need_not_be_unicode(tmp_path: Path) -> None:
    for seed, name in enumerate((b"a.txt", b"caf\xe9.txt")):
        (tmp_path / os.fsdecode(name)).write_text(paragraph(seed))
    assert len(text.load_corpus(tmp_path, held_out=0.5).held_out) == 1


def test_a_folder_that_cannot_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "closed").mkdir()
    scandir = os.scandir

    def refuse(path: str) -> object:  # root reads every folder
        if Path(path).name == "closed":
            raise PermissionError(13, "Permission denied", path)
        return scandir(path)

    (tmp_path / "a.txt").write_text(paragraph(0))
    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(PermissionError, match="closed"):
        text.read_documents(tmp_path)


@pytest.mark.slow
def test_the_default_corpus_is_megabytes_split_the_same_every_time(python: text.Corpus) -> None:
    learned = sum(len(document.encode()) for document in python.training)
    judged = len(python.held_out_text.encode())
    assert learned > 1_000_000
    assert judged > 100_000
    assert 0.04 < judged / (learned + judged) < 0.1
    assert text.load_corpus() == python


@pytest.mark.slow  # `test_held_out_paragraphs_are_taken_out_of_the_training_text` is quick
def test_training_and_held_out_text_share_no_paragraph(python: text.Corpus) -> None:
    learned, judged = (
        {" ".join(part.split()) for document in documents for part in document.split("\n\n")}
        for documents in (python.training, python.held_out)
    )
    assert [part for part in learned & judged if len(part) >= 64] == []


def test_default_corpus_has_all_files_without_the_topics_of_help(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some installations lack the topics; then the corpus has the docstrings of all files of the library."""
    monkeypatch.setattr(text, "_docstrings", lambda file: str(file) * 100)  # parsing them takes seconds
    documents = text.python_documentation()
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)
    found = text.python_documentation()
    assert len(found) > 300 and "json/decoder.py" in found
    assert documents.keys() - found.keys() == {name for name in documents if name.startswith("help(")}
    assert len(documents) > len(found)


@pytest.mark.parametrize("source", ["def f(:", "\0"])
def test_files_that_are_no_python_have_no_docstrings(tmp_path: Path, source: str) -> None:
    (tmp_path / "template.py").write_text(source)
    assert text._docstrings(tmp_path / "template.py") == ""


def test_docstrings_are_read_in_the_order_of_the_source(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text('"""One."""\nclass A:\n    """Two."""\n    def f(self):\n        """Three."""\n')
    assert text._docstrings(tmp_path / "a.py") == "One.\n\nTwo.\n\nThree."


def test_a_single_file_is_cut_between_paragraphs() -> None:
    paragraphs = [paragraph(seed) for seed in range(50)]
    learned, judged = text.split_documents({"one": "\n\n".join(paragraphs)}, 0.1)
    assert "\n\n".join([*learned, *judged]).split("\n\n") == paragraphs
    assert 3 <= len(judged[0].split("\n\n")) <= 7


def test_whole_documents_are_held_out_if_there_are_many() -> None:
    documents = {str(seed): paragraph(seed) for seed in range(50)}
    learned, judged = text.split_documents(documents, 0.1)
    assert sorted([*learned, *judged]) == sorted(documents.values())
    assert 3 <= len(judged) <= 7


def test_held_out_paragraphs_are_taken_out_of_the_training_text() -> None:
    documents = {str(seed): paragraph(seed) for seed in range(50)} | {"all": "\n\n".join(map(paragraph, range(50)))}
    learned, judged = text.split_documents(documents, 0.02)
    assert judged
    assert not {part for document in learned for part in document.split("\n\n")} & set(judged)


def test_line_ends_do_not_change_the_split(tmp_path: Path) -> None:
    shared = paragraph(99)
    for name, end in (("unix", b"\n"), ("windows", b"\r\n")):
        (tmp_path / name).mkdir()
        for seed in range(20):
            content = f"{paragraph(seed)}\n\n{shared}\n".encode().replace(b"\n", end)
            (tmp_path / name / f"{seed}.txt").write_bytes(content)
    assert text.load_corpus(tmp_path / "windows") == text.load_corpus(tmp_path / "unix")


@pytest.mark.parametrize("kind", ["bpe", "bytes"])
def test_tokenization_is_lossless(kind: str) -> None:
    tokenizer = text.train_tokenizer(map(paragraph, range(9)), kind, vocab_size=270)
    for sample in ("plain", "  spaces\t and\n\nlines ", "naïve — 日本語 🙂", "\x00\x7f", ""):
        assert tokenizer.decode(tokenizer.encode(sample).ids) == sample
    assert tokenizer.get_vocab_size() == (257 if kind == "bytes" else 270)
    if kind == "bytes":
        assert len(tokenizer.encode("naïve").ids) == len("naïve".encode())


def test_a_tokenizer_learns_from_short_pieces_of_long_runs() -> None:
    """It takes quadratic time in the length of a word, hours for 3 MB."""
    line, gap = "ACGT" * 1000, " " * 3000
    pieces = list(text._cut_long_runs([f"a text\n{line}{gap}the end", ""]))
    assert "".join(pieces) == f"a text\n{line}{gap}the end"
    assert max(len(word) for piece in pieces for word in piece.split()) <= 256
    assert max(len(piece) for piece in pieces if not piece.strip()) <= 256
    assert list(text._cut_long_runs(["plain text"])) == ["plain text"]


def test_bits_per_byte_of_random_bytes() -> None:
    assert text.nats_to_bits_per_byte(math.log(2) * len("né".encode()), "né") == pytest.approx(1)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "does not exist"),
        (b"", "no text"),
        (b" \n\t", "no text"),
        (b"\x89PNG\xff\xfe", r"not UTF-8 \(byte 0\)"),
        (b"a\0b", "binary"),
        (b"x", "enough text"),
    ],
)
def test_unusable_text_is_named(tmp_path: Path, content: bytes | None, message: str) -> None:
    path = tmp_path / "some.txt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ArgumentError, match=message):
        text.load_corpus(path)


def test_empty_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="no text files"):
        text.load_corpus(tmp_path)


@pytest.mark.parametrize(("kind", "vocab_size"), [("words", 300), ("bpe", 256)])
def test_wrong_tokenizer_options_are_refused(kind: str, vocab_size: int) -> None:
    with pytest.raises(ArgumentError, match=r"tokenizer|vocab_size"):
        text.train_tokenizer([], kind, vocab_size=vocab_size)
