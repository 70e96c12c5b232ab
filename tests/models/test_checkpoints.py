"""Saved models load unchanged; damaged checkpoints and wrong configurations are refused."""

import json
import subprocess
import sys

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from kalmix import ArgumentError
from kalmix.errors import FormatError
from kalmix.files import FORMAT
from kalmix.models import KalmixConfig, KalmixForCausalLM, hybrid_layers
from kalmix.ops import Chebyshev, Fixed, Sketch

from .conftest import build, tokens


@torch.no_grad()
@pytest.mark.parametrize("tie", [False, True])
def test_saved_model_is_loaded_bit_equal(tmp_path, model, tie):
    if tie:
        model = build("hybrid", tie_word_embeddings=True)
    model.save_pretrained(tmp_path)
    again = KalmixForCausalLM.from_pretrained(tmp_path)
    assert not again.training
    assert again.config.to_dict() | {"_name_or_path": ""} == model.config.to_dict() | {"_name_or_path": ""}
    for (name, old), (_, new) in zip(model.state_dict().items(), again.state_dict().items(), strict=True):
        assert torch.equal(old, new), name
    for parameter in again.parameters():  # the alignment of the file's memory changes the order of sums
        parameter.data = parameter.data.clone()
    assert torch.equal(again(tokens(2, 5)).logits, model(tokens(2, 5)).logits)
    assert (again.lm_head.weight is again.model.embed_tokens.weight) == tie
    assert type(AutoModelForCausalLM.from_pretrained(tmp_path)) is KalmixForCausalLM
    assert type(AutoConfig.from_pretrained(tmp_path)) is KalmixConfig


FRESH = """
import sys, torch
torch.set_num_threads(1)
from transformers import AutoModelForCausalLM
assert "kalmix" not in sys.modules
path = sys.argv[1]
model = AutoModelForCausalLM.from_pretrained(path, trust_remote_code=True)
saved = torch.load(path + "/saved.pt", weights_only=True)
with torch.no_grad():
    assert torch.equal(model(saved["ids"]).logits, saved["logits"])
assert torch.equal(model.generate(saved["ids"], max_new_tokens=4, do_sample=False), saved["text"])
model.save_pretrained(path + "/again")
"""


@pytest.mark.slow
def test_auto_classes_load_in_a_new_process(tmp_path):
    """`AutoModelForCausalLM` finds kalmix without an import of it, and its model saves the same files."""
    model = build("hybrid")
    model.save_pretrained(tmp_path)
    ids = tokens(1, 6)
    with torch.no_grad():
        saved = {"ids": ids, "logits": model(ids).logits}
    torch.save(saved | {"text": model.generate(ids, max_new_tokens=4, do_sample=False)}, tmp_path / "saved.pt")
    subprocess.run([sys.executable, "-c", FRESH, str(tmp_path)], check=True, capture_output=True, text=True)
    first, second = (json.loads((path / "config.json").read_text()) for path in (tmp_path, tmp_path / "again"))
    assert first == second
    module = (tmp_path / "again" / "modeling_kalmix.py").read_text()
    assert module.count("\n") == 1 and "from kalmix.models import" in module


@pytest.mark.parametrize("layers", ["kla", "bayesian", "ridge", "filters", "delta", "space"])
def test_half_precision_keeps_dynamics(tmp_path, layers):
    build(layers).save_pretrained(tmp_path)
    half = KalmixForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    for name, parameter in half.named_parameters():
        assert parameter.dtype == (torch.float32 if "dynamics." in name else torch.bfloat16), name
    out = half(tokens(1, 5), labels=tokens(1, 5))
    assert out.logits.dtype == torch.bfloat16 and torch.isfinite(out.loss)
    half.save_pretrained(tmp_path / "half")
    again = KalmixForCausalLM.from_pretrained(tmp_path / "half")
    assert all(torch.equal(old, new) for old, new in zip(half.parameters(), again.parameters(), strict=True))


