"""Train Gated KalmaNet with an adaptive and with a constant ridge; compare loss and gradient norm.

    python -m kalmix_bench.perf.ridge_stability          # a CPU: 2 layers, hidden size 128, bytes of real text
    python -m kalmix_bench.perf.ridge_stability --device cuda --layers 28 --hidden-size 1024 --seq-len 2048

A small version of the paper's Figure 7: ridge 0.02 ||H||_F against 0.25, with equal weights, text, order and bfloat16
autocast. Writes bench/results/<date>-<device>-ridge-stability.json (loss in nats and gradient norm before clipping for
each step) and a figure (--picture). A run ends at the first non-finite value.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from kalmix.analysis.plots.style import COLOURS, picture
from kalmix.errors import NonFiniteError
from kalmix.models import KalmixConfig, KalmixForCausalLM
from kalmix.models.optimizer import optimizer_groups
from kalmix.ops import Adaptive, Fixed
from kalmix.training.provenance import provenance
from kalmix_bench.perf.result_file import dated_file
from kalmix_bench.perf.text_batches import batches, byte_tokens

RIDGES = {"adaptive, 0.02 ||H||": Adaptive(0.02), "constant, 0.25": Fixed(0.25)}


def train(ridge: Adaptive | Fixed, arguments: argparse.Namespace) -> list[tuple[float, float]]:
    """Return loss and gradient norm of every step."""
    device = arguments.device
    entry = {"mixer": "gated-kalmanet", "head_dim": arguments.head_dim, "ridge": ridge}
    torch.manual_seed(arguments.seed)
    config = KalmixConfig(vocab_size=256, hidden_size=arguments.hidden_size, layers=[entry] * arguments.layers)
    model = KalmixForCausalLM(config).to(device)
    optimizer = torch.optim.AdamW(
        optimizer_groups(model, learning_rate=arguments.learning_rate, weight_decay=0.1), betas=(0.9, 0.95)
    )
    warm = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / arguments.warmup))
    data, curve, begin = (
        batches(byte_tokens(), arguments.seq_len, arguments.batch_size, device),
        [],
        time.perf_counter(),
    )
    for step in range(arguments.steps):
        tokens = next(data)
        try:
            with torch.autocast(device, dtype=torch.bfloat16):
                loss = model(input_ids=tokens, labels=tokens).loss
        except NonFiniteError as error:
            print(f"  step {step}: {error}")
            break
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), arguments.max_grad_norm)
        curve.append((loss.item(), norm.item()))
        if not all(map(math.isfinite, curve[-1])):
            print(f"  step {step}: loss {curve.pop()[0]}, gradient norm {norm.item()}")
            break
        optimizer.step()
        warm.step()
        optimizer.zero_grad()
        if step % 20 == 0:
            spent = time.perf_counter() - begin
            print(
                f"  step {step:4}  loss {loss.item():.3f}  gradient norm {norm.item():.3f}  {spent:.0f} s", flush=True
            )
    return curve


def summary(curve: list[tuple[float, float]], warmup: int) -> dict[str, float]:
    """Return the final loss, and statistics of the gradient norm after the warm-up."""
    settled = [norm for _, norm in curve[warmup:]] or [math.nan]
    typical = statistics.median(settled)
    return {
        "steps": len(curve),
        "last_loss": statistics.fmean(loss for loss, _ in curve[-len(curve) // 10 :]),
        "median_norm": typical,
        "largest_norm": max(settled),
        "above_twice_the_median": sum(norm > 2 * typical for norm in settled),
    }


def draw(path: Path, curves: dict[str, list[tuple[float, float]]], title: str) -> None:
    """Draw loss and gradient norm next to each other."""
    with picture(path, (10, 3.6), columns=2) as (figure, axes):
        for (name, curve), colour in zip(curves.items(), COLOURS, strict=False):
            for axis, values in zip(axes, zip(*curve, strict=True), strict=True):
                axis.plot(values, color=colour, label=name, linewidth=1.2)
        axes[0].set(title="Loss", xlabel="step", ylabel="nats per byte")
        axes[1].set(title="Gradient norm before clipping", xlabel="step", ylabel="norm", yscale="log")
        axes[0].legend()
        figure.suptitle(title, fontsize=9)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--hidden-size", type=int, default=128)
    parser.add_argument("--head-dim", type=int, default=32)
    parser.add_argument("--seq-len", type=int, default=256)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--warmup", type=int, default=30)
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--max-grad-norm", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=Path("results"))
    parser.add_argument("--picture", type=Path, default=Path("results/ridge-training.png"))
    arguments = parser.parse_args()
    origin = provenance(torch.device(arguments.device))
    setting = {n: x for n, x in vars(arguments).items() if n not in ("output", "picture", "device")}
    results: dict[str, Any] = {**origin, "setting": setting, "runs": {}}
    curves = {}
    for name, ridge in RIDGES.items():
        print(name)
        curves[name] = train(ridge, arguments)
        statistics_of_run = summary(curves[name], arguments.warmup)
        print("  " + ", ".join(f"{n} {x:.4g}" for n, x in statistics_of_run.items()))
        results["runs"][name] = {**statistics_of_run, "curve": [[round(x, 5) for x in pair] for pair in curves[name]]}
    file = dated_file(arguments.output, origin["device"], "ridge-stability")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(results) + "\n")
    sizes = f"{arguments.layers} layers, hidden size {arguments.hidden_size}"
    shape = f"{sizes}, {arguments.batch_size} x {arguments.seq_len} bytes per step"
    draw(arguments.picture, curves, f"{shape}, bfloat16 autocast, {origin['device']}")
    print(f"wrote {file} and {arguments.picture}")


if __name__ == "__main__":
    main()
