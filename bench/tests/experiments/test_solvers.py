"""Studies of solvers give the expected results at tiny sizes; their iterations equal the op's."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor

from kalmix import ArgumentError
from kalmix.ops import Adaptive, Chebyshev, ConjugateGradient, ridge
from kalmix.ops._ridge import linear_solvers as ops
from kalmix_bench.experiments.solvers import tokens as tokens_
from kalmix_bench.experiments.solvers.conditions import Conditions, conditions
from kalmix_bench.experiments.solvers.convergence import Convergence, precisions, residuals
from kalmix_bench.experiments.solvers.gradients import Gradients, Model, gradients, iterative_ridge
from kalmix_bench.experiments.solvers.iterations import chebyshev, chebyshev_residual_form, conjugate_gradient, rate
from kalmix_bench.experiments.solvers.reversal import Reversal, bounds, fixed_point, reversals
from kalmix_bench.experiments.solvers.systems import ARITHMETICS, Systems
from kalmix_bench.experiments.solvers.tokens import KINDS, draw

CPU = torch.device("cpu")


def silent(done: float, status: str) -> None:
    assert 0 <= done <= 1 and status


def systems(kind: str = "random", *, with_decay: bool = False, factor: float = 0.02) -> tuple[Systems, Tensor]:
    tokens = draw(kind, 2, 32, 12, 0, CPU, with_decay=with_decay)
    made = Systems.of(tokens, factor, chunk=8)
    return made, made.to_chunks(tokens.q)


@pytest.mark.parametrize("with_decay", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_systems_in_chunks_are_the_normal_equations_of_every_token(kind: str, with_decay: bool) -> None:
    tokens = draw(kind, 2, 32, 12, 0, CPU, with_decay=with_decay)
    made = Systems.of(tokens, 0.02, chunk=8)
    gram, written = torch.zeros(2, 12, 12, dtype=torch.float64), []
    for t in range(32):
        decay = 1.0 if tokens.log_decay is None else tokens.log_decay[:, t].exp()[:, None, None]
        gram = decay * gram + tokens.k[:, t, :, None] * tokens.k[:, t, None]
        written.append(gram / torch.linalg.matrix_norm(gram)[:, None, None])
    want = torch.stack(written, 1)
    assert (torch.cat(list(made.grams()), 1) - want).abs().max() < 1e-14
    rhs = made.to_chunks(tokens.q)
    applied = (want @ tokens.q[..., None])[..., 0] + 0.02 * tokens.q
    assert (made.apply(rhs).flatten(1, 2) - applied).abs().max() < 1e-14
    assert (made.apply(made.exact(rhs)) - rhs).abs().max() < 1e-12


def test_iterations_are_those_of_the_op() -> None:
    made, rhs = systems()
    matrices = torch.stack(list(made.grams()), 1) + 0.02 * torch.eye(12, dtype=torch.float64)
    apply, middle = ops.Matrices(matrices / 0.52).apply, 0.52
    *_, got = chebyshev(made, rhs, 9, ARITHMETICS["float64"])
    assert (got - ops.chebyshev(apply, rhs, 0.5 / 0.52, 9) / middle).abs().max() < 1e-12
    *_, same = chebyshev_residual_form(made, rhs, 9, ARITHMETICS["float64"])
    assert (same - got).abs().max() < 1e-12
    iterates = torch.stack([y.x for y in conjugate_gradient(made, rhs, 5, ARITHMETICS["float64"])])
    residuals = torch.stack([(rhs - middle * apply(x)).norm(dim=-1) for x in iterates])
    best = residuals.argmin(0)[None, ..., None].expand(1, *rhs.shape)  # the op returns the iterate of least residual
    assert (iterates.gather(0, best)[0] - ops.conjugate_gradient(apply, rhs, 5) / middle).abs().max() < 1e-12


def test_errors_fall_by_the_rate_of_the_bound() -> None:
    """By 0.754 an iteration at a = 0.02, for as long as rounding lets them."""
    assert rate(0.02) == pytest.approx(0.7543, abs=1e-4)
    made, rhs = systems("repeated")
    error = [float((x - made.exact(rhs)).norm()) for x in chebyshev(made, rhs, 40, ARITHMETICS["float64"])]
    assert (error[40] / error[20]) ** (1 / 20) == pytest.approx(0.7543, abs=2e-3)


@pytest.mark.slow
def test_residuals_fall_with_the_ridge_and_stop_where_rounding_stops_them() -> None:
    found = residuals(Convergence(1, 64, 32, 40), 0, CPU, silent)["curves"]
    at = {(x["arithmetic"], x["factor"], x["solver"]): x["residual"] for x in found}
    chebyshev_ = [at["float32", a, "Chebyshev"][20] for a in (0.01, 0.02, 0.05, 0.1)]
    assert chebyshev_ == sorted(chebyshev_, reverse=True)  # Figure 9
    of = {solver: at["float32", 0.02, solver] for solver in ("Chebyshev", "CG", "CG + 1e-5")}
    assert of["CG"][20] < of["CG + 1e-5"][20] < of["Chebyshev"][10]
    assert of["CG"][40] < of["Chebyshev"][40] < of["CG + 1e-5"][40] / 10  # Figure 1a has the last two
    assert at["bfloat16 products", 0.02, "Chebyshev"][40] > 1e-3


@functools.cache
def rounding() -> dict[tuple[str, ...], Any]:
    found = precisions(Convergence(1, 64, 32, 60, (0.02,)), 0, CPU, silent)["curves"]
    return {(x["keys"], x["arithmetic"], x["solver"]): x for x in found}


@pytest.mark.parametrize("keys", KINDS)
def test_thirty_iterations_reach_the_rounding_limit_of_bfloat16(keys: str) -> None:
    error = rounding()[keys, "bfloat16 products", "Chebyshev"]["error"]
    assert error[10] > 0.05 and error[20] < 0.01
    assert error[30] < 1.5 * error[60] and 2e-4 < error[60] < 5e-3  # bfloat16 rounds by 2e-3 on average
    assert rounding()[keys, "float32", "Chebyshev"]["error"][60] < 1e-6


def test_updating_the_residual_keeps_read_outs_accurate_in_bfloat16() -> None:
    """With one repeated key, read-outs lie along it, where the solution is smallest and rounding is amplified."""
    plain, carried, conjugate = (
        dict(rounding()["repeated", "bfloat16 products", solver]["read"])[30]
        for solver in ("Chebyshev", "Chebyshev by residuals", "CG")
    )
    assert carried < plain / 5 and carried < 2 * conjugate


def test_the_condition_number_is_within_its_bound_on_every_token() -> None:
    kinds = conditions(Conditions(2, 128, 16), 0, CPU, silent)["kinds"]
    assert {(x["keys"], x["with_decay"]) for x in kinds} == {
        (keys, with_decay) for keys in KINDS for with_decay in (False, True)
    }
    for kind in kinds:
        assert kind["tokens"] == 256
        assert [x["above"] for x in kind["adaptive"]] == [0] * 4
        first = kind["adaptive"][0]["curve"][0]  # one key: H has rank one, and the bound is reached
        assert first == pytest.approx(101)
    (repeated,) = (x for x in kinds if x["keys"] == "repeated" and not x["with_decay"])
    assert repeated["fixed"]["largest"] == pytest.approx(1 + 128 / 0.25)  # which no fixed ridge bounds


def test_divisors_follow_lemma_3() -> None:
    found = bounds(60)
    for low, high, limit in zip(found["smallest"], found["largest"], found["limit"], strict=True):
        assert limit - 1e-12 <= low <= high <= 1
        assert low > 0.25  # Remark 2, for condition numbers of 10 and more
    assert fixed_point(0.5 / 0.52) - 1 == pytest.approx(rate(0.02) ** 2)


def test_a_reversed_iteration_multiplies_its_rounding_errors() -> None:
    """Against Remark 2: by 1 / sqrt(w* - 1) = 1.326 a step at a = 0.02, and by the number of steps."""
    found = reversals(Reversal(1, 64, 32), 0, CPU, silent)
    growth = {(x["arithmetic"], x["factor"]): x for x in found["growth"]}
    for name in ("float64", "float32"):
        at = growth[name, 0.02]
        assert at["root"] == pytest.approx(1.326, abs=1e-3)
        assert at["root"] < at["measured"] < 1.02 * at["predicted"]
    error = growth["float32", 0.02]["error"]
    assert len(error) == 29 and error[4] < 1e-5 and error[-1] > 1e-3  # five steps back are harmless, thirty are not
    assert growth["float32", 0.1]["error"][-1] > 1
    for of in found["conjugate"]:
        assert min(low for low, _ in of["square"]) < 1e-10


@functools.cache
def depths() -> dict[str, Any]:
    setting = Gradients(vocab_size=50, length=64, heads=1, width=32, layers=(1, 5), scales=(1.0, 1e4))
    found = gradients(setting, 0, CPU, silent)
    rows = {(x["arithmetic"], x["solver"], x["layers"]): x["parameters"] for x in found["rows"]}
    return {"rows": rows, "scaled": {(x["scale"], x["solver"]): x["parameters"] for x in found["scaled"]}}


@pytest.mark.slow
def test_gradients_of_published_conjugate_gradients_degrade_with_depth() -> None:
    """Figure 1e, with the 1e-5 that MesaNet's kernels add to divisors."""
    rows = depths()["rows"]
    assert rows["float32", "CG 30 + 1e-5", 5] > 0.1
    assert rows["float32", "CG 30 + 1e-5", 5] > 10 * rows["float32", "Chebyshev 30", 5]
    assert rows["float32", "CG 30 + 1e-5", 5] > rows["float32", "CG 30 + 1e-5", 1]


