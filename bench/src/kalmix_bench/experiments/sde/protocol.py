"""How models learn, presets of it, and the cells of the experiment."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from kalmix.errors import ArgumentError
from kalmix_bench.datasets.sde.settings import SETTINGS
from kalmix_bench.experiments.sde.models import MODELS


@dataclass(frozen=True)
class SdeProtocol:
    """How a model learns, and on how much; the defaults are the paper's where it says (section 4.3).

    Attributes:
        epochs: over the training trajectories.  batch: trajectories a step.
        rate, clip: learning rate of Adam, falling to nothing along a half cosine; largest norm of the gradient.
        channels, heads: D, in which measurements are embedded, and heads of a layer.
        train, validation, test: trajectories; a real series has its own.

    Raises:
        ArgumentError: a number makes no sense.
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
        """Of the splits."""
        return self.train, self.validation, self.test


PRESETS = {"laptop": SdeProtocol(epochs=100, validation=32, test=128), "paper": SdeProtocol()}

REFERENCES = "references"  # a cell's model that stands for all who learn nothing


@dataclass(frozen=True)
class SdeCell:
    """One model in one setting, for one seed: the unit that is never run twice.

    Attributes:
        model: of `MODELS`, or `REFERENCES`: all that learn nothing.

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
                raise ArgumentError(name, got=repr(getattr(self, name)), expected=f"one of {', '.join(known)}")

    def __str__(self) -> str:
        return f"{self.setting}  {self.model}  seed {self.seed}"

    def to_dict(self) -> dict[str, Any]:
        """Return its line in a file, without the results."""
        return {**asdict(self), "data_source": SETTINGS[self.setting].to_dict()}
