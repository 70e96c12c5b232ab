"""Vision models made of the library's layers. Importing this names them to `timm`, where it is installed."""

from __future__ import annotations

import warnings
from importlib import import_module
from importlib.util import find_spec

from kalmix.models.vision.model import VisionModel, gkavision_tiny

__all__ = ["VisionModel", "gkavision_tiny"]


def _register() -> None:
    """Name the models to `timm`, where it is installed and whole: a torchvision for another torch breaks its import."""
    if find_spec("timm") is None:
        return
    try:
        import_module("kalmix.models.vision.timm")
    except (ImportError, OSError, RuntimeError) as error:
        warnings.warn(
            f"timm is installed, but cannot be imported, so it does not learn of GKAVision: {error}", stacklevel=2
        )


_register()
