"""Kinds of evidence and covariance, and their combinations that ops filter. `ops/_<op>/spec.py` may add a kind."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Decay = Literal["none", "head", "key", "cell", "matrix", "forgetting", "time"]


@dataclass(frozen=True)
class Kind:
    """Kind of evidence, or of covariance.

    Attributes:
        name: name used in a design.
        statement: the assumption as a formula.
        description: the assumption in words.
        signals: names of the signals that it needs.
    """

    name: str
    statement: str
    description: str
    signals: tuple[str, ...] = ()


@dataclass(frozen=True)
class CovarianceKind(Kind):
    """Kind of covariance.

    Attributes:
        has_variance: whether the belief holds its uncertainty, so that a read-out has a variance.
    """

    has_variance: bool = True


@dataclass(frozen=True)
class Algebra:
    """Combinations of parts that one op filters.

    Attributes:
        op: name of the op.
        evidence: kind of evidence.
        covariance: kind of covariance.
        decays: decays of the transitions that it supports.
        update: its update as a formula, as in Table 1 of Memory by Design.
        supports_diffusion: whether it accepts process noise.
        no_diffusion_reason: reason why it does not.
        supports_rotation: whether it rotates keys.
        optional: names of its optional signals.
        options: names of arguments that are not signals, such as a solver.
    """

    op: str
    evidence: Kind
    covariance: CovarianceKind
    decays: tuple[Decay, ...]
    update: str
    supports_diffusion: bool = False
    no_diffusion_reason: str = "diffusion has no effect, since the belief has no covariance"
    supports_rotation: bool = False
    optional: tuple[str, ...] = ()
    options: tuple[str, ...] = ()


CELL = Kind(
    "cell",
    "v_d = k_n z_nd + noise,  noise ~ N(0, 1 / precision_d)",
    "each cell is observed separately, through its key",
    ("precision",),
)
MEMORY = Kind("memory", "v = S'k + noise,  noise ~ N(0, r^2 I)", "the memory is observed along the key", ("obs_noise",))
INPUT = Kind(
    "input",
    "S_t = .. + k x',  x ~ N(0, write_variance I);  v = x + noise,  noise ~ N(0, r^2 I)",
    "the written input is observed, not the memory",
    ("write_variance", "obs_noise"),
)
STATE = Kind(
    "state",
    "v, k = z + noise,  noise ~ N(0, key_noise I);  q = z + noise,  noise ~ N(0, query_noise I)",
    "the state is observed, and compared with predictions from earlier tokens",
    ("key_noise", "query_noise"),
)

NONE = CovarianceKind("none", "E[S | v_1..t] = M", "none", has_variance=False)
RESET = CovarianceKind(
    "reset",
    "S | v_1..t-1 ~ N(A M, reset I) a column, whatever the past",
    "reset at every token",
    ("reset",),
    has_variance=False,
)
DIAGONAL = CovarianceKind("diagonal", "z_nd | v_1..t ~ N(mu_nd, s_nd)", "one variance per cell")
DENSE = CovarianceKind("dense", "S | v_1..t ~ N(M, P) a column", "one matrix per head")
INFORMATION = CovarianceKind(
    "information",
    "S | v_1..t ~ N((H + ridge I)^-1 U, (H + ridge I)^-1) a column",
    "the inverse of one matrix per head",
)
LAG = CovarianceKind(
    "lag",
    "z_i | v_j ~ N(e^(lambda tau) v_j, V I),  "
    "V = process_noise kappa + key_noise E^2 + query_noise,  E = e^(log_decay tau)",
    "a closed form of the lag",
)
