"""Training protocol and cell of a benchmark."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from kalmix.errors import ArgumentError
from kalmix.validation import check_choice, require
from kalmix_bench import datasets
from kalmix_bench.experiments.recall.layers import layer_name
from kalmix_bench.experiments.recall.model_shape import ModelShape

SCHEDULES = ("constant", "cosine", "warmup")
CHOICES = ("loss", "score", "last")


@dataclass(frozen=True)
class RecallProtocol:
    """Training protocol.

    Attributes:
        epochs: largest number of passes over the training rows.
        patience: epochs without a better score on the test rows after which training ends; `None` for no limit.
        stop_score: score at which training ends.
        batch_size: rows per step.
        shuffle: whether the order of rows changes every epoch.
        learning_rate, weight_decay: AdamW's, for all parameters.
        max_grad_norm: largest gradient norm; 0 for no clipping.
        betas: AdamW's.
        schedule: of the learning rate: "constant"; "cosine", decreasing epoch by epoch along a half cosine to
            `min_learning_rate`; or "warmup", rising over `warmup` steps and then decreasing along a half cosine by
            steps.
        bf16: whether to train under bfloat16 autocast.
        select_epoch: epoch whose scores are the result: that of the lowest test "loss" (as MAD's code), of the best
            test "score" (of equal scores, that of the lowest loss), or the "last". All three are stored. Parts without
            training rows, such as longer sequences, do not count, nor for `patience` and `stop_score`.
        validation: number of additional validation rows per part with test rows. They replace the test rows in
            `select_epoch`, `patience` and `stop_score`. 0 uses test rows, as the papers do.
        data_seed: seed of the rows; the cell's seed by default.
        cuda_graph: on a GPU, compile forward and backward and replay them as a CUDA graph. Results are equal up to
            rounding; compilation takes about half a minute.
    """

    epochs: int
    batch_size: int
    learning_rate: float
    patience: int | None = None
    stop_score: float = 1.0
    shuffle: bool = True
    weight_decay: float = 0.0
    max_grad_norm: float = 0.0
    betas: tuple[float, float] = (0.9, 0.999)
    schedule: str = "constant"
    min_learning_rate: float = 0.0
    warmup: int = 0
    bf16: bool = False
    select_epoch: str = "score"
    data_seed: int | None = None
    cuda_graph: bool = False
    validation: int = 0

    def __post_init__(self) -> None:
        for name in ("epochs", "batch_size"):
            if getattr(self, name) < 1:
                raise ArgumentError(name, got=getattr(self, name), expected="at least 1")
        if self.validation < 0:
            raise ArgumentError("validation", got=self.validation, expected="at least 0")
        if not 0 < self.learning_rate < float("inf"):
            raise ArgumentError("learning_rate", got=self.learning_rate, expected="a positive number")
        for name, known in (("schedule", SCHEDULES), ("select_epoch", CHOICES)):
            check_choice(name, getattr(self, name), known)


@dataclass(frozen=True)
class Part:
    """Rows of one setting: numbers of training and test rows.

    Attributes:
        settings: settings that differ from the task's baseline, by name.
    """

    train: int
    test: int
    settings: tuple[tuple[str, Any], ...] = ()

    @classmethod
    def of(cls, train: int, test: int, **settings: Any) -> Part:
        """Build a part with settings as keyword arguments."""
        return cls(train, test, tuple(sorted(settings.items())))


@dataclass(frozen=True)
class RecallCell:
    """One layer on one task with one seed.

    Attributes:
        task: a name of `kalmix_bench.datasets.make`.
        parts: the rows; a batch has rows of one part.
        layer: layer as `layers.parse_layer` takes it, stored in the form of `layers.layer_name`.
        shape: sizes of the model.
        protocol: training protocol.
        seed: seed of weights and of the order of rows.

    Raises:
        ArgumentError: there is no such task, setting, layer or option, or the layer does not support the state size.
    """

    task: str
    parts: tuple[Part, ...]
    layer: str
    shape: ModelShape
    protocol: RecallProtocol
    seed: int

    def __post_init__(self) -> None:
        require(self.seed >= 0, "seed", self.seed, "at least 0")
        for part in self.parts:
            for name, rows in {"train": part.train, "test": part.test}.items():
                require(rows >= 0, name, rows, "at least 0")
        self.settings()
        object.__setattr__(self, "layer", layer_name(self.layer))
        self.shape.layer_options(self.layer)

    def settings(self) -> list[Mapping[str, Any]]:
        """Return all settings of each part, baseline values included."""
        task = datasets.get_task(self.task)
        return [asdict(task.configure(**dict(part.settings))) for part in self.parts]

    def __str__(self) -> str:
        return f"{self.task}  {self.layer}  {self.shape.hidden_size} x {self.shape.depth}  seed {self.seed}"

    def to_dict(self) -> dict[str, Any]:
        """Return everything that defines the cell; without `validation` if it is 0, as in older rows."""
        parts = [
            {"train": part.train, "test": part.test, "settings": settings}
            for part, settings in zip(self.parts, self.settings(), strict=True)
        ]
        protocol = asdict(self.protocol)
        if not self.protocol.validation:
            del protocol["validation"]
        return {
            "task": self.task,
            "parts": parts,
            "layer": self.layer,
            "mixer": self.shape.layer_options(self.layer),
            "shape": asdict(self.shape),
            "protocol": protocol,
            "seed": self.seed,
        }
