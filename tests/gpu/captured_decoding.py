"""Compare `generate` with captured decoding steps, without them and without a cache, for every layer: one prompt,
padded prompts, beams.

    python tests/gpu/captured_decoding.py --layers 3

On a GPU the steps are CUDA graphs. Exits with 1 if tokens differ, a call fails, or nothing was captured.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))

from models.conftest import build, tokens
from models.test_cache import EVERY_LAYER
from models.test_static_cache import left_padded

from kalmix.models import KalmixForCausalLM, capture_decoding

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def prompts() -> dict[str, dict[str, Any]]:
    """Return arguments of `generate` by the kind of call."""
    ids, mask = left_padded(8, 5, 1)
    return {
        "one": {"inputs": tokens(1, 9)},
        "padded": {"inputs": ids, "attention_mask": mask},
        "beams": {"inputs": tokens(2, 6), "num_beams": 3},
    }


def compare(model: KalmixForCausalLM, kind: str, arguments: dict[str, Any]) -> str:
    """Return what is wrong with captured decoding in this kind of call, or an empty string."""
    arguments = {name: x.to(DEVICE) if isinstance(x, Tensor) else x for name, x in arguments.items()}
    arguments |= {"max_new_tokens": 16, "do_sample": False}
    expected = model.generate(**arguments, use_cache=False)
    found = [
        model.generate(**arguments, disable_compile=True, cache_implementation="dynamic"),
        model.generate(**arguments),
    ]
    with capture_decoding(model) as step:
        found += [model.generate(**arguments), model.generate(**arguments)]
    equal = [torch.equal(x, expected) for x in found]
    captured = DEVICE == "cpu" or kind == "padded" or step.captures >= 1
    if all(equal) and captured:
        return ""
    return f"equal tokens {equal}, {step.captures} captures, {step.replays} replays, refusal {step.refusal}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, help="number of layers to compare; default: all")
    entries = EVERY_LAYER[: parser.parse_args().layers]
    wrong, begin = 0, time.monotonic()
    for entry in entries:
        model = build([entry, "attention"], hidden_size=32).to(DEVICE)
        for kind, arguments in prompts().items():
            try:
                problem = compare(model, kind, arguments)
            except Exception as error:
                problem = f"{type(error).__name__}: {str(error)[:300]}"
            if problem:
                wrong += 1
                print(f"WRONG {entry['mixer']} (window {entry.get('window')}), {kind}: {problem}", flush=True)
            if "CUDA error" in problem:
                return 1  # the context is broken
        print(f"{entry['mixer']}: {time.monotonic() - begin:.0f} s", flush=True)
    print(f"{DEVICE}: {len(entries)} layers, {wrong} wrong calls, {time.monotonic() - begin:.0f} s")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
