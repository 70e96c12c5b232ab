"""Compile the kernels of all models of a preset, while a corpus is prepared or other work needs no GPU.

    python -m kalmix_bench.experiments.language.precompile --preset medium

Each layer has a process, which takes one training step and one evaluation step of both stages on random tokens, and
runs the tests of the stage "main". Processes share the GPUs. Triton keeps the kernels in its cache on disk, where the
runs find them. Prints the seconds of each layer.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import time
from collections.abc import Sequence

import torch

from kalmix.models import KalmixForCausalLM
from kalmix_bench.experiments.language import probes
from kalmix_bench.experiments.language.protocol import LONGER, MAIN, PRESETS, STAGES, LanguageCell, Preset, RunSize
from kalmix_bench.runner import options

PAIR_TOKENS = 8  # of a pair of words and its repetition in the tests of recall
SECONDS = 60.0  # time of all processes; those that take longer are terminated


def step(layer: str, preset: Preset, device: torch.device) -> None:
    """Take the first training step and the first evaluation step of a layer in both stages, and run its tests.

    Args:
        layer: name of the layer.
        preset: preset with the sizes of models and batches.
        device: device of the models.
    """
    from kalmix.training.batching import plan_batches
    from kalmix.training.initial_model import build

    for stage in STAGES:
        recipe = LanguageCell(stage, layer, preset.size(stage), 1e-3, 0, "").recipe("shards")
        with device:
            model = build(recipe, recipe.vocab_size, 0).train()
            ids = torch.randint(recipe.vocab_size, (plan_batches(recipe, 1).rows, recipe.seq_len))
        with torch.autocast(device.type, torch.bfloat16, enabled=recipe.bf16):
            loss = model(input_ids=ids, labels=ids, skip_logits=True).loss
        loss.backward()
        if not loss.isfinite():
            raise SystemExit(f"error: the loss of {layer} is {loss.item()}")
        model.eval()
        with torch.autocast(device.type, torch.bfloat16, enabled=recipe.bf16), torch.no_grad():
            model(input_ids=ids, labels=ids, skip_logits=True)
            if stage == MAIN:
                test(model, preset.main)


def test(model: KalmixForCausalLM, size: RunSize) -> None:
    """Run the tests of `run.evaluate` on random tokens of the same lengths.

    Args:
        model: model in evaluation mode.
        size: sizes of the tests.
    """
    longest = LONGER * size.seq_len
    tokens = torch.randint(model.config.vocab_size, (size.probe_rows, longest + 1))
    probes.loss_by_position(model, tokens, size.seq_len)
    copied = [2 * int(part * size.seq_len) for part in probes.COPIED]
    recalled = [PAIR_TOKENS * pairs for pairs in probes.PAIRS]
    for length in (*copied, *(length for length in recalled if length <= size.seq_len)):
        probes.score_tokens(model, tokens[:, : length + 1])
    probes.decoding(model, tokens[:, :-1], (size.seq_len, longest))


def _run(layer: str, preset: str) -> None:
    begin = time.monotonic()
    step(layer, PRESETS[preset], torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    print(f"{time.monotonic() - begin:6.1f} s  {layer}", flush=True)


def run(preset: str, layers: Sequence[str], devices: str | None) -> bool:
    """Take the steps of all layers in parallel; return whether all processes ended without an error.

    Args:
        preset: name of the preset.
        layers: layers; all of the preset if empty.
        devices: GPUs, as `--devices` of `kalmix bench language`.
    """
    gpus, names = options.gpus(devices), layers or PRESETS[preset].layers
    context, until = multiprocessing.get_context("spawn"), time.monotonic() + SECONDS
    processes = [context.Process(target=_run, args=(name, preset), daemon=True) for name in names]
    for n, process in enumerate(processes):
        os.environ["CUDA_VISIBLE_DEVICES"] = gpus[n % len(gpus)]  # the process inherits it
        process.start()
    for process in processes:
        process.join(max(0.0, until - time.monotonic()))
        if process.is_alive():
            process.terminate()
            process.join()
    return all(process.exitcode == 0 for process in processes)


def main() -> None:
    """Compile from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", choices=tuple(PRESETS), required=True, help="of `kalmix bench language`")
    parser.add_argument("--layer", action="append", default=[], help="layer; repeatable. Default: the preset's")
    parser.add_argument("--devices", help="all, cpu, or GPUs such as 0,1. Default: all, or cpu without GPUs")
    given = parser.parse_args()
    if not run(given.preset, given.layer, given.devices):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
