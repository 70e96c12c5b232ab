"""Hooks of `generate` of transformers for caches that hold beliefs."""

from __future__ import annotations

from typing import Any, NoReturn

from torch import Tensor

from kalmix._extras import optional_imports

with optional_imports():
    from transformers import GenerationMixin

from kalmix.errors import ArgumentError


class BeliefGenerationMixin(GenerationMixin):
    """`GenerationMixin` for models whose caches hold beliefs instead of keys and values."""

    @staticmethod
    def create_masks_for_generate(
        *, inputs_embeds: Tensor, attention_mask: Tensor | None, is_first_iteration: bool = False, **kwargs: Any
    ) -> Tensor | None:
        """Return the mask that `generate` passes to `forward` with a static cache; its shape does not grow.

        Args:
            inputs_embeds: `[B, T, 0]`; only its shape is used.
            attention_mask: `[B, past + T]`, or `None`.
            is_first_iteration: whether the T tokens are of a prompt. `generate` masks no others.
            kwargs: arguments of other models; ignored.
        """
        return (
            None if attention_mask is None or not is_first_iteration else attention_mask[:, -inputs_embeds.shape[1] :]
        )

    def _get_static_cache_init_shape(self) -> None:
        """Return `None`: there are no heads of keys and values to allocate before the first call."""

    def init_continuous_batching(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise `ArgumentError`: continuous batching of transformers stores keys and values only."""
        problem = "needs a paged cache of keys and values, and transformers has none for the states of these layers"
        raise ArgumentError("generate_batch", problem=problem, expected="`generate` with a padded batch")
