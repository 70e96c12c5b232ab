"""Tokenise one part of a source into shards. A part that was interrupted continues after its last finished shard."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np

from kalmix.errors import ArgumentError, FileError
from kalmix.files import read_json, sync, write_text
from kalmix.training.shards.documents import Document
from kalmix.training.shards.manifest import TOKENIZER, ShardRecord, has_size, parse_shard
from kalmix.training.shards.sources import EXPECTED, Part, Source
from kalmix.training.shards.tokenizer import make_encoder
from kalmix.training.shards.writer import ShardWriter

RECORDS = "parts"  # folder
_BATCH_BYTES, _BATCH_DOCUMENTS = 1 << 20, 1024  # that are encoded at once


class Job(NamedTuple):
    """Settings that all parts share. Instances are sent to worker processes.

    Attributes:
        source: the documents.
        output: folder of the shards, with the tokenizer.
        tokenizer_sha256: hash of tokenizer.json.
        bos_id: token that begins each document.
        dtype: "uint16" or "uint32".
        held_out: fraction of the documents to hold out.
        shard_tokens: number of tokens after which a shard ends.
        skip_damaged: leave out damaged documents.
    """

    source: Source
    output: Path
    tokenizer_sha256: str
    bos_id: int
    dtype: str
    held_out: float
    shard_tokens: int
    skip_damaged: bool


class Finished(NamedTuple):
    """Record of the shards that a part finished together, one a split at most.

    Attributes:
        read: documents of the part read up to their end, with empty and damaged ones.
        skipped: damaged documents among those read since the record before.
        last: the part has no more documents.
        shards: their records.
    """

    read: int
    skipped: int
    last: bool
    shards: tuple[ShardRecord, ...]


class Advance(NamedTuple):
    """Progress of a part: tokens written since the last report, and fraction of the part that is done."""

    part: int
    tokens: int
    fraction: float


def finished(job: Job, part: int) -> list[Finished]:
    """Return the records of a part's finished shards, in order. A damaged record, and those after it, do not count."""
    found = list[Finished]()
    while (path := _record_path(job.output, part, len(found))).exists():
        try:
            written = read_json(path)
            shards = tuple(parse_shard(shard) for shard in written["shards"])
            record = Finished(int(written["read"]), int(written["skipped"]), bool(written["last"]), shards)
        except (FileError, KeyError, TypeError, ValueError):
            break
        if not all(has_size(job.output, shard, job.dtype) for shard in shards):
            break
        found.append(record)
    return found


def _record_path(output: Path, part: int, number: int) -> Path:
    return output / RECORDS / f"{part:05}-{number:03}.json"


def tokenize_part(job: Job, part: Part, advance: Callable[[Advance], None]) -> None:
    """Tokenise the rest of a part and write its shards and their records.

    Args:
        job: settings.
        part: the part.
        advance: called after each batch of documents.

    Raises:
        ArgumentError: a document is damaged and damaged ones are not skipped.
        OSError: a file cannot be written.
    """
    done = finished(job, part.number)
    if done and done[-1].last:
        return
    encode = make_encoder(job.output / TOKENIZER, job.tokenizer_sha256)
    shards = _OpenShards(job, part.number, len(done))
    read = done[-1].read if done else 0
    try:
        for batch in _batches(islice(job.source.read(part), read, None)):
            read += len(batch)
            shards.skipped += sum(_is_skipped(name, document, job) for name, document in batch)
            texts = [document for _, document in batch if document.text.strip()]
            tokens = shards.add(texts, encode([document.text for document in texts])) if texts else 0
            position = batch[-1][1].position
            advance(Advance(part.number, tokens, min(1.0, position / part.size) if part.size else 0.0))
            if shards.full:
                shards.finish(read, last=False)
        shards.finish(read, last=True)
    finally:
        shards.abandon()
    advance(Advance(part.number, 0, 1.0))


def _is_skipped(name: str, document: Document, job: Job) -> bool:
    if document.damage is None:
        return False
    if not job.skip_damaged:
        hint = "`skip_damaged` (`--skip-damaged`) leaves such documents out"
        raise ArgumentError("source", problem=f"holds {name}, {document.damage}", expected=EXPECTED, hint=hint)
    return True


def _batches(documents: Iterator[tuple[str, Document]]) -> Iterator[list[tuple[str, Document]]]:
    batch, size = list[tuple[str, Document]](), 0
    for named in documents:
        batch.append(named)
        size += len(named[1].data)
        if size >= _BATCH_BYTES or len(batch) == _BATCH_DOCUMENTS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def is_held_out(data: bytes, fraction: float) -> bool:
    """Return whether a document is held out: a hash of its text is below `fraction` of all hashes.

    The choice depends on the text alone, so that copies of a document are on the same side.
    """
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "big") < fraction * 2**64


class _OpenShards:
    """Shards that a part is writing, one a split."""

    def __init__(self, job: Job, part: int, number: int) -> None:
        self.job, self.part, self.number, self.skipped = job, part, number, 0
        self.open: dict[str, ShardWriter] = {}

    @property
    def full(self) -> bool:
        return any(writer.tokens >= self.job.shard_tokens for writer in self.open.values())

    def add(self, documents: list[Document], encoded: Iterator[np.ndarray]) -> int:
        """Append documents to their splits; return the number of tokens."""
        begin = np.array([self.job.bos_id])
        chosen: dict[str, tuple[list[np.ndarray], list[int]]] = {}
        for document, ids in zip(documents, encoded, strict=True):
            split = "held_out" if is_held_out(document.data, self.job.held_out) else "train"
            arrays, sizes = chosen.setdefault(split, ([], []))
            arrays.append(np.concatenate((begin, ids)))
            sizes.append(len(document.data))
        for split, (arrays, sizes) in chosen.items():
            if split not in self.open:
                file = f"{split}-{self.part:05}-{self.number:03}.ds"
                self.open[split] = ShardWriter(self.job.output, file, split, self.job.dtype)  # pyright: ignore[reportArgumentType]
            self.open[split].add(arrays, sum(sizes))
        return sum(len(ids) for arrays, _ in chosen.values() for ids in arrays)

    def finish(self, read: int, *, last: bool) -> None:
        """Finish the open shards, then write their record."""
        shards = [self.open.pop(split).finish() for split in list(self.open)]
        sync(self.job.output)
        record = Finished(read, self.skipped, last, tuple(shards))
        written = {**record._asdict(), "shards": [shard._asdict() for shard in shards]}
        write_text(_record_path(self.job.output, self.part, self.number), json.dumps(written) + "\n")
        self.number, self.skipped = self.number + 1, 0

    def abandon(self) -> None:
        for writer in self.open.values():
            writer.abandon()
