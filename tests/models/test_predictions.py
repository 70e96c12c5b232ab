"""Logits of `KalmixConfig(predict="marginal")`: probabilities averaged over samples of the last layer's posterior."""

from __future__ import annotations

import math

import pytest
import torch

from kalmix import ArgumentError
from kalmix.models import KalmixConfig, KalmixForCausalLM

from .conftest import build, tokens

KLA = [{"mixer": "kla", "slots": 4}, {"mixer": "kla", "slots": 4, "mlp": 24}]


def test_probabilities_are_those_of_the_marginal_likelihood():
    """With the same samples, the mean surprisal of the targets is the loss "marginal", also with padding."""
    ids, mask = tokens(2, 6), torch.ones(2, 6, dtype=torch.int64)
    for padding in (0, 2):
        mask[1, :padding] = 0
        model = build(KLA, loss="marginal", predict="marginal", loss_samples=5).eval()
        with torch.no_grad():
            torch.manual_seed(2)
            logits = model(ids, attention_mask=mask).logits
            torch.manual_seed(2)
            loss = model(ids, attention_mask=mask, labels=ids, skip_logits=True).loss
        surprisal = -logits[:, :-1].gather(-1, ids[:, 1:, None]).squeeze(-1)
        predicted = (mask[:, 1:] * mask[:, :-1]).bool()
        torch.testing.assert_close(surprisal[predicted].mean(), loss, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(logits.exp().sum(-1)[mask.bool()], torch.ones(int(mask.sum())))


@pytest.mark.slow
def test_probabilities_converge_to_the_average_over_the_posterior():
    """The mean of many samples is closer to another such mean than to the softmax of the mean read-out."""
    model, ids = build(KLA, predict="marginal", loss_samples=1000).eval(), tokens(1, 5)
    with torch.no_grad():
        # A wide posterior: sharp logits of samples differ from those of their mean.
        model.lm_head.weight.mul_(30)
        first, second = (model(ids).logits.exp() for _ in range(2))
        model.config.predict = "mean"
        mean = model(ids).logits.softmax(-1)
    assert (first - second).abs().max() < 6 / math.sqrt(1000)
    assert (first - mean).abs().max() > 3 * (first - second).abs().max()


def test_only_evaluation_averages():
    model, ids = build(KLA, predict="marginal"), tokens(2, 6)
    model.train()
    assert torch.equal(model(ids).logits, model(ids).logits)
    model.eval()
    assert not torch.equal(model(ids).logits, model(ids).logits)
    losses = [model(ids, labels=ids, skip_logits=skip).loss.item() for skip in (False, True)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)  # of the posterior mean: `loss` decides


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_generation_averages(cache: str):
    model, ids = build(KLA, predict="marginal", loss_samples=3).eval(), tokens(2, 4)
    options = {"max_new_tokens": 3, "do_sample": False, "eos_token_id": None, "output_logits": True}
    options |= {"return_dict_in_generate": True, "cache_implementation": None if cache == "dynamic" else cache}
    torch.manual_seed(0)
    output = model.generate(ids, **options)
    for logits in output.logits:
        torch.testing.assert_close(logits.exp().sum(-1), torch.ones(2))


def test_a_posterior_is_needed():
    model = build("gpt", predict="marginal").eval()
    with pytest.raises(ArgumentError, match=r"ends with Attention.*posterior"):
        model(tokens(1, 3))
    with pytest.raises(ArgumentError, match="`predict` is 'median'; expected 'mean' or 'marginal'"):
        KalmixConfig(predict="median")


def test_the_setting_is_saved(tmp_path):
    build(KLA, predict="marginal").save_pretrained(tmp_path)
    assert KalmixForCausalLM.from_pretrained(tmp_path).config.predict == "marginal"
