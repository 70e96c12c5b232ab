"""Image classifiers: published sizes, windows, any layer as mixer, registration with timm."""

import pytest
import torch
from torch import nn

from kalmix.errors import ArgumentError
from kalmix.layers import KLA, GatedDeltaNet, GatedKalmaNet, RetNet
from kalmix.models.vision.blocks import DropPath, TokenBlock, WindowAttention, WindowBlocks
from kalmix.models.vision.model import VisionModel, gated_kalmanet, gkavision_tiny

TINY = {"width": 16, "stem_width": 8, "depths": (1, 1, 3, 2), "heads": (2, 4), "windows": (4, 2), "num_classes": 5}


def count(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


@pytest.mark.slow
def test_parameter_counts_are_the_published_ones():
    """GKAVision-T has 31.8 million parameters; MambaVision-T without its mixers has 29,218,888."""
    with torch.device("meta"):
        assert count(gkavision_tiny()) == 31_803_624
        assert count(gkavision_tiny(mixer=lambda width: gated_kalmanet(width, gate="silu"))) == 32_418_024
        assert count(gkavision_tiny(mixer=lambda width: nn.Identity())) == 29_218_888
        assert [count(gated_kalmanet(width)) for width in (320, 640)] == [215_896, 860_576]
        memories = [m for m in gkavision_tiny().modules() if isinstance(m, GatedKalmaNet)]
        assert [(m.sizes.heads, m.sizes.key_width, m.sizes.value_width) for m in memories] == (
            [(10, 16, 16)] * 4 + [(20, 16, 16)] * 2
        )
        assert all(m.conv.size == 3 and m.gate is None and m.gain == "sigmoid" for m in memories)
    with torch.no_grad():
        maps = gkavision_tiny().forward_features(torch.zeros(1, 3, 224, 224))
    assert maps.shape == (1, 640, 7, 7)


def test_memory_comes_first_in_a_stage():
    kinds = [type(block.mixer) for block in VisionModel(**TINY).modules() if isinstance(block, TokenBlock)]
    assert kinds == [GatedKalmaNet, GatedKalmaNet, WindowAttention, GatedKalmaNet, WindowAttention]
    kinds = [type(block.mixer) for block in VisionModel(**TINY, mixer=None).modules() if isinstance(block, TokenBlock)]
    assert kinds == [WindowAttention] * 5


def test_stochastic_depth_grows():
    rates = [m.rate for m in VisionModel(**TINY, drop_path_rate=0.3).modules() if isinstance(m, DropPath)]
    torch.testing.assert_close(torch.tensor(rates), torch.linspace(0, 0.3, 7))
    drop, x = DropPath(0.25), torch.ones(4000, 2, 3)
    torch.manual_seed(0)
    mask = drop(x)
    assert ((mask == 0) | (mask == 1 / 0.75)).all() and (mask == mask[:, :1, :1]).all()
    assert abs(mask.mean() - 1) < 0.05
    assert drop.eval()(x) is x


def test_windows_are_independent():
    """Windows do not affect each other, their tokens are in row-major order, and the map is reassembled."""

    class Read(nn.Module):
        def forward(self, x):
            return x.cumsum(1), None

    block = TokenBlock(2, Read(), 2, 0.0)
    block.norm, block.mlp = nn.Identity(), nn.Sequential(nn.Identity())
    block.mlp_norm = nn.Module()
    block.forward = lambda x: block.mixer(x)[0]
    x = torch.randn(3, 2, 5, 7)
    y = WindowBlocks(3, [block])(x)
    assert y.shape == x.shape
    for top in range(0, 5, 3):
        for left in range(0, 7, 3):
            window = x[:, :, top : top + 3, left : left + 3]
            padded = nn.functional.pad(window, (0, 3 - window.shape[3], 0, 3 - window.shape[2]))
            read = padded.flatten(2).cumsum(2).view_as(padded)[..., : window.shape[2], : window.shape[3]]
            torch.testing.assert_close(y[:, :, top : top + 3, left : left + 3], read)


@pytest.mark.parametrize("size", [(64, 64), (40, 72), (1, 1)])
@pytest.mark.parametrize("mixer", [gated_kalmanet, KLA, GatedDeltaNet, None])
def test_any_mixer_and_image_size(mixer, size):
    torch.manual_seed(0)
    model = VisionModel(**TINY, mixer=mixer, in_chans=2).eval()
    images = torch.randn(2, 2, *size)
    logits = model(images)
    assert logits.shape == (2, 5) and logits.isfinite().all()
    torch.testing.assert_close(model(images.to(memory_format=torch.channels_last)), logits, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(model(images[1:]), logits[1:], rtol=1e-4, atol=1e-5)  # images are independent
    model(images).square().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def cross_entropy(model: nn.Module) -> torch.Tensor:
    torch.manual_seed(1)
    return nn.functional.cross_entropy(model(torch.randn(10, 3, 64, 64)).float(), torch.arange(10) % 5)


@pytest.mark.slow
def test_compiles_to_one_graph():
    torch.manual_seed(0)

    def mixer(width):
        return RetNet(width) if width == 64 else WindowAttention(width, 4)

    model = VisionModel(**{**TINY, "depths": (1, 1, 2, 1)}, mixer=mixer, drop_path_rate=0.0)
    exact = cross_entropy(model)
    exact.backward()
    expected = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    compiled = cross_entropy(torch.compile(model, fullgraph=True, backend="aot_eager"))
    compiled.backward()
    torch.testing.assert_close(compiled, exact)
    for p, gradient in zip(model.parameters(), expected, strict=True):
        assert (p.grad - gradient).norm() < 1e-3 * gradient.norm() + 1e-6


@pytest.mark.slow
def test_learns_in_mixed_precision():
    """The model memorizes ten images in 12 steps."""
    torch.manual_seed(0)
    model = VisionModel(**TINY, drop_path_rate=0.0)
    exact = cross_entropy(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(12):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = cross_entropy(model)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert abs(losses[0] - float(exact.detach())) < 0.05 and losses[-1] < losses[0] / 4, losses


def test_classifier_is_replaced():
    model = VisionModel(**TINY)
    model.reset_classifier(3)
    assert model.num_classes == 3 and model(torch.randn(2, 3, 64, 64)).shape == (2, 3)
    model.reset_classifier(0)
    assert model(torch.randn(2, 3, 64, 64)).shape == (2, model.num_features)
    with pytest.raises(ArgumentError, match="global_pool"):
        model.reset_classifier(3, "max")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        *(({"depths": (1, 1, 1)}, "depths"), ({"depths": 4}, "depths"), ({"windows": (0, 7)}, "windows")),
        *(({"heads": (3, 4)}, "heads"), ({"width": 0}, "width"), ({"stem_width": -1}, "stem_width")),
        *(({"in_chans": 1.5}, "in_chans"), ({"num_classes": -1}, "num_classes"), ({"mlp": 0}, "mlp")),
        *(({"mlp": 1e-3}, "mlp"), ({"mixer": "kla"}, "mixer"), ({"mixer": KLA(64)}, "mixer")),
        ({"mixer": lambda width: width}, "mixer"),
        *(({"drop_rate": -0.1}, "drop_rate"), ({"drop_path_rate": 1.0}, "drop_path_rate")),
    ],
)
def test_wrong_options_are_refused(options, message):
    with pytest.raises(ArgumentError, match=f"`{message}`"):
        VisionModel(**{**TINY, **options})


@pytest.mark.parametrize("shape", [(2, 1, 32, 32), (3, 32, 32)])
def test_images_of_another_shape_are_refused(shape):
    with pytest.raises(ArgumentError, match=r"`x` has shape .*; expected \[B, C=3, Y, X\]"):
        VisionModel(**TINY)(torch.randn(shape))


def test_layers_without_a_state_are_refused():
    with pytest.raises(ArgumentError, match="`mixer` builds a layer that returns a Tensor"):
        VisionModel(**{**TINY, "mixer": lambda width: nn.Linear(width, width)})(torch.randn(1, 3, 32, 32))


def test_timm_creates_the_models():
    timm = pytest.importorskip("timm", reason="timm is in an extra of its own, as it brings another torch")
    assert timm.list_models("gkavision*") == ["gkavision_tiny"]
    model = timm.create_model("gkavision_tiny", num_classes=7, drop_rate=0.0, drop_path_rate=0.1).eval()
    assert isinstance(model, VisionModel) and model.get_classifier().out_features == 7
    assert timm.data.resolve_model_data_config(model)["input_size"] == (3, 224, 224)
    maps = timm.create_model("gkavision_tiny", features_only=True).eval()
    with torch.no_grad():
        assert [x.shape[1:] for x in maps(torch.zeros(1, 3, 64, 64))] == [(80 << n, 16 >> n, 16 >> n) for n in range(4)]
    with pytest.raises(RuntimeError, match="No pretrained weights"):
        timm.create_model("gkavision_tiny", pretrained=True)
