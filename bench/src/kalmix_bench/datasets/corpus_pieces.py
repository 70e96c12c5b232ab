"""Pack a corpus into compressed pieces of limited size, with a tokenizer, to tokenise it on another machine.

    python -m kalmix_bench.datasets.package_texts --output corpus
    python -m kalmix_bench.datasets.corpus_pieces corpus --output pieces
    kalmix data prepare pieces/text --tokenizer pieces/tokenizer --held-out 0.01 --output shards      # there

Writes `pieces/text/NN.jsonl.xz` of at most `--limit` MiB each, `pieces/tokenizer/`, a byte-level BPE that never sees
held-out documents, and `pieces/licences.json`. A hash of a document's text chooses its piece, so each piece is a sample
of the whole corpus, and one piece alone can be used: `--write 1` writes only the first. Pieces that are finished are
kept if the command is repeated. Compression takes about 20 minutes for 35 MiB; `--level 6` takes 7, with about the same
size.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import lzma
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

from kalmix.files import replace_file, sync_tree, write_text
from kalmix.training.shards.documents import FileSlice, file_kind, read_slice
from kalmix.training.shards.tokenize_part import is_held_out
from kalmix.training.shards.tokenizer import SAMPLE_BYTES, new_tokenizer
from kalmix.validation import check_positive_int

HELD_OUT = 0.01  # pass the same fraction to `kalmix data prepare`
VOCAB_SIZE = 16384
LIMIT = 48  # MiB of a piece
SAMPLE = 1 << 24  # bytes of text from which the compression is estimated
MARGIN = 1.02  # of the estimated size
LEVEL = 9  # of compression, the slowest
DICTIONARY = 1 << 28  # bytes of text to which the compression refers


def documents(corpus: Path) -> Iterator[tuple[str, bytes]]:
    """Yield the text of each document in a folder of JSON lines, and its bytes in UTF-8.

    Raises:
        SystemExit: a document cannot be read.
    """
    for path in sorted(path for path in corpus.iterdir() if file_kind(path.name) == "jsonl"):
        for document in read_slice(FileSlice(str(path), "jsonl", 0, path.stat().st_size), "text"):
            if document.damage is not None:
                raise SystemExit(f"error: {path}, {document.damage}")
            yield document.text, document.data


def piece_of(data: bytes, pieces: int) -> int:
    """Return the number of the piece that holds a document with this text in UTF-8.

    The hash is another one than that which chooses held-out documents, so that each piece has some.
    """
    return int.from_bytes(hashlib.blake2b(data, digest_size=8, person=b"piece").digest(), "big") % pieces


def filters(level: int) -> list[dict[str, int]]:
    """Return the settings of the compression of a level from 0 (fastest) to 9."""
    extreme = lzma.PRESET_EXTREME if level == LEVEL else 0
    return [{"id": lzma.FILTER_LZMA2, "preset": level | extreme, "dict_size": DICTIONARY}]


def write_piece(corpus: Path, number: int, pieces: int, path: Path, level: int) -> int:
    """Compress the documents of a piece to `path`, unless it exists; return the bytes of the file."""
    if not path.exists():
        chosen = filters(level)
        with replace_file(path) as partial, lzma.open(partial, "wb", format=lzma.FORMAT_XZ, filters=chosen) as file:
            for text, data in documents(corpus):
                if piece_of(data, pieces) == number:
                    file.write(json.dumps({"text": text}, ensure_ascii=False).encode() + b"\n")
    return path.stat().st_size


def count_pieces(corpus: Path, limit: int) -> int:
    """Return the number of pieces of at most `limit` bytes, estimated by compressing a sample of the documents.

    A sample compresses worse than a piece, which has more to refer to.
    """
    total = sum(len(data) for _, data in documents(corpus))
    share = max(1, total // SAMPLE)
    sample = b"".join(data for _, data in documents(corpus) if piece_of(data, share) == 0)
    packed = len(lzma.compress(sample, format=lzma.FORMAT_XZ, filters=filters(LEVEL)))
    return max(1, -(-int(MARGIN * total * packed / max(len(sample), 1)) // limit))


def train_tokenizer(corpus: Path, folder: Path, vocab_size: int, held_out: float) -> None:
    """Train a byte-level BPE on an even sample of the training documents, and write it to `folder`."""
    total = sum(len(data) for _, data in documents(corpus))
    share = -(-total // SAMPLE_BYTES)
    texts = (text for text, data in documents(corpus) if not is_held_out(data, held_out) and piece_of(data, share) == 0)
    new_tokenizer(texts, vocab_size).save_pretrained(folder)
    sync_tree(folder)


def pack(
    corpus: Path,
    output: Path,
    *,
    limit: int,
    pieces: int | None,
    vocab_size: int = VOCAB_SIZE,
    level: int = LEVEL,
    written_pieces: int | None = None,
) -> list[Path]:
    """Write the tokenizer, the licences and the pieces; return the files of the pieces.

    Args:
        corpus: folder of JSON lines with the column `text`, as `package_texts` writes it.
        output: folder for the pieces.
        limit: largest number of bytes of a piece.
        pieces: number of pieces; `None` estimates it.
        vocab_size: number of tokens of the tokenizer.
        level: level of compression, 0 to 9.
        written_pieces: number of pieces to write, the first ones; `None` writes all.

    Raises:
        ArgumentError: `pieces` or `written_pieces` is not positive.
        SystemExit: a piece is larger than `limit`, or a document cannot be read.
    """
    for name, number in {"pieces": pieces, "written_pieces": written_pieces}.items():
        if number is not None:
            check_positive_int(name, number)
    (output / "text").mkdir(parents=True, exist_ok=True)
    if not (output / "tokenizer" / "tokenizer.json").exists():
        train_tokenizer(corpus, output / "tokenizer", vocab_size, HELD_OUT)
    if (corpus / "licences.json").exists():
        shutil.copyfile(corpus / "licences.json", output / "licences.json")
    plan = output / "pieces.json"
    if not plan.exists():
        write_text(plan, json.dumps({"pieces": pieces or count_pieces(corpus, limit)}) + "\n")
    count = json.loads(plan.read_text())["pieces"]
    written = []
    for number in range(count if written_pieces is None else min(count, written_pieces)):
        path, begin = output / "text" / f"{number:02}.jsonl.xz", time.monotonic()
        size = write_piece(corpus, number, count, path, level)
        print(f"{size / 2**20:6.1f} MiB  {path} ({time.monotonic() - begin:.0f} s)", flush=True)
        if size > limit:
            hint = f"repeat with a new folder and --pieces {count + 1}"
            raise SystemExit(f"error: {path} has {size:,} bytes, more than {limit:,}; {hint}")
        written.append(path)
    return written


def main() -> None:
    """Pack a corpus from the command line."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("corpus", type=Path, help="folder of JSON lines")
    options.add_argument("--output", type=Path, required=True, help="folder of the pieces")
    options.add_argument("--limit", type=float, default=LIMIT, help="largest size of a piece in MiB")
    options.add_argument("--pieces", type=int, help="number of pieces; default: as few as the limit allows")
    options.add_argument("--write", type=int, help="number of pieces to write, the first ones; default: all")
    options.add_argument("--level", type=int, choices=range(10), default=LEVEL, help="level of compression; default: 9")
    given = options.parse_args()
    for name in ("limit", "pieces", "write"):
        number = getattr(given, name)
        if number is not None and number <= 0:
            options.error(f"--{name} is {number}; expected a positive number")
    sizes = {"limit": int(given.limit * 2**20), "pieces": given.pieces, "written_pieces": given.write}
    pack(given.corpus, given.output, **sizes, level=given.level)


if __name__ == "__main__":
    main()
