"""Models of kalmix train under torchtitan with the losses and weights of one process without it."""

from __future__ import annotations

import json
import shutil
import socket
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("torchtitan", reason="needs torchtitan: pip install 'kalmix[titan]'")

from distributed import titan_training
from distributed.processes import run_ranks
from distributed.titan_training import SIZES, reference
from kalmix import ArgumentError
from kalmix.models import KalmixConfig, KalmixForCausalLM

COMPILED = ["--compile.enable", "--compile.backend", "aot_eager"]
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


@pytest.mark.slow
@pytest.mark.parametrize("tied", [False, True])
def test_two_ranks_load_train_and_save_a_checkpoint_of_transformers(tied: bool, tmp_path: Path):
    config = KalmixConfig(**SIZES, tie_word_embeddings=tied)
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
    **{
        f"compiled, {checkpoints} checkpoints": (
            2,
            {"mlp_activation": "relu2"},
            [*COMPILED, "--parallelism.spmd_backend", "partial_dtensor", f"activation-checkpoint:{checkpoints}"],
        )
        for checkpoints in ("full", "selective")
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("name", VARIANTS)
def test_losses_from_new_weights_are_those_of_one_process(name: str, tmp_path: Path):
    world, settings, options = VARIANTS[name]
    config = KalmixConfig(**SIZES, **settings)
    seen = train(tmp_path, config, world, *FLOAT32, *options)
    losses, _ = reference(config)
    assert seen["losses"] == pytest.approx(losses, rel=1e-5)
    assert (seen["graphs"] > 0) == ("--compile.enable" in options)


@pytest.mark.slow
def test_dynamics_act_in_float32_while_the_rest_acts_in_bfloat16(tmp_path: Path):
    config = KalmixConfig(**SIZES)
    seen = train(tmp_path, config, 2, "activation-checkpoint:none")
    losses, _ = reference(config)
    assert seen["losses"] == pytest.approx(losses, rel=2e-2)
    dtypes = seen["dtypes"]
    assert {kind for name, kind in dtypes.items() if name.endswith("dynamics")} == {"torch.float32"}
    assert {kind for name, kind in dtypes.items() if not name.endswith("dynamics")} == {"torch.bfloat16"}


def configure(**changes: Any) -> None:
    """Pass a configuration with some changed options to a model of a small `KalmixConfig`."""
    from kalmix import titan

    settings = changes.pop("settings", SIZES)
    config = titan.pretraining()
    config.model_spec = titan.model_spec(None if settings is None else KalmixConfig(**settings))
    for name, value in changes.items():
        part, _, option = name.rpartition("__")
        setattr(getattr(config, part) if part else config, option, value)
    config.model_spec.model.update_from_config(config=config)


def test_what_is_not_served_is_refused_in_one_sentence(tmp_path: Path):
    configure()
    for kind in ("context", "tensor", "pipeline", "expert"):
        with pytest.raises(ArgumentError, match=rf"`{kind}_parallel_degree` is 2; expected 1 \(models of kalmix use"):
            configure(**{f"parallelism__{kind}_parallel_degree": 2})
    with pytest.raises(ArgumentError, match="`enable_cpu_offload` is True"):
        configure(training__enable_cpu_offload=True)
    with pytest.raises(ArgumentError, match="`loss` is 'marginal'"):
        configure(settings={**SIZES, "layers": ["kla"], "loss": "marginal"})
    for text in (None, '{"model_type": "llama", "hidden_size": 16}'):
        if text is not None:
            (tmp_path / "config.json").write_text(text)
        with pytest.raises(ArgumentError, match=r"expected a folder with the config\.json of a model of kalmix"):
            configure(settings=None, hf_assets_path=str(tmp_path))
