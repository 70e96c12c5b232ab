"""Registration of the vision models with `timm`, so that `timm.create_model("gkavision_tiny")` builds them.

Importing `kalmix.models.vision` imports this module if `timm` is installed.
"""

from __future__ import annotations

from typing import Any

from kalmix._extras import optional_imports

with optional_imports():
    from timm.models import build_model_with_cfg, generate_default_cfgs, register_model

from kalmix.models.vision.model import VisionModel

default_cfgs: dict[str, Any] = generate_default_cfgs(
    {
        "gkavision_tiny": {
            "num_classes": 1000,
            "input_size": (3, 224, 224),
            "mean": (0.485, 0.456, 0.406),
            "std": (0.229, 0.224, 0.225),
            "interpolation": "bicubic",
            "crop_pct": 1.0,
            "first_conv": "stem.0",
            "classifier": "head",
        }
    }
)


@register_model
def gkavision_tiny(pretrained: bool = False, **options: Any) -> VisionModel:
    """Build GKAVision-T. There are no pretrained weights.

    Args:
        pretrained: must be false.
        options: of `VisionModel`.
    """
    maps = {"out_indices": (0, 1, 2, 3), "flatten_sequential": True}
    return build_model_with_cfg(VisionModel, "gkavision_tiny", pretrained, feature_cfg=maps, **options)
