"""Image classifiers: convolutions, then windows of tokens mixed by a memory layer and by attention (GKAVision)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from kalmix.errors import ArgumentError
from kalmix.layers import GatedKalmaNet
from kalmix.models.vision.blocks import ConvBlock, TokenBlock, WindowAttention, WindowBlocks, downsample, stem
from kalmix.validation import check_number, check_positive_int, check_shape, require

MixerFactory = Callable[[int], nn.Module]  # builds a module from a width; the module returns its output and a state


class GatedKalmaNetFactory:
    """Function that builds Gated KalmaNet as GKAVision uses it; a class so that signatures print its name."""

    def __call__(self, width: int, **options: Any) -> GatedKalmaNet:
        """Build a layer with width / 32 heads of 16 channels and no output gate (section N of Gated KalmaNet).

        Args:
            width: channels of the stage.
            options: other options of `GatedKalmaNet`; they override these.
        """
        defaults = {"heads": max(1, width // 32), "head_dim": 16, "conv": 3, "gate": None}
        return GatedKalmaNet(width, **{**defaults, **options})

    def __repr__(self) -> str:
        return "gated_kalmanet"


gated_kalmanet = GatedKalmaNetFactory()


class VisionModel(nn.Module):
    """Image classifier of a stem and four stages, with memory layers and attention in the last two.

    The stem, two convolutions of stride 2, makes a map of 1/4 of the image's height and width. Each of stages 2, 3 and
    4 begins with a convolution that halves the map and doubles its channels, so the last map has 1/32.

    The blocks of stages 1 and 2 are convolutions. Those of stages 3 and 4 cut the map into square windows and treat the
    pixels of a window, row by row, as a sequence. A map whose sides are not multiples of the window is padded with
    zeros, which the blocks read as pixels. In each of these two stages the first half of the blocks (the larger half of
    an odd number) are memory layers, and the rest attention. Each of these blocks also has an MLP. This is the shape of
    MambaVision; the defaults are GKAVision-T, with 31.8 million parameters.

    Args:
        mixer: builds the memory layer of a block from its width: a class of `kalmix.layers`, or a function of the width
            that returns a module. The layer must map `[B, T, width]` to a tuple of `[B, T, width]` and a state, which
            is ignored. Default: Gated KalmaNet as in the paper. `None`: attention in every block.
        width: channels of the first stage.
        stem_width: channels between the two convolutions of the stem.
        depths: blocks per stage.
        heads: attention heads of stages 3 and 4.
        windows: side of a window in stages 3 and 4, in pixels of the map.
        mlp: hidden width of an MLP, as a multiple of the stage's width.
        num_classes: number of classes. With 0 there is no classifier, and the model returns features `[B, 8 * width]`.
        in_chans: channels of the images.
        drop_rate: probability of dropout before the classifier.
        drop_path_rate: stochastic depth: the probability of skipping the last block of the model for a sample, in
            training. It is 0 in the first block of the model and grows linearly. In stages 3 and 4, it applies to the
            mixer and to the MLP of a block independently.

    Raises:
        ArgumentError: a size is not a positive integer (`num_classes` may be 0), `depths`, `heads` or `windows` has
            the wrong length, `mlp` is not above 0, a rate is not from 0 up to 1 (exclusive), a number of attention
            heads does not divide the width of its stage, or `mixer` is not a function that returns a module; or, in a
            call, the images do not have 4 dimensions or `in_chans` channels, or a layer does not return a tuple.

    Shape:
        Input: images `[B, in_chans, Y, X]` of any size, in the dtype of the parameters; PyTorch raises a RuntimeError
        for another, such as uint8. Pixels are not normalised. Output: logits `[B, num_classes]`. `forward_features`
        returns the last map, `[B, 8 * width, Y / 32, X / 32]`, rounded up.

    Complexity: O(T) per window of T tokens in a memory layer, O(T^2) in attention.

    Example:
        >>> from kalmix.models import VisionModel
        >>> model = VisionModel(width=16, depths=(1, 1, 2, 2), heads=(2, 4), windows=(4, 2), num_classes=5)
        >>> model(torch.randn(2, 3, 64, 64)).shape
        torch.Size([2, 5])
        >>> model.forward_features(torch.randn(2, 3, 64, 64)).shape
        torch.Size([2, 128, 2, 2])
    """

    def __init__(
        self,
        *,
        mixer: MixerFactory | None = gated_kalmanet,
        width: int = 80,
        stem_width: int = 32,
        depths: tuple[int, int, int, int] = (1, 3, 8, 4),
        heads: tuple[int, int] = (8, 16),
        windows: tuple[int, int] = (14, 7),
        mlp: float = 4.0,
        num_classes: int = 1000,
        in_chans: int = 3,
        drop_rate: float = 0.0,
        drop_path_rate: float = 0.2,
    ) -> None:
        super().__init__()
        for name, sizes, count in (("depths", depths, 4), ("heads", heads, 2), ("windows", windows, 2)):
            if not isinstance(sizes, tuple | list) or len(sizes) != count:
                raise ArgumentError(name, got=repr(sizes), expected=f"{count} positive integers")
            for size in sizes:
                check_positive_int(name, size)
        for name, size in (("width", width), ("stem_width", stem_width), ("in_chans", in_chans)):
            check_positive_int(name, size)
        for name, rate in (("drop_rate", drop_rate), ("drop_path_rate", drop_path_rate)):
            check_number(name, rate, minimum=0.0)
            require(rate < 1, name, rate, "a number below 1")
        check_number("mlp", mlp)
        require(round(mlp * width) >= 1, "mlp", mlp, f"a number that is at least 1 / {width} (the width)")
        builds = callable(mixer) and not isinstance(mixer, nn.Module)
        require(mixer is None or builds, "mixer", repr(mixer), "a function that builds a layer, or None")
        self.num_classes: int = num_classes
        self.in_chans: int = in_chans
        self.num_features: int = 8 * width
        self.head_hidden_size: int = self.num_features
        self.stem: nn.Sequential = stem(in_chans, stem_width, width)
        drops = [drop_path_rate * n / max(1, sum(depths) - 1) for n in range(sum(depths))]
        stages: list[nn.Module] = []
        for stage, depth in enumerate(depths):
            channels, first = width << stage, sum(depths[:stage])
            blocks: list[nn.Module] = []
            for n, drop in enumerate(drops[first : first + depth]):
                if stage < 2:
                    blocks.append(ConvBlock(channels, drop))
                    continue
                make_mixer = mixer if n < (depth + 1) // 2 else None
                token_mixer = make_mixer(channels) if make_mixer else WindowAttention(channels, heads[stage - 2])
                if not isinstance(token_mixer, nn.Module):
                    problem = f"returns a {type(token_mixer).__name__}"
                    raise ArgumentError("mixer", problem=problem, expected="a function that returns a module")
                blocks.append(TokenBlock(channels, token_mixer, round(mlp * channels), drop))
            if stage >= 2:
                blocks = [WindowBlocks(windows[stage - 2], blocks)]
            stages.append(nn.Sequential(*([downsample(channels // 2)] if stage else []), *blocks))
        self.stages: nn.Sequential = nn.Sequential(*stages)
        self.feature_info: list[dict[str, Any]] = [
            {"num_chs": width << stage, "reduction": 4 << stage, "module": f"stages.{stage}"} for stage in range(4)
        ]
        self.norm: nn.BatchNorm2d = nn.BatchNorm2d(self.num_features)
        self.drop: nn.Dropout = nn.Dropout(drop_rate)
        self.head: nn.Module = nn.Identity()
        self.reset_classifier(num_classes)
        self.apply(_init_weights)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits `[B, num_classes]` of images `[B, in_chans, H, W]` of any size."""
        return self.forward_head(self.forward_features(x))

    def forward_features(self, x: Tensor) -> Tensor:
        """Return the last map, `[B, 8 * width, H / 32, W / 32]`, of images `[B, in_chans, H, W]`.

        Raises:
            ArgumentError: the images have another shape.
        """
        check_shape("x", x, "B C Y X", {"C": self.in_chans})
        return self.norm(self.stages(self.stem(x)))

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """Return logits `[B, num_classes]` of a last map, or its mean over pixels with `pre_logits`.

        Args:
            x: `[B, 8 * width, h, w]`, as `forward_features` returns it.
            pre_logits: return `[B, 8 * width]`, after dropout and before the classifier.
        """
        x = self.drop(x.mean((-2, -1)))
        return x if pre_logits else self.head(x)

    def get_classifier(self) -> nn.Module:
        """Return the module that computes logits."""
        return self.head

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """Replace the classifier by a new one.

        Args:
            num_classes: number of classes; 0 for no classifier.
            global_pool: "avg" or `None`; the pooling is always the mean.

        Raises:
            ArgumentError: another `global_pool`, or `num_classes` is not an integer >= 0.
        """
        if num_classes != 0:
            check_positive_int("num_classes", num_classes)
        if global_pool not in (None, "avg"):
            raise ArgumentError("global_pool", got=repr(global_pool), expected="'avg'")
        self.num_classes = num_classes
        weight = self.norm.weight
        self.head = nn.Linear(self.num_features, num_classes) if num_classes else nn.Identity()
        self.head.to(weight.device, weight.dtype).apply(_init_weights)


