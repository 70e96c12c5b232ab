"""Name of the cache in calls and outputs of models: `cache` since transformers 5.24, `past_key_values` before.

All models of kalmix accept both names, and their outputs answer to both. Code that calls any model of transformers
uses `CACHE_NAME`, so that it works with every version and causes no warning.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from functools import wraps
from typing import Any

from transformers.cache_utils import Cache
from transformers.modeling_outputs import BaseModelOutputWithPast

from kalmix.errors import ArgumentError

NEW, OLD = CACHE_NAMES = ("cache", "past_key_values")
CACHE_NAME: str = NEW if NEW in {field.name for field in fields(BaseModelOutputWithPast)} else OLD


def given_cache(arguments: Mapping[str, Any]) -> Any:
    """Return the cache among keyword arguments, under either name; `None` if there is none.

    Raises:
        ArgumentError: both names have a value, or it is not a cache of transformers.
    """
    new, old = arguments.get(NEW), arguments.get(OLD)
    if new is not None and old is not None:
        expected = "one of them, since both are names of one argument"
        raise ArgumentError(NEW, problem=f"and `{OLD}` are both given", expected=expected)
    name, given = (OLD, old) if new is None else (NEW, new)
    if given is not None and not isinstance(given, Cache):
        got = f"a {type(given).__name__}"
        raise ArgumentError(name, got=got, expected="a cache, as in the output of an earlier call")
    return given


def with_cache(cache: Any, arguments: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return keyword arguments with a cache under the name of this transformers, and under no other.

    Args:
        cache: a cache; `None` for an argument of that value.
        arguments: further keyword arguments.
    """
    others = {name: value for name, value in (arguments or {}).items() if name not in CACHE_NAMES}
    return {**others, CACHE_NAME: cache}


def rename_cache(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return keyword arguments with their cache, if there is one, under the name of this transformers.

    Raises:
        ArgumentError: both names have a value, or it is not a cache of transformers.
    """
    cache = given_cache(arguments)
    return dict(arguments) if cache is None else with_cache(cache, arguments)


def accept_both_names(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a method of transformers so that it takes its cache under either name.

    Raises:
        ArgumentError: in a call, both names have a value, or it is not a cache of transformers.
    """

    @wraps(forward)
    def accept(*args: Any, **kwargs: Any) -> Any:
        return forward(*args, **rename_cache(kwargs))

    return accept


def cache_of(output: Any) -> Any:
    """Return the cache in the output of a model, or of `generate`; `None` if it has none."""
    return getattr(output, CACHE_NAME)


class BothCacheNames:
    """Base class of outputs whose cache is an attribute and an item of either name.

    Attributes:
        cache: the cache.
        past_key_values: the cache.
    """

    cache: Any
    past_key_values: Any

    def __getitem__(self, key: Any) -> Any:
        return super().__getitem__(_key(key))  # pyright: ignore

    def __contains__(self, key: Any) -> bool:
        return super().__contains__(_key(key))  # pyright: ignore

    def get(self, key: Any, default: Any = None) -> Any:
        """Return the value of a field; `default` if it is `None` or does not exist."""
        return super().get(_key(key), default)  # pyright: ignore


# Only the name that is not a field of the dataclass becomes a property.
setattr(BothCacheNames, OLD if CACHE_NAME == NEW else NEW, property(cache_of))


def _key(key: Any) -> Any:
    """Return the key under which an output stores an item."""
    return CACHE_NAME if isinstance(key, str) and key in CACHE_NAMES else key
