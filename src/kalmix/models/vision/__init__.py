"""Image classifiers with kalmix layers. Importing this package registers them with `timm`, if it is installed."""

from __future__ import annotations

import warnings
from importlib import import_module
from importlib.util import find_spec

from kalmix.models.vision.model import VisionModel, gkavision_tiny

__all__ = ["VisionModel", "gkavision_tiny"]


def _register() -> None:
    """Register the models with `timm`. Warn if it is installed but cannot be imported, as with a torchvision built for
    another torch.
    """
    if find_spec("timm") is None:
        return
    try:
        import_module("kalmix.models.vision.timm")
    except (ImportError, OSError, RuntimeError) as error:
        warnings.warn(
            f"timm is installed but cannot be imported, so GKAVision is not registered: {error}", stacklevel=2
        )


_register()
