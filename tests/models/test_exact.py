"""Logits do not depend on how the tokens arrive: in pieces, padded or packed."""

import pytest
import torch
from transformers import DataCollatorWithFlattening
from transformers.cache_utils import DynamicCache

from kalmix import ArgumentError
from kalmix.models import hybrid_layers
from kalmix.models.cache_name import CACHE_NAME

from .conftest import build, tokens

CLOSE = {"atol": 1e-5, "rtol": 0}  # float32 logits of size about 1


@torch.no_grad()
@pytest.mark.parametrize("cuts", [(1, 2, 3, 4), (5,), (2, 2, 9), tuple(range(1, 12))])
def test_prompt_in_pieces_gives_the_same_logits(model, cuts):
    ids = tokens(2, 12)
    whole = model(ids).logits
    cache, parts = DynamicCache(config=model.config), []
    for start, stop in zip((0, *cuts), (*cuts, 12), strict=True):
        parts.append(model(ids[:, start:stop], past_key_values=cache).logits)
        assert cache.get_seq_length() == stop
    torch.testing.assert_close(torch.cat(parts, 1), whole, **CLOSE)


@torch.no_grad()
@pytest.mark.parametrize("attention_at", [(), (1,)])
def test_published_ridge_in_pieces_gives_the_same_logits(attention_at):
    """Use float64: condition numbers up to 51 and a small epsilon amplify rounding."""
    model = build(hybrid_layers(blocks=3, attention_at=attention_at)).double()
    ids = tokens(2, 40)
    whole = model(ids).logits
    cache, parts = DynamicCache(config=model.config), []
    cache.activate_past_recording()
    for start, stop in ((0, 17), (17, 18), (18, 21), (21, 40)):
        if start == 18:
            model(tokens(2, 9, seed=3), past_key_values=cache)
            cache.crop(-9)
        parts.append(model(ids[:, start:stop], past_key_values=cache).logits)
    torch.testing.assert_close(torch.cat(parts, 1), whole, atol=1e-9, rtol=0)


@torch.no_grad()
@pytest.mark.parametrize("side", ["left", "right", "both"])
def test_padding_does_not_change_logits(model, side):
    """Padding is in either or both of two pieces of the prompt."""
    ids, probe = tokens(3, 12), tokens(3, 1, seed=5)
    lengths = (12, 9, 2)
    starts = {"left": (0, 3, 10), "right": (0, 0, 0), "both": (0, 2, 4)}[side]
    padded, mask = torch.zeros(3, 12, dtype=torch.long), torch.zeros(3, 12, dtype=torch.long)
    for row, (start, length) in enumerate(zip(starts, lengths, strict=True)):
        padded[row, start : start + length], mask[row, start : start + length] = ids[row, :length], 1
    given = [torch.cat([row[:length], last]) for row, length, last in zip(ids, lengths, probe, strict=True)]
    alone = [model(row[None]).logits[0] for row in given]
    for cut in (1, 3, 12):
        cache = DynamicCache(config=model.config)
        parts = [model(padded[:, :cut], attention_mask=mask[:, :cut], past_key_values=cache).logits]
        if cut < 12:
            parts.append(model(padded[:, cut:], attention_mask=mask, past_key_values=cache).logits)
        logits, after = torch.cat(parts, 1), model(probe, past_key_values=cache).logits
        for row, (start, length) in enumerate(zip(starts, lengths, strict=True)):
            found = torch.cat([logits[row, start : start + length], after[row]])
            torch.testing.assert_close(found, alone[row], **CLOSE, msg=lambda text, cut=cut: f"cut at {cut}: {text}")


@torch.no_grad()
@pytest.mark.parametrize("keep", ["position_ids", "seq_idx", "cu_seq_lens_q"])
def test_packing_does_not_change_logits(model, keep):
    """Each of the formats of `DataCollatorWithFlattening` describes the same sequences."""
    examples = [tokens(1, n, seed=n)[0].tolist() for n in (4, 1, 7)]
    collate = DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_seq_idx=True)
    batch = collate([{"input_ids": example} for example in examples])
    logits = model(batch["input_ids"], **{keep: batch[keep]}).logits[0]
    for example, got in zip(examples, logits.split([4, 1, 7]), strict=True):
        torch.testing.assert_close(got, model(torch.tensor([example])).logits[0], **CLOSE)
    loss = model(**batch).loss
    apart = [model(torch.tensor([e]), labels=torch.tensor([e])).loss * (len(e) - 1) for e in examples]
    torch.testing.assert_close(loss, sum(apart) / (3 + 0 + 6), atol=1e-5, rtol=0)
    # The segments ignore the label of each sequence's first token, even if the labels do not.
    raw = model(batch["input_ids"], labels=batch["input_ids"], **{keep: batch[keep]}).loss
    torch.testing.assert_close(raw, loss, atol=1e-6, rtol=0)


