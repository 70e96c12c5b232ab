"""Studies, their sizes in each preset, and their cells."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from kalmix.errors import unknown_name
from kalmix_bench.experiments.solvers.conditions import Conditions, conditions
from kalmix_bench.experiments.solvers.convergence import Convergence, precisions, residuals
from kalmix_bench.experiments.solvers.gradients import Gradients, gradients
from kalmix_bench.experiments.solvers.reversal import Reversal, reversals

Setting = Convergence | Gradients | Conditions | Reversal
SolverPreset = Mapping[str, Setting]

STUDIES: dict[str, Callable[..., dict[str, Any]]] = {  # (setting, seed, device, on_progress) -> results
    "residual": residuals,
    "gradient": gradients,
    "condition": conditions,
    "reversal": reversals,
    "precision": precisions,
}
PRESETS: dict[str, SolverPreset] = {
    "laptop": {
        "residual": Convergence(sequences=1, length=1024),
        "gradient": Gradients(length=256),
        "condition": Conditions(sequences=1),
        "reversal": Reversal(sequences=1),
        "precision": Convergence(sequences=1, length=1024),
    },
    "paper": {
        "residual": Convergence(),
        "gradient": Gradients(),
        "condition": Conditions(),
        "reversal": Reversal(),
        "precision": Convergence(),
    },
}


@dataclass(frozen=True)
class SolverCell:
    """One study at one size with one seed.

    Raises:
        ArgumentError: there is no such study.
    """

    study: str
    setting: Setting
    seed: int

    def __post_init__(self) -> None:
        if self.study not in STUDIES:
            raise unknown_name("study", self.study, STUDIES)

    def __str__(self) -> str:
        return f"{self.study}  seed {self.seed}"

    def to_dict(self) -> dict[str, Any]:
        """Return everything that defines the cell."""
        return asdict(self)
