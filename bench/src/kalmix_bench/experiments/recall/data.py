"""Rows on the device, and the batches they come in."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from kalmix.models.losses import IGNORE_INDEX
from kalmix_bench import datasets
from kalmix_bench.experiments.recall.protocol import RecallCell

TensorBatch = dict[str, Tensor]


class CellData(NamedTuple):
    """The rows of a cell.

    Attributes:
        parts: a `Data` for each of the cell's parts.
        validation: validation rows of each part; none where the cell draws none, or the part has no test rows.
        vocab_size: ids are below it.
    """

    parts: list[datasets.Data]
    validation: list[datasets.Rows]
    vocab_size: int

    @property
    def test(self) -> list[datasets.Rows]:
        """Test rows of each part."""
        return [part.test for part in self.parts]


def draw_cell_data(cell: RecallCell) -> CellData:
    """Draw the rows of a cell; each part has a seed of its own.

    Validation rows are drawn behind the test rows and as those are: a task may ask less of test rows than of training
    rows.
    """
    protocol = cell.protocol
    first = cell.seed if protocol.data_seed is None else protocol.data_seed
    parts, validation = [], []
    for place, part in enumerate(cell.parts):
        rows, settings = part.test + (protocol.validation if part.test else 0), dict(part.settings)
        data = datasets.make(cell.task, seed=first + place, train=part.train, test=rows, **settings)
        if rows > part.test:
            validation.append(_take(data.test, slice(part.test, None)))
            data = data._replace(test=_take(data.test, slice(part.test)))
        parts.append(data)
    return CellData(parts, validation, max(part.vocab_size for part in parts))


def _take(rows: datasets.Rows, which: slice) -> datasets.Rows:
    facts = {name: fact[which] for name, fact in rows.metadata.items()}
    return datasets.Rows(rows.inputs[which], rows.targets[which], facts)


class Batches:
    """Batches of the training rows, which stay on the device; what the Trainer takes for a data loader.

    Each is of one part, and all of a part are of one size, so that a step is recorded once: the last is filled with a
    row that asks nothing. The order of an epoch follows from seed and epoch alone, so that a run that goes on from a
    checkpoint sees what it would have seen.

    Attributes:
        skip: batches that the next pass leaves out: a checkpoint's run has had them.
    """

    def __init__(self, drawn: CellData, batch: int, *, shuffle: bool, seed: int, device: torch.device) -> None:
        kept = [part.train for part in drawn.parts if len(part.train)]
        self.rows = [
            tuple(
                F.pad(torch.from_numpy(x).to(device), (0, 0, 0, 1), value=blank)
                for x, blank in ((part.inputs, 0), (part.targets, IGNORE_INDEX))
            )
            for part in kept
        ]
        self.batch, self.shuffle, self.seed, self.epoch, self.skip = batch, shuffle, seed, 0, 0

    def set_epoch(self, epoch: int) -> None:
        """As the Trainer tells which epoch comes next."""
        self.epoch = epoch

    def __len__(self) -> int:
        return sum(-(-(len(inputs) - 1) // self.batch) for inputs, _ in self.rows)

    def __iter__(self) -> Iterator[TensorBatch]:
        generator = torch.Generator().manual_seed(1_000_003 * self.seed + self.epoch)
        chosen = []
        for part, (inputs, _) in enumerate(self.rows):
            count = len(inputs) - 1
            order = torch.randperm(count, generator=generator) if self.shuffle else torch.arange(count)
            whole = F.pad(order, (0, -count % min(count, self.batch)), value=count)
            chosen += [(part, index) for index in whole.to(inputs.device).split(self.batch)]
        turns = torch.randperm(len(chosen), generator=generator).tolist() if self.shuffle else range(len(chosen))
        skip, self.skip = self.skip, 0
        for part, index in (chosen[turn] for turn in list(turns)[skip:]):
            inputs, targets = self.rows[part]
            yield {"inputs": inputs[index], "targets": targets[index]}
