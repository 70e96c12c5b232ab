"""Text generation from a trained model."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast, TextStreamer

from kalmix.models import KalmixForCausalLM
from kalmix.training.data import begin_id, check_unicode


class ContinuationStreamer(TextStreamer):
    """Print text as it is generated, without the prompt and special tokens.

    It keeps the space between the prompt and the text. `TextStreamer` loses it with tokenizers such as Llama's, which
    decode the first word without a space.

    Args:
        tokenizer: tokenizer of the model.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)

    def put(self, value: Tensor) -> None:
        if self.next_tokens_are_prompt:
            self.token_cache = value.flatten().tolist()
            self.print_len = len(self.tokenizer.decode(self.token_cache, **self.decode_kwargs))
        super().put(value)


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
    # Not the new tokens alone: tokenizers such as Llama's decode the first word without its space.
    prompt_text, text = (
        str(tokenizer.decode(all_ids, skip_special_tokens=True)) for all_ids in (ids[0], output_ids[0])
    )
    return text[len(prompt_text) :]