@pytest.mark.slow
def test_gradients_of_exact_conjugate_gradients_are_accurate() -> None:
    """Against Figure 1e: the culprit is the 1e-5, beside which small gradients vanish, not the method."""
    rows, scaled = depths()["rows"], depths()["scaled"]
    assert rows["float32", "CG 30", 5] < 1e-4
    assert rows["float32", "CG 30", 5] < rows["float32", "Chebyshev 30", 5]
    assert scaled[1e4, "CG 30 + 1e-5"] < scaled[1.0, "CG 30 + 1e-5"] / 10  # only the loss is larger
    assert scaled[None, "CG 30 + 1e-5"] < 0.05
    assert scaled[1e4, "Chebyshev 30"] == pytest.approx(scaled[1.0, "Chebyshev 30"], rel=0.1)


@pytest.mark.parametrize(
    ("name", "solver", "unrolled", "factor"),
    [
        ("Chebyshev", Chebyshev(6), False, 0.02),
        ("Chebyshev", Chebyshev(6, backward="unrolled"), True, 0.02),
        ("CG", ConjugateGradient(6), False, 1.0),  # residuals fall at each iteration: the op returns the last iterate
    ],
)
def test_mixers_of_the_study_equal_the_op(name: str, solver: Any, unrolled: bool, factor: float) -> None:
    """Means and gradients, implicit and unrolled, of few iterations."""
    generator = torch.Generator().manual_seed(0)
    q, k, v, weight = (torch.randn(2, 16, 2, 8, generator=generator, dtype=torch.float64) for _ in range(4))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    options = {"solver": name, "iterations": 6, "arithmetic": ARITHMETICS["float64"], "unrolled": unrolled}
    got = iterative_ridge(q, k, v, factor=factor, **options)
    want = ridge(q, k, v, ridge=Adaptive(factor), solver=solver).mean
    most = 1e-5 if unrolled else 1e-10  # the unrolled op takes rho as a float32 number
    assert _apart(got, want) < most
    for mine, theirs in zip(*(torch.autograd.grad((weight * x).sum(), leaves) for x in (got, want)), strict=True):
        assert _apart(mine, theirs) < most


