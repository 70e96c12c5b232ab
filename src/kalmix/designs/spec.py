"""Parts of a design: `Design` combines a `Transition`, an `Evidence` and a `Covariance`, frozen data without tensors.

Each part has its assumption as a formula (`statement`) and in words (`description`), and the names of its signals. A
combination is legal if an op computes it exactly. Each op registers the combination that it filters.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import get_args

from kalmix.designs.kinds import Algebra, CovarianceKind, Decay, Kind
from kalmix.errors import ArgumentError, DesignError, any_of
from kalmix.validation import check_bool, check_types


def _check_choice(name: str, value: object, choices: Collection[str]) -> None:
    """Raise `DesignError` unless `value` is one of `choices`."""
    if not isinstance(value, str) or value not in choices:
        raise DesignError(f"`{name}` is {value!r}; expected {any_of(choices)}.")


@dataclass(frozen=True)
class Transition:
    """Model of the state between two tokens: decay, rotation and process noise.

    `signals` and `optional` are the names of its signals, `statement` its formula, and `description` its assumption in
    words. There, a_t is the decay factor, and l_t^2 is `process_noise`, the variance of each entry of W_t. A transition
    is immutable. Sizes are those of `kalmix.filter`; the state is a memory S `[K, V]` per value head.

    Args:
        decay: the part of S that shares a decay factor exp(log_decay), and the shape of the signal `log_decay`.
            "none": no decay, and no such signal.
            "head": the whole memory of a value head at one token; `[B, T, G]`.
            "key": a row of S at one token; `[B, T, G, K]`, or `[B, T, G]` for equal ones.
            "cell": an entry of S, with the same factor at all tokens; `[G, K, V]`.
            "matrix": no sharing: a signal `matrix` `[B, T, G, K, K]` multiplies S at each token (`kalmix.oracle` only).
            "forgetting": S does not decay, but past tokens count less: the factor multiplies their information (inverse
            covariance); `[B, T, G]`.
            "time": the state is a complex vector per head, which decays and rotates in continuous time; `[H]`, per unit
            of time, with a signal `frequency` `[H, C]` in radians per unit of time and optional `times`; see
            `kalmix.ops.attend`.
        diffusion: whether a signal `process_noise` adds variance to the state at each token.
        rotation: whether an optional signal `angle` `[B, T, G, K / 2]` may rotate pairs of rows of S: row j and row
            j + K / 2, in radians per token (`kalmix.ops.dense`). With `angle`, the second half of the rows is hidden:
            it gets no process noise, q and k must be 0 there (not checked), and a `log_decay` per key is
            `[B, T, G, K / 2]`. Possible with decay "none", "head" or "key".

    Raises:
        DesignError: `decay` is unknown, or cannot be combined with rotation. `Design` checks other combinations.
        ArgumentError: `diffusion` or `rotation` is not `True` or `False`.

    Example:
        >>> from kalmix.designs import Transition
        >>> transition = Transition("head", diffusion=True)
        >>> transition.signals
        ('log_decay', 'process_noise')
        >>> transition.statement
        'S_t = a_t S_{t-1} + W_t,  W_t ~ N(0, l_t^2 I) a column'
    """

    decay: Decay = "none"
    diffusion: bool = False
    rotation: bool = False

    def __post_init__(self) -> None:
        _check_choice("decay", self.decay, get_args(Decay))
        check_bool("diffusion", self.diffusion)
        check_bool("rotation", self.rotation)
        if self.rotation and self.decay in ("cell", "matrix", "forgetting", "time"):
            raise DesignError(f"`rotation` is True with decay {self.decay!r}; expected decay 'none', 'head' or 'key'.")

    @property
    def signals(self) -> tuple[str, ...]:
        """Names of the required signals."""
        decay_signals = {"none": (), "matrix": ("matrix",), "time": ("log_decay", "frequency")}
        required = decay_signals.get(self.decay, ("log_decay",))
        return (*required, *("process_noise",) * self.diffusion)

    @property
    def optional(self) -> tuple[str, ...]:
        """Names of the optional signals."""
        return (*("angle",) * self.rotation, *("times",) * (self.decay == "time"))

    @property
    def statement(self) -> str:
        """The assumption as a formula."""
        if self.decay == "cell":
            return "z_t = a z_{t-1}" + (" + w_t,  w_t ~ N(0, p)" if self.diffusion else "")
        if self.decay == "forgetting":
            return "S_t = S_{t-1},  information so far times a_t"
        if self.decay == "time":
            return "dz = (log_decay + i frequency) z dt" + (
                " + dw,  w_t ~ N(0, process_noise t)" if self.diffusion else ""
            )
        names = {"none": "", "head": "a_t ", "key": "diag(a_t) ", "matrix": "A_t "}
        expression = names[self.decay] + "[R(angle_t)] " * self.rotation + "S_{t-1}"
        return f"S_t = {expression}" + (" + W_t,  W_t ~ N(0, l_t^2 I) a column" if self.diffusion else "")

    @property
    def description(self) -> str:
        """The assumption in words."""
        if self.decay == "cell" and self.diffusion:
            return "Ornstein-Uhlenbeck per cell"
        words = {
            "none": "is constant",
            "matrix": "is multiplied by a matrix",
            "forgetting": "is constant, forgotten per head",
        }
        words |= {"time": "decays and rotates in time"}
        words = words.get(self.decay, f"decays per {self.decay}")
        words += " or rotates in pairs" if self.rotation else ""
        return words + (", and diffuses" if self.diffusion else "")


@dataclass(frozen=True)
class Evidence:
    """Model of an observation: the quantity that a token's value measures, and its noise.

    `signals` is the names of its signals, `statement` its formula, and `description` its assumption in words. It is
    immutable. The signals of "input" are `write_variance` and `obs_noise`, in this order; for the other kinds, those
    named below. They are variances, except `precision`, an inverse variance.

    Args:
        kind: the observed quantity, for a memory S `[K, V]`, key k, value v and query q.
            "memory": v = S'k + noise, of variance `obs_noise`. For covariance "reset", "dense" or "information".
            "cell": v_d = k_n S_nd + noise, separately for each entry (n, d) of S, called a cell. The noise has variance
            1 / `precision`, one number per token and column d, `[B, T, G, V]`. For covariance "diagonal".
            "input": v = u + noise, of variance `obs_noise`, where the token adds k u' to S, and u has a prior of
            variance `write_variance`. The content of S is not observed. For covariance "none".
            "state": key and value are noisy observations of one state at the token, with variance `key_noise`; so is
            the query, with variance `query_noise`. For covariance "lag".
        columns: whether every column of the value has its own noise. Then each column is a value head of width 1: in
            `kalmix.filter`, G counts columns, v is `[B, T, G, 1]`, `obs_noise` and `write_variance` are `[B, T, G]`,
            and `precision` is `[B, T, G, 1]`. Not for "state", whose values are complex.

    Raises:
        DesignError: `kind` is unknown, or `columns` is True with "state". `Design` checks the covariance.
        ArgumentError: `columns` is not `True` or `False`.

    Example:
        >>> from kalmix.designs import Evidence
        >>> Evidence("memory").signals, Evidence("memory").statement
        (('obs_noise',), "v = S'k + noise,  noise ~ N(0, r^2 I)")
    """

    kind: str = "cell"
    columns: bool = False

    def __post_init__(self) -> None:
        _check_choice("kind", self.kind, _EVIDENCE)
        check_bool("columns", self.columns)
        if self.columns and self.kind == "state":
            raise DesignError("`columns` is True with kind 'state'; expected False, since its values are complex.")

    @property
    def signals(self) -> tuple[str, ...]:
        """Names of the required signals."""
        return _EVIDENCE[self.kind].signals

    @property
    def statement(self) -> str:
        """The assumption as a formula."""
        return _EVIDENCE[self.kind].statement

    @property
    def description(self) -> str:
        """The assumption in words."""
        return _EVIDENCE[self.kind].description + (", each column with its own noise" if self.columns else "")


@dataclass(frozen=True)
class Covariance:
    """Form in which a belief stores its uncertainty.

    `has_variance` is True if a read-out has a variance: for all kinds but "none" and "reset". `elements(keys, values)`
    returns the number of covariance elements that one head stores: K V for "diagonal", K K for "dense" and
    "information", otherwise 0. `signals` is the names of its signals, `statement` its formula, and `description` its
    assumption in words. It is immutable.

    Args:
        kind: the form, for a memory S `[K, V]` per head. Each kind works with one kind of evidence only.
            "none": the belief stores no uncertainty. For evidence "input".
            "reset": the belief stores no covariance. Before each observation, the op assumes the covariance r I or
            diag(r), whatever came before; r is the signal `reset`. This is an approximation. For evidence "memory".
            "diagonal": one variance per cell, that is per entry of S. Exact. For evidence "cell".
            "dense": one K x K matrix, shared by the columns of S. Exact. For evidence "memory".
            "information": a K x K matrix H, the weighted sum of k k' over past tokens. The covariance is
            (H + ridge I)^-1. The ridge is an option of the op: a constant, or a multiple of the norm of H, computed at
            every token. For evidence "memory".
            "lag": the belief stores past tokens, and no covariance. Each of them predicts the present state, with a
            variance that is a function of the time since then. The errors of these predictions are treated as
            independent, which is an approximation. For evidence "state".

    Raises:
        DesignError: `kind` is unknown. `Design` checks the combination with evidence.

    Example:
        >>> from kalmix.designs import Covariance
        >>> Covariance("dense").has_variance, Covariance("dense").elements(keys=16, values=64)
        (True, 256)
    """

    kind: str = "diagonal"

    def __post_init__(self) -> None:
        _check_choice("kind", self.kind, _COVARIANCE)

    @property
    def signals(self) -> tuple[str, ...]:
        """Names of the required signals."""
        return _COVARIANCE[self.kind].signals

    def elements(self, keys: int, values: int) -> int:
        """Return the number of covariance elements that the belief of one head stores, beside its mean.

        Args:
            keys: rows of the mean.
            values: columns of the mean.
        """
        return {"diagonal": keys * values, "dense": keys * keys, "information": keys * keys}.get(self.kind, 0)

    @property
    def statement(self) -> str:
        """The assumption as a formula."""
        return _COVARIANCE[self.kind].statement

    @property
    def description(self) -> str:
        """The assumption in words."""
        return _COVARIANCE[self.kind].description

    @property
    def has_variance(self) -> bool:
        """Whether the belief holds its uncertainty, so that a read-out has a variance."""
        return _COVARIANCE[self.kind].has_variance


_EVIDENCE: dict[str, Kind] = {}
_COVARIANCE: dict[str, CovarianceKind] = {}
_ALGEBRAS: dict[tuple[str, str], Algebra] = {}


def register_algebra(algebra: Algebra) -> None:
    """Register the combination of evidence and covariance that an op filters.

    Raises:
        DesignError: another op filters this combination, or another kind has one of these names.
    """
    evidence, covariance = algebra.evidence, algebra.covariance
    other = _ALGEBRAS.setdefault((evidence.name, covariance.name), algebra)
    if other != algebra:
        raise DesignError(
            f"`{other.op}` already filters evidence {evidence.name!r} with covariance {covariance.name!r}."
        )
    known = _EVIDENCE.setdefault(evidence.name, evidence), _COVARIANCE.setdefault(covariance.name, covariance)
    if known != (evidence, covariance):
        raise DesignError(f"`{algebra.op}` redefines {evidence.name!r} or {covariance.name!r}.")


def _unsupported_reason(algebra: Algebra, transition: Transition) -> str | None:
    """Return why an op does not support a transition, or `None` if it does."""
    if transition.decay not in algebra.decays:
        return f"decay {transition.decay!r} is not supported; expected {any_of(algebra.decays)}"
    if transition.diffusion and not algebra.supports_diffusion:
        return algebra.no_diffusion_reason
    return "rotation is not supported" if transition.rotation and not algebra.supports_rotation else None


@dataclass(frozen=True)
class Design:
    """Generative model of a sequence: a transition, evidence and a covariance. They determine the filter.

    Pass a design to `kalmix.filter`, `kalmix.oracle` or `kalmix.layers.DesignLayer`. The dict
    `kalmix.designs.CATALOGUE` has the published designs by name; a new design is not added to it. A design is immutable
    and hashable.

    Args:
        name: any string, for messages and tables.
        transition: model of the state between two tokens, a `kalmix.designs.Transition`. With decay "matrix", the
            design needs covariance "dense", and only `kalmix.oracle` can filter it.
        evidence: model of an observation, a `kalmix.designs.Evidence`.
        covariance: form in which the belief stores its uncertainty, a `kalmix.designs.Covariance`.
        equations: equations of the update in the source; text only, without effect.
        citation: the source; text only, without effect.

    Attributes:
        op: name of the op in `kalmix.ops` that filters the design.
        signals: names of the tensors that a call requires in addition to q, k and v.
        optional: names of signals that a call may omit.
        options: names of further arguments of the op that a call may pass, such as `solver`.
        has_variance: whether a read-out has a variance.

    Raises:
        ArgumentError: a part has another type, or `name`, `equations` or `citation` is not a string.
        DesignError: no op filters this combination; the message gives the reason.

    Example:
        >>> from kalmix.designs import Covariance, Design, Evidence, Transition
        >>> mine = Design("mine", Transition("head", diffusion=True), Evidence("memory"), Covariance("dense"))
        >>> mine.op, mine.signals, mine.has_variance
        ('dense', ('log_decay', 'process_noise', 'obs_noise'), True)
    """

    name: str
    transition: Transition
    evidence: Evidence
    covariance: Covariance
    equations: str = ""
    citation: str = ""

    def __post_init__(self) -> None:
        check_types(dict.fromkeys(("name", "equations", "citation"), str), vars(self))
        for part, kind in (("transition", Transition), ("evidence", Evidence), ("covariance", Covariance)):
            value = getattr(self, part)
            if not isinstance(value, kind):
                raise ArgumentError(part, got=repr(value), expected=f"a {kind.__name__}")
        pair = (self.evidence.kind, self.covariance.kind)
        if pair not in _ALGEBRAS:
            legal = ", ".join(f"{evidence!r} with {covariance!r}" for evidence, covariance in _ALGEBRAS)
            raise DesignError(
                f"No op filters evidence {pair[0]!r} with covariance {pair[1]!r}; expected one of {legal}."
            )
        reason = _unsupported_reason(self._algebra, self.transition)
        if reason is not None:
            raise DesignError(f"`{self.op}` cannot filter design {self.name!r}: {reason}.")

    @property
    def _algebra(self) -> Algebra:
        return _ALGEBRAS[self.evidence.kind, self.covariance.kind]

    @property
    def op(self) -> str:
        """Name of the op that filters the design."""
        return self._algebra.op

    @property
    def update(self) -> str:
        """The filter that follows from the design, as a formula."""
        return self._algebra.update

    @property
    def has_variance(self) -> bool:
        """Whether a read-out has a variance."""
        return self.covariance.has_variance

    @property
    def signals(self) -> tuple[str, ...]:
        """Names of the required signals beside q, k and v."""
        return (*self.transition.signals, *self.evidence.signals, *self.covariance.signals)

    @property
    def optional(self) -> tuple[str, ...]:
        """Names of the optional signals."""
        return (*self.transition.optional, *self._algebra.optional)

    @property
    def options(self) -> tuple[str, ...]:
        """Names of arguments of the op that are not signals, such as `ridge` and `solver`."""
        return self._algebra.options

    def check(self, given: Mapping[str, object], variance: bool = False) -> None:
        """Check the names of signals, and that there is a variance if one is requested.

        Args:
            given: signals and options by name; `None` means absent.
            variance: whether a variance is requested.

        Raises:
            DesignError: a signal is missing or unknown, or there is no variance.
        """
        missing = [name for name in self.signals if given.get(name) is None]
        unknown = [name for name in given if name not in (*self.signals, *self.optional, *self.options)]
        if missing or unknown:
            known = ", ".join((*self.signals, *self.optional, *self.options)) or "no signals"
            problem = f"requires the signals {', '.join(self.signals)}; the call lacks {', '.join(missing)}"
            if not missing:
                problem = f"does not accept {', '.join(unknown)}; it accepts {known}"
            raise DesignError(f"Design {self.name!r} {problem}.")
        if variance and not self.has_variance:
            raise DesignError(f"Design {self.name!r} has no variance: its covariance is {self.covariance.description}.")


def check_design(design: object) -> None:
    """Check that an argument is a design, and not its name.

    Raises:
        ArgumentError: it is not.
    """
    if not isinstance(design, Design):
        raise ArgumentError("design", got=repr(design), expected="a Design, such as kalmix.designs.GATED_DELTANET")
