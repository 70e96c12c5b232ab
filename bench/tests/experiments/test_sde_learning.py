"""Predictors learn, do not use future values, and are loaded with their weights."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kalmix import ArgumentError
from kalmix.errors import NonFiniteError
from kalmix_bench.datasets.sde.scores import squared_errors
from kalmix_bench.datasets.sde.settings import SETTINGS
from kalmix_bench.datasets.sde.trajectories import Trajectories
from kalmix_bench.experiments.sde import REFERENCES, SdeCell, SdeProtocol, train_predictor
from kalmix_bench.experiments.sde import figures as plots
from kalmix_bench.experiments.sde.checkpoints import load_predictor, weights
from kalmix_bench.experiments.sde.experiment import Sde
from kalmix_bench.experiments.sde.models import MODELS, FilterPredictor
from kalmix_bench.runner.cells import Results
from kalmix_bench.runner.scheduler import run

CPU = torch.device("cpu")
TINY = SdeProtocol(epochs=2, batch_size=4, channels=8, train=8, validation=4, test=4)


def silent(done: float, error: float) -> None:
    assert 0 < done <= 1 and error > 0


def test_errors_are_means_over_rows_and_predictions() -> None:
    state = torch.tensor([[[9.0, 9.0], [1.0, 2.0], [3.0, 5.0]]])
    seen = Trajectories(torch.arange(3.0)[None], state + 1, state)
    assert squared_errors(state[:, 1:] + torch.tensor([0.0, 2.0]), seen) == {"measurement": 1.0, "state": 2.0}
    assert squared_errors(state[:, 1:], Trajectories(seen.times, seen.measurements)) == {"measurement": 1.0}


@pytest.mark.parametrize("name", MODELS)
def test_models_use_future_times_but_not_future_values(name: str) -> None:
    torch.manual_seed(0)
    model = MODELS[name](16, 2)
    x, times = torch.randn(2, 7, 16), torch.rand(2, 8).cumsum(1)
    after, ahead = x.clone(), times.diff(dim=1)
    after[:, 4:] += 1
    got, other = (model(given, times[:, :-1], ahead) for given in (x, after))
    assert torch.equal(got[:, :4], other[:, :4]) and not torch.equal(got[:, 4], other[:, 4])
    longer = ahead.clone()
    longer[:, 3] += 0.5
    assert (model(x, times[:, :-1], longer)[:, 3] - got[:, 3]).abs().max() > 1e-4
    maps = model.maps(x, times[:, :-1], ahead)
    assert maps.shape[1:] == (2, 7, 7) and not maps.triu(1).any()
    if name.startswith("softmax"):
        assert torch.allclose(maps.sum(-1), torch.ones(maps.shape[:-1]), atol=1e-6)


def test_predictions_are_weighted_propagated_tokens() -> None:
    """For AFA, a prediction is the map's row times the estimates of single tokens."""
    torch.manual_seed(0)
    model = MODELS["afa"](16, 1)
    assert isinstance(model, FilterPredictor)
    torch.nn.init.constant_(model.layer.residual, 50.0)  # no token is added to its own estimate
    torch.nn.init.zeros_(model.layer.out_proj.bias)
    x, times = torch.randn(2, 7, 16), torch.rand(2, 7).cumsum(1)
    predicted = model(x, times, torch.zeros(2, 7))
    rate = -model.layer.state_dynamics(torch.float32).log_decay
    for at in (0, 3, 6):
        faded = torch.exp(-rate * (times[:, at, None] - times[:, : at + 1]))  # which the map has in it, too
        weights = model.maps(x, times, times)[0, :, at, : at + 1] / faded
        pooled_variances = (weights[..., None] * model.propagate(x, times, at)).sum(1)
        assert torch.allclose(pooled_variances, predicted[:, at], atol=1e-5)


def test_a_model_learns_to_beat_the_last_measurement() -> None:
    protocol = replace(TINY, epochs=12, batch_size=16, channels=32, train=64, validation=16, test=16)
    setting = SETTINGS["figure-1b"]
    given = setting.draw(protocol.sizes, 0)
    found = train_predictor("softmax", given, protocol, 0, CPU, silent)
    references = setting.references(given.test)
    missed = squared_errors(found.predict(given.test, 5), given.test)
    assert references["kalman"]["measurement"] < missed["measurement"] < 0.7 * references["last"]["measurement"]
    assert references["smoother"]["state"] < references["kalman"]["state"] < missed["state"]
    assert len(found.validation) == 12 and list(found.snapshots)[:2] == [0, 2]


