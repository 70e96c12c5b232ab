"""Causal language model of any layers, in plain PyTorch. `huggingface.py` has the one for transformers."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from kalmix.layers.base import Mixer
from kalmix.layers.modules import RMSNorm
from kalmix.models.blocks import Block, LayerEntry, layer_specs
from kalmix.models.segments_from_inputs import InputLayout
from kalmix.models.stack import BlockStack, StackOutput
from kalmix.segments import Segments
from kalmix.types import Belief
from kalmix.validation import check_positive_int

EMBEDDING_STD = 0.02


class LanguageModel(nn.Module):
    """Causal language model: embedding, blocks, RMSNorm, output head.

    `forward` maps embedded tokens to hidden states; `logits` maps hidden states to logits. `KalmixForCausalLM` is the
    same model for transformers.

    Args:
        vocab_size: number of tokens.
        hidden_size: width D of the residual stream.
        layers: one entry per block: a layer's name or a mapping of options, as `KalmixConfig.layers`.
        tie_word_embeddings: share the embedding's weight with the head.
        propagate: read-out that blocks pass on in training: "mean", or one "sample" of the posterior (section 5.5 of
            Kalman Linear Attention). The last block, blocks without a posterior, and evaluation always use the mean.
        norm_eps: epsilon of all norms outside the mixers.

    Raises:
        ArgumentError: a size is not a positive integer, or a layer, an option or `propagate` is unknown.

    Example:
        >>> from kalmix.models import LanguageModel
        >>> model = LanguageModel(vocab_size=64, hidden_size=32, layers=["kla", "attention"])
        >>> output = model(model.embed_tokens(torch.randint(64, (2, 16))))
        >>> model.logits(output.hidden_state).shape
        torch.Size([2, 16, 64])
        >>> next_token = model.embed_tokens(torch.tensor([[1], [2]]))
        >>> model(next_token, output.states).hidden_state.shape
        torch.Size([2, 1, 32])
    """

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        layers: Sequence[LayerEntry],
        *,
        tie_word_embeddings: bool = False,
        propagate: str = "mean",
        norm_eps: float = 1e-6,
    ) -> None:
        super().__init__()
        specs = layer_specs(layers, hidden_size)
        check_positive_int("vocab_size", vocab_size)
        self.embed_tokens: nn.Module = nn.Embedding(vocab_size, hidden_size)
        self.layers: BlockStack = BlockStack((Block(hidden_size, spec, norm_eps) for spec in specs), propagate)
        self.norm: RMSNorm = RMSNorm(hidden_size, norm_eps)
        self.lm_head: nn.Module = nn.Linear(hidden_size, vocab_size, bias=False)
        if tie_word_embeddings:
            self.lm_head.weight = self.embed_tokens.weight
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialize embedding and head, normal with standard deviation 0.02; layers initialize themselves."""
        for module in (self.embed_tokens, self.lm_head):
            for weight in module.parameters():
                nn.init.normal_(weight, std=EMBEDDING_STD)

    def forward(
        self,
        x: Tensor,
        states: Sequence[Belief | None] | None = None,
        segments: Segments | None = None,
        **outputs: bool,
    ) -> StackOutput:
        """Run all blocks.

        Args:
            x: `[B, T, D]`, embedded tokens.
            states: states of the mixers after the previous tokens, one per block; `None` for the priors.
            segments: sequences in `x`; `None` if each row is one sequence.
            outputs: `output_states`, `output_hidden_states`, `output_beliefs` and `output_posterior`, as
                `BlockStack.forward` takes them.

        Raises:
            ArgumentError: `output_posterior` is set and the last layer has no posterior.
        """
        return self.layers(x, states, None if segments is None else InputLayout(segments), **outputs)

    @property
    def mixers(self) -> list[Mixer]:
        """Mixers of all blocks, in order."""
        return self.layers.mixers

    def logits(self, hidden: Tensor) -> Tensor:
        """Apply the final norm and the head to `hidden` `[..., D]`; return `[..., vocab_size]`."""
        return self.lm_head(self.norm(hidden))
