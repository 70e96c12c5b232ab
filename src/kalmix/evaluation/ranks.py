"""Processes that torchrun started and that evaluate a model together: each computes its share of the requests."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist

from kalmix._extras import optional_imports

with optional_imports():
    from accelerate import PartialState

from kalmix.training.peers import launched_processes, peer_errors

T = TypeVar("T")
R = TypeVar("R")


class Ranks(NamedTuple):
    """Number of this process, and of all processes that evaluate together.

    Attributes:
        rank: number of this process; 0 writes the results.
        size: number of processes.
    """

    rank: int = 0
    size: int = 1

    def divide(self, items: Sequence[T], compute: Callable[[list[T]], list[R]], keys: Sequence[int]) -> list[R]:
        """Compute a result for each item, each in one process, and return all results in all processes.

        Args:
            items: the items, equal in all processes.
            compute: function from a list of items to a list of their results.
            keys: numbers of the items; those of equal numbers are computed in the same process.
        """
        if self.size == 1:
            return compute(list(items))
        owners = [key % self.size for key in keys]
        own = [item for item, owner in zip(items, owners, strict=True) if owner == self.rank]
        found: list[Any] = [None] * self.size
        with peer_errors(
            ConnectionError("another process of this evaluation has ended; repeat the command to continue")
        ):
            dist.all_gather_object(found, compute(own) if own else [])
        results = [iter(part) for part in found]
        return [next(results[owner]) for owner in owners]

    @contextmanager
    def main_first(self) -> Iterator[None]:
        """Enter a block in process 0 first, and in the others when it has left it without an error."""
        quiet = SystemExit(1)  # process 0 has printed its error
        if self.rank:
            with peer_errors(quiet):
                dist.barrier()
        yield
        if self.size > 1 and not self.rank:
            with peer_errors(quiet):
                dist.barrier()


ALONE = Ranks()


def start_ranks(device: str | None) -> Ranks:
    """Start the exchange between the processes of torchrun, and return their numbers.

    Args:
        device: device of the model; `None` for an accelerator if there is one.
    """
    if launched_processes() == 1:
        return ALONE
    cpu = device == "cpu" or not torch.accelerator.is_available()
    state = PartialState(cpu=cpu, timeout=timedelta(weeks=1))  # a process may wait long for the others
    return Ranks(state.process_index, state.num_processes)
