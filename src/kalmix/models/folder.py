"""Checks of a model folder before anything is built from it. No pickle is opened and no code is imported."""

from __future__ import annotations

from collections.abc import Collection
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from kalmix.errors import FileError, abbreviate
from kalmix.files import check_format, check_regular, read_json

WEIGHTS_FILE, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"
FLOAT_DTYPES = ("F64", "F32", "BF16", "F16")
_SAME_NAME = 0.85  # ratio of equal characters from which an unknown key is a typing error
EXTRA_JSON_FILES = ("generation_config.json",)  # transformers reads it, too


class TensorHeader(NamedTuple):
    """Header of a tensor in a safetensors file.

    Attributes:
        dtype: name of its dtype in safetensors, such as "BF16".
        shape: sizes.
        file: name of the file.
    """

    dtype: str
    shape: tuple[int, ...]
    file: str


def read_config(folder: Path, known: Collection[str]) -> dict[str, Any]:
    """Return the configuration in a model folder.

    Args:
        folder: folder with `config.json`.
        known: keys of a configuration. Other keys are accepted, unless they name a class or are spelled like one
            of these, which is probably a typing error.

    Raises:
        FileError: a JSON file is missing or damaged, or config.json is not of kalmix.
        FormatError: config.json has a format that this version of kalmix cannot read.
    """
    config = read_json(folder / "config.json")
    if config.get("model_type") != "kalmix":
        raise FileError(f"config.json has model_type {config.get('model_type')!r}; expected 'kalmix'")
    check_format(config, folder / "config.json", oldest=3)
    for key in set(config).difference(known):  # transformers keeps other keys as attributes
        meant = get_close_matches(key, known, n=1, cutoff=_SAME_NAME)
        if meant or key.endswith("_class"):  # transformers may look for a class of this name
            hint = f"; did you mean {meant[0]!r}?" if meant else ""
            raise FileError(f"config.json has the unknown key {key!r}{hint}")
    quantization = config.get("quantization_config")
    if quantization is not None:
        method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
        if method != "torchao":
            raise FileError(f"config.json asks for quantization by {abbreviate(repr(method))}; expected 'torchao'")
    for name in EXTRA_JSON_FILES:
        if (folder / name).exists():
            read_json(folder / name)
    return config


def weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files of a model folder: `model.safetensors`, or those that its index names.

    Raises:
        FileError: there are none, or the index is damaged or names other files.
    """
    single, index = folder / WEIGHTS_FILE, folder / INDEX_FILE
    if single.exists():
        check_regular(single)
        return [single]
    if not index.exists():
        pickles = any(folder.glob("*.bin")) or any(folder.glob("*.pt"))
        reason = "; pickled weights (.bin, .pt) are never opened, because they can run code" if pickles else ""
        raise FileError(f"{WEIGHTS_FILE} is missing, so there are no weights{reason}")
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise FileError(f"{INDEX_FILE} is damaged (it has no weight_map)")
    for name in weight_map.values():
        if not isinstance(name, str) or Path(name).name != name or not name.endswith(".safetensors"):
            raise FileError(f"{INDEX_FILE} names {name!r}; expected safetensors files in the same folder")
    files = [folder / name for name in dict.fromkeys(weight_map.values())]
    for file in files:
        check_regular(file)
    return files


def read_headers(folder: Path) -> dict[str, TensorHeader]:
    """Return the header of every weight in a model folder, by name, without reading the weights.

    Raises:
        FileError: a file is missing or damaged.
    """
    headers: dict[str, TensorHeader] = {}
    for file in weight_files(folder):
        try:
            with safe_open(file, framework="pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118 - not a mapping
                    tensor = tensors.get_slice(name)
                    headers[name] = TensorHeader(tensor.get_dtype(), tuple(tensor.get_shape()), file.name)
        except (OSError, SafetensorError) as error:
            raise FileError(f"{file.name} is damaged ({error})") from None
    return headers


def check_weights(headers: dict[str, TensorHeader], model: nn.Module, tied: Collection[str] = ()) -> None:
    """Check that the weights in a folder are those of a model, with its shapes.

    Args:
        headers: as `read_headers` returns them.
        model: model to compare with; may be on the device "meta".
        tied: names of weights that the files may omit, because they are shared with another weight.

    Raises:
        FileError: a weight is missing, unknown, of another shape or not a floating-point number; names it.
    """
    expected = model.state_dict()
    if missing := [name for name in expected if name not in headers and name not in tied]:
        raise FileError(f"{WEIGHTS_FILE} lacks {len(missing)} weights, the first is {missing[0]!r}")
    for name, (dtype, shape, file) in headers.items():
        if name not in expected:
            raise FileError(f"{file} holds the unknown weight {name!r}")
        if shape != (in_model := tuple(expected[name].shape)):
            raise FileError(
                f"{file} holds {name!r} of shape {list(shape)}; expected {list(in_model)}, from config.json"
            )
        if expected[name].is_floating_point() and dtype not in FLOAT_DTYPES:
            raise FileError(f"{file} holds {name!r} of dtype {dtype}; expected {', '.join(FLOAT_DTYPES)}")


def check_finite(model: nn.Module) -> None:
    """Check that all floating-point tensors of a model are finite, but for quantized ones. Synchronizes with a GPU.

    Raises:
        FileError: a tensor contains NaN or infinity; names it.
    """
    for name, tensor in model.state_dict().items():
        if not tensor.is_floating_point() or tensor.device.type == "meta" or not tensor.numel():
            continue
        if type(tensor) is not Tensor:  # quantized, by a package that may not define `aminmax` for its tensors
            continue
        # The smallest and the largest value are NaN if any value is.
        if not bool(torch.stack(tensor.detach().aminmax()).isfinite().all()):
            raise FileError(f"{WEIGHTS_FILE} holds NaN or infinity in {name!r}")
