"""Layers of other packages equal their papers' equations, and raise clear errors where they are not supported."""

from __future__ import annotations

import sys
from importlib.metadata import version

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kalmix import ops
from kalmix.errors import ArgumentError
from kalmix.models import KalmixConfig, KalmixForCausalLM
from kalmix.segments import Segments
from kalmix_bench.experiments.recall.baselines import BASELINES, MLSTM, RWKV7, Mamba1, is_miscompiled
from kalmix_bench.experiments.recall.model_shape import ModelShape
from kalmix_bench.experiments.recall.models import build

WIDTH, TOKENS = 16, 21


def tokens(seed: int = 0) -> Tensor:
    return torch.randn(2, TOKENS, WIDTH, generator=torch.Generator().manual_seed(seed))


def shaken(layer: torch.nn.Module) -> torch.nn.Module:
    """With parameters away from their initial values, some of which are 0."""
    torch.manual_seed(1)
    for parameter in layer.parameters():
        if parameter.requires_grad:
            parameter.data.add_(0.2 * torch.randn_like(parameter))
    return layer


def wide(layer: torch.nn.Module) -> dict[str, Tensor]:
    return {name: weight.detach().double() for name, weight in layer.inner.state_dict().items()}


def convolved(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Each channel of `[B, T, C]` with its own taps `[C, 1, taps]`, causally."""
    padded = F.pad(x.transpose(1, 2), (weight.shape[-1] - 1, 0))
    return F.conv1d(padded, weight, bias, groups=weight.shape[0]).transpose(1, 2)


@pytest.mark.parametrize("conv", [4, 0])
def test_mamba_is_an_additive_memory(conv: int):
    """A head a channel, its one value written along B, forgotten by dt A, read along C."""
    layer = shaken(Mamba1(WIDTH, state_dim=4, expand=2, conv=conv))
    w, x = wide(layer), tokens().double()
    u, z = (x @ w["in_proj.weight"].T).chunk(2, -1)
    u = F.silu(convolved(u, w["conv1d.weight"], w["conv1d.bias"]) if conv else u)
    step, key, query = (u @ w["x_proj.weight"].T).split([w["x_proj.weight"].shape[0] - 8, 4, 4], -1)
    step = F.softplus(step @ w["dt_proj.weight"].T + w["dt_proj.bias"])
    decay = -step[..., None] * w["A_log"].exp()
    read = ops.additive(query[:, :, None], key[:, :, None], u[..., None], log_decay=decay, gain=step).mean[..., 0]
    expected = ((read + w["D"] * u) * F.silu(z)) @ w["out_proj.weight"].T
    torch.testing.assert_close(layer(tokens())[0].double(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("conv", [4, 0])
def test_mlstm_is_an_additive_memory_over_its_count(conv: int):
    """Values and a column of ones are written with gain exp(i); the read-out of values is divided by that of ones."""
    pytest.importorskip("xlstm")
    layer = shaken(MLSTM(WIDTH, heads=2, conv=conv))
    w, x = wide(layer), tokens().double()
    u, z = (x @ w["proj_up.weight"].T).chunk(2, -1)
    seen = F.silu(convolved(u, w["conv1d.conv.weight"], w["conv1d.conv.bias"]) if conv else u)

    def projected(x: Tensor, name: str) -> Tensor:
        blocks = w[f"{name}_proj.weight"]
        return torch.einsum("btnd,nod->btno", x.unflatten(-1, (blocks.shape[0], -1)), blocks).flatten(2)

    q, k, v = projected(seen, "q"), projected(seen, "k"), projected(u, "v")
    said = torch.cat([q, k, v], -1)
    gain, keep = (said @ w[f"mlstm_cell.{n}gate.weight"].T + w[f"mlstm_cell.{n}gate.bias"] for n in "if")
    q, k, v = (part.unflatten(-1, (2, -1)) for part in (q, k, v))
    values = torch.cat([v, torch.ones_like(v[..., :1])], -1)
    read = ops.additive(q, k / k.shape[-1] ** 0.5, values, log_decay=F.logsigmoid(keep), gain=gain.exp()).mean
    found = read[..., :-1] / read[..., -1:].abs().clamp(min=1)
    normed = F.layer_norm(found, found.shape[-1:]).flatten(2) * (1 + w["mlstm_cell.outnorm.weight"])
    expected = ((normed + w["learnable_skip"] * seen) * F.silu(z)) @ w["proj_down.weight"].T
    torch.testing.assert_close(layer(tokens())[0].double(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("shift", [True, False])
@pytest.mark.skipif(
    not torch.cuda.is_available() or is_miscompiled(torch.cuda.get_device_capability(), version("triton")),
    reason="flash-linear-attention has RWKV-7 for a GPU, and not for a Hopper one with Triton before 3.7.1",
)
def test_rwkv_is_a_generalised_delta_rule(shift: bool):
    """S' = S (diag(w) - kk (a kk)') + v k', read along r; token by token in float64."""
    layer = shaken(RWKV7(32, head_dim=16, shift=shift)).cuda()
    x = torch.randn(2, 70, 32, generator=torch.Generator().manual_seed(0)).cuda()
    expected = rwkv(wide(layer), x.double(), head=16, eps=layer.inner.g_norm.eps)
    for _ in range(4):  # a kernel that is compiled wrong may be right at first
        found = layer(x)[0]
        error = (found.double() - expected).abs().max() / expected.abs().max()
        assert error < 2e-2, error  # the package multiplies in TF32
        assert torch.isfinite(torch.autograd.grad(found.square().sum(), layer.inner.r_proj.weight)[0]).all()


