"""Converted Gated KalmaNet checkpoints have the logits of the authors' equations."""

import json
import math

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file

from kalmix import ArgumentError
from kalmix.models import KalmixForCausalLM
from kalmix.models.convert import convert_gated_kalmanet, load_gated_kalmanet

BASE = {
    **{"model_type": "hybrid_qwen3", "vocab_size": 30, "hidden_size": 12, "num_hidden_layers": 3},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4, "intermediate_size": 10},
    **{"rms_norm_eps": 1e-5, "hybrid_override_pattern": "GKA-*-GKA", "rope_parameters": {"rope_theta": 1e6}},
}
VARIANTS = {
    "plain": {},
    "not grouped": {"num_key_value_heads": 4, "rope_parameters": None, "rope_theta": 5e3},
    "tied": {"tie_word_embeddings": True, "hybrid_override_pattern": None, "layer_types": ["*", "GKA", "GKA"]},
    "bare": {"gka_config": {"use_beta_gate": False, "use_alpha_connection": False, "use_gate": False, "num_iter": 9}},
    "remembering": {"gka_config": {"use_forgetting_gate": False, "gla_rescale": False, "ridge_strength": 0.1}},
}


def checkpoint(config):
    """Return random weights with the names and shapes of the authors' model."""
    torch.manual_seed(0)
    d, heads, shared, k = (config[n] for n in ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim"))
    gka, inner = config.get("gka_config", {}), config["intermediate_size"]
    widths = {"q": heads * k, "k": shared * k, "v": shared * k}
    shapes = {"model.embed_tokens.weight": (config["vocab_size"], d), "model.norm.weight": (d,)}
    if not config.get("tie_word_embeddings"):
        shapes["lm_head.weight"] = (config["vocab_size"], d)
    for i, kind in enumerate(kinds(config)):
        at, name = f"model.layers.{i}.", "gka" if kind == "GKA" else "self_attn"
        layer = {f"{name}.{n}_proj.weight": (width, d) for n, width in widths.items()}
        layer[f"{name}.o_proj.weight"] = (d, heads * k)
        if kind == "GKA":
            layer |= {f"gka.{n}_conv1d.weight": (width, 1, 4) for n, width in widths.items()}
            layer |= {"gka.a_proj.weight": (heads, d), "gka.A_log": (heads,), "gka.dt_bias": (heads,)}
            layer["gka.o_norm.weight"] = (k,)
            for proj, option in (("b_proj", "use_beta_gate"), ("alpha_proj", "use_alpha_connection")):
                if gka.get(option, True):
                    layer |= {f"gka.{proj}.weight": (heads, d), f"gka.{proj}.bias": (heads,)}
            if gka.get("use_gate", True):
                layer["gka.g_proj.weight"] = (heads * k, d)
        else:
            layer |= {"self_attn.q_norm.weight": (k,), "self_attn.k_norm.weight": (k,)}
        layer |= {"input_layernorm.weight": (d,), "post_attention_layernorm.weight": (d,)}
        layer |= {
            "mlp.gate_proj.weight": (inner, d),
            "mlp.up_proj.weight": (inner, d),
            "mlp.down_proj.weight": (d, inner),
        }
        shapes |= {at + n: shape for n, shape in layer.items()}
    scaled = {n: torch.randn(shape) * (shape[-1] ** -0.5 if len(shape) > 1 else 0.3) for n, shape in shapes.items()}
    return {n: w + (1 if "norm" in n else 0) for n, w in scaled.items()}


def kinds(config):
    return (config.get("hybrid_override_pattern") or "-".join(config.get("layer_types") or [])).split("-")


def logits(config, weights, ids):
    """Compute the authors' model in float64: pre-norm blocks of attention or Gated KalmaNet, and SwiGLU."""
    w = {name: weight.double() for name, weight in weights.items()}

    x = w["model.embed_tokens.weight"][ids]
    for i, kind in enumerate(kinds(config)):
        at = f"model.layers.{i}."
        mix, name = (kalmanet, "gka.") if kind == "GKA" else (attention, "self_attn.")
        own = {n.removeprefix(at + name): a for n, a in w.items() if n.startswith(at + name)}
        x = x + mix(config, own, rms(x, w[at + "input_layernorm.weight"], config["rms_norm_eps"]))
        y = rms(x, w[at + "post_attention_layernorm.weight"], config["rms_norm_eps"])
        gate, up = y @ w[at + "mlp.gate_proj.weight"].T, y @ w[at + "mlp.up_proj.weight"].T
        x = x + (F.silu(gate) * up) @ w[at + "mlp.down_proj.weight"].T
    x = rms(x, w["model.norm.weight"], config["rms_norm_eps"])
    return x @ w.get("lm_head.weight", w["model.embed_tokens.weight"]).T


def rms(x, weight, eps):
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def kalmanet(config, w, x):
    """Compute Gated KalmaNet: scale keys and values by the write gate, then Chebyshev iteration and gated linear
    attention."""
    heads, shared, width = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]
    gka, found = config.get("gka_config", {}), {}
    for n in "qkv":
        y = F.conv1d(
            F.pad((x @ w[f"{n}_proj.weight"].T).T[None], (3, 0)),
            w[f"{n}_conv1d.weight"],
            groups=len(w[f"{n}_proj.weight"]),
        )
        found[n] = F.silu(y[0].T).reshape(len(x), -1, width)
    q, (k, v) = found["q"], (found[n].repeat_interleave(heads // shared, 1) for n in "kv")
    q, k = (a / (a.norm(dim=-1, keepdim=True) + 1e-6) for a in (q, k))
    if gka.get("use_beta_gate", True):
        beta = (x @ w["b_proj.weight"].T + w["b_proj.bias"]).sigmoid()[..., None]
        k, v = (beta + 1e-6) * k, (beta + 1e-6) * v
    alpha = torch.ones(len(x), heads, dtype=x.dtype)
    if gka.get("use_alpha_connection", True):
        alpha = (x @ w["alpha_proj.weight"].T + w["alpha_proj.bias"]).sigmoid()
    fade = torch.ones_like(alpha)
    if gka.get("use_forgetting_gate", True):
        fade = (-w["A_log"].exp() * F.softplus(x @ w["a_proj.weight"].T + w["dt_bias"])).exp()
    reads = torch.zeros_like(q)
    for head in range(heads):
        gram = cross = torch.zeros(width, width, dtype=x.dtype)
        for t in range(len(x)):
            gram = fade[t, head] * gram + torch.outer(k[t, head], k[t, head])
            cross = fade[t, head] * cross + torch.outer(v[t, head], k[t, head])
            solution = chebyshev(gram, q[t, head], gka.get("ridge_strength", 0.02), gka.get("num_iter", 30))
            reads[t, head] = cross @ (q[t, head] + alpha[t, head] * (solution - q[t, head]))
    reads = reads / math.sqrt(width) if gka.get("gla_rescale", True) else reads
    y = rms(reads, w["o_norm.weight"], 1e-6).flatten(1)
    if gka.get("use_gate", True):
        y = y * F.silu(x @ w["g_proj.weight"].T)
    return y @ w["o_proj.weight"].T


def chebyshev(gram, q, strength, iterations):
    """Compute algorithm 1 on [lambda, lambda + |H|], with momentum."""
    norm = gram.norm()
    least, most = strength * norm, (1 + strength) * norm
    rho, omega = (most - least) / (most + least), 2.0
    last, x = torch.zeros_like(q), 2 / (most + least) * q
    for _ in range(iterations):
        omega = 4 / (4 - rho**2 * omega)
        step = 2 * omega / (most + least) * (gram @ x + least * x - q)
        last, x = x, x - step + (omega - 1) * (x - last)
    return x


def attention(config, w, x):
    """Compute softmax attention with QK norm and rotary positions."""
    heads, shared, width = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]
    q, k, v = ((x @ w[f"{n}_proj.weight"].T).reshape(len(x), -1, width) for n in "qkv")
    base = (config.get("rope_parameters") or config)["rope_theta"]
    angle = torch.arange(len(x))[:, None] * base ** (-torch.arange(width // 2) * 2.0 / width)
    turn = torch.polar(torch.ones_like(angle), angle)[:, None].to(torch.complex128)
    q, k = (rms(a, w[f"{n}_norm.weight"], config["rms_norm_eps"]) for n, a in (("q", q), ("k", k)))
    q, k = (torch.complex(*a.chunk(2, -1)) * turn for a in (q, k))
    k, v = (a.repeat_interleave(heads // shared, 1) for a in (k, v))
    scores = torch.einsum("thd,shd->hts", q, k.conj()).real / math.sqrt(width)
    scores = scores.masked_fill(torch.ones(len(x), len(x)).triu(1).bool(), -math.inf)
    return torch.einsum("hts,shd->thd", scores.softmax(-1), v).flatten(1) @ w["o_proj.weight"].T


@torch.no_grad()
@pytest.mark.parametrize("name", VARIANTS)
def test_same_logits(name):
    config = BASE | VARIANTS[name]
    weights = checkpoint(config)
    ids = torch.randint(0, 30, (9,), generator=torch.Generator().manual_seed(1))
    model = convert_gated_kalmanet(config, weights)
    assert not model.training
    want = logits(config, weights, ids)
    torch.testing.assert_close(model.double()(ids[None]).logits[0], want, atol=1e-6, rtol=0)  # angles are float32
    # In float32, condition numbers up to 51, followed by a norm with epsilon 1e-6, amplify rounding.
    torch.testing.assert_close(model.float()(ids[None]).logits[0].double(), want, atol=1e-3, rtol=0)


@torch.no_grad()
def test_folder_is_loaded(tmp_path):
    """Load a folder in bfloat16, then save and load it as a kalmix model."""
    weights = {name: weight.bfloat16() for name, weight in checkpoint(BASE).items()}
    (tmp_path / "config.json").write_text(
        json.dumps(BASE | {"torch_dtype": "bfloat16", "gka_config": {"bp_lambda": True}})
    )
    save_file(weights, tmp_path / "model.safetensors")
    model, ids = load_gated_kalmanet(tmp_path), torch.arange(6)
    want = logits(BASE, weights, ids)
    torch.testing.assert_close(model.double()(ids[None]).logits[0], want, atol=1e-6, rtol=0)
    model.float().save_pretrained(tmp_path / "ours")
    again = KalmixForCausalLM.from_pretrained(tmp_path / "ours")
    assert torch.equal(again(ids[None]).logits, model(ids[None]).logits)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "hybrid_llama"}, r"config\['model_type'\].*hybrid_qwen3"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"attention_bias": True}, "attention_bias"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6}}, "rope_type"),
        ({"rope_parameters": None, "rope_scaling": {"type": "linear"}}, "rope_type"),
        ({"gka_config": {"kv_proj_rank": 8}}, "kv_proj_rank"),
        ({"gka_config": {"use_v_conv": False}}, "use_v_conv"),
        ({"gka_config": {"use_forgetting_gate_kk": False}}, "use_forgetting_gate_kk"),
        ({"gka_config": {"num_iter": 0}}, "iterations"),
        ({"hybrid_override_pattern": "GKA-M2-GKA"}, "'M2'"),
        ({"hybrid_override_pattern": "GKA-*"}, "has 2 entries"),
        ({"hybrid_override_pattern": "*-*-GKA"}, r"layers.0.self_attn.q_proj"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"head_dim": 8}, r"q_proj.*\[96, 12\]"),
        ({"gka_config": {"use_gate": False}}, r"g_proj"),
    ],
)
def test_unsupported_config_is_refused(change, message):
    with pytest.raises(ArgumentError, match=message):
        convert_gated_kalmanet(BASE | change, checkpoint(BASE))
