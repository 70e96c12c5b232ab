"""Properties of every layer: split calls, packing, padding, causality, gradients, dtypes, wrong arguments."""

import copy

import pytest
import torch
from torch.func import functional_call
from torch.utils._pytree import tree_leaves, tree_map

from kalmix import ArgumentError, Segments
from kalmix.designs import Covariance, Design, Evidence, Transition
from kalmix.layers import MIXERS, Attention, Mixer, mixer_class
from kalmix.layers.trajectory_base import TrajectoryLayer
from kalmix.ops import Exact
from layers.conftest import LAYERS

# A float32 layer sums a few dozen terms of about 1 in another order: about a hundred roundings of 6e-8.
CLOSE = {"atol": 1e-5, "rtol": 1e-5}
TIMED = [name for name, make in LAYERS.items() if isinstance(make(), TrajectoryLayer)]  # their tokens have times
OURS = [
    name for name, mixer in MIXERS.items() if mixer.__module__.startswith("kalmix.layers.")
]  # benchmarks add others


def tokens(layer: Mixer, batch: int, length: int) -> torch.Tensor:
    return torch.randn(batch, length, layer.hidden_size)


@pytest.mark.parametrize("cuts", [(0, 1, 2, 3, 11), (4, 4), (10,), tuple(range(1, 11))])
def test_split_calls_equal_one_call(layer, cuts):
    x = tokens(layer, 2, 11)
    whole = layer.filter(x, variance=True)
    state, parts = None, []
    for start, stop in zip((0, *cuts), (*cuts, 11), strict=True):
        part = layer.filter(x[:, start:stop], state, variance=True)
        parts, state = [*parts, part], part.belief
    torch.testing.assert_close(torch.cat([part.mean for part in parts], 1), whole.mean, **CLOSE)
    if layer.has_posterior:
        torch.testing.assert_close(torch.cat([part.variance for part in parts], 1), whole.variance, **CLOSE)
    probe = tokens(layer, 2, 1)
    torch.testing.assert_close(layer(probe, state)[0], layer(probe, whole.belief)[0], **CLOSE)


def test_packing_and_padding_ignore_nan_outside(layer):
    """Pack runs in any order, one of them empty, between NaN tokens; then continue them in another layout."""
    x = tokens(layer, 2, 11)
    apart = layer.filter(x, variance=True)
    packed = torch.full((1, 26, layer.hidden_size), torch.nan)
    packed[0, 2:9], packed[0, 14:16] = x[0, :7], x[1, :2]
    first = Segments.of(torch.tensor([[0, 14, 16], [0, 2, 9], [0, 13, 13]]))
    got = layer.filter(packed, None, first, variance=True)
    torch.testing.assert_close(got.mean[0, 2:9], apart.mean[0, :7], **CLOSE)
    torch.testing.assert_close(got.mean[0, 14:16], apart.mean[1, :2], **CLOSE)
    outside = [0, 1, 9, 10, 11, 12, 13, *range(16, 26)]
    assert (got.mean[0, outside] == 0).all()
    if layer.has_posterior:
        torch.testing.assert_close(got.variance[0, 2:9], apart.variance[0, :7], **CLOSE)
        assert (got.variance[0, outside] == 0).all()

    later = torch.full((2, 12, layer.hidden_size), torch.nan)
    later[1, 1:10], later[0, 5:9] = x[1, 2:], x[0, 7:]
    second = Segments.of(torch.tensor([[1, 1, 10], [0, 5, 9], [0, 2, 2]]))
    y, state = layer(later, got.belief, second)
    torch.testing.assert_close(y[1, 1:10], apart.mean[1, 2:], **CLOSE)
    torch.testing.assert_close(y[0, 5:9], apart.mean[0, 7:], **CLOSE)
    assert torch.isfinite(y).all()

    probe = tokens(layer, 1, 1)
    ended, fresh = state.take(torch.tensor([1])), state.take(torch.tensor([2]))
    torch.testing.assert_close(layer(probe, ended)[0], layer(probe, apart.belief.take(torch.tensor([0])))[0], **CLOSE)
    torch.testing.assert_close(layer(probe, fresh)[0], layer(probe)[0], **CLOSE)


def test_nan_padding_leaves_gradients_finite(layer):
    x = tokens(layer, 1, 26)
    x[0, :2] = x[0, 9:14] = torch.nan
    x.requires_grad_()
    layer(x, None, Segments.of(torch.tensor([[0, 14, 26], [0, 2, 9]])))[0].square().sum().backward()
    assert torch.isfinite(x.grad).all() and (x.grad[0, 9:14] == 0).all()
    for name, parameter in layer.named_parameters():
        assert parameter.grad is None or torch.isfinite(parameter.grad).all(), name