@torch.no_grad()
def test_long_prompts_in_random_pieces(model):
    """Prompts of 300 tokens span several chunks and tiles, with left padding and packing."""
    rng = torch.Generator().manual_seed(0)
    ids = tokens(2, 300)
    whole = model(ids).logits
    cuts = sorted(torch.randint(0, 301, (9,), generator=rng).tolist())
    padded, mask = torch.zeros(2, 317, dtype=torch.long), torch.zeros(2, 317, dtype=torch.long)
    padded[0, 17:], padded[1, 80:] = ids[0], ids[1, :237]
    mask[0, 17:], mask[1, 80:] = 1, 1
    cache, parts = DynamicCache(config=model.config), []
    for start, stop in zip((0, *cuts), (*cuts, 317), strict=True):
        part = model(padded[:, start:stop], attention_mask=mask[:, :stop], past_key_values=cache)
        parts.append(part.logits)
    logits = torch.cat(parts, 1)
    torch.testing.assert_close(logits[0, 17:], whole[0], **CLOSE)
    torch.testing.assert_close(logits[1, 80:], whole[1, :237], **CLOSE)
    packed = torch.cat([ids[1, :131], ids[0]])[None]
    logits = model(packed, cu_seq_lens_q=torch.tensor([0, 131, 431])).logits[0]
    torch.testing.assert_close(logits[:131], whole[1, :131], **CLOSE)
    torch.testing.assert_close(logits[131:], whole[0], **CLOSE)


@torch.no_grad()
def test_packing_in_several_rows(model):
    ids = tokens(2, 8)
    position_ids = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3], [0, 1, 0, 1, 2, 3, 4, 5]])
    logits = model(ids, position_ids=position_ids).logits
    for row, start, stop in ((0, 0, 4), (0, 4, 8), (1, 0, 2), (1, 2, 8)):
        torch.testing.assert_close(logits[row, start:stop], model(ids[row : row + 1, start:stop]).logits[0], **CLOSE)
    whole = torch.arange(8)[None]
    torch.testing.assert_close(model(ids, position_ids=whole).logits, model(ids).logits)


@torch.no_grad()
def test_mask_of_ones_equals_no_mask(model):
    ids = tokens(2, 6)
    assert torch.equal(model(ids, attention_mask=torch.ones(2, 6)).logits, model(ids).logits)
    assert torch.equal(model(ids, use_cache=False).logits, model(ids).logits)
    assert model(ids, use_cache=False).past_key_values is None
    embeds = model.get_input_embeddings()(ids)
    assert torch.equal(model(inputs_embeds=embeds).logits, model(ids).logits)


@torch.no_grad()
def test_outputs(model):
    ids = tokens(2, 6)
    full = model(ids, output_beliefs=True, output_hidden_states=True)
    assert len(full.beliefs) == 2 and len(full.hidden_states) == 3
    for known, mixer in zip(full.beliefs, model.model.layers.mixers, strict=True):
        assert known.mean.shape == (2, 6, 16)
        assert (known.variance is not None) == mixer.has_posterior
        if known.variance is not None:
            assert known.variance.shape == (2, 6, 16) and (known.variance > 0).all()
    # The belief describes the mixer's output, which is added to the residual stream.
    first = model.model.layers[0]
    if first.mlp is None:
        torch.testing.assert_close(full.hidden_states[1] - full.hidden_states[0], full.beliefs[0].mean)
    assert torch.equal(model(ids, logits_to_keep=2).logits, full.logits[:, -2:])
    assert torch.equal(model(ids, logits_to_keep=torch.tensor([1, 3])).logits, full.logits[:, [1, 3]])
    as_tuple = model(ids, return_dict=False)
    assert torch.equal(as_tuple[0], full.logits)


@pytest.mark.slow
@torch.no_grad()
def test_compiled_models_return_beliefs():
    model, ids = build("kla"), tokens(2, 6)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    for got, expected in zip(
        compiled(ids, output_beliefs=True).beliefs, model(ids, output_beliefs=True).beliefs, strict=True
    ):
        torch.testing.assert_close(got, expected)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"attention_mask": torch.ones(1, 1, 4, 4)}, "attention_mask"),
        ({"attention_mask": torch.ones(1, 3)}, "attention_mask"),
        ({"attention_mask": torch.ones(2, 4)}, "attention_mask"),
        ({"seq_idx": torch.zeros(1, 3)}, "seq_idx"),
        ({"position_ids": torch.zeros(2, 4)}, "position_ids"),
        ({"cu_seq_lens_q": torch.tensor([0, 5])}, "cu_seq_lens_q"),
        ({"cu_seq_lens_q": torch.tensor([1, 4])}, "cu_seqlens"),
        ({"cu_seq_lens_q": torch.tensor([0, 3, 2])}, "cu_seqlens"),
        ({"inputs_embeds": torch.zeros(1, 4, 16)}, "input_ids"),
        ({"past_key_values": DynamicCache(config=build(["kla"]).config)}, f"`{CACHE_NAME}` has"),
        ({"past_key_values": DynamicCache(ddp_cache_data=[(torch.zeros(1, 1, 2, 4),) * 2] * 2)}, f"`{CACHE_NAME}` has"),
    ],
)
def test_wrong_inputs_are_refused(arguments, message):
    with pytest.raises(ArgumentError, match=message):
        build()(tokens(1, 4), **arguments)


@torch.no_grad()
def test_cache_of_another_batch_size_is_refused():
    model = build()
    cache = model(tokens(2, 3)).past_key_values
    with pytest.raises(ArgumentError, match="`state` has 2 sequences"):
        model(tokens(3, 1), past_key_values=cache)
    with pytest.raises(ArgumentError, match="cu_seq_lens_q"):
        model(tokens(2, 3), cu_seq_lens_q=torch.tensor([0, 3]))
