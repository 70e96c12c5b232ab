"""Classifiers of sequences and of tokens for transformers."""

from __future__ import annotations

from kalmix._extras import optional_imports

with optional_imports():
    from transformers.modeling_layers import GenericForSequenceClassification, GenericForTokenClassification

from kalmix.models.backbone import KalmixPreTrainedModel


class KalmixForSequenceClassification(GenericForSequenceClassification, KalmixPreTrainedModel):
    """Classifier of sequences: a linear map of the last hidden state of each row's last token.

    The last token is the last one that is not `config.pad_token_id`, so batches need that setting.

    Args:
        config: configuration; `num_labels` is the number of classes.

    Example:
        >>> from kalmix.models import KalmixConfig, KalmixForSequenceClassification
        >>> config = KalmixConfig(vocab_size=64, hidden_size=32, layers=["kla"], pad_token_id=0, num_labels=3)
        >>> model = KalmixForSequenceClassification(config)
        >>> model(torch.randint(1, 64, (2, 16)), labels=torch.tensor([0, 2])).logits.shape
        torch.Size([2, 3])
    """


class KalmixForTokenClassification(GenericForTokenClassification, KalmixPreTrainedModel):
    """Causal classifier of tokens: dropout, then a linear map of each token's hidden state after the final norm.

    It returns a `TokenClassifierOutput` of transformers. With `labels` `[B, T]`, it has a loss, the mean cross-entropy;
    labels of -100 are ignored.

    Args:
        config: a `KalmixConfig`. Its `num_labels` (default 2) is the number of classes, and its `classifier_dropout`
            the probability of dropout.

    Example:
        >>> from kalmix.models import KalmixConfig, KalmixForTokenClassification
        >>> config = KalmixConfig(vocab_size=64, hidden_size=32, layers=["kla"], num_labels=3)
        >>> model = KalmixForTokenClassification(config)
        >>> model(torch.randint(64, (2, 16))).logits.shape
        torch.Size([2, 16, 3])
    """
