"""Model for lm-eval: a loaded kalmix model that begins texts as in training, and reports progress."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from kalmix._extras import optional_imports

with optional_imports():
    from lm_eval.models import huggingface
    from tokenizers.processors import TemplateProcessing
    from transformers import PreTrainedTokenizerFast

from kalmix.evaluation.ranks import ALONE, Ranks
from kalmix.evaluation.suites import MAX_LENGTH
from kalmix.models import KalmixForCausalLM

HFLM: Any = huggingface.HFLM  # its decorators hide its type


class Judge(HFLM):
    """`HFLM` of lm-eval for a kalmix model.

    Texts begin with `config.bos_token_id`, as the documents in training. Contexts are cut at `MAX_LENGTH` tokens only.

    Args:
        model: the model, on its device.
        tokenizer: its tokenizer. Its special tokens are changed in place.
        batch_size: sequences per forward pass.
        bf16: run under bfloat16 autocast.
        ranks: processes among which the rows of a task are divided. All get all results.

    Attributes:
        progress: called with the fraction of the current requests that is done, 0 to 1.
    """

    def __init__(
        self,
        model: KalmixForCausalLM,
        tokenizer: PreTrainedTokenizerFast,
        *,
        batch_size: int,
        bf16: bool = False,
        ranks: Ranks = ALONE,
    ) -> None:
        begin = begin_texts(tokenizer, model)
        super().__init__(
            pretrained=model,
            tokenizer=tokenizer,
            batch_size=batch_size,
            max_length=MAX_LENGTH,
            add_bos_token=begin is not None,
            prefix_token_id=begin,
            mixed_precision_dtype="bfloat16" if bf16 else None,
        )
        self.progress: Callable[[float], None] = lambda done: None
        self._requests = self._done = 0
        self.ranks: Ranks = ranks  # lm-eval itself sees one process

    def loglikelihood(self, requests: Any, disable_tqdm: bool = True) -> Any:
        """Return the log-likelihoods of requests, without a bar of tqdm."""
        return self._divide(super().loglikelihood, requests)

    def generate_until(self, requests: Any, disable_tqdm: bool = True) -> Any:
        """Return the generated texts of requests, without a bar of tqdm."""
        return self._divide(super().generate_until, requests)

    def _divide(self, compute: Callable[..., list[Any]], requests: Sequence[Any]) -> list[Any]:
        """Compute the answers to requests, those of a row in one process."""

        def answers(own: list[Any]) -> list[Any]:
            self._requests, self._done = len(own), 0
            return compute(own, disable_tqdm=True)

        return self.ranks.divide(requests, answers, [request.doc_id for request in requests])

    def _model_call(self, inps: Any, *args: Any, **kwargs: Any) -> Any:
        return self._count(len(inps), super()._model_call(inps, *args, **kwargs))

    def _model_generate(self, context: Any, *args: Any, **kwargs: Any) -> Any:
        return self._count(len(context), super()._model_generate(context, *args, **kwargs))

    def _count(self, rows: int, output: Any) -> Any:
        """Report that so many more requests are done, and return `output`."""
        self._done += rows
        self.progress(min(1.0, self._done / max(1, self._requests)))
        return output


def begin_texts(tokenizer: PreTrainedTokenizerFast, model: KalmixForCausalLM) -> int | None:
    """Make a tokenizer begin texts as in training, and return the id of the token; `None` if the model has none.

    A tokenizer without a token that ends texts gets this one, since it follows the end of each document in training.
    """
    begin = model.config.bos_token_id
    if begin is not None:
        begin_with(tokenizer, begin)
        if tokenizer.eos_token_id is None:
            tokenizer.eos_token = str(tokenizer.convert_ids_to_tokens(begin))
    return begin


def begin_with(tokenizer: PreTrainedTokenizerFast, token_id: int) -> None:
    """Make a tokenizer add the token `token_id`, and no other, before each text that it encodes with special tokens."""
    token = str(tokenizer.convert_ids_to_tokens(token_id))
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{token}:0 $A:0", pair=f"{token}:0 $A:0 $B:1", special_tokens=[(token, token_id)]
    )
