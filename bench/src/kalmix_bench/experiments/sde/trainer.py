"""Training of models that predict the next measurement."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from kalmix.errors import NonFiniteError
from kalmix_bench.datasets.sde.trajectories import Splits, Trajectories, embedding
from kalmix_bench.experiments.sde.models import MODELS, Predictor
from kalmix_bench.experiments.sde.protocol import SdeProtocol

ErrorCallback = Callable[[float, float], None]  # takes the fraction done and the error of the last epoch
StateDict = dict[str, Tensor]


class TrainedPredictor(NamedTuple):
    """Trained model.

    Attributes:
        model: model with the weights of the best validation error.
        rows: `[d, D]` embedding of the measurements.
        time_unit: unit of its times, the mean interval between training measurements.
        validation: error of the next measurement after each epoch.
        snapshots: weights by number of epochs: before training, after a tenth of it, and the best.
    """

    model: Predictor
    rows: Tensor
    time_unit: float
    validation: list[float]
    snapshots: dict[int, StateDict]

    @torch.no_grad()
    def predict(self, trajectories: Trajectories, batch: int) -> Tensor:
        """Predict the next measurement after each token but the last, `[B, T - 1, d]` float64 on the CPU."""
        parts = self.batches(trajectories, torch.arange(len(trajectories.times)).split(batch))
        return torch.cat([_predict(self.model, x, at) @ self.rows.mT for x, at in parts]).double().cpu()

    def batches(self, trajectories: Trajectories, indices: Iterable[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield tokens `[b, T, D]` and times `[b, T]` of these trajectories as model inputs."""
        for index in indices:
            yield (
                trajectories.measurements[index].to(self.rows) @ self.rows,
                (trajectories.times[index] / self.time_unit).to(self.rows),
            )


def init_predictor(name: str, data: Splits, protocol: SdeProtocol, seed: int, device: torch.device) -> TrainedPredictor:
    """Return an untrained model, initialized from its seed."""
    rows = embedding(data.train.measurements.shape[-1], protocol.channels, seed).float().to(device)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = MODELS[name](protocol.channels, protocol.heads).to(device)
    return TrainedPredictor(model, rows, float(data.train.times.diff(dim=1).mean()), [], {0: _copied(model)})


def train_predictor(
    name: str, data: Splits, protocol: SdeProtocol, seed: int, device: torch.device, on_progress: ErrorCallback
) -> TrainedPredictor:
    """Train a model with Adam on the squared error of the next embedded measurement.

    Raises:
        NonFiniteError: the loss diverged.
    """
    predictor = init_predictor(name, data, protocol, seed, device)
    model, weights = predictor.model, predictor.snapshots[0]
    optimizer = torch.optim.Adam(model.parameters(), lr=protocol.learning_rate)
    steps = protocol.epochs * -(-len(data.train.times) // protocol.batch_size)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    order = torch.Generator().manual_seed(seed)
    best = 0
    for epoch in range(1, protocol.epochs + 1):
        batches = torch.randperm(len(data.train.times), generator=order).split(protocol.batch_size)
        for x, at in predictor.batches(data.train, batches):
            loss = (_predict(model, x, at) - x[:, 1:]).square().sum(-1).mean() / len(predictor.rows)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), protocol.max_grad_norm)
            optimizer.step()
            schedule.step()
        error = predictor.predict(data.validation, protocol.batch_size) - data.validation.measurements[:, 1:]
        predictor.validation.append(float(error.square().mean()))
        if not torch.tensor(predictor.validation[-1]).isfinite():
            raise NonFiniteError("loss")
        if epoch == -(-protocol.epochs // 10):
            predictor.snapshots[epoch] = _copied(model)
        if predictor.validation[-1] == min(predictor.validation):
            best, weights = epoch, _copied(model)
        on_progress(epoch / protocol.epochs, predictor.validation[-1])
    predictor.snapshots[best] = weights
    model.load_state_dict(weights)
    return predictor


def _predict(model: Predictor, x: Tensor, times: Tensor) -> Tensor:
    """Predict the token after each token but the last, `[b, T - 1, D]`."""
    return model(x[:, :-1], times[:, :-1], times.diff(dim=1))


def _copied(model: Predictor) -> StateDict:
    return {name: x.detach().cpu().clone() for name, x in model.state_dict().items()}
