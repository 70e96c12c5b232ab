"""Time training steps on one GPU and on all GPUs of a machine: DDP, FSDP2 and context parallelism.

    torchrun --nproc-per-node 4 -m kalmix_bench.perf.scaling.speed --output runs/scaling

Each row is a model and a method: tokens per second of all GPUs, milliseconds of a step and peak memory of a GPU. With
`one`, `ddp` and `fsdp2` each GPU has `--batch` sequences of `--length` tokens. With `context one` the first GPU has one
sequence of `--long` tokens; with `context` all GPUs divide it. A step that runs out of memory is timed with activation
checkpointing. Rows that are in the output folder are not run again. `--report` prints the table of a folder.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, distributed, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from kalmix.distributed import ContextParallel, shard_dynamics
from kalmix.layers import MIXERS
from kalmix.models import KalmixConfig, KalmixForCausalLM, hybrid_layers
from kalmix.models.optimizer import optimizer_groups
from kalmix.training.provenance import provenance
from kalmix_bench.perf.scaling.group import check_names, largest, make_mesh, process_group

WORDS = 32000
SIZES = {"340m": (1024, 24), "1b": (2048, 16), "toy": (64, 2)}  # width and blocks; KLA has more blocks
KLA_BLOCKS = {"340m": 52, "1b": 36, "toy": 4}  # without MLPs
METHODS = ("one", "ddp", "fsdp2", "context one", "context")
WARM_UP = 3


@dataclass(frozen=True)
class Setting:
    """Sizes and options of the steps of a run.

    Attributes:
        batch: sequences of a GPU.
        length: tokens of a sequence.
        long: tokens of the sequence that ranks divide.
        steps: timed steps.
        compiled: whether `torch.compile` compiles each block.
    """

    batch: int
    length: int
    long: int
    steps: int
    compiled: bool


def build(name: str, device: torch.device) -> KalmixForCausalLM:
    """Build a model, such as "kla-340m"; "hybrid" is Gated DeltaNet with attention in every fourth block."""
    mixer, size = name.rsplit("-", 1)
    width, blocks = SIZES[size]
    if mixer == "hybrid":
        layers: list[Any] = hybrid_layers("gated-deltanet", blocks=blocks, attention_at=range(3, blocks, 4))
    else:
        layers = [mixer] * (KLA_BLOCKS[size] if mixer == "kla" else blocks)
    torch.manual_seed(0)
    with device:
        config = KalmixConfig(vocab_size=WORDS, hidden_size=width, layers=layers, skip_logits=True)
        return KalmixForCausalLM(config).train()


class Run:
    """Training steps of one model by one method.

    Args:
        name: name of the model.
        method: one of `METHODS`.
        setting: sizes.
        device: device of this rank.
        checkpointing: whether the backward pass computes the blocks again.
    """

    def __init__(self, name: str, method: str, setting: Setting, device: torch.device, checkpointing: bool) -> None:
        self.method, self.setting, self.device = method, setting, device
        model = build(name, device)
        self.parameters: int = sum(p.numel() for p in model.parameters())
        if checkpointing:
            model.gradient_checkpointing_enable()
        if setting.compiled:
            for block in model.model.layers:
                block.compile()
        self.model: nn.Module = model
        if method == "ddp":
            self.model = DistributedDataParallel(model, gradient_as_bucket_view=True)
        elif method == "fsdp2":
            shard_dynamics(model)
            policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
            for module in (*model.model.layers, model):
                fully_shard(module, mp_policy=policy)
        groups = optimizer_groups(model, learning_rate=3e-4, weight_decay=0.1)
        self.optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), fused=device.type == "cuda")
        self.context = ContextParallel(make_mesh(device), "contiguous") if method == "context" else None
        rows, length = (1, setting.long) if "context" in method else (setting.batch, setting.length)
        own = 0 if "context" in method else distributed.get_rank()
        generator = torch.Generator().manual_seed(own)
        self.ids: Tensor = torch.randint(WORDS, (rows, length), generator=generator).to(device)
        self.labels: Tensor = torch.cat([self.ids[:, 1:], torch.full_like(self.ids[:, :1], -100)], 1)

    @property
    def tokens(self) -> int:
        """Tokens of a step of all ranks that take part."""
        return self.ids.numel() * (distributed.get_world_size() if self.method in ("ddp", "fsdp2") else 1)

    def loss(self, ids: Tensor, labels: Tensor) -> Tensor:
        """Return the mean loss of this rank's tokens, or its share in that of the divided sequence."""
        with torch.autocast(self.device.type, torch.bfloat16):
            count = self.labels.numel() - self.labels.shape[0]
            return self.model(input_ids=ids, labels=ids, shift_labels=labels, num_items_in_batch=count).loss

    def step(self) -> None:
        """Take one step, without waiting for the device."""
        if self.context is None:
            self.loss(self.ids, self.labels).backward()
        else:
            with self.context as cp:
                self.loss(cp.shard(self.ids), cp.shard(self.labels)).backward()
                cp.sum_gradients(self.model.parameters())
        self.optimizer.step()
        self.optimizer.zero_grad()


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def measure(run: Run, alone: bool) -> dict[str, Any]:
    """Return the times of steps, and the peak memory of a GPU; `alone` if the other ranks wait."""
    device = run.device
    for _ in range(WARM_UP):
        run.step()
    synchronize(device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(run.setting.steps):
        begin = time.perf_counter()
        run.step()
        synchronize(device)
        times.append(time.perf_counter() - begin)
    seconds = statistics.median(times)
    peak = float(torch.cuda.max_memory_allocated()) if device.type == "cuda" else 0.0
    if not alone:
        seconds, peak = largest(seconds, device), largest(peak, device)
    return {
        "ms": 1e3 * seconds,
        "times_ms": [round(1e3 * x, 2) for x in times],
        "tokens": run.tokens,
        "tokens_per_s": run.tokens / seconds,
        "peak_memory": int(peak),
        "parameters": run.parameters,
    }


def attempt(name: str, method: str, setting: Setting, device: torch.device) -> dict[str, Any]:
    """Return a row, with activation checkpointing if the memory does not suffice without it."""
    alone = method in ("one", "context one")
    for checkpointing in (False, True):
        row: dict[str, Any] | None = None
        if not alone or distributed.get_rank() == 0:
            run = None
            try:
                run = Run(name, method, setting, device, checkpointing)
                row = measure(run, alone) | {"checkpointing": checkpointing, "status": "ok"}
            except torch.OutOfMemoryError:
                row = None
            del run
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
        if alone:
            rows = [row]
            distributed.broadcast_object_list(rows, 0)
            row = rows[0]
        if row is not None:
            return row
    return {"status": "out of memory"}


def table(rows: list[dict[str, Any]]) -> Table:
    """Return the table of rows, with ratios of tokens per second to one GPU."""
    shown = Table("model", "method", "GPUs", "tokens a step", "tokens/s", "ms a step", "peak GiB", "against one GPU")
    base = {(row["model"], row["method"]): row for row in rows if row["status"] == "ok"}
    for row in rows:
        if row["status"] != "ok":
            shown.add_row(row["model"], row["method"], str(row["gpus"]), row["status"], "", "", "", "")
            continue
        one = base.get((row["model"], "context one" if row["method"] == "context" else "one"))
        ratio = "" if one is None or row["gpus"] == 1 else f"{row['tokens_per_s'] / one['tokens_per_s']:.2f}"
        note = " (checkpointing)" if row["checkpointing"] else ""
        shown.add_row(
            row["model"],
            row["method"] + note,
            str(row["gpus"]),
            f"{row['tokens']:,}",
            f"{row['tokens_per_s']:,.0f}",
            f"{row['ms']:.0f}",
            f"{row['peak_memory'] / 2**30:.1f}",
            ratio,
        )
    return shown


def read_rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    models = "gated-deltanet-340m,kla-340m,bayesian-340m,hybrid-340m,gated-deltanet-1b,kla-1b"
    parser.add_argument("--models", default=models, help="models, separated by commas")
    parser.add_argument("--methods", default=",".join(METHODS), help="methods, separated by commas")
    parser.add_argument("--batch", type=int, default=2, help="sequences of a GPU")
    parser.add_argument("--length", type=int, default=8192, help="tokens of a sequence")
    parser.add_argument("--long", type=int, default=65536, help="tokens of the sequence that ranks divide")
    parser.add_argument("--steps", type=int, default=5, help="timed steps")
    parser.add_argument("--compiled", action="store_true", help="compile each block with torch.compile")
    parser.add_argument("--deadline", type=float, default=float("inf"), help="seconds after which no row begins")
    parser.add_argument("--commit", help="commit for the rows, where git is absent")
    parser.add_argument("--output", type=Path, default=Path("runs/scaling"), help="folder for results.jsonl")
    parser.add_argument("--report", action="store_true", help="print the table of the output folder; run nothing")
    arguments = parser.parse_args()
    check_names(parser, "--methods", arguments.methods.split(","), METHODS)
    mixers = [f"{mixer}-{size}" for mixer in (*MIXERS, "hybrid") for size in SIZES]
    check_names(parser, "--models", arguments.models.split(","), mixers)
    path, console = arguments.output / "results.jsonl", Console(width=140)
    if arguments.report:
        console.print(table(read_rows(path)))
        return
    names = ("batch", "length", "long", "steps", "compiled")
    setting = Setting(**{name: getattr(arguments, name) for name in names})
    begin = time.monotonic()
    with process_group() as device:
        first, world = distributed.get_rank() == 0, distributed.get_world_size()
        rows, key = read_rows(path), ("model", "method", "gpus", *names)
        done = {tuple(row[x] for x in key) for row in rows}
        sizes = {name: getattr(setting, name) for name in names}
        for name in arguments.models.split(","):
            for method in arguments.methods.split(","):
                cell = {"model": name, "method": method, "gpus": 1 if method in ("one", "context one") else world}
                if largest(time.monotonic() - begin, device) > arguments.deadline:
                    break
                if tuple((cell | sizes)[x] for x in key) in done:
                    continue
                row = cell | sizes | attempt(name, method, setting, device)
                if first:
                    row |= provenance(device) | ({"commit": arguments.commit} if arguments.commit else {})
                    path.parent.mkdir(parents=True, exist_ok=True)
                    with path.open("a") as file:
                        file.write(json.dumps(row) + "\n")
                    print(
                        {x: row.get(x) for x in ("model", "method", "tokens_per_s", "peak_memory", "status")},
                        flush=True,
                    )
        if first:
            console.print(table(read_rows(path)))


if __name__ == "__main__":
    main()
