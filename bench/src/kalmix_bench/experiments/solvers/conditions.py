"""The condition number of every token's system, its bound (a + 1) / a, and that of a fixed ridge (section J.1)."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch

from kalmix_bench.experiments.solvers.convergence import FACTORS
from kalmix_bench.experiments.solvers.systems import Systems
from kalmix_bench.experiments.solvers.tokens import KINDS, draw
from kalmix_bench.runner.experiment import ProgressFn

SHOWN = 96  # tokens of a curve, evenly spread on a logarithmic scale
SLACK = 1e-9  # of the bound, for the rounding of eigenvalues: repeated keys reach it exactly


@dataclass(frozen=True)
class Conditions:
    """Sizes of the study; `fixed` is the ridge of MesaNet, which J.1 compares with."""

    sequences: int = 64
    length: int = 2048
    width: int = 128
    factors: tuple[float, ...] = FACTORS
    fixed: float = 0.25


def conditions(setting: Conditions, seed: int, device: torch.device, on_progress: ProgressFn) -> dict[str, Any]:
    """Condition numbers (float64 eigenvalues) of H + a ||H||_F I and of H + fixed I, on every token of every kind."""
    cases = [(keys, with_decay) for with_decay in (False, True) for keys in KINDS]
    found = []
    for done, (keys, with_decay) in enumerate(cases):
        on_progress(done / len(cases), f"{keys} keys{', forgetting' if with_decay else ''}")
        spectra, norm = _spectra(setting, keys, with_decay, seed, device)  # [n, T, 2] of H / ||H||_F, [n, T]
        adaptive = {a: (spectra[..., 1] + a) / (spectra[..., 0] + a) for a in setting.factors}
        fixed = (spectra[..., 1] * norm + setting.fixed) / (spectra[..., 0] * norm + setting.fixed)
        at = torch.logspace(0, torch.tensor(setting.length).log10(), SHOWN).round().long().clamp(max=setting.length)
        at = at.unique()
        found.append(
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
    return {"kinds": found}


def _spectra(
    setting: Conditions, keys: str, with_decay: bool, seed: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = draw(keys, setting.sequences, setting.length, setting.width, seed, device, with_decay=with_decay)
    systems = Systems.of(tokens, 0.0)
    values = [_ends(gram.flatten(0, 1)).unflatten(0, gram.shape[:2]) for gram in systems.grams()]
    return torch.cat(values, 1), systems.norm.flatten(1).cpu()


def _ends(matrices: torch.Tensor) -> torch.Tensor:
    """Smallest and largest eigenvalue of symmetric `[n, D, D]`, `[n, 2]`: on the CPU, a thread a matrix.

    Libraries take the matrices of a batch one after another on either device, which left an H200 behind a single thread
    (of matrices of 128), and threads that share a small matrix only get into each other's way.
    """
    threads = torch.get_num_threads()
    try:
        with ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            values = list(pool.map(torch.linalg.eigvalsh, matrices.cpu().split(16)))
    finally:
        torch.set_num_threads(threads)
    return torch.cat(values)[:, [0, -1]]
