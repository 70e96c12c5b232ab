"""Reader of token shards: documents and windows of tokens by their position. It needs NumPy and PyTorch only."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from kalmix.errors import ArgumentError
from kalmix.files import disk_errors
from kalmix.training.shards.manifest import INDEX_DTYPE, INDEX_SUFFIX, TOKEN_DTYPES, Manifest, ShardRecord, has_size
from kalmix.validation import check_choice

_READ_SIZE = 1 << 24  # bytes
_EXPECTED = "an intact folder of `kalmix data prepare`"


class Shards:
    """Documents of one split in a folder of shards, as `prepare` wrote it.

    Files are mapped into memory when they are first read. Opening checks their sizes; `verify` their hashes.

    Args:
        folder: folder of shards.
        split: "train" or "held_out".

    Attributes:
        manifest: description of the folder.
        documents: number of documents in the split.
        tokens: number of tokens in the split.

    Raises:
        ArgumentError: the folder holds no finished shards, or a file is missing or has another size.
        FormatError: a newer version of kalmix wrote it.

    Example:
        >>> from pathlib import Path
        >>> from kalmix.training.shards import Preparation, Shards, prepare
        >>> Path("corpus").mkdir()
        >>> for n in range(9):
        ...     _ = Path("corpus", f"{n}.txt").write_text("ab" * n + "c")
        >>> _ = prepare(Preparation("corpus", vocab_size=257, held_out=0), "shards")
        >>> shards = Shards("shards")
        >>> shards.documents, shards.tokens, shards.read(2, 0, 3)  # the third document begins with token 0
        (9, 90, array([ 0, 65, 66], dtype=uint16))
    """

    def __init__(self, folder: str | os.PathLike[str], split: str = "train") -> None:
        check_choice("split", split, ("train", "held_out"))
        self.folder: Path = Path(folder)
        self.split = split
        self.manifest: Manifest = Manifest.load(self.folder)
        self._shards = [shard for shard in self.manifest.shards if shard.split == split]
        for shard in self.manifest.shards:
            if not has_size(self.folder, shard, self.manifest.dtype):
                raise self._damaged(shard.file, "is missing or has another size")
        self.documents: int = sum(shard.documents for shard in self._shards)
        self.tokens: int = sum(shard.tokens for shard in self._shards)
        self._first_document = np.cumsum([0] + [shard.documents for shard in self._shards])
        self._first_token = np.cumsum([0] + [shard.tokens for shard in self._shards])
        self._maps: dict[int, tuple[np.ndarray, np.ndarray]] = {}

    def lengths(self, documents: np.ndarray) -> np.ndarray:
        """Return the number of tokens of each document, int64, from their numbers in the split, int64 `[n]`."""
        found = np.searchsorted(self._first_document, documents, side="right") - 1
        lengths = np.empty(len(documents), np.int64)
        for shard in np.unique(found).tolist():
            chosen = found == shard
            local = documents[chosen] - self._first_document[shard]
            ends = self._map(shard)[1]
            begins = np.where(local > 0, ends[local - 1], 0)
            lengths[chosen] = ends[local].astype(np.int64) - begins.astype(np.int64)
        return lengths

    def read(self, document: int, start: int, length: int) -> np.ndarray:
        """Return `length` tokens of a document, from token `start` on: uint16 or uint32, mapped from the file."""
        shard = int(np.searchsorted(self._first_document, document, side="right")) - 1
        tokens, ends = self._map(shard)
        local = document - int(self._first_document[shard])
        begin = (int(ends[local - 1]) if local else 0) + start
        return tokens[begin : begin + length]

    def window(self, start: int, length: int) -> np.ndarray:
        """Return `length` tokens of the split from position `start` on, across documents and shards."""
        shard = int(np.searchsorted(self._first_token, start, side="right")) - 1
        pieces: list[np.ndarray] = []
        while length > 0:
            begin = start - int(self._first_token[shard])
            piece = self._map(shard)[0][begin : begin + length]
            pieces.append(piece)
            start, length, shard = start + len(piece), length - len(piece), shard + 1
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)

    def verify(self, progress: Callable[[float], None] = lambda done: None) -> None:
        """Read all files of all splits, and check their hashes.

        Args:
            progress: called with the fraction that is done, 0 to 1.

        Raises:
            ArgumentError: a file is damaged.
            OSError: a file cannot be read.
        """
        tokenizer = self.folder / "tokenizer" / "tokenizer.json"
        if not tokenizer.is_file() or _sha256(tokenizer) != self.manifest.tokenizer_sha256:
            raise self._damaged("tokenizer/tokenizer.json", "is missing or damaged")
        for number, shard in enumerate(self.manifest.shards):
            for file, wanted in self._hashes(shard):
                if _sha256(self.folder / file) != wanted:
                    raise self._damaged(file, "is damaged (its SHA-256 hash is another)")
            progress((number + 1) / len(self.manifest.shards))

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes without the maps, which another process opens anew."""
        return {**self.__dict__, "_maps": {}}

    @staticmethod
    def _hashes(shard: ShardRecord) -> tuple[tuple[str, str], ...]:
        return (shard.file, shard.sha256), (shard.file + INDEX_SUFFIX, shard.index_sha256)

    def _damaged(self, file: str, problem: str) -> ArgumentError:
        return ArgumentError("shards", got=f"{str(self.folder)!r}, whose {file} {problem}", expected=_EXPECTED)

    def _map(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the tokens and the ends of documents of a shard."""
        if number not in self._maps:
            shard = self._shards[number]
            with disk_errors(self.folder):
                tokens = np.memmap(self.folder / shard.file, TOKEN_DTYPES[self.manifest.dtype], "r")
                ends = np.memmap(self.folder / (shard.file + INDEX_SUFFIX), INDEX_DTYPE, "r")
            if ends[-1] != shard.tokens or len(tokens) != shard.tokens:
                raise self._damaged(shard.file + INDEX_SUFFIX, "is damaged")
            self._maps[number] = np.asarray(tokens), np.asarray(ends)
        return self._maps[number]


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_READ_SIZE):
            digest.update(block)
    return digest.hexdigest()
