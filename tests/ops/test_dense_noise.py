"""Tests of `dense` for nearly certain observations: the smallest accepted noise, its error, and accuracy."""

import pytest
import torch

from kalmix import ArgumentError, DenseBelief, Segments, checks, ops
from kalmix.layers import BayesianLayer
from kalmix.layers.parametrize import STATE_VARIANCES, VARIANCES
from kalmix.ops._dense import chunked, reference
from kalmix.ops._dense.block_sizes import TILE
from kalmix.ops._dense.signals import DenseSignals
from kalmix.testing import measure
from kalmix.testing.cases import Case, outputs, with_prior
from kalmix.testing.tolerances import relative_error
from kalmix.types import belief_dtype


def with_noise(value, scale=1.0, dtype=torch.float32, **changes):
    """Return arguments of a call whose last token has the given noise, with a prior of variance `scale`."""
    given = {name: torch.randn(2, 5, 2, 4, dtype=dtype) for name in "qkv"}
    given |= {name: torch.ones(2, 5, 2, dtype=dtype) for name in ("obs_noise", "process_noise")}
    given["obs_noise"][-1, -1, -1] = value
    state_dtype = belief_dtype(dtype)
    mean, eye = torch.zeros(2, 2, 4, 4, dtype=state_dtype), torch.eye(4, dtype=state_dtype)
    return given | {"belief": DenseBelief(mean, (scale * eye).expand_as(mean))} | changes


TOO_SMALL = "`obs_noise` has a minimum of {}; expected values of at least {} times the prior variance for beliefs in {}"


@pytest.mark.parametrize(
    ("noise", "scale", "dtype", "least"),
    [
        (5e-5, 1.0, torch.float32, "0.0001"),
        (5e-5, 1.0, torch.bfloat16, "0.0001"),
        (5e-6, 0.1, torch.float32, "0.0001"),
        (5e-5, 1e3, torch.float32, "0.0001"),
        (1e-13, 1.0, torch.float64, "2e-13"),
    ],
)
def test_too_small_obs_noise_raises_argument_error(noise, scale, dtype, least):
    state_dtype = "float64" if dtype == torch.float64 else "float32"
    message = TOO_SMALL.format(f"{float(torch.tensor(noise, dtype=dtype)):g}", least, state_dtype)
    for segments in (None, Segments.of(torch.tensor([[0, 0, 5], [1, 0, 5]]))):
        for kernel in ("reference", "chunked"):
            with pytest.raises(ArgumentError) as caught:
                ops.dense(**with_noise(noise, scale, dtype, segments=segments), kernel=kernel)
            assert message in str(caught.value)


@pytest.mark.parametrize(
    ("noise", "scale", "dtype"),
    [(1e-4, 1.0, torch.float32), (1e-7, 1e-3, torch.float32), (1e-4, 1e4, torch.float32), (1e-12, 1.0, torch.float64)],
)
def test_sufficient_obs_noise_is_accepted(noise, scale, dtype):
    """Prior variances above 1 count as 1, since process noise can raise those of a belief that is passed on."""
    ops.dense(**with_noise(noise, scale, dtype))
    padded = Segments.of(torch.tensor([[0, 0, 5], [1, 0, 4]]))  # the last token is padding
    ops.dense(**with_noise(1e-30, scale, dtype, segments=padded))


@pytest.mark.parametrize("op", ops.OPS.values(), ids=lambda op: op.name)
def test_docstring_states_the_smallest_noise(op):
    assert f"{op.least_noise:.0e}".replace("e-0", "e-") in op.function.__doc__


def test_layers_stay_above_the_smallest_noise():
    memories = [op.least_noise for op in ops.OPS.values() if op.name != "attend"]
    assert min(VARIANCES[name]["floor"] for name in ("obs_noise", "write_variance", "reset")) >= max(memories)
    assert STATE_VARIANCES["key_noise"]["floor"] >= ops.OPS["attend"].least_noise
    layer = BayesianLayer(32, heads=2, head_dim=8)
    torch.nn.init.constant_(layer.obs_noise.bias, -1e4)
    torch.nn.init.constant_(layer.process_noise.bias, 1e2)
    layer(torch.randn(1, 8, 32))
    state = None
    for _ in range(3):  # process noise raises the variance of the belief
        _, state = layer(torch.randn(1, 1, 32), state)


@pytest.mark.parametrize("kernel", ["reference", "chunked"])
@pytest.mark.parametrize("noise", [1e-5, 1e-9, 1e-30])
def test_too_small_noise_gives_finite_results_without_checks(kernel, noise):
    case = Case("dense", kernel, key_width=16, length=64)
    inputs = inputs_with_signals(case, (noise, 0.0, 0.0))
    inputs["k"] = inputs["k"][:, :1].expand_as(inputs["k"])
    leaves = {name: x.detach().requires_grad_() for name, x in inputs.items()}
    with checks(enabled=False):
        got = outputs(case.run(leaves))
        grads = torch.autograd.grad([x.sum() for x in got], list(leaves.values()))
    assert all(bool(torch.isfinite(x).all()) for x in (*got, *grads))


