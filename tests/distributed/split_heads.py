"""Checks of tensor parallelism that run on several ranks of one machine, with gloo on CPUs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from layers.conftest import LAYERS, shake
from torch import Tensor, distributed
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from transformers.distributed import DistributedConfig

from distributed.ranks import WIDTH
from distributed.sharded import run_checks
from kalmix import ArgumentError
from kalmix.distributed import gather_heads, shard_heads
from kalmix.layers import (
    KDA,
    KLA,
    AdaptiveFilterAttention,
    AFATransformerBlock,
    Attention,
    GatedDeltaNet,
    Mamba2,
    RadialTangentialAttention,
    RetNet,
)
from kalmix.models import KalmixConfig, KalmixForCausalLM
from kalmix.models.blocks import MLP

REFUSING = {"controlled-afa", "attention-narrow"}  # one head of keys, or heads that are combined
EVEN = {  # layers of `LAYERS` with a number of heads that two ranks can divide
    "kla-norm": lambda: KLA(12, slots=3, norm_width=3),
    "kla-conv-full-rank": lambda: KLA(12, slots=3, value="conv"),
    "retnet": lambda: RetNet(12, heads=2),
    "attention": lambda: Attention(12, heads=2),
    "afa-parts": lambda: AdaptiveFilterAttention(
        12, heads=2, iterations=2, value_dynamics=True, window=4, floor=True, predict="gate", confidence=True
    ),
    "rt-afa-parts": lambda: RadialTangentialAttention(12, heads=2, window=4, predict="gate"),
    "afa-transformer": lambda: AFATransformerBlock(12, heads=2, window=4),
}


def run(rank: int, world: int, folder: str) -> None:
    """Run all checks."""
    run_checks(rank, world, folder, CHECKS)


def gradients(model: torch.nn.Module) -> dict[str, Tensor | None]:
    """Return whole gradients, from those of each rank."""
    if not any(isinstance(p, DTensor) for p in model.parameters()):
        return {name: p.grad for name, p in model.named_parameters()}
    found = {}
    with torch.no_grad():
        for p in model.parameters():  # `gather_heads` gathers values
            if p.grad is not None:
                p.copy_(p.grad)
    whole = gather_heads(model)
    for name, p in model.named_parameters():
        found[name] = None if p.grad is None else whole[name]
    return found


def check_layers(_: Any) -> None:
    """Outputs, variances, states and gradients equal those of one process, in two calls."""
    mesh = init_device_mesh("cpu", (distributed.get_world_size(),))
    for name in sorted(LAYERS.keys() - REFUSING):
        try:
            compare_layer(mesh, name)
        except Exception as error:
            raise AssertionError(name) from error


def compare_layer(mesh: DeviceMesh, name: str) -> None:
    torch.manual_seed(0)
    layer = (LAYERS | EVEN)[name]()
    shake(layer)
    layer = layer.double()
    x = torch.randn(2, 9, WIDTH.get(name, 12), dtype=torch.float64)
    expected = results(layer, x)
    before = {key: value.clone() for key, value in layer.state_dict().items()}
    whole = gradients(layer)
    layer.zero_grad()
    shard_heads(layer, mesh)
    assert sum(p.to_local().numel() for p in layer.parameters()) < sum(x.numel() for x in before.values())
    restored = gather_heads(layer)
    assert restored.keys() == before.keys() and all(torch.equal(restored[key], before[key]) for key in before)
    for found, reference in zip(results(layer, x), expected, strict=True):
        torch.testing.assert_close(found, reference, rtol=1e-8, atol=1e-9)
    for key, found in gradients(layer).items():
        reference = whole[key]
        assert (found is None) == (reference is None), key
        if reference is not None:
            error = float((found - reference).norm() / reference.norm().clamp(min=1e-3))
            assert error <= 1e-9, f"gradient of {key} is off by {error:.1e}"


def results(layer: Any, x: Tensor) -> list[Tensor]:
    """Return outputs of a layer, after a backward pass through them; the gradient of the input, too."""
    x = x.clone().requires_grad_()
    first, state = layer(x[:, :5])
    second, _ = layer(x[:, 5:], state)
    y = torch.cat([first, second], 1)
    y.square().sum().backward()
    with torch.no_grad():
        variance = layer.filter(x, variance=True).variance
    return [y.detach(), x.grad, *([] if variance is None else [variance])]


def check_mlps(_: Any) -> None:
    """Each activation, whose first projections have one or two parts."""
    mesh = init_device_mesh("cpu", (distributed.get_world_size(),))
    x = torch.randn(2, 5, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for activation in ("swiglu", "relu2"):
        torch.manual_seed(0)
        mlp = MLP(8, 12, activation).double()
        expected = mlp(x)
        expected.square().sum().backward()
        whole = gradients(mlp)
        mlp.zero_grad()
        shard_heads(mlp, mesh)
        y = mlp(x)
        y.square().sum().backward()
        torch.testing.assert_close(y, expected, msg=activation)
        torch.testing.assert_close(gradients(mlp), whole, msg=activation)


def check_samples(folder: Any) -> None:
    """Samples of a posterior are those of one process, and the channels of two ranks are independent."""
    ids = torch.randint(17, (2, 10), generator=torch.Generator().manual_seed(1))
    mesh = init_device_mesh("cpu", (distributed.get_world_size(),))
    for mixer in ("kla", "bayesian", "afa"):
        torch.manual_seed(0)
        options = {"loss": "marginal", "predict": "marginal", "propagate": "sample", "num_attention_heads": 2}
        model = KalmixForCausalLM(
            KalmixConfig(vocab_size=17, hidden_size=16, layers=[mixer, mixer], initializer_range=0.5, **options)
        )
        model = model.double()
        found = []
        for shard in (False, True):
            if shard:
                model.zero_grad()
                shard_heads(model, mesh)
            torch.manual_seed(2)
            loss = model.train()(ids, labels=ids).loss
            loss.backward()
            with torch.no_grad():
                found.append((loss.detach(), model.eval()(ids).logits, gradients(model)))
        for values in zip(*found, strict=True):
            torch.testing.assert_close(*values, msg=mixer)


def check_refusals(_: Any) -> None:
    ranks = distributed.get_world_size()
    mesh = init_device_mesh("cpu", (ranks,))
    with pytest.raises(ArgumentError, match=rf"`KDA` cannot take part in tensor parallelism over {ranks} ranks.*3 key"):
        shard_heads(KDA(12, heads=3), mesh)
    for name in REFUSING:
        with pytest.raises(ArgumentError, match="cannot take part in tensor parallelism"):
            shard_heads(LAYERS[name](), mesh)
    with pytest.raises(ArgumentError, match="1 key heads"):
        shard_heads(Mamba2(12, heads=4), mesh)
    with pytest.raises(ArgumentError, match="one dimension"):
        shard_heads(KLA(12), init_device_mesh("cpu", (1, ranks)))
    model = torch.nn.ModuleList([GatedDeltaNet(12, heads=2), KLA(13)])
    with pytest.raises(ArgumentError, match="13 channels"):
        shard_heads(model, mesh)
    assert not any(isinstance(p, DTensor) for p in model.parameters())


def check_model(folder: Any) -> None:
    """`from_pretrained(tp_plan="auto")`: loss, gradients, a step of AdamW with clipping, generation, and saving."""
    torch.manual_seed(0)
    layers = ["kla", "gated-deltanet", "bayesian", "gated-kalmanet", "attention", "afa"]
    config = KalmixConfig(vocab_size=17, hidden_size=16, layers=layers, num_attention_heads=2, initializer_range=0.5)
    if distributed.get_rank() == 0:
        KalmixForCausalLM(config).save_pretrained(folder / "model")
    distributed.barrier()
    ids = torch.randint(17, (2, 10), generator=torch.Generator().manual_seed(1))
    settings = DistributedConfig(tp_plan="auto", tp_size=distributed.get_world_size())
    whole = KalmixForCausalLM.from_pretrained(folder / "model", dtype=torch.float64).double()
    model = KalmixForCausalLM.from_pretrained(folder / "model", dtype=torch.float64, distributed_config=settings)
    assert model.tp_plan["model.layers.*.mixer"] == model.tp_plan["lm_head"] == "kalmix_heads"
    for checkpointing in (False, True):
        found = []
        for each in (whole, model):
            each.train()
            if checkpointing:
                each.gradient_checkpointing_enable()
            each.zero_grad()
            loss = each(ids, labels=ids).loss
            loss.backward()
            found.append(loss.detach())
        torch.testing.assert_close(*found)
    steps = []
    for each in (whole, model):
        norm = torch.nn.utils.clip_grad_norm_(each.parameters(), 0.1)
        steps.append(norm.full_tensor() if isinstance(norm, DTensor) else norm)
        torch.optim.AdamW(each.parameters(), lr=1e-2, foreach=True).step()
    torch.testing.assert_close(*steps, rtol=1e-5, atol=0)
    expected, after = whole.state_dict(), gather_heads(model)
    for name, value in expected.items():
        torch.testing.assert_close(after[name], value, rtol=1e-5, atol=1e-5, msg=name)
    options = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None}
    assert torch.equal(*(each.eval().generate(ids, **options) for each in (whole, model)))
    model.save_pretrained(folder / "saved")
    distributed.barrier()
    saved = KalmixForCausalLM.from_pretrained(folder / "saved").state_dict()
    assert all(torch.equal(saved[name], after[name]) for name in expected)


CHECKS = {
    "layers": check_layers,
    "mlps": check_mlps,
    "samples": check_samples,
    "refusals": check_refusals,
    "model": check_model,
}
