"""Training of the members of a model, one per seed, and their tests."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from kalmix.errors import NonFiniteError
from kalmix_bench.datasets.collision.sequences import cross_entropy, recall_scores, stack_episodes
from kalmix_bench.datasets.seeds import stream_seed
from kalmix_bench.experiments.collision.models import RecallModel
from kalmix_bench.experiments.collision.protocol import CollisionProtocol, CollisionStudy, Condition

REPORTS_PER_RUN = 50
MAX_TEST_TOKENS = 1 << 16  # tokens per test batch; changing it changes the test sequences

LossCallback = Callable[[float, float], None]


def train(
    model: RecallModel,
    study: CollisionStudy,
    seeds: Sequence[int],
    protocol: CollisionProtocol,
    device: torch.device,
    on_progress: LossCallback,
) -> Tensor:
    """Train the members; return their last losses, `[M]`. All use the same order of conditions, each its own data.

    Raises:
        NonFiniteError: a loss diverged.
    """
    generators = [torch.Generator(device).manual_seed(stream_seed("training", seed)) for seed in seeds]
    conditions = random.Random(0)
    parameters = list(model.parameters())
    fused = device.type == "cuda"
    optimizer = torch.optim.AdamW(
        parameters, lr=protocol.learning_rate, weight_decay=protocol.weight_decay, fused=fused
    )
    losses = torch.zeros(len(seeds))
    for step in range(1, protocol.steps + 1):
        condition = conditions.choice(study.training_conditions)
        episode = stack_episodes([study.draw(condition, protocol.batch_size, generator) for generator in generators])
        losses = cross_entropy(model(episode), episode)
        optimizer.zero_grad()
        losses.sum().backward()  # members share no parameters, so the sum keeps their gradients separate
        _clip([x.grad for x in parameters if x.grad is not None], protocol.max_grad_norm)
        optimizer.step()
        if step % max(1, protocol.steps // REPORTS_PER_RUN) == 0 or step == protocol.steps:
            if not losses.isfinite().all():
                raise NonFiniteError("loss")
            on_progress(step / protocol.steps, float(losses.detach().mean()))
    return losses.detach()


def _clip(gradients: list[Tensor], most: float) -> None:
    """Scale each member's gradients to a norm of at most `most`."""
    norm = torch.stack([x.flatten(1).square().sum(1) for x in gradients]).sum(0).sqrt()
    scale = (most / (norm + 1e-6)).clamp(max=1)
    torch._foreach_mul_(gradients, [scale.view(-1, *(1,) * (x.ndim - 1)) for x in gradients])


@torch.no_grad()
def evaluate(
    model: RecallModel, study: CollisionStudy, condition: Condition, protocol: CollisionProtocol, device: torch.device
) -> dict[str, Tensor]:
    """Return scores under a condition, `[M]` each. All models and seeds get the same, separate test sequences."""
    generator = torch.Generator(device).manual_seed(stream_seed("test", 0))
    length = study.draw(condition, 1, torch.Generator(device)).tokens.shape[1]
    left, total = protocol.test_sequences, {}
    while left > 0:
        count = min(left, max(1, MAX_TEST_TOKENS // length))
        episode = stack_episodes([study.draw(condition, count, generator)] * model.members)
        for name, score in recall_scores(model(episode), episode).items():
            total[name] = total.get(name, 0.0) + score * count / protocol.test_sequences
        left -= count
    return total


def condition_values(condition: Condition) -> dict[str, Any]:
    """Return a test's condition as JSON values; a range of overlaps is represented by its upper end."""
    return {name: value[-1] if isinstance(value, tuple) else value for name, value in condition.items()}
