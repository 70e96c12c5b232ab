"""What may be assumed: `Design = Transition x Evidence x Covariance`, frozen data without tensors.

A part says its assumption twice, as a formula (`statement`) and in words (`describe`), and names the signals
it needs. A combination is legal when an op computes it exactly: each op registers the combination that it filters.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from kalmix.designs.kinds import CovarianceKind, Kind
from kalmix.errors import DesignError

Decay = Literal["none", "head", "key", "cell", "matrix", "forgetting", "time"]


def _check_choice(what: str, value: object, choices: Collection[str]) -> None:
    if not isinstance(value, str) or value not in choices:
        raise DesignError(f"{what} is one of {', '.join(map(repr, choices))}, not {value!r}")


@dataclass(frozen=True)
class Transition:
    """How the state moves between tokens.

    Attributes:
        decay: what has a decay of its own: "none" (the state holds), every value "head", every "key" of a head, or
            every "cell" (key, channel). "matrix": the token gives a whole matrix (`kalmix.oracle` only). "forgetting":
            the state holds, but of what was known of it a head keeps a share. "time": the state, a complex vector a
            head, decays and turns in continuous time, by one law for all tokens.
        diffusion: whether process noise is added.
        rotation: whether keys may turn in pairs, where the token gives an `angle`: row j of the first half with row
            j of the second, with one decay a head or a pair. Only the first half is observed, and diffuses.
    """

    decay: Decay = "none"
    diffusion: bool = False
    rotation: bool = False

    def __post_init__(self) -> None:
        _check_choice("a transition's decay", self.decay, get_args(Decay))
        if self.rotation and self.decay in ("cell", "matrix", "forgetting", "time"):
            raise DesignError(f"pairs of keys cannot turn where the transition is per {self.decay}")

    @property
    def signals(self) -> tuple[str, ...]:
        named = {"none": (), "matrix": ("matrix",), "time": ("log_decay", "frequency")}
        moved = named.get(self.decay, ("log_decay",))
        return (*moved, *("process_noise",) * self.diffusion)

    @property
    def optional(self) -> tuple[str, ...]:
        """Signals it may go without."""
        return (*("angle",) * self.rotation, *("times",) * (self.decay == "time"))

    @property
    def statement(self) -> str:
        if self.decay == "cell":
            return "z_t = a z_{t-1}" + (" + w_t,  w_t ~ N(0, p)" if self.diffusion else "")
        if self.decay == "forgetting":
            return "S_t = S_{t-1},  information so far times a_t"
        if self.decay == "time":
            return "dz = (log_decay + i frequency) z dt" + (
                " + dw,  w_t ~ N(0, process_noise t)" if self.diffusion else ""
            )
        names = {"none": "", "head": "a_t ", "key": "diag(a_t) ", "matrix": "A_t "}
        moved = names[self.decay] + "[R(angle_t)] " * self.rotation + "S_{t-1}"
        return f"S_t = {moved}" + (" + W_t,  W_t ~ N(0, l_t^2 I) a column" if self.diffusion else "")

    @property
    def description(self) -> str:
        if self.decay == "cell" and self.diffusion:
            return "Ornstein-Uhlenbeck per cell"
        words = {"none": "holds still", "matrix": "moves by a matrix", "forgetting": "holds still, forgotten per head"}
        words |= {"time": "decays and turns in time"}
        words = words.get(self.decay, f"decays per {self.decay}")
        words += " or turns in pairs" if self.rotation else ""
        return words + (", and diffuses" if self.diffusion else "")


@dataclass(frozen=True)
class Evidence:
    """What a token says of the state.

    Attributes:
        of: "memory": the value is the memory `S` read out along the key. "cell": every cell (key n, channel d) by
            itself is seen through its key, with the token's precision. "input": the value is seen of what this token
            adds to the memory, never of the memory itself. "state": the value is the state itself, and so, for
            comparison, are key and query.
        columns: whether every column of the value has a noise of its own: give columns as value heads of width 1
            that share a key head.
    """

    kind: str = "cell"
    columns: bool = False

    def __post_init__(self) -> None:
        _check_choice("what evidence is of", self.kind, _EVIDENCE)

    @property
    def signals(self) -> tuple[str, ...]:
        return _EVIDENCE[self.kind].signals

    @property
    def statement(self) -> str:
        return _EVIDENCE[self.kind].statement

    @property
    def description(self) -> str:
        return _EVIDENCE[self.kind].description + (", each column with its own noise" if self.columns else "")


@dataclass(frozen=True)
class Covariance:
    """What is kept of the uncertainty.

    Attributes:
        kept: "none"; "reset": the predicted covariance is forgotten and set to the token's `reset` (times identity,
            or a diagonal), an approximation; "diagonal": one variance a cell, exact where cells are observed by
            themselves; "dense": one matrix between keys, shared by the columns of a head, exact; "information": its
            inverse but for the prior, a ridge, which is set anew at every token; "lag": none, as that of each earlier
            token is known in closed form from how long ago it was, their errors taken as independent.
    """

    kind: str = "diagonal"

    def __post_init__(self) -> None:
        _check_choice("the covariance kept", self.kind, _COVARIANCE)

    @property
    def signals(self) -> tuple[str, ...]:
        return _COVARIANCE[self.kind].signals

    def elements(self, keys: int, values: int) -> int:
        """Return how many numbers a head's belief holds of it, beside a mean of `keys` rows and `values` columns."""
        return {"diagonal": keys * values, "dense": keys * keys, "information": keys * keys}.get(self.kind, 0)

    @property
    def statement(self) -> str:
        return _COVARIANCE[self.kind].statement

    @property
    def description(self) -> str:
        return _COVARIANCE[self.kind].description

    @property
    def has_variance(self) -> bool:
        """Whether a belief holds its own uncertainty, so that a read-out has a variance."""
        return _COVARIANCE[self.kind].has_variance


