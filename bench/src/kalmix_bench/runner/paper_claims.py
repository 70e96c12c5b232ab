"""What papers find better than what, and what results say of it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from kalmix_bench.runner.scores import Score


class Printed(NamedTuple):
    """An accuracy in a paper, in percent, and where."""

    percent: float
    source: str


@dataclass(frozen=True)
class Finding:
    """A number that was found of a layer.

    Attributes:
        task: of a benchmark by its name; of an experiment as "collision/recall".
        asked: what of the rows distinguishes them from others of that task.
        layer: by name, or whatever is compared.
        score, value, seeds: what was measured; over so many seeds.
        facts: more to know, by name; those of a model's size tell findings of one task and layer apart.
        paper: what a paper prints of this score, at its own sizes.
    """

    task: str
    asked: str
    layer: str
    score: str
    value: Score
    seeds: int
    facts: Mapping[str, Any] = field(default_factory=dict)
    paper: Printed | None = None

    @property
    def place(self) -> tuple[Any, ...]:
        """What layers that are compared have in common."""
        return self.task, self.asked, self.score, self.facts.get("width"), self.facts.get("depth")

    @property
    def where(self) -> str:
        """The same in words."""
        size = f"{self.facts['width']} x {self.facts['depth']}" if "width" in self.facts else ""
        return ", ".join(part for part in (self.task, size, self.asked) if part)


@dataclass(frozen=True)
class Ordering:
    """That one layer does better than another.

    Attributes:
        task, score: at what.
        ahead, behind: the layers.
        source: the paper that finds so, and where.
        asked: words that `Finding.asked` must have.
        form: of the numbers.
        smaller: whether the smaller number is the better one.
    """

    task: str
    score: str
    ahead: str
    behind: str
    source: str
    asked: str = ""
    form: str = ".1%"
    smaller: bool = False


_KLA, _BAYES, _GKA = "Kalman Linear Attention", "Memory by Design", "Gated KalmaNet"
_AFA = "Adaptive Filter Attention"
ORDERINGS = (
    Ordering("mad/selective-copying", "macro", "kla", "kla-noise-free", f"{_KLA}, Table 6"),
    Ordering("mad/compression", "macro", "kla", "kla-noise-free", f"{_KLA}, Table 6"),
    Ordering("words/a5", "sequence_accuracy", "kla", "mamba2", f"{_KLA}, Figure 1a"),
    Ordering("mqar/update", "accuracy", "bayesian", "gated-deltanet", f"{_BAYES}, Figure 4b"),
    Ordering("mqar", "accuracy", "kalmanet-bare", "linear-attention", f"{_GKA}, Figure 2a"),
    Ordering("mqar", "accuracy", "kalmanet-bare", "mamba2", f"{_GKA}, Figure 2a"),
    Ordering(
        "collision/recall", "margin", "bayesian", "reset", f"{_BAYES}, Figure 3d", "flood 64, overlap 0.95", "+.2f"
    ),
    Ordering("collision/recall", "margin", "bayesian", "linear-attention", f"{_BAYES}, Figure 3c", "flood 256", "+.2f"),
    Ordering("sde/figure-1b", "error over kalman", "afa", "softmax", f"{_AFA}, section 4.3", "", ".3f", smaller=True),
    Ordering(
        "solvers/residual",
        "residual",
        "Chebyshev by residuals",
        "CG",
        f"{_GKA}, Figure 1a",
        "bfloat16 products, a = 0.02",
        ".1e",
        smaller=True,
    ),
    Ordering(
        "solvers/gradient",
        "error",
        "Chebyshev 30",
        "CG 30 + 1e-5",
        f"{_GKA}, Figure 1e",
        "float32, 5 layers",
        ".1e",
        smaller=True,
    ),
)


class Seen(NamedTuple):
    """An ordering that results speak of."""

    ordering: Ordering
    ahead: Finding
    behind: Finding

    @property
    def holds(self) -> bool:
        """Whether results say so, too, by however little."""
        better, worse = self.ahead.value.mean, self.behind.value.mean
        return better < worse if self.ordering.smaller else better > worse

    def __str__(self) -> str:
        better, worse = self.ahead.value, self.behind.value
        sign = "=" if better.mean == worse.mean else ">" if better.mean > worse.mean else "<"
        form = self.ordering.form
        return f"{_said(better, form)} {sign} {_said(worse, form)}"

    @property
    def paper(self) -> str:
        """What the paper prints of it, at its own sizes, and where."""
        sign = "<" if self.ordering.smaller else ">"
        ahead, behind = self.ahead.paper, self.behind.paper
        told = f"{ahead.percent:.1f}% {sign} {behind.percent:.1f}%, " if ahead and behind else ""
        return told + self.ordering.source


def _said(score: Score, form: str) -> str:
    return f"{score.mean:{form}}" + ("" if score.error != score.error else f" ± {score.error:{form.lstrip('+')}}")


def seen(findings: Iterable[Finding]) -> Iterator[Seen]:
    """The orderings of which there are both sides, in one place, in the order of `ORDERINGS`."""
    places: dict[tuple[Any, ...], dict[str, Finding]] = {}
    for finding in findings:
        places.setdefault(finding.place, {})[finding.layer] = finding
    for ordering in ORDERINGS:
        for (task, asked, score, *_), layers in places.items():
            of = (task, score) == (ordering.task, ordering.score) and ordering.asked in asked
            if of and layers.keys() >= {ordering.ahead, ordering.behind}:
                yield Seen(ordering, layers[ordering.ahead], layers[ordering.behind])
