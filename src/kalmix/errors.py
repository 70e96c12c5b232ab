"""What can be wrong with a call, each a `ValueError` with one sentence."""

from collections.abc import Iterable
from difflib import get_close_matches

LONGEST = 300  # characters of what was received that a sentence repeats


class ArgumentError(ValueError):
    """An argument has the wrong shape, dtype, device or values."""

    def __init__(self, name: str, *, got: object, needs: object) -> None:
        super().__init__(f"`{name}` is {in_short(got)}, but must be {needs}")
        self.name = name


def in_short(told: object) -> str:
    """Return a text on one line, its middle left out where it is long."""
    line = " ".join(str(told).split())
    return line if len(line) <= LONGEST else f"{line[: LONGEST // 2]} ... {line[-LONGEST // 2 :]}"


def alike(name: object, known: Iterable[str]) -> str:
    """Those of the known names that are spelled much like `name`, all of them if none is; for a sentence."""
    known = list(known)
    return ", ".join(get_close_matches(str(name), known, n=4, cutoff=0.4) or known)


class NonFiniteError(ArgumentError):
    """A signal holds NaN or infinity: in training, a sign that it diverged."""

    def __init__(self, name: str) -> None:
        super().__init__(name, got="not finite", needs="finite")


class FormatError(ArgumentError):
    """A file has a format that this version of kalmix does not know."""

    def __init__(self, *, got: object, needs: object) -> None:
        super().__init__("format", got=got, needs=needs)


class FileError(ValueError):
    """A file is missing, damaged or of another kind than expected; begins with its name."""


class KernelError(ValueError):
    """No kernel, or not the pinned one, can serve a call."""


class DesignError(ValueError):
    """The parts of a design, or the signals given to it, do not fit together."""