@pytest.mark.parametrize("damage", ["truncated", "empty", "header", "missing weight", "other shape"])
def test_damaged_weights_are_refused(tmp_path, damage):
    model = build("kla")
    if damage == "missing weight":
        weights = {k: v for k, v in model.state_dict().items() if not k.endswith("log_step")}
        model.save_pretrained(tmp_path, state_dict=weights)
    else:
        model.save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    whole = path.read_bytes()
    if damage == "other shape":
        config = json.loads((tmp_path / "config.json").read_text()) | {"vocab_size": 50}
        (tmp_path / "config.json").write_text(json.dumps(config))
    elif damage != "missing weight":
        path.write_bytes({"truncated": whole[: len(whole) // 2], "empty": b"", "header": b"x" * 64}[damage])
    with pytest.raises(
        ArgumentError, match=r"damaged \(model.safetensors (is damaged|lacks 2 weights|holds '.*' of shape)"
    ):
        KalmixForCausalLM.from_pretrained(tmp_path)


def test_damaged_config_is_refused(tmp_path):
    build("kla").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"layers": ["mamba9"]}))
    with pytest.raises(ArgumentError, match="'mamba9'"):
        KalmixForCausalLM.from_pretrained(tmp_path)
    for old in (config | {"format": 2}, {key: value for key, value in config.items() if key != "format"}):
        (tmp_path / "config.json").write_text(json.dumps(old))
        with pytest.raises(ArgumentError, match=r"`format` is [012] in '.*config\.json'; expected at least 3"):
            KalmixForCausalLM.from_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config | {"format": FORMAT + 1}))
    with pytest.raises(FormatError, match=rf"`format` is {FORMAT + 1} in '.*config\.json'; expected at most {FORMAT}"):
        KalmixForCausalLM.from_pretrained(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ArgumentError, match=r"config\.json is damaged"):
        KalmixForCausalLM.from_pretrained(tmp_path)


def test_a_model_of_format_3_has_a_decay_per_key(tmp_path):
    model = build([{"mixer": "bayesian", "decays_per_head": "key"}, "kla"])
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["format"] == 4
    (tmp_path / "config.json").write_text(json.dumps(config | {"format": 3, "layers": ["bayesian", "kla"]}))
    loaded = KalmixForCausalLM.from_pretrained(tmp_path)
    ids = torch.arange(8)[None]
    torch.testing.assert_close(loaded.eval()(ids).logits, model.eval()(ids).logits)
    loaded.save_pretrained(tmp_path)  # now it says so
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["format"] == 4 and config["layers"][0] == {"mixer": "bayesian", "decays_per_head": "key"}
    assert KalmixConfig(layers=["bayesian"]).layers == ["bayesian"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layers": ["mamba9"]}, "'mamba9'.*'kla', .*'attention'"),
        ({"layers": [{"mixer": "kla", "heads": 3}]}, "`heads` is not an option.*'slots'"),
        ({"layers": [{"slots": 3}]}, "contains.*'mixer'"),
        ({"layers": [3]}, "contains 3"),
        ({"layers": []}, "list"),
        ({"layers": 3}, "list"),
        ({"layers": "klaa"}, "'klaa'"),
        ({"layers": ["kla"], "num_hidden_layers": 2}, "`num_hidden_layers` is 2; expected 1"),
        ({"layers": "kla", "num_hidden_layers": 0}, "num_hidden_layers"),
        ({"num_attention_heads": 0}, "num_attention_heads"),
        ({"intermediate_size": "wide"}, "intermediate_size"),
        ({"layers": [{"mixer": "kla", "mlp": -1}]}, "mlp"),
        ({"hidden_size": 0}, "hidden_size"),
        ({"hidden_size": "wide"}, "hidden_size"),
        ({"vocab_size": -1}, "vocab_size"),
        ({"loss": "hinge"}, "'hinge'.*'marginal'"),
        ({"loss_samples": 0}, "loss_samples"),
        ({"norm_eps": -1.0}, "norm_eps"),
        ({"propagate": "everything"}, "propagate"),
    ],
)
def test_wrong_configuration_is_refused(options, message):
    with pytest.raises(ArgumentError, match=message):
        KalmixConfig(**({"layers": ["kla"]} | options))


