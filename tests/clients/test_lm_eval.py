"""Scores of a model in lm-eval."""

import pytest

from .conftest import sentences

pytest.importorskip("lm_eval")
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM


def _requests(kind: str, arguments: list[tuple]) -> list[Instance]:
    return [Instance(kind, {}, argument, i) for i, argument in enumerate(arguments)]


def test_scores_do_not_depend_on_the_batch(model, tokenizer):
    arguments = list(zip(sentences(6), sentences(6, seed=1), strict=True))
    scores = []
    for size in (1, 3):
        judge = HFLM(model, tokenizer=tokenizer, batch_size=size, device="cpu")
        scores.append(judge.loglikelihood(_requests("loglikelihood", arguments), disable_tqdm=True))
    for (a, greedy_a), (b, greedy_b) in zip(*scores, strict=True):
        assert a == pytest.approx(b, abs=1e-4)
        assert greedy_a == greedy_b


def test_scores_are_those_of_the_model(model, tokenizer):
    context, rest = "the cat sat", "on the mat"
    judge = HFLM(model, tokenizer=tokenizer, batch_size=1, device="cpu")
    ((score, _),) = judge.loglikelihood(_requests("loglikelihood", [(context, " " + rest)]), disable_tqdm=True)
    ids = tokenizer(f"{context} {rest}", return_tensors="pt")["input_ids"]
    log_probs = model(ids).logits.log_softmax(-1)
    assert score == pytest.approx(float(sum(log_probs[0, i - 1, ids[0, i]] for i in (3, 4, 5))), abs=1e-4)


def test_texts_are_generated_until_a_word(model, tokenizer):
    judge = HFLM(model, tokenizer=tokenizer, batch_size=2, device="cpu")
    options = {"until": ["cat"], "max_gen_toks": 5, "do_sample": False}
    requests = _requests("generate_until", [(text, options) for text in sentences(2)])
    assert len(judge.generate_until(requests, disable_tqdm=True)) == 2
