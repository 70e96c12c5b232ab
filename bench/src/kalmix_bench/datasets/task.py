"""Classes that describe a task: its settings, its rows, its metrics and the published setup."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, ClassVar, Generic, NamedTuple, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from kalmix.errors import ArgumentError, any_of
from kalmix.validation import require
from kalmix_bench.datasets.metrics import IGNORE_INDEX, Metric

Integers = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Rows:
    """Rows of a task: n sequences of T tokens.

    Attributes:
        inputs: `[n, T]` int64 token ids.
        targets: `[n, T]` int64 target id at each token, `metrics.IGNORE_INDEX` where it is not scored.
        metadata: more about each row, by name, each `[n]` or `[n, *]`; scores are broken down by it.
    """

    inputs: Integers
    targets: Integers
    metadata: Mapping[str, NDArray[Any]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.inputs)


class Data(NamedTuple):
    """Training and test rows of a task.

    Attributes:
        train: training rows. As in the original code, they may have targets that cannot be predicted.
        test: test rows.
        vocab_size: ids of inputs and targets are 0 to vocab_size - 1.
        settings: all settings, baseline values included; JSON-compatible.
    """

    train: Rows
    test: Rows
    vocab_size: int
    settings: dict[str, Any]


class TaskSettings(Protocol):
    """Frozen dataclass of a task's settings, named as in the original code; values are numbers, booleans or strings."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def vocab_size(self) -> int: ...


S = TypeVar("S", bound=TaskSettings)
Sampler = Callable[[S, int, int, int], tuple[Rows, Rows]]  # settings, seed, train rows, test rows


@dataclass(frozen=True)
class Published:
    """Setup of the task's original code or paper.

    Attributes:
        source: repository or paper.
        seed, train, test: seed and numbers of rows of the data.
        batch_size: rows per training step.
        difficulties: changes to the baseline settings, one mapping per step of difficulty; the key `train` changes the
            number of training rows.
    """

    source: str
    seed: int
    train: int
    test: int
    batch_size: int
    difficulties: tuple[Mapping[str, Any], ...] = ()


@dataclass(frozen=True)
class Task(Generic[S]):
    """Task whose rows are integers.

    Attributes:
        name: name for `kalmix_bench.datasets.make`.
        baseline: default settings.
        sample: function that draws training and test rows.
        scores: metrics by name; the first is the one that the papers report.
        published: setup of the original code or paper.
        from_last: whether all targets are predicted from the last token's output alone (the bottleneck of an
            autoencoder), instead of each from its own token's output.
    """

    name: str
    baseline: S
    sample: Sampler[S]
    scores: Mapping[str, Metric]
    published: Published
    from_last: bool = False

    def make(self, *, seed: int, train: int, test: int, **settings: Any) -> Data:
        """Make rows of this task; see `kalmix_bench.datasets.make`."""
        for name, value in {"seed": seed, "train": train, "test": test}.items():
            require(_has_type(int, value) and value >= 0, name, repr(value), "an integer, at least 0")
        require(seed < 2**32, "seed", seed, "below 2^32")
        configured = self.configure(**settings)
        rows = self.sample(configured, seed, train, test)
        for part, count in zip(rows, (train, test), strict=True):
            self._check_rows(part, count, configured.vocab_size)
        return Data(*rows, configured.vocab_size, asdict(configured))

    def _check_rows(self, rows: Rows, count: int, vocab_size: int) -> None:
        """Check rows that `sample` drew: on a GPU, an id out of range would end all processes that share it."""
        for name, ids in {"inputs": rows.inputs, "targets": rows.targets}.items():
            scored = ids if name == "inputs" else ids[ids != IGNORE_INDEX]
            if scored.size and not 0 <= scored.min() <= scored.max() < vocab_size:
                problem = f"of {self.name} have ids from {scored.min()} to {scored.max()}"
                raise ArgumentError(name, problem=problem, expected=f"ids from 0 to {vocab_size - 1} (its vocab_size)")
            if ids.ndim != 2 or len(ids) != count or ids.shape != rows.inputs.shape:
                problem = f"of {self.name} have the shape {list(ids.shape)}"
                raise ArgumentError(name, problem=problem, expected=f"[{count}, T], the same for inputs and targets")

    def configure(self, **settings: Any) -> S:
        """Return the baseline settings with some values replaced.

        Raises:
            ArgumentError: the task has no such setting, or the value is not valid.
        """
        kinds = {setting.name: type(getattr(self.baseline, setting.name)) for setting in fields(self.baseline)}
        for name, value in settings.items():
            if name not in kinds:
                raise ArgumentError(name, problem=f"is not a setting of {self.name}", expected=any_of(kinds))
            require(_has_type(kinds[name], value), name, repr(value), f"a value of type {kinds[name].__name__}")
        return replace(self.baseline, **{name: kinds[name](value) for name, value in settings.items()})


def _has_type(kind: type, value: object) -> bool:
    """Return whether a value is valid for a setting of type bool, int, float or str; numpy scalars are accepted."""
    if isinstance(value, bool | np.bool_):
        return kind is bool
    accepted_types: dict[type, Any] = {float: (float, int, np.floating, np.integer), int: (int, np.integer)}
    return isinstance(value, accepted_types.get(kind, kind))
