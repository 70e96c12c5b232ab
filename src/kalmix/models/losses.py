"""Two losses of next-token prediction: on the posterior mean, and under the posterior (appendix A of KLA)."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from kalmix.layers.modules import sample_gaussian
from kalmix.segments import Segments
from kalmix.types import belief_dtype

IGNORE_INDEX = -100


def next_token_targets(labels: Tensor, segments: Segments | None) -> Tensor:
    """What each token should predict: `labels` `[B, T]` one to the left, -100 where a sequence ends."""
    targets = F.pad(labels[:, 1:], (0, 1), value=IGNORE_INDEX)
    if segments is None:
        return targets
    segment_ids = F.pad(segments.segment_ids(*labels.shape), (0, 1), value=-1)
    return torch.where((segment_ids[:, :-1] >= 0) & (segment_ids[:, :-1] == segment_ids[:, 1:]), targets, IGNORE_INDEX)


def cross_entropy(logits: Tensor, targets: Tensor, count: Tensor | int | None = None) -> Tensor:
    """Negative log-likelihood of `targets` `[B, T]` under `logits` `[B, T, vocabulary]`, nats per target.

    The sum is divided by `count` (the Trainer's number of targets in all accumulated batches), or by how many targets
    are not -100; it is 0 where there is none.
    """
    return _average(_nll(logits, targets), targets, count)


def marginal_likelihood(
    decode: Callable[[Tensor], Tensor],
    mean: Tensor,
    variance: Tensor,
    targets: Tensor,
    samples: int,
    chunk_size: int = 1,
    count: Tensor | int | None = None,
) -> Tensor:
    """Negative log marginal likelihood by Monte Carlo, equations 24 and 25:
    log S - logsumexp over samples of log p(target | sample).

    Args:
        decode: read-outs `[S, B, T, E]` to logits `[S, B, T, vocabulary]`.
        mean, variance: `[B, T, E]`, the posterior of the read-out.
        targets: `[B, T]`, -100 to ignore.
        samples: S. With one sample and no variance this is `cross_entropy`.
        chunk_size: samples decoded at once. Memory is that of `chunk_size` logits, whatever S: backward draws the same
            samples and decodes them again.
        count: as in `cross_entropy`.
    """

    def chunk_log_likelihood(size: int, mean: Tensor, variance: Tensor) -> Tensor:
        # One draw a sample, so that the slicing does not change the samples.
        readouts = torch.stack([sample_gaussian(mean, variance) for _ in range(size)])
        return torch.logsumexp(-_nll(decode(readouts), targets.expand(size, *targets.shape)), dim=0)

    sizes = [min(chunk_size, samples - start) for start in range(0, samples, chunk_size)]
    slices = [checkpoint(chunk_log_likelihood, size, mean, variance, use_reentrant=False) for size in sizes]
    return _average(math.log(samples) - torch.logsumexp(torch.stack(slices), dim=0), targets, count)


def _nll(logits: Tensor, targets: Tensor) -> Tensor:
    """Elementwise, float32, 0 at ignored targets."""
    wide = logits.to(belief_dtype(logits.dtype))
    flat = F.cross_entropy(wide.flatten(0, -2), targets.flatten(), ignore_index=IGNORE_INDEX, reduction="none")
    return flat.view(targets.shape)


def _average(nll: Tensor, targets: Tensor, count: Tensor | int | None) -> Tensor:
    kept = targets != IGNORE_INDEX
    total = torch.where(kept, nll, 0).sum()
    if count is None:
        return total / kept.sum().clamp(min=1)
    return total / (count.to(total.device) if isinstance(count, Tensor) else count)
