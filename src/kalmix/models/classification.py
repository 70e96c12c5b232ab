"""Classifiers of sequences and of tokens for transformers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor

from kalmix._extras import optional_imports

with optional_imports():
    from transformers.modeling_layers import GenericForSequenceClassification, GenericForTokenClassification

from kalmix.models.backbone import KalmixPreTrainedModel
from kalmix.models.cache_name import accept_both_names
from kalmix.models.configuration import KalmixConfig


class KalmixForSequenceClassification(GenericForSequenceClassification, KalmixPreTrainedModel):
    """Classifier of sequences, one per row: a linear map of a token's hidden state after the final norm, without bias.

    The token is the last one of the row that is not `config.pad_token_id`, or the last of all if the call has
    `inputs_embeds`. A row of padding only uses its first token.

    Args:
        config: a `KalmixConfig`. Its `num_labels` (default 2) is the number of classes. Without a `pad_token_id`, calls
            with more than one row fail.

    Shape:
        `output = model(input_ids, attention_mask=None, labels=None)` takes what `KalmixModel` takes. It returns a
        `SequenceClassifierOutputWithPast` of transformers, with logits `[B, num_labels]` and without beliefs, posterior
        and layout. To ignore padding on the left, give `attention_mask`: the pad id alone does not mark it.
        Transformers computes the loss. With `labels` int64 `[B]` it is the mean cross-entropy, with floats
        `[B, num_labels]` that of independent classes, and for `num_labels=1` the mean squared error of floats `[B]`.
        The first call with labels stores this choice in `config.problem_type`.

    Raises:
        ArgumentError: as `KalmixModel`.
        TypeError: as `KalmixModel`.
        ValueError: several rows and no `pad_token_id`, or `labels` has another number of elements.
        RuntimeError: the dtype of `labels` does not fit the loss.
        IndexError: on the CPU, an id is outside the vocabulary, or a label is not below `num_labels`. On a GPU, this is
            an assertion of the device.

    Example:
        >>> from kalmix.models import KalmixConfig, KalmixForSequenceClassification
        >>> config = KalmixConfig(vocab_size=64, hidden_size=32, layers=["kla"], pad_token_id=0, num_labels=3)
        >>> model = KalmixForSequenceClassification(config)
        >>> model(torch.randint(1, 64, (2, 16)), labels=torch.tensor([0, 2])).logits.shape
        torch.Size([2, 3])
    """

    forward = accept_both_names(GenericForSequenceClassification.forward)


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
