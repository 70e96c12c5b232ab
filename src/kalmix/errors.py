"""Exceptions that kalmix raises, and the text of their messages. Each is a `ValueError` with a message of one line."""

from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any

MAX_QUOTED_CHARS = 300  # a longer value is abbreviated in a message


class ArgumentError(ValueError):
    """Raised when an argument has the wrong type, shape, dtype or device, or a value that is not accepted.

    A subclass of `ValueError`, also for wrong types. It is not related by class to `KernelError` and `DesignError`.
    The message reads "`name` is GOT; expected EXPECTED. HINT", or "`name` PROBLEM; expected EXPECTED. HINT", with the
    name in backticks. The attribute `name` holds the name.

    Args:
        name: the argument.
        got: the value received. Its `str` is printed after "is", on one line, shortened to about 300 characters.
        problem: a verb phrase in place of "is GOT", such as "has 2 heads" or "does not exist". `got` is then ignored.
        expected: values that are accepted, as a noun phrase such as "a positive integer" or "at least 1".
        hint: a sentence on how to fix the call; none by default. A missing full stop is added.

    Example:
        >>> from kalmix import ArgumentError
        >>> print(ArgumentError("v", problem="has 2 heads", expected="a multiple of 3 (the key heads)"))
        `v` has 2 heads; expected a multiple of 3 (the key heads).
        >>> print(ArgumentError("steps", got=0, expected="a positive integer"))
        `steps` is 0; expected a positive integer.
    """

    def __init__(
        self, name: str, *, got: object = None, problem: str | None = None, expected: object, hint: str = ""
    ) -> None:
        wrong = f"is {abbreviate(got)}" if problem is None else abbreviate(problem)
        advice = f" {hint}" + ("" if hint.endswith(("?", ".")) else ".") if hint else ""
        super().__init__(f"`{name}` {wrong}; expected {expected}.{advice}")
        self.name = name

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the message, not the arguments, so that a worker process can pass the error on."""
        return _rebuild, (type(self), *self.args), self.__dict__


def _rebuild(kind: type[ArgumentError], *args: object) -> ArgumentError:
    return kind.__new__(kind, *args)


def abbreviate(value: object) -> str:
    """Return the text of a value on one line; omit the middle if it has more than 300 characters."""
    line = " ".join(str(value).split())
    half = MAX_QUOTED_CHARS // 2
    return line if len(line) <= MAX_QUOTED_CHARS else f"{line[:half]} ... {line[-half:]}"


def any_of(choices: Iterable[object]) -> str:
    """Return choices as text for a message: `'a', 'b' or 'c'`. Strings are quoted."""
    *first, last = map(repr, choices)
    return f"{', '.join(first)} or {last}" if first else last


def similar_names(name: object, known: Iterable[str]) -> list[str]:
    """Return up to four of the known names that are spelled like `name`, the most similar first."""
    return get_close_matches(str(name), list(known), n=4, cutoff=0.4)


def nearest_names(name: object, known: Iterable[str]) -> str:
    """Return the known names that are spelled like `name`, separated by commas; all known names if none is."""
    known = list(known)
    return ", ".join(similar_names(name, known) or known)


def unknown_name(argument: str, name: object, known: Iterable[str]) -> ArgumentError:
    """Return the error for a name that is not in a table of names; it lists similar names first, if there are any."""
    known = list(known)
    similar = similar_names(name, known)
    hint = f"Did you mean {any_of(similar)}?" if similar else ""
    return ArgumentError(argument, got=repr(name), expected=any_of(known), hint=hint)


class NonFiniteError(ArgumentError):
    """Raised when a signal contains NaN or infinity. In training this is a sign of divergence."""

    def __init__(self, name: str) -> None:
        super().__init__(name, problem="contains NaN or infinity", expected="finite values")


class FormatError(ArgumentError):
    """Raised when a file has a format that this version of kalmix cannot read, because it is too new or too old."""

    def __init__(self, *, got: object, expected: object, hint: str) -> None:
        super().__init__("format", got=got, expected=expected, hint=hint)


class FileError(ValueError):
    """Raised when a file is missing, damaged or of another kind than expected. The message begins with its name."""


class KernelError(ValueError):
    """Raised when the kernel that a call of an op requests does not exist or does not support the call.

    A subclass of `ValueError`. Ops and `kalmix.filter` raise it; also if the call requests no kernel and none supports
    it. The message gives the reason (device, dtype, key width or a feature) and a kernel that supports the call. Omit
    `kernel` to let the op choose.

    Example:
        >>> from kalmix import KernelError, ops
        >>> q = k = v = torch.ones(1, 2, 1, 4)
        >>> try:
        ...     ops.additive(q, k, v, kernel="fast")
        ... except KernelError as error:
        ...     print(error)
        `additive` has no kernel 'fast'; it has triton, chunked, reference
    """


class DesignError(ValueError):
    """Raised when no op can filter a design, or a call does not match its design. A subclass of `ValueError`.

    A design consists of a transition, evidence and a covariance. Their constructors raise this error for an unknown
    kind, and `kalmix.designs.Design` raises it if no op supports the combination.

    Signals are the tensors of a design in addition to q, k and v: `design.signals` lists the required ones,
    `design.optional` the others; `design.options` lists further arguments. `kalmix.filter` and `kalmix.oracle` raise
    this error if a required signal is missing or `None`, if the design has no argument of that name, or if a variance
    is requested and the design has none. `kalmix.filter` also raises it if the transition is a matrix; use
    `kalmix.oracle`. A q, k, v or signal with a wrong shape, dtype or value raises `ArgumentError`, another subclass of
    `ValueError`: `except DesignError` does not catch it.

    Example:
        >>> from kalmix import DesignError, designs
        >>> q = k = v = torch.ones(1, 2, 1, 4)
        >>> try:
        ...     kalmix.filter(designs.DELTANET, q, k, v)
        ... except DesignError as error:
        ...     print(error)
        Design 'deltanet' requires the signals obs_noise, reset; the call lacks obs_noise, reset.
    """
