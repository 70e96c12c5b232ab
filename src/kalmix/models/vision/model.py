"""Image classifiers: convolutions, then windows of tokens mixed by a memory and by attention (GKAVision)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from kalmix.errors import ArgumentError
from kalmix.layers import GatedKalmaNet
from kalmix.models.vision.blocks import ConvBlock, TokenBlock, WindowAttention, WindowBlocks, downsample, stem
from kalmix.validation import check_positive_int

MixerFactory = Callable[[int], nn.Module]  # from a width; called on tokens, gives its output and a state


def gated_kalmanet(width: int, **options: Any) -> GatedKalmaNet:
    """Gated KalmaNet as GKAVision has it (section N): half as wide as the model, heads of 16, no output gate."""
    return GatedKalmaNet(width, **{"heads": max(1, width // 32), "head_dim": 16, "conv": 3, "gate": None, **options})


class VisionModel(nn.Module):
    """A classifier of four stages, each with half the map and twice the channels of the one before.

    The first two are convolutions. The last two cut the map into windows, whose tokens, row by row, go through a
    memory in the first half of a stage's blocks (the larger half where their number is odd) and through attention in
    the second. The shape is MambaVision's, the defaults are GKAVision-T's: 31.8 million parameters.

    Args:
        mixer: makes the memory of a block, given its width: `gated_kalmanet`, any layer of `kalmix.layers`, or what
            is called alike; `None` for attention in every block.
        width: channels of the first stage.  stem_width: between the stem's two convolutions.
        depths: blocks of each stage.
        heads: of the attention of the last two stages.  windows: their height and width.
        mlp: width of an MLP over that of its stage.
        num_classes, in_chans, drop_rate, drop_path_rate: as `timm` calls them; stochastic depth grows from 0 at the
            first block to `drop_path_rate` at the last; dropout is before the classifier.

    Cost: O(T) a window of T tokens in a memory, O(T^2) in attention.
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
            if len(sizes) != count:
                raise ArgumentError(name, got=f"{len(sizes)} numbers", expected=f"{count}")
            for size in sizes:
                check_positive_int(name, size)
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
        """Logits `[B, num_classes]` of images `[B, in_chans, H, W]`, H and W of any size."""
        return self.forward_head(self.forward_features(x))

    def forward_features(self, x: Tensor) -> Tensor:
        """The last map, `[B, 8 width, H / 32, W / 32]`."""
        return self.norm(self.stages(self.stem(x)))

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """Logits of a last map, or with `pre_logits` its mean."""
        x = self.drop(x.mean((-2, -1)))
        return x if pre_logits else self.head(x)

    def get_classifier(self) -> nn.Module:
        """The layer that gives logits."""
        return self.head

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """A new classifier for so many classes; none for 0. The pooling is a mean ("avg"), and stays so."""
        if global_pool not in (None, "avg"):
            raise ArgumentError("global_pool", got=repr(global_pool), expected="'avg'")
        self.num_classes = num_classes
        weight = self.norm.weight
        self.head = nn.Linear(self.num_features, num_classes) if num_classes else nn.Identity()
        self.head.to(weight.device, weight.dtype).apply(_init_weights)


def _init_weights(module: nn.Module) -> None:
    """MambaVision's: projections normal with deviation 0.02, their biases 0; the rest resets itself."""
    if isinstance(module, nn.Linear):
        nn.init.trunc_normal_(module.weight, std=0.02)
        if module.bias is not None:
            nn.init.zeros_(module.bias)


def gkavision_tiny(**options: Any) -> VisionModel:
    """GKAVision-T (Gated KalmaNet, section N), for images of 224 pixels; `options` are those of `VisionModel`."""
    return VisionModel(**options)
