"""Checks of sharded models that run on several ranks of one machine, with gloo on CPUs."""

from __future__ import annotations

import os
import signal
import sys
import traceback
import warnings
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin, PartialState
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType
from torch import Tensor, distributed, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers import TrainerCallback

from distributed.fsdp_on_cpu import allow_fsdp_on_cpu
from distributed.processes import leave_group
from distributed.ranks import start
from kalmix import ArgumentError
from kalmix.cli import main
from kalmix.distributed import shard_dynamics
from kalmix.distributed.sharding import DYNAMICS
from kalmix.layers import MIXERS
from kalmix.models import KalmixConfig, KalmixForCausalLM, LanguageModel
from kalmix.training import Recipe
from kalmix.training.run import train

WRAPPER = "_checkpoint_wrapped_module."


def run(rank: int, world: int, folder: str) -> None:
    """Run all checks."""
    run_checks(rank, world, folder, CHECKS)


def run_checks(rank: int, world: int, folder: str, checks: dict[str, Callable[[Path], None]]) -> None:
    """Run checks by name, and write the failures of each to a file; starting the ranks takes longest."""
    join(rank, world, folder)
    for name, check in checks.items():
        try:
            check(Path(folder))
        except BaseException:
            (Path(folder) / f"{name}-{rank}").write_text(traceback.format_exc())
    leave_group()


def join(rank: int, world: int, folder: str) -> None:
    """Join a process group, as torchrun's environment describes it to accelerate."""
    environment = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 0}
    os.environ.update({name: str(value) for name, value in environment.items()})
    start(rank, world, folder, timeout=timedelta(seconds=60))  # if one rank fails, the others wait for it


def build(layers: list[Any] | None = None, **options: Any) -> KalmixForCausalLM:
    """Return a model of all layers, the same on every rank."""
    torch.manual_seed(0)
    settings: dict[str, Any] = {"gated-kalmanet": {"ridge": 0.1}, "design": {"design": "kla"}}
    layers = layers or [{"mixer": name, **settings.get(name, {})} for name in MIXERS]
    config = KalmixConfig(
        vocab_size=17, hidden_size=16, layers=layers, num_attention_heads=2, initializer_range=0.5, **options
    )
    return KalmixForCausalLM(config).train()


def rows() -> tuple[Tensor, Tensor]:
    """Return the tokens of all ranks, and those of this one."""
    world, rank = distributed.get_world_size(), distributed.get_rank()
    every = torch.randint(17, (2 * world, 10), generator=torch.Generator().manual_seed(1))
    return every, every[2 * rank : 2 * rank + 2]


def whole(x: Tensor | None) -> Tensor | None:
    return x.full_tensor() if isinstance(x, DTensor) else x


def compare(model: nn.Module, loss: Tensor, reference: nn.Module) -> None:
    """Compare loss and gradients of a model with those of a model in one process, of all rows."""
    every, _ = rows()
    expected = reference(every, labels=every).loss
    expected.backward()
    total = loss.detach() / distributed.get_world_size()
    distributed.all_reduce(total)
    torch.testing.assert_close(total, expected.detach())
    found = {name.replace(WRAPPER, "").removeprefix("module."): whole(p.grad) for name, p in model.named_parameters()}
    for name, p in reference.named_parameters():
        if p.grad is None:
            assert found[name] is None, name
            continue
        error = float((found[name] - p.grad).norm() / p.grad.norm().clamp(min=1e-3))
        assert error <= 1e-5, f"gradient of {name} is off by {error:.1e}"


def prepare(model: nn.Module, precision: str = "no", **plugin: Any) -> tuple[Any, nn.Module, list[Any]]:
    """Return an accelerator with FSDP2, the model that it shards, and the warnings. It has no FSDP for CPUs."""
    AcceleratorState._reset_state(True)
    PartialState(cpu=True)
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    fsdp = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="transformer_based_wrap", **plugin)
    accelerator = Accelerator(cpu=True, mixed_precision=precision, fsdp_plugin=fsdp)
    assert accelerator.is_fsdp2
    model, _ = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    return accelerator, model


