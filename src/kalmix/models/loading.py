"""Load checkpoints of the models for transformers, and check them before and after."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from kalmix._extras import optional_imports

with optional_imports():
    from safetensors import SafetensorError
    from transformers import PreTrainedModel

from kalmix.errors import ArgumentError, FileError
from kalmix.models.configuration import AUTO_CLASSES, CONFIG_FIELDS, INHERITED_KEYS, KalmixConfig
from kalmix.models.folder import check_finite, check_weights, read_config, read_headers
from kalmix.models.parallel_styles import shard_loaded

# With these, transformers reads other files than those that `check_folder` reads, or no files.
_OTHER_SOURCES = {"variant", "gguf_file", "state_dict"}


def load_checked(
    model_class: type[PreTrainedModel], load: Callable[..., Any], path: Any, *args: Any, **options: Any
) -> Any:
    """Load a checkpoint and check it.

    Args:
        model_class: class of the model.
        load: `from_pretrained` of transformers for that class.
        path: folder, or name on the Hugging Face Hub.
        args: arguments of `load`.
        options: options of `load`, and `strict`.

    Returns:
        The model, or the model and the loading info with `output_loading_info=True`.

    Raises:
        ArgumentError: as `KalmixPreTrainedModel.from_pretrained`.
    """
    output_loading_info = options.pop("output_loading_info", False)
    strict = options.pop("strict", not output_loading_info and options.get("state_dict") is None)
    if options.pop("use_safetensors", None) is False:
        raise ArgumentError("use_safetensors", got="False", expected="True (pickled weights can run code)")
    try:
        folder = Path(str(path), options.get("subfolder") or "")
        is_adapter = (folder / "adapter_config.json").exists() and not (folder / "config.json").exists()
        if folder.is_dir() and not is_adapter and not _OTHER_SOURCES & options.keys():
            _check_folder(folder, model_class, strict)
        model, info = load(path, *args, output_loading_info=True, use_safetensors=True, **options)
        if strict:
            _check_names(model, info)
        check_finite(model)
        shard_loaded(model)
    except (FileError, SafetensorError, json.JSONDecodeError, EOFError, RecursionError) as error:
        expected = "a complete checkpoint of this model"
        raise ArgumentError(str(path), got=f"damaged ({error})", expected=expected) from error
    return (model, info) if output_loading_info else model


def _check_folder(folder: Path, model_class: type[PreTrainedModel], strict: bool) -> None:
    """Check that a folder holds a configuration and, if `strict`, exactly the weights of the model that was saved.

    Raises:
        FileError: it does not.
    """
    given, headers = read_config(folder, {*CONFIG_FIELDS, *INHERITED_KEYS}), read_headers(folder)
    if not strict or "quantization_config" in given:
        return
    layers = given.get("layers")
    count = len(layers) if isinstance(layers, list) else given.get("num_hidden_layers")
    if isinstance(count, int) and count > len(headers):  # building so many would take long
        raise FileError(f"config.json has {count} layers, but there are only {len(headers)} weights")
    try:
        config = KalmixConfig(**given)
        with torch.device("meta"):
            model = _saved_class(given, model_class)(config)
    except (ValueError, TypeError, AttributeError, RuntimeError, OverflowError) as error:
        raise FileError(f"config.json does not describe a model: {error}") from error
    tied = model.all_tied_weights_keys if config.tie_word_embeddings else {}
    check_weights(headers, model, tied)


def _saved_class(config: dict[str, Any], default: type[PreTrainedModel]) -> type[PreTrainedModel]:
    """Return the class that wrote a configuration; `default` if it is not a class of kalmix."""
    (name, *_) = config.get("architectures") or [default.__name__]
    return getattr(import_module("kalmix.models"), name) if name in AUTO_CLASSES.values() else default


def _check_names(model: PreTrainedModel, info: dict[str, Any]) -> None:
    """Check that the names of the loaded weights are those of the model.

    The head may be missing or unknown if another class wrote the checkpoint.

    Raises:
        FileError: a weight is missing or unknown.
    """
    saved = model.config.architectures or [type(model).__name__]
    has_other_head = saved[0] not in {x.__name__ for x in type(model).__mro__}
    prefix = f"{model.base_model_prefix}."
    for fault in ("missing", "unexpected"):
        names = sorted(info[f"{fault}_keys"])
        if has_other_head:
            names = [name for name in names if name.startswith(prefix)]
        if names:
            problem = f"{len(names)} weights are {fault}, the first is {names[0]!r}"
            raise FileError(f"{problem}; pass strict=False to load the others")
