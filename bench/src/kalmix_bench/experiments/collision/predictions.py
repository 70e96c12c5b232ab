"""Closed forms of appendix E and their comparison with the deterministic experiment. Nothing here runs a filter."""

from __future__ import annotations

from math import acos, asin, degrees
from typing import NamedTuple

import torch
from torch import Tensor

from kalmix_bench.experiments.collision.mechanism import A, B, MechanismSetting, Trace


class Prediction(NamedTuple):
    """Predicted and measured value of a quantity, with the number of the equation."""

    equation: str
    quantity: str
    predicted: float
    measured: float

    @property
    def difference(self) -> float:
        """Measured minus predicted value."""
        return self.measured - self.predicted


def fixed_point(setting: MechanismSetting) -> float:
    """Return the limit of the predicted variance along a key that is written repeatedly (equation 42)."""
    process, noise = setting.process_noise, setting.obs_noise
    return (process + (process**2 + 4 * noise * process) ** 0.5) / 2


def final_gain(setting: MechanismSetting) -> float:
    """Return the limit of the write gain during a flood (equation 42)."""
    return fixed_point(setting) / (setting.obs_noise + fixed_point(setting))


def boundary(setting: MechanismSetting, overlap: float, across: float) -> tuple[float, float]:
    """Return the gain of the first write at A after a long boost of B, and the cosine of its angle to k_A.

    Equations 40 and 44. `across` is the predicted variance along e_perp, the component of k_A orthogonal to k_B.
    """
    along, shared = fixed_point(setting), overlap**2
    spread = shared * along + (1 - shared) * across
    return spread / (setting.obs_noise + spread), spread / (shared * along**2 + (1 - shared) * across**2) ** 0.5


def delta_plateau(at_a: Tensor, at_b: Tensor, overlap: float) -> Tensor:
    """Return the final read-out at B of a constant gain, from the read-outs at A and B `[V]` before the flood (equation
    52).
    """
    return at_b - overlap * (at_a - _one_hot(at_a))


def bayesian_plateau(
    setting: MechanismSetting, at_a: Tensor, at_b: Tensor, overlap: float, along: float, cross: float
) -> Tensor:
    """Return the final read-out at B of a propagated covariance (equation 57); the series is summed to convergence.

    Args:
        setting: variances.
        at_a, at_b: read-outs at A and B before the flood, `[V]`.
        overlap: overlap of the keys.
        along: k_A'Pb k_A at the first write of the flood; it evolves by equation 35.
        cross: k_B'Pb k_A at that write; its component orthogonal to k_A shrinks by equation 34.
    """
    orthogonal, left, total = cross - overlap * along, 1.0, 0.0
    while left > 1e-18:
        precision = 1 / (setting.obs_noise + along)
        total += left * precision * (overlap * along + orthogonal)
        retention = setting.obs_noise * precision  # 1 - eta_A
        left, orthogonal, along = left * retention, orthogonal * retention, along * retention + setting.process_noise
    return at_b + total * (_one_hot(at_a) - at_a)


def preference(logits: Tensor) -> float:
    """Return equation 46 of a read-out `[V]`."""
    return float((logits[B] - logits[A]).sigmoid())


def _one_hot(like: Tensor) -> Tensor:
    return torch.eye(len(like), dtype=like.dtype)[A]


def predictions(setting: MechanismSetting, overlap: float, traces: dict[str, Trace]) -> list[Prediction]:
    """Return every closed form of section 2.3 and appendix E with its measurement; `traces` are of one overlap."""
    return [
        *_uncertainty(setting, overlap, traces["Bayesian Layer"]),
        *_boundary(setting, overlap, traces["Bayesian Layer"]),
        *_plateaus(setting, overlap, traces),
    ]


def _uncertainty(setting: MechanismSetting, overlap: float, bayes: Trace) -> list[Prediction]:
    growth = bayes.uncertainty(B)[:, 0].diff()
    process = setting.process_noise
    spread = bayes.uncertainty(A)[:-1, 0] + process
    shared = bayes.uncertainty(A, B)[:-1, 0] + overlap * process
    change = process - shared.square() / (setting.obs_noise + spread)
    flood = setting.writes_before_flood  # the index of its first write
    return [
        Prediction("16", "growth of var(k_B) a write, end of flood", (1 - overlap**2) * process, float(growth[-1])),
        Prediction("32", "change of var(k_B), first write of flood", float(change[flood]), float(growth[flood])),
        Prediction(
            "32", "change of var(k_B), second write of flood", float(change[flood + 1]), float(growth[flood + 1])
        ),
        Prediction("42", "write gain, end of flood", final_gain(setting), float(bayes.gain[-1, 0])),
    ]


def _boundary(setting: MechanismSetting, overlap: float, bayes: Trace) -> list[Prediction]:
    """Compare the first write at A after the boost: its gain, and its angle to k_A (u = Pb k_A)."""
    predicted = first_predicted(setting, bayes)
    key_a, key_b = bayes.keys[0, A], bayes.keys[0, B]
    orthogonal = (key_a - overlap * key_b) / (1 - overlap**2) ** 0.5
    gain, cosine = boundary(setting, overlap, float(orthogonal @ predicted @ orthogonal))
    write = predicted @ key_a
    angle = degrees(acos(float(key_a @ write / write.norm())))
    return [
        Prediction("40", "write gain, first write of flood", gain, float(bayes.gain[setting.writes_before_flood, 0])),
        Prediction("44", "its angle to k_A, degrees", degrees(acos(cosine)), angle),
        Prediction("45", "the same after an endless boost", degrees(asin(overlap)), angle),
    ]


def first_predicted(setting: MechanismSetting, bayes: Trace) -> Tensor:
    """Return the covariance predicted for the first write of the flood, `[K, K]`."""
    assert bayes.covariance is not None
    before = bayes.covariance[setting.writes_before_flood, 0]
    return before + setting.process_noise * torch.eye(setting.width, dtype=before.dtype)


def _plateaus(setting: MechanismSetting, overlap: float, traces: dict[str, Trace]) -> list[Prediction]:
    """Compare retrieval at B after the boost and after the flood (section E.3)."""
    bayes, delta, linear = (traces[name] for name in ("Bayesian Layer", "DeltaNet-style", "linear attention"))
    start = setting.writes_before_flood
    boost = float(torch.tensor(1.0, dtype=torch.float64).sigmoid())
    predicted, key_a, key_b = first_predicted(setting, bayes), bayes.keys[0, A], bayes.keys[0, B]
    series = bayesian_plateau(
        *(setting, bayes.logits(A)[start, 0], bayes.logits(B)[start, 0], overlap),
        along=float(key_a @ predicted @ key_a),
        cross=float(key_b @ predicted @ key_a),
    )
    constant = delta_plateau(delta.logits(A)[start, 0], delta.logits(B)[start, 0], overlap)
    added = linear.logits(B)[start, 0] + setting.flood * float(linear.gain[-1, 0]) * overlap * _one_hot(series)
    measured = {name: float(trace.retrieval()[-1, 0]) for name, trace in traces.items()}
    name = "retrieval at B after the flood, "
    return [
        Prediction("47", "retrieval at B after the boost", boost, float(bayes.retrieval()[start, 0])),
        Prediction("52", name + "DeltaNet-style", preference(constant), measured["DeltaNet-style"]),
        Prediction("57", name + "Bayesian Layer", preference(series), measured["Bayesian Layer"]),
        Prediction("E.3", name + "linear attention", preference(added), measured["linear attention"]),
    ]
