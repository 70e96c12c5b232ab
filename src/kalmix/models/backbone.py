"""Base model for transformers: from tokens to hidden states. The models with a head stand on it."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from kalmix._extras import optional_imports

with optional_imports():
    from transformers import PreTrainedConfig, PreTrainedModel
    from transformers.cache_utils import Cache, DynamicCache
    from transformers.modeling_outputs import BaseModelOutputWithPast
    from transformers.utils import can_return_tuple

from kalmix.distributed.context import check_no_other_sequence_parallelism
from kalmix.distributed.sharding import DYNAMICS, keep_float32, shard_dynamics, start_in_float32
from kalmix.errors import ArgumentError
from kalmix.layers import Attention
from kalmix.layers.modules import RMSNorm
from kalmix.models.blocks import Block, Posterior
from kalmix.models.cache import CacheOfCall, belief_layers
from kalmix.models.cache_name import CACHE_NAMES, BothCacheNames, given_cache, with_cache
from kalmix.models.checkpointed_block import KalmixBlock
from kalmix.models.configuration import KalmixConfig
from kalmix.models.loading import load_checked
from kalmix.models.parallel_styles import check_stages, fsdp_mesh, whole_weights
from kalmix.models.prefill import prefill_bounds
from kalmix.models.segments_from_inputs import InputLayout, find_layout
from kalmix.models.stack import BlockStack, attention_maps
from kalmix.types import Filtered, replace_fields
from kalmix.validation import FLOATS, check_dtype_and_device, check_shape


@dataclass
class KalmixModelOutput(BothCacheNames, BaseModelOutputWithPast):  # pyright: ignore  # a property since 5.24
    """Output of `KalmixModel`, as transformers defines it: a dataclass whose keys omit fields that are `None`.

    Fields are not checked here. `last_hidden_state` is always there; another field is `None` unless a call requests it,
    by the argument in parentheses. There are L blocks, and D is `config.hidden_size`.

    Attributes:
        last_hidden_state: `[B, T, D]`, after the final norm, in the dtype of the model.
        cache: also `past_key_values`; `None` if none was used (`use_cache=True`; the default in evaluation mode).
        hidden_states: L + 1 tensors `[B, T, D]`: the input of each block, then `last_hidden_state`
            (`output_hidden_states=True`).
        attentions: L tensors `[B, M, T, T]` in the dtype of the model, the `Mixer.attention_map` of each layer with its
            M heads or channels. Entry (i, j) is the weight of token j in the read-out at token i
            (`output_attentions=True`, which needs an input without padding, packing and earlier tokens).
        beliefs: L `Filtered`, of each layer's output: `mean` `[B, T, D]` in the dtype of the model, `variance`
            `[B, T, D]` in float32 (float64 if the model is), and the state after the last token as `belief`. A variance
            is `None` for a layer without a posterior (`output_beliefs=True`).
        posterior: `kalmix.models.blocks.Posterior` of the last block's read-out, with `mean` and `variance`
            `[B, T, E]`, in dtypes like those of `beliefs`; its tokens are in the order of `layout`, and E is the width
            of the read-out, the output of the layer before gate and projection (`output_posterior=True`, which needs a
            last layer with a posterior).
        layout: how padded or packed tokens were arranged. Its `segments` are their sequences, `None` if each row is
            one; its `order` `[B, T]` is the input column of each token, `None` if no token was moved
            (`output_layout=True`).

    Example:
        >>> from kalmix.models import KalmixConfig, KalmixModel
        >>> model = KalmixModel(KalmixConfig(vocab_size=64, hidden_size=32, layers=["kla", "kla"])).eval()
        >>> output = model(torch.randint(64, (2, 10)), output_beliefs=True)
        >>> output.last_hidden_state.shape, len(output.beliefs)
        (torch.Size([2, 10, 32]), 2)
    """

    beliefs: tuple[Filtered, ...] | None = None
    posterior: Posterior | None = None
    layout: InputLayout | None = None


class KalmixPreTrainedModel(PreTrainedModel):
    """Base class of the models for transformers: initialization, checkpoints, features."""

    config_class: type[PreTrainedConfig] | None = KalmixConfig
    base_model_prefix = "model"
    main_input_name = "input_ids"
    supports_gradient_checkpointing = True
    _no_split_modules = ["KalmixBlock"]  # noqa: RUF012
    _skip_keys_device_placement = [*CACHE_NAMES]  # noqa: RUF012
    _supports_sdpa = True
    _can_compile_fullgraph = True
    _checked_float32 = False
    heads_are_sharded = False  # whether ranks divide the heads among them

    def __init__(self, config: PreTrainedConfig, *args: Any, **kwargs: Any) -> None:
        if isinstance(config, PreTrainedConfig) and not isinstance(config, KalmixConfig):
            raise ArgumentError("config", got=f"a {type(config).__name__}", expected="a KalmixConfig")
        super().__init__(config, *args, **kwargs)

    def post_init(self) -> None:
        """Find the modules that stay in float32, then initialize the weights."""
        names = {name.rpartition(".")[2] for name, _ in self.named_modules()}
        self._keep_in_fp32_modules_strict = names & DYNAMICS
        # FSDP shards these modules by themselves, so that `keep_float32` can give them their own dtype.
        kept = start_in_float32(self, DYNAMICS)
        self._no_split_modules = ["KalmixBlock", *sorted({type(module).__name__ for module in kept})]
        super().post_init()
        self._apply_attn_implementation()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call `forward`; first refuse accelerate's sequence parallelism and, under FSDP2, keep dynamics in float32."""
        if not torch.compiler.is_compiling():
            check_no_other_sequence_parallelism()
        if not torch.compiler.is_compiling() and not self._checked_float32 and hasattr(self, "_get_fsdp_state"):
            keep_float32(self, self._keep_in_fp32_modules_strict or ())
            self._checked_float32 = True
        return super().__call__(*args, **kwargs)

    @classmethod
    def maybe_distribute_model(cls, model: Any, distributed_config: Any, mesh_manager: Any) -> Any:
        """Shard an empty model, before transformers loads its weights; dynamics act in float32."""
        check_stages(model, distributed_config)
        if mesh_manager is not None and distributed_config.fsdp_size > 1:
            shard_dynamics(model, fsdp_mesh(distributed_config, mesh_manager))
        return super().maybe_distribute_model(model, distributed_config, mesh_manager)

    def save_pretrained(self, *args: Any, **kwargs: Any) -> Any:
        """Write a checkpoint, as transformers does. Raise `RuntimeError` if each rank has some of the blocks only."""
        if getattr(self, "_pp_stage", None) is not None:
            raise RuntimeError(
                "`save_pretrained` cannot write a model whose blocks are divided among ranks (`pp_size`)"
            )
        return super().save_pretrained(*args, **kwargs)

    def gather_sharded_state_dict_for_save(self, model_to_save: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Return whole weights on the rank that saves them."""
        if self.heads_are_sharded:
            return whole_weights(model_to_save, keep=kwargs.get("save_on_this_rank", True))
        return super().gather_sharded_state_dict_for_save(model_to_save, *args, **kwargs)

    def _resolve_parallel_plans(self, distributed_config: Any) -> Any:
        *plans, fsdp_plan = super()._resolve_parallel_plans(distributed_config)
        rest = {name: style for name, style in fsdp_plan.items() if name.rpartition(".")[2] not in DYNAMICS}
        return *plans, rest  # `maybe_distribute_model` has sharded the dynamics

    def set_attn_implementation(self, attn_implementation: str | dict[str, str], *args: Any, **kwargs: Any) -> None:
        """Choose how the layers "attention" compute softmax attention: "sdpa" or "eager".

        Args:
            attn_implementation: name; transformers refuses the names of other implementations.
            args: passed to transformers.
            kwargs: passed to transformers.
        """
        super().set_attn_implementation(attn_implementation, *args, **kwargs)
        self._apply_attn_implementation()

    def _apply_attn_implementation(self) -> None:
        for module in self.modules():
            if isinstance(module, Attention):
                module.implementation = self.config._attn_implementation or "sdpa"

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Embedding) or module in (getattr(self, name, None) for name in ("lm_head", "score")):
            zero = self.config.zero_init and not isinstance(module, nn.Embedding)
            for name, weight in module.named_parameters(recurse=False):
                if zero or name == "bias":
                    nn.init.zeros_(weight)
                else:
                    nn.init.normal_(weight, std=self.config.initializer_range)
        elif isinstance(module, nn.Linear) and module in (projections := self._output_projections()):
            scale = 0.0 if self.config.zero_init else (module.in_features * len(projections)) ** -0.5
            nn.init.normal_(module.weight, std=scale * self.config.initializer_range)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif callable(reset := getattr(module, "reset_parameters", None)):
            reset()

    def _output_projections(self) -> list[nn.Linear]:
        """Return the output projections of mixers and MLPs."""
        parts = (part for block in self.modules() if isinstance(block, Block) for part in (block.mixer, block.mlp))
        return [projection for part in parts if (projection := getattr(part, "out_proj", None)) is not None]

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *args: Any, **kwargs: Any) -> Any:
        """Load a checkpoint from safetensors files. A local folder is checked completely before it is loaded.

        Args:
            pretrained_model_name_or_path: folder, or name on the Hugging Face Hub.
            args: passed to transformers.
            kwargs: passed to transformers, except `strict`. With `strict=False`, weights may be missing or unknown:
                transformers lists them in a warning and initializes the missing ones. It is the default if
                `output_loading_info` or `state_dict` is given. With `ignore_mismatched_sizes=True`, weights may have
                another shape. If another class wrote the checkpoint, its head may be missing or unknown in any case.

        Returns:
            The model in evaluation mode.

        Raises:
            ArgumentError: the checkpoint is damaged or holds pickles, its weights are not finite or not those that its
                configuration describes.
        """
        return load_checked(cls, super().from_pretrained, pretrained_model_name_or_path, *args, **kwargs)

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoModel") -> None:
        """Do nothing; see `KalmixConfig.register_for_auto_class`."""


class KalmixModel(KalmixPreTrainedModel):
    """Base model for the library transformers: embedding, blocks of any layers, RMSNorm. Use it for hidden states.

    `AutoModel.from_pretrained` loads it from a checkpoint of any model of kalmix, without the head. The other models
    contain it as `model`.

    Args:
        config: a `KalmixConfig`.

    Shape:
        `output = model(input_ids)` returns a `KalmixModelOutput`. `input_ids` is int64 or int32 `[B, T]`, from 0 to
        `vocab_size - 1`; `inputs_embeds` `[B, T, D]` may replace it. Padding is marked by `attention_mask` `[B, T]`, 0
        at padding, and packed sequences by `cu_seq_lens_q`, `seq_idx` or `position_ids`. If several are given, the
        first of `cu_seq_lens_q`, `seq_idx`, `attention_mask` and `position_ids` is used; the others are ignored.
        `output_hidden_states`, `output_attentions`, `output_beliefs`, `output_posterior` and `output_layout` request
        fields of the output. `output_beliefs` works with every layer; the variance is `None` for one without a
        posterior. `forward` documents all arguments. Unknown ones, misspelt ones too, are ignored. The hidden states
        `[B, T, D]` are in the dtype of the parameters, and have no meaning at padding.

    Raises:
        ArgumentError: `config` is that of another model, or an option of a layer does not fit the sizes; or, in a call,
            an argument has the wrong shape, dtype or type; both or none of `input_ids` and `inputs_embeds` are given;
            `output_posterior` is set and the last layer has no posterior; or `output_attentions` is set, and a layer
            has no attention map, or the input is padded, packed or continues a cache that holds tokens.
        TypeError: `config` is not a configuration.
        IndexError: in a call on the CPU, an id is outside the vocabulary. On a GPU, this is an assertion of the device.

    Example:
        >>> from kalmix.models import KalmixConfig, KalmixModel
        >>> config = KalmixConfig(vocab_size=64, hidden_size=32, layers=["kla", "attention"])
        >>> model = KalmixModel(config).eval()
        >>> model(torch.randint(64, (2, 16))).last_hidden_state.shape
        torch.Size([2, 16, 32])
    """

    def __init__(self, config: KalmixConfig) -> None:
        super().__init__(config)
        self.embed_tokens: nn.Module = nn.Embedding(config.vocab_size, config.hidden_size)
        blocks = (
            KalmixBlock(config.hidden_size, spec, config.norm_eps, config.mlp_activation)
            for spec in config.layer_specs()
        )
        self.embedding_norm: RMSNorm | None = None
        if config.embedding_norm:
            self.embedding_norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.layers: BlockStack = BlockStack(blocks, config.propagate)
        self.norm: RMSNorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        output_beliefs: bool = False,
        output_posterior: bool = False,
        output_layout: bool = False,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        cu_seq_lens_q: Tensor | None = None,
        seq_idx: Tensor | None = None,
        tokens_to_keep: int = 0,
        past_key_values: Cache | None = None,
        **kwargs: Any,
    ) -> KalmixModelOutput:
        """Compute hidden states.

        With a cache and without gradients, a long input is filtered in chunks; see `KalmixConfig.prefill_tokens`.

        Args:
            input_ids: `[B, T]`, token ids; give either these or `inputs_embeds`.
            attention_mask: `[B, T]`, or `[B, past + T]` with a cache: 0 at padding, which may be anywhere. Or
                `[B, 1, T, T]`, block-causal, without a cache.
            position_ids: `[B, T]`, start anew in each packed sequence. Used only without mask and tokens in the cache,
                and only to find the sequences; positions are counted in each sequence.
            cache: a `DynamicCache`, which is read and updated.
            inputs_embeds: `[B, T, D]`, embedded tokens.
            use_cache: return a cache. Default: `config.use_cache` in evaluation mode, otherwise not.
            output_beliefs: return each layer's belief about its output.
            output_posterior: return the posterior of the last block's read-out.
            output_layout: return the order in which padded or packed tokens were filtered.
            output_hidden_states: return the input of each block and the output of the final norm.
            output_attentions: return each layer's `attention_map`; memory is O(T^2) per head or channel.
            cu_seq_lens_q: int `[N + 1]`, cumulative lengths of N sequences packed into one row.
            seq_idx: `[B, T]`, index of the sequence that each token belongs to.
            tokens_to_keep: return `last_hidden_state` of the last so many tokens; 0 for all.
            past_key_values: other name of `cache`, the only one that transformers before 5.24 uses.
            kwargs: arguments of other models; ignored. With `return_dict=False`, the output is a tuple.

        `cu_seq_lens_q`, `seq_idx`, `attention_mask` and `position_ids` describe the sequences; the first that is given,
        in this order, is used, and the others are ignored: `attention_mask` then marks no padding. Outputs at masked
        tokens have no meaning.

        Returns:
            A `KalmixModelOutput`.

        Raises:
            ArgumentError: a tensor has the wrong shape or dtype, a 4-D mask is not block-causal, the cache is of
                another type, model or batch size; `output_posterior` is set and the last layer has no posterior; or
                `output_attentions` is set, and a layer has no attention map, there are earlier tokens in the cache, or
                the input is packed or padded. In training on a GPU and in compiled code, where the values of a mask
                are not read, any `attention_mask` counts as padding here.
        """
        given = _check_input(input_ids, inputs_embeds, self.config.hidden_size)
        if use_cache is None:
            use_cache = self.config.use_cache and not self.training
        cache = given_cache({"cache": cache, "past_key_values": past_key_values})
        if cache is None and use_cache:
            cache = DynamicCache(config=self.config)
        every_layer = belief_layers(cache, len(self.layers))
        cache_layers = self.layers.of_this_rank(every_layer) if every_layer else []
        has_past = len(cache_layers) > 0 and cache_layers[0].is_initialized
        layout = find_layout(
            *given.shape[:2],
            attention_mask=attention_mask,
            position_ids=None if has_past else position_ids,
            cu_seq_lens_q=cu_seq_lens_q,
            seq_idx=seq_idx,
            max_sequences=self.config.max_packed_sequences,
            cached=len(cache_layers) > 0,
        )
        if output_hidden_states is None:
            output_hidden_states = self.config.output_hidden_states
        if output_attentions is None:
            output_attentions = self.config.output_attentions
        if output_attentions and (has_past or layout.segments is not None):
            problem = "is set for an input with earlier tokens, packing or padding"
            raise ArgumentError("output_attentions", problem=problem, expected="inputs of one sequence per row")
        bounds = [0, given.shape[1]]
        if not (output_attentions or output_hidden_states or output_beliefs or output_posterior):
            bounds = prefill_bounds(given, cache_layers, self.layers.mixers, self.config.prefill_tokens)
        output, kept, chunked = None, [], len(bounds) > 2
        for first, end in pairwise(bounds):
            part = layout.slice(first, end) if chunked else layout
            output = self.layers(
                self._embed(part.compact(given[:, first:end] if chunked else given)),
                layout=part,
                cache=CacheOfCall(cache_layers, part, []) if cache_layers else None,
                output_states=bool(output_attentions),
                output_hidden_states=bool(output_hidden_states),
                output_beliefs=output_beliefs,
                output_posterior=output_posterior,
            )
            if not (chunked and tokens_to_keep) or end > bounds[-1] - tokens_to_keep:
                kept.append(part.restore(self.norm(output.hidden_state)))
        assert output is not None
        if len(every_layer) > len(cache_layers):
            for layer in every_layer:
                if layer not in cache_layers:
                    layer.count_as(cache_layers[0])
        last_hidden_state = torch.cat(kept, dim=1) if len(kept) > 1 else kept[0]
        hidden_states = (*output.hidden_states, last_hidden_state)
        if tokens_to_keep:
            last_hidden_state = last_hidden_state[:, -tokens_to_keep:]
        return KalmixModelOutput(
            last_hidden_state=last_hidden_state,
            **with_cache(cache),
            hidden_states=hidden_states if output_hidden_states else None,
            attentions=attention_maps(self.layers.mixers, output.mixer_inputs) if output_attentions else None,
            beliefs=tuple(_restore_belief(layout, belief) for belief in output.beliefs) if output_beliefs else None,
            posterior=output.posterior,
            layout=layout if output_layout else None,
        )

    def _embed(self, x: Tensor) -> Tensor:
        """Embed token ids `[B, T]`; embedded tokens `[B, T, D]` are kept. Normalise if the model does so."""
        x = x if x.is_floating_point() else self.embed_tokens(x)
        embedded = not isinstance(self.layers[0], nn.Identity)  # otherwise x comes from another rank
        return self.embedding_norm(x) if self.embedding_norm is not None and embedded else x


def _check_input(input_ids: Tensor | None, inputs_embeds: Tensor | None, width: int) -> Tensor:
    """Return the one that is given of token ids `[B, T]` and embedded tokens `[B, T, width]`."""
    given = input_ids if inputs_embeds is None else inputs_embeds
    if given is None or (input_ids is not None and inputs_embeds is not None):
        problem = f"and `inputs_embeds` are {'missing' if given is None else 'both given'}"
        raise ArgumentError("input_ids", problem=problem, expected="exactly one of the two")
    if inputs_embeds is None:
        check_shape("input_ids", given, "B T", {})
        check_dtype_and_device("input_ids", given, (torch.int64, torch.int32), given.device)
    else:
        check_shape("inputs_embeds", given, "B T D", {"D": width})
        check_dtype_and_device("inputs_embeds", given, FLOATS, given.device)
    return given


def _restore_belief(layout: InputLayout, belief: Filtered) -> Filtered:
    """Return a belief about outputs in the order of the input."""
    variance = None if belief.variance is None else layout.restore(belief.variance)
    return replace_fields(belief, mean=layout.restore(belief.mean), variance=variance)
