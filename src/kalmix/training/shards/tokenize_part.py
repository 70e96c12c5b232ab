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
from kalmix.training.shards.parts import Part, Source
from kalmix.training.shards.sources import EXPECTED
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
        skipped: documents that were left out, among those read since the record before.
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


def training_tokens(records: list[Finished]) -> int:
    """Return the number of training tokens of a part's finished shards."""
    return sum(shard.tokens for record in records for shard in record.shards if shard.split == "train")


def _record_path(output: Path, part: int, number: int) -> Path:
    return output / RECORDS / f"{part:05}-{number:03}.json"


def tokenize_part(job: Job, part: Part, advance: Callable[[Advance], None]) -> None:
    """Tokenise the rest of a part, up to its limit, and write its shards and their records.

    Args:
        job: settings.
        part: the part.
        advance: called after each batch of documents.

    Raises:
        ArgumentError: a document is damaged and damaged ones are not skipped.
        OSError: a file cannot be written, or the source fails.
    """
    done = finished(job, part.number)
    left = None if part.limit is None else part.limit - training_tokens(done)  # training tokens
    if (done and done[-1].last) or (left is not None and left <= 0):
        return
    encode = make_encoder(job.output / TOKENIZER, job.tokenizer_sha256)
    shards = _OpenShards(job, part.number, len(done))
    read = done[-1].read if done else 0
    try:
        for batch in _batches(islice(job.source.read(part), read, None)):
            places = [n for n, (_, document) in enumerate(batch) if document.text.strip()]
            texts = [batch[n][1] for n in places]
            added = shards.add(texts, encode([document.text for document in texts]), left)
            left = None if left is None else left - added.training_tokens
            reached = left is not None and left <= 0
            batch = batch[: places[added.documents - 1] + 1] if reached else batch
            read += len(batch)
            shards.skipped += sum(is_skipped(named, job.skip_damaged) for named in batch)
            position = batch[-1][1].position
            advance(Advance(part.number, added.tokens, min(1.0, position / part.size) if part.size else 0.0))
            if reached:
                break
            if shards.full:
                shards.finish(read, last=False)
        shards.finish(read, last=left is None or left > 0)
    finally:
        shards.abandon()
    advance(Advance(part.number, 0, 1.0))


def is_skipped(named: tuple[str, Document], skip_damaged: bool) -> bool:
    """Return whether a document is damaged, or a file without text.

    Raises:
        ArgumentError: it is damaged, and `skip_damaged` is false.
    """
    name, document = named
    if document.damage is None:
        return False
    if not skip_damaged and not document.left_out:
        hint = document.hint or "`skip_damaged` (`--skip-damaged`) leaves such documents out"
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


class _Added(NamedTuple):
    """Counts of what was added to the shards of a part; `tokens` counts both splits."""

    documents: int
    tokens: int
    training_tokens: int


class _OpenShards:
    """Shards that a part is writing, one a split."""

    def __init__(self, job: Job, part: int, number: int) -> None:
        self.job, self.part, self.number, self.skipped = job, part, number, 0
        self.open: dict[str, ShardWriter] = {}

    @property
    def full(self) -> bool:
        return any(writer.tokens >= self.job.shard_tokens for writer in self.open.values())

    def add(self, documents: list[Document], encoded: Iterator[np.ndarray], limit: int | None) -> _Added:
        """Append documents to their splits, until training tokens reach `limit`."""
        begin = np.array([self.job.bos_id])
        count, training = 0, 0
        chosen: dict[str, tuple[list[np.ndarray], list[int]]] = {}
        for document, ids in zip(documents, encoded, strict=True):
            if limit is not None and training >= limit:
                break
            split = "held_out" if is_held_out(document.data, self.job.held_out) else "train"
            arrays, sizes = chosen.setdefault(split, ([], []))
            arrays.append(np.concatenate((begin, ids)))
            sizes.append(len(document.data))
            count += 1
            training += len(arrays[-1]) if split == "train" else 0
        for split, (arrays, sizes) in chosen.items():
            if split not in self.open:
                file = f"{split}-{self.part:05}-{self.number:03}.ds"
                self.open[split] = ShardWriter(self.job.output, file, split, self.job.dtype)  # pyright: ignore[reportArgumentType]
            self.open[split].add(arrays, sum(sizes))
        return _Added(count, sum(len(ids) for arrays, _ in chosen.values() for ids in arrays), training)

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
