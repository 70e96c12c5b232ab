"""Models that differ only in the memory update: the paper's five (appendix E.5.2 and E.5.3), and two with decays.

Runs that differ only in their seed are trained together: every parameter has a leading axis of M members, which do not
interact. This uses a GPU well for small models.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import kalmix
from kalmix.beliefs import DenseBelief
from kalmix.designs import BAYESIAN, DELTANET, Design, Transition
from kalmix_bench.datasets.collision.sequences import ADDRESS_DIM, Episode
from kalmix_bench.datasets.seeds import stream_seed
from kalmix_bench.experiments.collision.mechanism import STATIC_BAYESIAN

HIDDEN, HEADS, LAYERS, MLP = 64, 4, 2, 128
GROUPS = 32  # groups of sequences in `MemberLinear`
OBS_NOISE, RESET, PRIOR = 0.05, 0.05, 3.0
DECAY_PER_HEAD = replace(BAYESIAN, transition=Transition(decay="head", diffusion=True))


class Update(NamedTuple):
    """Memory update of a model.

    Attributes:
        num_signals: learned signals per head and token.
        bias: initial bias of these signals.
        read: function of queries `[B, T, 1, 16]`, keys `[B, T, 1, 16]`, values `[B, T, G, 16]` and unbounded signals
            `[B, T, G, num_signals]` that returns the read-out `[B, T, G, 16]`. With `rates`, the last signal is
            replaced by `rates` log-decays.
        rates: number of learned decay rates per head (`MemberDecay`); 0 for no decay.
    """

    num_signals: int
    bias: float
    read: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
    rates: int = 0


def _linear_attention(q: Tensor, k: Tensor, v: Tensor, raw: Tensor) -> Tensor:
    return kalmix.ops.additive(q, k, v).mean


def _gla(q: Tensor, k: Tensor, v: Tensor, raw: Tensor) -> Tensor:
    return kalmix.ops.additive(q, k, v, log_decay=F.logsigmoid(raw)).mean


def _deltanet(q: Tensor, k: Tensor, v: Tensor, raw: Tensor) -> Tensor:
    return kalmix.ops.delta(q, k, v, gain=raw[..., 0].sigmoid()).mean


def _reset(q: Tensor, k: Tensor, v: Tensor, raw: Tensor) -> Tensor:
    still = v.new_tensor(1.0).expand(v.shape[:3])
    return kalmix.filter(DELTANET, q, k, v, reset=RESET * still, obs_noise=OBS_NOISE * still).mean


def _bayesian(q: Tensor, k: Tensor, v: Tensor, raw: Tensor) -> Tensor:
    return _filter_bayesian(STATIC_BAYESIAN, q, k, v, raw)


def _bayesian_decay_per_key(q: Tensor, k: Tensor, v: Tensor, raw: Tensor) -> Tensor:
    return _filter_bayesian(BAYESIAN, q, k, v, raw, log_decay=raw[..., 1:])


def _bayesian_decay_per_head(q: Tensor, k: Tensor, v: Tensor, raw: Tensor) -> Tensor:
    return _filter_bayesian(DECAY_PER_HEAD, q, k, v, raw, log_decay=raw[..., 1])


def _filter_bayesian(design: Design, q: Tensor, k: Tensor, v: Tensor, raw: Tensor, **decay: Any) -> Tensor:
    shape, eye = (v.shape[0], v.shape[2]), torch.eye(ADDRESS_DIM, dtype=v.dtype, device=v.device)
    prior = DenseBelief(v.new_zeros(()).expand(*shape, ADDRESS_DIM, v.shape[3]), (PRIOR * eye).expand(*shape, -1, -1))
    process = F.softplus(raw[..., 0])
    noise = torch.full_like(process, OBS_NOISE)
    return kalmix.filter(design, q, k, v, process_noise=process, obs_noise=noise, belief=prior, **decay).mean


_AS_RESET = math.log(math.expm1(RESET))  # its softplus is the ablation's reset variance

UPDATES = {
    "linear-attention": Update(0, 0.0, _linear_attention),
    "gla": Update(ADDRESS_DIM, 4.0, _gla),
    "deltanet": Update(1, 0.0, _deltanet),
    "reset": Update(0, 0.0, _reset),
    "bayesian": Update(1, _AS_RESET, _bayesian),
    "bayesian-decay-per-key": Update(2, _AS_RESET, _bayesian_decay_per_key, rates=ADDRESS_DIM),
    "bayesian-decay-per-head": Update(2, _AS_RESET, _bayesian_decay_per_head, rates=1),
}
PAPER = ("linear-attention", "gla", "deltanet", "reset", "bayesian")  # Table 2


class MemberLinear(nn.Module):
    """Linear map per member, initialized like PyTorch's from that member's generator; the bias is 0."""

    def __init__(self, wide: int, out: int, generators: Sequence[torch.Generator], bias: bool = False) -> None:
        super().__init__()
        weights = [torch.empty(wide, out).uniform_(-(wide**-0.5), wide**-0.5, generator=draw) for draw in generators]
        self.weight = nn.Parameter(torch.stack(weights))
        self.bias = nn.Parameter(torch.zeros(len(weights), 1, out)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """Map `[M, B, T, wide]` to `[M, B, T, out]`.

        Sequences are processed in groups: the gradient of the weight is then one product per group and a sum, which
        gives a
        GPU more parallel work than a single product over all tokens.
        """
        groups = math.gcd(x.shape[1], GROUPS)
        y = x.unflatten(1, (groups, -1)).flatten(2, 3) @ self.weight[:, None]
        return (y if self.bias is None else y + self.bias[:, None]).view(*x.shape[:3], -1)


class MemberNorm(nn.Module):
    """RMS norm with a scale per member."""

    def __init__(self, members: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(members, 1, 1, HIDDEN))

    def forward(self, x: Tensor) -> Tensor:
        """Normalize `[M, B, T, D]` to a root mean square of `scale`."""
        return F.rms_norm(x, (HIDDEN,), eps=1e-6) * self.scale


class MemberDecay(nn.Module):
    """Log-decays -rate * softplus(signal + bias) per member, with the initial values of `BayesianLayer`.

    Rates are initially uniform in (0, 16) and steps log-uniform in [0.001, 0.1]; a head has one step per token.
    """

    def __init__(self, rates: int, generators: Sequence[torch.Generator]) -> None:
        super().__init__()
        rate = [torch.empty(HEADS, rates).uniform_(1e-4, 16, generator=draw) for draw in generators]
        low, high = math.log(0.001), math.log(0.1)
        step = [torch.empty(HEADS, 1).uniform_(low, high, generator=draw) for draw in generators]
        self.log_rate = nn.Parameter(torch.stack(rate).log())
        self.bias = nn.Parameter(torch.stack(step).exp().expm1().log())  # inverse of softplus

    def forward(self, raw: Tensor) -> Tensor:
        """Map signals `[M * B, T, G, 1]` to log-decays `[M * B, T, G, rates]`."""
        members = raw.unflatten(0, (len(self.bias), -1))
        step = F.softplus(members + self.bias[:, None, None])
        return (-self.log_rate.exp()[:, None, None] * step).flatten(0, 1)


class Block(nn.Module):
    """Residual block: x + mixer(norm(x)), then the same with a SwiGLU MLP. The mixer receives addresses unchanged."""

    def __init__(self, update: Update, generators: Sequence[torch.Generator]) -> None:
        super().__init__()
        self.update = update
        self.norm, self.mlp_norm = MemberNorm(len(generators)), MemberNorm(len(generators))
        self.value = MemberLinear(HIDDEN, HEADS * ADDRESS_DIM, generators)
        self.raw = (
            MemberLinear(HIDDEN, HEADS * update.num_signals, generators, bias=True) if update.num_signals else None
        )
        self.out = MemberLinear(HEADS * ADDRESS_DIM, HIDDEN, generators)
        self.mlp_in = MemberLinear(HIDDEN, 2 * MLP, generators)
        self.mlp_out = MemberLinear(MLP, HIDDEN, generators)
        self.decay = MemberDecay(update.rates, generators) if update.rates else None
        if self.raw is not None and self.raw.bias is not None:
            nn.init.constant_(self.raw.bias, update.bias)
            if update.rates:
                with torch.no_grad():
                    self.raw.bias.view(len(generators), HEADS, -1)[..., -1] = 0  # `MemberDecay` has its own

    def forward(self, x: Tensor, read_at: Tensor, written_at: Tensor) -> Tensor:
        """Map `[M, B, T, D]`, with addresses `[M, B, T, 16]` for queries and for keys, to `[M, B, T, D]`."""
        signal = self.norm(x)
        values = self._heads(self.value(signal))
        raw = values[..., :0] if self.raw is None else self._heads(self.raw(signal))
        if self.decay is not None:
            raw = torch.cat([raw[..., :-1], self.decay(raw[..., -1:])], -1)
        queries, keys = (addresses.flatten(0, 1)[:, :, None] for addresses in (read_at, written_at))
        read = self.update.read(queries, keys, values, raw)
        x = x + self.out(read.flatten(2).unflatten(0, x.shape[:2]))
        gate, value = self.mlp_in(self.mlp_norm(x)).chunk(2, dim=-1)
        return x + self.mlp_out(F.silu(gate) * value)

    def _heads(self, x: Tensor) -> Tensor:
        return x.flatten(0, 1).unflatten(-1, (HEADS, -1))


class RecallModel(nn.Module):
    """Two blocks between an embedding of tokens and logits over labels, for M members.

    Args:
        name: memory update, a key of `UPDATES`.
        inputs: width of the tokens.
        labels: number of labels.
        seeds: seeds of the members' weights, M of them. A member does not depend on the others.
        queries_write: whether query tokens also write to the memory, before they read.
    """

    def __init__(self, name: str, inputs: int, labels: int, seeds: Sequence[int], queries_write: bool = False) -> None:
        super().__init__()
        self.queries_write = queries_write
        generators = [torch.Generator().manual_seed(stream_seed("weights", seed)) for seed in seeds]
        self.members = len(generators)
        self.embed = MemberLinear(inputs, HIDDEN, generators)
        self.blocks = nn.ModuleList(Block(UPDATES[name], generators) for _ in range(LAYERS))
        self.norm = MemberNorm(len(generators))
        self.head = MemberLinear(HIDDEN, labels, generators)

    def forward(self, episode: Episode) -> Tensor:
        """Return logits at the queries, `[M, B, Q, labels]`, of an episode with a leading axis M."""
        queries, keys = episode.targets.shape[2], episode.addresses
        if not self.queries_write:
            keys = F.pad(keys[:, :, :-queries], (0, 0, 0, queries))  # a key of 0 writes nothing
        x = self.embed(episode.tokens)
        for block in self.blocks:
            x = block(x, episode.addresses, keys)
        return self.head(self.norm(x[:, :, -queries:]))
