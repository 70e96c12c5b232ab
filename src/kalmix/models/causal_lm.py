"""A causal language model of any mixers, in plain PyTorch. `huggingface.py` wraps it for transformers."""

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
    """What a pass through the model leaves, one entry a layer in each tuple.

    Attributes:
        last_hidden_state: `[B, T, D]` behind the last block, before the final norm.
        states: the layers' states; pass them on to continue.
        mixer_inputs: `[B, T, D]` what each mixer was given, to filter it again from an earlier state.
        hidden_states: `[B, T, D]` before each block.
        beliefs: each layer's `Filtered`.
        posterior: the last layer's posterior; `None` unless asked for, and the tuples are empty.
    """

    last_hidden_state: Tensor
    states: tuple[Belief, ...]
    mixer_inputs: tuple[Tensor, ...]
    hidden_states: tuple[Tensor, ...]
    beliefs: tuple[Filtered, ...]
    posterior: Posterior | None


class LanguageModel(nn.Module):
    """Embedding, blocks, norm, head.

    Args:
        vocab_size, hidden_size: sizes.
        layers: a list of mixer names or mappings, one a block: see `layer_specs`.
        tie_word_embeddings: let the head share the embedding's weight.
        propagate: "mean", or "sample": in training, blocks but the last pass on one sample of their posterior.
        norm_eps: of the norms before mixers, MLPs and head.
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
        """Embedding and head; the layers reset themselves."""
        for part in (self.embed_tokens, self.lm_head):
            for weight in part.parameters():
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
        """Run the blocks over embedded tokens `x` `[B, T, D]`, from `states` or the prior; `logits` does the rest.

        The output holds only what the flags request; `output_states` requests both states and mixer inputs.

        Raises:
            ArgumentError: `posterior` is asked of a last layer that has none.
        """
        if output_posterior and not self.last_block.mixer.has_posterior:
            problem = f"ends with {type(self.last_block.mixer).__name__}"
            raise ArgumentError("layers", problem=problem, expected="a last layer with a posterior, for this loss")
        kept: dict[str, list[Any]] = {"states": [], "mixer_inputs": [], "hidden_states": [], "beliefs": []}
        output = None
        for index, block in enumerate(self.blocks):
            last = index == len(self.blocks) - 1
            if output_hidden_states:
                kept["hidden_states"].append(x)
            output = self._run_block(
                *(block, x, None if states is None else states[index], segments),
                sample=self.propagate == "sample" and self.training and not last,
                output_belief=output_beliefs,
                output_posterior=output_posterior and last,
            )
            x = output.hidden_state
            if output_states:
                kept["states"].append(output.state)
                kept["mixer_inputs"].append(output.mixer_input)
            if output_beliefs:
                kept["beliefs"].append(output.belief)
        posterior = None if output is None else output.posterior
        return ModelOutput(x, **{name: tuple(values) for name, values in kept.items()}, posterior=posterior)

    def _run_block(self, block: nn.Module, *args: Any, **options: bool) -> BlockOutput:
        if self.gradient_checkpointing and self.training and torch.is_grad_enabled():
            return checkpoint(partial(block, **options), *args, use_reentrant=False)
        return block(*args, **options)

    @property
    def mixers(self) -> list[Mixer]:
        """The mixer of each block."""
        return [block.mixer for block in self.blocks if isinstance(block, Block)]

    @property
    def last_block(self) -> Block:
        """The last block, whose belief the marginal likelihood integrates over."""
        block = self.blocks[-1]
        assert isinstance(block, Block)
        return block

    def logits(self, hidden: Tensor) -> Tensor:
        """Final norm and head, `[..., D]` to `[..., vocabulary]`."""
        return self.lm_head(self.norm(hidden))

    def readout_logits(self, posterior: Posterior, readout: Tensor) -> Tensor:
        """Logits of read-outs `[S, B, T, E]` of the last layer, through all that lies behind it."""
        return self.logits(self.last_block.finish(posterior.residual, readout, posterior.context))
