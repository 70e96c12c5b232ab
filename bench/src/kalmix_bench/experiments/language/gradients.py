"""Compare the gradients of the models of a preset, at their full size, with those of other kernels.

    python -m kalmix_bench.experiments.language.gradients --preset medium --layer kla

Each model of the stage "main" computes the gradients of one batch of random tokens three times, from the same random
weights (`zero_init` is off, since zeros hide most gradients):

- "training": as it trains, with the default kernels, and under bfloat16 autocast if the preset has it;
- "float32": the same in float32, without TF32;
- "exact": in float32 by other kernels, by default those of PyTorch operations ("chunked"), a few rows at a time.
  Layers without a choice of kernels, such as the attention of a hybrid, are the same.

Rows have the losses and, for "training" and "float32", the largest relative error of the gradient of a parameter
against "exact", its name, and the error of all gradients together.
"""

from __future__ import annotations

import argparse
import time
from math import isnan
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kalmix.errors import ArgumentError
from kalmix.models import KalmixForCausalLM
from kalmix_bench.experiments.language.protocol import MAIN, PRESETS, LanguageCell, Preset
from kalmix_bench.runner.json_lines import append_rows

Gradients = dict[str, Tensor]


def compare(
    layer: str,
    preset: Preset,
    device: torch.device,
    rows: int | None = None,
    part: int = 4,
    kernel: str = "chunked",
) -> dict[str, Any]:
    """Return the losses and the errors of the gradients of one layer's model.

    Args:
        layer: name of the layer.
        preset: preset with the sizes of models and batches.
        device: device of the model.
        rows: sequences of the batch; by default those of the preset at once.
        part: sequences that the other kernels see at a time.
        kernel: name of these kernels.
    """
    from kalmix.training.batching import plan_batches
    from kalmix.training.initial_model import build

    size = preset.with_zero_init(False).size(MAIN)
    recipe = LanguageCell(MAIN, layer, size, 1e-3, 0, "").recipe("shards")
    torch.manual_seed(0)
    with device:
        model = build(recipe, recipe.vocab_size, 0).train()
    ids = torch.randint(recipe.vocab_size, (rows or plan_batches(recipe, 1).rows, recipe.seq_len)).to(device)
    found = {"training": _gradients(model, ids, len(ids), recipe.bf16), "float32": _gradients(model, ids, len(ids))}
    layers: list[Any] = [module for module in model.modules() if hasattr(module, "kernel")]
    if not layers:
        raise ArgumentError("layer", got=repr(layer), expected="a layer with several kernels")
    for each in layers:
        each.kernel = kernel
    loss, exact = _gradients(model, ids, part)
    row: dict[str, Any] = {"layer": layer, "rows": len(ids), "loss": {"exact": loss}, "errors": {}}
    for name, (value, gradients) in found.items():
        row["loss"][name] = value
        row["errors"][name] = errors(gradients, exact)
    return row


def _gradients(model: KalmixForCausalLM, ids: Tensor, part: int, bf16: bool = False) -> tuple[float, Gradients]:
    """Return the mean loss and its gradients, computed for `part` rows at a time."""
    model.zero_grad()
    total = 0.0
    for rows in ids.split(part):
        with torch.autocast(ids.device.type, torch.bfloat16, enabled=bf16):
            loss = model(input_ids=rows, labels=rows, skip_logits=True).loss * (len(rows) / len(ids))
        loss.backward()
        total += float(loss.detach())
    return total, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def errors(found: Gradients, exact: Gradients) -> dict[str, Any]:
    """Return the largest relative error of a parameter's gradient, its name, and the error of all gradients."""
    distance = {name: float((found[name] - x).norm()) for name, x in exact.items()}
    length = {name: float(x.norm()) for name, x in exact.items()}
    relative = {name: distance[name] / max(length[name], 1e-30) for name in exact}
    worst = max(relative, key=lambda name: (isnan(relative[name]), relative[name]))
    together = sum(d * d for d in distance.values()) ** 0.5 / sum(x * x for x in length.values()) ** 0.5
    return {"largest": relative[worst], "parameter": worst, "all": together}


def main() -> None:
    """Compare from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", choices=tuple(PRESETS), required=True, help="preset of `kalmix bench language`")
    parser.add_argument("--layer", action="append", default=[], help="layer; repeatable. Default: the preset's")
    parser.add_argument("--rows", type=int, help="sequences of the batch. Default: those of the preset")
    parser.add_argument("--kernel", default="chunked", help="kernels to compare with")
    parser.add_argument("--output", type=Path, help="file for rows as JSON lines")
    given = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    for layer in given.layer or PRESETS[given.preset].layers:
        begin = time.monotonic()
        row = compare(layer, PRESETS[given.preset], device, given.rows, kernel=given.kernel)
        row |= {"device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu"}
        if given.output is not None:
            append_rows(given.output, [row])
        shown = ", ".join(
            f"{name}: {x['largest']:.1e} ({x['parameter']}), all {x['all']:.1e}" for name, x in row["errors"].items()
        )
        print(f"{time.monotonic() - begin:6.1f} s  {layer}  {shown}", flush=True)


if __name__ == "__main__":
    main()
