"""Classifiers of sequences and of tokens for transformers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kalmix._extras import optional_imports

with optional_imports():
    from transformers.cache_utils import Cache
    from transformers.modeling_layers import GenericForSequenceClassification, GenericForTokenClassification
    from transformers.modeling_outputs import SequenceClassifierOutputWithPast
    from transformers.utils import can_return_tuple

from kalmix.errors import ArgumentError
from kalmix.models.backbone import KalmixPreTrainedModel
from kalmix.models.cache_name import accept_both_names, cache_of, with_cache
from kalmix.models.configuration import KalmixConfig
from kalmix.models.segments_from_inputs import PRECEDENCE


class KalmixForSequenceClassification(GenericForSequenceClassification, KalmixPreTrainedModel):
    """Classifier of sequences, one per row: a linear map of a token's hidden state after the final norm, without bias.

    The token is the last one of the row that is neither masked nor, in `input_ids`, `config.pad_token_id`. A row of
    padding only uses its first token.

    Args:
        config: a `KalmixConfig`. Its `num_labels` (default 2) is the number of classes. Without a `pad_token_id`, calls
            with more than one row fail.

    Shape:
        `output = model(input_ids, attention_mask=None, labels=None)` takes what `KalmixModel` takes. It returns a
        `SequenceClassifierOutputWithPast` of transformers, with logits `[B, num_labels]` and without beliefs, posterior
        and layout. To ignore padding on the left, or any padding in `inputs_embeds`, give `attention_mask`: the pad id
        alone does not mark it. A row may not have several packed sequences.
        Transformers computes the loss. With `labels` int64 `[B]` it is the mean cross-entropy, with floats
        `[B, num_labels]` that of independent classes, and for `num_labels=1` the mean squared error of floats `[B]`.
        The first call with labels stores this choice in `config.problem_type`.

    Raises:
        ArgumentError: as `KalmixModel`; several rows and no `pad_token_id`; or a row has several packed sequences.
        TypeError: as `KalmixModel`.
        ValueError: `labels` has another number of elements.
        RuntimeError: the dtype of `labels` does not fit the loss; or, in training on a GPU and in compiled code, the
            device found several packed sequences in a row.
        IndexError: on the CPU, an id is outside the vocabulary, or a label is not below `num_labels`. On a GPU, this is
            an assertion of the device.

    Example:
        >>> from kalmix.models import KalmixConfig, KalmixForSequenceClassification
        >>> config = KalmixConfig(vocab_size=64, hidden_size=32, layers=["kla"], pad_token_id=0, num_labels=3)
        >>> model = KalmixForSequenceClassification(config)
        >>> model(torch.randint(1, 64, (2, 16)), labels=torch.tensor([0, 2])).logits.shape
        torch.Size([2, 3])
    """

    @can_return_tuple
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]  # the cache has two names
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        past_key_values: Cache | None = None,
        **kwargs: Any,
    ) -> SequenceClassifierOutputWithPast:
        """Compute logits `[B, num_labels]`, and the loss if labels are given.

        Args:
            input_ids: as all other arguments that are not listed here, as `KalmixModel.forward` takes it.
            attention_mask: see `KalmixModel.forward`.
            position_ids: see `KalmixModel.forward`.
            cache: see `KalmixModel.forward`.
            inputs_embeds: see `KalmixModel.forward`.
            labels: int64 `[B]`, or floats; see the class.
            use_cache: see `KalmixModel.forward`.
            past_key_values: see `KalmixModel.forward`.
            kwargs: further arguments of `KalmixModel.forward`.
        """
        output = self.model(
            input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            cache=cache,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            past_key_values=past_key_values,
            return_dict=True,
            **{**kwargs, "output_layout": True},
        )
        hidden, layout = output.last_hidden_state, output.layout
        batch, length = hidden.shape[:2]
        given: dict[str, Any] = {**kwargs, "attention_mask": attention_mask, "position_ids": position_ids}
        name = next((name for name in PRECEDENCE if given.get(name) is not None), "")
        if name != "attention_mask" or given[name].ndim == 4:  # a 2-D mask describes one sequence per row
            layout.check_single(name, batch, "one sequence per row, since each row gets one class")
        pad = self.config.pad_token_id
        if pad is None and batch != 1:
            raise ArgumentError("pad_token_id", got=None, expected=f"an id in the configuration, for {batch} rows")
        is_token = layout.tokens(batch, length)
        is_token = hidden.new_ones(batch, length, dtype=torch.bool) if is_token is None else is_token.to(hidden.device)
        if input_ids is not None and pad is not None:
            is_token = is_token & (input_ids != pad).to(hidden.device)
        last = (torch.arange(length, device=hidden.device) * is_token).argmax(1)
        logits = self.score(hidden)
        pooled = logits[torch.arange(batch, device=logits.device), last.to(logits.device)]
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, pooled_logits=pooled, config=self.config)
        return SequenceClassifierOutputWithPast(
            loss=loss,
            logits=pooled,
            **with_cache(cache_of(output)),
            hidden_states=output.hidden_states,
            attentions=output.attentions,
        )


class KalmixForTokenClassification(GenericForTokenClassification, KalmixPreTrainedModel):
    """Causal classifier of tokens: dropout, then a linear map of each token's hidden state after the final norm.

    Args:
        config: a `KalmixConfig`. Its `num_labels` (default 2) is the number of classes, and its `classifier_dropout`
            (default 0.1) the probability of dropout in training mode.

    Shape:
        `output = model(input_ids, attention_mask=None, labels=None)` takes what `KalmixModel` takes. It returns a
        `TokenClassifierOutput` of transformers, with logits `[B, T, num_labels]` and without beliefs, posterior and
        layout. With `labels` int64 `[B, T]`, which are not shifted, it has a loss, the mean cross-entropy; for
        `num_labels=1` it is 0. Labels of -100 are ignored. Set those of padding to -100: the mask does not do it. If
        all are -100, the loss is NaN. Without labels it is `None`.

    Raises:
        ArgumentError: as `KalmixModel`.
        TypeError: as `KalmixModel`.
        ValueError: `labels` has another number of elements than B T.
        RuntimeError: `labels` are not int64 or uint8.
        IndexError: on the CPU, an id is outside the vocabulary, or a label is not below `num_labels`. On a GPU, this is
            an assertion of the device.

    Example:
        >>> from kalmix.models import KalmixConfig, KalmixForTokenClassification
        >>> config = KalmixConfig(vocab_size=64, hidden_size=32, layers=["kla"], num_labels=3)
        >>> model = KalmixForTokenClassification(config)
        >>> model(torch.randint(64, (2, 16))).logits.shape
        torch.Size([2, 16, 3])
    """

    forward = accept_both_names(GenericForTokenClassification.forward)

    def __init__(self, config: KalmixConfig) -> None:
        super().__init__(config)
        self.loss_function = partial(_contiguous_loss, self.loss_function)


def _contiguous_loss(loss: Callable[..., Tensor], logits: Tensor, labels: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Call a loss of transformers, which flattens labels by `view`, with contiguous labels."""
    return loss(logits, labels.contiguous(), *args, **kwargs)
