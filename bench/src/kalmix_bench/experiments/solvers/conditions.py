"""Condition numbers of every token's system, their bound (a + 1) / a, and those of a fixed ridge (section J.1)."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch

from kalmix_bench.experiments.solvers.convergence import FACTORS
from kalmix_bench.experiments.solvers.systems import Systems
from kalmix_bench.experiments.solvers.tokens import KINDS, draw
from kalmix_bench.runner.experiment import ProgressFn

SHOWN = 96  # tokens of a curve, evenly spaced on a logarithmic scale
SLACK = 1e-9  # relative tolerance for rounding of eigenvalues: repeated keys reach the bound exactly


@dataclass(frozen=True)
class Conditions:
    """Sizes of the study. `fixed` is the ridge of MesaNet, with which J.1 compares."""

    sequences: int = 64
    length: int = 2048
    width: int = 128
    factors: tuple[float, ...] = FACTORS
    fixed: float = 0.25


def conditions(setting: Conditions, seed: int, device: torch.device, on_progress: ProgressFn) -> dict[str, Any]:
    """Compute condition numbers of H + a ||H||_F I and of H + fixed I for every token, from float64 eigenvalues.

    Args:
        setting: sizes.
        seed: seed of the tokens.
        device: device of the computation.
        on_progress: receives the progress.

    Returns:
        "kinds": a list with one mapping per kind of keys, with and without decay.
    """
    cases = [(keys, with_decay) for with_decay in (False, True) for keys in KINDS]
    results = []
    for done, (keys, with_decay) in enumerate(cases):
        on_progress(done / len(cases), f"{keys} keys{', forgetting' if with_decay else ''}")
        spectra, norm = _spectra(setting, keys, with_decay, seed, device)  # [n, T, 2] of H / ||H||_F, [n, T]
        adaptive = {a: (spectra[..., 1] + a) / (spectra[..., 0] + a) for a in setting.factors}
        fixed = (spectra[..., 1] * norm + setting.fixed) / (spectra[..., 0] * norm + setting.fixed)
        at = torch.logspace(0, torch.tensor(setting.length).log10(), SHOWN).round().long().clamp(max=setting.length)
        at = at.unique()
        results.append(
            {
                "keys": keys,
                "with_decay": with_decay,
                "tokens": fixed.numel(),
                "adaptive": [
                    {
                        "factor": a,
                        "bound": (1 + a) / a,
                        "largest": float(of.max()),
                        "median": float(of.median()),
                        "above": int((of > (1 + a) / a * (1 + SLACK)).sum()),
                        "curve": of[0, at - 1].tolist(),
                    }
                    for a, of in adaptive.items()
                ],
                "fixed": {
                    "ridge": setting.fixed,
                    "largest": float(fixed.max()),
                    "median": float(fixed.median()),
                    "curve": fixed[0, at - 1].tolist(),
                },
                "at": at.tolist(),
            }
        )
    return {"kinds": results}


def _spectra(
    setting: Conditions, keys: str, with_decay: bool, seed: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = draw(keys, setting.sequences, setting.length, setting.width, seed, device, with_decay=with_decay)
    systems = Systems.of(tokens, 0.0)
    values = [_ends(gram.flatten(0, 1)).unflatten(0, gram.shape[:2]) for gram in systems.grams()]
    return torch.cat(values, 1), systems.norm.flatten(1).cpu()


def _ends(matrices: torch.Tensor) -> torch.Tensor:
    """Return the smallest and largest eigenvalue of symmetric matrices `[n, D, D]`, `[n, 2]`, with one CPU thread per
    matrix.

    Batched eigenvalue routines process the matrices one after another, and several threads on one small matrix are
    slower
    than one.
    """
    threads = torch.get_num_threads()
    try:
        with ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            values = list(pool.map(torch.linalg.eigvalsh, matrices.cpu().split(16)))
    finally:
        torch.set_num_threads(threads)
    return torch.cat(values)[:, [0, -1]]
