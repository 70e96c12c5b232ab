"""Files that describe a folder of shards: the manifest, and the records of its shards.

Files of a folder of shards:

- `manifest.json`: sizes and SHA-256 hashes of all shards, tokenizer, counts and licences; written last.
- `tokenizer/`: the tokenizer, for `AutoTokenizer` and `tokenizers`.
- `train-PART-NUMBER.ds`: tokens, unsigned integers of 16 or 32 bits, little-endian.
- `train-PART-NUMBER.ds.index`: end of each document in tokens, unsigned 64-bit integers. Both files are as datatrove
  writes and nanotron reads them.
- `held_out-PART-NUMBER.ds` and `.ds.index`: held-out documents.
- `plan.json`, `parts/`: until the manifest is written, settings and finished shards, to resume.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from inspect import get_annotations
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from kalmix.errors import ArgumentError, FileError, FormatError
from kalmix.files import FORMAT, check_format, read_json, write_text
from kalmix.validation import check_types

MANIFEST = "manifest.json"
PLAN = "plan.json"
TOKENIZER = "tokenizer"  # folder
INDEX_SUFFIX = ".index"
INDEX_DTYPE = np.dtype("<u8")
TOKEN_DTYPES = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}
Split = Literal["train", "held_out"]
SPLITS: tuple[Split, ...] = ("train", "held_out")
Licences = tuple[str, ...] | dict[str, tuple[str, ...]]  # of all sources, or of each


class ShardRecord(NamedTuple):
    """Record of a shard.

    Attributes:
        file: name of the file of tokens.
        split: "train" or "held_out".
        documents: number of documents.
        tokens: number of tokens, with the one that begins each document.
        bytes: length of the text in UTF-8.
        sha256: hash of the file of tokens.
        index_sha256: hash of the index.
    """

    file: str
    split: Split
    documents: int
    tokens: int
    bytes: int
    sha256: str
    index_sha256: str


@dataclass(frozen=True)
class Manifest:
    """Description of a finished folder of shards.

    Attributes:
        source: source of the documents, or sources.
        fingerprint: digest of the source's files, sizes and times; see `kalmix.training.shards.sources`.
        settings: settings of `prepare`.
        tokenizer: name of the tokenizer, or "trained on the source".
        tokenizer_sha256: hash of tokenizer.json.
        vocab_size: number of ids of the tokenizer, gaps included.
        bos_id: token that begins each document.
        dtype: "uint16" or "uint32".
        licences: licences of the source, or of each source by its name, as given.
        skipped: documents that were left out: damaged ones, and `.json` files without text.
        shards: all shards, in the order of the source.

    Example:
        >>> from pathlib import Path
        >>> from kalmix.training.shards import Manifest, Preparation, prepare
        >>> Path("corpus").mkdir()
        >>> for n in range(50):
        ...     _ = Path(f"corpus/{n}.txt").write_text(f"Document {n}.")
        >>> _ = prepare(Preparation("corpus", vocab_size=257, held_out=0), "shards")
        >>> Manifest.load(Path("shards")).count("train", "documents")
        50
    """

    source: str | tuple[str, ...]
    fingerprint: str
    settings: dict[str, Any]
    tokenizer: str
    tokenizer_sha256: str
    vocab_size: int
    bos_id: int
    dtype: str
    licences: Licences
    skipped: int
    shards: tuple[ShardRecord, ...]

    def count(self, split: str, unit: Literal["documents", "tokens", "bytes"]) -> int:
        """Return the number of documents, tokens, or bytes of text in a split."""
        return sum(getattr(shard, unit) for shard in self.shards if shard.split == split)

    def other_begin(self, model: Path) -> int | None:
        """Return the token with which a saved model begins documents, if the shards begin them with another one.

        Args:
            model: folder of the model. If its config.json is missing or names no token, nothing differs.
        """
        config = model / "config.json"
        begin = read_json(config).get("bos_token_id") if config.is_file() else None
        return None if begin == self.bos_id else begin

    def save(self, folder: Path) -> None:
        """Write manifest.json into `folder`, replacing an older one atomically."""
        counts = {name: {unit: self.count(name, unit) for unit in ("documents", "tokens", "bytes")} for name in SPLITS}
        shards = [shard._asdict() for shard in self.shards]
        written = {"format": FORMAT, **asdict(self), "counts": counts, "shards": shards}
        write_text(folder / MANIFEST, json.dumps(written, indent=1) + "\n")

    @classmethod
    def load(cls, folder: Path) -> Manifest:
        """Read manifest.json in a folder of shards.

        Raises:
            ArgumentError: the file is missing, damaged or no manifest, or the folder is unfinished.
            FormatError: a newer version of kalmix wrote it.
        """
        try:
            written = read_json(folder / MANIFEST)
            check_format(written, folder / MANIFEST)
            return _parse(written)
        except FormatError:
            raise
        except FileError as error:
            got = f"{str(folder)!r}, which holds no shards ({error})"
            hint = ""
            if (folder / MANIFEST).exists():
                got = f"{str(folder)!r}, whose {MANIFEST} cannot be read ({error})"
            elif (folder / PLAN).exists():
                got = f"{str(folder)!r}, whose shards are unfinished"
                hint = "Repeat the command `kalmix data prepare` to complete them"
            raise ArgumentError("shards", got=got, expected="a folder of `kalmix data prepare`", hint=hint) from None


def _parse(written: dict[str, Any]) -> Manifest:
    """Return the manifest with these contents.

    Raises:
        FileError: a value is missing or of another type.
    """
    hints = get_annotations(Manifest, eval_str=True)
    try:
        given = {name: written[name] for name in hints}
        given["shards"] = tuple(parse_shard(shard) for shard in given["shards"])
        given["licences"] = _parse_licences(given["licences"])
        if isinstance(given["source"], list):
            given["source"] = tuple(str(name) for name in given["source"])
        check_types(hints, given)
        if given["dtype"] not in TOKEN_DTYPES or not isinstance(given["settings"], dict):
            raise ValueError("`dtype` or `settings` is unknown")
    except (KeyError, TypeError, ValueError) as error:
        reason = f"{error} is missing" if isinstance(error, KeyError) else error
        raise FileError(f"{MANIFEST} is damaged: {reason}") from None
    return Manifest(**given)


def _parse_licences(written: Any) -> Licences:
    if isinstance(written, dict):
        return {name: tuple(str(licence) for licence in licences) for name, licences in written.items()}
    return tuple(str(licence) for licence in written)


def parse_shard(written: dict[str, Any]) -> ShardRecord:
    """Return the record of a shard, read from JSON.

    Raises:
        KeyError, TypeError, ValueError: a value is missing, of another type or not accepted.
    """
    hints = get_annotations(ShardRecord, eval_str=True)
    given = {name: written[name] for name in hints}
    check_types(hints, given)
    if Path(given["file"]).name != given["file"] or given["split"] not in SPLITS:
        raise ValueError(f"`file` is {given['file']!r}, in the split {given['split']!r}")
    if min(given["documents"], given["tokens"], given["bytes"]) < 0:
        raise ValueError(f"{given['file']} has negative counts")
    return ShardRecord(**given)


def has_size(folder: Path, shard: ShardRecord, dtype: str) -> bool:
    """Return whether both files of a shard have the sizes that follow from its record.

    Args:
        folder: folder of the shards.
        shard: its record.
        dtype: "uint16" or "uint32".
    """
    try:
        tokens = (folder / shard.file).stat().st_size
        index = (folder / (shard.file + INDEX_SUFFIX)).stat().st_size
    except OSError:
        return False
    return tokens == shard.tokens * TOKEN_DTYPES[dtype].itemsize and index == shard.documents * INDEX_DTYPE.itemsize