def step(accelerator: Any, model: nn.Module) -> Tensor:
    _, own = rows()
    loss = model(own, labels=own).loss
    accelerator.backward(loss)
    return loss


def check_accelerate(folder: Path, **plugin: Any) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*view tensor.*")
        accelerator, model = prepare(build(), **plugin)
        loss = step(accelerator, model)
    compare(model, loss, build())


def check_float32(folder: Path) -> None:
    """Dynamics act in float32, all other parameters in bfloat16. Loss and stored gradients are in float32."""
    accelerator, model = prepare(build(), "bf16")
    dtypes = watch(model)
    loss = step(accelerator, model)
    check_dtypes(dtypes)
    assert loss.dtype == torch.float32
    assert {p.grad.dtype for p in model.parameters() if p.grad is not None} == {torch.float32}


def watch(model: nn.Module) -> dict[str, set[torch.dtype]]:
    """Return a dictionary that the next call fills: the dtypes in which the parameters of each module act."""
    dtypes: dict[str, set[torch.dtype]] = {}

    def record(name: str, module: nn.Module, *_: object) -> None:
        dtypes[name] = {p.dtype for p in module.parameters(recurse=False)}

    for name, module in model.named_modules():
        if next(module.parameters(recurse=False), None) is not None:
            module.register_forward_pre_hook(partial(record, name))
    return dtypes


def check_dtypes(dtypes: dict[str, set[torch.dtype]]) -> None:
    kept = {name for name in dtypes if name.rpartition(".")[2] in DYNAMICS}
    assert len(kept) >= 10 or len(dtypes) < 60
    assert kept and all(dtypes[name] == {torch.float32} for name in kept)
    assert all(dtypes[name] == {torch.bfloat16} for name in dtypes.keys() - kept)


def check_rounding_is_refused(folder: Path) -> None:
    _, model = prepare(build(["kla"]), "bf16", transformer_cls_names_to_wrap=["KalmixBlock"])
    _, own = rows()
    with pytest.raises(ArgumentError, match=r"model.layers.0.mixer.dynamics act in torch.bfloat16.*shard_dynamics"):
        model(own)


def check_ignored_dynamics(folder: Path) -> None:
    """Dynamics that `fully_shard` leaves alone act in float32 on every rank."""
    model = build(["kla"])
    kept = {p for name, p in model.named_parameters() if "dynamics" in name.split(".")}
    for module in (*model.model.layers, model):
        fully_shard(module, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16), ignored_params=kept)
    _, own = rows()
    model(own).logits.sum().backward()
    assert kept and all(type(p.grad) is torch.Tensor and p.grad.dtype == torch.float32 for p in kept)


