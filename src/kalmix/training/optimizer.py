"""Which parameters learn how fast (appendix G.6 of Kalman Linear Attention, after nanochat)."""

from __future__ import annotations

from typing import Any

from torch import nn

from kalmix.layers import Mixer

DYNAMICS_LR_FACTOR = 0.1  # of the matrices' rate: dynamics act at every step of the recurrence


def parameter_groups(model: nn.Module, *, learning_rate: float, weight_decay: float) -> list[dict[str, Any]]:
    """Five groups for an optimiser: dynamics, embeddings, the head, matrices, vectors; empty ones left out.

    Dynamics are what mixers call their `dynamics_parameters`; they learn at a tenth of `learning_rate`. Only matrices
    decay: a decaying embedding forgets rare tokens, a decaying vector has no scale to shrink.

    Args:
        model: a Hugging Face model; a parameter shared by embeddings and head counts as an embedding.
        learning_rate: learning rate of all parameters but the dynamics.
        weight_decay: weight decay of the matrices.
    """
    embeddings, head = _weights(model, "get_input_embeddings"), _weights(model, "get_output_embeddings")
    mixers = (module for module in model.modules() if isinstance(module, Mixer))
    dynamics = {id(value) for mixer in mixers for value in mixer.dynamics_parameters()}
    names = ("matrices", "vectors", "embeddings", "head", "dynamics")  # the rate of the first is logged
    groups: dict[str, list[nn.Parameter]] = {name: [] for name in names}
    for value in model.parameters():
        if not value.requires_grad:
            continue
        if id(value) in dynamics:
            name = "dynamics"
        elif id(value) in embeddings:
            name = "embeddings"
        elif id(value) in head:
            name = "head"
        else:
            name = "matrices" if value.ndim >= 2 else "vectors"
        groups[name].append(value)
    rates, decays = {"dynamics": DYNAMICS_LR_FACTOR * learning_rate}, {"matrices": weight_decay}
    return [
        {"name": name, "params": values, "lr": rates.get(name, learning_rate), "weight_decay": decays.get(name, 0.0)}
        for name, values in groups.items()
        if values
    ]


def _weights(model: nn.Module, getter: str) -> set[int]:
    module = getattr(model, getter, lambda: None)()
    return set() if module is None else {id(value) for value in module.parameters()}
