"""Pieces of a corpus: small files that together hold every document, and a tokenizer that saw no held-out one."""

from __future__ import annotations

import gzip
import json
import lzma
import random
from pathlib import Path

import pytest

from kalmix import ArgumentError
from kalmix.training.shards import Preparation, prepare
from kalmix_bench.datasets import corpus_pieces
from kalmix_bench.datasets.corpus_pieces import documents, pack

LIMIT = 60_000


@pytest.fixture(autouse=True)
def _small_dictionary(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus_pieces, "DICTIONARY", 1 << 20)  # a compressor takes twelve times as much memory


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pieces") / "corpus"
    folder.mkdir()
    draw = random.Random(0)
    words = ["".join(draw.choices("abcdefghijklmnop", k=draw.randint(2, 9))) for _ in range(4000)]
    for number in range(2):
        rows = [{"package": "p", "text": " ".join(draw.choices(words, k=300)), "path": f"{n}"} for n in range(60)]
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"{number:03}.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    (folder / "licences.json").write_text("[]\n")
    return folder


def test_pieces_are_small_and_hold_every_document_once(corpus: Path, tmp_path: Path) -> None:
    written = pack(corpus, tmp_path / "out", limit=LIMIT, pieces=None, vocab_size=400)
    assert len(written) > 1 and all(path.stat().st_size <= LIMIT for path in written)
    found = sorted(text for text, _ in documents(tmp_path / "out" / "text"))
    assert found == sorted(text for text, _ in documents(corpus))
    assert (tmp_path / "out" / "licences.json").read_text() == "[]\n"


def test_an_interrupted_command_keeps_finished_pieces(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = pack(corpus, tmp_path / "out", limit=LIMIT, pieces=3, vocab_size=300)
    before = [path.read_bytes() for path in written]
    written[1].unlink()
    monkeypatch.setattr(corpus_pieces, "train_tokenizer", None)
    changed = written[0].stat().st_mtime_ns
    assert pack(corpus, tmp_path / "out", limit=LIMIT, pieces=None) == written
    assert [path.read_bytes() for path in written] == before and written[0].stat().st_mtime_ns == changed


def test_the_first_piece_alone_has_the_same_documents_at_each_level(corpus: Path, tmp_path: Path) -> None:
    first, *others = pack(corpus, tmp_path / "all", limit=LIMIT, pieces=3, vocab_size=300)
    (alone,) = pack(corpus, tmp_path / "one", limit=LIMIT, pieces=3, vocab_size=300, level=1, written_pieces=1)
    assert len(others) == 2 and alone.read_bytes() != first.read_bytes()
    assert lzma.decompress(alone.read_bytes()) == lzma.decompress(first.read_bytes())


def test_a_piece_above_the_limit_is_refused(corpus: Path, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="--pieces 2"):
        pack(corpus, tmp_path / "out", limit=LIMIT, pieces=1, vocab_size=300)


@pytest.mark.parametrize("option", ["--write", "--pieces", "--limit"])
def test_the_command_refuses_0(
    option: str, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["corpus_pieces", str(corpus), "--output", str(tmp_path / "out"), option, "0"])
    with pytest.raises(SystemExit) as stopped:
        corpus_pieces.main()
    assert stopped.value.code == 2 and not (tmp_path / "out").exists()
    assert f"error: {option} is 0" in capsys.readouterr().err


@pytest.mark.parametrize("sizes", [{"written_pieces": 0}, {"pieces": 0}])
def test_0_pieces_are_refused(sizes: dict[str, int], corpus: Path, tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=f"`{next(iter(sizes))}` is 0; expected a positive integer"):
        pack(corpus, tmp_path / "out", **{"limit": LIMIT, "pieces": None} | sizes)


def test_each_piece_alone_gives_shards_with_held_out_documents(corpus: Path, tmp_path: Path) -> None:
    written = pack(corpus, tmp_path / "out", limit=LIMIT, pieces=2, vocab_size=300)
    for number, path in enumerate(written):
        settings = Preparation(str(path), str(tmp_path / "out" / "tokenizer"), held_out=0.2)
        manifest = prepare(settings, tmp_path / f"shards{number}")
        assert manifest.vocab_size == 300
        assert manifest.count("train", "documents") > 20 and manifest.count("held_out", "documents") > 3
