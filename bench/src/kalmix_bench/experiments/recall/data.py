"""Rows of a cell, and their batches on the device."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from kalmix.models.losses import IGNORE_INDEX
from kalmix_bench import datasets
from kalmix_bench.experiments.recall.protocol import RecallCell
from kalmix_bench.experiments.recall.row_files import parts_of, read_or_draw

TensorBatch = dict[str, Tensor]


class CellData(NamedTuple):
    """Rows of a cell.

    Attributes:
        parts: data of each of the cell's parts.
        validation: validation rows of each part with test rows; empty if the cell has none.
        vocab_size: number of ids.
    """

    parts: list[datasets.Data]
    validation: list[datasets.Rows]
    vocab_size: int

    @property
    def test(self) -> list[datasets.Rows]:
        """Test rows of each part."""
        return [part.test for part in self.parts]


def draw_cell_data(cell: RecallCell, folder: Path | None = None) -> CellData:
    """Draw the rows of a cell; each part has its own seed.

    Validation rows are drawn after the test rows and in the same way: a task's test rows may have fewer targets than
    its training rows.

    Args:
        cell: cell whose rows are drawn.
        folder: folder of `row_files`, so that cells with equal rows draw them once; `None` for none.
    """
    parts, validation = [], []
    for part, rows in zip(cell.parts, parts_of(cell), strict=True):
        data = read_or_draw(rows, folder)
        if rows.test > part.test:
            validation.append(_take(data.test, slice(part.test, None)))
            data = data._replace(test=_take(data.test, slice(part.test)))
        parts.append(data)
    return CellData(parts, validation, max(part.vocab_size for part in parts))


def _take(rows: datasets.Rows, which: slice) -> datasets.Rows:
    facts = {name: fact[which] for name, fact in rows.metadata.items()}
    return datasets.Rows(rows.inputs[which], rows.targets[which], facts)


class Batches:
    """Batches of the training rows, which stay on the device; used by the Trainer as a data loader.

    A batch has rows of one part. All batches of a part have the same size, so that a CUDA graph fits them: the last one
    is padded with a row without targets. The order depends only on seed and epoch, so a resumed run sees the same
    batches. If less than half of a row's tokens are scored, batches have their `positions`, `[n, K]`, so that the model
    computes no logits elsewhere. Rows of one length have the same K; a row with fewer targets has positions without
    one.

    Attributes:
        skip: number of batches that the next pass omits, because the run had them before its checkpoint.
    """

    def __init__(self, data: CellData, batch: int, *, shuffle: bool, seed: int, device: torch.device) -> None:
        parts = [part.train for part in data.parts if len(part.train)]
        self.rows = [
            tuple(
                F.pad(torch.from_numpy(x).to(device), (0, 0, 0, 1), value=blank)
                for x, blank in ((part.inputs, 0), (part.targets, IGNORE_INDEX))
            )
            for part in parts
        ]
        most: dict[int, int] = {}  # scored tokens of a row, by length
        for _, targets in self.rows:
            length, count = targets.shape[1], int((targets != IGNORE_INDEX).sum(1).max())
            most[length] = max(count, most.get(length, 0))
        self.positions = [_scored_positions(targets, most[targets.shape[1]]) for _, targets in self.rows]
        self.batch, self.shuffle, self.seed, self.epoch, self.skip = batch, shuffle, seed, 0, 0

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch; called by the Trainer."""
        self.epoch = epoch

    def __len__(self) -> int:
        return sum(-(-(len(inputs) - 1) // self.batch) for inputs, _ in self.rows)

    def __iter__(self) -> Iterator[TensorBatch]:
        generator = torch.Generator().manual_seed(1_000_003 * self.seed + self.epoch)
        batches = []
        for part, (inputs, _) in enumerate(self.rows):
            count = len(inputs) - 1
            order = torch.randperm(count, generator=generator) if self.shuffle else torch.arange(count)
            padded_order = F.pad(order, (0, -count % min(count, self.batch)), value=count)
            batches += [(part, index) for index in padded_order.to(inputs.device).split(self.batch)]
        turns = torch.randperm(len(batches), generator=generator).tolist() if self.shuffle else range(len(batches))
        skip, self.skip = self.skip, 0
        for part, index in (batches[turn] for turn in list(turns)[skip:]):
            (inputs, targets), positions = self.rows[part], self.positions[part]
            scored = {} if positions is None else {"positions": positions[index]}
            yield {"inputs": inputs[index], "targets": targets[index], **scored}


def _scored_positions(targets: Tensor, count: int) -> Tensor | None:
    """Return `count` different positions of each row, `[n, count]`, the scored ones first; `None` if they are half of
    the tokens or more.
    """
    if 2 * count >= targets.shape[1]:
        return None
    return (targets == IGNORE_INDEX).sort(dim=1, stable=True).indices[:, :count].contiguous()
