"""The model for transformers: configuration, cache, generation, checkpoints."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, fields
from inspect import get_annotations
from pathlib import Path
from typing import Any, ClassVar

import torch
from huggingface_hub.dataclasses import strict
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache
from transformers.utils import ModelOutput as TransformersOutput

from kalmix.errors import ArgumentError, FileError
from kalmix.files import FORMAT, check_format
from kalmix.models.blocks import layer_specs, layers_to_json
from kalmix.models.cache import LAYER_TYPE, belief_layers
from kalmix.models.causal_lm import EMBEDDING_STD, PROPAGATIONS, LanguageModel, ModelOutput
from kalmix.models.checkpoint_io import TIED_WEIGHTS
from kalmix.models.folder import check_finite, check_weights, read_config, read_headers
from kalmix.models.losses import cross_entropy, marginal_likelihood, next_token_targets
from kalmix.models.segments_from_inputs import find_segments
from kalmix.segments import Segments
from kalmix.types import Filtered
from kalmix.validation import check_choice, check_positive_int, check_types

LOSSES = ("cross-entropy", "marginal")
REMOTE_MODULE = "modeling_kalmix"
REMOTE_CODE = "from kalmix.models import KalmixConfig, KalmixForCausalLM  # noqa: F401\n"


@strict  # by which transformers calls our `validate_layer_type` and not its own
class KalmixConfig(PreTrainedConfig):
    """Configuration of a `KalmixForCausalLM`.

    Args:
        vocab_size: number of tokens.
        hidden_size: D.
        layers: one entry a block: a mixer's name ("kla", "attention") or a mapping of its options, such as
            `{"mixer": "attention", "heads": 4}`; `"mlp"` sets the width of the block's MLP (0 for none). So
            `["attention"] * 12` is a GPT, `["kla"] * 12` a KLA and `["attention"] * 11 + ["kla"]` the paper's hybrid.
            A `Design` among the options is spelled out.
        tie_word_embeddings: share the embedding's weight with the head.
        norm_eps: of the norms before mixers, MLPs and head.
        propagate: what blocks pass on in training: "mean", or one "sample" of their posterior (section 5.5).
        loss: "cross-entropy" on the posterior mean, or "marginal" likelihood under the last layer's posterior
            (equations 24 and 25).
        loss_samples: Monte-Carlo samples S of the marginal likelihood.
        loss_chunk_size: how many of them are decoded at once, which bounds memory.
        use_cache: whether evaluation without labels returns a cache unless told otherwise.
        format: version of config.json and the weights beside it.

    Raises:
        ArgumentError: an unknown mixer, option, loss or propagation, a value of another type, or a newer format.
    """

    model_type = "kalmix"
    keys_to_ignore_at_inference: ClassVar[list[str]] = ["past_key_values", "beliefs"]

    vocab_size: int = 32768
    hidden_size: int = 512
    layers: list[Any] = field(default_factory=lambda: ["kla"] * 12)
    tie_word_embeddings: bool = False
    norm_eps: float = 1e-6
    propagate: str = "mean"
    loss: str = "cross-entropy"
    loss_samples: int = 10
    loss_chunk_size: int = 1
    use_cache: bool = True
    format: int = FORMAT
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        hints = get_annotations(KalmixConfig, eval_str=True)
        check_types(hints, {name: getattr(self, name) for name in CONFIG_FIELDS if name != "layers"})
        check_format({"format": self.format}, Path("config.json"))
        self.format = FORMAT
        layer_specs(self.layers, self.hidden_size)
        self.layers = layers_to_json(self.layers)
        check_choice("loss", self.loss, LOSSES)
        check_choice("propagate", self.propagate, PROPAGATIONS)
        for name in ("vocab_size", "loss_samples", "loss_chunk_size"):
            check_positive_int(name, getattr(self, name))
        super().__post_init__(**kwargs)
        self.auto_map: dict[str, str] = {
            "AutoConfig": f"{REMOTE_MODULE}.KalmixConfig",
            "AutoModelForCausalLM": f"{REMOTE_MODULE}.KalmixForCausalLM",
        }

    @property
    def num_hidden_layers(self) -> int:
        """How many blocks there are."""
        return len(self.layers)

    @property
    def layer_types(self) -> list[str]:
        """The kind of cache of each block, by which `DynamicCache(config=...)` builds it."""
        return [LAYER_TYPE] * len(self.layers)

    def validate_layer_type(self) -> None:
        """Nothing to do: the mixers were checked, and the cache's kind is our own."""

    def save_pretrained(self, save_directory: Any, push_to_hub: bool = False, **kwargs: Any) -> None:
        """Save, with a module by which `AutoModelForCausalLM` finds kalmix in a process that has not imported it."""
        path = Path(save_directory)
        path.mkdir(parents=True, exist_ok=True)
        (path / f"{REMOTE_MODULE}.py").write_text(REMOTE_CODE, encoding="utf-8")
        super().save_pretrained(save_directory, push_to_hub=push_to_hub, **kwargs)

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoConfig") -> None:
        """Nothing to do: a checkpoint names kalmix itself, and must not carry a copy of this file."""


