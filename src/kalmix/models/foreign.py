"""Checkpoints of other libraries: reading their files, and filling our modules with their weights."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from kalmix.errors import ArgumentError

TIED = {"model.lm_head.weight": "model.embed_tokens.weight"}  # ours that share a weight, where a config says so


def read_checkpoint(folder: str | Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """What a `save_pretrained` left: its config.json, and one file `model.safetensors` or several and their index.

    Raises:
        ArgumentError: a file is missing or damaged.
    """
    folder = Path(folder)
    config = _json(folder / "config.json")
    index = folder / "model.safetensors.index.json"
    names = sorted(set(_json(index)["weight_map"].values())) if index.exists() else ["model.safetensors"]
    weights: dict[str, Tensor] = {}
    for name in names:
        try:
            weights |= load_file(folder / name)
        except (OSError, SafetensorError) as error:
            got = f"without a sound {name} ({error})"
            raise ArgumentError("folder", got=got, needs="a whole checkpoint") from error
    return config, weights


def require(config: Mapping[str, Any], allowed: Mapping[str, tuple[Any, ...]], where: str = "config") -> None:
    """Check that keys of a config have one of the values we serve, the first if absent.

    Raises:
        ArgumentError: one has another.
    """
    for key, values in allowed.items():
        if config.get(key, values[0]) not in values:
            raise ArgumentError(f"{where}[{key!r}]", got=repr(config[key]), needs=" or ".join(map(repr, values)))


def fill(
    module: nn.Module,
    weights: Mapping[str, Tensor],
    sources: Callable[[str], tuple[str, ...]],
    what: str,
    prepare: Callable[[str, Tensor], Tensor],
    tied: Mapping[str, str] | None = None,
) -> None:
    """Load all of `weights` into all of `module`.

    Args:
        module: takes them in its own dtype.
        weights: theirs, by name.
        sources: their names of the pieces of one of our weights, one below the other.
        what: their kind of model, for errors.
        prepare: gives one of theirs, by its name, the shape of our piece.
        tied: ours that are another of ours, whatever they hold.

    Raises:
        ArgumentError: a weight is missing, unknown or of another shape; names it.
    """
    left, state = dict(weights), {}
    for name, target in module.state_dict().items():
        names = sources(name)
        if tied and name in tied:
            state[name] = state[tied[name]]
            left.pop(names[0], None)
            continue
        for source in names:
            if source not in left:
                raise ArgumentError("weights", got=f"without {source!r}", needs=f"all of a {what}")
        taken = torch.cat([prepare(source, left.pop(source)) for source in names])
        if taken.shape != target.shape:
            got = f"{list(taken.shape)} in {' and '.join(map(repr, names))}"
            raise ArgumentError("weights", got=got, needs=f"{list(target.shape)}, as the config says")
        state[name] = taken
    if left:
        raise ArgumentError("weights", got=f"with {min(left)!r}", needs=f"those of a {what} as configured")
    module.load_state_dict(state)


def convolution(name: str, weight: Tensor) -> Tensor:
    """Depthwise convolutions `[C, 1, taps]` as ours, `[C, taps]`; other weights as they are."""
    return weight.squeeze(1) if name.endswith("conv1d.weight") else weight


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ArgumentError("folder", got=f"without a readable {path.name} ({error})", needs="a checkpoint") from error
