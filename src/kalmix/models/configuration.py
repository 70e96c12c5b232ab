"""Configuration of the models for transformers."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import fields
from inspect import get_annotations
from pathlib import Path
from typing import Any, ClassVar

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig

from kalmix.errors import ArgumentError
from kalmix.files import FORMAT, check_format
from kalmix.layers.config_io import with_old_defaults
from kalmix.models import static_cache  # noqa: F401, so that `StaticCache(config=...)` finds its layer
from kalmix.models.blocks import ACTIVATIONS, LayerSpec, layer_specs, layers_to_json
from kalmix.models.cache import LAYER_TYPE
from kalmix.models.cache_name import CACHE_NAMES
from kalmix.models.stack import PROPAGATIONS
from kalmix.validation import check_choice, check_number, check_positive_int, check_types

DEFAULT_BLOCKS = 12
HEADS = "kalmix_heads"  # name of the style of tensor parallelism; `kalmix.models.parallel_styles` registers it
LOSSES = ("cross-entropy", "marginal")
PREDICTIONS = ("mean", "marginal")
LORA_TARGETS = ("in_proj", "qkv_proj", "out_proj")  # linear maps into and out of mixers and MLPs
REMOTE_MODULE = "modeling_kalmix"
AUTO_CLASSES = {
    "AutoModel": "KalmixModel",
    "AutoModelForCausalLM": "KalmixForCausalLM",
    "AutoModelForSequenceClassification": "KalmixForSequenceClassification",
    "AutoModelForTokenClassification": "KalmixForTokenClassification",
}
REMOTE_CODE = f"from kalmix.models import {', '.join(['KalmixConfig', *AUTO_CLASSES.values()])}  # noqa: F401\n"


@strict  # makes transformers call our `validate_layer_type`
class KalmixConfig(PreTrainedConfig):
    """Configuration of a `KalmixModel` and of the models with a head.

    It accepts keyword arguments only, and also the settings of transformers' `PreTrainedConfig`, such as `num_labels`,
    the number of classes of a classifier (default 2). As in transformers, a setting with an unknown name is stored
    without an error. Section and equation numbers refer to the paper Kalman Linear Attention.

    Args:
        vocab_size: number of tokens.
        hidden_size: width D of the residual stream.
        layers: layer of all blocks, or a list with one layer per block. A layer is a name, a key of
            `kalmix.layers.MIXERS` such as "kla", or a mapping with the name as `"mixer"` and its options, such as
            `{"mixer": "attention", "heads": 4}`. The key `"mlp"` sets the hidden width of the block's MLP, 0 for none.
            Default: 0 for layers with `includes_mlp`, such as "kla" and "mamba2", otherwise
            `intermediate_size`. With `layers="attention"` the model is a GPT, with "kla" a KLA model, and with
            `["attention"] * 11 + ["kla"]` the hybrid of the paper. After construction, this is a list that JSON can
            store: an option that is a `kalmix.designs.Design` or a ridge or solver of `kalmix.ops.ridge` becomes a
            mapping, which `layers` accepts, too.
        num_hidden_layers: number of blocks. Default: the length of `layers` if it is a list, otherwise 12.
        num_attention_heads: option `heads` of all layers that have this option and do not set it. Default: each
            layer's own default.
        intermediate_size: hidden width of the MLP of layers without `"mlp"` and without `includes_mlp`.
            Default: 8/3 of `hidden_size`, rounded up to a multiple of 8; 4 times `hidden_size` for "relu2".
        mlp_activation: "swiglu", or "relu2": MLPs without a gate, `W_out relu(W_in x)^2`.
        embedding_norm: apply an RMS norm to embedded tokens.
        logit_cap: limit of the logits z, which then are cap tanh(z / cap). `None` for no limit.
        zero_init: initialize the head, and the output projections of mixers and MLPs, with zeros. A head that is tied
            to the embeddings has their weights instead.
        max_position_embeddings: longest input in tokens that programs such as evaluation harnesses should pass at once.
            The model does not depend on it, and has no limit.
        initializer_range: standard deviation with which embeddings and heads are initialized. Without `zero_init`, the
            output projections of mixers and MLPs begin so small that the sum of their outputs has it, too, for inputs
            of variance 1.
        tie_word_embeddings: share the embedding's weight with the head.
        norm_eps: epsilon of all norms outside the mixers.
        propagate: read-out that blocks pass on in training: "mean", or "sample", one sample of the posterior per token
            (section 5.5). The last block, blocks without a posterior, and evaluation always use the mean.
        loss: "cross-entropy" of the next token for the posterior mean, or "marginal": the mean over tokens of -log p,
            where p averages the token's probability over samples of the last layer's posterior at that position
            (equations 24 and 25). The last layer must then have a posterior; otherwise a call with labels raises
            `ArgumentError`.
        predict: logits in evaluation mode, of `generate` and evaluation harnesses: "mean", those of the posterior mean;
            or "marginal", the logarithm of the token's probability averaged over `loss_samples` samples of the last
            layer's posterior, as in KLA+. Then the samples depend on PyTorch's seed and on the batch, and each forward
            pass decodes `loss_samples` times.
        loss_samples: Monte Carlo samples per token of the marginal likelihood, and of `predict="marginal"`.
        loss_chunk_size: samples decoded together; memory grows with it, the result does not depend on it.
        skip_logits: return no logits in training mode if there are labels, which saves memory and time with large
            vocabularies; clients that compute the loss or metrics themselves need logits. `forward(skip_logits=...)`
            overrides it.
        use_cache: return a cache in evaluation mode if there are no labels. `forward(use_cache=...)` overrides it.
        max_packed_sequences: largest number of sequences in one call, over all rows, if `position_ids`, `seq_idx` or a
            4-D mask describes them. It applies only under `torch.compile` and in training on a GPU; other calls have no
            limit. If there are more, the device raises a `RuntimeError`. Memory grows by one state per sequence.
            Default: 64 + B + B T / 64, rounded down, for B rows of T tokens.
        prefill_tokens: number of tokens, over all rows, that a call filters at a time if it has a cache and no
            gradients, so that the memory of a long prompt is bounded. Rows are cut at multiples of 64 tokens, so B rows
            are filtered by 64 B tokens at least. Default: 32,768 if the states of all layers are bounded; no limit if a
            layer stores all tokens, as "attention" does. Compiled calls, and those that return beliefs, attentions or
            hidden states of all blocks, filter all tokens at once.
        classifier_dropout: probability of dropout before the head of `KalmixForTokenClassification`, from 0 to 1.
        format: version of the file format of checkpoints (config.json and weights); keep the default.
        pad_token_id: id of the padding token. No id is compared with `vocab_size`.
        bos_token_id: id of the token that begins a text.
        eos_token_id: id, or ids, of the tokens that end a text.

    Raises:
        ArgumentError: a layer, an option of a layer, `loss`, `predict` or `propagate` is unknown; an argument above has
            the wrong type; a size or a count, or `num_labels`, is not positive; `norm_eps` or `initializer_range` is
            negative; `classifier_dropout` is not between 0 and 1; `layers` is empty, or has another length than
            `num_hidden_layers`. The values of a layer's options, such as a number of heads that does not divide
            `hidden_size`, are checked when a model is built.
        FormatError: `format` is newer than this version of kalmix.
        ValueError: an argument is positional.

    Example:
        >>> from kalmix.models import KalmixConfig
        >>> config = KalmixConfig(vocab_size=64, hidden_size=32, layers=["kla", {"mixer": "attention", "heads": 4}])
        >>> config.num_hidden_layers
        2
        >>> KalmixConfig(layers="attention", num_hidden_layers=3, num_attention_heads=4).layers
        ['attention', 'attention', 'attention']
        >>> KalmixConfig(layers=["klaa"])
        Traceback (most recent call last):
            ...
        kalmix.errors.ArgumentError: ...
    """

    model_type = "kalmix"
    base_model_tp_plan = {"embed_tokens": HEADS, "layers.*.mixer": HEADS}  # noqa: RUF012
    base_model_pp_plan: ClassVar[Any] = {  # inputs and outputs of the parts, in order
        "embed_tokens": (["input_ids"], ["inputs_embeds"]),
        "layers": (["hidden_states"], ["hidden_states"]),
        "norm": (["hidden_states"], ["hidden_states"]),
    }
    keys_to_ignore_at_inference: ClassVar[list[str]] = [*CACHE_NAMES, "beliefs"]
    # The name in other models, by which clients that compute logits from the head's weight, such as TRL, find the cap.
    attribute_map: ClassVar[dict[str, str]] = {"final_logit_softcapping": "logit_cap"}

    vocab_size: int = 32768
    hidden_size: int = 512
    layers: Any = "kla"  # a list after `__post_init__`
    num_hidden_layers: int | None = None
    num_attention_heads: int | None = None
    intermediate_size: int | None = None
    mlp_activation: str = "swiglu"
    embedding_norm: bool = False
    logit_cap: float | None = None
    zero_init: bool = False
    max_position_embeddings: int = 2048
    initializer_range: float = 0.02
    tie_word_embeddings: bool = False
    norm_eps: float = 1e-6
    propagate: str = "mean"
    loss: str = "cross-entropy"
    predict: str = "mean"
    loss_samples: int = 10
    loss_chunk_size: int = 1
    skip_logits: bool = False
    use_cache: bool = True
    max_packed_sequences: int | None = None
    prefill_tokens: int | None = None
    classifier_dropout: float = 0.1
    format: int = FORMAT
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        for alias, name in self.attribute_map.items():
            given, value = kwargs.pop(alias, None), getattr(self, name)
            if None not in (given, value) and given != value:
                raise ArgumentError(alias, got=given, expected=f"the value of `{name}`, {value}, or None")
            setattr(self, name, value if given is None else given)
        hints = get_annotations(KalmixConfig, eval_str=True)
        check_types(hints, {name: getattr(self, name) for name in CONFIG_FIELDS if name != "layers"})
        check_format({"format": self.format}, Path("config.json"))
        self.layers = with_old_defaults(self.layers, self.format)
        self.format = FORMAT
        for name in _POSITIVE:
            if (value := getattr(self, name)) is not None:
                check_positive_int(name, value)
        if (num_labels := kwargs.get("num_labels")) is not None:
            check_positive_int("num_labels", num_labels)
        if isinstance(self.eos_token_id, list) and not all(type(x) is int for x in self.eos_token_id):
            raise ArgumentError("eos_token_id", got=repr(self.eos_token_id), expected="an integer or integers")
        check_number("norm_eps", self.norm_eps, minimum=0.0)
        check_number("initializer_range", self.initializer_range, minimum=0.0)
        if not 0 <= self.classifier_dropout <= 1:
            raise ArgumentError("classifier_dropout", got=self.classifier_dropout, expected="a number from 0 to 1")
        check_choice("mlp_activation", self.mlp_activation, ACTIVATIONS)
        if isinstance(self.layers, str | Mapping):
            self.layers = [self.layers] * (self.num_hidden_layers or DEFAULT_BLOCKS)
        if isinstance(self.layers, list | tuple) and self.num_hidden_layers is None:
            self.num_hidden_layers = len(self.layers)
        self.layer_specs()
        self.layers = layers_to_json(self.layers)
        check_choice("loss", self.loss, LOSSES)
        check_choice("predict", self.predict, PREDICTIONS)
        if self.logit_cap is not None:
            check_number("logit_cap", self.logit_cap)
        check_choice("propagate", self.propagate, PROPAGATIONS)
        super().__post_init__(**kwargs)
        vars(self).pop("base_model_tp_plan", None)  # transformers 5.17 gives a tied embedding a plan of its own
        classes = {"AutoConfig": "KalmixConfig", **AUTO_CLASSES}
        self.auto_map: dict[str, str] = {auto: f"{REMOTE_MODULE}.{name}" for auto, name in classes.items()}

    def layer_specs(self) -> list[LayerSpec]:
        """Return the parsed layer of each block, with the defaults of this configuration.

        Raises:
            ArgumentError: a layer or an option is unknown, or `layers` has another length than `num_hidden_layers`.
        """
        mlp = self.intermediate_size
        if mlp is None and self.mlp_activation == "relu2":
            mlp = 4 * self.hidden_size
        specs = layer_specs(self.layers, self.hidden_size, heads=self.num_attention_heads, mlp=mlp)
        if len(specs) != self.num_hidden_layers:
            expected = f"{len(specs)}, the length of `layers`"
            raise ArgumentError("num_hidden_layers", got=self.num_hidden_layers, expected=expected)
        return specs

    @property
    def layer_types(self) -> list[str]:
        """Kind of cache layer of each block, from which `DynamicCache(config=...)` builds it."""
        return [LAYER_TYPE] * len(self.layers)

    def validate_layer_type(self) -> None:
        """Do nothing: `__post_init__` checks the layers, and their kind of cache is not one of transformers."""

    def to_dict(self) -> dict[str, Any]:
        """Return all settings; also tell PEFT the default targets of LoRA, since PEFT calls this to look them up."""
        if peft := sys.modules.get("peft.utils.constants"):
            peft.TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING.setdefault(self.model_type, list(LORA_TARGETS))
        return super().to_dict()

    def save_pretrained(self, save_directory: Any, push_to_hub: bool = False, **kwargs: Any) -> None:
        """Write config.json, and a module with which `AutoModelForCausalLM` finds kalmix in a process that has not
        imported it.

        Args:
            save_directory: folder to write to; created if missing.
            push_to_hub: upload the folder to the Hugging Face Hub.
            kwargs: passed to transformers.
        """
        path = Path(save_directory)
        path.mkdir(parents=True, exist_ok=True)
        (path / f"{REMOTE_MODULE}.py").write_text(REMOTE_CODE, encoding="utf-8")
        super().save_pretrained(save_directory, push_to_hub=push_to_hub, **kwargs)

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoConfig") -> None:
        """Do nothing: a checkpoint refers to the installed kalmix and must not contain a copy of this file."""


_POSITIVE = (
    *("vocab_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "max_position_embeddings"),
    *("loss_samples", "loss_chunk_size", "max_packed_sequences", "prefill_tokens"),
)
CONFIG_FIELDS = tuple(x.name for x in fields(KalmixConfig) if x.name in KalmixConfig.__annotations__)
# Keys that transformers may add to config.json.
INHERITED_KEYS = {
    *PreTrainedConfig().to_dict(),
    *("auto_map", "torch_dtype", "_commit_hash", "attn_implementation", "quantization_config"),
}
