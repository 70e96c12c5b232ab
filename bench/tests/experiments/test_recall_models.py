"""Models of the benchmarks equal the published ones; layers have equal state sizes."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from kalmix import ArgumentError
from kalmix.analysis.layer_diagnostics import diagnose_layers
from kalmix.layers.modules import ShortConvolution
from kalmix.models.losses import marginal_likelihood, target_nll
from kalmix_bench.experiments.recall import LAYERS, ModelShape, Part, RecallCell, RecallProtocol
from kalmix_bench.experiments.recall.layers import parse_layer, sized, state_size
from kalmix_bench.experiments.recall.models import AutoEncoder, TokenModel, build, sinusoidal_positions
from kalmix_bench.experiments.recall.trainer import learning_rate_factor

MAD = ModelShape(128, state_size=2048)  # Table 11 of Kalman Linear Attention
ELSEWHERE = {"mamba-1", "mlstm", "rwkv-7", "attention"}
GROWING = {"attention", "afa", "rt-afa", "afa-transformer", "controlled-afa"}
UNSIZED = {"recurrent-afa", *GROWING}
OWN = [name for name in LAYERS if LAYERS[name]["mixer"] not in ELSEWHERE - {"attention"}]


@pytest.mark.parametrize("name", OWN)
def test_every_layer_has_the_matched_state_size(name: str) -> None:
    shape = replace(MAD, hidden_size=32, state_size=512)
    model = build(16, shape, name, 8, from_last=False)
    assert isinstance(model, TokenModel)
    assert model(torch.randint(16, (2, 8))).shape == (2, 8, 16)
    size = state_size(model.model.mixers[0])
    if name in GROWING:
        assert size is None
    elif name == "linear-attention":  # its sum of weights is one more column
        assert size == 512 + 4 * 16
    else:
        assert name in UNSIZED or size == 512


def test_sizes_are_those_of_table_11_and_of_table_3_of_memory_by_design() -> None:
    assert MAD.layer_options("kla") == {"mixer": "kla", "slots": 8}
    assert MAD.layer_options("gated-deltanet") == {
        "mixer": "gated-deltanet",
        "heads": 4,
        "head_dim": 16,
        "expand_v": 2.0,
    }
    assert MAD.layer_options("gla")["heads"] * MAD.layer_options("gla")["head_dim"] == 0.5 * 128
    assert MAD.layer_options("mamba2") == {"mixer": "mamba2", "heads": 4, "head_dim": 32, "state_dim": 16}
    assert MAD.layer_options("mamba-1") == {"mixer": "mamba-1", "expand": 1, "state_dim": 16}
    theirs = ModelShape(128, depth=2, state_size=8192, value_expansion=2.0)
    assert theirs.layer_options("bayesian")["head_dim"] == 32
    assert theirs.layer_options("gated-deltanet") == {
        "mixer": "gated-deltanet",
        "heads": 4,
        "head_dim": 32,
        "expand_v": 2.0,
    }
    assert theirs.layer_options("kla-noise-free") == {"mixer": "kla", "process_noise": False, "slots": 32}
    with pytest.raises(ArgumentError, match="`state`"):
        sized(parse_layer("kla"), 96, 1000, 4)


def test_unknown_layers_list_the_nearest_names() -> None:
    with pytest.raises(ArgumentError, match=r"'gated-delta-net'.*gated-deltanet"):
        parse_layer("gated-delta-net")


def test_options_replace_those_of_a_name_and_other_sizes_follow_from_the_state() -> None:
    assert MAD.layer_options('kla:{"slots": 3}') == {"mixer": "kla", "slots": 3}
    assert MAD.layer_options('kla-noise-free:{"process_noise": true}') == {
        "mixer": "kla",
        "process_noise": True,
        "slots": 8,
    }
    assert (
        MAD.layer_options('gated-deltanet:{"heads": 2}')["head_dim"] == 16
    )  # 2 heads of 16 x 64 numbers are 2,048, too
    assert MAD.layer_options('mamba2:{"state_dim": 4}') == {
        "mixer": "mamba2",
        "heads": 4,
        "head_dim": 32,
        "state_dim": 4,
    }
    assert MAD.layer_options('bayesian:{"head_dim": 8}') == {
        "mixer": "bayesian",
        "decays_per_head": "key",
        "heads": 4,
        "head_dim": 8,
        "expand_v": 1.0,
    }
    assert MAD.layer_options('design:{"design": "deltanet"}')["design"] == "deltanet"
    assert MAD.layer_options('kla:{"samples": 5}') == {"mixer": "kla", "samples": 5, "slots": 8}
    built = build(
        16, replace(MAD, hidden_size=32, state_size=512), 'gated-deltanet:{"heads": 2, "conv": 0}', 8, from_last=False
    )
    assert state_size(built.model.mixers[0]) == 512


def test_a_layer_has_one_name_however_its_options_are_written() -> None:
    cell = RecallCell("mqar", (Part.of(1, 1),), 'kla:{"slots":8, "expand":1}', MAD, RecallProtocol(1, 1, 1), 0)
    assert cell.layer == 'kla:{"expand": 1, "slots": 8}' and cell == replace(cell, layer=cell.layer)
    assert replace(cell, layer="kla:{}").layer == "kla"
    assert replace(cell, layer="kla").to_dict()["mixer"] == {"mixer": "kla", "slots": 8}


def test_mads_model_is_as_published() -> None:
    model = TokenModel(16, ModelShape(128), "attention").model
    heads = 128 * 16 + 16
    own = 4 * 128 * 128 + sum(x.numel() for name, x in model.mixers[0].named_parameters() if "norm" in name)
    assert sum(x.numel() for x in model.parameters()) == 16 * 128 + 128 + own + 128 + heads
    assert float(model.embed_tokens.get_parameter("weight").detach().std()) == pytest.approx(0.02, rel=0.05)
    head = model.lm_head
    assert isinstance(head, torch.nn.Linear) and not head.bias.any()
    assert float(head.weight.detach().abs().max()) == pytest.approx(128**-0.5, rel=0.05)  # as PyTorch draws it


def test_the_autoencoder_uses_only_the_last_token() -> None:
    torch.manual_seed(0)
    shape = ModelShape(32, decoder=(24, 12))
    model = build(16, shape, "gated-deltanet", 6, from_last=True)
    assert isinstance(model, AutoEncoder)
    ids = torch.randint(16, (3, 6))
    (stream,) = model.encoder.hidden_states(ids)
    first, one, _, second, two, _, norm, last = model.decoder
    x = F.gelu(one(first(stream[:, -1:] + sinusoidal_positions(6, 32))))
    x = F.gelu(two(second(x)))
    torch.testing.assert_close(model(ids), last(norm(x)))
    assert one.get_parameter("weight").shape == (24, 32) and two.get_parameter("weight").shape == (12, 24)
    assert sinusoidal_positions(6, 32)[3, 0] == pytest.approx(math.sin(3)) and sinusoidal_positions(6, 32)[
        3, 16
    ] == pytest.approx(math.cos(3))
    assert sinusoidal_positions(6, 32)[3, 15] == pytest.approx(math.sin(3e-4))


def test_encoder_and_decoder_mlps() -> None:
    torch.manual_seed(0)
    model = build(16, ModelShape(32, encoder=20, decoder=(24, 12)), "gated-deltanet", 6, from_last=False)
    assert isinstance(model, TokenModel)
    ids = torch.randint(16, (3, 6))
    norm, up, _, down = model.get_submodule("encoder").children()
    embedded = down(F.gelu(up(norm(model.model.embed_tokens(ids)))))
    (stream,) = model.hidden_states(ids)
    torch.testing.assert_close(stream, model.model(embedded).hidden_state)
    torch.testing.assert_close(diagnose_layers(model.model.layers, model.embed(ids[0]))[0], stream[0])
    first, (one, _, second, two, _, third, last) = model.model.norm, model.model.get_submodule("lm_head").children()
    torch.testing.assert_close(model(ids), last(third(F.gelu(two(second(F.gelu(one(first(stream)))))))))
    assert up.get_parameter("weight").shape == (20, 32) and two.get_parameter("weight").shape == (12, 24)
    assert float(last.get_parameter("weight").detach().std()) == pytest.approx(0.02, rel=0.2)


def test_kla_plus_uses_the_marginal_likelihood() -> None:
    torch.manual_seed(0)
    ids, targets = torch.randint(16, (3, 6)), torch.randint(16, (3, 6))
    model = build(16, ModelShape(32, state_size=512, mlp=24), "kla-plus", 6, from_last=False)
    assert isinstance(model, TokenModel) and model.samples == 10
    passed = model.model(model.model.embed_tokens(ids), output_posterior=True)
    posterior, losses = passed.posterior, []
    for loss in (
        lambda: F.cross_entropy(model(ids).flatten(0, 1), targets.flatten()),
        lambda: marginal_likelihood(
            lambda readout, y: target_nll(model.model.logits(model.model.layers.finish(posterior, readout)), y),
            *(posterior.mean, posterior.variance, targets, 10, 10),
        ),
    ):
        torch.manual_seed(1)
        losses.append(float(loss().detach()))
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    mean = build(16, ModelShape(32, state_size=512, mlp=24), "kla", 6, from_last=False)
    mean.load_state_dict(model.state_dict())
    assert float((mean(ids).log_softmax(-1) - model(ids)).detach().abs().max()) > 1e-3
    both = build(16, ModelShape(32, state_size=512, decoder=(24, 12)), "kla-plus", 6, from_last=True)
    assert both(ids).shape == (3, 6, 16)


def test_zoologys_model_adds_its_norm() -> None:
    """h = mixer(LN1(r)); r = r + h; r = r + LN2(r), twice, then LN and the embedding's own rows."""
    torch.manual_seed(0)
    shape = ModelShape(16, depth=2, norm="layer", head="tied", add_norm=True, zoology_init=True, dropout=0.1)
    model = build(40, shape, "gated-deltanet", 8, from_last=False).eval()
    assert isinstance(model, TokenModel)
    ids = torch.randint(40, (2, 8))
    r = model.model.embed_tokens(ids)
    for block in model.model.layers:
        r = r + block.mixer(block.norm(r))[0]
        r = r + block.mlp_norm(r)
    assert isinstance(model.model.norm, torch.nn.LayerNorm) and isinstance(block.norm, torch.nn.LayerNorm)
    table = model.model.embed_tokens.get_parameter("weight")
    torch.testing.assert_close(model(ids), model.model.norm(r) @ table.T)
    assert len(list(model.parameters())) == len({id(x) for x in model.parameters()})
    mixer = model.model.mixers[0]
    assert float(mixer.get_parameter("out_proj.weight").detach().std()) == pytest.approx(0.01, rel=0.15)
    assert float(mixer.get_parameter("qkv_proj.weight").detach().std()) == pytest.approx(0.02, rel=0.1)
    assert float((model.train()(ids) - model.eval()(ids)).detach().abs().max()) > 1e-3


