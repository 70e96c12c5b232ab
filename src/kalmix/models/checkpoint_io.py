"""Checkpoints of other libraries: read their files and load their weights into models of kalmix."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from kalmix._extras import optional_imports

with optional_imports():
    from safetensors import SafetensorError
    from safetensors.torch import load_file

from kalmix.errors import ArgumentError, FileError, any_of
from kalmix.files import read_json
from kalmix.models.folder import weight_files
from kalmix.validation import check_range, check_types

# Keys that may be null: another key decides then.
NULLABLE_KEYS = ("num_v_heads", "intermediate_size", "hidden_ratio", "num_key_value_heads")
TIED_WEIGHTS = {"lm_head.weight": "model.embed_tokens.weight"}  # shared if the configuration asks for it


def read_checkpoint(folder: str | Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Read a folder that `save_pretrained` wrote.

    Args:
        folder: folder with config.json, and `model.safetensors` or several safetensors files with their index.

    Returns:
        The configuration, and the weights by name, on the CPU.

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
        problem = f"cannot be read: {str(file)!r} ({error})"
        raise ArgumentError(
            "checkpoint", problem=problem, expected="complete safetensors files and config.json"
        ) from error
    return config, weights


def check_allowed(config: Mapping[str, Any], allowed: Mapping[str, tuple[Any, ...]], where: str = "config") -> None:
    """Check that keys of a configuration have a value that kalmix supports.

    Args:
        config: configuration of another library.
        allowed: supported values by key; an absent key counts as the first of them, except "model_type".
        where: name of the configuration in the error message.

    Raises:
        ArgumentError: a key has another value.
    """
    if "model_type" in allowed and "model_type" not in config:
        expected = any_of(allowed["model_type"])
        raise ArgumentError(f"{where}['model_type']", problem="is missing", expected=expected)
    for key, values in allowed.items():
        if config.get(key, values[0]) not in values:
            raise ArgumentError(f"{where}[{key!r}]", got=repr(config[key]), expected=" or ".join(map(repr, values)))


def check_config(config: Mapping[str, Any], defaults: Mapping[str, Any], where: str = "config") -> None:
    """Check that keys of a configuration have the type of their default. Token ids may have any type here.

    Args:
        config: configuration of another library.
        defaults: its default values, by key.
        where: name of the configuration in the error message.

    Raises:
        ArgumentError: a value has another type; names the key.
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
    """Load the weights of another library into a module. Every weight on either side must be used.

    Args:
        module: module of kalmix; keeps its dtype.
        weights: weights of the other library, by name.
        source_names: maps the name of a weight of `module` to the names of the source weights that are concatenated
            along dim 0 to build it.
        kind: name of the architecture in error messages.
        transform: maps the name and the value of a source weight to the part of the target that it fills.
        tied: weights of `module` that share another of its weights: name to name. Their source may be absent.

    Raises:
        ArgumentError: a weight is missing, unknown, of another shape, not a floating-point number or not finite; names
            it.
    """
    for name, weight in weights.items():
        if not weight.is_floating_point():
            raise ArgumentError(
                "weights", problem=f"contain {name!r} of dtype {weight.dtype}", expected="floating-point tensors"
            )
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
                raise ArgumentError(
                    "weights", problem=f"lack {source!r}", expected=f"all weights of a {kind} model with this config"
                )
        weight = torch.cat([transform(source, remaining.pop(source)) for source in names])
        if weight.shape != target.shape:
            problem = f"contain {' and '.join(map(repr, names))} of shape {list(weight.shape)}"
            raise ArgumentError("weights", problem=problem, expected=f"{list(target.shape)}, from the config")
        state[name] = weight
    if remaining:
        raise ArgumentError(
            "weights",
            problem=f"contain {min(remaining)!r}",
            expected=f"only weights of a {kind} model with this config",
        )
    module.load_state_dict(state)


def squeeze_conv_weight(name: str, weight: Tensor) -> Tensor:
    """Return depthwise convolution weights `[C, 1, taps]` as `[C, taps]`; other weights unchanged."""
    return weight.squeeze(1) if name.endswith("conv1d.weight") else weight
