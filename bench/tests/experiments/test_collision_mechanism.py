"""The deterministic collision experiment gives the numbers its paper prints, and the paper's closed forms."""

import functools

import pytest
import torch

import kalmix
from kalmix_bench.experiments.collision import mechanism as mech
from kalmix_bench.experiments.collision.mechanism import A, B, MechanismSetting
from kalmix_bench.experiments.collision.predictions import final_gain, first_predicted, predictions

SETTING = MechanismSetting()
# Table E.4.3: overlap, margin of the Bayesian Layer, margin of the reset. The paper prints 0.34 where it gets 0.33497.
PRINTED = [
    (0.30, 0.46, 0.40),
    (0.45, 0.46, 0.32),
    (0.60, 0.46, 0.20),
    (0.75, 0.46, 0.01),
    (0.85, 0.46, -0.16),
    (0.90, 0.45, -0.26),
    (0.92, 0.45, -0.30),
    (0.95, 0.43, -0.36),
    (0.98, 0.335, -0.42),
]


@functools.cache
def traces(overlap=0.92, setting=SETTING):
    at = torch.tensor([overlap], dtype=torch.float64)
    return {name: mech.trace(rule, setting, at) for name, rule in mech.rules(setting).items()}


@functools.cache
def margins():
    at = torch.tensor([row[0] for row in PRINTED], dtype=torch.float64)
    return {name: 2 * last - 1 for name, last in mech.final_retrievals(SETTING, at).items()}


@pytest.mark.parametrize("row", range(len(PRINTED)), ids=lambda row: f"{PRINTED[row][0]}")
def test_margins_by_overlap_equal_the_papers(row):
    _, bayes, reset = PRINTED[row]
    assert float(margins()["Bayesian Layer"][row]) == pytest.approx(bayes, abs=0.005)
    assert float(margins()["covariance reset"][row]) == pytest.approx(reset, abs=0.005)


def test_plateaus_equal_the_papers():
    ran = traces()
    writes_before_flood = ran["Bayesian Layer"].retrieval()[SETTING.writes_before_flood, 0]
    assert float(writes_before_flood) == pytest.approx(0.731, abs=5e-4)
    assert float(ran["DeltaNet-style"].retrieval()[-1, 0]) == pytest.approx(0.35138, abs=5e-6)
    assert float(ran["Bayesian Layer"].retrieval()[-1, 0]) == pytest.approx(0.72309, abs=5e-6)
    assert float(ran["linear attention"].retrieval()[-1, 0]) < 1e-3
    assert float(ran["Bayesian Layer"].margin()[SETTING.writes_before_flood, 0]) == pytest.approx(0.4621, abs=5e-5)


@pytest.mark.parametrize(
    ("name", "at_a", "end"),
    [
        ("DeltaNet-style", (0.13145, 0.88467), (0.79907, 0.18610)),
        ("Bayesian Layer", (0.90019, 0.10271), (0.01978, 0.97964)),
    ],
)
def test_states_before_and_after_the_flood_equal_the_papers(name, at_a, end):
    ran = traces()[name]
    assert ran.logits(A)[SETTING.writes_before_flood, 0, :2].tolist() == pytest.approx(at_a, abs=5e-6)
    assert ran.logits(B)[SETTING.writes_before_flood, 0, :2].tolist() == pytest.approx((0, 1), abs=1e-9)
    assert ran.logits(B)[-1, 0, :2].tolist() == pytest.approx(end, abs=5e-6)


def test_gain_and_slope_equal_the_papers():
    bayes = traces()["Bayesian Layer"]
    assert final_gain(SETTING) == pytest.approx((5**0.5 - 1) / 2, abs=1e-15)
    assert float(bayes.gain[-1, 0]) == pytest.approx(0.618, abs=5e-4)
    assert float(bayes.gain[SETTING.writes_before_flood, 0]) == pytest.approx(0.91, abs=5e-3)
    assert float(bayes.uncertainty(B)[-2:, 0].diff()) == pytest.approx(0.00768, abs=5e-6)


