"""Claims of papers that one layer is better than another, and checks of these claims on results."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from kalmix_bench.runner.scores import Score


class PublishedScore(NamedTuple):
    """Accuracy in a paper, in percent, and its source."""

    percent: float
    source: str


@dataclass(frozen=True)
class Finding:
    """Score of a layer, averaged over seeds.

    Attributes:
        task: name of a task, or of a study such as "collision/recall".
        condition: settings of the rows that distinguish them from others of the task, as text.
        layer: name of the layer, or of another object that is compared.
        score, value, seeds: name of the score, its value, and the number of seeds.
        metadata: more columns by name; the model's size distinguishes findings of one task and layer.
        paper: score that a paper prints, at its own sizes.
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
        """Key that is equal for findings that can be compared."""
        return self.task, self.condition, self.score, self.metadata.get("hidden_size"), self.metadata.get("depth")

    @property
    def label(self) -> str:
        """Task, size and condition as text."""
        size = f"{self.metadata['hidden_size']} x {self.metadata['depth']}" if "hidden_size" in self.metadata else ""
        return ", ".join(part for part in (self.task, size, self.condition) if part)


@dataclass(frozen=True)
class Claim:
    """Claim of a paper that one layer is better than another.

    Attributes:
        task, score: name of the task and of the score.
        better, worse: layers.
        source: paper and figure or table.
        condition: text that `Finding.condition` must contain.
        number_format: format of the numbers.
        lower_is_better: whether a smaller score is better.
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
    """Claim with the findings of both layers."""

    claim: Claim
    better: Finding
    worse: Finding

    @property
    def is_confirmed(self) -> bool:
        """Whether the results agree with the claim, by any difference."""
        better, worse = self.better.value.mean, self.worse.value.mean
        return better < worse if self.claim.lower_is_better else better > worse

    def __str__(self) -> str:
        better, worse = self.better.value, self.worse.value
        sign = "=" if better.mean == worse.mean else ">" if better.mean > worse.mean else "<"
        number_format = self.claim.number_format
        return f"{_format_score(better, number_format)} {sign} {_format_score(worse, number_format)}"

    @property
    def paper(self) -> str:
        """Scores that the paper prints, at its own sizes, and its source."""
        sign = "<" if self.claim.lower_is_better else ">"
        better, worse = self.better.paper, self.worse.paper
        scores = f"{better.percent:.1f}% {sign} {worse.percent:.1f}%, " if better and worse else ""
        return scores + self.claim.source


def _format_score(score: Score, number_format: str) -> str:
    return f"{score.mean:{number_format}}" + (
        "" if score.error != score.error else f" ± {score.error:{number_format.lstrip('+')}}"
    )


def check_claims(findings: Iterable[Finding]) -> Iterator[ClaimCheck]:
    """Yield the claims for which both layers have a finding under equal conditions, in the order of `CLAIMS`."""
    groups: dict[tuple[Any, ...], dict[str, Finding]] = {}
    for finding in findings:
        groups.setdefault(finding.comparison_key, {})[finding.layer] = finding
    for claim in CLAIMS:
        for (task, condition, score, *_), layers in groups.items():
            matches = (task, score) == (claim.task, claim.score) and claim.condition in condition
            if matches and layers.keys() >= {claim.better, claim.worse}:
                yield ClaimCheck(claim, layers[claim.better], layers[claim.worse])