def _init_weights(module: nn.Module) -> None:
    """Initialize a linear module as MambaVision does: normal with standard deviation 0.02, bias 0."""
    if isinstance(module, nn.Linear):
        nn.init.trunc_normal_(module.weight, std=0.02)
        if module.bias is not None:
            nn.init.zeros_(module.bias)


def gkavision_tiny(**options: Any) -> VisionModel:
    """Build GKAVision-T (section N of Gated KalmaNet), with random weights.

    It is a `VisionModel` with the defaults of that class: an image classifier with 31.8 million parameters. It accepts
    images of any size. With 224 x 224 pixels, a whole number of attention windows fits its feature maps; maps of other
    sizes are padded with zeros.

    Args:
        options: keyword arguments of `VisionModel`, such as `num_classes` (1000 by default; 0 for features instead of
            logits), `in_chans` (3) and `drop_path_rate` (0.2). They override its defaults.

    Returns:
        The model, in training mode. It maps images `[B, in_chans, Y, X]` in the dtype of its parameters to logits
        `[B, num_classes]`.

    Raises:
        ArgumentError: an option has a wrong value, such as a negative `num_classes`; or, in a call of the model, the
            images have another shape.
        TypeError: `VisionModel` has no such option.

    Example:
        >>> from kalmix.models import gkavision_tiny
        >>> with torch.device("meta"):
        ...     model = gkavision_tiny(num_classes=10)
        >>> sum(parameter.numel() for parameter in model.parameters()) // 1_000_000
        31
    """
    return VisionModel(**options)