CONFIG_FIELDS = tuple(x.name for x in fields(KalmixConfig) if x.name in KalmixConfig.__annotations__)
# Keys that transformers may add to config.json.
INHERITED_KEYS = {*PreTrainedConfig().to_dict(), "auto_map", "torch_dtype", "_commit_hash", "attn_implementation"}


@dataclass
class KalmixOutput(TransformersOutput):
    """What the model returns.

    Attributes:
        loss: nats per target, if labels were given.
        logits: `[B, T, vocabulary]` on the posterior mean.
        past_key_values: the cache, if one was used.
        hidden_states: `[B, T, D]` before each block and behind the last, if asked for.
        beliefs: each layer's `Filtered` in output space, if asked for: mean and variance `[B, T, D]` (variance
            `None` for layers without a posterior) and the layer's state.
    """

    loss: Tensor | None = None
    logits: Tensor | None = None
    past_key_values: Cache | None = None
    hidden_states: tuple[Tensor, ...] | None = None
    beliefs: tuple[Filtered, ...] | None = None


class KalmixForCausalLM(PreTrainedModel, GenerationMixin):
    """A causal language model whose layers are any of kalmix's mixers; see `KalmixConfig`."""

    config_class: type[PreTrainedConfig] | None = KalmixConfig
    base_model_prefix = "model"
    main_input_name = "input_ids"
    supports_gradient_checkpointing = True
    accepts_loss_kwargs = True
    _no_split_modules = ["Block"]  # noqa: RUF012
    _tied_weights_keys = TIED_WEIGHTS
    _keep_in_fp32_modules_strict = ["dynamics", "value_dynamics"]  # noqa: RUF012
    _supports_sdpa = True

    def __init__(self, config: KalmixConfig) -> None:
        super().__init__(config)
        self.model: LanguageModel = _build_language_model(config)
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        # `LanguageModel.reset_parameters` is not called: transformers passes over modules that own no parameters.
        if isinstance(module, nn.Embedding) or module is self.model.lm_head:
            nn.init.normal_(module.get_parameter("weight"), std=EMBEDDING_STD)
        elif callable(reset := getattr(module, "reset_parameters", None)):
            reset()

    def get_input_embeddings(self) -> nn.Module:
        """The embedding."""
        return self.model.embed_tokens

    def set_input_embeddings(self, value: nn.Module) -> None:
        """Replace the embedding."""
        self.model.embed_tokens = value

    def get_output_embeddings(self) -> nn.Module:
        """The head."""
        return self.model.lm_head

    def set_output_embeddings(self, new_embeddings: nn.Module) -> None:
        """Replace the head."""
        self.model.lm_head = new_embeddings

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        output_beliefs: bool = False,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        cu_seq_lens_q: Tensor | None = None,
        seq_idx: Tensor | None = None,
        num_items_in_batch: Tensor | int | None = None,
        **kwargs: Any,
    ) -> KalmixOutput | tuple[Any, ...]:
        """Predict the next tokens.

        Args:
            input_ids: `[B, T]`, or `inputs_embeds` `[B, T, D]`.
            attention_mask: `[B, T]` or, after a cache, `[B, past + T]`: 0 at padding, left or right, without holes.
            cu_seq_lens_q, seq_idx, position_ids: how sequences are packed into rows; the first that is given decides,
                `position_ids` only without a mask or a cache. See `packing.find_segments`. Positions themselves are
                counted in each sequence.
            past_key_values: a `DynamicCache`, read and written.
            labels: `[B, T]` as `input_ids`, shifted inside; -100 is ignored.
            output_beliefs: collect what every layer knows.
            logits_to_keep: logits of the last so many tokens (0 for all) or of these positions, where there is no loss.
            num_items_in_batch: divides the loss instead of the number of targets here.
            kwargs: what other models take; ignored.

        Raises:
            ArgumentError: another shape, a hole in the mask, a cache made for another model, or a marginal loss
                where the last layer has no posterior.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ArgumentError("input_ids", got="given with or without inputs_embeds", expected="one of the two")
        x = self.model.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        if use_cache is None:
            use_cache = self.config.use_cache and not self.training and labels is None
        if past_key_values is None and use_cache:
            past_key_values = DynamicCache(config=self.config)
        cache_layers = belief_layers(past_key_values, len(self.model.blocks))
        has_past = bool(cache_layers) and cache_layers[0].get_seq_length() > 0
        segments = find_segments(
            *x.shape[:2],
            attention_mask=attention_mask,
            position_ids=None if has_past else position_ids,
            cu_seq_lens_q=cu_seq_lens_q,
            seq_idx=seq_idx,
        )
        if output_hidden_states is None:
            output_hidden_states = self.config.output_hidden_states
        states = [
            layer.get_state(mixer) for layer, mixer in zip(cache_layers, self.model.mixers, strict=bool(cache_layers))
        ]
        output = self.model(
            x,
            states or None,
            segments,
            output_states=bool(cache_layers),
            output_hidden_states=bool(output_hidden_states),
            output_beliefs=output_beliefs,
            output_posterior=labels is not None and self.config.loss == "marginal",
        )
        for layer, state, mixer_input in zip(cache_layers, output.states, output.mixer_inputs, strict=True):
            layer.set_state(state, mixer_input, segments)
        positions = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.model.logits(
            output.last_hidden_state if labels is not None else output.last_hidden_state[:, positions]
        )
        result = KalmixOutput(
            loss=None if labels is None else self._loss(output, logits, labels, segments, num_items_in_batch),
            logits=logits,
            past_key_values=past_key_values,
            hidden_states=(*output.hidden_states, output.last_hidden_state) if output_hidden_states else None,
            beliefs=output.beliefs if output_beliefs else None,
        )
        return result.to_tuple() if return_dict is False else result

    def _loss(
        self, output: ModelOutput, logits: Tensor, labels: Tensor, segments: Segments | None, count: Tensor | int | None
    ) -> Tensor:
        targets = next_token_targets(labels, segments).to(logits.device)
        posterior = output.posterior
        if posterior is None:
            return cross_entropy(logits, targets, count)
        return marginal_likelihood(
            lambda readout: self.model.readout_logits(posterior, readout),
            *(posterior.mean, posterior.variance, targets),
            samples=self.config.loss_samples,
            chunk_size=self.config.loss_chunk_size,
            count=count,
        )

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *args: Any, **kwargs: Any) -> Any:
        """Load a checkpoint, whole or not at all, from safetensors only; a folder is checked before it is loaded.

        With `ignore_mismatched_sizes`, weights may be missing, unknown or of another shape.

        Raises:
            ArgumentError: the checkpoint is damaged, holds pickles, numbers that are not finite, or other weights than
                its configuration says.
        """
        name, partial = str(pretrained_model_name_or_path), bool(kwargs.get("ignore_mismatched_sizes"))
        output_loading_info = kwargs.pop("output_loading_info", False)
        if kwargs.pop("use_safetensors", None) is False:
            raise ArgumentError("use_safetensors", got="False", expected="True: pickled weights can run code")
        try:
            folder = Path(name, kwargs.get("subfolder") or "")
            if folder.is_dir() and not {"variant", "gguf_file", "state_dict"} & kwargs.keys():
                _check_folder(folder, kwargs, partial)
            loaded: Any = super().from_pretrained(
                pretrained_model_name_or_path, *args, output_loading_info=True, use_safetensors=True, **kwargs
            )
            model, info = loaded
            for fault in () if partial else ("missing", "unexpected"):
                if names := sorted(info[f"{fault}_keys"]):
                    raise FileError(f"{len(names)} weights are {fault}, {names[0]!r} first")
            check_finite(model)
        except (FileError, SafetensorError, json.JSONDecodeError, EOFError, RecursionError) as error:
            expected = "a complete checkpoint of this model"
            raise ArgumentError(name, got=f"damaged ({error})", expected=expected) from error
        return (model, info) if output_loading_info else model

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoModelForCausalLM") -> None:
        """Nothing to do: see `KalmixConfig.register_for_auto_class`."""


def _build_language_model(config: KalmixConfig) -> LanguageModel:
    return LanguageModel(
        config.vocab_size,
        config.hidden_size,
        config.layers,
        tie_word_embeddings=config.tie_word_embeddings,
        propagate=config.propagate,
        norm_eps=config.norm_eps,
    )


def _check_folder(folder: Path, options: dict[str, Any], partial: bool) -> None:
    """Check that a folder holds a configuration and, unless `partial`, the weights of its model.

    Raises:
        FileError: it does not.
    """
    given, headers = read_config(folder, {*CONFIG_FIELDS, *INHERITED_KEYS}), read_headers(folder)
    if partial:
        return
    layers = given.get("layers")
    if isinstance(layers, list) and len(layers) > len(headers):  # so many would take long to build
        raise FileError(f"config.json names {len(layers)} layers; the weights are {len(headers)} tensors in all")
    try:
        config = options.get("config") or KalmixConfig(
            **given | {name: options[name] for name in CONFIG_FIELDS if name in options}
        )
        with torch.device("meta"):
            model = _build_language_model(config)
    except (ValueError, TypeError, AttributeError, RuntimeError, OverflowError) as error:
        raise FileError(f"config.json describes no model: {error}") from error
    named = nn.ModuleDict({"model": model})
    check_weights(headers, named, TIED_WEIGHTS if config.tie_word_embeddings else ())


AutoConfig.register("kalmix", KalmixConfig, exist_ok=True)
AutoModelForCausalLM.register(KalmixConfig, KalmixForCausalLM, exist_ok=True)
