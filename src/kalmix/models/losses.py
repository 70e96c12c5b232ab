"""Losses of next-token prediction: cross-entropy of the posterior mean, and marginal likelihood of the posterior."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from kalmix.layers.fused import linear_cross_entropy, linear_nll
from kalmix.layers.fused.cross_entropy import IGNORE_INDEX, divide_by_count
from kalmix.layers.modules import is_plain_linear, sample_gaussian
from kalmix.segments import Segments
from kalmix.types import belief_dtype


def next_token_targets(labels: Tensor, segments: Segments | None) -> Tensor:
    """Return the token that each position must predict.

    Args:
        labels: `[B, T]`, token ids.
        segments: sequences in the input; `None` if each row is one sequence.

    Returns:
        `[B, T]`: `labels` shifted left by one; -100 at the last token of each sequence and at padding.
    """
    targets = F.pad(labels[:, 1:], (0, 1), value=IGNORE_INDEX)
    if segments is None:
        return targets
    segment_ids = F.pad(segments.segment_ids(*labels.shape), (0, 1), value=-1)
    return torch.where((segment_ids[:, :-1] >= 0) & (segment_ids[:, :-1] == segment_ids[:, 1:]), targets, IGNORE_INDEX)


def cross_entropy(logits: Tensor, targets: Tensor, count: Tensor | int | None = None) -> Tensor:
    """Compute the mean negative log-likelihood of targets, in nats per target.

    Args:
        logits: `[B, T, vocab_size]`.
        targets: `[B, T]`; -100 is ignored.
        count: divides the sum of the losses: the Trainer's number of targets in all accumulated batches. Default: the
            number of targets here that are not ignored.

    Returns:
        A scalar, at least float32; 0 if all targets are ignored.
    """
    return _average(target_nll(logits, targets), targets, count)


def head_cross_entropy(
    head: nn.Module,
    hidden: Tensor,
    targets: Tensor,
    count: Tensor | int | None = None,
    cap: float | None = None,
) -> Tensor:
    """Compute `cross_entropy` of `cap_logits(head(hidden), cap)`, without keeping logits if the head is an `nn.Linear`.

    A head of another type, such as one with a LoRA, or one that hooks change, such as one that DeepSpeed partitions or
    `fully_shard` wraps by itself, is called as usual.

    Args:
        head: maps `[B, T, D]` to logits `[B, T, vocab_size]`.
        hidden: `[B, T, D]`.
        targets: as in `cross_entropy`.
        count: as in `cross_entropy`.
        cap: as in `cap_logits`.

    Returns:
        A scalar, at least float32; 0 if all targets are ignored.
    """
    if cap is None and is_plain_linear(head):
        return linear_cross_entropy(hidden, head.weight, targets, head.bias, count)
    if is_plain_linear(head):
        return divide_by_count(head_nll(head, hidden, targets, cap).sum(), targets, count)
    return cross_entropy(cap_logits(head(hidden), cap), targets, count)  # on the device of the head


def cap_logits(logits: Tensor, cap: float | None) -> Tensor:
    """Return cap tanh(logits / cap), which is between -cap and cap; the logits themselves if `cap` is `None`."""
    return logits if cap is None else cap * torch.tanh(logits / cap)


def head_nll(head: nn.Module, hidden: Tensor, targets: Tensor, cap: float | None = None) -> Tensor:
    """Compute the negative log-likelihood of each target, with `head` and memory as in `head_cross_entropy`.

    The backward pass computes logits again.

    Args:
        head: maps `[..., D]` to logits `[..., vocab_size]`.
        hidden: `[..., D]`.
        targets: `[...]`; -100 is ignored.
        cap: as in `cap_logits`.

    Returns:
        `[...]`, at least float32; 0 for ignored targets.
    """
    if is_plain_linear(head):
        return linear_nll(hidden, head.weight, targets, head.bias, cap)
    return target_nll(cap_logits(head(hidden), cap), targets)


def marginal_likelihood(
    score: Callable[[Tensor, Tensor], Tensor],
    mean: Tensor,
    variance: Tensor,
    targets: Tensor,
    samples: int,
    chunk_size: int = 1,
    count: Tensor | int | None = None,
    group: Any = None,
) -> Tensor:
    """Estimate the mean negative log marginal likelihood of targets by Monte Carlo, in nats per target.

    Equations 24 and 25 of Kalman Linear Attention: log S - logsumexp_s log p(target | sample s), with S independent
    samples of the read-out per token. The backward pass draws the same samples and scores them again, so memory is that
    of `chunk_size` calls of `score` for any S. With `head_nll` in it, no call keeps the logits of more than a chunk of
    tokens. Samples do not depend on how `score` divides its tokens.

    Args:
        score: maps read-outs `[S, B, T, E]` and targets `[S, B, T]` to the negative log-likelihood of each target, as
            `head_nll` or `target_nll` computes it.
        mean: `[B, T, E]`, posterior mean of the read-out.
        variance: `[B, T, E]`, posterior variance of the read-out.
        targets: `[B, T]`; -100 is ignored.
        samples: S. With S = 1 and zero variance the result equals `cross_entropy`.
        chunk_size: samples scored together.
        count: as in `cross_entropy`.
        group: ranks that divide the channels of the read-out, by tensor parallelism; `None` if one process has all.

    Returns:
        A scalar, at least float32. Its expectation is an upper bound on the exact value and decreases with S.
    """

    def chunk_nll(size: int, mean: Tensor, variance: Tensor) -> Tensor:
        # Draw each sample by itself, so that `chunk_size` does not change the random numbers.
        readouts = torch.stack([sample_gaussian(mean, variance, group) for _ in range(size)])
        return score(readouts, targets.expand(size, *targets.shape))

    sizes = [min(chunk_size, samples - start) for start in range(0, samples, chunk_size)]
    # The sum over samples is outside, so that nothing after the last stored tensor of `score` is computed again.
    chunks = [checkpoint(chunk_nll, size, mean, variance, use_reentrant=False) for size in sizes]
    return _average(math.log(samples) - torch.logsumexp(-torch.cat(chunks), dim=0), targets, count)


def marginal_log_probs(
    decode: Callable[[Tensor], Tensor], mean: Tensor, variance: Tensor, samples: int, group: Any = None
) -> Tensor:
    """Estimate the log-probability of every token by Monte Carlo: the logarithm of the mean over samples.

    With the same random numbers, the negative log-probability of a target is its `marginal_likelihood`.

    Args:
        decode: maps read-outs `[1, B, T, E]` to logits `[B, T', vocab_size]`.
        mean: `[B, T, E]`, posterior mean of the read-out.
        variance: `[B, T, E]`, posterior variance of the read-out.
        samples: number of samples, drawn and decoded one after the other.
        group: as in `marginal_likelihood`.

    Returns:
        `[B, T', vocab_size]`, at least float32. Its exponentials sum to 1 over the vocabulary.
    """
    total = None
    for _ in range(samples):
        logits = decode(sample_gaussian(mean, variance, group)[None])
        log_probs = torch.log_softmax(logits.to(belief_dtype(logits.dtype)), dim=-1)
        total = log_probs if total is None else torch.logaddexp(total, log_probs)
    assert total is not None
    return total - math.log(samples)


def target_nll(logits: Tensor, targets: Tensor) -> Tensor:
    """Compute the negative log-likelihood of each target.

    Args:
        logits: `[..., vocab_size]`.
        targets: `[...]`; -100 is ignored.

    Returns:
        `[...]`, at least float32; 0 for ignored targets.
    """
    logits = logits.to(belief_dtype(logits.dtype))
    flat_targets = targets.flatten().to(logits.device)
    flat = F.cross_entropy(logits.flatten(0, -2), flat_targets, ignore_index=IGNORE_INDEX, reduction="none")
    return flat.view(targets.shape)


def _average(nll: Tensor, targets: Tensor, count: Tensor | int | None) -> Tensor:
    targets = targets.to(nll.device)
    return divide_by_count(torch.where(targets != IGNORE_INDEX, nll, 0).sum(), targets, count)
