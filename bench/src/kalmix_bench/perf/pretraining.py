"""Time pretraining from token shards on one GPU or several, beside Llama and flash-linear-attention.

    python -m kalmix_bench.perf.pretraining --model gated-deltanet --shards SHARDS --output rows.jsonl
    torchrun --nproc-per-node 4 -m kalmix_bench.perf.pretraining --model llama --shards SHARDS --output rows.jsonl
    python -m kalmix_bench.perf.pretraining --report --output rows.jsonl

All models train with the Trainer, the loader and the optimizer of `kalmix pretrain`; several processes with DDP. They
have the sizes of `kalmix bench perf models`: 340 to 420 million parameters, 24 blocks (KLA 52, Mamba-2 42), 8 x 2,048
tokens for each GPU, 32,000 words, bfloat16 autocast. A row has the median tokens per second and MFU of ten steps at a
time, after the first ten, and the tokens per second of all steps after the first ten. Both leave compilation out.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from transformers import PrinterCallback, TrainerCallback, set_seed

from kalmix.errors import ArgumentError
from kalmix.layers import MIXERS
from kalmix.models import KalmixForCausalLM
from kalmix.training.estimates import flops_per_token
from kalmix.training.provenance import provenance
from kalmix.training.recipe import Recipe
from kalmix.training.run_data import open_source
from kalmix.training.schedule import Curve, Schedule
from kalmix.training.trainer import KalmixTrainer, process_state, training_arguments
from kalmix_bench.perf.models.build import build
from kalmix_bench.perf.models.protocol import MODELS, PRESETS, ModelSize
from kalmix_bench.perf.peers import has_fla
from kalmix_bench.perf.scaling.group import end_process
from kalmix_bench.runner.json_lines import append_rows, read_rows

PEER_LAYERS = {"llama": "attention", "fla gated-deltanet": "gated-deltanet", "fla kda": "kda"}


class Peer(nn.Module):
    """Language model of another library, called as the Trainer calls one of kalmix.

    Args:
        model: model that returns the mean loss of the next tokens if it is given labels.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def get_input_embeddings(self) -> nn.Module:
        return self.model.get_input_embeddings()

    def get_output_embeddings(self) -> nn.Module | None:
        return self.model.get_output_embeddings()

    def forward(
        self,
        input_ids: Tensor,
        labels: Tensor | None = None,
        shift_labels: Tensor | None = None,
        skip_logits: bool = True,
    ) -> dict[str, Tensor]:
        """Return the mean loss of the next tokens of `input_ids`; other arguments are ignored."""
        return {"loss": self.model(input_ids=input_ids, labels=input_ids).loss}


class FirstStepTimer(TrainerCallback):
    """Callback that measures the first step, and prevents checkpoints.

    Attributes:
        first_step: seconds until the end of the first step, since training began.
    """

    def __init__(self) -> None:
        self.first_step = self._began = 0.0

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self._began = time.monotonic()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_save = False
        if state.global_step == 1:
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            self.first_step = time.monotonic() - self._began


def work_per_token(name: str, model: nn.Module, size: ModelSize) -> float:
    """Return the FLOPs of a training step per token, by the rules of `kalmix.training.estimates` for all models.

    Args:
        name: name of the model; a peer's recurrence or attention counts as that of the layer of kalmix.
        model: the model.
        size: sizes.
    """
    if name not in PEER_LAYERS:
        return flops_per_token(model, size.seq_len)
    with torch.device("meta"):
        mixer = MIXERS[PEER_LAYERS[name]](size.hidden_size)
    return flops_per_token(model, size.seq_len) + 3.0 * size.layers * mixer.flops_per_token(size.seq_len)


