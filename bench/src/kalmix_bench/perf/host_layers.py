"""Time the host code of a block in training: Python, autograd and dispatch of norm, layer, residual and MLP.

    python -m kalmix_bench.perf.host_layers                          # no GPU needed
    python -m kalmix_bench.perf.host_layers --layer kla --layer afa
    python -m kalmix_bench.perf.host_layers --profile gated-deltanet # functions that take most of the time

A stack of blocks runs under autocast to bfloat16, on the code path of GPUs: Triton kernels are launched and do nothing
(see `host_time`). Matrix products do nothing, either, and tensors are small, so that PyTorch's operators cost little
beside their dispatch. The figures lack the time of CUDA's own functions. The columns are per block: microseconds
without and with the backward pass, the minimum of all calls; and the operators of PyTorch that run in both passes.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch
from torch import Tensor

from kalmix.layers import mixer_class
from kalmix.layers.base import option_types
from kalmix.layers.fused import dispatch
from kalmix.models.blocks import Block, layer_specs
from kalmix.models.stack import BlockStack
from kalmix_bench.perf.host_time import microseconds, print_profile, without_gpu

LAYERS = ("gated-deltanet", "kda", "kla", "bayesian", "gated-kalmanet", "afa", "mamba2", "attention")
HIDDEN_SIZE, TOKENS, BLOCKS = 64, 32, 4


def _product(a: Tensor, b: Tensor) -> Tensor:
    return a.new_empty(*a.shape[:-1], b.shape[-1])


@contextmanager
def gpu_path() -> Iterator[None]:
    """Let layers take the path of GPUs with CPU tensors; kernels and matrix products do nothing."""
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings(action="ignore"):  # replaced operators
        library.impl("mm", _product, "CPU")
        library.impl("addmm", lambda _, a, b, **__: _product(a, b), "CPU")
    try:
        with without_gpu(), patch.object(dispatch, "DEVICES", ("cpu",)):
            yield
    finally:
        library._destroy()


def calls(layer: str) -> tuple[Callable[[], Tensor], Callable[[], object]]:
    """Return calls of a stack of blocks of `layer`: forward, and forward with backward."""
    torch.manual_seed(0)
    options = {"kernel": "triton"} if "kernel" in option_types(mixer_class(layer, {})) else {}
    specs = layer_specs([{"mixer": layer, **options}] * BLOCKS, HIDDEN_SIZE)
    stack = BlockStack(Block(HIDDEN_SIZE, spec) for spec in specs)
    x = torch.randn(1, TOKENS, HIDDEN_SIZE, requires_grad=True)
    upstream, leaves = torch.ones_like(x), [x, *stack.parameters()]

    def forward() -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return stack(x, output_states=False).hidden_state

    def training() -> None:
        for leaf in leaves:
            leaf.grad = None
        forward().backward(upstream)

    return forward, training


def count_operators(call: Callable[[], object]) -> int:
    """Return the number of operators of PyTorch that a call runs, those that others call included."""
    with torch.profiler.profile() as profile:
        call()
    return sum(event.count for event in profile.key_averages() if event.key.startswith("aten::"))


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layer", action="append", help="Layer to time; repeatable")
    parser.add_argument("--profile", metavar="LAYER", help="Print the functions that take most time")
    parser.add_argument("--seconds", type=float, default=1.0, help="Time per row and column (default: 1)")
    options = parser.parse_args(arguments)
    with gpu_path():
        if options.profile:
            print_profile(calls(options.profile)[1])
            return
        print(f"{'layer':20}{'forward':>10}{'forward + backward':>20}{'operators':>11}")
        for layer in options.layer or LAYERS:
            pair = calls(layer)
            for call in pair:
                microseconds(call, options.seconds / 5, "cpu")  # warm up
            forward, training = (microseconds(call, options.seconds, "cpu") / BLOCKS for call in pair)
            operators = count_operators(pair[1]) / BLOCKS
            print(f"{layer:20}{forward:10.0f}{training:20.0f}{operators:11.0f}", flush=True)


if __name__ == "__main__":
    main()
