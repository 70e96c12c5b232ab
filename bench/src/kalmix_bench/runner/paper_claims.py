"""What papers find better than what, and what results say of it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from kalmix_bench.runner.scores import Score


class PublishedScore(NamedTuple):
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
    condition: str
    layer: str
    score: str
    value: Score
    seeds: int
    metadata: Mapping[str, Any] = field(default_factory=dict)
    paper: PublishedScore | None = None

    @property
    def comparison_key(self) -> tuple[Any, ...]:
        """What layers that are compared have in common."""
        return self.task, self.condition, self.score, self.metadata.get("hidden_size"), self.metadata.get("depth")

    @property
    def label(self) -> str:
        """The same in words."""
        size = f"{self.metadata['hidden_size']} x {self.metadata['depth']}" if "hidden_size" in self.metadata else ""
        return ", ".join(part for part in (self.task, size, self.condition) if part)


@dataclass(frozen=True)
class Claim:
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
    better: str
    worse: str
    source: str
    condition: str = ""
    number_format: str = ".1%"
    lower_is_better: bool = False


_KLA, _BAYES, _GKA = "Kalman Linear Attention", "Memory by Design", "Gated KalmaNet"
_AFA = "Adaptive Filter Attention"
CLAIMS = (
    Claim("mad/selective-copying", "macro", "kla", "kla-noise-free", f"{_KLA}, Table 6"),
    Claim("mad/compression", "macro", "kla", "kla-noise-free", f"{_KLA}, Table 6"),
    Claim("words/a5", "sequence_accuracy", "kla", "mamba2", f"{_KLA}, Figure 1a"),
    Claim("mqar/update", "accuracy", "bayesian", "gated-deltanet", f"{_BAYES}, Figure 4b"),
    Claim("mqar", "accuracy", "kalmanet-bare", "linear-attention", f"{_GKA}, Figure 2a"),
    Claim("mqar", "accuracy", "kalmanet-bare", "mamba2", f"{_GKA}, Figure 2a"),
    Claim("collision/recall", "margin", "bayesian", "reset", f"{_BAYES}, Figure 3d", "flood 64, overlap 0.95", "+.2f"),
    Claim("collision/recall", "margin", "bayesian", "linear-attention", f"{_BAYES}, Figure 3c", "flood 256", "+.2f"),
    Claim(
        "sde/figure-1b", "error over kalman", "afa", "softmax", f"{_AFA}, section 4.3", "", ".3f", lower_is_better=True
    ),
    Claim(
        "solvers/residual",
        "residual",
        "Chebyshev by residuals",
        "CG",
        f"{_GKA}, Figure 1a",
        "bfloat16 products, a = 0.02",
        ".1e",
        lower_is_better=True,
    ),
    Claim(
        "solvers/gradient",
        "error",
        "Chebyshev 30",
        "CG 30 + 1e-5",
        f"{_GKA}, Figure 1e",
        "float32, 5 layers",
        ".1e",
        lower_is_better=True,
    ),
)


class ClaimCheck(NamedTuple):
    """An ordering that results speak of."""

    ordering: Claim
    better: Finding
    worse: Finding

    @property
    def is_confirmed(self) -> bool:
        """Whether results say so, too, by however little."""
        better, worse = self.better.value.mean, self.worse.value.mean
        return better < worse if self.ordering.lower_is_better else better > worse

    def __str__(self) -> str:
        better, worse = self.better.value, self.worse.value
        sign = "=" if better.mean == worse.mean else ">" if better.mean > worse.mean else "<"
        number_format = self.ordering.number_format
        return f"{_format_score(better, number_format)} {sign} {_format_score(worse, number_format)}"

    @property
    def paper(self) -> str:
        """What the paper prints of it, at its own sizes, and where."""
        sign = "<" if self.ordering.lower_is_better else ">"
        better, worse = self.better.paper, self.worse.paper
        told = f"{better.percent:.1f}% {sign} {worse.percent:.1f}%, " if better and worse else ""
        return told + self.ordering.source


def _format_score(score: Score, number_format: str) -> str:
    return f"{score.mean:{number_format}}" + (
        "" if score.error != score.error else f" ± {score.error:{number_format.lstrip('+')}}"
    )


def check_claims(findings: Iterable[Finding]) -> Iterator[ClaimCheck]:
    """The orderings of which there are both sides, in one place, in the order of `ORDERINGS`."""
    places: dict[tuple[Any, ...], dict[str, Finding]] = {}
    for finding in findings:
        places.setdefault(finding.comparison_key, {})[finding.layer] = finding
    for ordering in CLAIMS:
        for (task, condition, score, *_), layers in places.items():
            of = (task, score) == (ordering.task, ordering.score) and ordering.condition in condition
            if of and layers.keys() >= {ordering.better, ordering.worse}:
                yield ClaimCheck(ordering, layers[ordering.better], layers[ordering.worse])
