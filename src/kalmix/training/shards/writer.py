"""Writer of one shard: documents are appended, then the files appear at once under their names."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import numpy as np

from kalmix.files import PARTIAL, sync
from kalmix.training.shards.manifest import INDEX_DTYPE, INDEX_SUFFIX, TOKEN_DTYPES, ShardRecord, Split


class ShardWriter:
    """Shard under way. Its temporary files have the id of this process in their names.

    Args:
        folder: folder of the shards.
        file: name of the file of tokens.
        split: "train" or "held_out".
        dtype: "uint16" or "uint32".
    """

    def __init__(self, folder: Path, file: str, split: Split, dtype: str) -> None:
        self.split: Split = split
        self.documents = self.tokens = self.bytes = 0
        self._dtype = TOKEN_DTYPES[dtype]
        self._paths = [folder / file, folder / (file + INDEX_SUFFIX)]
        self._partials = [path.with_name(f"{PARTIAL}{os.getpid()}.{path.name}") for path in self._paths]
        self._files = [path.open("wb") for path in self._partials]
        self._digests = [hashlib.sha256(), hashlib.sha256()]

    def add(self, documents: list[np.ndarray], bytes_: int) -> None:
        """Append documents: arrays of ids. Their texts have `bytes_` bytes together."""
        lengths = np.array([len(ids) for ids in documents], np.int64)
        ends = self.tokens + np.cumsum(lengths)
        for n, content in enumerate((np.concatenate(documents).astype(self._dtype), ends.astype(INDEX_DTYPE))):
            self._files[n].write(content.data)
            self._digests[n].update(content.data)
        self.documents += len(documents)
        self.tokens = int(ends[-1])
        self.bytes += bytes_

    def finish(self) -> ShardRecord:
        """Flush both files to disk, give them their names and return the record of the shard."""
        for file, partial, path in zip(self._files, self._partials, self._paths, strict=True):
            file.close()
            sync(partial)
            partial.replace(path)
        sha256, index_sha256 = (digest.hexdigest() for digest in self._digests)
        name = self._paths[0].name
        return ShardRecord(name, self.split, self.documents, self.tokens, self.bytes, sha256, index_sha256)

    def abandon(self) -> None:
        """Delete the temporary files."""
        for file, partial in zip(self._files, self._partials, strict=True):
            file.close()
            partial.unlink(missing_ok=True)