@pytest.mark.parametrize("overlap", [0.0, 0.5, 0.92, 0.99])
def test_closed_forms_hold_exactly(overlap):
    found = predictions(SETTING, overlap, traces(overlap))
    assert [row.equation for row in found] == ["16", "32", "32", "42", "40", "44", "45", "47", "52", "57", "E.3"]
    for row in found:
        if row.equation != "45":  # a limit that 40 writes do not reach
            assert abs(row.difference) < 1e-9, row


@pytest.mark.slow
def test_the_angle_of_the_first_flood_write_approaches_its_limit():
    def left(boost):
        setting = MechanismSetting(boost=boost)
        rows = predictions(setting, 0.92, traces(0.92, setting))
        return next(-row.difference for row in rows if row.equation == "45")

    # The difference decreases as the orthogonal variance grows, by l^2 per write.
    assert 0 < left(160) < left(40) / 3


def test_tables_e_4_2_and_e_4_4_were_printed_for_another_overlap():
    priors = torch.tensor([0.01, 0.05, 0.1, 0.5, 1.0, 3.0], dtype=torch.float64)
    swept = mech.sweep_priors(SETTING, 0.99, priors)
    assert swept.gain.tolist() == pytest.approx([0.17, 0.50, 0.67, 0.91, 0.95, 0.98], abs=0.005)
    assert swept.margin.tolist() == pytest.approx([-0.45, -0.44, -0.44, -0.43, -0.43, -0.43], abs=0.005)
    assert swept.crossing.tolist() == [56, 54, 53, 53, 53, 53]
    assert float(traces(0.99)["Bayesian Layer"].margin()[-1]) == pytest.approx(0.20, abs=0.005)
    assert int(mech.crossing(traces(0.99)["Bayesian Layer"], SETTING)) == 0
    stated = mech.sweep_priors(SETTING, 0.92, priors)
    assert stated.margin.tolist() == pytest.approx([-0.345, -0.297, -0.267, -0.211, -0.199, -0.190], abs=0.0005)


def test_gains_do_not_exceed_one_and_the_printed_2_is_the_norm_of_the_write():
    bayes = traces()["Bayesian Layer"]
    assert float(bayes.gain.max()) < 1
    write = first_predicted(SETTING, bayes) @ bayes.keys[0, A]
    precision = 1 / (SETTING.obs_noise + bayes.keys[0, A] @ write)
    assert float(precision * write.norm()) == pytest.approx(2.0, abs=0.05)


def test_resetting_the_covariance_is_the_delta_rule():
    reset, delta = (traces()[name].mean for name in ("covariance reset", "DeltaNet-style"))
    assert torch.allclose(reset, delta, rtol=0, atol=1e-14)


def test_token_by_token_equals_one_call():
    rule = mech.rules(SETTING)["Bayesian Layer"]
    ran = traces()["Bayesian Layer"]
    key = ran.keys[:, SETTING.schedule(), None]
    value = torch.eye(SETTING.identities).double()[SETTING.schedule()][None, :, None]
    signals = {name: torch.full(key.shape[:3], x, dtype=torch.float64) for name, x in rule.signals.items()}
    prior = kalmix.DenseBelief(ran.mean[:1], ran.covariance[:1])
    whole = kalmix.filter(rule.design, key, key, value, belief=prior, **signals)
    assert torch.allclose(whole.belief.mean[0], ran.mean[-1], rtol=0, atol=1e-11)
    assert torch.allclose(whole.belief.covariance[0], ran.covariance[-1], rtol=0, atol=1e-11)


@pytest.mark.slow
def test_tables_use_the_state_after_the_last_write():
    at = torch.tensor([0.92], dtype=torch.float64)
    for name, ran in traces().items():
        assert torch.equal(mech.final_retrievals(SETTING, at)[name], ran.retrieval()[-1])
    swept = mech.sweep_priors(SETTING, 0.92, torch.tensor([0.5, 2.0], dtype=torch.float64))
    rule = mech.rules(SETTING)["DeltaNet-style"]
    ran = mech.trace(rule, SETTING, torch.full_like(swept.prior, 0.92), reset=swept.prior)
    assert torch.equal(swept.gain, ran.gain[-1]) and torch.equal(swept.margin, ran.margin()[-1])
