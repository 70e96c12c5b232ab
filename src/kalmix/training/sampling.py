"""Text generation from a trained model."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedTokenizerFast

from kalmix.models import KalmixForCausalLM
from kalmix.training.data import begin_id, check_unicode


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
    """Generate text after a prompt.

    Args:
        model: trained model.
        tokenizer: its tokenizer.
        prompt: text to continue; it is treated as the beginning of a document.
        max_new_tokens: largest number of tokens to generate; fewer if the document ends.
        temperature: softmax temperature; 0 for greedy decoding.
        top_k: sample from the k most likely tokens; 0 for all.
        top_p: sample from the most likely tokens with this total probability.
        streamer: streamer of transformers, which receives the tokens as they are generated.

    Returns:
        The generated text, without the prompt.

    Raises:
        ArgumentError: UTF-8 cannot encode the prompt.
    """
    check_unicode("prompt", prompt)
    begin = begin_id(model, tokenizer)
    prompt_ids = tokenizer(prompt, add_special_tokens=False)["input_ids"]
    ids = torch.tensor([[begin, *prompt_ids]], device=model.device)
    options: dict[str, Any] = {"do_sample": False}
    if temperature:
        options = {"do_sample": True, "temperature": temperature, "top_k": top_k, "top_p": top_p}
    output_ids = model.generate(  # pyright: ignore[reportAttributeAccessIssue]
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=max_new_tokens,
        streamer=streamer,
        pad_token_id=begin,
        **options,
    )
    return str(tokenizer.decode(output_ids[0, ids.shape[1] :], skip_special_tokens=True))