def rwkv(w: dict[str, Tensor], x: Tensor, head: int, eps: float) -> Tensor:
    """RWKV-7's time mixing of `[B, T, D]`, from the paper."""
    before = F.pad(x, (0, 0, 1, -1))
    xr, xw, xk, xv, xa, xg = (x + (before - x) * w[f"x_{name}"] for name in "rwkvag")

    def lora(x: Tensor, name: str, activation: object = lambda x: x) -> Tensor:
        inner = activation(x @ w[f"{name}_lora.lora.0.weight"].T)
        return inner @ w[f"{name}_lora.lora.2.weight"].T + w.get(f"{name}_lora.lora.2.bias", 0)

    r, k, v = (part @ w[f"{name}_proj.weight"].T for part, name in ((xr, "r"), (xk, "k"), (xv, "v")))
    decay = torch.exp(-(torch.tensor(-0.5).exp().double()) * lora(xw, "w", torch.tanh).sigmoid())
    rate, gate = lora(xa, "a").sigmoid(), lora(xg, "g", torch.sigmoid)
    along = F.normalize((k * w["k_k"]).unflatten(-1, (-1, head)), dim=-1)
    k = k * (1 + (rate - 1) * w["k_a"])
    r, decay, k, v, rate = (part.unflatten(-1, (-1, head)) for part in (r, decay, k, v, rate))
    memory, read = x.new_zeros(x.shape[0], v.shape[2], head, head), []
    for t in range(x.shape[1]):
        erased = torch.einsum("bhvk,bhk->bhv", memory, along[:, t])[..., None] * (rate * along)[:, t, :, None]
        memory = memory * decay[:, t, :, None] - erased + v[:, t, ..., None] * k[:, t, :, None]
        read.append(torch.einsum("bhvk,bhk->bhv", memory, r[:, t]))
    y = torch.stack(read, 1).flatten(2)
    groups = v.shape[2]
    y = F.group_norm(y.flatten(0, 1), groups, w["g_norm.weight"], w["g_norm.bias"], eps).view_as(y)
    y = y + ((r * k * w["r_k"]).sum(-1, keepdim=True) * v).flatten(2)
    return (y * gate) @ w["o_proj.weight"].T