def test_weights_of_the_best_validation_error_are_kept() -> None:
    """The first epochs are best if every other training measurement is negated."""
    protocol = replace(TINY, epochs=4)
    given = SETTINGS["figure-1b"].draw(protocol.sizes, 0)
    turned = torch.tensor([1.0, -1.0]).repeat(51)[:, None] * given.train.measurements
    found = train_predictor(
        "softmax", given._replace(train=given.train._replace(measurements=turned)), protocol, 0, CPU, silent
    )
    best = 1 + found.validation.index(min(found.validation))
    assert best < 4 and list(found.snapshots)[-1] == best
    check = squared_errors(found.predict(given.validation, 64), given.validation)
    assert check["measurement"] == pytest.approx(min(found.validation), rel=1e-4)


def test_training_is_deterministic_and_divergence_raises() -> None:
    given = SETTINGS["co2"].draw(TINY.sizes, 0)
    few = given._replace(train=given.train.select(torch.arange(8)))
    first, same, other = (train_predictor("softmax", few, TINY, seed, CPU, silent).validation for seed in (0, 0, 1))
    assert first == same != other
    broken = few._replace(train=Trajectories(few.train.times, few.train.measurements * torch.nan))
    with pytest.raises(NonFiniteError, match="loss"):
        train_predictor("softmax", broken, TINY, 0, CPU, silent)


def test_cells_are_run_once_and_their_models_are_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results = Results(tmp_path / "results.jsonl")
    cells = [SdeCell("outliers", model, 0, TINY) for model in (REFERENCES, "softmax")]
    rows = run(Sde(), cells, results, CPU)
    assert list(rows) == cells
    references, missed = (rows[cell]["errors"] for cell in cells)
    names = ("kalman, known outliers", "kalman, mean noise", "kalman", "last")
    errors = [references[name]["state"] for name in names]
    assert errors == sorted(errors) and len(set(errors)) == 4
    lines = [json.loads(line) for line in results.path.read_text().splitlines()]
    assert lines[1]["data_source"]["sampling"]["outliers"] == 0.12 and lines[1]["protocol"]["epochs"] == 2

    given = SETTINGS["outliers"].draw(TINY.sizes, 0)
    again = load_predictor(cells[1], given, results, CPU)
    assert squared_errors(again.predict(given.test, 4), given.test)["state"] == pytest.approx(
        missed["softmax"]["state"], rel=1e-5
    )
    assert again.validation == rows[cells[1]]["validation"]

    def failing(*given: object) -> None:
        raise AssertionError("learned again")

    with monkeypatch.context() as patch:
        patch.setattr("kalmix_bench.experiments.sde.experiment.train_predictor", failing)
        assert run(Sde(), cells, results, CPU) == rows
        with pytest.raises(AssertionError, match="learned again"):  # another protocol is another cell
            run(Sde(), [replace(cells[1], protocol=replace(TINY, epochs=1))], results, CPU)
    weights(cells[1], results).unlink()
    run(Sde(), cells, results, CPU)
    assert weights(cells[1], results).exists()


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: SdeCell("figure-2", "softmax", 0, TINY), "setting"),
        (lambda: SdeCell("co2", "rnn", 0, TINY), "model"),
        (lambda: SdeProtocol(epochs=0), "epochs"),
        (lambda: SdeProtocol(learning_rate=0), "learning_rate"),
    ],
)
def test_invalid_arguments_raise(make, name: str) -> None:
    with pytest.raises(ArgumentError, match=f"`{name}`"):
        make()


def test_propagated_estimates_are_drawn(tmp_path: Path) -> None:
    state = torch.randn(9, 2).cumsum(0)
    pulled = [state[at] + torch.randn(at, 2) for at in (3, 8)]
    path = plots.clouds(tmp_path / "clouds.png", [plots.Clouds("early", state, (3, 8), pulled)])
    assert Path(path).read_bytes().startswith(b"\x89PNG")
