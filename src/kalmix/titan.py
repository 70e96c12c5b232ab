"""Language models of kalmix for torchtitan 0.3: model, parallelism, optimizer and checkpoints.

`torchrun ... -m torchtitan.train --module kalmix.titan --config pretraining --hf_assets_path FOLDER` trains the model
of `FOLDER/config.json`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from kalmix._extras import optional_imports

with optional_imports():
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
    from torchtitan.components.checkpoint import CheckpointManager
    from torchtitan.components.loss import ChunkedLossWrapper
    from torchtitan.components.optimizer import OptimizersContainer, ParamGroupConfig
    from torchtitan.config import TORCH_DTYPE_MAP, TrainingConfig
    from torchtitan.distributed.fsdp import apply_fsdp_to_decoder
    from torchtitan.hf_datasets.text_datasets import HuggingFaceTextDataLoader
    from torchtitan.protocols.model import BaseModel
    from torchtitan.protocols.model_spec import ModelSpec
    from torchtitan.protocols.state_dict_adapter import StateDictAdapter
    from torchtitan.trainer import Trainer

from kalmix.distributed import shard_dynamics
from kalmix.errors import ArgumentError
from kalmix.files import read_json
from kalmix.models import KalmixConfig, KalmixForCausalLM, KalmixModel, optimizer_groups
from kalmix.models.losses import cap_logits
from kalmix.training.estimates import flops_per_token

HEAD = "lm_head.weight"
BETAS = (0.9, 0.95)  # of AdamW, as in torchtitan's own recipes
DEGREES = ("context", "tensor", "pipeline", "expert")  # of parallelism that is refused


class TitanHead(nn.Linear):
    """Output head whose logits are between -cap and cap; torchtitan's chunked loss calls it by itself.

    Args:
        head: layer whose weight this head uses.
        cap: limit of the logits; `None` for no limit.
    """

    def __init__(self, head: nn.Linear, cap: float | None) -> None:
        super().__init__(head.in_features, head.out_features, bias=False, device="meta")
        self.weight = head.weight
        self.cap: float | None = cap

    def forward(self, hidden: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return logits `[..., vocab_size]` of hidden states `[..., D]`."""
        return cap_logits(super().forward(hidden), self.cap)


