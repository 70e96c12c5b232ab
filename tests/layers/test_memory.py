"""Memory layers compared with the equations of their papers, token by token in float64."""

import json
import math

import pytest
import torch
import torch.nn.functional as F

from kalmix import ArgumentError
from kalmix.layers import (
    GLA,
    KDA,
    BayesianLayer,
    DeltaNet,
    DesignLayer,
    GatedDeltaNet,
    GatedKalmaNet,
    LinearAttention,
    Mamba2,
    MemoryState,
    RetNet,
)
from kalmix.layers.config_io import ridge_from_config, solver_from_config, to_config
from kalmix.layers.head_sizes import Heads
from kalmix.layers.parametrize import StepDecay
from kalmix.ops import Adaptive, Chebyshev, ConjugateGradient, Exact, Fixed, Sketch

from .conftest import shake

D, T = 12, 7
CLOSE = {"rtol": 1e-10, "atol": 1e-12}


def made(layer):
    torch.manual_seed(0)
    layer = layer.double()
    shake(layer)
    return layer, torch.randn(1, T, D, dtype=torch.float64)


def linear(x, module):
    return x @ module.weight.T + (0 if module.bias is None else module.bias)


def projected(layer, x):
    """Return queries, keys and values before normalisation, `[T, heads, width]`."""
    mixed = linear(x[0], layer.qkv_proj)
    if layer.conv is not None:
        taps = layer.conv.weight.shape[1]
        past = torch.cat([mixed.new_zeros(taps - 1, mixed.shape[1]), mixed])
        rows = [sum(past[t + tap] * layer.conv.weight[:, tap] for tap in range(taps)) for t in range(T)]
        mixed = torch.stack(rows) + (0 if layer.conv.bias is None else layer.conv.bias)
        mixed = mixed * mixed.sigmoid()
    h, g, k, v = layer.sizes
    q, key, value = mixed.split([h * k, h * k, g * v], -1)
    return *(a.reshape(T, h, k).repeat_interleave(g // h, 1) for a in (q, key)), value.reshape(T, g, v)


def unit(x):
    return x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()


def stepped(decay: StepDecay, raw):
    step = F.softplus(raw + decay.dynamics.step_bias)
    return step, decay.dynamics.log_rate.exp()


def walk(q, k, v, decay, gain, *, corrects):
    """Run M = decay M + gain k (v - [corrects] M'k)'; return M'q, `[T, G, V]`. Decay is `[T, G or 1, K or 1]`."""
    memory, reads = torch.zeros(k.shape[1], k.shape[2], v.shape[2], dtype=torch.float64), []
    for t in range(T):
        memory = decay[t][..., None] * memory
        error = v[t] - (torch.einsum("gkv,gk->gv", memory, k[t]) if corrects else 0)
        memory = memory + torch.einsum("gk,gv->gkv", gain[t][:, None] * k[t], error)
        reads.append(torch.einsum("gkv,gk->gv", memory, q[t]))
    return torch.stack(reads)


def projected_out(layer, reads, gate):
    normed = reads / (reads.square().mean(-1, keepdim=True) + 1e-5).sqrt() * layer.norm.weight
    return linear(normed.reshape(T, -1) * gate, layer.out_proj)


def silu(x):
    return x * x.sigmoid()


@pytest.mark.parametrize("negative", [False, True])
def test_deltanet(negative):
    layer, x = made(DeltaNet(D, heads=2, head_dim=3, negative_eigenvalues=negative))
    q, k, v = projected(layer, x)
    gain = (2 if negative else 1) * linear(x[0], layer.gain_proj).sigmoid()
    one = torch.ones(T, 1, 1, dtype=torch.float64)
    reads = walk(unit(q) / math.sqrt(3), unit(k), v, one, gain, corrects=True)
    torch.testing.assert_close(layer(x)[0][0], projected_out(layer, reads, 1), **CLOSE)


def test_gated_deltanet_with_grouped_values():
    layer, x = made(GatedDeltaNet(D, heads=4, key_heads=2, head_dim=3))
    q, k, v = projected(layer, x)
    step, rate = stepped(layer.decay, linear(x[0], layer.decay.proj))
    gain = linear(x[0], layer.gain_proj).sigmoid()
    reads = walk(unit(q) / math.sqrt(3), unit(k), v, (-rate * step).exp()[..., None], gain, corrects=True)
    gate = silu(linear(x[0], layer.gate_proj))
    torch.testing.assert_close(layer(x)[0][0], projected_out(layer, reads, gate), **CLOSE)


def test_kda():
    layer, x = made(KDA(D, heads=2, head_dim=3, expand_v=2))
    q, k, v = projected(layer, x)
    low, high = layer.decay.proj
    step, rate = stepped(layer.decay, linear(linear(x[0], low), high))
    decay = (-rate[:, None] * step.reshape(T, 2, 3)).exp()
    gain = linear(x[0], layer.gain_proj).sigmoid()
    reads = walk(unit(q) / math.sqrt(3), unit(k), v, decay, gain, corrects=True)
    low, high = layer.gate_proj
    gate = linear(linear(x[0], low), high).sigmoid()
    torch.testing.assert_close(layer(x)[0][0], projected_out(layer, reads, gate), **CLOSE)


def test_gla():
    layer, x = made(GLA(D, heads=2, rank=2))
    q, k, v = projected(layer, x)
    low, high = layer.decay_proj
    decay = linear(linear(x[0], low), high).sigmoid().pow(1 / 16).reshape(T, 2, 3)
    reads = walk(q / math.sqrt(3), k, v, decay, torch.ones(T, 2, dtype=torch.float64), corrects=False)
    gate = silu(linear(x[0], layer.gate_proj))
    torch.testing.assert_close(layer(x)[0][0], projected_out(layer, reads, gate), **CLOSE)


def test_linear_attention_is_a_weighted_mean():
    layer, x = made(LinearAttention(D, heads=2))
    q, k, v = projected(layer, x)
    weights = torch.einsum("tgk,sgk->gts", F.elu(q) + 1, F.elu(k) + 1).tril()
    means = torch.einsum("gts,sgv->tgv", weights / (weights.sum(-1, keepdim=True) + 1e-6), v)
    torch.testing.assert_close(layer(x)[0][0], linear(means.reshape(T, -1), layer.out_proj), **CLOSE)


def test_retnet_is_decayed_rotary_attention():
    """Equation 5 of the paper: weights gamma^(t - s) Re(q e^{i t theta} conj(k e^{i s theta})) / sqrt(K)."""
    layer, x = made(RetNet(D, heads=3))
    q, k, v = projected(layer, x)
    time, theta = torch.arange(T, dtype=torch.float64), 10000.0 ** (-torch.arange(2, dtype=torch.float64) / 2)
    turn = torch.polar(torch.ones(T, 1, 2, dtype=torch.float64), (time[:, None] * theta)[:, None])
    q, k = (torch.complex(a[..., :2], a[..., 2:]) * turn for a in (q, k))
    weights = torch.einsum("tgk,sgk->gts", q, k.conj()).real / 2
    gamma = 1 - 2.0 ** (-5 - torch.arange(3, dtype=torch.float64))
    fading = gamma[:, None, None] ** (time[:, None] - time).clamp(min=0)
    reads = torch.einsum("gts,sgv->tgv", (weights * fading).tril(), v)
    gate = silu(linear(x[0], layer.gate_proj))
    expected = projected_out(layer, reads, gate)
    torch.testing.assert_close(layer(x)[0][0], expected, **CLOSE)


def test_mamba2():
    layer, x = made(Mamba2(D, heads=4, groups=2, state_dim=5))
    c, b, v = projected(layer, x)
    step, rate = stepped(layer.decay, linear(x[0], layer.decay.proj))
    reads = walk(c, b, v, (-rate * step).exp()[..., None], step, corrects=False) + layer.skip[:, None] * v
    gated = (reads.reshape(T, -1) * silu(linear(x[0], layer.gate_proj))).reshape(T, 2, -1)
    normed = gated / (gated.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    expected = linear(normed.reshape(T, -1) * layer.norm_scale, layer.out_proj)
    torch.testing.assert_close(layer(x)[0][0], expected, **CLOSE)


GKA = {"heads": 4, "key_heads": 2, "head_dim": 3, "solver": Exact()}
ABLATIONS = [
    {},
    {"decay": False},
    {"gain": "squared"},
    {"gain": None},
    {"mix": False},
    {"gate": None},
    {"ridge": Fixed(0.25)},
    {"expand_v": 2, "conv": 3, "ridge": 0.1},
]


@pytest.mark.parametrize("options", ABLATIONS, ids=str)
def test_gated_kalmanet(options):
    """Solve the weighted ridge regression of equation 3 at every token from the whole history."""
    layer, x = made(GatedKalmaNet(D, **(GKA | options)))
    q, k, v = projected(layer, x)
    q, k = (a / (a.norm(dim=-1, keepdim=True) + 1e-6) for a in (q, k))
    none = torch.zeros(T, 4, dtype=torch.float64)
    fade, gain, mix = none, none + 1, none + 1
    if layer.decay is not None:
        step, rate = stepped(layer.decay, linear(x[0], layer.decay.proj))
        fade = -rate * step
    if layer.gain is not None:
        gain = linear(x[0], layer.gain_proj).sigmoid()
        gain = (gain + 1e-6) ** 2 if layer.gain == "squared" else gain
    if layer.mix_proj is not None:
        mix = linear(x[0], layer.mix_proj).sigmoid()
    reads, spreads = torch.zeros_like(v), torch.zeros_like(v)
    for g in range(4):
        for t in range(T):
            weights = gain[: t + 1, g] * torch.stack([fade[s + 1 : t + 1, g].sum().exp() for s in range(t + 1)])
            keys, values = k[: t + 1, g], v[: t + 1, g]
            gram = keys.T @ (weights[:, None] * keys)
            ridge = ridge_from_config(layer.ridge)
            strength = ridge.factor * gram.norm() if isinstance(ridge, Adaptive) else ridge.value
            solution = torch.linalg.solve(gram + strength * torch.eye(3, dtype=torch.float64), q[t, g])
            query = mix[t, g] * solution + (1 - mix[t, g]) * q[t, g]
            reads[t, g] = (weights[:, None] * values).T @ (keys @ query)
            spreads[t, g] = q[t, g] @ solution
    (mean, variance, _), _ = layer.read(x, variance=True)
    torch.testing.assert_close(mean[0], reads.reshape(T, -1), rtol=1e-8, atol=1e-10)
    torch.testing.assert_close(variance[0], spreads.reshape(T, -1), rtol=1e-8, atol=1e-10)
    gate = 1 if layer.gate_proj is None else silu(linear(x[0], layer.gate_proj))
    torch.testing.assert_close(layer(x)[0][0], projected_out(layer, reads, gate), rtol=1e-8, atol=1e-10)


def test_gated_kalmanet_iterations_stay_within_their_bound():
    """The published 30 iterations stay within their error bound of the exact solution."""
    layer, x = made(GatedKalmaNet(D, heads=2, head_dim=3))
    exact = GatedKalmaNet(D, heads=2, head_dim=3, solver="exact").double()
    exact.load_state_dict(layer.state_dict())
    assert layer.solver == Chebyshev(30) and layer.ridge == Adaptive(0.02)
    (got, _, _), _ = layer.read(x)
    (want, _, _), _ = exact.read(x)
    assert 0 < (got - want).abs().max() < 2 * 0.754**30 * 51 * want.abs().max()


@pytest.mark.parametrize("size", [0.0, 1e-30, 1e-12, 1e-4])
@pytest.mark.parametrize("ridge", [0.02, Fixed(0.25)])
def test_zero_and_tiny_keys_stay_finite(size, ridge):
    """Outputs, variances and gradients stay finite for zero and tiny keys, at the start and later."""
    torch.manual_seed(0)
    layer = GatedKalmaNet(D, heads=2, head_dim=3, ridge=ridge)
    x = torch.randn(2, T, D)
    x[0, :4] *= size
    x[1, 3:] *= size
    x.requires_grad_()
    found = layer.filter(x, variance=True)
    (found.mean.square().sum() + found.variance.sum()).backward()
    assert found.mean.isfinite().all() and found.variance.isfinite().all()
    assert x.grad.isfinite().all() and all(p.grad.isfinite().all() for p in layer.parameters())


@pytest.mark.parametrize(
    "value",
    [
        Adaptive(0.1),
        Fixed(2.0),
        Chebyshev(7, "unrolled"),
        ConjugateGradient(5),
        Exact(),
        Sketch(4, ConjugateGradient(3), seed=2),
    ],
)
def test_config_round_trip(value):
    """Convert to JSON and back, also with defaults omitted."""
    back = ridge_from_config if isinstance(value, Adaptive | Fixed) else solver_from_config
    config = json.loads(json.dumps(to_config(value)))
    assert back(config) == back(value) == value
    if not isinstance(value, Sketch):  # it has no default number of directions
        assert back(config["name"]) == type(value)()
    assert ridge_from_config(0.1) == Adaptive(0.1)


def test_names_in_a_config_are_texts():
    with pytest.raises(ArgumentError, match=r"`ridge` is {'name': \['fixed'\]}"):
        ridge_from_config({"name": ["fixed"]})


@pytest.mark.parametrize(("groups", "decays"), [(1, None), (1, "key"), (3, "key")])
def test_bayesian_layer(groups, decays):
    """Compare with the Kalman filter of each group in information form: precisions add, and the past decays."""
    layer, x = made(BayesianLayer(D, heads=2, head_dim=3, groups=groups, decays_per_head=decays))
    q, k, v = projected(layer, x)
    step, rate = stepped(layer.decay, linear(x[0], layer.decay.proj))
    decay = (-rate.reshape(2, -1).expand(2, 3) * step[..., None]).exp().repeat_interleave(groups, 1)
    process = F.softplus(linear(x[0], layer.process_noise.proj) + layer.process_noise.bias) + 1e-6
    noise = F.softplus(linear(x[0], layer.obs_noise.proj) + layer.obs_noise.bias) + 1e-4
    q, k, eye = unit(q) / math.sqrt(3), unit(k), torch.eye(3, dtype=torch.float64)
    reads, spreads = torch.zeros_like(v), torch.zeros_like(v)
    for g in range(layer.sizes.heads):
        mean, covariance = torch.zeros(3, v.shape[2], dtype=torch.float64), eye
        for t in range(T):
            fade = torch.diag(decay[t, g])
            predicted = fade @ covariance @ fade + process[t, g // groups] * eye
            covariance = torch.linalg.inv(torch.linalg.inv(predicted) + torch.outer(k[t, g], k[t, g]) / noise[t, g])
            evidence = torch.outer(k[t, g], v[t, g]) / noise[t, g]
            mean = covariance @ (torch.linalg.solve(predicted, fade @ mean) + evidence)
            reads[t, g], spreads[t, g] = mean.T @ q[t, g], q[t, g] @ covariance @ q[t, g]
    (mean, variance, _), _ = layer.read(x, variance=True)
    torch.testing.assert_close(mean[0], reads.reshape(T, -1), rtol=1e-8, atol=1e-10)
    torch.testing.assert_close(variance[0], spreads.reshape(T, -1), rtol=1e-8, atol=1e-10)
    gate = silu(linear(x[0], layer.gate_proj))
    expected = projected_out(layer, reads.reshape(T, 2, -1), gate)
    torch.testing.assert_close(layer(x)[0][0], expected, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("decays", [1, 2])
def test_bayesian_layer_shares_decays_of_adjacent_columns(decays):
    """The layer equals the one with a rate per column whose rates are repeated."""
    sharing, x = made(BayesianLayer(D, heads=2, head_dim=4, decays_per_head=decays))
    full = BayesianLayer(D, heads=2, head_dim=4, decays_per_head="key").double()
    weights, rate = sharing.state_dict(), "decay.dynamics.log_rate"
    assert weights[rate].shape == (2 * decays,)
    full.load_state_dict(weights | {rate: weights[rate].repeat_interleave(4 // decays)})
    got, expected = sharing.filter(x, variance=True), full.filter(x, variance=True)
    torch.testing.assert_close(got.mean, expected.mean, **CLOSE)
    torch.testing.assert_close(got.variance, expected.variance, **CLOSE)
    assert sharing.signals(x)["log_decay"].ndim == (3 if decays == 1 else 4)  # kernels are faster for one per head


def test_a_head_has_one_decay_and_with_rotations_one_per_column():
    assert BayesianLayer(D, heads=2, head_dim=4).decays_per_head == 1
    assert BayesianLayer(D, heads=2, head_dim=4, rotations=True).decays_per_head == 4
    assert BayesianLayer(D, heads=2, head_dim=4, decays_per_head="key").decays_per_head == 4
    with pytest.raises(ArgumentError, match="expected 4 or 'key' with rotations"):
        BayesianLayer(D, heads=2, head_dim=4, decays_per_head=1, rotations=True)


def test_rotation_by_zero_changes_nothing():
    """At frequency 0 the hidden halves stay 0: the layer equals the one without rotations."""
    turning, x = made(BayesianLayer(D, heads=2, head_dim=3, rotations=True))
    torch.nn.init.zeros_(turning.decay.dynamics.frequency)
    plain = BayesianLayer(D, heads=2, head_dim=3, decays_per_head="key").double()
    plain.load_state_dict({n: w for n, w in turning.state_dict().items() if "frequency" not in n})
    got, expected = turning.filter(x, variance=True), plain.filter(x, variance=True)
    torch.testing.assert_close(got.mean, expected.mean, **CLOSE)
    torch.testing.assert_close(got.variance, expected.variance, **CLOSE)


def test_variance_is_that_of_samples():
    """The variance after the output norm matches 4,000 samples for wide heads, with small and large variances."""
    torch.manual_seed(0)
    layer = BayesianLayer(32, heads=2, head_dim=64)
    x = torch.randn(1, 6, 32)
    found, context = layer.read(x, variance=True)
    for certainty in (1e-3, 1.0, 1e3):
        gate, mean = context[0], certainty * found.mean
        draws = mean + found.variance.sqrt() * torch.randn(4000, *mean.shape)
        spread = layer.project_out(draws, (gate, mean)).var(0)
        stated = layer.project_out_variance(found.variance, (gate, mean))
        # The standard error of a variance from 4,000 samples is sqrt(2 / 4000) = 2%; the worst of 192 has 4 of these.
        # With 128 columns per head, the mean square deviates from its expectation by sqrt(2 / 128) = 13%.
        torch.testing.assert_close(stated, spread, rtol=0.2, atol=1e-12)
        assert abs((stated / spread).log().mean()) < 0.03


def test_published_sizes():
    assert Heads.of(1024, heads=None, head_dim=None, expand_v=2.0, share=0.75) == (6, 6, 128, 256)
    assert Heads.of(1024, heads=4, head_dim=256, expand_v=1.0) == (4, 4, 256, 256)
    assert Heads.of(64, heads=None, head_dim=None, expand_v=1.0) == (4, 4, 16, 16)
    assert GatedKalmaNet(1024).sizes == (8, 8, 128, 128)
    assert GatedKalmaNet(2560).sizes == (20, 20, 128, 128)
    assert Mamba2(256).sizes == (1, 8, 128, 64)
    weights = sum(p.numel() for p in GatedDeltaNet(1024).parameters())
    assert abs(weights / 1024**2 - 6) < 0.05


def test_dynamics_parameters_of_each_layer():
    slow = {id(p) for p in BayesianLayer(D, rotations=True).dynamics_parameters()}
    assert len(slow) == 3
    for layer in (GatedDeltaNet(D), KDA(D), Mamba2(D), GatedKalmaNet(D)):  # optimizers apply no weight decay to vectors
        assert not list(layer.dynamics_parameters())
        assert [p.ndim for p in layer.decay.dynamics.parameters()] == [1, 1]
    assert len(list(DesignLayer(D, design="bayesian").dynamics_parameters())) == 2
    assert len(list(DesignLayer(D, design="kla").dynamics_parameters())) == 3
    assert not list(DesignLayer(D, design="deltanet").dynamics_parameters())


def test_positions_continue_from_the_state():
    """The state stores the position of the next token."""
    layer, x = made(RetNet(D, heads=3))
    _, state = layer(x)
    assert isinstance(state, MemoryState) and state.conv_state.tolist() == [T]
    assert layer(x, state)[1].conv_state.tolist() == [2 * T]
