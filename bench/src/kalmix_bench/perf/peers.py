"""Implementations of other libraries for timing next to ours, if they are installed."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

Run = Callable[[dict[str, Tensor]], tuple[Tensor, ...]]


def diagonal() -> dict[str, Run]:
    """Return the forms of the authors' package `kla` (github.com/vaisakh-shaj/kalman-linear-attention)."""
    if find_spec("kla") is None:
        return {}
    from kla.ops import kla_scan, kla_scan_reference, kla_scan_torch

    def adapt(scan: Callable[..., tuple[Tensor, ...]], **options: str) -> Run:
        def run(x: dict[str, Tensor]) -> tuple[Tensor, ...]:
            v, precision, k, q = (x[name][:, :, 0] for name in ("v", "precision", "k", "q"))
            decay, noise = x["log_decay"][0].T.exp(), x["process_noise"][0].T
            return scan(v, precision, k, q, decay, noise, **options)[:2]

        return run

    return {
        "kla (CUDA)": adapt(kla_scan, backend="cuda"),
        "kla (Triton)": adapt(kla_scan, backend="triton"),
        "kla (recurrence)": adapt(kla_scan_reference),
        "kla (PyTorch)": adapt(kla_scan_torch, scan_impl="associative"),
    }


def has_fla() -> bool:
    """Return whether flash-linear-attention is installed; enable its backward pass on Hopper.

    The library raises an error on Hopper with Triton 3.4 to 3.7.0, which miscompile some of its configurations. The
    accuracy column shows the errors of the chosen configuration.
    """
    if find_spec("fla") is None:
        return False
    import fla.ops.common.chunk_o as guarded

    guarded.IS_NVIDIA_HOPPER = False
    return True


def additive() -> dict[str, Run]:
    """Return flash-linear-attention's chunked kernels with a decay per head and per key dimension."""
    if not has_fla():
        return {}
    from fla.ops.gla import chunk_gla
    from fla.ops.simple_gla import chunk_simple_gla

    def run(x: dict[str, Tensor]) -> tuple[Tensor, ...]:
        by_decay = chunk_simple_gla if x["log_decay"].ndim == 3 else chunk_gla
        return by_decay(x["q"], x["k"], x["v"], g=x["log_decay"], scale=1.0)[:1]

    return {"fla": run}


def delta() -> dict[str, Run]:
    """Return flash-linear-attention's chunked gated delta rule, and KDA for a decay per key dimension."""
    if not has_fla():
        return {}
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule
    from fla.ops.kda import chunk_kda

    def run(x: dict[str, Tensor]) -> tuple[Tensor, ...]:
        q, k, v, decay, gain = (x[name] for name in ("q", "k", "v", "log_decay", "gain"))
        by_decay = chunk_gated_delta_rule if decay.ndim == 3 else chunk_kda
        return by_decay(q, k, v, g=decay, beta=gain, scale=1.0)[:1]

    return {"fla": run}


def dense() -> dict[str, Run]:
    """Return the gated delta rule with a decay per head on the same keys and values: the cost without a covariance."""

    def without_covariance(run: Run) -> Run:
        def called(x: dict[str, Tensor]) -> tuple[Tensor, ...]:
            constants = {"log_decay": x["log_decay"].detach(), "gain": 1 / (1 + x["obs_noise"].detach())}
            if constants["log_decay"].ndim == 4:
                constants["log_decay"] = constants["log_decay"][..., 0]
            return run(x | constants)

        return called

    return {f"{name}, no covariance": without_covariance(run) for name, run in delta().items()}


