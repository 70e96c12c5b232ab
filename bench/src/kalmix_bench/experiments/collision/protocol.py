"""Studies and presets of the learned collision experiments."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch

from kalmix.errors import ArgumentError, unknown_name
from kalmix.validation import check_choice
from kalmix_bench.datasets.collision.sequences import CollidingPairs, Episode, RandomAddresses
from kalmix_bench.datasets.seeds import stream_seed
from kalmix_bench.experiments.collision.models import UPDATES

Condition = dict[str, Any]
OVERLAP = 0.92  # overlap of the mechanism's two addresses in E.4.1


@dataclass(frozen=True)
class CollisionProtocol:
    """Training and test sizes; the defaults are the paper's (E.5.5).

    Attributes:
        steps: steps of AdamW with betas 0.9 and 0.999.
        batch_size: sequences per step and seed.
        learning_rate, weight_decay, max_grad_norm: of AdamW; gradients are clipped per seed.
        test_sequences: sequences per test condition.
        queries: "read" (queries only read) or "write" (they also write); the paper does not specify it.
    """

    steps: int = 2500
    batch_size: int = 256
    learning_rate: float = 3e-4
    weight_decay: float = 1e-4
    max_grad_norm: float = 1.0
    test_sequences: int = 1024
    queries: str = "read"

    def __post_init__(self) -> None:
        for name in ("steps", "batch_size", "test_sequences"):
            if getattr(self, name) < 1:
                raise ArgumentError(name, got=getattr(self, name), expected="at least 1")
        check_choice("queries", self.queries, ("read", "write"))
        if not 0 < self.learning_rate < float("inf"):
            raise ArgumentError("learning_rate", got=self.learning_rate, expected="a positive number")


PRESETS = {
    "laptop": CollisionProtocol(steps=250, batch_size=16, learning_rate=3e-3, test_sequences=32),
    "paper": CollisionProtocol(),
}


@dataclass(frozen=True)
class CollisionStudy:
    """Task, the conditions of which each training step uses one, and the test conditions."""

    task: CollidingPairs | RandomAddresses
    training_conditions: tuple[Condition, ...]
    test_conditions: tuple[Condition, ...]

    def draw(self, condition: Condition, count: int, generator: torch.Generator) -> Episode:
        """Draw `count` sequences of a condition."""
        return self.task.draw(count, **condition, generator=generator)


_FLOODS, _OVERLAPS = (1, 2, 4, 8, 16, 32, 64, 128, 256), (0.6, 0.65, 0.7, 0.75, 0.85, 0.9, 0.95)
_WRITES = (16, 32, 48, 64)
STUDIES = {
    "recall": CollisionStudy(
        CollidingPairs(),
        training_conditions=tuple({"flood": flood, "overlap": (0.6, 0.8)} for flood in (1, 2, 4, 8)),
        test_conditions=(
            *({"flood": flood, "overlap": (0.8, 0.8)} for flood in _FLOODS),
            *({"flood": 64, "overlap": (rho, rho)} for rho in _OVERLAPS),
        ),
    ),
    "crowding": CollisionStudy(
        RandomAddresses(),
        training_conditions=tuple({"writes": writes} for writes in _WRITES),
        test_conditions=tuple({"writes": writes} for writes in (*_WRITES, 96, 128, 192, 256)),
    ),
}


@dataclass(frozen=True)
class CollisionCell:
    """One model in one study with one seed.

    Raises:
        ArgumentError: there is no such study or model, or the seed is not in [0, 2^30).
    """

    study: str
    model: str
    seed: int
    protocol: CollisionProtocol

    def __post_init__(self) -> None:
        for name, known in (("study", STUDIES), ("model", UPDATES)):
            if getattr(self, name) not in known:
                raise unknown_name(name, getattr(self, name), known)
        stream_seed("training", self.seed)

    def __str__(self) -> str:
        return f"{self.study}  {self.model}"

    def to_dict(self) -> dict[str, Any]:
        """Return everything that defines the cell."""
        return asdict(self)