def test_rates_follow_their_schedules() -> None:
    cosine = RecallProtocol(epochs=4, batch_size=8, learning_rate=1e-3, schedule="cosine", min_learning_rate=1e-6)
    assert [learning_rate_factor(cosine, step, 5) for step in (0, 4)] == [1, 1]
    assert learning_rate_factor(cosine, 10, 5) == pytest.approx(0.5, abs=1e-3)
    assert learning_rate_factor(cosine, 20, 5) == pytest.approx(1e-3)
    warm = RecallProtocol(epochs=4, batch_size=8, learning_rate=1e-3, schedule="warmup", warmup=10)
    assert [learning_rate_factor(warm, step, 5) for step in (0, 4, 9, 15)] == pytest.approx([0.1, 0.5, 1.0, 0.5])
    assert learning_rate_factor(RecallProtocol(epochs=4, batch_size=8, learning_rate=1e-3), 19, 5) == 1


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: RecallProtocol(epochs=0, batch_size=1, learning_rate=1), "`epochs`"),
        (lambda: RecallProtocol(epochs=1, batch_size=1, learning_rate=0), "`learning_rate`"),
        (
            lambda: RecallProtocol(epochs=1, batch_size=1, learning_rate=1, schedule="linear"),
            "'constant', 'cosine' or 'warmup'",
        ),
        (
            lambda: RecallProtocol(epochs=1, batch_size=1, learning_rate=1, select_epoch="first"),
            "'loss', 'score' or 'last'",
        ),
        (lambda: ModelShape(0), "`hidden_size`"),
        (lambda: RecallCell("mad/copying", (), "kla", MAD, RecallProtocol(1, 1, 1), 0), "mad/selective-copying"),
        (
            lambda: RecallCell("mqar", (Part.of(1, 1, frac_noise=0.1),), "kla", MAD, RecallProtocol(1, 1, 1), 0),
            "frac_noise",
        ),
        (lambda: RecallCell("mqar", (Part.of(1, 1),), "kalman", MAD, RecallProtocol(1, 1, 1), 0), "kla"),
    ],
)
def test_invalid_arguments_raise(make, says: str) -> None:
    with pytest.raises(ArgumentError, match=says):
        make()


@pytest.mark.parametrize("name", [name for name in OWN if name.endswith("-no-conv")])
def test_layers_without_a_convolution_have_none(name: str) -> None:
    mixer = build(16, replace(MAD, hidden_size=32, state_size=512), name, 8, from_last=False).model.mixers[0]
    taps = [part.weight.shape[-1] for part in mixer.modules() if isinstance(part, ShortConvolution)]
    assert set(taps) == ({1} if name == "mamba2-no-conv" else set())  # its bias and activation stay


def test_slow_decays_have_lower_initial_rates_and_equal_shapes() -> None:
    models = []
    for name in ("bayesian-slow", 'bayesian:{"decays_per_head": 1}'):
        torch.manual_seed(0)
        models.append(build(16, ModelShape(32, state_size=512), name, 8, from_last=False))
    slow, plain = (model.state_dict() for model in models)
    for name, weight in plain.items():
        if name.endswith("log_rate"):
            assert float(slow[name].max()) <= 0 < float(weight.max())  # rates up to 1 and up to 16
        else:
            assert slow[name].shape == weight.shape