class TitanModel(BaseModel):
    """`KalmixForCausalLM` as a model of torchtitan. Its parameters have the names of `KalmixForCausalLM`.

    Args:
        config: a `TitanModel.Config`.
    """

    _skip_lm_head = False  # torchtitan sets it for the chunked loss

    @dataclass(kw_only=True, slots=True)
    class Config(BaseModel.Config):
        """Configuration of a `TitanModel`.

        Attributes:
            settings: keyword arguments of `KalmixConfig`; `None` to read `config.json` in torchtitan's
                `hf_assets_path`.
        """

        settings: dict[str, Any] | None = None

        def update_from_config(self, *, config: Any, **kwargs: Any) -> None:
            """Read the model's settings, and refuse what kalmix does not serve under torchtitan.

            Args:
                config: configuration of torchtitan's `Trainer`.
                kwargs: ignored.

            Raises:
                ArgumentError: a kind of parallelism or offload is not served, the loss is "marginal", or
                    `hf_assets_path` has no config.json of a model of kalmix.
                FileError: config.json is damaged.
            """
            for kind in DEGREES:
                name = f"{kind}_parallel_degree"
                if (degree := getattr(config.parallelism, name)) > 1:
                    hint = "Use `kalmix pretrain` for context parallelism" if kind == "context" else ""
                    raise ArgumentError(name, got=degree, expected="1 (models of kalmix use FSDP2 here)", hint=hint)
            if config.training.enable_cpu_offload:
                raise ArgumentError("enable_cpu_offload", got=True, expected="False for models of kalmix")
            if self.settings is None:
                file = Path(config.hf_assets_path) / "config.json"
                settings = read_json(file) if file.is_file() else {}
                if settings.get("model_type") != KalmixConfig.model_type:
                    expected = "a folder with the config.json of a model of kalmix"
                    raise ArgumentError("hf_assets_path", got=repr(config.hf_assets_path), expected=expected)
                self.settings = settings
            if self.kalmix().loss != "cross-entropy":
                raise ArgumentError("loss", got=repr(self.kalmix().loss), expected="'cross-entropy' under torchtitan")

        def kalmix(self) -> KalmixConfig:
            """Return the `KalmixConfig` of `settings`."""
            return KalmixConfig.from_dict(dict(self.settings or {}))

        def get_nparams_and_flops(self, model: nn.Module, seq_len: int) -> tuple[int, int]:
            """Return the number of parameters, and the FLOPs of a training step per token."""
            return sum(x.numel() for x in model.parameters()), round(flops_per_token(model, seq_len))

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config: TitanModel.Config = config
        model = KalmixForCausalLM(config.kalmix())
        assert isinstance(model.lm_head, nn.Linear)
        self.enable_weight_tying: bool = bool(model.config.tie_word_embeddings)
        self.model: KalmixModel = model.model
        self.lm_head: TitanHead = TitanHead(model.lm_head, model.config.logit_cap)

    # Names by which torchtitan shards a model.

    @property
    def tok_embeddings(self) -> nn.Module:
        """Embedding."""
        return self.model.embed_tokens

    @property
    def norm(self) -> nn.Module:
        """Norm after the last block."""
        return self.model.norm

    @property
    def layers(self) -> dict[str, nn.Module]:
        """Blocks by their index."""
        return dict(self.model.layers.named_children())

    def get_input_embeddings(self) -> nn.Module:
        """Return the embedding, for `optimizer_groups`."""
        return self.tok_embeddings

    def get_output_embeddings(self) -> nn.Module:
        """Return the output head, for `optimizer_groups`."""
        return self.lm_head

    def verify_module_protocol(self) -> None:
        """Do nothing: layers of kalmix are plain modules."""

    def init_states(self, *, buffer_device: torch.device | None = None) -> None:
        """Initialize the weights as `KalmixForCausalLM` does after the same seed, on any number of ranks.

        The first rank holds the whole model in host memory and sends it to the others.

        Args:
            buffer_device: ignored; there are no buffers.
        """
        if self.enable_weight_tying:
            self.lm_head.weight = self.tok_embeddings.get_parameter("weight")
        whole: dict[str, Any] = {}
        with torch.random.fork_rng(devices=[]):
            if torch.distributed.get_rank() == 0:
                whole = dict(KalmixForCausalLM(self.config.kalmix()).state_dict())
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        set_model_state_dict(self, whole, options=options)

    def forward(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        """Compute logits, or hidden states if torchtitan's chunked loss applies the head.

        Args:
            tokens: `[B, T]`, token ids.
            positions: `[B, T]`, position of each token in its document; documents are filtered by themselves.

        Returns:
            `[B, T, vocab_size]`, or `[B, T, D]`.
        """
        hidden = self.model(tokens, position_ids=positions, use_cache=False).last_hidden_state
        return hidden if self._skip_lm_head else self.lm_head(hidden)


def parallelize(
    model: TitanModel, *, parallel_dims: Any, training: Any, parallelism: Any, compile_config: Any, **others: Any
) -> TitanModel:
    """Compile each block, apply activation checkpointing, and shard the model by FSDP2 with dynamics in float32.

    Args:
        model: model on the device "meta".
        parallel_dims: meshes.
        training: configuration, for its dtypes.
        parallelism: configuration of FSDP2.
        compile_config: whether blocks are compiled.
        others: `ac_config`, the activation checkpointing or `None`, and its `dump_folder`.

    Returns:
        The model.
    """
    if compile_config.enable and "model" in compile_config.components:
        # Not torchtitan's `apply_compile`: hooks of FSDP2 around dynamics break graphs, which must be whole there.
        for block in model.layers.values():
            block.compile(backend=compile_config.backend)
    if (ac_config := others["ac_config"]) is not None:
        ac_config.build(dump_folder=others["dump_folder"]).apply(model.model)
    shards = "fsdp" if parallelism.spmd_backend == "partial_dtensor" else "dp_shard"
    mesh = parallel_dims.get_mesh(["dp_replicate", shards] if parallel_dims.dp_replicate_enabled else [shards])
    shard_dynamics(model, mesh)
    decoder: Any = model  # it has the attributes of torchtitan's `Decoder` that are used
    apply_fsdp_to_decoder(
        decoder,
        mesh,
        param_dtype=TORCH_DTYPE_MAP[training.mixed_precision_param],
        reduce_dtype=TORCH_DTYPE_MAP[training.mixed_precision_reduce],
        pp_enabled=False,
        reshard_after_forward_policy=parallelism.fsdp_reshard_after_forward,
        enable_symm_mem=parallelism.enable_fsdp_symm_mem,
    )
    return model


class TitanAdapter(StateDictAdapter):
    """Conversion to and from checkpoints of `KalmixForCausalLM`, which have the same names.

    Args:
        model_config: configuration of the model.
        hf_assets_path: folder of the model.
    """

    model_config: TitanModel.Config

    def to_hf(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Return the weights as `save_pretrained` writes them: without a head that is tied to the embedding."""
        tied = self.model_config.kalmix().tie_word_embeddings
        return {name: value for name, value in state_dict.items() if not (tied and name == HEAD)}

    def from_hf(self, hf_state_dict: dict[str, Any]) -> dict[str, Any]:
        """Return the weights as `TitanModel.state_dict` names them."""
        tied = self.model_config.kalmix().tie_word_embeddings
        return {**hf_state_dict, **({HEAD: hf_state_dict["model.embed_tokens.weight"]} if tied else {})}


class TitanOptimizers(OptimizersContainer):
    """AdamW with the parameter groups of `kalmix.models.optimizer_groups`: dynamics learn at a tenth of the rate.

    Args:
        config: a `TitanOptimizers.Config`.
        model_parts: one `TitanModel`.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(OptimizersContainer.Config):
        """Configuration of the optimizer.

        Attributes:
            lr: learning rate of all groups but the dynamics.
            weight_decay: weight decay of the matrices.
        """

        lr: float = 8e-4
        weight_decay: float = 0.1

    def __init__(self, config: Config, *, model_parts: list[nn.Module]) -> None:
        (model,) = model_parts
        names = {id(value): name for name, value in model.named_parameters()}
        groups = [
            ParamGroupConfig(
                pattern=f"^({'|'.join(re.escape(names[id(x)]) for x in group['params'])})$",
                optimizer_name="AdamW",
                optimizer_kwargs={"lr": group["lr"], "weight_decay": group["weight_decay"], "betas": BETAS},
            )
            for group in optimizer_groups(model, learning_rate=config.lr, weight_decay=config.weight_decay)
        ]
        super().__init__(replace(config, param_groups=groups), model_parts=model_parts)


def model_spec(config: KalmixConfig | None = None) -> ModelSpec:
    """Return torchtitan's description of a model of kalmix.

    Args:
        config: configuration. Default: `config.json` in the `hf_assets_path` of torchtitan's configuration.
    """
    return ModelSpec(
        name="kalmix",
        flavor="hf_assets_path" if config is None else "config",
        model=TitanModel.Config(settings=None if config is None else config.to_diff_dict()),
        parallelize_fn=parallelize,
        pipelining_fn=None,
        post_optimizer_build_fn=None,
        state_dict_adapter=TitanAdapter,
    )


def pretraining() -> Trainer.Config:
    """Return torchtitan's configuration of a run; options of the command line change it.

    `hf_assets_path` must be a folder with a model's `config.json` and a tokenizer.
    """
    return Trainer.Config(
        model_spec=model_spec(),
        loss=ChunkedLossWrapper.Config(),
        optimizer=TitanOptimizers.Config(),
        training=TrainingConfig(disable_cuda_graphs=True),
        dataloader=HuggingFaceTextDataLoader.Config(dataset="c4"),
        checkpoint=CheckpointManager.Config(),
    )
