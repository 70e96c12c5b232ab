"""Causal language model of any layers, in plain PyTorch. `huggingface.py` wraps it for transformers."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from kalmix.errors import ArgumentError
from kalmix.layers.base import Mixer
from kalmix.layers.modules import RMSNorm
from kalmix.models.blocks import Block, BlockOutput, LayerEntry, Posterior, layer_specs
from kalmix.segments import Segments
from kalmix.types import Belief, Filtered
from kalmix.validation import check_choice, check_positive_int

EMBEDDING_STD = 0.02
PROPAGATIONS = ("mean", "sample")


class ModelOutput(NamedTuple):
    """Output of `LanguageModel.forward`. Each tuple has one entry per block, or none if it was not requested.

    Attributes:
        last_hidden_state: `[B, T, D]` after the last block, before the final norm.
        states: states of the mixers after the last token; pass them to the next call to continue.
        mixer_inputs: `[B, T, D]`, normalized input of each mixer.
        hidden_states: `[B, T, D]`, input of each block.
        beliefs: `Filtered` of each mixer's output.
        posterior: posterior of the last block's read-out; `None` if not requested.
    """

    last_hidden_state: Tensor
    states: tuple[Belief, ...]
    mixer_inputs: tuple[Tensor, ...]
    hidden_states: tuple[Tensor, ...]
    beliefs: tuple[Filtered, ...]
    posterior: Posterior | None


class LanguageModel(nn.Module):
    """Causal language model: embedding, blocks, RMSNorm, output head.

    `forward` maps embedded tokens to hidden states; `logits` maps hidden states to logits. `KalmixForCausalLM` wraps
    both for transformers.

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
        >>> model.logits(output.last_hidden_state).shape
        torch.Size([2, 16, 64])
        >>> next_token = model.embed_tokens(torch.tensor([[1], [2]]))
        >>> model(next_token, output.states).last_hidden_state.shape
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
        check_choice("propagate", propagate, PROPAGATIONS)
        specs = layer_specs(layers, hidden_size)
        check_positive_int("vocab_size", vocab_size)
        self.propagate = propagate
        self.gradient_checkpointing = False
        self.embed_tokens: nn.Module = nn.Embedding(vocab_size, hidden_size)
        self.blocks: nn.ModuleList = nn.ModuleList(Block(hidden_size, spec, norm_eps) for spec in specs)
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
        *,
        output_states: bool = True,
        output_hidden_states: bool = False,
        output_beliefs: bool = False,
        output_posterior: bool = False,
    ) -> ModelOutput:
        """Run all blocks.

        Args:
            x: `[B, T, D]`, embedded tokens.
            states: states of the mixers after the previous tokens, one per block; `None` for the priors.
            segments: sequences in `x`; `None` if each row is one sequence.
            output_states: return the mixers' states and inputs.
            output_hidden_states: return the input of each block.
            output_beliefs: return each mixer's belief about its output.
            output_posterior: return the posterior of the last block's read-out.

        Raises:
            ArgumentError: `output_posterior` is set and the last layer has no posterior.
        """
        if output_posterior and not self.last_block.mixer.has_posterior:
            problem = f"ends with {type(self.last_block.mixer).__name__}, which has no posterior"
            raise ArgumentError("layers", problem=problem, expected="a last layer with a posterior")
        collected: dict[str, list[Any]] = {"states": [], "mixer_inputs": [], "hidden_states": [], "beliefs": []}
        output = None
        for index, block in enumerate(self.blocks):
            last = index == len(self.blocks) - 1
            if output_hidden_states:
                collected["hidden_states"].append(x)
            output = self._run_block(
                *(block, x, None if states is None else states[index], segments),
                sample=self.propagate == "sample" and self.training and not last,
                output_belief=output_beliefs,
                output_posterior=output_posterior and last,
            )
            x = output.hidden_state
            if output_states:
                collected["states"].append(output.state)
                collected["mixer_inputs"].append(output.mixer_input)
            if output_beliefs:
                collected["beliefs"].append(output.belief)
        posterior = None if output is None else output.posterior
        return ModelOutput(x, **{name: tuple(values) for name, values in collected.items()}, posterior=posterior)

    def _run_block(self, block: nn.Module, *args: Any, **options: bool) -> BlockOutput:
        if self.gradient_checkpointing and self.training and torch.is_grad_enabled():
            return checkpoint(partial(block, **options), *args, use_reentrant=False)
        return block(*args, **options)

    @property
    def mixers(self) -> list[Mixer]:
        """Mixers of all blocks, in order."""
        return [block.mixer for block in self.blocks if isinstance(block, Block)]

    @property
    def last_block(self) -> Block:
        """Last block. The marginal likelihood integrates over the posterior of its read-out."""
        block = self.blocks[-1]
        assert isinstance(block, Block)
        return block

    def logits(self, hidden: Tensor) -> Tensor:
        """Apply the final norm and the head to `hidden` `[..., D]`; return `[..., vocab_size]`."""
        return self.lm_head(self.norm(hidden))

    def readout_logits(self, posterior: Posterior, readout: Tensor) -> Tensor:
        """Compute logits from samples of the last block's read-out.

        Args:
            posterior: as `forward` returns it.
            readout: `[S, B, T, E]`, samples of the read-out.

        Returns:
            `[S, B, T, vocab_size]`.
        """
        return self.logits(self.last_block.finish(posterior.residual, readout, posterior.context))
