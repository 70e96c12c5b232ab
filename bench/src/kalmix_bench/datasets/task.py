"""What a benchmark is: settings with a baseline, rows drawn from a seed, scores, and what was published about it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, ClassVar, Generic, NamedTuple, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from kalmix.validation import require
from kalmix_bench.datasets.metrics import Metric

Integers = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Rows:
    """Rows to learn from, or to be judged on; n of them, T tokens each.

    Attributes:
        inputs: `[n, T]` int64 token ids.
        targets: `[n, T]` int64, the id wanted at each token, `metrics.IGNORED` where nothing is scored.
        facts: what is known of each row beside its tokens, `[n]` or `[n, *]` a fact: what scores are sliced by.
    """

    inputs: Integers
    targets: Integers
    metadata: Mapping[str, NDArray[Any]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.inputs)


class Data(NamedTuple):
    """A benchmark's rows.

    Attributes:
        train: what is learned from; its targets may cover what no model can know, as the original's do.
        test: what is judged.
        vocab_size: ids are 0 ... vocab_size - 1, in inputs and targets.
        settings: all of them, the baseline's where not given; values that JSON can hold.
    """

    train: Rows
    test: Rows
    vocab_size: int
    settings: dict[str, Any]


class TaskSettings(Protocol):
    """A frozen dataclass: a benchmark's settings by the names of its own code, each a number, a truth or a string."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def vocab_size(self) -> int: ...


S = TypeVar("S", bound=TaskSettings)
Sampler = Callable[[S, int, int, int], tuple[Rows, Rows]]  # settings, seed, train rows, test rows


@dataclass(frozen=True)
class Published:
    """What a benchmark's own code, or the paper that poses it, does with it.

    Attributes:
        source: where that is.
        seed, train, test: of the data.
        batch: rows a step of training.
        harder: the steps by which it is made harder, each what changes of the baseline; `train` among the changes
            is the number of training rows.
    """

    source: str
    seed: int
    train: int
    test: int
    batch_size: int
    difficulties: tuple[Mapping[str, Any], ...] = ()


@dataclass(frozen=True)
class Task(Generic[S]):
    """A benchmark.

    Attributes:
        name: what `kalmix_bench.datasets.make` knows it by.
        baseline: its settings where nothing is said.
        sample: draws rows.
        scores: how rows are judged, by name; the first is the one its papers report.
        published: the original's facts.
        from_last: whether all targets are to be read from the last token's output alone (an autoencoder's
            bottleneck), instead of each from its own token's.
    """

    name: str
    baseline: S
    sample: Sampler[S]
    scores: Mapping[str, Metric]
    published: Published
    from_last: bool = False

    def make(self, *, seed: int, train: int, test: int, **settings: Any) -> Data:
        """Rows of this task; see `kalmix_bench.datasets.make`."""
        for name, value in {"seed": seed, "train": train, "test": test}.items():
            require(_has_type(int, value) and value >= 0, name, repr(value), "a whole number, at least 0")
        require(seed < 2**32, "seed", seed, "below 2^32")
        configured = self.configure(**settings)
        rows = self.sample(configured, seed, train, test)
        return Data(*rows, configured.vocab_size, asdict(configured))

    def configure(self, **settings: Any) -> S:
        """The baseline with some settings changed.

        Raises:
            ArgumentError: the benchmark has no such setting, or it cannot have this value.
        """
        kinds = {setting.name: type(getattr(self.baseline, setting.name)) for setting in fields(self.baseline)}
        for name, value in settings.items():
            require(name in kinds, name, f"no setting of {self.name}", f"one of {', '.join(kinds)}")
            require(_has_type(kinds[name], value), name, repr(value), f"of type {kinds[name].__name__}")
        return replace(self.baseline, **{name: kinds[name](value) for name, value in settings.items()})


def _has_type(kind: type, value: object) -> bool:
    """Whether a setting of this kind (bool, int, float or str) may have the value; numpy's numbers are numbers, too."""
    if isinstance(value, bool | np.bool_):
        return kind is bool
    accepted_types: dict[type, Any] = {float: (float, int, np.floating, np.integer), int: (int, np.integer)}
    return isinstance(value, accepted_types.get(kind, kind))