def ridge() -> dict[str, Run]:
    """Return two versions of Gated KalmaNet, MesaNet (fixed ridge), and the gated delta rule (no linear system).

    The authors' code is the folder `gated_kalmanet/ops` of github.com/awslabs/hybrid-model-factory, as package
    `gka_ops`. The other version is `fla.ops.gka` of flash-linear-attention, which release 0.6.0 lacks: put its main
    branch on PYTHONPATH.
    """
    runs: dict[str, Run] = {}
    if has_fla():
        from fla.ops.mesa_net import chunk_mesa_net

        def mesa(x: dict[str, Tensor]) -> tuple[Tensor, ...]:
            ridge = x["k"].new_full(x["k"].shape[2:], 0.25, dtype=torch.float32)
            return chunk_mesa_net(*(x[n] for n in ("q", "k", "v", "log_decay", "gain")), ridge, max_CG_iteration=30)[:1]

        runs = {f"{name} delta": run for name, run in delta().items()} | {"fla mesa_net": mesa} | _fla_gka()
    if has_fla() and find_spec("gka_ops") is not None:
        from gka_ops.chebyshev.gka_chebyshev_solve import gka_chebyshev_gla

        _convert_decays_to_base_2()

        def authors(x: dict[str, Tensor]) -> tuple[Tensor, ...]:
            q, (k, v), decay = x["q"], _scaled_by_gain(x), x["log_decay"]
            return gka_chebyshev_gla(q, k, v, x["mix"].to(q.dtype), decay, decay, 1.0)[:1]

        runs["gka (authors)"] = authors
    return runs


def _scaled_by_gain(x: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return keys and values times the square root of the gain, which the kernels of Gated KalmaNet do not take."""
    gate = x["gain"].sqrt()[..., None]
    return (gate * x["k"]).to(x["k"].dtype), (gate * x["v"]).to(x["v"].dtype)


def _fla_gka() -> dict[str, Run]:
    """Return flash-linear-attention's Gated KalmaNet, or report that the installed version has none."""
    if find_spec("fla.ops.gka") is None:
        _report("fla gka: not timed, because the installed flash-linear-attention has no `fla.ops.gka`")
        return {}
    from fla.ops.gka import chunk_gka

    def run(x: dict[str, Tensor]) -> tuple[Tensor, ...]:
        (k, v), decay = _scaled_by_gain(x), x["log_decay"]
        return chunk_gka(x["q"], k, v, g=decay, gk=decay, alpha=x["mix"], scale=1.0, num_iter=30)[:1]

    return {"fla gka": run}


@cache
def _report(message: str) -> None:
    """Print a message once."""
    print(message)


def _convert_decays_to_base_2() -> None:
    """Convert the decays of the authors' solver to base 2 for flash-linear-attention's states.

    They are natural logarithms. flash-linear-attention 0.6.0 changed its states to powers of 2, which causes errors of
    up to
    a fifth in the authors' solver.
    """
    import fla.ops.common.chunk_h as states
    import gka_ops.chebyshev.chebyshev_iteration as solver

    def scaled(call: Callable[..., tuple[Tensor, ...]]) -> Callable[..., tuple[Tensor, ...]]:
        return lambda g, **others: call(g=None if g is None else g * math.log2(math.e), **others)

    for name in ("chunk_fwd_h", "chunk_bwd_dh"):
        as_given = getattr(states, name)
        if hasattr(states, "exp2") and getattr(solver, name) is as_given:
            setattr(solver, name, scaled(as_given))


def attend() -> dict[str, Run]:
    """Return PyTorch's fused attention on the same queries, keys and values: dot products without dynamics.

    On Hopper, cuDNN's kernels are the fastest of PyTorch's.
    """

    def adapt(backend: SDPBackend) -> Run:
        def run(x: dict[str, Tensor]) -> tuple[Tensor, ...]:
            q, k, v = (x[name].transpose(1, 2) for name in "qkv")
            with sdpa_kernel(backend):
                return (scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2),)

        return run

    runs = {"sdpa (flash)": adapt(SDPBackend.FLASH_ATTENTION)}
    if torch.backends.cuda.cudnn_sdp_enabled() and torch.backends.cudnn.is_available():
        runs["sdpa (cuDNN)"] = adapt(SDPBackend.CUDNN_ATTENTION)
    return runs


PEERS = {"additive": additive, "delta": delta, "diagonal": diagonal, "dense": dense, "ridge": ridge, "attend": attend}