def test_output_is_causal(layer):
    x = tokens(layer, 1, 8)
    other = x.clone()
    other[:, 5:] = 1.0
    torch.testing.assert_close(layer(other)[0][:, :5], layer(x)[0][:, :5], **CLOSE)


def test_empty_input_keeps_the_state(layer):
    x = tokens(layer, 2, 5)
    _, state = layer(x)
    nothing, same = layer(x[:, :0], state)
    assert nothing.shape == (2, 0, layer.hidden_size)
    torch.testing.assert_close(layer(x, same)[0], layer(x, state)[0])
    assert layer(x[:, :0])[0].shape == nothing.shape


def test_every_parameter_has_a_gradient_without_tokens(layer):
    x = tokens(layer, 2, 5)
    for given, segments in ((x[:, :0], None), (x, Segments.of(torch.zeros(0, 3, dtype=torch.int32)))):
        state = None
        for _ in range(2):
            layer.zero_grad(set_to_none=True)
            y, state = layer(given, state, segments)
            y.sum().backward(retain_graph=True)
            missing = [name for name, p in layer.named_parameters() if p.grad is None]
            assert not missing, f"data parallelism waits for gradients of {missing}"


def test_gradients_reach_every_parameter_through_the_state(layer):
    x = tokens(layer, 2, 6).requires_grad_()
    _, state = layer(x[:, :5])
    layer(x[:, 5:], state)[0].square().sum().backward()
    assert (x.grad[:, :5] != 0).any()
    for name, parameter in layer.named_parameters():
        assert parameter.grad is not None and (parameter.grad != 0).any(), name
    cut = layer(x[:, :5])[1].detach()
    x.grad = None
    layer(x[:, 5:], cut)[0].sum().backward()
    assert (x.grad[:, :5] == 0).all()


def test_functional_calls_take_plain_tensors(layer):
    """`torch.func` replaces parameters by tensors that are not parameters."""
    x = tokens(layer, 1, 5)
    y, _ = functional_call(layer, {name: 1.1 * weight.detach() for name, weight in layer.named_parameters()}, (x,))
    with torch.no_grad():
        for weight in layer.parameters():
            weight.mul_(1.1)
    torch.testing.assert_close(y, layer(x)[0], **CLOSE)


