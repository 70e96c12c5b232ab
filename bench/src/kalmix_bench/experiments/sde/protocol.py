"""Training protocol, presets and cells of the experiment."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from kalmix.errors import ArgumentError, unknown_name
from kalmix_bench.datasets.sde.settings import SETTINGS
from kalmix_bench.experiments.sde.models import MODELS


@dataclass(frozen=True)
class SdeProtocol:
    """Training and data sizes; the defaults are the paper's where it states them (section 4.3).

    Attributes:
        epochs: passes over the training trajectories.
        batch_size: trajectories per step.
        learning_rate: Adam's; decreases to 0 along a half cosine.
        max_grad_norm: largest gradient norm.
        channels: D, dimension of the embedded measurements.
        heads: heads per layer.
        train, validation, test: numbers of trajectories; a real series has its own.

    Raises:
        ArgumentError: a number is out of range.
    """

    epochs: int = 300
    batch_size: int = 32
    learning_rate: float = 1e-2
    max_grad_norm: float = 1.0
    channels: int = 128
    heads: int = 2
    train: int = 128
    validation: int = 64
    test: int = 256

    def __post_init__(self) -> None:
        for name in ("epochs", "batch_size", "channels", "heads", "train", "validation", "test"):
            if getattr(self, name) < 1:
                raise ArgumentError(name, got=getattr(self, name), expected="at least 1")
        if not 0 < self.learning_rate < float("inf"):
            raise ArgumentError("learning_rate", got=self.learning_rate, expected="a positive number")

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Numbers of training, validation and test trajectories."""
        return self.train, self.validation, self.test


PRESETS = {"laptop": SdeProtocol(epochs=100, validation=32, test=128), "paper": SdeProtocol()}

REFERENCES = "references"  # name in place of a model for all predictors that learn nothing


@dataclass(frozen=True)
class SdeCell:
    """One model in one setting with one seed.

    Attributes:
        model: a key of `MODELS`, or `REFERENCES` for the predictors that learn nothing.

    Raises:
        ArgumentError: there is no such setting or model.
    """

    setting: str
    model: str
    seed: int
    protocol: SdeProtocol

    def __post_init__(self) -> None:
        for name, known in (("setting", SETTINGS), ("model", (*MODELS, REFERENCES))):
            if getattr(self, name) not in known:
                raise unknown_name(name, getattr(self, name), known)

    def __str__(self) -> str:
        return f"{self.setting}  {self.model}  seed {self.seed}"

    def to_dict(self) -> dict[str, Any]:
        """Return everything that defines the cell."""
        return {**asdict(self), "data_source": SETTINGS[self.setting].to_dict()}
