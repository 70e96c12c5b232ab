"""Preparation of token shards: from a source of documents to a folder of shards."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from inspect import get_annotations
from pathlib import Path
from typing import Any, NamedTuple

from kalmix.errors import ArgumentError, FileError
from kalmix.files import FORMAT, check_format, disk_errors, lock_folder, read_json, write_text
from kalmix.training.shards.dataset_source import DATASET, DatasetOptions
from kalmix.training.shards.manifest import MANIFEST, PLAN, TOKENIZER, Licences, Manifest
from kalmix.training.shards.parts import Part, Source
from kalmix.training.shards.sources import EXPECTED, open_source
from kalmix.training.shards.token_limit import first_parts, is_done, rounds
from kalmix.training.shards.tokenize_part import (
    RECORDS,
    Advance,
    Job,
    finished,
    is_held_out,
    is_skipped,
    training_tokens,
)
from kalmix.training.shards.tokenizer import (
    SAMPLE_BYTES,
    TRAINED,
    TokenizerFacts,
    load_tokenizer,
    new_tokenizer,
    save_tokenizer,
)
from kalmix.training.shards.workers import tokenize_parts
from kalmix.validation import check_positive_int, check_types

_FREE = ("skip_damaged", "licences")  # settings that may change before the shards are finished
_HASH = "tokenizer.json"  # name of the hash of this file among the settings


class Progress(NamedTuple):
    """Progress of a preparation.

    Attributes:
        stage: "training the tokenizer" or "tokenizing".
        fraction: fraction of the stage that is done, 0 to 1.
        tokens: tokens written by this call.
    """

    stage: str
    fraction: float
    tokens: int


@dataclass(frozen=True)
class Preparation:
    """Settings of token shards. `prepare` makes the shards; no file is read or written before.

    Attributes:
        source: path of a file or folder of text, JSON lines or Parquet, also as a pattern such as `b/*.parquet`; or
            `hf:NAME` for a dataset that the package `datasets` loads by name or from a folder. A tuple of several is
            read in this order.
        tokenizer: folder or name of a fast tokenizer of Hugging Face. Default: a byte-level BPE trained on the source.
        vocab_size: largest vocabulary of a trained BPE, at least 257.
        column: column that holds the text, except in plain text; `meta.text` is the field `text` of the object `meta`.
        bos: token that begins each document. Default: the tokenizer's token that begins a text, else the one that ends
            it.
        held_out: fraction of the documents to hold out, at least 0 and below 1. A hash of a document's text chooses.
        licences: licences of the source, or a dict from each source to its licences; only written to the manifest.
        dataset: options of all `hf:` sources.
        shard_tokens: number of tokens after which a shard ends.
        skip_damaged: leave out documents that cannot be read, and count them. Default: they raise an error.
        max_tokens: number of training tokens at which to stop. The first parts of the source (files, ranges of them, or
            shards of a stream) share it equally, one for each 2**20 tokens, at most 64; others follow where these end
            before. Each part stops after the document that reaches its share. Default: the whole source.

    Raises:
        ArgumentError: a setting has another type or value than described.

    Example:
        >>> from kalmix.training.shards import Preparation
        >>> Preparation("corpus", held_out=0.01).vocab_size
        32768
        >>> Preparation("corpus", held_out=1.0)
        Traceback (most recent call last):
            ...
        kalmix.errors.ArgumentError: `held_out` is 1.0; expected a fraction of at least 0 and below 1.
    """

    source: str | tuple[str, ...]
    tokenizer: str | None = None
    vocab_size: int = 32768
    column: str = "text"
    bos: str | None = None
    held_out: float = 0.005
    licences: Licences = ()
    dataset: DatasetOptions = field(default_factory=DatasetOptions)
    shard_tokens: int = 1 << 26
    skip_damaged: bool = False
    max_tokens: int | None = None

    def __post_init__(self) -> None:
        check_types(get_annotations(Preparation, eval_str=True), vars(self))
        check_types(get_annotations(DatasetOptions, eval_str=True), self.dataset._asdict())
        if isinstance(self.dataset.data_files, str):
            raise ArgumentError("data_files", got=repr(self.dataset.data_files), expected="a tuple of names of files")
        if not self.sources or not all(isinstance(name, str) for name in self.sources):
            raise ArgumentError("source", got=repr(self.source), expected=f"{EXPECTED}, or a tuple of them")
        for name in ("tokenizer", "column", "bos"):
            if getattr(self, name) == "":
                raise ArgumentError(name, got="empty", expected="a name")
        if "" in self.sources or DATASET in self.sources:
            got = f"{DATASET!r} without a name" if DATASET in self.sources else "empty"
            raise ArgumentError("source", got=got, expected=EXPECTED)
        if isinstance(self.licences, dict) and set(self.licences) != set(self.sources):
            expected = f"licences of each source ({', '.join(self.sources)})"
            raise ArgumentError("licences", got=repr(self.licences), expected=expected)
        if self.tokenizer is None and self.vocab_size < 257:
            raise ArgumentError("vocab_size", got=self.vocab_size, expected="at least 257")
        if not 0 <= self.held_out < 1:
            raise ArgumentError("held_out", got=self.held_out, expected="a fraction of at least 0 and below 1")
        check_positive_int("shard_tokens", self.shard_tokens)
        if self.max_tokens is not None:
            check_positive_int("max_tokens", self.max_tokens)

    @property
    def sources(self) -> tuple[str, ...]:
        """All sources."""
        return self.source if isinstance(self.source, tuple) else (self.source,)

    def settings(self) -> dict[str, Any]:
        """Return the settings as they are written to JSON, with a hash of the tokenizer if it is in a folder."""
        file = Path(self.tokenizer or "", _HASH)
        digest = hashlib.sha256(file.read_bytes()).hexdigest() if self.tokenizer and file.is_file() else None
        settings = {**asdict(self), "source": self._named, "dataset": self.dataset.given(), _HASH: digest}
        return json.loads(json.dumps(settings))

    @property
    def _named(self) -> str | tuple[str, ...]:
        """The source for JSON: a string if it is a single one."""
        first, *others = self.sources
        return self.sources if others else first


def prepare(
    preparation: Preparation,
    output: str | os.PathLike[str],
    *,
    workers: int = 1,
    progress: Callable[[Progress], None] = lambda progress: None,
) -> Manifest:
    """Tokenise a source, or several, into shards.

    A preparation that was interrupted, also by `kill -9`, continues when the call is repeated: finished shards are
    kept. Memory does not grow with the source, except by the names of its files. The shards do not depend on the number
    of workers. If `output` already holds the finished shards of these settings, nothing is done.

    Args:
        preparation: settings.
        output: folder of the shards; created if missing. See `kalmix.training.shards.manifest` for its files.
        workers: number of processes. With more than one, a script that calls this needs
            `if __name__ == "__main__":`, as for `multiprocessing`.
        progress: called with the current progress.

    Returns:
        The manifest, which is in the folder, too.

    Raises:
        ArgumentError: the source, the column or the tokenizer cannot be read; a document is damaged; the source has no
            text; `output` is a file, holds shards of other settings or of a changed source or tokenizer, or another
            process writes to it.
        ModuleNotFoundError: the source needs pyarrow or datasets, which is not installed.
        OSError: a file cannot be written, the disk or the network of the source fails, or a worker was killed. Repeat
            the call to continue.

    Example:
        >>> from pathlib import Path
        >>> from kalmix.training.shards import Preparation, prepare
        >>> Path("corpus").mkdir()
        >>> for n in range(30):
        ...     _ = Path("corpus", f"{n}.txt").write_text(f"Document {n}: " + "a filter is a recurrence. " * 9)
        >>> manifest = prepare(Preparation("corpus", vocab_size=280, held_out=0.2), "shards")
        >>> manifest.count("train", "documents"), manifest.count("held_out", "documents")
        (28, 2)
    """
    if not isinstance(preparation, Preparation):
        raise ArgumentError("preparation", got=f"a {type(preparation).__name__}", expected="a Preparation")
    check_positive_int("workers", workers)
    folder = Path(output)
    if str(output).strip() == "" or (folder.exists() and not folder.is_dir()):
        got = f"{str(output)!r}, which is a file" if str(output).strip() else "empty"
        raise ArgumentError("output", got=got, expected="the path of a folder")
    source = open_source(preparation.sources, preparation.column, exclude=folder, dataset=preparation.dataset)
    with lock_folder(folder), disk_errors(folder):
        plan = {"format": FORMAT, "settings": preparation.settings(), "fingerprint": source.fingerprint()}
        done = _check_folder(folder, plan)
        if done is not None:
            _remove_plan(folder)
            return done
        parts = source.parts()
        facts = _tokenizer(preparation, source, parts, folder, progress)
        if not (folder / PLAN).exists():
            shutil.rmtree(folder / RECORDS, ignore_errors=True)
            write_text(folder / PLAN, json.dumps({**plan, "tokenizer": facts._asdict()}, indent=1) + "\n")
        job = Job(
            source,
            folder,
            facts.sha256,
            facts.bos_id,
            "uint16" if facts.vocab_size <= 1 << 16 else "uint32",
            preparation.held_out,
            preparation.shard_tokens,
            preparation.skip_damaged,
        )
        _tokenize(job, parts, preparation.max_tokens, workers, progress)
        manifest = _manifest(preparation, plan["fingerprint"], job, parts, facts)
        manifest.save(folder)
        _remove_plan(folder)
        return manifest


def _check_folder(folder: Path, plan: dict[str, Any]) -> Manifest | None:
    """Return the manifest of a finished folder; `None` if it is new or unfinished.

    Raises:
        ArgumentError: the folder holds shards of other settings, or of a source that has changed.
    """
    if (folder / MANIFEST).exists():
        manifest = Manifest.load(folder)
        found = {"settings": manifest.settings, "fingerprint": manifest.fingerprint}
    elif (folder / PLAN).exists():
        manifest = None
        try:
            found = read_json(folder / PLAN)
            check_format(found, folder / PLAN)
            TokenizerFacts(**found["tokenizer"])
        except (FileError, KeyError, TypeError) as error:
            got = f"{str(folder)!r}, whose {PLAN} is damaged ({error})"
            raise ArgumentError("output", got=got, expected="a new folder, or unfinished shards") from None
    else:
        return None
    state = "unfinished" if manifest is None else "finished"
    before: Any = found["settings"] if isinstance(found.get("settings"), dict) else {}
    if before and _HASH not in before:  # earlier versions did not store it
        before = before | {_HASH: plan["settings"][_HASH]}
    free = _FREE if manifest is None else ()
    if plan["settings"]["tokenizer"] is not None:  # none is trained
        free += ("vocab_size",)
    changed = [name for name, value in plan["settings"].items() if before.get(name) != value and name not in free]
    same_source = found.get("fingerprint") == plan["fingerprint"]
    if (changed or not same_source) and manifest is None and not any(folder.glob("*.ds")):  # no shard was written
        _remove_plan(folder)
        return None
    if changed:
        got = f"{str(folder)!r}, which holds {state} shards with another {' and '.join(changed)}"
        raise ArgumentError("output", got=got, expected="a new folder, or the same settings")
    if not same_source:
        got = f"{str(folder)!r}, which holds {state} shards of the source before it changed"
        raise ArgumentError("output", got=got, expected="a new folder, or the unchanged source")
    return manifest


def _remove_plan(folder: Path) -> None:
    (folder / PLAN).unlink(missing_ok=True)
    shutil.rmtree(folder / RECORDS, ignore_errors=True)


def _tokenizer(
    preparation: Preparation, source: Source, parts: list[Part], folder: Path, progress: Callable[[Progress], None]
) -> TokenizerFacts:
    """Return the facts of the tokenizer in the folder; load or train it unless an interrupted call did."""
    if (folder / PLAN).exists():
        return TokenizerFacts(**read_json(folder / PLAN)["tokenizer"])
    if preparation.tokenizer is not None:
        tokenizer = load_tokenizer(preparation.tokenizer)
    else:
        tokenizer = new_tokenizer(_sample(preparation, source, parts, progress), preparation.vocab_size)
    return save_tokenizer(tokenizer, folder / TOKENIZER, preparation.bos)


def _sample(
    preparation: Preparation, source: Source, parts: list[Part], progress: Callable[[Progress], None]
) -> Iterator[str]:
    """Yield documents to train a tokenizer on: the first ones of each part, without those held out.

    Raises:
        ArgumentError: a document is damaged and damaged ones are not skipped.
        OSError: the source fails.
    """
    parts = first_parts(parts, preparation.max_tokens)
    for part in parts:
        left = SAMPLE_BYTES // len(parts)
        for named in source.read(part):
            document = named[1]
            damaged = is_skipped(named, preparation.skip_damaged)
            if not damaged and not is_held_out(document.data, preparation.held_out):
                yield document.text
            left -= len(document.data)
            if left <= 0:
                break
        progress(Progress("training the tokenizer", (part.number + 1) / len(parts), 0))


def _tokenize(
    job: Job, parts: list[Part], max_tokens: int | None, workers: int, progress: Callable[[Progress], None]
) -> None:
    """Tokenise the parts that are not finished, and report the progress of all."""
    records = {part.number: finished(job, part.number) for part in parts}
    weights = {part.number: max(part.size, 1) for part in parts}
    fractions = {n: float(bool(found) and found[-1].last) for n, found in records.items()}
    before = sum(training_tokens(found) for found in records.values())
    whole, tokens = sum(weights.values()), 0

    def advance(report: Advance) -> None:
        nonlocal tokens
        tokens += report.tokens
        fractions[report.part] = report.fraction
        if max_tokens is None:
            total = sum(fractions[n] * weight for n, weight in weights.items()) / whole
        else:
            total = min(1.0, (before + tokens) / max_tokens)
        progress(Progress("tokenizing", total, tokens))

    for chosen in rounds(job, parts, max_tokens):
        left = [part for part in chosen if not is_done(job, part)]
        tokenize_parts(job, left, max(1, min(workers, len(left))), advance)


def _manifest(
    preparation: Preparation, fingerprint: str, job: Job, parts: list[Part], facts: TokenizerFacts
) -> Manifest:
    records = [record for part in parts for record in finished(job, part.number)]
    shards = tuple(shard for record in records for shard in record.shards)
    skipped = sum(record.skipped for record in records)
    if not shards:
        _remove_plan(job.output)
        got = f"{', '.join(map(repr, preparation.sources))}, which contains no text" + (
            f" ({skipped} left out)" if skipped else ""
        )
        hint = "`--column` names the column of the text in JSON lines and Parquet" if skipped else ""
        raise ArgumentError("source", got=got, expected=EXPECTED, hint=hint)
    return Manifest(
        source=preparation._named,
        fingerprint=fingerprint,
        settings=preparation.settings(),
        tokenizer=preparation.tokenizer or TRAINED,
        tokenizer_sha256=facts.sha256,
        vocab_size=facts.vocab_size,
        bos_id=facts.bos_id,
        dtype=job.dtype,
        licences=preparation.licences,
        skipped=skipped,
        shards=shards,
    )
