"""Causal language model of any layers, in plain PyTorch. `huggingface.py` has the one for transformers."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from kalmix.errors import ArgumentError
from kalmix.layers.base import Mixer
from kalmix.layers.modules import RMSNorm
from kalmix.models.blocks import Block, LayerEntry, layer_specs
from kalmix.models.losses import head_cross_entropy
from kalmix.models.segments_from_inputs import InputLayout
from kalmix.models.stack import BlockStack, StackOutput
from kalmix.segments import Segments, check_segments
from kalmix.types import Belief
from kalmix.validation import FLOATS, check_bool, check_dtype_and_device, check_positive_int, check_shape

EMBEDDING_STD = 0.02


class LanguageModel(nn.Module):
    """Causal language model: embedding, blocks, RMSNorm, output head.

    `KalmixForCausalLM` is the same model for transformers.

    Args:
        vocab_size: number of tokens.
        hidden_size: width D of the residual stream.
        layers: list or tuple with one entry per block: a layer's name, or a mapping with the name as `"mixer"` and its
            options, as in `KalmixConfig.layers`. The key `"mlp"` sets the hidden width of the block's MLP, 0 for none.
            Default: 0 for layers with `includes_mlp` ("kla", "mamba2" and "afa-transformer"), otherwise 8/3 of D,
            rounded up to a multiple of 8.
        tie_word_embeddings: share the embedding's weight with the head.
        propagate: read-out that blocks pass on in training: "mean", or "sample", one sample of the posterior per token
            (section 5.5 of Kalman Linear Attention). The last block, blocks without a posterior, and evaluation always
            use the mean.
        norm_eps: epsilon >= 0 of all norms outside the mixers.

    Shape:
        `embed_tokens` maps token ids, int64 or int32 `[B, T]`, to `[B, T, D]`. `output = model(x, states=None,
        segments=None)` maps embedded tokens x to a `StackOutput`: its `hidden_state` is `[B, T, D]`, before the final
        norm, and its `states` has one state per block, to pass to the next call. `segments` (`kalmix.Segments`) assigns
        tokens to sequences, for packing and padding. `logits(hidden_state)` applies the final norm and the head, and
        returns `[B, T, vocab_size]`. `loss(hidden_state, targets)` returns the mean cross-entropy in nats, a scalar;
        `targets`, int64 `[B, T]`, are the tokens that the positions must predict (not shifted here; -100 is ignored).

    Raises:
        ArgumentError: a size is not a positive integer, `layers` is empty or not a list, `norm_eps` is negative,
            `tie_word_embeddings` is not a bool, or a layer, an option or `propagate` is unknown; or, in a call, an
            argument has the wrong type, shape or dtype.
        IndexError: on the CPU, an id or a target is outside the vocabulary.
        RuntimeError: `embed_tokens` gets ids of another dtype.

    Example:
        >>> from kalmix.models import LanguageModel
        >>> model = LanguageModel(vocab_size=64, hidden_size=32, layers=["kla", "attention"])
        >>> output = model(model.embed_tokens(torch.randint(64, (2, 16))))
        >>> model.logits(output.hidden_state).shape
        torch.Size([2, 16, 64])
        >>> model.loss(output.hidden_state, torch.randint(64, (2, 16))).shape
        torch.Size([])
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
        check_bool("tie_word_embeddings", tie_word_embeddings)
        self.hidden_size: int = hidden_size
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
            ArgumentError: `x`, `states` or `segments` has the wrong type or shape; or `output_posterior` is set and the
                last layer has no posterior.
        """
        check_shape("x", x, "B T D", {"D": self.hidden_size})
        check_dtype_and_device("x", x, FLOATS, x.device)
        check_segments(segments, x.shape[0], x.shape[1], x.device)
        return self.layers(x, states, None if segments is None else InputLayout(segments), **outputs)

    @property
    def mixers(self) -> list[Mixer]:
        """Mixers of all blocks, in order."""
        return self.layers.mixers

    def logits(self, hidden: Tensor) -> Tensor:
        """Apply the final norm and the head to `hidden` `[..., D]`; return `[..., vocab_size]`."""
        if not isinstance(hidden, Tensor) or hidden.shape[-1:] != (self.hidden_size,):
            got = f"of shape {list(hidden.shape)}" if isinstance(hidden, Tensor) else f"a {type(hidden).__name__}"
            raise ArgumentError("hidden", got=got, expected=f"a tensor [..., D={self.hidden_size}]")
        return self.lm_head(self.norm(hidden))

    def loss(self, hidden: Tensor, targets: Tensor, count: Tensor | int | None = None) -> Tensor:
        """Compute the mean negative log-likelihood of targets, in nats, without keeping logits of all tokens.

        Args:
            hidden: `[B, T, D]`, hidden states of `forward`.
            targets: `[B, T]` int64, the token that each position must predict; -100 is ignored.
            count: divides the sum of the losses. Default: the number of targets that are not ignored.

        Returns:
            A scalar, at least float32.
        """
        sizes = {"D": self.hidden_size}
        check_shape("hidden", hidden, "B T D", sizes)
        check_shape("targets", targets, "B T", sizes)
        return head_cross_entropy(self.lm_head, self.norm(hidden), targets, count)
