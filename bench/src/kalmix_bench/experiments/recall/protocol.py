"""How a model learns and is judged, and the cells of a benchmark."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from kalmix.errors import ArgumentError
from kalmix_bench import datasets
from kalmix_bench.experiments.recall.layers import layer_name
from kalmix_bench.experiments.recall.models import ModelShape

SCHEDULES = ("constant", "cosine", "warmup")
CHOICES = ("loss", "score", "last")


@dataclass(frozen=True)
class RecallProtocol:
    """How a model learns.

    Attributes:
        epochs: over the training rows, at most.
        patience: epochs without a better score on the test rows after which it ends; none if absent.
        enough: score at which it ends.
        batch: rows a step.  shuffle: whether rows come in another order each epoch.
        rate, decay, clip: AdamW's rate and weight decay, of all parameters alike; largest gradient norm, 0 for any.
        betas: of AdamW.
        schedule: the rate is "constant"; falls along a half "cosine", epoch by epoch, to `least`; or rises over
            `warmup` steps and then falls so step by step.
        bf16: whether under bfloat16 autocast.
        chosen: the epoch whose scores are the result: that of the least "loss" on the test rows (MAD's code), of the
            best "score" on them, or the "last". All three are kept.
        validation: validation rows to draw in addition, of each part with test rows. They take the test rows' place in
            `chosen`, `patience` and `enough`; 0 leaves these to the test rows, as the papers do.
        data_seed: of the rows; of the cell if absent.
        captured: on a GPU, compile forward and backward, record them once as a CUDA graph and replay it: the same up to
            rounding, in fewer kernels that are launched at once. Half a minute before the first step.
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
            if getattr(self, name) not in known:
                raise ArgumentError(name, got=repr(getattr(self, name)), expected=f"one of {', '.join(known)}")


@dataclass(frozen=True)
class Part:
    """Rows of one setting: how many to learn from and how many to be judged on.

    Attributes:
        settings: those that differ from the task's baseline, by name.
    """

    train: int
    test: int
    settings: tuple[tuple[str, Any], ...] = ()

    @classmethod
    def of(cls, train: int, test: int, **settings: Any) -> Part:
        """With settings by their names."""
        return cls(train, test, tuple(sorted(settings.items())))


@dataclass(frozen=True)
class RecallCell:
    """One layer on one task, for one seed: what is never run twice.

    Attributes:
        task: a name that `kalmix_bench.datasets.make` knows.
        parts: the rows; a batch is of one part.
        layer: a name, or a name and options, as `layers.layer` takes them; kept as `layers.layer_name` spells it.
        shape: of the model.
        protocol: of its training.
        seed: of weights and order.

    Raises:
        ArgumentError: no such task, setting, layer or option, or the layer's state cannot be sized as `shape` says.
    """

    task: str
    parts: tuple[Part, ...]
    layer: str
    shape: ModelShape
    protocol: RecallProtocol
    seed: int

    def __post_init__(self) -> None:
        self.settings()
        object.__setattr__(self, "layer", layer_name(self.layer))
        self.shape.layer_options(self.layer)

    def settings(self) -> list[Mapping[str, Any]]:
        """All settings of each part, the baseline's where not given."""
        task = datasets.get_task(self.task)
        return [asdict(task.configure(**dict(part.settings))) for part in self.parts]

    def __str__(self) -> str:
        return f"{self.task}  {self.layer}  {self.shape.hidden_size} x {self.shape.depth}  seed {self.seed}"

    def to_dict(self) -> dict[str, Any]:
        """Return its line in a file, without the results; older lines lack `validation`, and so do cells without it."""
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
