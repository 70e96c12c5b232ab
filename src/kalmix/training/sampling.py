"""Text from a model."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedTokenizerFast

from kalmix.models import KalmixForCausalLM
from kalmix.training.corpus import END_OF_TEXT


def generate(
    model: KalmixForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    prompt: str,
    *,
    max_new_tokens: int = 200,
    temperature: float = 0.8,
    top_k: int = 0,
    top_p: float = 0.95,
    streamer: Any = None,
) -> str:
    """What `model` writes after `prompt`, the prompt not included; it may end a document early.

    Args:
        max_new_tokens: how many to write at most.
        temperature: 0 always takes the likeliest token.
        top_k: choose among this many only; 0 for all.
        top_p: choose among the likeliest of this total probability.
        streamer: of transformers; is shown the tokens as they come.
    """
    ids = tokenizer(END_OF_TEXT + prompt, return_tensors="pt", add_special_tokens=False)["input_ids"].to(model.device)
    options: dict[str, Any] = {"do_sample": False}
    if temperature:
        options = {"do_sample": True, "temperature": temperature, "top_k": top_k, "top_p": top_p}
    output_ids = model.generate(  # pyright: ignore[reportAttributeAccessIssue]
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=max_new_tokens,
        streamer=streamer,
        pad_token_id=tokenizer.pad_token_id,
        **options,
    )
    return str(tokenizer.decode(output_ids[0, ids.shape[1] :], skip_special_tokens=True))