SMALLEST_NOISES = [
    (1e-4, 0.0, 0.0),
    (1e-4, 1e-6, -1e-3),
    (1e-4, 1e2, -0.1),
]  # noises of observation and process, log-decay


def inputs_with_signals(case, setting):
    """Return inputs of a case with constant observation noise, process noise and log-decay."""
    signals = dict(zip(("obs_noise", "process_noise", "log_decay"), setting, strict=True))
    inputs = case.inputs()
    return inputs | {name: torch.full_like(inputs[name], value) for name, value in signals.items()}


@pytest.mark.parametrize("setting", SMALLEST_NOISES, ids=str)
@pytest.mark.parametrize(
    ("width", "length"), [(3, 19), (16, 24), pytest.param(24, 32, marks=pytest.mark.slow), (33, 24)]
)
@pytest.mark.parametrize("problem", ["dense", "dense-turning"])
@pytest.mark.parametrize("kernel", ["chunked", "reference"])
def test_smallest_noise_is_within_the_error_budget(kernel, problem, width, length, setting):
    """In one call, token by token, and for gradients."""
    case = Case(problem, kernel, key_width=width, length=length, batch=1, value_heads=1)
    inputs = inputs_with_signals(case, setting)
    found = measure.forward_and_gradients(case, inputs)
    want, allowed = measure.expected_outputs(case, inputs)
    steps = []
    for t in range(length):
        now = with_prior(inputs, steps[-1].belief) if steps else inputs
        steps.append(case.run(case.tokens(now, t, t + 1)))
    reads = [torch.cat([getattr(step, name) for step in steps], 1) for name in ("mean", "variance")]
    found += measure.compare(case.quantities, [*reads, *steps[-1].belief], want, allowed)
    assert not [m for m in found if not m.ok]


WIDE = [(33, 20), pytest.param(16, 100, marks=pytest.mark.slow)]  # widths of keys and lengths
if torch.cuda.is_available():
    WIDE = [(16, 100), (64, 100), (128, 100), (200, 40)]


@pytest.mark.parametrize("decay", ["head", "key"])
@pytest.mark.parametrize("setting", SMALLEST_NOISES[:2], ids=str)
@pytest.mark.parametrize(("width", "length"), WIDE)
def test_smallest_noise_is_within_the_error_budget_in_triton(width, length, setting, decay):
    pytest.importorskip("triton")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    case = Case("dense", "triton", device, key_width=width, length=length, batch=1, value_heads=1)
    inputs = inputs_with_signals(case, setting)
    if decay == "head":
        inputs["log_decay"] = inputs["log_decay"][..., 0].contiguous()
    found = measure.forward_and_gradients(case, inputs)
    # The kernel factors the covariance of TILE tokens. With no more keys than tokens it is nearly singular, so each
    # rounding error of the prior variance p contributes eps p / r^2. Four are allowed here, 16 in the fuzz test.
    largest = float((inputs["prior.covariance"].diagonal(dim1=-2, dim2=-1)).max())
    tolerance = 4 * torch.finfo(torch.float32).eps * largest / setting[0] if width <= TILE else 0.0
    assert not [m for m in found if not m.error <= m.budget + tolerance]


@pytest.mark.parametrize("kernel", [chunked, reference])
def test_nearly_certain_tokens_do_not_amplify_rounding(kernel):
    """After 1000 tokens, the error of the covariance is a small multiple of its rounding error."""
    draw, length, width = torch.Generator().manual_seed(0), 1000, 16

    def unit():
        x = torch.randn(1, length, 1, width, generator=draw)
        return x / x.norm(dim=-1, keepdim=True)

    q, k, v = unit(), unit(), torch.randn(1, length, 1, 4, generator=draw)
    tokens = (q, k, v, torch.full((1, length, 1), 1e-4), torch.zeros(1, length, 1))
    prior = DenseBelief(torch.zeros(1, 1, width, 4), torch.eye(width)[None, None])
    got = kernel.dense(DenseSignals(*tokens, None, None), prior, None, True)
    doubled = DenseBelief(*(x.double() for x in prior))
    want = reference.dense(DenseSignals(*(x.double() for x in tokens), None, None), doubled, None, True)
    error = 16 * torch.finfo(torch.float32).eps / 1e-4 / length * width  # of a variance: eps p0 of r^2 K / T
    assert relative_error(got.mean, want.mean) < 1e-3
    assert relative_error(got.belief.covariance, want.belief.covariance) < error
    assert float(torch.linalg.eigvalsh(got.belief.covariance.double()).min()) > 0
