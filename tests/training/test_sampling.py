"""Text that is generated after a prompt, with a tokenizer that decodes its first word without a space."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers")

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from kalmix.models import KalmixConfig, KalmixForCausalLM
from kalmix.training.sampling import ContinuationStreamer, generate

WORDS = ["<s>", "<unk>", *(f"▁{letter}" for letter in "abcdefghijklmn")]


def llama_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of words whose spaces are as in Llama's."""
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", unk_token="<unk>")


@pytest.mark.parametrize("prompt", ["a b", ""])
def test_the_space_after_the_prompt_is_kept(prompt: str, capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    config = KalmixConfig(vocab_size=len(WORDS), hidden_size=16, num_hidden_layers=1, bos_token_id=0)
    model = KalmixForCausalLM(config).eval()
    with torch.no_grad():
        model.lm_head.weight[:2] = 0  # of special tokens, which are not printed
        model.lm_head.weight[2:] *= 100
    tokenizer = llama_tokenizer()
    text = generate(model, tokenizer, prompt, max_new_tokens=5, temperature=0, streamer=ContinuationStreamer(tokenizer))
    assert capsys.readouterr().out == text + "\n"
    words = (prompt + text).split(" ")
    assert len(words) == len(prompt.split()) + 5 and all(len(word) == 1 for word in words), text
    assert text.startswith(" ") == bool(prompt)
