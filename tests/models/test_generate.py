"""All generation modes agree: with and without a cache, padded or alone, with and without a draft model."""

import copy

import pytest
import torch
from transformers.cache_utils import DynamicCache

from kalmix import ArgumentError
from kalmix.models import BeliefLayer, restore, snapshot

from .conftest import LAYERS, build, tokens

CLOSE = {"atol": 1e-5, "rtol": 0}


def greedy(model, ids, length=6, **options):
    """Generate more tokens than the windows of 5 and the convolutions of 4 have."""
    return model.generate(ids, do_sample=False, max_new_tokens=length, **options)


def left_padded(ids, lengths):
    padded = torch.zeros_like(ids)
    for row, length in enumerate(lengths):
        padded[row, ids.shape[1] - length :] = ids[row, :length]
    return padded, (padded != 0).long()


def test_greedy_generation_with_cache_and_padding(model):
    ids = tokens(3, 8, seed=2)  # with seed 1, two logits of Bayesian Layers differ by only 2e-7
    padded, mask = left_padded(ids, (8, 5, 1))
    together = greedy(model, padded, attention_mask=mask)
    for row, length in enumerate((8, 5, 1)):
        alone = greedy(model, ids[row : row + 1, :length], use_cache=False)
        assert together[row, 8 - length :].tolist() == alone[0].tolist()
    assert torch.equal(greedy(model, padded, attention_mask=mask, prefill_chunk_size=3), together)
    with_embeds = greedy(model, None, inputs_embeds=model.get_input_embeddings()(ids))
    assert torch.equal(with_embeds, greedy(model, ids)[:, 8:])


def test_beam_search(model):
    """Beam search with a cache equals that without, and padded prompts equal single ones."""
    ids = tokens(2, 6)
    padded, mask = left_padded(ids, (6, 3))
    options = {"num_beams": 3, "num_return_sequences": 2}
    together = greedy(model, padded, attention_mask=mask, **options)
    assert torch.equal(together, greedy(model, padded, attention_mask=mask, use_cache=False, **options))
    assert torch.equal(together[2:, 3:], greedy(model, ids[1:, :3], **options))


def test_sampling(model):
    ids = tokens(2, 4)
    draws = []
    for use_cache in (True, False):
        torch.manual_seed(3)
        draws.append(
            model.generate(
                ids, do_sample=True, top_p=0.9, max_new_tokens=8, num_return_sequences=3, use_cache=use_cache
            )
        )
    assert torch.equal(*draws)


def test_assisted_generation(model):
    """Draft models change nothing, whether mostly wrong (another model) or mostly right (a near copy)."""
    ids, near = tokens(1, 5), copy.deepcopy(model)
    with torch.no_grad():
        near.lm_head.weight.add_(0.05 * torch.randn_like(near.lm_head.weight))
    expected = greedy(model, ids, length=10)
    for draft in (near, build("hybrid", seed=9)):
        assert torch.equal(greedy(model, ids, length=10, assistant_model=draft), expected)


def test_assisted_generation_filters_few_tokens_again(monkeypatch: pytest.MonkeyPatch):
    """Most drafts are rejected. No crop filters more than 64 tokens again, though the prompt has 100."""
    model, ids = build(layers := ["controlled-afa", "kla", "attention"]), tokens(1, 100)
    filtered, restored = [], BeliefLayer.get_state

    def get_state(self, mixer):
        if self.stale:
            filtered.append(self.calls[-1].mixer_input.shape[1])
        return restored(self, mixer)

    expected, cache = greedy(model, ids, length=10), DynamicCache(config=model.config)
    monkeypatch.setattr(BeliefLayer, "get_state", get_state)
    draft = build("kla", seed=9)
    assert torch.equal(greedy(model, ids, length=10, assistant_model=draft, past_key_values=cache), expected)
    assert len(filtered) >= len(layers) and max(filtered) <= 64


def test_prompt_lookup(model):
    ids = torch.tensor([[3, 4, 5, 6, 3, 4, 5, 6, 3, 4]])
    assert torch.equal(greedy(model, ids, prompt_lookup_num_tokens=3), greedy(model, ids))


def test_first_blocks_alone_do_not_draft():
    """The call is refused before transformers changes the number of blocks in the configuration."""
    model, ids = build("kla"), tokens(1, 4)
    with pytest.raises(ArgumentError, match="assistant_early_exit"):
        greedy(model, ids, assistant_early_exit=1)
    assert greedy(model, ids).shape == (1, 10)


def test_generation_continues_from_a_returned_cache(model):
    ids = tokens(2, 5)
    first = greedy(model, ids, return_dict_in_generate=True)
    longer = torch.cat([first.sequences, tokens(2, 3, seed=7)], 1)
    cache, mask = first.past_key_values, torch.ones_like(longer)  # the model may have generated 0, the padding id
    assert cache.get_seq_length() == first.sequences.shape[1] - 1
    expected = greedy(model, longer, attention_mask=mask)
    assert torch.equal(greedy(model, longer, attention_mask=mask, past_key_values=cache), expected)


def test_generation_with_an_empty_cache(model):
    assert torch.equal(greedy(model, tokens(1, 3), past_key_values=DynamicCache()), greedy(model, tokens(1, 3)))