def test_default_sizes():
    config = KalmixConfig(vocab_size=64, hidden_size=32, layers=["kla", {"mixer": "attention", "heads": 4}, "kla"])
    model = KalmixForCausalLM(config)
    kla, attention, _ = model.model.layers
    assert (kla.mixer.slots, kla.mixer.channels, kla.mlp) == (16, 32, None)
    assert attention.mixer.heads == attention.mixer.kv_heads == 4
    assert attention.mlp.out_proj.in_features == 88  # 8/3 of 32, rounded up to a multiple of 8
    for weight in (model.model.embed_tokens.weight, model.lm_head.weight):
        assert float(weight.detach().std()) == pytest.approx(0.02, rel=0.1)
    assert (kla.mixer.skip == 1).all() and (kla.mixer.dynamics.log_rate == 0).all()
    assert config.num_hidden_layers == 3 and KalmixConfig().num_hidden_layers == 12


def test_gated_kalmanet_has_the_published_size():
    """Check the smallest model of table 4 and the hybrid of section M."""
    with torch.device("meta"):
        model = KalmixForCausalLM(KalmixConfig(vocab_size=32000, hidden_size=1024, layers=["gated-kalmanet"] * 28))
    assert model.num_parameters() == pytest.approx(440e6, rel=0.03)
    layers = hybrid_layers()
    assert layers.count("gated-kalmanet") == 26 and layers.count("attention") == 4
    assert [place for place, name in enumerate(layers) if name == "attention"] == [6, 14, 22, 29]
    assert KalmixConfig(layers=layers).num_hidden_layers == 30
    mine = hybrid_layers("kla", blocks=3, attention_at=[0], attention={"mixer": "attention", "heads": 2})
    assert mine == [{"mixer": "attention", "heads": 2}, "kla", "kla"]
    positions = ([30], [-1], [3, 3], [1.0], "1", 3, None)
    others = ({"blocks": 0}, {"mixer": None}, {"attention": ["kla"]})
    for wrong in (*({"attention_at": x} for x in positions), *others):
        with pytest.raises(ArgumentError, match=next(iter(wrong))):
            hybrid_layers(**wrong)


def test_solvers_are_stored_as_mappings():
    """The configuration converts solvers for JSON; the layers convert them back."""
    entry = {"mixer": "gated-kalmanet", "heads": 1, "ridge": Fixed(2.0), "solver": Sketch(4, Chebyshev(7))}
    config = KalmixConfig(vocab_size=9, hidden_size=8, layers=[entry])
    again = KalmixConfig(**json.loads(config.to_json_string()))
    assert again.layers == config.layers
    assert config.layers[0]["ridge"] == {"name": "fixed", "value": 2.0}
    mixer = KalmixForCausalLM(again).model.layers.mixers[0]
    assert (mixer.ridge, mixer.solver) == (Fixed(2.0), Sketch(4, Chebyshev(7)))


@pytest.mark.parametrize("logit_cap", [None, 0.5])
def test_resized_vocabulary(logit_cap):
    for tie in (False, True):
        model = build("kla", tie_word_embeddings=tie, logit_cap=logit_cap)
        expected = model(tokens(1, 4)).logits
        model.resize_token_embeddings(50, mean_resizing=False)
        logits = model(tokens(1, 4)).logits
        assert logits.shape[-1] == model.config.vocab_size == 50
        torch.testing.assert_close(logits[..., :40], expected)
        assert (model.lm_head.weight is model.model.embed_tokens.weight) == tie
