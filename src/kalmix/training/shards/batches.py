"""Batches of token rows as tensors that models take."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from kalmix.training.shards.reader import Shards
from kalmix.training.shards.rows import Row, Segment

IGNORE_INDEX = -100  # target without a loss
Batch = dict[str, Tensor]


def stream_batch(rows: Sequence[tuple[Shards, int]], seq_len: int) -> Batch:
    """Return windows of the stream: `input_ids`, `labels` and `shift_labels`, int64 `[rows, seq_len]`.

    Args:
        rows: shards and first token of each window.
        seq_len: tokens per window.
    """
    read = [shards.window(start, seq_len + 1).astype(np.int64) for shards, start in rows]
    tokens = torch.from_numpy(np.stack(read))
    ids = tokens[:, :-1].contiguous()
    return {"input_ids": ids, "labels": ids, "shift_labels": tokens[:, 1:].contiguous()}


def packed_batch(rows: Sequence[tuple[Shards, list[Segment]]], seq_len: int) -> Batch:
    """Return packed documents in one row, as models take it with `cu_seq_lens_q`.

    The documents of all rows follow each other without gaps; unused tokens are at the end, outside every document.

    Args:
        rows: shards and segments of each row.
        seq_len: tokens per row.

    Returns:
        `input_ids`, `labels`, `shift_labels` and `position_ids`, int64 `[1, rows * seq_len]`, and `cu_seq_lens_q`,
        int32 `[segments + 1]`. The target of a document's last token is the first token of a document, so that models
        learn where documents end. Unused tokens and the last token of a document that goes on in another row have no
        target.
    """
    size = len(rows) * seq_len
    ids = np.full(size, rows[0][0].manifest.bos_id, np.int64)
    positions = np.zeros(size, np.int64)
    labels, targets = (np.full(size, IGNORE_INDEX, np.int64) for _ in range(2))
    ends = [0]
    for shards, segments in rows:
        for document, start, length, complete in segments:
            begin, end = ends[-1], ends[-1] + length
            ids[begin:end] = shards.read(document, start, length)
            positions[begin:end] = np.arange(length)
            labels[begin:end] = ids[begin:end]
            targets[begin : end - 1] = ids[begin + 1 : end]
            if complete:
                targets[end - 1] = shards.manifest.bos_id
            else:  # as many labels as targets: trainers count labels
                labels[begin] = IGNORE_INDEX
            ends.append(end)
    positions[ends[-1] :] = np.arange(size - ends[-1])
    arrays = {"input_ids": ids, "labels": labels, "shift_labels": targets, "position_ids": positions}
    batch = {name: torch.from_numpy(array)[None] for name, array in arrays.items()}
    return {**batch, "cu_seq_lens_q": torch.tensor(ends, dtype=torch.int32)}


def make_batch(rows: Sequence[tuple[Shards, Row]], seq_len: int) -> Batch:
    """Return the batch of rows of either kind; see `packed_batch` and `stream_batch`."""
    segments = [(shards, row) for shards, row in rows if isinstance(row, list)]
    if segments:
        return packed_batch(segments, seq_len)
    return stream_batch([(shards, row) for shards, row in rows if isinstance(row, int)], seq_len)
