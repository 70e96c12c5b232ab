"""Workers of a loader and signals to all processes of a run."""

from __future__ import annotations

import os
import signal
import time
from multiprocessing import active_children
from pathlib import Path

import pytest
import torch

from kalmix.training.shards import Manifest, Order, TokenLoader


def test_workers_outlive_the_first_sigterm(prepared: tuple[Path, Manifest]) -> None:
    """torchrun sends it to all processes of a run, and the training process then still needs batches."""
    loader = TokenLoader(prepared[0], Order(seq_len=16, packing="stream"), batch_size=2, workers=2)
    plain = iter(TokenLoader(prepared[0], Order(seq_len=16, packing="stream"), batch_size=2))
    batches, before = iter(loader), active_children()
    for _ in range(2):  # a batch of each worker
        assert torch.equal(next(batches)["input_ids"], next(plain)["input_ids"])
    workers = [worker for worker in active_children() if worker not in before]
    assert len(workers) == 2
    for worker in workers:
        os.kill(worker.pid or 0, signal.SIGTERM)
    for _ in range(6):
        assert torch.equal(next(batches)["input_ids"], next(plain)["input_ids"])
    with pytest.raises(RuntimeError, match="killed by signal"):  # PyTorch raises it when a worker has ended
        os.kill(workers[0].pid or 0, signal.SIGTERM)
        time.sleep(20)
