"""Names of the cache in calls and outputs: `cache` from transformers 5.24 on, `past_key_values` before."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from transformers.cache_utils import Cache
from transformers.modeling_outputs import BaseModelOutputWithPast

from kalmix.errors import ArgumentError

NAMES = ("cache", "past_key_values")
CACHE_FIELD = next(x.name for x in fields(BaseModelOutputWithPast) if x.name in NAMES)  # the one that clients use


class CacheNames:
    """Part of an output with a cache: the cache has both names, whatever the version of transformers."""


def _cache(self: CacheNames) -> Cache | None:
    """Cache of the call; `None` if none was used."""
    return getattr(self, CACHE_FIELD)


for _name in NAMES:
    if _name != CACHE_FIELD:
        setattr(CacheNames, _name, property(_cache))


def given_cache(past_key_values: Any, cache: Any) -> Cache | None:
    """Return the cache that a call was given under one of its names.

    Raises:
        ArgumentError: it has both names, or is not a cache of transformers.
    """
    given, name = (past_key_values, "past_key_values") if cache is None else (cache, "cache")
    if cache is not None and past_key_values is not None:
        raise ArgumentError("cache", problem="and `past_key_values` are both given", expected="one of the two")
    if given is not None and not isinstance(given, Cache):
        got = f"a {type(given).__name__}"
        raise ArgumentError(name, got=got, expected="a cache, as in the output of an earlier call")
    return given
