"""Every row of the catalogue lowers to an op that agrees with the oracle; so does a design of one's own."""

import pytest
import torch

import kalmix
from kalmix.designs import CATALOGUE, Covariance, Design, Evidence, Transition
from kalmix.testing.cases import Case, outputs

OWN = [
    Design("still", Transition(), Evidence(), Covariance()),
    Design("diffuses", Transition(diffusion=True), Evidence(), Covariance()),
    Design("decays", Transition(decay="cell"), Evidence(), Covariance()),
]


@pytest.mark.parametrize("design", [*CATALOGUE.values(), *OWN], ids=lambda design: design.name)
def test_filter_agrees_with_the_oracle(design):
    case = Case(design.op, "chunked", dtype=torch.float64)
    inputs = case.inputs()
    signals = {name: inputs[name] for name in ("q", "k", "v", *design.signals)}
    belief = case.problem.belief(inputs["prior.mean"], inputs["prior.variance"])
    for kernel in ("chunked", "reference"):
        got = kalmix.filter(design, **signals, belief=belief, variance=True, kernel=kernel)
        want = kalmix.oracle(design, **signals, belief=belief, variance=True)
        for x, y in zip(outputs(got), outputs(want), strict=True):
            assert float((x - y).abs().max()) < 1e-12


def test_designs_are_data():
    assert CATALOGUE["kla"] == kalmix.designs.KLA
    assert hash(kalmix.designs.KLA) == hash(CATALOGUE["kla"])
    with pytest.raises(AttributeError):
        kalmix.designs.KLA.name = "other"  # type: ignore[misc]
    assert kalmix.designs.KLA.signals == ("log_decay", "process_noise", "precision")


def test_default_prior_is_the_oracles():
    inputs = Case("diagonal", "reference", dtype=torch.float64).inputs()
    signals = {name: x for name, x in inputs.items() if not name.startswith("prior.")}
    got, want = kalmix.filter(kalmix.designs.KLA, **signals), kalmix.oracle(kalmix.designs.KLA, **signals)
    assert float((got.mean - want.mean).abs().max()) < 1e-12
