"""Converted flash-linear-attention checkpoints have the logits of the published equations."""

import json
import math

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file

from kalmix import ArgumentError
from kalmix.models import KalmixForCausalLM
from kalmix.models.convert import convert_gated_deltanet, load_gated_deltanet

BASE = {
    **{"model_type": "gated_deltanet", "vocab_size": 30, "hidden_size": 12, "num_hidden_layers": 2},
    **{"num_heads": 2, "head_dim": 4, "expand_v": 1.5, "intermediate_size": 10, "norm_eps": 1e-5},
}
VARIANTS = {
    "plain": {},
    "grouped": {"num_v_heads": 4, "allow_neg_eigval": True},
    "tied": {"tie_word_embeddings": True, "output_gate_activation": "sigmoid", "norm_eps": 1e-6},
    "bare": {"use_gate": False, "use_short_conv": False},
    "wide": {"intermediate_size": None, "hidden_ratio": 2},
}


def checkpoint(config):
    """Return random weights with the names and shapes of flash-linear-attention 0.6.0."""
    torch.manual_seed(0)
    d, h, k = config["hidden_size"], config["num_heads"], config["head_dim"]
    g = config.get("num_v_heads") or h
    v = int(k * config["expand_v"])
    inner = config["intermediate_size"] or 256
    shapes = {"model.embeddings.weight": (config["vocab_size"], d), "model.norm.weight": (d,)}
    if not config.get("tie_word_embeddings"):
        shapes["lm_head.weight"] = (config["vocab_size"], d)
    for i in range(config["num_hidden_layers"]):
        layer = {"attn_norm.weight": (d,), "mlp_norm.weight": (d,), "attn.o_norm.weight": (v,)}
        layer |= {"attn.q_proj.weight": (h * k, d), "attn.k_proj.weight": (h * k, d), "attn.v_proj.weight": (g * v, d)}
        layer |= {"attn.a_proj.weight": (g, d), "attn.b_proj.weight": (g, d), "attn.A_log": (g,), "attn.dt_bias": (g,)}
        if config.get("use_short_conv", True):
            layer |= {f"attn.{n}_conv1d.weight": (w, 1, 4) for n, w in (("q", h * k), ("k", h * k), ("v", g * v))}
        if config.get("use_gate", True):
            layer["attn.g_proj.weight"] = (g * v, d)
        layer |= {"attn.o_proj.weight": (d, g * v), "mlp.down_proj.weight": (d, inner)}
        layer |= {"mlp.gate_proj.weight": (inner, d), "mlp.up_proj.weight": (inner, d)}
        shapes |= {f"model.layers.{i}.{name}": shape for name, shape in layer.items()}
    scaled = {
        name: torch.randn(shape) * (shape[-1] ** -0.5 if len(shape) > 1 else 0.3) for name, shape in shapes.items()
    }
    return {name: w + (1 if "norm" in name else 0) for name, w in scaled.items()}


def logits(config, weights, ids):
    """Compute equations 8 to 10 of Gated Delta Networks and their block, token by token, in float64."""
    w = {name: weight.double() for name, weight in weights.items()}
    eps = config["norm_eps"]

    def rms(x, name):
        return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * w[name]

    x = w["model.embeddings.weight"][ids]
    for i in range(config["num_hidden_layers"]):
        at = f"model.layers.{i}."
        x = x + attention(
            config, {n.removeprefix(at + "attn."): a for n, a in w.items()}, rms(x, at + "attn_norm.weight")
        )
        y = rms(x, at + "mlp_norm.weight")
        gate, up = y @ w[at + "mlp.gate_proj.weight"].T, y @ w[at + "mlp.up_proj.weight"].T
        x = x + (F.silu(gate) * up) @ w[at + "mlp.down_proj.weight"].T
    return rms(x, "model.norm.weight") @ w.get("lm_head.weight", w["model.embeddings.weight"]).T


