"""Models of kalmix train under torchtitan with the losses and weights of one process without it."""

from __future__ import annotations

import json
import shutil
import socket
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("torchtitan")

from distributed import titan_training
from distributed.processes import run_ranks
from distributed.titan_training import SIZES, reference
from kalmix.models import KalmixConfig, KalmixForCausalLM

pytestmark = pytest.mark.slow
FLOAT32 = ["--training.mixed_precision_param", "float32"]


def train(folder: Path, config: KalmixConfig, world: int, *options: str) -> dict[str, Any]:
    """Train a configuration, or the model that is already in the folder `assets`; return what rank 0 wrote."""
    assets = folder / "assets"
    if not assets.exists():
        config.save_pretrained(assets)
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    run = folder / "run"
    run.mkdir()
    given = ["--hf_assets_path", str(assets), "--loss.num_chunks", "4", *options]
    run_ranks(titan_training.run, world, run, port, given)
    return json.loads((run / "seen.json").read_text())


def test_two_ranks_load_train_and_save_a_checkpoint_of_transformers(tmp_path: Path):
    config = KalmixConfig(**SIZES)
    torch.manual_seed(5)
    KalmixForCausalLM(config).save_pretrained(tmp_path / "assets")
    options = ["--checkpoint.enable", "--checkpoint.initial_load_in_hf", "--checkpoint.last_save_in_hf"]
    seen = train(tmp_path, config, 2, *FLOAT32, *options, "activation-checkpoint:none")
    losses, model = reference(config, seed=5)
    assert seen["losses"] == pytest.approx(losses, rel=1e-5)
    saved = tmp_path / "run" / "checkpoint" / "step-3"
    shutil.copy(tmp_path / "assets" / "config.json", saved)
    trained = KalmixForCausalLM.from_pretrained(saved).state_dict()
    assert trained.keys() == model.state_dict().keys()
    for name, value in model.state_dict().items():
        torch.testing.assert_close(trained[name], value, rtol=1e-4, atol=1e-5, msg=lambda text, name=name: name + text)


VARIANTS: dict[str, tuple[int, dict[str, Any], list[str]]] = {
    "one rank, selective checkpoints": (1, {"propagate": "mean"}, ["activation-checkpoint:selective"]),
    "replicated, tied, capped": (
        2,
        {"tie_word_embeddings": True, "logit_cap": 2.0, "embedding_norm": True},
        ["--parallelism.data_parallel_replicate_degree", "2", "activation-checkpoint:full"],
    ),
    "compiled blocks": (
        2,
        {"mlp_activation": "relu2"},
        [
            *("--compile.enable", "--compile.backend", "aot_eager", "--parallelism.spmd_backend", "partial_dtensor"),
            "activation-checkpoint:full",
        ],
    ),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_losses_from_new_weights_are_those_of_one_process(name: str, tmp_path: Path):
    world, settings, options = VARIANTS[name]
    config = KalmixConfig(**SIZES, **settings)
    seen = train(tmp_path, config, world, *FLOAT32, *options)
    losses, _ = reference(config)
    assert seen["losses"] == pytest.approx(losses, rel=1e-5)


def test_dynamics_act_in_float32_while_the_rest_acts_in_bfloat16(tmp_path: Path):
    config = KalmixConfig(**SIZES)
    seen = train(tmp_path, config, 2, "activation-checkpoint:none")
    losses, _ = reference(config)
    assert seen["losses"] == pytest.approx(losses, rel=2e-2)
    dtypes = seen["dtypes"]
    assert {kind for name, kind in dtypes.items() if name.endswith("dynamics")} == {"torch.float32"}
    assert {kind for name, kind in dtypes.items() if not name.endswith("dynamics")} == {"torch.bfloat16"}
