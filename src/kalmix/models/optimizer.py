"""Parameter groups with their own learning rate and weight decay."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from torch import nn

from kalmix.layers import Mixer
from kalmix.validation import check_choice, check_number, require

NAMES = ("matrices", "vectors", "embeddings", "head", "dynamics")  # the Trainer logs the rate of the first group
DYNAMICS_LR_FACTOR = 0.1  # learning rate of dynamics, relative to the others


def optimizer_groups(
    model: nn.Module,
    *,
    learning_rate: float,
    weight_decay: float,
    learning_rates: Mapping[str, float] = MappingProxyType({}),
    weight_decays: Mapping[str, float] = MappingProxyType({}),
) -> list[dict[str, Any]]:
    """Return parameter groups for an optimizer: matrices, vectors, embeddings, head and dynamics.

    Each parameter is in one group. "dynamics" are the parameters that `dynamics_parameters()` of the layers returns,
    such as decay rates and noises. Their learning rate is a tenth of `learning_rate`, because they act at every step of
    the recurrence (appendix G.6 of Kalman Linear Attention). "embeddings" and "head" are those of a language model's
    `get_input_embeddings()` and `get_output_embeddings()`. All others are "matrices" if they have two or more
    dimensions, otherwise "vectors"; so the weight of a classifier's head is a matrix. Only "matrices" have weight
    decay.

    A `Trainer` of transformers does not ask the model for groups. Build the optimizer and pass it:
    `Trainer(..., optimizers=(torch.optim.AdamW(groups), None))`, or, with FSDP or DeepSpeed,
    `Trainer(..., optimizer_cls_and_kwargs=(torch.optim.AdamW, {"params": groups}))`. The scheduler of the `Trainer`
    scales the learning rate of each group by the same factor.

    Args:
        model: any module; without layers of kalmix it has no dynamics. It is not changed. A weight that embeddings and
            head share counts as an embedding.
        learning_rate: learning rate of all groups but the dynamics, >= 0.
        weight_decay: weight decay of the matrices, >= 0.
        learning_rates: learning rates of groups that differ from this, by the name of the group, >= 0.
        weight_decays: weight decays of groups that differ from this, by the name of the group, >= 0.

    Returns:
        Groups with the keys "name", "params" (a list), "lr" and "weight_decay", in the order "matrices", "vectors",
        "embeddings", "head", "dynamics", without empty groups. Parameters that do not require gradients are left out.

    Raises:
        ArgumentError: `model` is not a module, a number is not finite or is negative, or a group is unknown.

    Example:
        >>> from kalmix.models import KalmixConfig, KalmixForCausalLM, optimizer_groups
        >>> model = KalmixForCausalLM(KalmixConfig(vocab_size=64, hidden_size=32, layers=["kla"]))
        >>> groups = optimizer_groups(model, learning_rate=1e-3, weight_decay=0.1)
        >>> [(group["name"], group["lr"], group["weight_decay"]) for group in groups]
        [('matrices', 0.001, 0.1), ('vectors', 0.001, 0.0), ('embeddings', 0.001, 0.0), ('head', 0.001, 0.0),
         ('dynamics', 0.0001, 0.0)]
    """
    require(isinstance(model, nn.Module), "model", f"a {type(model).__name__}", "a torch.nn.Module")
    check_number("learning_rate", learning_rate, minimum=0.0)
    check_number("weight_decay", weight_decay, minimum=0.0)
    for argument, given in (("learning_rates", learning_rates), ("weight_decays", weight_decays)):
        require(isinstance(given, Mapping), argument, f"a {type(given).__name__}", "a mapping from groups to numbers")
        for name, value in given.items():
            check_choice(argument, name, NAMES)
            check_number(argument, value, minimum=0.0)
    embeddings, head = _weights(model, "get_input_embeddings"), _weights(model, "get_output_embeddings")
    mixers = (module for module in model.modules() if isinstance(module, Mixer))
    dynamics = {id(value) for mixer in mixers for value in mixer.dynamics_parameters()}
    groups: dict[str, list[nn.Parameter]] = {name: [] for name in NAMES}
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
    rates = {"dynamics": DYNAMICS_LR_FACTOR * learning_rate, **learning_rates}
    decays = {"matrices": weight_decay, **weight_decays}
    return [
        {"name": name, "params": values, "lr": rates.get(name, learning_rate), "weight_decay": decays.get(name, 0.0)}
        for name, values in groups.items()
        if values
    ]


def _weights(model: nn.Module, getter: str) -> set[int]:
    module = getattr(model, getter, lambda: None)()
    return set() if module is None else {id(value) for value in module.parameters()}
