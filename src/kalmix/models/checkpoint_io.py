"""Checkpoints of other libraries: reading their files, and filling our modules with their weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from kalmix.errors import ArgumentError, FileError
from kalmix.files import read_json
from kalmix.models.folder import weight_files
from kalmix.validation import check_range, check_types

# Keys of a config that may be null, which means that another key decides.
NULLABLE_KEYS = ("num_v_heads", "intermediate_size", "hidden_ratio", "num_key_value_heads")
TIED_WEIGHTS = {"model.lm_head.weight": "model.embed_tokens.weight"}  # ours that share a weight, where a config says so


def read_checkpoint(folder: str | Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Read what `save_pretrained` wrote: config.json, and one file `model.safetensors` or several and their index.

    Raises:
        ArgumentError: a file is missing or damaged.
    """
    folder = Path(folder)
    weights: dict[str, Tensor] = {}
    file = folder / "config.json"
    try:
        config = read_json(file)
        for file in weight_files(folder):
            weights |= load_file(file)
    except (FileError, OSError, SafetensorError) as error:
        got = f"{str(file)!r} ({error})"
        raise ArgumentError("checkpoint", got=got, expected="whole, in safetensors") from error
    return config, weights


def check_allowed(config: Mapping[str, Any], allowed: Mapping[str, tuple[Any, ...]], where: str = "config") -> None:
    """Check that keys of a config have one of the values we serve, the first if absent.

    Raises:
        ArgumentError: one has another.
    """
    for key, values in allowed.items():
        if config.get(key, values[0]) not in values:
            raise ArgumentError(f"{where}[{key!r}]", got=repr(config[key]), expected=" or ".join(map(repr, values)))


def check_config(config: Mapping[str, Any], defaults: Mapping[str, Any], where: str = "config") -> None:
    """Check that keys of a config have values of the type of their defaults; those of tokens may be anything here.

    Raises:
        ArgumentError: one is of another type; names the key.
    """
    present = {key: default for key, default in defaults.items() if key in config and not key.endswith("_token_id")}
    hints = {f"{where}[{key!r}]": int if default is None else type(default) for key, default in present.items()}
    given = {f"{where}[{key!r}]": config[key] for key in present if key not in NULLABLE_KEYS or config[key] is not None}
    check_types(hints, given)


def load_converted_weights(
    module: nn.Module,
    weights: Mapping[str, Tensor],
    source_names: Callable[[str], tuple[str, ...]],
    kind: str,
    transform: Callable[[str, Tensor], Tensor],
    tied: Mapping[str, str] | None = None,
) -> None:
    """Load all of `weights` into all of `module`.

    Args:
        module: takes them in its own dtype.
        weights: theirs, by name.
        source_names: their names of the pieces of one of our weights, one below the other.
        kind: their kind of model, for errors.
        transform: gives one of theirs, by its name, the shape of our piece.
        tied: ours that are another of ours, whatever they hold.

    Raises:
        ArgumentError: a weight is missing, unknown, of another shape, of integers or not finite; names it.
    """
    for name, weight in weights.items():
        if not weight.is_floating_point():
            raise ArgumentError("weights", got=f"with {name!r} of {weight.dtype}", expected="of floating point")
        check_range(f"weights[{name!r}]", weight)
    remaining, state = dict(weights), {}
    for name, target in module.state_dict().items():
        names = source_names(name)
        if tied and name in tied:
            state[name] = state[tied[name]]
            remaining.pop(names[0], None)
            continue
        for source in names:
            if source not in remaining:
                raise ArgumentError("weights", got=f"without {source!r}", expected=f"all of a {kind}")
        weight = torch.cat([transform(source, remaining.pop(source)) for source in names])
        if weight.shape != target.shape:
            got = f"{list(weight.shape)} in {' and '.join(map(repr, names))}"
            raise ArgumentError("weights", got=got, expected=f"{list(target.shape)}, as the config says")
        state[name] = weight
    if remaining:
        raise ArgumentError("weights", got=f"with {min(remaining)!r}", expected=f"those of a {kind} as configured")
    module.load_state_dict(state)


def squeeze_conv_weight(name: str, weight: Tensor) -> Tensor:
    """Depthwise convolutions `[C, 1, taps]` as ours, `[C, taps]`; other weights as they are."""
    return weight.squeeze(1) if name.endswith("conv1d.weight") else weight
