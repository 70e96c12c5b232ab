"""Imports of `kalmix.models` in a new process: what they register, and what they do not need."""

import subprocess
import sys
from pathlib import Path

import pytest

REGISTRATION = """
import sys
sys.path.insert(0, sys.argv[1])
import torch, transformers
import kalmix, kalmix.models, kalmix.layers
assert "kalmix.models.vision.timm" not in sys.modules and "kalmix.models.vision" not in sys.modules

config = kalmix.models.KalmixConfig(vocab_size=9, hidden_size=8, num_hidden_layers=1)
for auto_class, name in kalmix.models.configuration.AUTO_CLASSES.items():
    model = getattr(transformers, auto_class).from_config(config)
    assert type(model).__name__ == name, type(model)

from kalmix.models import gkavision_tiny
from timm.models import made
with torch.device("meta"):
    model = made["gkavision_tiny"](num_classes=7, in_chans=1, drop_rate=0.1, drop_path_rate=0.1)
assert model.head.out_features == 7 and model.drop.p == 0.1 and model.stem[0].in_channels == 1
"""
TIMM = """
made = {}
generate_default_cfgs = dict
def register_model(function):
    return made.setdefault(function.__name__, function)
def build_model_with_cfg(kind, name, pretrained, feature_cfg, **options):
    assert name == "gkavision_tiny" and not pretrained
    return kind(**options)
"""
MISSING = """
import sys, warnings
sys.path.insert(0, sys.argv[1])
sys.modules["transformers"] = None  # as if it were not installed
import torch
import kalmix, kalmix.layers, kalmix.models
from kalmix.models import LanguageModel
model = LanguageModel(9, 8, ["kla", "attention"])
assert model.logits(model(model.embed_tokens(torch.arange(5)[None])).hidden_state).shape == (1, 5, 9)

with warnings.catch_warnings(record=True) as result:
    warnings.simplefilter("always")
    import kalmix.models.vision
print([str(warning.message) for warning in result if "nms" in str(warning.message)])
"""


def run(code: str, folder: Path) -> str:
    """Run Python code that may import the modules in `folder`; return what it prints."""
    done = subprocess.run([sys.executable, "-c", code, str(folder)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_imports_register_auto_classes_and_vision_models(tmp_path):
    """A stand-in for timm records calls; `test_vision` uses the real one. Language models do not import it."""
    (tmp_path / "timm").mkdir()
    (tmp_path / "timm" / "__init__.py").write_text("")
    (tmp_path / "timm" / "models.py").write_text(TIMM)
    run(REGISTRATION, tmp_path)


@pytest.mark.slow
def test_transformers_and_a_working_timm_are_optional(tmp_path):
    (tmp_path / "timm.py").write_text("raise RuntimeError('operator torchvision::nms does not exist')")
    assert "timm is installed but cannot be imported" in run(MISSING, tmp_path)
