"""Registration of all models with the Auto classes of transformers, when this module is imported."""

from __future__ import annotations

from importlib import import_module

import transformers

from kalmix.models.configuration import AUTO_CLASSES, KalmixConfig

transformers.AutoConfig.register(KalmixConfig.model_type, KalmixConfig, exist_ok=True)
for _auto_class, _name in AUTO_CLASSES.items():
    _model = getattr(import_module("kalmix.models"), _name)
    getattr(transformers, _auto_class).register(KalmixConfig, _model, exist_ok=True)
