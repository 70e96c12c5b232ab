"""Layers: one file a paper, each a `Mixer`. `MIXERS` is the table a model's configuration names them by."""

from __future__ import annotations

import inspect
from typing import Any

from kalmix.errors import ArgumentError
from kalmix.layers.attention import Attention, AttentionState
from kalmix.layers.kla import KLA, KLAState
from kalmix.layers.mixer import Mixer

MIXERS: dict[str, type[Mixer]] = {"kla": KLA, "attention": Attention}


def mixer_class(name: str, options: dict[str, Any]) -> type[Mixer]:
    """The layer called `name`, if it takes `options`.

    Raises:
        ArgumentError: no such layer, or an option it does not have; says which there are.
    """
    if name not in MIXERS:
        raise ArgumentError("mixer", got=repr(name), needs=f"one of {', '.join(map(repr, MIXERS))}")
    known = [option for option in inspect.signature(MIXERS[name]).parameters if option != "hidden_size"]
    for option in options:
        if option not in known:
            raise ArgumentError(f"option of {name!r}", got=repr(option), needs=f"one of {', '.join(map(repr, known))}")
    return MIXERS[name]


__all__ = ["KLA", "MIXERS", "Attention", "AttentionState", "KLAState", "Mixer", "mixer_class"]