def measure(name: str, size: ModelSize, shards: Path, steps: int, compiled: bool) -> dict[str, Any]:
    """Train a model from shards, on all processes of `torchrun` or on one; return its row.

    Args:
        name: model, as in `kalmix bench perf models`.
        size: sizes; the batch is that of each process.
        shards: folder of token shards.
        steps: optimizer steps.
        compiled: compile the model with `torch.compile`.
    """
    state = process_state()
    recipe = Recipe(
        shards=str(shards),
        hidden_size=size.hidden_size,
        vocab_size=size.vocab_size,
        seq_len=size.seq_len,
        batch_size=size.batch_size,
        steps=steps,
        learning_rate=3e-4,
        warmup=0.1,
        schedule="cosine",
        bf16=size.dtype == "bfloat16",
        compile=compiled,
        eval_tokens=0,
        report_to=(),
    )
    set_seed(0)
    if name.startswith("fla"):
        has_fla()  # enables its backward pass on Hopper
    source = open_source(recipe)
    model = build(name, size)
    model = model if isinstance(model, KalmixForCausalLM) else Peer(model)
    data = source.load(None, state.num_processes, state.process_index)
    schedule = Schedule(steps=steps, minutes=None, curve=Curve("cosine", 0.1, 0.0))
    timer = FirstStepTimer()
    with tempfile.TemporaryDirectory() as folder:
        trainer = KalmixTrainer(
            recipe,
            schedule,
            data,
            {},
            model=model,
            args=training_arguments(recipe, Path(folder), data),
            train_dataset=data.train,
            callbacks=[schedule, *data.callbacks, timer],
        )
        trainer.remove_callback(PrinterCallback)
        trainer.flops_per_token = work_per_token(name, model, size)
        trainer.train_from(None)
    rows = [row for row in trainer.state.log_history if "loss" in row]
    return {
        "model": name,
        "mode": "compiled" if compiled else "eager",
        "gpus": state.num_processes,
        "steps": steps,
        "size": {"layers": size.layers, "hidden_size": size.hidden_size, "batch_size": size.batch_size}
        | {"seq_len": size.seq_len, "vocab_size": size.vocab_size, "dtype": size.dtype},
        "parameters": sum(value.numel() for value in model.parameters()),
        "flops_per_token": trainer.flops_per_token,
        "first_step_s": round(timer.first_step, 2),
        **rates(rows),
        "memory_gib": max((row["memory_gib"] for row in rows if "memory_gib" in row), default=None),
        "first_loss": rows[0]["loss"],
        "last_loss": rows[-1]["loss"],
    }


def rates(rows: list[dict[str, float]]) -> dict[str, float | None]:
    """Return tokens per second and MFU of the rows of a log, without the first rate, which has slow steps.

    Args:
        rows: rows with a training loss.

    Raises:
        ArgumentError: no row has a rate, since there were too few steps.
    """
    timed = [(before["tokens"], row) for before, row in pairwise(rows) if "tokens_per_second" in row]
    if not timed:
        raise ArgumentError("steps", problem="is too small to time", expected="at least 30 on a GPU, 3 on a CPU")
    timed = timed[1:] or timed
    seconds = sum((row["tokens"] - tokens) / row["tokens_per_second"] for tokens, row in timed)
    mfu = [row["mfu"] for _, row in timed if "mfu" in row]
    return {
        "tokens_per_s": statistics.median(row["tokens_per_second"] for _, row in timed),
        "tokens_per_s_mean": sum(row["tokens"] - tokens for tokens, row in timed) / seconds,
        "mfu": statistics.median(mfu) if mfu else None,
    }


def table(rows: list[dict[str, Any]]) -> Table:
    """Return the table of rows, with ratios to one GPU and to Llama on as many GPUs in the same mode."""
    shown = Table("model", "mode", "GPUs", "parameters", "tokens/s", "MFU", "GiB a GPU", "to one GPU", "to Llama")
    known = {(row["model"], row["mode"], row["gpus"]): row["tokens_per_s"] for row in rows}
    for row in rows:
        one = known.get((row["model"], row["mode"], 1))
        llama = known.get(("llama", row["mode"], row["gpus"]))
        shown.add_row(
            row["model"],
            row["mode"],
            str(row["gpus"]),
            f"{row['parameters'] / 1e6:.0f}M",
            f"{row['tokens_per_s']:,.0f}",
            "" if row["mfu"] is None else f"{row['mfu']:.3f}",
            "" if row["memory_gib"] is None else f"{row['memory_gib']:.1f}",
            "" if one is None or row["gpus"] == 1 else f"{row['tokens_per_s'] / one:.2f}",
            "" if llama is None or row["model"] == "llama" else f"{row['tokens_per_s'] / llama:.2f}",
        )
    return shown


def main() -> None:
    """Measure one row, or print the table, from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, help="model to train")
    parser.add_argument("--shards", type=Path, help="folder of `kalmix data prepare`")
    parser.add_argument("--preset", choices=tuple(PRESETS), default="paper", help="sizes")
    parser.add_argument("--steps", type=int, default=200, help="optimizer steps; at least 30 on a GPU, 3 on a CPU")
    parser.add_argument("--compiled", action="store_true", help="compile the model with torch.compile")
    parser.add_argument("--commit", help="commit for the row, where git is absent")
    parser.add_argument("--output", type=Path, required=True, help="JSON lines; a row is appended")
    parser.add_argument("--report", action="store_true", help="print the table of --output; run nothing")
    given = parser.parse_args()
    if given.report:
        Console(width=140).print(table(read_rows(given.output)))
        return
    if given.model is None or given.shards is None:
        parser.error("--model and --shards are needed")
    row = measure(given.model, PRESETS[given.preset], given.shards, given.steps, given.compiled)
    if process_state().is_main_process:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        row |= provenance(device, given.commit)
        append_rows(given.output, [row])
        shown = ("model", "mode", "gpus", "tokens_per_s", "mfu", "first_step_s", "last_loss")
        print({name: row[name] for name in shown}, flush=True)
    if torch.distributed.is_initialized() and torch.distributed.get_backend() == "nccl":
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
    end_process(0)
