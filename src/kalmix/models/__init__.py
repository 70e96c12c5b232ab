"""Language models and image classifiers built from kalmix layers.

Names are imported on first use, so that `import kalmix.models` needs neither transformers nor timm. If transformers is
installed, `import kalmix.models` registers the models with its Auto classes.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from kalmix._extras import optional_imports

if TYPE_CHECKING:
    from kalmix.models.backbone import KalmixModel, KalmixModelOutput
    from kalmix.models.blocks import hybrid_layers
    from kalmix.models.cache import BeliefLayer, restore, snapshot
    from kalmix.models.captured_step import capture_decoding
    from kalmix.models.causal_lm import LanguageModel
    from kalmix.models.classification import KalmixForSequenceClassification, KalmixForTokenClassification
    from kalmix.models.configuration import KalmixConfig
    from kalmix.models.huggingface import KalmixForCausalLM, KalmixOutput
    from kalmix.models.optimizer import optimizer_groups
    from kalmix.models.vision import VisionModel, gkavision_tiny

_MODULES = {
    "KalmixModel": "backbone",
    "KalmixModelOutput": "backbone",
    "hybrid_layers": "blocks",
    "BeliefLayer": "cache",
    "snapshot": "cache",
    "restore": "cache",
    "capture_decoding": "captured_step",
    "LanguageModel": "causal_lm",
    "KalmixForSequenceClassification": "classification",
    "KalmixForTokenClassification": "classification",
    "KalmixConfig": "configuration",
    "KalmixForCausalLM": "huggingface",
    "KalmixOutput": "huggingface",
    "optimizer_groups": "optimizer",
    "VisionModel": "vision",
    "gkavision_tiny": "vision",
}
__all__ = [
    "BeliefLayer",
    "KalmixConfig",
    "KalmixForCausalLM",
    "KalmixForSequenceClassification",
    "KalmixForTokenClassification",
    "KalmixModel",
    "KalmixModelOutput",
    "KalmixOutput",
    "LanguageModel",
    "VisionModel",
    "capture_decoding",
    "gkavision_tiny",
    "hybrid_layers",
    "optimizer_groups",
    "restore",
    "snapshot",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with optional_imports():
        return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return __all__


if find_spec("transformers") is not None:
    import_module("kalmix.models.registration")
