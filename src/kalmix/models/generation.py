"""Hooks of `generate` of transformers for caches that hold beliefs."""

from __future__ import annotations

import threading
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor

from kalmix._extras import optional_imports

with optional_imports():
    from transformers import GenerationMixin
    from transformers.cache_utils import Cache
    from transformers.generation.configuration_utils import GenerationMode

from kalmix.errors import ArgumentError
from kalmix.models.cache_name import given_cache, rename_cache
from kalmix.models.captured_step import capture_decoding, has_hooks, refusal

FEWEST_TOKENS = 8  # fewer new tokens do not pay for a capture


class BeliefGenerationMixin(GenerationMixin):
    """`GenerationMixin` for models whose caches hold beliefs instead of keys and values.

    Attributes:
        decoding_step: the `CapturedStep` inside `capture_decoding`, otherwise `None`.
        graph: maker of graphs, in place of CUDA graphs; tests set it.
    """

    decoding_step: Any = None
    graph: Any = None

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Generate tokens, as `GenerationMixin.generate` does; on one GPU, steps are captured in a CUDA graph.

        See `kalmix.models.capture_decoding`. `disable_compile=True`, or `cache_implementation="dynamic"`, turns it off.

        Args:
            args: arguments of `GenerationMixin.generate`.
            kwargs: further arguments of it.
        """
        model: Any = self
        kwargs = rename_cache(kwargs)
        run: Any = partial(GenerationMixin.generate, model)  # pyright: ignore
        if self.decoding_step is not None or model.training or torch.compiler.is_compiling():
            return run(*args, **kwargs)
        if (self.graph is None and refusal(model) is not None) or has_hooks(model):
            return run(*args, **kwargs)
        with capture_decoding(model, self.graph, automatic=True):
            return run(*args, **kwargs)

    def _own_step(self) -> Any:
        """Return the `CapturedStep` of this thread, if steps are captured."""
        step = self.decoding_step
        own = step is not None and step.refusal is None and step.thread == threading.get_ident()
        return step if own else None

    @staticmethod
    def create_masks_for_generate(
        *, inputs_embeds: Tensor, attention_mask: Tensor | None, **kwargs: Any
    ) -> Tensor | None:
        """Return the mask that `generate` passes to `forward` with a static cache; its shape does not grow.

        Args:
            inputs_embeds: `[B, T, 0]`; only its shape is used.
            attention_mask: `[B, past + T]`, or `None`.
            kwargs: arguments of other models; ignored.

        Returns:
            `[B, T]`; `None` for single tokens without padding, as in decoding. `generate` has synchronized before that.
        """
        if attention_mask is None:
            return None
        mask = attention_mask[:, -inputs_embeds.shape[1] :]
        return None if mask.shape[1] == 1 and bool(mask.all()) else mask

    def _prepare_cache_for_generation(
        self, generation_config: Any, model_kwargs: Any, generation_mode: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Create the cache of `generate`: a static one if its steps are captured, and it removes no tokens.

        Raises:
            ArgumentError: `assistant_early_exit` is set. Transformers would change the configuration to fewer blocks.
        """
        if generation_config.assistant_early_exit is not None:
            got = generation_config.assistant_early_exit
            expected = "None: the first blocks alone cannot draft; use `assistant_model` or `prompt_lookup_num_tokens`"
            raise ArgumentError("assistant_early_exit", got=got, expected=expected)
        step = self._own_step()
        if step is not None:
            removes = generation_config.is_assistant or generation_mode == GenerationMode.ASSISTED_GENERATION
            given = given_cache(model_kwargs) is not None or generation_config.use_cache is False
            captures = generation_config.cache_implementation is None and not given and not removes
            if step.automatic:
                few = (generation_config.max_new_tokens or FEWEST_TOKENS) < FEWEST_TOKENS
                returned = generation_config.return_dict_in_generate
                captures = captures and not (few or returned or generation_config.disable_compile)
                if not captures:
                    step.refusal = "this call of `generate` needs another cache, or is short"
            if captures:
                generation_config.cache_implementation = "static"
            step.keep_cache = not generation_config.return_dict_in_generate
        prepare = super()._prepare_cache_for_generation  # pyright: ignore
        return prepare(generation_config, model_kwargs, generation_mode, *args, **kwargs)

    def _valid_auto_compile_criteria(self, *args: Any, **kwargs: Any) -> bool:
        """Return whether `generate` compiles its steps: not if they are captured."""
        if self._own_step() is not None:
            return False
        return super()._valid_auto_compile_criteria(*args, **kwargs)  # pyright: ignore

    def _prepare_static_cache(self, *args: Any, batch_size: int, **kwargs: Any) -> Cache:
        """Create a static cache for `generate`, with its buffers if the prefill is compiled, or empty a kept one."""
        model: Any = self
        step = self._own_step()
        kept = None if step is None else step.reuse(batch_size, kwargs["max_cache_len"])
        if kept is not None:
            return kept
        cache = super()._prepare_static_cache(*args, batch_size=batch_size, **kwargs)  # pyright: ignore
        stack = model.model.layers
        if kwargs.get("prefill_chunk_size") is not None:
            for layer, mixer in zip(stack.of_this_rank(cache.layers), stack.mixers, strict=True):
                layer.allocate(mixer, batch_size, model.dtype)
        if step is not None and step.keep_cache:
            step.cache = cache
        return cache

    def _get_static_cache_init_shape(self) -> None:
        """Return `None`: there are no heads of keys and values to allocate before the first call."""

    def init_continuous_batching(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise `ArgumentError`: continuous batching of transformers stores keys and values only."""
        problem = "needs a paged cache of keys and values, and transformers has none for the states of these layers"
        raise ArgumentError("generate_batch", problem=problem, expected="`generate` with a padded batch")
