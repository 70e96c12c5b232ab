"""Recall sequences with overlapping keys: writes give an address and a value, later queries give an address alone.

`CollidingPairs` (appendix E.5.1) makes pairs of addresses overlap. `RandomAddresses` (E.5.4) draws more addresses than
fit into memory. Both draw everything from the generator that is passed to them, on its device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

ADDRESS_DIM = 16  # of the addresses used as keys and queries


class Episode(NamedTuple):
    """Batch of sequences whose last Q tokens are queries.

    Attributes:
        tokens: `[B, T, inputs]`: query flag, raw address, one-hot value (0 at queries), concatenated.
        addresses: `[B, T, 16]` unit addresses, used as both key and query.
        targets: int64 `[B, Q]`, label written at the queried address.
        distractors: int64 `[B, Q]`, label of the overlapping address; `None` if addresses are random.
    """

    tokens: Tensor
    addresses: Tensor
    targets: Tensor
    distractors: Tensor | None


@dataclass(frozen=True)
class CollidingPairs:
    """Task with targets B_i and distractors A_i in separate planes, at overlap rho_i (E.5.1).

    Identity 2i is B_i, with address e_{2i}. Identity 2i + 1 is A_i, with address rho_i e_{2i} + sqrt(1 - rho_i^2)
    e_{2i+1}.
    Labels are assigned to identities at random in every sequence.
    """

    pairs: int = ADDRESS_DIM // 2
    boost: int = 4

    @property
    def labels(self) -> int:
        return 2 * self.pairs

    @property
    def inputs(self) -> int:
        return 1 + ADDRESS_DIM + self.labels

    def draw(self, count: int, flood: int, overlap: tuple[float, float], generator: torch.Generator) -> Episode:
        """Draw sequences: write all identities, each B_i `boost` times, each A_i `flood` times; then query all B_i.

        Seeding and queries are in random order. T = 2 pairs + pairs (boost + flood) + pairs.

        Args:
            count: number of sequences.
            flood: writes of each A_i.
            overlap: bounds of the uniform distribution of rho, drawn once per pair.
            generator: random generator; its device is the device of the result.
        """
        device = generator.device
        rho = torch.rand(count, self.pairs, generator=generator, device=device) * (overlap[1] - overlap[0]) + overlap[0]
        label = _permutations(count, self.labels, generator)
        pair = torch.arange(self.pairs, device=device)
        fixed = torch.cat([(2 * pair).repeat_interleave(self.boost), (2 * pair + 1).repeat_interleave(flood)])
        queried = 2 * _permutations(count, self.pairs, generator)
        seeded = _permutations(count, self.labels, generator)
        identity = torch.cat([seeded, fixed.expand(count, -1), queried], 1)
        addresses = self.addresses(rho).gather(1, identity[..., None].expand(-1, -1, ADDRESS_DIM))
        values = F.one_hot(label.gather(1, identity), self.labels).float()
        return Episode(
            tokens=_tokens(addresses, values, self.pairs),
            addresses=addresses,
            targets=label.gather(1, queried),
            distractors=label.gather(1, queried + 1),
        )

    def addresses(self, rho: Tensor) -> Tensor:
        """Return unit addresses `[B, 2 pairs, 16]` of the identities, for overlaps `[B, pairs]`."""
        target = torch.eye(self.pairs, device=rho.device)[..., None] * rho.new_tensor([1.0, 0.0])  # [pair, plane, 2]
        shift = torch.stack([rho, (1 - rho.square()).sqrt()], -1)[:, :, None]  # [B, pair, 1, 2]
        distractor = torch.eye(self.pairs, device=rho.device)[..., None] * shift
        planes = torch.stack([target.expand_as(distractor), distractor], 2)  # [B, pair, 2, plane, 2]
        return F.pad(planes.flatten(3).flatten(1, 2), (0, ADDRESS_DIM - self.labels))


@dataclass(frozen=True)
class RandomAddresses:
    """Task with many random addresses, more than a memory of 16 rows can separate (E.5.4).

    Raw addresses are random directions in 64 dimensions. Memory receives them through one fixed projection with
    orthonormal rows, normalized again. Labels are drawn with replacement.
    """

    labels: int = 64
    raw: int = 64
    queries: int = 8

    @property
    def inputs(self) -> int:
        return 1 + self.raw + self.labels

    def draw(self, count: int, writes: int, generator: torch.Generator) -> Episode:
        """Draw `count` sequences: `writes` associations, then queries of 8 of their addresses, without replacement."""
        device = generator.device
        addresses = F.normalize(torch.randn(count, writes, self.raw, generator=generator, device=device), dim=-1)
        label = torch.randint(self.labels, (count, writes), generator=generator, device=device)
        queried = _permutations(count, writes, generator)[:, : self.queries]
        order = torch.cat([torch.arange(writes, device=device).expand(count, -1), queried], 1)
        raw = addresses.gather(1, order[..., None].expand(-1, -1, self.raw))
        values = F.one_hot(label.gather(1, order), self.labels).float()
        return Episode(
            tokens=_tokens(raw, values, self.queries),
            addresses=F.normalize(raw @ projection(self.raw).to(device).mT, dim=-1),
            targets=label.gather(1, queried),
            distractors=None,
        )


@cache
def projection(raw: int) -> Tensor:
    """Return the projection `[16, raw]` with orthonormal rows. It does not depend on the seed of a run."""
    rows = torch.randn(raw, ADDRESS_DIM, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return torch.linalg.qr(rows).Q.mT.float()


def _permutations(count: int, size: int, generator: torch.Generator) -> Tensor:
    """Return `count` random permutations of `size` elements."""
    return torch.rand(count, size, generator=generator, device=generator.device).argsort(1)


def _tokens(addresses: Tensor, values: Tensor, queries: int) -> Tensor:
    is_query = torch.arange(addresses.shape[1], device=addresses.device) >= addresses.shape[1] - queries
    is_query = is_query[:, None].expand(len(addresses), -1, 1).float()
    return torch.cat([is_query, addresses, values * (1 - is_query)], -1)


def stack_episodes(episodes: Sequence[Episode]) -> Episode:
    """Stack episodes of equal shape along a new leading axis, one per member of a `RecallModel`."""
    distractors = [episode.distractors for episode in episodes if episode.distractors is not None]
    return Episode(
        tokens=torch.stack([episode.tokens for episode in episodes]),
        addresses=torch.stack([episode.addresses for episode in episodes]),
        targets=torch.stack([episode.targets for episode in episodes]),
        distractors=torch.stack(distractors) if distractors else None,
    )


def recall_scores(logits: Tensor, episode: Episode) -> dict[str, Tensor]:
    """Compute scores as means over queries, `[M]` each.

    Args:
        logits: `[M, B, Q, labels]`.
        episode: with a leading axis M.

    Returns:
        "accuracy"; "cross_entropy"; and, with distractors, p_B - p_A, target less distractor: "margin" of the softmax
        over these two labels (equation 20), and "label_margin" of the softmax over all labels (section E.5.5).
    """
    right = logits.argmax(-1) == episode.targets
    scores = {"accuracy": right.float().mean((1, 2)), "cross_entropy": cross_entropy(logits, episode)}
    if episode.distractors is not None:
        target, distractor = (logits.gather(-1, x[..., None]) for x in (episode.targets, episode.distractors))
        scores["margin"] = (2 * (target - distractor).sigmoid() - 1).mean((1, 2, 3))
        total = logits.logsumexp(-1, keepdim=True)
        scores["label_margin"] = ((target - total).exp() - (distractor - total).exp()).mean((1, 2, 3))
    return scores


def cross_entropy(logits: Tensor, episode: Episode) -> Tensor:
    """Compute the loss as a mean over queries, `[M]`."""
    return F.cross_entropy(logits.movedim(-1, 1), episode.targets, reduction="none").mean((1, 2))
