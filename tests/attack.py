"""A pickle that leaves a mark when it runs code."""

from __future__ import annotations

from pathlib import Path
from typing import Any


class Attack:
    """An object that leaves a mark when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.mark,)
