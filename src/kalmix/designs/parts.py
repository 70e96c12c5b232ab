"""What may be assumed: `Design = Transition x Evidence x Covariance`, frozen data without tensors.

A part says its assumption twice, as a formula (`statement`) and in words (`describe`), and names the signals
it needs. A combination is legal when an op computes it exactly.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from kalmix.errors import DesignError

Decay = Literal["none", "cell"]


@dataclass(frozen=True)
class Transition:
    """How the state moves between tokens.

    Attributes:
        decay: what has a decay of its own: "none" (the state holds) or every "cell" (key, channel).
        diffusion: whether process noise is added.
    """

    decay: Decay = "none"
    diffusion: bool = False

    def __post_init__(self) -> None:
        if self.decay not in get_args(Decay):
            raise DesignError(f"a transition decays per {' or '.join(get_args(Decay))}, not per {self.decay!r}")

    @property
    def signals(self) -> tuple[str, ...]:
        return ("log_decay",) * (self.decay != "none") + ("process_noise",) * self.diffusion

    @property
    def statement(self) -> str:
        moved = "z_{t-1}" if self.decay == "none" else "a z_{t-1}"
        return f"z_t = {moved}" + (" + w_t,  w_t ~ N(0, p)" if self.diffusion else "")

    @property
    def describe(self) -> str:
        if self.decay == "none":
            return "holds still, and diffuses" if self.diffusion else "holds still"
        return f"Ornstein-Uhlenbeck per {self.decay}" if self.diffusion else f"decays per {self.decay}, without noise"


@dataclass(frozen=True)
class Evidence:
    """What a token says of the state.

    Attributes:
        of: "cell": every cell (key n, channel d) by itself is seen through its key, with the token's precision.
    """

    of: Literal["cell"] = "cell"

    def __post_init__(self) -> None:
        if self.of != "cell":
            raise DesignError(f"evidence is of each 'cell', not of {self.of!r}")

    @property
    def signals(self) -> tuple[str, ...]:
        return ("precision",)

    @property
    def statement(self) -> str:
        return "v_d = k_n z_nd + noise,  noise ~ N(0, 1 / precision_d)"

    @property
    def describe(self) -> str:
        return "each cell is observed by itself, through its key"


@dataclass(frozen=True)
class Covariance:
    """What is kept of the uncertainty.

    Attributes:
        kept: "diagonal": one variance a cell, exact where cells are observed by themselves.
    """

    kept: Literal["diagonal"] = "diagonal"

    def __post_init__(self) -> None:
        if self.kept != "diagonal":
            raise DesignError(f"a covariance is kept 'diagonal', not {self.kept!r}")

    @property
    def statement(self) -> str:
        return "z_nd | v_1..t ~ N(mu_nd, s_nd)"

    @property
    def describe(self) -> str:
        return "one variance a cell"


_OPS = {("cell", "diagonal"): "diagonal"}  # the op that filters a kind of evidence and covariance exactly


@dataclass(frozen=True)
class Design:
    """A generative model, from which the filter follows.

    Attributes:
        name: what it is called.
        transition, evidence, covariance: its parts.
        equations: where the source states its update.
        citation: the source.
    """

    name: str
    transition: Transition
    evidence: Evidence
    covariance: Covariance
    equations: str = ""
    citation: str = ""

    def __post_init__(self) -> None:
        if (self.evidence.of, self.covariance.kept) not in _OPS:
            raise DesignError(f"no op filters evidence of {self.evidence.of} with covariance {self.covariance.kept}")

    @property
    def op(self) -> str:
        """The recurrence algebra that filters it."""
        return _OPS[self.evidence.of, self.covariance.kept]

    @property
    def signals(self) -> tuple[str, ...]:
        """The signals it takes beside q, k and v."""
        return (*self.transition.signals, *self.evidence.signals)

    def check(self, given: Mapping[str, object]) -> None:
        """Check the names of the signals given.

        Raises:
            DesignError: one is missing, or one is not this design's.
        """
        missing = [name for name in self.signals if given.get(name) is None]
        strange = [name for name in given if name not in self.signals]
        if missing or strange:
            wrong = f"lacks {', '.join(missing)}" if missing else f"does not take {', '.join(strange)}"
            raise DesignError(f"design {self.name!r} {wrong}; its signals are {', '.join(self.signals)}")