def check_plain_model(folder: Path) -> None:
    """A model without transformers, sharded by hand."""
    torch.manual_seed(0)
    model = LanguageModel(17, 16, ["kla", "bayesian", "attention"])
    shard_dynamics(model)
    for module in (*model.layers, model.layers):
        fully_shard(module, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    assert isinstance(model.layers[0].mixer.dynamics, FSDPModule)
    dtypes = watch(model.layers)
    model.layers(torch.randn(2, 8, 16)).hidden_state.sum().backward()
    check_dtypes(dtypes)


def check_groups_of_blocks(folder: Path) -> None:
    """Blocks that are sharded together, with weights that are gathered once or twice."""
    layers = ["kla", "gated-deltanet", "attention", "kla", "kla"]
    for reshard in (True, False):
        model = build(layers)
        shard_dynamics(model)
        blocks = list(model.model.layers)
        for group in (blocks[:2], blocks[2:]):
            fully_shard(group, reshard_after_forward=reshard)
        fully_shard(model)
        _, own = rows()
        loss = model(own, labels=own).loss
        assert isinstance(blocks[0].mixer.in_proj.weight, DTensor) == reshard
        loss.backward()
        assert all(isinstance(x, DTensor) for x in model.parameters())
        compare(model, loss, build(layers))


def check_replicated(folder: Path) -> None:
    AcceleratorState._reset_state(True)
    accelerator = Accelerator(cpu=True)
    model, _ = accelerator.prepare(build(), torch.optim.AdamW(build().parameters()))
    compare(model, step(accelerator, model), build())


def check_marginal(folder: Path) -> None:
    """The loss that calls the last block twice."""
    layers = ["attention", "kla"]
    accelerator, model = prepare(build(layers, loss="marginal"))
    torch.manual_seed(distributed.get_rank())
    loss = step(accelerator, model)
    reference, (_, own) = build(layers, loss="marginal"), rows()
    torch.manual_seed(distributed.get_rank())
    expected = reference(own, labels=own).loss
    expected.backward()
    torch.testing.assert_close(loss.detach(), expected.detach())
    found = dict(model.named_parameters())
    for name, p in reference.named_parameters():
        distributed.all_reduce(p.grad)
        torch.testing.assert_close(whole(found[name].grad), p.grad / distributed.get_world_size(), msg=name)


class Halt(TrainerCallback):
    """Send SIGTERM to this process after a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self.step:
            os.kill(os.getpid(), signal.SIGTERM)


def train_sharded(rank: int, world: int, folder: str, name: str, resume: bool, halt: int | None) -> None:
    """Train by a recipe with FSDP2."""
    join(rank, world, folder)
    allow_fsdp_on_cpu()
    recipe = Recipe(text=f"{folder}/text.txt", tokenizer="bytes", layers=("kla", "bayesian"), hidden_size=16, steps=4)
    recipe = replace(recipe, seq_len=16, batch_size=1, batch_tokens=96, fsdp=True)
    callbacks = [] if halt is None else [Halt(halt)]
    result = train(recipe, Path(folder) / name, resume=resume, callbacks=callbacks)
    assert result.finished == (halt is None)
    assert not any(isinstance(p, DTensor) for p in result.model.parameters())
    leave_group()


def replicated_recipe(folder: str) -> Recipe:
    """Return a recipe whose three held-out sequences two ranks cannot divide equally."""
    sizes = {"hidden_size": 16, "seq_len": 16, "batch_size": 1, "batch_tokens": 96, "eval_tokens": 48, "steps": 3}
    return Recipe(text=f"{folder}/text.txt", tokenizer="bytes", layers=("kla",), **sizes)


def train_replicated(rank: int, world: int, folder: str) -> None:
    """Train by `replicated_recipe` with DDP."""
    join(rank, world, folder)
    train(replicated_recipe(folder), Path(folder) / "replicated")
    leave_group()


def run_command(rank: int, world: int, folder: str, *command: str) -> None:
    """Run a command of kalmix in `folder`."""
    join(rank, world, folder)
    os.chdir(folder)
    sys.argv = ["kalmix", *command]
    try:
        main()
    except SystemExit as ended:
        assert not ended.code, f"`kalmix {' '.join(command)}` ended with {ended.code}"
    leave_group()


CHECKS: dict[str, Callable[[Path], None]] = {
    "replicated": check_replicated,  # first, since accelerate's plugin for FSDP sets environment variables
    "accelerate": check_accelerate,
    "activation checkpointing": partial(check_accelerate, activation_checkpointing=True),
    "broadcast weights": partial(check_accelerate, cpu_ram_efficient_loading=True),
    "float32": check_float32,
    "rounding is refused": check_rounding_is_refused,
    "ignored dynamics": check_ignored_dynamics,
    "plain model": check_plain_model,
    "groups of blocks": check_groups_of_blocks,
    "marginal": check_marginal,
}
