"""Deterministic collision experiment (appendix E.4): seed six identities, boost B, flood A, and query B after each
write.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

import kalmix
from kalmix.beliefs import DenseBelief
from kalmix.designs import BAYESIAN, DELTANET, LINEAR_ATTENTION, Design, Transition

A, B = 0, 1  # the overlapping identities; all others are orthogonal
STATIC_BAYESIAN = replace(BAYESIAN, transition=Transition(diffusion=True))  # the Bayesian Layer with A_t = I


@dataclass(frozen=True)
class MechanismSetting:
    """Sizes, repetitions and variances of E.4.1."""

    width: int = 16
    identities: int = 6
    seeds: int = 2
    boost: int = 40
    flood: int = 60
    prior: float = 3.0
    process_noise: float = 0.05
    obs_noise: float = 0.05

    @property
    def writes_before_flood(self) -> int:
        """Number of writes before the flood."""
        return self.seeds * self.identities + self.boost

    def schedule(self) -> list[int]:
        """Return the identity of every write."""
        return list(range(self.identities)) * self.seeds + [B] * self.boost + [A] * self.flood

    def addresses(self, overlap: Tensor) -> Tensor:
        """Return unit keys `[n, identities, width]` of overlaps `[n]`: e1, rho e1 + sqrt(1 - rho^2) e2, then e3, e4,
        ...
        """
        keys = torch.eye(self.identities, self.width, dtype=overlap.dtype).repeat(len(overlap), 1, 1)
        keys[:, B, 0], keys[:, B, 1] = overlap, (1 - overlap.square()).sqrt()
        return keys


@dataclass(frozen=True)
class Rule:
    """Memory update: a design, its variances, and `keep`, which is applied to the covariance after each write."""

    design: Design
    signals: dict[str, float]
    keep: Callable[[Tensor], Tensor] | None = None


def rules(setting: MechanismSetting) -> dict[str, Rule]:
    """Return the updates that are compared: with equal write gain if it is constant, with equal prior if it is not."""
    reset, noise = setting.process_noise, {"obs_noise": setting.obs_noise}
    dense = noise | {"process_noise": setting.process_noise}
    return {
        "linear attention": Rule(LINEAR_ATTENTION, noise | {"write_variance": reset}),
        "DeltaNet-style": Rule(DELTANET, noise | {"reset": reset}),
        "covariance reset": Rule(STATIC_BAYESIAN, dense, torch.zeros_like),  # so the next prediction is l^2 I
        "diagonal ablation": Rule(STATIC_BAYESIAN, dense, lambda P: torch.diag_embed(P.diagonal(dim1=-2, dim2=-1))),
        "Bayesian Layer": Rule(STATIC_BAYESIAN, dense, lambda P: P),
    }


class Trace(NamedTuple):
    """Beliefs before the first write and after each of T writes, at n overlaps; float64.

    Attributes:
        keys: `[n, identities, K]`.
        mean: `[T + 1, n, K, V]`.
        covariance: `[T + 1, n, K, K]` after `Rule.keep`; `None` for updates without a covariance.
        gain: `[T, n]` scalar write gain g_t = beta_t k_t'u_t, the share of its innovation that a write stores.
    """

    keys: Tensor
    mean: Tensor
    covariance: Tensor | None
    gain: Tensor

    def logits(self, identity: int = B) -> Tensor:
        """Return the read-out M_t'k at an identity's key, `[T + 1, n, V]`."""
        return torch.einsum("tnkv,nk->tnv", self.mean, self.keys[:, identity])

    def retrieval(self) -> Tensor:
        """Return equation 46, `[T + 1, n]`: the probability of B in a softmax over B and A of the read-out at k_B."""
        logits = self.logits()
        return (logits[..., B] - logits[..., A]).sigmoid()

    def margin(self) -> Tensor:
        """Return equation 20, `[T + 1, n]`: p_B - p_A, between -1 and 1."""
        return 2 * self.retrieval() - 1

    def uncertainty(self, first: int, second: int | None = None) -> Tensor:
        """Return k'P_t k of an identity's key, or k'P_t k_2 of two keys, `[T + 1, n]`."""
        assert self.covariance is not None
        keys = self.keys[:, first], self.keys[:, first if second is None else second]
        return torch.einsum("nk,tnkl,nl->tn", keys[0], self.covariance, keys[1])


