"""Number of sequences in a batch, batches in a step and steps in a run, from a recipe and a number of processes."""

from __future__ import annotations

from typing import NamedTuple

from kalmix.errors import ArgumentError
from kalmix.training.recipe import Recipe


class Batching(NamedTuple):
    """Sizes of the batches of a run.

    Attributes:
        rows: sequences in a batch of a process. Processes that share sequences count as one.
        accumulation: batches in an optimizer step.
        groups: number of processes that read different sequences.
        step_tokens: tokens in an optimizer step of all processes.
        steps: optimizer steps of the run; `None` if time alone limits it.
    """

    rows: int
    accumulation: int
    groups: int
    step_tokens: int
    steps: int | None


def plan_batches(recipe: Recipe, processes: int, sequences: int | None = None) -> Batching:
    """Compute the sizes of batches.

    Args:
        recipe: settings of the run.
        processes: number of processes that train.
        sequences: number of sequences in the data; `None` if it is not known. Batches are not larger.

    Raises:
        ArgumentError: the number of processes is no multiple of `context_parallel`, or `batch_tokens` is no multiple of
            `seq_len` times the number of groups.
    """
    groups, rest = divmod(processes, recipe.context_parallel)
    if rest:
        expected = f"a divisor of {processes}, the number of processes"
        raise ArgumentError("context_parallel", got=recipe.context_parallel, expected=expected)
    most = recipe.batch_size
    readers = f"{groups} groups of {recipe.context_parallel} processes" if groups < processes else f"{groups} processes"
    if sequences is not None:
        most = min(most, max(1, sequences // groups))
    rows, accumulation = most, recipe.grad_accum
    if recipe.batch_tokens is not None:
        needed, rest = divmod(recipe.batch_tokens, groups * recipe.seq_len)
        if rest or not needed:
            expected = f"a multiple of {groups * recipe.seq_len:,} (seq_len times {readers})"
            raise ArgumentError("batch_tokens", got=recipe.batch_tokens, expected=expected)
        rows = next(size for size in range(min(most, needed), 0, -1) if needed % size == 0)
        accumulation = needed // rows
    step_tokens = rows * accumulation * groups * recipe.seq_len
    return Batching(rows, accumulation, groups, step_tokens, count_steps(recipe, step_tokens))


def count_steps(recipe: Recipe, step_tokens: int) -> int | None:
    """Return the optimizer steps of a run with so many tokens in a step; `None` if time alone limits it."""
    return recipe.steps if recipe.tokens is None else -(-recipe.tokens // step_tokens)
