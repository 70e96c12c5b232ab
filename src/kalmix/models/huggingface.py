"""Causal language model for transformers: generation and losses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from kalmix._extras import optional_imports

with optional_imports():
    from transformers.cache_utils import Cache
    from transformers.modeling_outputs import CausalLMOutputWithPast
    from transformers.utils import can_return_tuple

from kalmix.errors import ArgumentError
from kalmix.models.backbone import KalmixModel, KalmixModelOutput, KalmixPreTrainedModel
from kalmix.models.cache_name import BothCacheNames, cache_of, given_cache, with_cache
from kalmix.models.checkpoint_io import TIED_WEIGHTS
from kalmix.models.configuration import HEADS, KalmixConfig
from kalmix.models.generation import BeliefGenerationMixin
from kalmix.models.losses import (
    cap_logits,
    cross_entropy,
    head_cross_entropy,
    head_nll,
    marginal_likelihood,
    marginal_log_probs,
    next_token_targets,
)
from kalmix.types import Filtered
from kalmix.validation import check_dtype_and_device, check_shape

LABEL_DTYPES = (torch.int64, torch.int32, torch.int16, torch.uint8, torch.int8)


@dataclass
class KalmixOutput(BothCacheNames, CausalLMOutputWithPast):  # pyright: ignore  # a property since 5.24
    """Output of `KalmixForCausalLM`, as transformers defines it: a dataclass whose keys omit fields that are `None`.

    Fields are not checked here. A field other than `logits` is `None` unless a call requests it, by the argument in
    parentheses. There are L blocks, and D is `config.hidden_size`.

    Attributes:
        loss: mean loss in nats per target, a scalar of at least float32 (`labels=...`). It is the loss of
            `config.loss`, so with "marginal" it is not the cross-entropy of `logits`.
        logits: `[B, T, vocab_size]`, in the dtype of the model; fewer tokens with `logits_to_keep`, `None` with
            `skip_logits`. They are computed from the mean of each read-out, also with the loss "marginal". In
            evaluation mode with `config.predict="marginal"` they are log-probabilities of at least float32, averaged
            over samples of the last read-out.
        cache: also `past_key_values`; `None` if none was used (`use_cache=True`; the default in evaluation mode without
            labels).
        hidden_states: L + 1 tensors `[B, T, D]`: the input of each block, then the output of the final norm
            (`output_hidden_states=True`).
        attentions: L tensors `[B, M, T, T]` in the dtype of the model, the `Mixer.attention_map` of each layer with its
            M heads or channels. Entry (i, j) is the weight of token j in the read-out at token i; it may be negative
            (`output_attentions=True`, which needs an input without padding, packing and earlier tokens).
        beliefs: L `Filtered`, of each layer's output before it is added to the residual stream: `mean` `[B, T, D]` in
            the dtype of the model, `variance` `[B, T, D]` in float32 (float64 if the model is), and the state after the
            last token as `belief`. A variance is `None` for a layer without a posterior (`output_beliefs=True`).

    Example:
        >>> from kalmix.models import KalmixConfig, KalmixForCausalLM
        >>> model = KalmixForCausalLM(KalmixConfig(vocab_size=64, hidden_size=32, layers=["kla"])).eval()
        >>> output = model(torch.randint(64, (2, 10)), output_beliefs=True)
        >>> output.loss is None, output.logits.shape, output.beliefs[0].variance.shape
        (True, torch.Size([2, 10, 64]), torch.Size([2, 10, 32]))
    """

    beliefs: tuple[Filtered, ...] | None = None


class KalmixForCausalLM(KalmixPreTrainedModel, BeliefGenerationMixin):
    """Causal language model for transformers whose blocks use any layers of kalmix.

    It has the usual interface of transformers: `generate` (sampling, beams, speculative decoding), the Trainer,
    gradient checkpointing, `save_pretrained` and `from_pretrained`. The cache of recurrent layers has constant size.
    Packed and padded inputs give the same logits as each sequence alone.

    Args:
        config: a `KalmixConfig`.

    Shape:
        `output = model(input_ids)` returns a `KalmixOutput`. `input_ids` is int64 or int32 `[B, T]`, from 0 to
        `vocab_size - 1`; `inputs_embeds` `[B, T, D]` may replace it. `labels` are integers `[B, T]`, usually
        `input_ids`: the model shifts them, and ignores -100. Padding is marked by `attention_mask` `[B, T]`, 0 at
        padding, on any side; without a mask, the model reads padding as text. Packed sequences are marked by
        `cu_seq_lens_q`, `seq_idx` or `position_ids`. `output_hidden_states`, `output_attentions` and `output_beliefs`
        request fields of the output. `forward` documents all arguments. Unknown ones are ignored.

    Raises:
        ArgumentError: an option of a layer does not fit the sizes; or, in a call, an argument has the wrong shape,
            dtype or type, both or none of `input_ids` and `inputs_embeds` are given, a requested field does not exist
            for a layer, or the loss or `config.predict` is "marginal" and the last layer has no posterior.
        TypeError: `config` is not a configuration.
        IndexError: in a call on the CPU, an id or a label is outside the vocabulary. On a GPU, this is an assertion of
            the device.

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

    accepts_loss_kwargs = True
    _tied_weights_keys = TIED_WEIGHTS
    _fsdp_plan = {"lm_head": "keep_full_weight"}  # noqa: RUF012
    _pp_plan: ClassVar[Any] = {"lm_head": (["hidden_states"], ["logits"])}
    _tp_plan = {"lm_head": HEADS}  # noqa: RUF012  # a tied head needs an entry like the embedding's

    def __init__(self, config: KalmixConfig) -> None:
        super().__init__(config)
        self.model: KalmixModel = KalmixModel(config)
        self.lm_head: nn.Module = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def head_logits(self, hidden: Tensor) -> Tensor:
        """Return logits `[..., vocab_size]` of hidden states `[..., D]` after the final norm.

        They are the output of `lm_head`, within `config.logit_cap`.
        """
        return cap_logits(self.lm_head(hidden), self.config.logit_cap)

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        output_beliefs: bool = False,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        cu_seq_lens_q: Tensor | None = None,
        seq_idx: Tensor | None = None,
        num_items_in_batch: Tensor | int | None = None,
        skip_logits: bool | None = None,
        past_key_values: Cache | None = None,
        **kwargs: Any,
    ) -> KalmixOutput:
        """Compute logits of the next tokens, and the loss if labels are given.

        Args:
            input_ids: as all other arguments that are not listed here, as `KalmixModel.forward` takes it.
            attention_mask: see `KalmixModel.forward`.
            position_ids: see `KalmixModel.forward`.
            cache: see `KalmixModel.forward`.
            inputs_embeds: see `KalmixModel.forward`.
            labels: integers `[B, T]`, as `input_ids`; shifted inside the model. -100 is ignored.
            use_cache: return a cache. Default: `config.use_cache` in evaluation mode without labels, otherwise not.
            output_beliefs: see `KalmixModel.forward`.
            output_hidden_states: see `KalmixModel.forward`.
            output_attentions: see `KalmixModel.forward`.
            logits_to_keep: return logits of the last so many tokens (0 for all), or of the tokens at these indices.
                No others are kept in memory. The loss counts all labels.
            cu_seq_lens_q: see `KalmixModel.forward`.
            seq_idx: see `KalmixModel.forward`.
            num_items_in_batch: number by which the sum of losses is divided. Default: the number of targets.
            skip_logits: return no logits beside the loss, which is then computed from a chunk of logits at a time.
                Default: `config.skip_logits` in training mode with labels, otherwise False.
            past_key_values: see `KalmixModel.forward`.
            kwargs: `shift_labels` `[B, T]`, the token that each position must predict, in place of `labels`; -100 is
                ignored. Arguments of other models are ignored. With `return_dict=False`, the output is a tuple.

        Returns:
            A `KalmixOutput`.

        Raises:
            ArgumentError: as `KalmixModel.forward`; labels have another shape or dtype; `logits_to_keep` is negative;
                `skip_logits` is set without labels; or the loss or `config.predict` is "marginal" and the last layer
                has no posterior.
        """
        if not isinstance(logits_to_keep, Tensor) and (not isinstance(logits_to_keep, int) or logits_to_keep < 0):
            expected = "a number of tokens, at least 0, or a tensor of indices"
            raise ArgumentError("logits_to_keep", got=repr(logits_to_keep), expected=expected)
        # Not in the signature: the Trainer computes no loss if a batch lacks a parameter with "label" in its name.
        shift_labels = kwargs.pop("shift_labels", None)
        has_loss = labels is not None or shift_labels is not None
        if skip_logits and not has_loss:
            raise ArgumentError("skip_logits", got="True without labels", expected="labels, or False")
        if skip_logits is None:
            skip_logits = has_loss and self.training and self.config.skip_logits
        marginal = self.config.predict == "marginal" and not self.training and not skip_logits
        output = self.model(
            input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            cache=given_cache({"cache": cache, "past_key_values": past_key_values}),
            inputs_embeds=inputs_embeds,
            use_cache=False if use_cache is None and has_loss else use_cache,
            output_beliefs=output_beliefs,
            output_posterior=marginal or (has_loss and self.config.loss == "marginal"),
            output_layout=marginal or has_loss,
            output_hidden_states=output_hidden_states,
            output_attentions=output_attentions,
            return_dict=True,
            cu_seq_lens_q=cu_seq_lens_q,
            seq_idx=seq_idx,
            tokens_to_keep=logits_to_keep if isinstance(logits_to_keep, int) and not has_loss else 0,
            **kwargs,
        )
        positions = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        if skip_logits:
            logits = None
        elif marginal:
            logits = self._marginal_logits(output, positions)
        else:
            logits = self.head_logits(output.last_hidden_state[:, positions])
        loss = None
        if has_loss:
            complete = isinstance(logits_to_keep, int) and logits_to_keep == 0 and not marginal
            all_logits = logits if complete else None
            loss = self._loss(output, all_logits, labels, shift_labels, num_items_in_batch)
        return KalmixOutput(
            loss=loss,
            logits=logits,
            **with_cache(cache_of(output)),
            hidden_states=output.hidden_states,
            attentions=output.attentions,
            beliefs=output.beliefs,
        )

    def _marginal_logits(self, output: KalmixModelOutput, positions: slice | Tensor) -> Tensor:
        """Compute the logits of `config.predict="marginal"` at the given positions."""
        layout, posterior = output.layout, output.posterior
        assert layout is not None and posterior is not None

        def decode(readout: Tensor) -> Tensor:
            hidden = self.model.norm(self.model.layers.finish(posterior, readout))[0]
            return self.head_logits(layout.restore(hidden)[:, positions])

        group = self.model.layers.last_block.mixer.tensor_parallel
        return marginal_log_probs(decode, posterior.mean, posterior.variance, self.config.loss_samples, group)

    def _loss(
        self,
        output: KalmixModelOutput,
        logits: Tensor | None,
        labels: Tensor | None,
        targets: Tensor | None,
        count: Tensor | int | None,
    ) -> Tensor:
        """Compute the loss of `labels` or, if they are given, `targets`; `logits` are those of all tokens, if known."""
        layout, posterior, hidden = output.layout, output.posterior, output.last_hidden_state
        assert layout is not None and hidden is not None
        if targets is None:
            assert labels is not None
            targets = next_token_targets(layout.compact(_read_labels("labels", labels, hidden)), layout.segments)
        else:
            targets = layout.compact(_read_labels("shift_labels", targets, hidden))
        if posterior is None or self.config.loss != "marginal":
            targets = layout.restore(targets)
            if logits is None:
                return head_cross_entropy(self.lm_head, hidden, targets, count, self.config.logit_cap)
            return cross_entropy(logits, targets, count)

        def score(readout: Tensor, targets: Tensor) -> Tensor:
            hidden = self.model.norm(self.model.layers.finish(posterior, readout))
            return head_nll(self.lm_head, hidden, targets, self.config.logit_cap)

        return marginal_likelihood(
            score,
            *(posterior.mean, posterior.variance, targets),
            samples=self.config.loss_samples,
            chunk_size=self.config.loss_chunk_size,
            count=count,
            group=self.model.layers.last_block.mixer.tensor_parallel,
        )


def _read_labels(name: str, labels: Tensor, hidden: Tensor) -> Tensor:
    """Return labels as int64, on the device of the hidden states `[B, T, D]`.

    Raises:
        ArgumentError: they have another shape than `[B, T]`, or are not integers.
    """
    check_shape(name, labels, "B T", {"B": hidden.shape[0], "T": hidden.shape[1]})
    check_dtype_and_device(name, labels, LABEL_DTYPES, labels.device)
    return labels.to(hidden.device, torch.int64)