def attention(config, w, x):
    heads, width = config["num_heads"], config["head_dim"]
    group = (config.get("num_v_heads") or heads) // heads
    found = {}
    for n in "qkv":
        y = x @ w[f"{n}_proj.weight"].T
        if config.get("use_short_conv", True):
            y = F.conv1d(F.pad(y.T[None], (3, 0)), w[f"{n}_conv1d.weight"], groups=y.shape[1])[0].T
        found[n] = F.silu(y).reshape(len(x), heads * (group if n == "v" else 1), -1)
    q, k = (found[n].repeat_interleave(group, 1) for n in "qk")
    q, k = (a / (a.square().sum(-1, keepdim=True) + 1e-6).sqrt() for a in (q, k))
    beta = (x @ w["b_proj.weight"].T).sigmoid() * (2 if config.get("allow_neg_eigval") else 1)
    alpha = (-w["A_log"].exp() * F.softplus(x @ w["a_proj.weight"].T + w["dt_bias"])).exp()
    state, reads = torch.zeros(heads * group, found["v"].shape[2], width, dtype=torch.float64), []
    for t in range(len(x)):
        for g in range(heads * group):
            erase = torch.eye(width, dtype=torch.float64) - beta[t, g] * torch.outer(k[t, g], k[t, g])
            state[g] = alpha[t, g] * state[g] @ erase + beta[t, g] * torch.outer(found["v"][t, g], k[t, g])
        reads.append(torch.einsum("gvk,gk->gv", state, q[t]) / math.sqrt(width))
    y = torch.stack(reads)
    y = y / (y.square().mean(-1, keepdim=True) + config["norm_eps"]).sqrt() * w["o_norm.weight"]
    y = y.flatten(1)
    if config.get("use_gate", True):
        act = torch.sigmoid if config.get("output_gate_activation") == "sigmoid" else F.silu
        y = y * act(x @ w["g_proj.weight"].T)
    return y @ w["o_proj.weight"].T


@torch.no_grad()
@pytest.mark.parametrize("name", VARIANTS)
def test_same_logits(name):
    config = BASE | VARIANTS[name]
    weights = checkpoint(config)
    ids = torch.randint(0, 30, (9,), generator=torch.Generator().manual_seed(1))
    model = convert_gated_deltanet(config, weights)
    assert not model.training
    torch.testing.assert_close(model(ids[None]).logits[0].double(), logits(config, weights, ids), atol=1e-5, rtol=0)


@torch.no_grad()
@pytest.mark.parametrize("shards", [1, 2])
def test_folder_is_loaded(tmp_path, shards):
    """Load a folder in bfloat16, in one file or two, then save and load it as a kalmix model."""
    weights = {name: weight.bfloat16() for name, weight in checkpoint(BASE).items()}
    (tmp_path / "config.json").write_text(json.dumps(BASE | {"fuse_norm": True, "torch_dtype": "bfloat16"}))
    names = sorted(weights)
    files = {"model.safetensors": names}
    if shards == 2:
        files = {"model-1.safetensors": names[:9], "model-2.safetensors": names[9:]}
        index = {"weight_map": {name: file for file, part in files.items() for name in part}}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    for file, part in files.items():
        save_file({name: weights[name] for name in part}, tmp_path / file)
    model, ids = load_gated_deltanet(tmp_path), torch.arange(6)
    torch.testing.assert_close(model(ids[None]).logits[0].double(), logits(BASE, weights, ids), atol=1e-5, rtol=0)
    model.save_pretrained(tmp_path / "ours")
    again = KalmixForCausalLM.from_pretrained(tmp_path / "ours")
    assert torch.equal(again(ids[None]).logits, model(ids[None]).logits)


@torch.no_grad()
def test_older_checkpoints_are_loaded():
    weights, ids = checkpoint(BASE), torch.arange(6)
    expected = logits(BASE, weights, ids)
    for i in range(2):
        at = f"model.layers.{i}."
        up = weights.pop(at + "mlp.up_proj.weight")
        weights[at + "mlp.gate_proj.weight"] = torch.cat([weights[at + "mlp.gate_proj.weight"], up])
        weights[at + "attn.D"] = torch.ones(2)
    model = convert_gated_deltanet(BASE | {"norm_first": False}, weights)
    torch.testing.assert_close(model(ids[None]).logits[0].double(), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "mamba2"}, r"config\['model_type'\].*gated_deltanet"),
        ({"attn": {"layers": [1]}}, r"config\['attn'\]"),
        ({"attnres_block_size": 2}, "attnres_block_size"),
        ({"hidden_act": "powlu"}, "hidden_act"),
        ({"norm_first": True}, "norm_first"),
        ({"output_gate_activation": "tanh"}, "output_gate_activation"),
        ({"head_dim": 8}, r"q_proj.*\[56, 12\]"),
        ({"num_hidden_layers": 3}, r"layers.2.attn_norm.weight"),
        ({"num_hidden_layers": 1}, r"layers.1.attn.A_log"),
        ({"use_gate": False}, r"g_proj"),
    ],
)
def test_unsupported_config_is_refused(change, message):
    with pytest.raises(ArgumentError, match=message):
        convert_gated_deltanet(BASE | change, checkpoint(BASE))


def test_broken_folders_are_refused(tmp_path):
    with pytest.raises(ArgumentError, match=r"config\.json"):
        load_gated_deltanet(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(BASE))
    with pytest.raises(ArgumentError, match=r"model\.safetensors"):
        load_gated_deltanet(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"nothing")
    with pytest.raises(ArgumentError, match=r"model\.safetensors"):
        load_gated_deltanet(tmp_path)
