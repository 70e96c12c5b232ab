"""Workers of a loader and signals to all processes of a run."""

from __future__ import annotations

import subprocess
import sys
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
        subprocess.run(["kill", "-TERM", str(worker.pid)], check=True)  # the sender is another process
    for _ in range(6):
        assert torch.equal(next(batches)["input_ids"], next(plain)["input_ids"])
    with pytest.raises(RuntimeError, match="killed by signal"):  # PyTorch raises it when a worker has ended
        subprocess.run(["kill", "-TERM", str(workers[0].pid)], check=True)
        time.sleep(20)


def test_a_process_ends_although_its_workers_run(prepared: tuple[Path, Manifest]) -> None:
    """A script that keeps an iterator until its end leaves the workers to Python, which sends them a SIGTERM."""
    code = """
import sys
from kalmix.training.shards import Order, TokenLoader
loader = TokenLoader(sys.argv[1], Order(seq_len=16, packing="stream"), batch_size=2, workers=2)
batches = iter(loader)
print(len(next(batches)["input_ids"]))
"""
    ended = subprocess.run(
        [sys.executable, "-c", code, str(prepared[0])], capture_output=True, text=True, check=False, timeout=60
    )
    assert (ended.returncode, ended.stdout) == (0, "2\n"), ended.stderr
    assert "killed" not in ended.stderr
