"""Registration of all models with the Auto classes of transformers, when this module is imported."""

from __future__ import annotations

from importlib import import_module

import transformers
from transformers.models.auto import modeling_auto

from kalmix.models.configuration import AUTO_CLASSES, KalmixConfig

transformers.AutoConfig.register(KalmixConfig.model_type, KalmixConfig, exist_ok=True)
for _auto_class, _name in AUTO_CLASSES.items():
    _model = getattr(import_module("kalmix.models"), _name)
    getattr(transformers, _auto_class).register(KalmixConfig, _model, exist_ok=True)

# The Trainer shifts labels for label smoothing if the class is in this mapping, which `register` does not change.
modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[KalmixConfig.model_type] = AUTO_CLASSES["AutoModelForCausalLM"]
