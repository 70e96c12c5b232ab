"""Tensor parallelism by the models' own plan, which transformers applies with `tp_plan="auto"`."""

from __future__ import annotations

from typing import Any

from kalmix._extras import optional_imports

with optional_imports():
    from transformers.distributed.tensor_parallel import ALL_PARALLEL_STYLES, TensorParallelLayer

from kalmix.distributed import gather_heads, shard_heads
from kalmix.errors import ArgumentError
from kalmix.models.configuration import HEADS


class Heads(TensorParallelLayer):
    """Style of a module that `kalmix.distributed.shard_heads` divides after its weights are loaded."""

    def install_forward(self, module: Any, mesh: Any) -> Any:
        """Leave the module as it is."""
        return module


ALL_PARALLEL_STYLES.register(HEADS, Heads())  # pyright: ignore[reportArgumentType]


def fsdp_mesh(distributed_config: Any, mesh: Any) -> Any:
    """Return the part of transformers' mesh over which FSDP2 shards parameters."""
    if not hasattr(mesh, "get_mesh"):  # transformers < 5.21 pass the mesh itself
        return mesh["fsdp"] if mesh.ndim > 1 else mesh
    return mesh.get_mesh(("dp_replicate", "fsdp") if distributed_config.dp_replicate_size > 1 else "fsdp")


def check_stages(model: Any, distributed_config: Any) -> None:
    """Raise `ArgumentError` if pipeline parallelism would leave a rank without blocks."""
    stages, blocks = getattr(distributed_config, "pp_size", None) or 1, model.config.num_hidden_layers
    if stages > blocks:
        raise ArgumentError("pp_size", got=stages, expected=f"at most {blocks}, the number of blocks")


def shard_loaded(model: Any) -> None:
    """Divide the heads of a model that transformers has loaded, if its configuration asks for tensor parallelism.

    Raises:
        ArgumentError: the configuration combines it with FSDP2 or pipeline parallelism, or a layer cannot be divided.
    """
    settings = getattr(model.config, "distributed_config", None)
    if settings is None or settings.tp_size == 1 or getattr(model, "_device_mesh", None) is None:
        return
    for name in ("fsdp_size", "pp_size"):
        if (size := getattr(settings, name, None) or 1) > 1:
            got = f"{size} with tp_size={settings.tp_size}"
            raise ArgumentError(name, got=got, expected="1 with tensor parallelism")
    mesh = model._device_mesh
    shard_heads(model, mesh["tp"] if mesh.ndim > 1 else mesh)
    model.heads_are_sharded = True


def whole_weights(model: Any, *, keep: bool) -> dict[str, Any]:
    """Return the whole weights of a divided model on ranks that `keep` them; every rank calls this function."""
    weights = gather_heads(model)
    return weights if keep else {}