def trace(rule: Rule, setting: MechanismSetting, overlap: Tensor, **signals: Tensor) -> Trace:
    """Run an update through the schedule, one token per call, passing on the belief.

    Args:
        rule: memory update.
        setting: schedule and sizes.
        overlap: `[n]` float64, one run each.
        signals: `[n]` values that replace the rule's variances of these names.
    """
    count, keys = len(overlap), setting.addresses(overlap)
    values = torch.eye(setting.identities, dtype=overlap.dtype)
    inputs = {name: overlap.new_full((count,), value) for name, value in rule.signals.items()} | signals
    token: dict[str, Any] = {name: value[:, None, None] for name, value in inputs.items()}
    belief = _prior(setting, overlap, rule.keep) if rule.keep else None
    means = [overlap.new_zeros(count, setting.width, setting.identities)]
    covariances = [belief.covariance[:, 0]] if belief else []
    for identity in setting.schedule():
        key = keys[:, None, None, identity]
        value = values[identity].expand(count, 1, 1, -1)
        belief = kalmix.filter(rule.design, key, key, value, belief=belief, **token).belief
        if rule.keep:
            belief = belief._replace(covariance=rule.keep(belief.covariance))
            covariances.append(belief.covariance[:, 0])
        means.append(belief.mean[:, 0])
    covariance = torch.stack(covariances) if covariances else None
    return Trace(keys, torch.stack(means), covariance, _gain(inputs, setting, keys, covariance))


def _prior(setting: MechanismSetting, like: Tensor, keep: Callable[[Tensor], Tensor]) -> DenseBelief:
    shape = (len(like), 1, setting.width)
    covariance = setting.prior * torch.eye(setting.width, dtype=like.dtype).expand(*shape, -1)
    return DenseBelief(like.new_zeros(*shape, setting.identities), keep(covariance))


def _gain(inputs: dict[str, Tensor], setting: MechanismSetting, keys: Tensor, covariance: Tensor | None) -> Tensor:
    """Return g = s / (r^2 + s), where s = k'(P + l^2 I)k is the predicted variance along the key of the write."""
    write_keys = keys[:, setting.schedule()].transpose(0, 1)  # [T, n, K]
    if covariance is None:
        spread = inputs["reset" if "reset" in inputs else "write_variance"].expand(write_keys.shape[:2])
    else:
        spread = torch.einsum("tnk,tnkl,tnl->tn", write_keys, covariance[:-1], write_keys) + inputs["process_noise"]
    return spread / (inputs["obs_noise"] + spread)


def final_retrievals(setting: MechanismSetting, overlap: Tensor) -> dict[str, Tensor]:
    """Return each update's final retrieval at B, `[n]`, by overlap (Figure 6, right, and the table of E.4.3)."""
    return {name: trace(rule, setting, overlap).retrieval()[-1] for name, rule in rules(setting).items()}


class PriorSweep(NamedTuple):
    """Control of E.4.2 with constant priors: for each prior the gain, the final margin, and the first write below 0."""

    prior: Tensor
    gain: Tensor
    margin: Tensor
    crossing: Tensor


def sweep_priors(setting: MechanismSetting, overlap: float, prior: Tensor) -> PriorSweep:
    """Run the update with constant predicted covariances `prior` times I, and return their results."""
    rule = rules(setting)["DeltaNet-style"]
    run = trace(rule, setting, torch.full_like(prior, overlap), reset=prior)
    return PriorSweep(prior, run.gain[-1], run.margin()[-1], crossing(run, setting))


def crossing(run: Trace, setting: MechanismSetting) -> Tensor:
    """Return the first write of the flood, from 1 on, after which A is preferred at B, `[n]`; 0 if there is none."""
    below = run.margin()[setting.writes_before_flood + 1 :] < 0
    return torch.where(below.any(0), below.int().argmax(0) + setting.writes_before_flood + 1, 0)
