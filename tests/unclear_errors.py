"""Find calls that fail with anything but a short error of this library."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable

from kalmix import ArgumentError, DesignError, KernelError

LONGEST = 500  # characters


def unclear(attempts: Iterable[tuple[str, Callable[[], object]]]) -> str:
    """Make each attempt; return one line for every error that is unclear: not ours, of several lines, or too long."""
    found = []
    for what, attempt in attempts:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                attempt()
        except (ArgumentError, DesignError, KernelError) as error:
            if "\n" in str(error) or len(str(error)) > LONGEST:
                found.append(f"{what}: {error}")
        except Exception as error:
            found.append(f"{what}: {type(error).__name__}: {error}"[:200])
    return "\n".join(found)