class Adapter(torch.nn.Module):
    """Linear map plus one of rank 1, with the weight of the former, as PEFT's LoRA."""

    def __init__(self, base: torch.nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.down, self.up = torch.randn(1, base.in_features), torch.randn(base.out_features, 1)

    @property
    def weight(self) -> torch.Tensor:
        return self.base.weight

    @property
    def bias(self) -> torch.Tensor | None:
        return self.base.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + x @ self.down.mT @ self.up.mT


class NormAdapter(torch.nn.Module):
    """Norm in place of another, with the weight of the latter, as PEFT's LNTuning."""

    def __init__(self, base: torch.nn.Module) -> None:
        super().__init__()
        self.base, self.tuned = base, copy.deepcopy(base)
        torch.nn.init.normal_(self.tuned.weight)

    @property
    def weight(self) -> torch.Tensor:
        return self.base.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.tuned(x)


def test_adapters_act_like_their_merged_weights(layer):
    """In the mean, the variance and the state, whichever linear maps and norms have an adapter."""
    x, merged = tokens(layer, 1, 5), copy.deepcopy(layer)
    for name, linear in list(merged.named_modules()):
        if isinstance(linear, torch.nn.RMSNorm):
            layer.set_submodule(name, NormAdapter(linear))
            merged.set_submodule(name, layer.get_submodule(name).tuned)
        if isinstance(linear, torch.nn.Linear):
            adapter = Adapter(layer.get_submodule(name))
            with torch.no_grad():
                linear.weight.add_(adapter.up @ adapter.down)
            layer.set_submodule(name, adapter)
    rounded = {"atol": 1e-4, "rtol": 1e-4}  # the merged weights are rounded to float32: up to 3e-5
    torch.testing.assert_close(layer.filter(x, variance=True), merged.filter(x, variance=True), **rounded)


def test_hooks_see_no_calls_for_a_variance(layer):
    """A hook that stores activations must see those of the tokens last."""
    shapes, x = [], tokens(layer, 2, 5)
    for module in layer.modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_hook(lambda module, args, output: shapes.append(output.shape[:2]))
    layer.filter(x, variance=True)
    assert set(shapes) == {(2, 5)}


def test_diagnostics_have_one_number_per_token_or_pair_or_are_none(layer):
    x = tokens(layer, 2, 5)
    attention_map, write_gain = layer.attention_map(x), layer.write_gain(x)
    assert attention_map is None or (attention_map.shape[::2] == (2, 5) and attention_map.shape[3] == 5)
    assert write_gain is None or write_gain.shape == (2, 5)


def test_layers_run_on_the_meta_device(layer):
    """Tools that count memory or operations run models without data."""
    x = tokens(layer, 2, 2).to("meta")  # PyTorch computes shapes on this device in Python, operation by operation
    filtered = layer.to("meta").filter(x, variance=True)
    assert filtered.mean.shape == x.shape
    y, _ = layer(x, filtered.belief)
    y.sum().backward()
    assert all(weight.grad is not None for weight in layer.parameters())


@pytest.mark.parametrize("layer", TIMED, indirect=True)
def test_times_have_no_gradient(layer):
    """Kernels treat lags as constants in places, so a gradient of times would be only a part of it."""
    x, times = tokens(layer, 1, 6), torch.arange(6.0)[None]
    state = tree_map(lambda leaf: leaf.detach(), layer(x[:, :3])[1])
    leaves = [leaf.requires_grad_() for leaf in tree_leaves(state) if leaf.is_floating_point()]
    for timing in ({}, {"times": times[:, 3:].requires_grad_()}):
        y, _ = layer(x[:, 3:], state, **timing)
        for leaf, grad in zip(leaves, torch.autograd.grad(y.sum(), leaves, allow_unused=True), strict=True):
            assert (grad is None) == (leaf.dtype == torch.float64)


def test_states_convert_and_reorder(layer):
    _, state = layer(tokens(layer, 3, 4))
    moved = state.to(torch.float64)
    assert type(moved) is type(state)
    twice = state.take(torch.tensor([2, 0, 0]))
    for leaf, taken in zip(tree_leaves(state), tree_leaves(twice), strict=True):
        torch.testing.assert_close(taken, leaf[[2, 0, 0]])


def test_state_size_counts_the_numbers_of_the_belief(layer):
    for length in (0, 1, 6):
        _, state = layer(tokens(layer, 1, length))
        leaves = tree_leaves(getattr(state, "belief", state))
        assert layer.state_size(length) == sum(x.numel() for x in leaves if x.is_floating_point())


def assert_state_is_single(layer, state):
    """Check that what a filter stores is float32, apart from recent inputs of a convolution."""
    stored = [x.dtype for x in tree_leaves(getattr(state, "belief", state)) if x.is_floating_point()]
    assert stored and ((torch.half not in stored and torch.bfloat16 not in stored) or isinstance(layer, Attention))


def test_half_precision(layer):
    """bfloat16 weights and inputs, and autocast, agree to three digits; the state of every filter is float32."""
    x = tokens(layer, 2, 9)
    exact = layer(x)[0]
    with torch.autocast("cpu", torch.bfloat16):
        y, state = layer(x)
    assert (y - exact).abs().max() < 0.05 * exact.abs().max()
    assert_state_is_single(layer, state)
    half = layer.to(torch.bfloat16)
    y, state = half(x.bfloat16())
    assert y.dtype == torch.bfloat16
    assert (y - exact).abs().max() < 0.08 * exact.abs().max()
    assert_state_is_single(layer, state)


def test_double_precision(layer):
    x = tokens(layer, 1, 9)
    exact, _ = layer.double()(x.double())
    assert exact.dtype == torch.float64
    torch.testing.assert_close(layer.float()(x)[0], exact.float(), **CLOSE)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda layer, x: layer(x[..., 1:]), "x"),
        (lambda layer, x: layer(x[0]), "x"),
        (lambda layer, x: layer(x.double()), "x"),
        (lambda layer, x: layer(x.to("meta")), "x"),
        (lambda layer, x: layer.filter(x, variance="no"), "variance"),
        (lambda layer, x: layer(x, (x,)), "state"),
        (lambda layer, x: layer(x, layer(x[:1])[1]), "state"),
        (lambda layer, x: layer(x, layer(x)[1], Segments.of(torch.tensor([[0, 0, 5]]))), "state"),
    ],
)
def test_wrong_arguments(layer, call, says):
    with pytest.raises(ArgumentError, match=f"`{says}`"):
        call(layer, tokens(layer, 2, 5))


def test_repr_shows_sizes_and_state(layer):
    first = repr(layer).splitlines()[1]
    assert f"hidden_size={layer.hidden_size}" in first
    growth = layer.state_size(2) - layer.state_size(1)
    assert first.endswith(f"state: {growth} floats per token" if growth else f"state: {layer.state_size(1)} floats")


