"""Train a model by torchtitan's Trainer on ranks that are processes of one machine, with gloo on CPUs."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, distributed, nn
from torch.distributed.fsdp import FSDPModule

from kalmix.models import KalmixConfig, KalmixForCausalLM, optimizer_groups

ROWS, LENGTH, STEPS, SEED, RATE = 4, 16, 3, 11, 1e-2
LAYERS = ["kla", {"mixer": "bayesian", "heads": 2}, {"mixer": "attention", "heads": 2}]
SIZES: dict[str, Any] = {"vocab_size": 29, "hidden_size": 16, "layers": LAYERS, "initializer_range": 0.3}


def batch(step: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return tokens, the token that each position must predict, and positions of two documents in each row."""
    tokens = torch.randint(29, (ROWS, LENGTH + 1), generator=torch.Generator().manual_seed(step))
    targets = tokens[:, 1:].clone()
    targets[:, 4] = -100
    positions = torch.arange(LENGTH)
    return tokens[:, :-1], targets, torch.where(positions < 5, positions, positions - 5).expand(ROWS, LENGTH)


def train_alone(model: KalmixForCausalLM, optimizer: torch.optim.Optimizer) -> list[float]:
    """Train a model in one process, without torchtitan; return the loss of each step."""
    losses = []
    for step in range(STEPS):
        tokens, targets, positions = batch(step)
        loss = model(tokens, position_ids=positions, shift_labels=targets).loss
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def reference(config: KalmixConfig, seed: int = SEED) -> tuple[list[float], KalmixForCausalLM]:
    """Return the losses and the trained model of one process."""
    torch.manual_seed(seed)
    model = KalmixForCausalLM(config).train()
    groups = optimizer_groups(model, learning_rate=RATE, weight_decay=0.1)
    return train_alone(model, torch.optim.AdamW(groups, betas=(0.9, 0.95))), model


def run(rank: int, world: int, folder: str, port: int, options: list[str]) -> None:
    """Train on all ranks with options of torchtitan's command line; rank 0 writes the losses and what it saw."""
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": "0", "WORLD_SIZE": str(world)}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    # torchtitan takes a machine without an accelerator for one with CUDA, and asks the accelerator for its memory.
    with patch("torch._utils._get_available_device_type", lambda: "cpu"):
        from torchtitan.components import metrics
        from torchtitan.config import ConfigManager
        from torchtitan.distributed import utils
    memory = metrics.DeviceMemStats(0, 0, 0, 0, 0, 0)
    monitor = SimpleNamespace(device_name="CPU", get_peak_stats=lambda: memory, reset_peak_stats=lambda: None)
    given = ["--module", "kalmix.titan", "--config", "pretraining", "--dump_folder", folder, "--metrics.log_freq", "1"]
    given += ["--optimizer.lr", str(RATE), "--optimizer.implementation", "for-loop", "--lr_scheduler.warmup_steps", "0"]
    given += ["--lr_scheduler.decay_ratio", "0", "--training.steps", str(STEPS), "--training.seq_len", str(LENGTH)]
    given += ["--training.local_batch_size", str(ROWS // world), "--debug.seed", str(SEED)]
    given += ["--debug.no-enable_structured_logging", *options]
    timeouts = patch.object(utils, "set_pg_timeouts", lambda **_: None)  # its barrier needs the index of a device
    with patch.object(metrics, "build_device_memory_monitor", lambda: monitor), timeouts:
        config = ConfigManager().parse_args(given)
        config.dataloader, config.tokenizer = parts()
        trainer = config.build()
        losses, dtypes = [], {}
        log, processor = trainer.metrics_processor.log, trainer.metrics_processor

        def record(step: int, loss: float, *others: Any, **more: Any) -> None:
            losses.append(loss)
            log(step, loss, *others, **more)

        for name, module in trainer.model_parts[0].named_modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)  # gloo has no sum of scaled gradients
            if name.endswith(("dynamics", "in_proj")):
                module.register_forward_hook(
                    lambda module, *_, name=name: dtypes.update({name: str(next(module.parameters()).dtype)})
                )
        with patch.object(processor, "log", record):
            trainer.train()
        trainer.close()
    if rank == 0:
        graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        (Path(folder) / "seen.json").write_text(json.dumps({"losses": losses, "dtypes": dtypes, "graphs": graphs}))
    distributed.destroy_process_group()


def parts() -> tuple[Any, Any]:
    """Return configurations of a data loader of `batch`, and of a tokenizer that does nothing."""
    from torchtitan.components.dataloader import BaseDataLoader
    from torchtitan.components.tokenizer import BaseTokenizer

    class Loader(BaseDataLoader):
        @dataclass(kw_only=True, slots=True)
        class Config(BaseDataLoader.Config):
            pass

        def __init__(self, config: Any, *, dp_world_size: int, dp_rank: int, **others: Any) -> None:
            self.world, self.rank = dp_world_size, dp_rank

        def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
            for step in range(STEPS):
                tokens, targets, positions = (x.chunk(self.world)[self.rank] for x in batch(step))
                yield {"input": tokens, "positions": positions}, targets

        def state_dict(self) -> dict[str, Any]:
            return {}

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            pass

    class Tokenizer(BaseTokenizer):
        @dataclass(kw_only=True, slots=True)
        class Config(BaseTokenizer.Config):
            pass

        def __init__(self, config: Any, **others: Any) -> None:
            pass

        def encode(self, *args: Any, **kwargs: Any) -> list[int]:
            return []

        def decode(self, *args: Any, **kwargs: Any) -> str:
            return ""

        def get_vocab_size(self) -> int:
            return SIZES["vocab_size"]

    return Loader.Config(), Tokenizer.Config()