@dataclass(frozen=True)
class Algebra:
    """Designs that one op filters.

    Attributes:
        op: the op's name.
        evidence, covariance: the kinds that it combines.
        decays: the decays of transitions that it takes.
        update: its update as a formula, as Table 1 of Memory by Design has it.
        diffuses: whether it takes process noise.
        undiffused: the reason, if it takes none.
        rotates: whether it turns keys.
        optional: signals that it takes, but may go without.
        options: names of its arguments that no token supplies.
    """

    op: str
    evidence: Kind
    covariance: CovarianceKind
    decays: tuple[Decay, ...]
    update: str
    supports_diffusion: bool = False
    no_diffusion_reason: str = "process noise would change nothing, as no covariance is carried"
    supports_rotation: bool = False
    optional: tuple[str, ...] = ()
    options: tuple[str, ...] = ()

    def unsupported_reason(self, transition: Transition) -> str | None:
        """Return why the op does not take a transition, or `None` if it does."""
        if transition.decay not in self.decays:
            return f"its transition may be {' or '.join(self.decays)}, not {transition.decay}"
        if transition.diffusion and not self.supports_diffusion:
            return self.no_diffusion_reason
        return "it does not turn keys" if transition.rotation and not self.supports_rotation else None


_EVIDENCE: dict[str, Kind] = {}
_COVARIANCE: dict[str, CovarianceKind] = {}
_ALGEBRAS: dict[tuple[str, str], Algebra] = {}


def register_algebra(algebra: Algebra) -> None:
    """Let designs combine the two kinds of an algebra; its op filters them.

    Raises:
        DesignError: another op filters this combination, or another kind has the name of one of these.
    """
    evidence, covariance = algebra.evidence, algebra.covariance
    other = _ALGEBRAS.setdefault((evidence.name, covariance.name), algebra)
    if other != algebra:
        raise DesignError(f"`{other.op}` filters evidence of {evidence.name} with covariance {covariance.name} already")
    known = _EVIDENCE.setdefault(evidence.name, evidence), _COVARIANCE.setdefault(covariance.name, covariance)
    if known != (evidence, covariance):
        raise DesignError(f"`{algebra.op}` defines {evidence.name} or {covariance.name} in another way than other ops")


@dataclass(frozen=True)
class Design:
    """A generative model, from which the filter follows.

    Attributes:
        name: what it is called.
        transition, evidence, covariance: its parts.
        equations: where the source states its update.
        citation: the source.

    Raises:
        DesignError: no op filters this combination; says why.
    """

    name: str
    transition: Transition
    evidence: Evidence
    covariance: Covariance
    equations: str = ""
    citation: str = ""

    def __post_init__(self) -> None:
        pair = (self.evidence.kind, self.covariance.kind)
        if pair not in _ALGEBRAS:
            legal = ", ".join(f"{of} with {kept}" for of, kept in _ALGEBRAS)
            raise DesignError(f"no op filters evidence of {pair[0]} with covariance {pair[1]}; there are {legal}")
        refusal = self._algebra.unsupported_reason(self.transition)
        if refusal is not None:
            raise DesignError(f"`{self.op}` filters evidence of {pair[0]} with covariance {pair[1]}, but {refusal}")

    @property
    def _algebra(self) -> Algebra:
        return _ALGEBRAS[self.evidence.kind, self.covariance.kind]

    @property
    def op(self) -> str:
        """The recurrence algebra that filters it."""
        return self._algebra.op

    @property
    def update(self) -> str:
        """The filter that follows from it, as a formula."""
        return self._algebra.update

    @property
    def has_variance(self) -> bool:
        """Whether its belief knows how sure it is, so that a read-out has a variance."""
        return self.covariance.has_variance

    @property
    def signals(self) -> tuple[str, ...]:
        """The signals it needs beside q, k and v."""
        return (*self.transition.signals, *self.evidence.signals, *self.covariance.signals)

    @property
    def optional(self) -> tuple[str, ...]:
        """The signals it takes, but may go without."""
        return (*self.transition.optional, *self._algebra.optional)

    @property
    def options(self) -> tuple[str, ...]:
        """What its op may be told that no token supplies."""
        return self._algebra.options

    def check(self, given: Mapping[str, object], variance: bool = False) -> None:
        """Check the names of the signals given, and whether there is a variance to ask for.

        Raises:
            DesignError: a signal is missing or not this design's, or there is no variance.
        """
        missing = [name for name in self.signals if given.get(name) is None]
        strange = [name for name in given if name not in (*self.signals, *self.optional, *self.options)]
        if missing or strange:
            wrong = f"lacks {', '.join(missing)}" if missing else f"does not take {', '.join(strange)}"
            raise DesignError(f"design {self.name!r} {wrong}; its signals are {', '.join(self.signals)}")
        if variance and not self.has_variance:
            raise DesignError(f"design {self.name!r} has no variance: its covariance is {self.covariance.description}")