def _apart(got: Tensor, want: Tensor) -> float:
    return float((got - want).detach().norm() / want.detach().norm())


def test_an_unknown_kind_of_keys_raises() -> None:
    with pytest.raises(ArgumentError, match="'random', 'repeated' or 'correlated'"):
        draw("sorted", 1, 8, 4, 0, CPU)


def test_the_model_of_the_study_has_no_biases() -> None:
    assert not [name for name, _ in Model(Gradients(), 1, 0).named_parameters() if name.endswith("bias")]


def test_correlated_keys_are_of_words_by_zipfs_law(monkeypatch: pytest.MonkeyPatch) -> None:
    """Word r has a probability proportional to 1 / r; words have norm sqrt(width)."""
    seen = []
    monkeypatch.setattr(tokens_, "pad", lambda x, ends: seen.append(x) or torch.nn.functional.pad(x, ends))
    generator = torch.Generator().manual_seed(0)
    drawn = []

    def normal(*shape: int) -> Tensor:
        drawn.append(torch.randn(shape, generator=generator, dtype=torch.float64))
        return drawn[-1]

    tokens_.KINDS["correlated"](normal, 1, 20000, 8)
    embedding, _, project = drawn[:3]
    words = torch.nn.functional.normalize(embedding / torch.arange(1, 9, dtype=torch.float64).sqrt(), dim=-1) * 8**0.5
    projected = words @ project / 8**0.5
    apart = (seen[0][0][:, None] - projected[:4]).abs().amax(-1)
    shares = (apart < 1e-9).double().mean(0)
    whole = (1 / torch.arange(1, 1001)).sum()
    torch.testing.assert_close(shares, (1 / torch.arange(1, 5) / whole).double(), rtol=0.1, atol=0)
