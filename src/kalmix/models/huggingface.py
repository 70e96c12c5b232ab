"""Causal language model for transformers: generation, losses, checkpoints."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from kalmix._extras import optional_imports

with optional_imports():
    from safetensors import SafetensorError
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationMixin, PreTrainedConfig, PreTrainedModel
    from transformers.cache_utils import Cache, DynamicCache
    from transformers.utils import ModelOutput as TransformersOutput

from kalmix.errors import ArgumentError, FileError
from kalmix.models.cache import belief_layers
from kalmix.models.causal_lm import EMBEDDING_STD, LanguageModel, ModelOutput
from kalmix.models.checkpoint_io import TIED_WEIGHTS
from kalmix.models.configuration import CONFIG_FIELDS, INHERITED_KEYS, KalmixConfig
from kalmix.models.folder import check_finite, check_weights, read_config, read_headers
from kalmix.models.losses import cross_entropy, marginal_likelihood, next_token_targets
from kalmix.models.segments_from_inputs import InputLayout, find_layout
from kalmix.types import Filtered


@dataclass
class KalmixOutput(TransformersOutput):
    """Output of `KalmixForCausalLM`.

    Attributes:
        loss: nats per target, a scalar; `None` without labels.
        logits: `[B, T, vocab_size]`, computed from the posterior mean.
        past_key_values: the cache; `None` if none was used.
        hidden_states: `[B, T, D]`, the input of each block and the output of the last; `None` if not requested.
        beliefs: `Filtered` of each layer's output, with `mean` and `variance` `[B, T, D]`; `None` if not requested. The
            variance is `None` for layers without a posterior.

    Example:
        >>> from kalmix.models import KalmixConfig, KalmixForCausalLM
        >>> model = KalmixForCausalLM(KalmixConfig(vocab_size=64, hidden_size=32, layers=["kla"])).eval()
        >>> output = model(torch.randint(64, (2, 10)), output_beliefs=True)
        >>> output.loss is None, output.logits.shape, output.beliefs[0].variance.shape
        (True, torch.Size([2, 10, 64]), torch.Size([2, 10, 32]))
    """

    loss: Tensor | None = None
    logits: Tensor | None = None
    past_key_values: Cache | None = None
    hidden_states: tuple[Tensor, ...] | None = None
    beliefs: tuple[Filtered, ...] | None = None


class KalmixForCausalLM(PreTrainedModel, GenerationMixin):
    """Causal language model for transformers whose blocks use any layers of kalmix.

    It has the usual interface of transformers: `generate` (sampling, beams, speculative decoding), the Trainer,
    gradient checkpointing, `save_pretrained` and `from_pretrained`. The cache of recurrent layers has constant size.
    Packed and padded inputs give the same logits as each sequence alone.

    Args:
        config: configuration.

    Example:
        >>> from kalmix.models import KalmixConfig, KalmixForCausalLM
        >>> config = KalmixConfig(vocab_size=64, hidden_size=32, layers=["kla", "attention"], pad_token_id=0)
        >>> model = KalmixForCausalLM(config).eval()
        >>> input_ids = torch.randint(1, 64, (2, 16))
        >>> output = model(input_ids, labels=input_ids, output_beliefs=True)
        >>> output.logits.shape, output.loss.shape
        (torch.Size([2, 16, 64]), torch.Size([]))
        >>> output.beliefs[0].variance.shape  # posterior variance of the first layer's output
        torch.Size([2, 16, 32])
        >>> model.generate(input_ids, max_new_tokens=4, do_sample=False, eos_token_id=None).shape
        torch.Size([2, 20])
    """

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
        # transformers skips modules without parameters of their own, such as `LanguageModel`.
        if isinstance(module, nn.Embedding) or module is self.model.lm_head:
            nn.init.normal_(module.get_parameter("weight"), std=EMBEDDING_STD)
        elif callable(reset := getattr(module, "reset_parameters", None)):
            reset()

    def get_input_embeddings(self) -> nn.Module:
        """Return the embedding."""
        return self.model.embed_tokens

    def set_input_embeddings(self, value: nn.Module) -> None:
        """Replace the embedding."""
        self.model.embed_tokens = value

    def get_output_embeddings(self) -> nn.Module:
        """Return the output head."""
        return self.model.lm_head

    def set_output_embeddings(self, new_embeddings: nn.Module) -> None:
        """Replace the output head."""
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
        """Compute logits of the next tokens, and the loss if labels are given.

        Args:
            input_ids: `[B, T]`, token ids; give either these or `inputs_embeds`.
            attention_mask: `[B, T]`, or `[B, past + T]` with a cache: 0 at padding, which may be anywhere. Or
                `[B, 1, T, T]`, block-causal, without a cache.
            position_ids: `[B, T]`, start anew in each packed sequence. Used only without mask and tokens in the cache,
                and only to find the sequences; positions are counted in each sequence.
            past_key_values: a `DynamicCache`, which is read and updated.
            inputs_embeds: `[B, T, D]`, embedded tokens.
            labels: `[B, T]`, as `input_ids`; shifted inside the model. -100 is ignored.
            use_cache: return a cache. Default: `config.use_cache` in evaluation mode without labels, otherwise not.
            output_beliefs: return each layer's belief about its output.
            output_hidden_states: return the input of each block and the output of the last.
            return_dict: return a tuple if `False`.
            logits_to_keep: compute logits of the last so many tokens (0 for all), or of the tokens at these indices;
                ignored with labels.
            cu_seq_lens_q: int `[N + 1]`, cumulative lengths of N sequences packed into one row.
            seq_idx: `[B, T]`, index of the sequence that each token belongs to.
            num_items_in_batch: number by which the sum of losses is divided. Default: the number of targets.
            kwargs: arguments of other models; ignored.

        `cu_seq_lens_q`, `seq_idx`, `attention_mask` and `position_ids` describe the sequences; the first that is given,
        in this order, is used. Outputs at masked tokens have no meaning.

        Returns:
            A `KalmixOutput`.

        Raises:
            ArgumentError: a tensor has the wrong shape, a 4-D mask is not block-causal, the cache belongs to another
                model or batch size, or the loss is "marginal" and the last layer has no posterior.
        """
        if (input_ids is None) == (inputs_embeds is None):
            problem = f"and `inputs_embeds` are {'missing' if input_ids is None else 'both given'}"
            raise ArgumentError("input_ids", problem=problem, expected="exactly one of the two")
        if use_cache is None:
            use_cache = self.config.use_cache and not self.training and labels is None
        if past_key_values is None and use_cache:
            past_key_values = DynamicCache(config=self.config)
        cache_layers = belief_layers(past_key_values, len(self.model.blocks))
        has_past = bool(cache_layers) and cache_layers[0].get_seq_length() > 0
        shape = (input_ids if inputs_embeds is None else inputs_embeds).shape
        layout = find_layout(
            *shape[:2],
            attention_mask=attention_mask,
            position_ids=None if has_past else position_ids,
            cu_seq_lens_q=cu_seq_lens_q,
            seq_idx=seq_idx,
            max_sequences=self.config.max_packed_sequences,
            cached=bool(cache_layers),
        )
        x = (
            self.model.embed_tokens(layout.compact(input_ids))
            if inputs_embeds is None
            else layout.compact(inputs_embeds)
        )
        if output_hidden_states is None:
            output_hidden_states = self.config.output_hidden_states
        states = [
            layer.get_state(mixer) for layer, mixer in zip(cache_layers, self.model.mixers, strict=bool(cache_layers))
        ]
        output = self.model(
            x,
            states or None,
            layout.segments,
            output_states=bool(cache_layers),
            output_hidden_states=bool(output_hidden_states),
            output_beliefs=output_beliefs,
            output_posterior=labels is not None and self.config.loss == "marginal",
        )
        for layer, state, mixer_input in zip(cache_layers, output.states, output.mixer_inputs, strict=True):
            layer.set_state(state, mixer_input, layout)
        positions = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        last_hidden_state = layout.restore(output.last_hidden_state)
        logits = self.model.logits(last_hidden_state if labels is not None else last_hidden_state[:, positions])
        result = KalmixOutput(
            loss=None if labels is None else self._loss(output, logits, labels, layout, num_items_in_batch),
            logits=logits,
            past_key_values=past_key_values,
            hidden_states=(*map(layout.restore, output.hidden_states), last_hidden_state)
            if output_hidden_states
            else None,
            beliefs=tuple(_restore_belief(layout, belief) for belief in output.beliefs) if output_beliefs else None,
        )
        return result.to_tuple() if return_dict is False else result

    def _loss(
        self, output: ModelOutput, logits: Tensor, labels: Tensor, layout: InputLayout, count: Tensor | int | None
    ) -> Tensor:
        targets = next_token_targets(layout.compact(labels.to(logits.device)), layout.segments)
        posterior = output.posterior
        if posterior is None:
            return cross_entropy(logits, layout.restore(targets), count)
        return marginal_likelihood(
            lambda readout: self.model.readout_logits(posterior, readout),
            *(posterior.mean, posterior.variance, targets),
            samples=self.config.loss_samples,
            chunk_size=self.config.loss_chunk_size,
            count=count,
        )

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *args: Any, **kwargs: Any) -> Any:
        """Load a checkpoint from safetensors files. A local folder is checked completely before it is loaded.

        Args:
            pretrained_model_name_or_path: folder, or name on the Hugging Face Hub.
            args: passed to transformers.
            kwargs: passed to transformers. With `ignore_mismatched_sizes=True`, weights may be missing, unknown or of
                another shape.

        Returns:
            The model in evaluation mode.

        Raises:
            ArgumentError: the checkpoint is damaged or holds pickles, its weights are not finite or not those that its
                configuration describes.
        """
        name, partial = str(pretrained_model_name_or_path), bool(kwargs.get("ignore_mismatched_sizes"))
        output_loading_info = kwargs.pop("output_loading_info", False)
        if kwargs.pop("use_safetensors", None) is False:
            raise ArgumentError("use_safetensors", got="False", expected="True (pickled weights can run code)")
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
                    raise FileError(f"{len(names)} weights are {fault}, the first is {names[0]!r}")
            check_finite(model)
        except (FileError, SafetensorError, json.JSONDecodeError, EOFError, RecursionError) as error:
            expected = "a complete checkpoint of this model"
            raise ArgumentError(name, got=f"damaged ({error})", expected=expected) from error
        return (model, info) if output_loading_info else model

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoModelForCausalLM") -> None:
        """Do nothing; see `KalmixConfig.register_for_auto_class`."""


def _restore_belief(layout: InputLayout, belief: Filtered) -> Filtered:
    """Return a belief about outputs in the order of the input."""
    variance = None if belief.variance is None else layout.restore(belief.variance)
    return belief._replace(mean=layout.restore(belief.mean), variance=variance)


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
    """Check that a folder holds a configuration and, unless `partial`, all weights of its model.

    Raises:
        FileError: it does not.
    """
    given, headers = read_config(folder, {*CONFIG_FIELDS, *INHERITED_KEYS}), read_headers(folder)
    if partial:
        return
    layers = given.get("layers")
    if isinstance(layers, list) and len(layers) > len(headers):  # building so many would take long
        raise FileError(f"config.json has {len(layers)} layers, but there are only {len(headers)} weights")
    try:
        config = options.get("config") or KalmixConfig(
            **given | {name: options[name] for name in CONFIG_FIELDS if name in options}
        )
        with torch.device("meta"):
            model = _build_language_model(config)
    except (ValueError, TypeError, AttributeError, RuntimeError, OverflowError) as error:
        raise FileError(f"config.json does not describe a model: {error}") from error
    named = nn.ModuleDict({"model": model})
    check_weights(headers, named, TIED_WEIGHTS if config.tie_word_embeddings else ())


AutoConfig.register("kalmix", KalmixConfig, exist_ok=True)
AutoModelForCausalLM.register(KalmixConfig, KalmixForCausalLM, exist_ok=True)
