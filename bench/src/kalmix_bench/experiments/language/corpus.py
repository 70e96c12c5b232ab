"""Token shards of a comparison: those given, or small ones from the documentation of this Python installation."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from kalmix.files import write_text
from kalmix.training.corpus import load_corpus
from kalmix.training.shards import Manifest, Preparation, prepare

LAPTOP_BYTES = 3_000_000
LAPTOP_HELD_OUT = 0.05


def digest(manifest: Manifest) -> str:
    """Return the digest of a corpus, from the hashes of its shards."""
    hashes = [shard.sha256 for shard in manifest.shards]
    return hashlib.sha256(" ".join(hashes).encode()).hexdigest()[:16]


def laptop_shards(folder: Path, vocab_size: int) -> Path:
    """Prepare shards of about 3 MB of Python's documentation in `folder`, unless they exist; return their folder."""
    source, shards = folder / "text.jsonl", folder / "shards"
    if not source.exists():
        corpus, lines, size = load_corpus(), list[str](), 0
        for text in (*corpus.training, *corpus.held_out):
            if size + len(text) <= LAPTOP_BYTES:
                lines.append(json.dumps({"text": text}) + "\n")
                size += len(text)
        folder.mkdir(parents=True, exist_ok=True)
        write_text(source, "".join(lines))
    prepare(Preparation(str(source), vocab_size=vocab_size, held_out=LAPTOP_HELD_OUT), shards)
    return shards