def test_state_sizes():
    """Sizes match the compared layers, and `state_size` equals the number of state elements."""
    assert Mamba1.options_for_state_size(128, 2048) == {"expand": 1, "state_dim": 16}  # as the paper's Table 11
    assert RWKV7.options_for_state_size(128, 2048) == {"head_dim": 16}
    assert MLSTM.options_for_state_size(128, 2048) == {"expand": 2, "heads": 32}
    mamba, mlstm = (
        Mamba1(128, **Mamba1.options_for_state_size(128, 2048)),
        MLSTM(128, **MLSTM.options_for_state_size(128, 2048)),
    )
    assert mamba.state_size(1) == mamba.inner.A_log.numel() == 2048
    assert mlstm.state_size(1) == 2048 + 256 + 32  # memories, normalisers, and how far each is scaled
    with pytest.raises(ArgumentError, match=r"2048; expected a positive multiple of 100"):
        Mamba1.options_for_state_size(100, 2048)


def test_initial_values_are_those_of_the_packages():
    """transformers initializes modules again; a package's own initial values must be kept."""
    torch.manual_seed(0)
    model = KalmixForCausalLM(KalmixConfig(vocab_size=9, hidden_size=WIDTH, layers=["mamba-1", "mlstm"]))
    mamba, mlstm = (mixer.inner for mixer in model.model.layers.mixers)
    torch.testing.assert_close(mamba.A_log, torch.arange(1, 17).log().expand_as(mamba.A_log))
    step = F.softplus(mamba.dt_proj.bias)
    assert 0.9e-3 < step.min() < step.max() < 0.11
    assert not mlstm.mlstm_cell.fgate.weight.any()
    assert mlstm.mlstm_cell.fgate.bias.min() == 3
    scaled = build(9, ModelShape(WIDTH, zoology_init=True), "mamba-1", 8, from_last=False).model.mixers[0].inner
    assert F.softplus(scaled.dt_proj.bias).max() < 0.11
    ids = torch.arange(8)[None]
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("make", [lambda: Mamba1(WIDTH, conv=0), lambda: MLSTM(WIDTH)])
def test_only_whole_sequences_are_accepted(make: object):
    layer = make()
    y, state = layer(tokens())
    assert torch.allclose(y[:, :9], layer(tokens()[:, :9])[0], atol=1e-5)  # and look at none to come
    with pytest.raises(ArgumentError, match=r"`state` is a NoState; expected None"):
        layer(tokens(), state)
    with pytest.raises(ArgumentError, match=r"`segments` .* whole sequences, one per row"):
        layer(tokens()[:1], segments=Segments.packed(torch.tensor([0, 3, TOKENS])))


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch):
    for name, package in (
        ("mlstm", "xlstm"),
        ("rwkv-7", "fla"),
        ("mamba-1", "transformers.models.mamba.modeling_mamba"),
    ):
        for module in [m for m in sys.modules if m == package or m.startswith(f"{package}.")]:
            monkeypatch.delitem(sys.modules, module)
        monkeypatch.setitem(sys.modules, package, None)
        with pytest.raises(ArgumentError, match=r"cannot be imported .*pip install './bench\[baselines\]'"):
            BASELINES[name](WIDTH)


@pytest.mark.filterwarnings("ignore:According to Bo", "ignore:Triton is not supported")
@pytest.mark.slow
def test_rwkv_requires_a_gpu_and_heads_that_divide_the_width():
    pytest.importorskip("fla")
    with pytest.raises(ArgumentError, match=f"a divisor of {WIDTH}"):
        RWKV7(WIDTH, head_dim=32)
    layer = RWKV7(WIDTH, head_dim=8)
    assert layer.state_size(1) == 128
    with pytest.raises(ArgumentError, match="expected a tensor on a GPU"):
        layer(tokens())


def test_rwkv_is_refused_where_it_is_miscompiled():
    assert is_miscompiled((9, 0), "3.6.0") and is_miscompiled((9, 0), "3.7.0+git1")
    assert (
        not is_miscompiled((9, 0), "3.7.1")
        and not is_miscompiled((8, 9), "3.6.0")
        and not is_miscompiled((9, 0), "3.3.1")
    )