def test_table_of_layers_is_complete():
    papers = {"kla", "bayesian", "deltanet", "gated-deltanet", "kda", "linear-attention", "retnet", "gla", "mamba2"}
    papers |= {"gated-kalmanet", "afa", "rt-afa", "recurrent-afa", "afa-transformer", "controlled-afa"}
    assert set(OURS) == papers | {"attention", "design"}
    with pytest.raises(ArgumentError, match=r"'mamba9'.*'kla'"):
        mixer_class("mamba9", {})
    with pytest.raises(ArgumentError, match=r"`heads` is not an option of 'kla'.*'slots'"):
        mixer_class("kla", {"heads": 2})
    with pytest.raises(ArgumentError, match="`design` is missing from the options of 'design'"):
        mixer_class("design", {})
    with pytest.raises(ArgumentError, match="`options` is an object of type list"):
        mixer_class("kla", ["slots"])


def test_abstract_layers_cannot_be_built():
    with pytest.raises(TypeError, match="Mixer is an abstract class"):
        Mixer(12)


@pytest.mark.parametrize("size", [1, 7, 12, 48])
@pytest.mark.parametrize("name", [name for name in OURS if name != "attention"])
def test_defaults_for_any_width(name, size):
    options = {"design": "bayesian"} if name == "design" else {}
    layer = MIXERS[name](size, **options)
    assert layer(tokens(layer, 1, 3))[0].shape == (1, 3, size)


@pytest.mark.parametrize(
    ("name", "option"),
    [
        ("kla", {"slots": 0}),
        ("kla", {"expand": 0.5}),
        ("kla", {"rank": 0}),
        ("kla", {"discretization": "euler"}),
        ("attention", {"heads": 5}),
        ("attention", {"kv_heads": 3, "heads": 2}),
        ("attention", {"heads": 0}),
        ("attention", {"heads": 2, "head_dim": 3}),
        ("deltanet", {"heads": 0}),
        ("deltanet", {"head_dim": 2.5}),
        ("deltanet", {"expand_v": 0.0}),
        ("deltanet", {"expand_v": 1.5, "head_dim": 3}),
        ("deltanet", {"conv": -1}),
        ("gated-deltanet", {"heads": 4, "key_heads": 3}),
        ("kda", {"gate": "tanh"}),
        ("retnet", {"head_dim": 3}),
        ("gla", {"rank": 0}),
        ("mamba2", {"heads": 3, "groups": 2}),
        ("mamba2", {"state_dim": 0}),
        ("mamba2", {"expand": 0}),
        ("gated-kalmanet", {"gain": "linear"}),
        ("gated-kalmanet", {"ridge": 0}),
        ("gated-kalmanet", {"ridge": True}),
        ("gated-kalmanet", {"ridge": {"factor": 0.1}}),
        ("gated-kalmanet", {"ridge": {"name": "fixed", "factor": 0.1}}),
        ("gated-kalmanet", {"ridge": Exact()}),
        ("gated-kalmanet", {"solver": "newton"}),
        ("gated-kalmanet", {"solver": 30}),
        ("gated-kalmanet", {"solver": {"name": "chebyshev", "iterations": 0}}),
        ("gated-kalmanet", {"solver": {"name": "sketch"}}),
        ("bayesian", {"groups": 0}),
        ("afa", {"weight": "linear"}),
        ("afa", {"window": 0}),
        ("afa", {"iterations": 0}),
        ("afa", {"predict": "always"}),
        ("rt-afa", {"head_dim": 0}),
        ("recurrent-afa", {"iterations": True}),
        ("afa-transformer", {"mlp_width": 0}),
        ("controlled-afa", {"rank": 0}),
        ("bayesian", {"heads": 1, "head_dim": 2, "groups": 3}),
        ("bayesian", {"heads": 1, "head_dim": 4, "decays_per_head": 3}),
        ("bayesian", {"heads": 1, "head_dim": 4, "decays_per_head": "head"}),
        ("bayesian", {"heads": 1, "head_dim": 4, "decays_per_head": 2, "rotations": True}),
        ("design", {"design": "resnet"}),
        ("design", {"design": {"transition": {}}}),
        ("design", {"design": {"transition": {"mood": "dark"}, "evidence": {}, "covariance": {}}}),
        ("design", {"design": Design("m", Transition("matrix"), Evidence("memory"), Covariance("dense"))}),
    ],
)
def test_wrong_options(name, option):
    with pytest.raises(ArgumentError):
        MIXERS[name](12, **option)
