"""Options that more than one bench has."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kalmix.errors import ArgumentError


def names(option: str, given: str, known: Sequence[str]) -> list[str]:
    """Those of `known` that were asked for, separated by commas, in their order."""
    asked = [name.strip() for name in given.split(",")]
    for name in asked:
        if name not in known:
            raise ArgumentError(option, got=repr(given), needs=f"some of {','.join(known)}")
    return [name for name in known if name in asked]


def device(name: str | None) -> torch.device:
    """A device by name; a GPU if there is one and no name."""
    if name not in (None, "cpu", "cuda"):
        raise ArgumentError("device", got=repr(name), needs="cpu or cuda")
    if name == "cuda" and not torch.cuda.is_available():
        raise ArgumentError("device", got="'cuda', which this machine lacks", needs="cpu")
    return torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