@pytest.mark.skipif(
    torch.backends.cuda.is_built() and not torch.cuda.is_available(),
    reason="transformers opens a CUDA stream, but this machine has no GPU",
)
def test_generation_with_an_offloaded_cache(model):
    offloaded = greedy(model, tokens(1, 3), cache_implementation="offloaded")
    assert torch.equal(offloaded, greedy(model, tokens(1, 3)))


REMOVED = (0, 1, 3, 4, 5, 7, 11)  # numbers of tokens: each layer has half of them, one within a call and one across


@torch.no_grad()
@pytest.mark.parametrize(
    ("layers", "remove"), [(x, n) for i, x in enumerate(LAYERS) for j, n in enumerate(REMOVED) if (i + j) % 2 == 0]
)
def test_crop_with_recording(layers, remove):
    """Remove any number of tokens, within a call and across calls, in a padded batch."""
    model, ids = build(layers), tokens(2, 11)
    mask = torch.ones(2, 11, dtype=torch.long)
    mask[0, :2] = 0
    cache = DynamicCache(config=model.config)
    cache.activate_past_recording()
    for start, stop in ((0, 6), (6, 7), (7, 7), (7, 11)):
        model(ids[:, start:stop], attention_mask=mask[:, :stop], past_key_values=cache)
    cache.crop(-remove)
    assert cache.get_seq_length() == 11 - remove
    again = model(ids[:, 11 - remove :], attention_mask=mask, past_key_values=cache) if remove else None
    probe = tokens(2, 2, seed=4)
    after = model(probe, past_key_values=cache).logits
    alone = model(torch.cat([ids, probe], 1), attention_mask=torch.cat([mask, mask[:, -2:]], 1)).logits
    torch.testing.assert_close(after, alone[:, 11:], **CLOSE)
    if again is not None:
        is_token = torch.arange(11)[None] >= torch.tensor([[max(2, 11 - remove)], [11 - remove]])
        torch.testing.assert_close(again.logits[is_token[:, 11 - remove :]], alone[:, :11][is_token], **CLOSE)


@torch.no_grad()
def test_crop_twice_and_without_recording(model):
    ids = tokens(2, 9)
    cache = DynamicCache(config=model.config)
    model(ids[:, :4], past_key_values=cache)
    cache.activate_past_recording()
    model(ids[:, 4:], past_key_values=cache)
    cache.crop(torch.tensor(-1))
    cache.crop(-1)
    cache.crop(6)  # the number to keep, as in transformers 5.17
    assert cache.get_seq_length() == 6
    torch.testing.assert_close(model(ids[:, 6:], past_key_values=cache).logits, model(ids).logits[:, 6:], **CLOSE)
    with pytest.raises(ArgumentError, match="at most 3 tokens"):
        cache.crop(-4)
    assert cache.get_seq_length() == 9  # a refused crop changes nothing
    unrecorded = model(ids).past_key_values
    with pytest.raises(ArgumentError, match="activate_past_recording"):
        unrecorded.crop(-1)
    unrecorded.crop(0)
    unrecorded.crop(-9)
    assert unrecorded.get_seq_length() == 0


@torch.no_grad()
def test_crop_then_reorder(model):
    ids = tokens(3, 7)
    mask = torch.ones(3, 7, dtype=torch.long)
    mask[1, :3] = 0
    cache = DynamicCache(config=model.config)
    cache.activate_past_recording()
    model(ids, attention_mask=mask, past_key_values=cache)
    cache.crop(-2)
    order = torch.tensor([2, 1, 1])
    cache.reorder_cache(order)
    after = model(ids[order, 5:], past_key_values=cache).logits
    torch.testing.assert_close(after, model(ids, attention_mask=mask).logits[order, 5:], **CLOSE)
    cache.batch_select_indices(torch.tensor([True, False, True]))
    cache.batch_repeat_interleave(2)
    probe = tokens(4, 1)
    alone = model(
        torch.cat([ids[[2, 2, 1, 1]], probe], 1), attention_mask=torch.cat([mask[[2, 2, 1, 1]], probe > 0], 1)
    )
    torch.testing.assert_close(model(probe, past_key_values=cache).logits, alone.logits[:, -1:], **CLOSE)


@torch.no_grad()
def test_snapshot_and_restore(model):
    """Restore a snapshot repeatedly, after calls, crops and reorderings."""
    ids, wrong = tokens(2, 8), tokens(2, 5, seed=8)
    cache = model(ids[:, :5]).past_key_values
    held = snapshot(cache)
    cache.activate_past_recording()
    for _ in range(2):
        model(wrong, past_key_values=cache)
        cache.crop(-2)
        cache.reorder_cache(torch.tensor([1, 0]))
        restore(cache, held)
        assert cache.get_seq_length() == 5
        torch.testing.assert_close(model(ids[:, 5:], past_key_values=cache).logits, model(ids).logits[:, 5:], **CLOSE)
    other = copy.deepcopy(cache)
    cache.reset()
    assert cache.get_seq_length() == 0 and other.get_seq_length() == 8
    torch.testing.assert_close(model(ids, past_key_values=cache).logits, model(ids).logits, **CLOSE)
