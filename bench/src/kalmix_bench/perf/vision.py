"""Measure images per second of GKAVision-T, its backbone with attention only, and a `timm` model of its size.

    python -m kalmix_bench.perf.vision                    # 224 pixels, bf16, channels last, batch 128 and 256
    python -m kalmix_bench.perf.vision --compile                # also under torch.compile
    python -m kalmix_bench.perf.vision --device cpu --size 64 --batch-size 2          # a quick check

Inference is one call without gradients; training is forward and backward without an optimizer step. Times are device
times (`timing.py`), without launch overhead. Weights are random.

Prints row by row and writes bench/results/<date>-<hardware>-vision.json (or to --output).
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import kalmix
from kalmix.models.vision.model import gated_kalmanet, gkavision_tiny
from kalmix_bench.perf.ops import hardware
from kalmix_bench.perf.result_file import dated_file
from kalmix_bench.perf.timing import measure

OURS: dict[str, Callable[[], nn.Module]] = {
    "gkavision_tiny": gkavision_tiny,
    "gkavision_tiny, output gate": lambda: gkavision_tiny(mixer=lambda width: gated_kalmanet(width, gate="silu")),
    "its backbone, attention only": lambda: gkavision_tiny(mixer=None),
}
PEER = "nextvit_small"  # of timm, 31.8 million parameters, and in the paper's table


def models(peer: str) -> dict[str, Callable[[], nn.Module]]:
    """Return our models, and one of timm if it can be imported; otherwise print the reason."""
    try:
        import timm
    except (ImportError, OSError, RuntimeError) as error:  # torchvision refuses another torch with a RuntimeError
        print(f"(without {peer}: timm cannot be imported: {error})")
        return OURS
    return OURS | {f"{peer} (timm {timm.__version__})": partial(timm.create_model, peer)}


def infer(model: nn.Module, images: Tensor, dtype: torch.dtype) -> Tensor:
    with torch.no_grad(), torch.autocast(images.device.type, dtype, enabled=dtype != torch.float32):
        return model(images)


def learn(model: nn.Module, images: Tensor, labels: Tensor, dtype: torch.dtype) -> tuple[Tensor, ...]:
    with torch.autocast(images.device.type, dtype, enabled=dtype != torch.float32):
        loss = F.cross_entropy(model(images).float(), labels)
    return torch.autograd.grad(loss, list(model.parameters()))


def bench(name: str, make: Callable[[], nn.Module], batch: int, compiled: bool, arguments: argparse.Namespace) -> dict:
    """Return one row of results."""
    torch.manual_seed(0)
    model = make().to(arguments.device, memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
    torch.compiler.reset()  # otherwise a second batch size compiles with dynamic shapes
    runner = torch.compile(model, dynamic=False) if compiled else model
    images = torch.randn(batch, 3, arguments.size, arguments.size, device=arguments.device)
    images = images.contiguous(memory_format=torch.channels_last)
    labels = torch.arange(batch, device=arguments.device) % 1000
    dtype = getattr(torch, arguments.dtype)
    row = {
        "model": name + (", compiled" if compiled else ""), "size": arguments.size,
        "batch_size": batch, "dtype": arguments.dtype,
        "parameters": sum(p.numel() for p in model.parameters()),
    }  # fmt: skip
    model.eval()
    calls = {
        "inference": partial(infer, runner, images, dtype),
        "training": partial(learn, runner, images, labels, dtype),
    }
    for kind, call in calls.items():
        model.train(kind == "training")
        for timing in measure({row["model"]: call}, arguments.device).values():  # empty if it ran out of memory
            row[kind] = {
                "images_per_s": 1e3 * batch / timing.ms, "ms": timing.ms,
                "peak_gib": timing.peak / 2**30, "first_call_s": timing.first,
            }  # fmt: skip
    return row


def show(row: dict) -> None:
    cells = "".join(
        f"{row[kind]['images_per_s']:10,.0f} {row[kind]['peak_gib']:8.2f} {row[kind]['first_call_s']:6.1f}"
        if kind in row
        else f"{'-':>26}"
        for kind in ("inference", "training")
    )
    print(f"{row['model']:<40} {row['parameters'] / 1e6:6.2f} M {row['batch_size']:>5}{cells}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--size", type=int, default=224, help="pixels")
    parser.add_argument("--batch-size", type=int, nargs="+", default=[128, 256])
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], default="bfloat16")
    parser.add_argument("--compile", action="store_true", help="also under torch.compile")
    parser.add_argument("--only", default="", metavar="REGEX", help="models whose name matches")
    parser.add_argument("--peer", default=PEER, help="a model of timm")
    parser.add_argument("--output", type=Path, default=Path("results"))
    arguments = parser.parse_args()
    print(f"{hardware(arguments.device)}; torch {torch.__version__}; kalmix {kalmix.__version__}")
    selection = {name: make for name, make in models(arguments.peer).items() if re.search(arguments.only, name)}
    columns = "images/s, peak GiB and seconds of the first call: inference | training"
    print(f"{arguments.size} pixels, {arguments.dtype}; {columns}")
    file = dated_file(arguments.output, hardware(arguments.device), "vision")
    about = {"hardware": hardware(arguments.device), "torch": torch.__version__, "kalmix": kalmix.__version__}
    rows: list[dict] = []
    for compiled in [False, True] if arguments.compile else [False]:
        for batch in arguments.batch_size:
            for name, make in selection.items():
                rows.append(bench(name, make, batch, compiled, arguments))
                show(rows[-1])
                arguments.output.mkdir(parents=True, exist_ok=True)
                file.write_text(json.dumps(about | {"rows": rows}, indent=1) + "\n")
    print(f"wrote {file}")


if __name__ == "__main__":
    main()
