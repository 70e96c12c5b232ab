"""Masks with holes, packing and 4-D masks give the logits of each sequence alone, whether or not values can be read."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from transformers import DataCollatorWithFlattening
from transformers.cache_utils import DynamicCache

from kalmix import ArgumentError, checks
from kalmix.models import KalmixForCausalLM
from kalmix.models.segments_from_inputs import InputLayout, find_layout

from .conftest import CALM, LAYERS, build, tokens

CLOSE = {"atol": 1e-5, "rtol": 0}  # float32 logits of size about 1
HOLES = torch.tensor([[1, 1, 0, 1, 0, 0, 1, 1, 1], [0, 1, 1, 1, 1, 0, 1, 0, 0], [0, 0, 0, 0, 0, 0, 0, 0, 0]]).bool()


@contextmanager
def without_reading() -> Iterator[None]:
    """Find sequences as in training on a GPU: without reading values."""
    with checks(False), torch.enable_grad():
        yield


READING = [pytest.param(nullcontext, id="read"), pytest.param(without_reading, id="unread")]


def block_causal(*lengths: int) -> torch.Tensor:
    """Return the mask `[1, 1, T, T]` of sequences of these lengths in one row."""
    number = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    return (number[:, None] == number).tril()[None, None]


@torch.no_grad()
@pytest.mark.parametrize("reading", READING)
def test_tokens_behind_a_hole_in_the_mask_follow_those_before_it(model, reading):
    ids = tokens(3, 9)
    with reading():
        result = model(ids, attention_mask=HOLES, output_hidden_states=True, output_beliefs=True)
        probe = tokens(3, 2, seed=5)
        mask = torch.cat([HOLES, torch.tensor([[1, 1], [0, 1], [1, 1]])], 1)
        after = model(probe, attention_mask=mask, past_key_values=result.past_key_values).logits
    for row, mask in enumerate(HOLES):
        alone = model(ids[row, mask][None], output_hidden_states=True, output_beliefs=True) if mask.any() else None
        if alone is not None:
            torch.testing.assert_close(result.logits[row, mask], alone.logits[0], **CLOSE)
            for got, expected in zip(result.hidden_states, alone.hidden_states, strict=True):
                torch.testing.assert_close(got[row, mask], expected[0], **CLOSE)
            for got, expected in zip(result.beliefs, alone.beliefs, strict=True):
                torch.testing.assert_close(got.mean[row, mask], expected.mean[0], **CLOSE)
                if expected.variance is not None:
                    torch.testing.assert_close(got.variance[row, mask], expected.variance[0], **CLOSE)
        kept = probe[row, 1:] if row == 1 else probe[row]
        expected = model(torch.cat([ids[row, mask], kept])[None]).logits[0, -1]
        torch.testing.assert_close(after[row, -1], expected, **CLOSE)


def test_loss_and_gradients_do_not_depend_on_padding_inside():
    model = build("hybrid").train()
    ids, mask = tokens(2, 9), HOLES[:2]
    losses = []
    for inputs in ({"input_ids": ids}, {"inputs_embeds": model.get_input_embeddings()(ids)}):
        model.zero_grad()
        loss = model(**inputs, attention_mask=mask, labels=ids).loss
        loss.backward()
        losses.append((loss.detach(), [p.grad.clone() for p in model.parameters()]))
    model.zero_grad()
    alone = [model(ids[row, mask[row]][None], labels=ids[row, mask[row]][None]).loss for row in range(2)]
    counts = mask.sum(1) - 1
    expected = (alone[0] * counts[0] + alone[1] * counts[1]) / counts.sum()
    expected.backward()
    for loss, gradients in losses:
        torch.testing.assert_close(loss, expected.detach())
        for got, parameter in zip(gradients, model.parameters(), strict=True):
            torch.testing.assert_close(got, parameter.grad, atol=1e-6, rtol=1e-4)


@pytest.mark.slow
def test_marginal_loss_takes_the_next_token_behind_a_hole():
    """The losses draw different samples of the same posteriors."""
    ids = tokens(2, 9)
    torch.manual_seed(0)
    marginal = build(["kla"], loss="marginal", loss_samples=400).train()
    padded = marginal(ids, attention_mask=HOLES[:2], labels=ids).loss
    torch.manual_seed(0)
    rows = [ids[row, HOLES[row]] for row in range(2)]
    packed = marginal(torch.cat(rows)[None], cu_seq_lens_q=torch.tensor([0, 6, 11]), labels=torch.cat(rows)[None]).loss
    torch.testing.assert_close(padded, packed, atol=0.03, rtol=0)


@torch.no_grad()
@pytest.mark.parametrize("cut", [1, 2, 3, 4, 6, 8])
def test_cropping_a_cache_counts_columns_of_the_mask(cut):
    """A crop removes the last columns, although the layers saw the tokens in another order."""
    model = build("hybrid")
    ids, mask = tokens(3, 9), HOLES
    cache = DynamicCache(config=model.config)
    cache.activate_past_recording()
    model(ids, attention_mask=mask, past_key_values=cache)
    cache.crop(-cut)
    cache.batch_select_indices(torch.tensor([1, 0]))
    probe = tokens(2, 1, seed=5)
    after = model(probe, past_key_values=cache).logits
    for row, source in enumerate((1, 0)):
        kept = ids[source, :-cut][mask[source, :-cut]]
        torch.testing.assert_close(after[row], model(torch.cat([kept, probe[row]])[None]).logits[0, -1:], **CLOSE)


def test_a_layout_is_cropped_twice_as_once():
    layout = find_layout(3, 9, attention_mask=HOLES)
    twice, once = layout.truncate(7).truncate(4), layout.truncate(4)
    assert torch.equal(twice.segments.rows, once.segments.rows)
    assert once.segments.rows[:, 2].tolist() == HOLES[:, :4].sum(1).tolist()


@pytest.mark.parametrize("layers", ["kla", "hybrid", "filters"])
@pytest.mark.parametrize("cache", [{}, {"cache_implementation": "static", "disable_compile": True}, {"num_beams": 2}])
def test_a_prompt_with_the_pad_id_inside_is_continued(layers, cache):
    """Without a mask, transformers masks every pad id of the prompt."""
    model = build(layers)
    prompt = tokens(1, 7)
    inside = torch.cat([prompt[:, :3], torch.zeros(1, 2, dtype=torch.long), prompt[:, 3:]], 1)
    options = {"max_new_tokens": 5, "do_sample": False, "eos_token_id": None, **cache}
    with checks(False):
        got = model.generate(inside, **options)
    assert torch.equal(got[:, 9:], model.generate(prompt, **options)[:, 7:])


def packed_batch() -> Any:
    collate = DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_seq_idx=True)
    return collate([{"input_ids": tokens(1, n, seed=n)[0].tolist()} for n in (4, 1, 7)])


@torch.no_grad()
@pytest.mark.parametrize("name", ["position_ids", "seq_idx"])
def test_packing_with_values_that_cannot_be_read(model, name):
    batch = packed_batch()
    with without_reading():
        result = model(batch["input_ids"], **{name: batch[name]}, use_cache=False)
    expected = [model(part).logits for part in batch["input_ids"].split([4, 1, 7], dim=1)]
    torch.testing.assert_close(result.logits, torch.cat(expected, 1), **CLOSE)


def test_more_sequences_than_allowed_raise():
    ids = tokens(2, 8)
    position_ids = torch.arange(8) % 2
    for most, name in ((8, None), (7, "describes too many sequences")):
        model = build("kla", max_packed_sequences=most)
        with without_reading():
            if name is None:
                model(ids, position_ids=position_ids[None], use_cache=False)
            else:
                with pytest.raises(RuntimeError, match=name):
                    model(ids, position_ids=position_ids[None], use_cache=False)
            with torch.no_grad():
                model(ids, position_ids=position_ids[None])  # without gradients, the values are read
        model(ids, position_ids=position_ids[None])  # on a CPU, too


@torch.no_grad()
def test_positions_of_one_sequence_per_row_leave_a_cache_that_continues():
    model = build("hybrid")
    ids = tokens(2, 8)
    for reading in (nullcontext, without_reading):
        with reading():
            cache = model(ids[:, :7], position_ids=torch.arange(7)[None]).past_key_values
        torch.testing.assert_close(model(ids[:, 7:], past_key_values=cache).logits, model(ids).logits[:, 7:], **CLOSE)


class Forward(torch.nn.Module):
    """Model that takes tensors and returns logits, for `torch.compile`."""

    def __init__(self, model: KalmixForCausalLM, **options) -> None:
        super().__init__()
        self.model, self.options = model, options

    def forward(self, ids: torch.Tensor, **inputs: torch.Tensor) -> torch.Tensor:
        return self.model(ids, **inputs, **self.options).logits


def compiled(layers: str | list, **options):
    """Return a model, and its compiled forward with a list to which every compilation adds an entry."""
    model, graphs = build(layers), []

    def backend(graph, _inputs):
        graphs.append(graph)
        return graph.forward

    torch.compiler.reset()
    return model, torch.compile(Forward(model, **options), backend=backend, fullgraph=True, dynamic=False), graphs


REPEATED = ("hybrid", "ridge-hybrid", "ungated")  # models whose layers are in others


@torch.no_grad()
@pytest.mark.parametrize(
    ("layers", "name"),
    [
        (["attention"], "seq_idx"),
        ([{"mixer": "deltanet", **CALM}], "position_ids"),
        *(pytest.param(name, "position_ids", marks=pytest.mark.slow) for name in LAYERS if name not in REPEATED),
    ],
)
@pytest.mark.slow
def test_packing_compiles_once_for_any_number_of_sequences(layers, name):
    model, forward, graphs = compiled(layers, use_cache=False)
    ids = tokens(1, 12)
    for cuts in ((4, 1, 7), (12,), (1,) * 12):
        parts = [torch.arange(n) if name == "position_ids" else torch.full((n,), i) for i, n in enumerate(cuts)]
        expected = torch.cat([model(part).logits for part in ids.split(cuts, dim=1)], 1)
        torch.testing.assert_close(forward(ids, **{name: torch.cat(parts)[None]}), expected, **CLOSE)
    assert len(graphs) == 1


@pytest.mark.slow
@torch.no_grad()
def test_one_graph_serves_all_masks():
    model, forward, graphs = compiled(["attention"])
    ids = tokens(3, 9)
    for mask in (HOLES, HOLES.flip(1), torch.ones(3, 9).bool()):
        logits = forward(ids, attention_mask=mask)
        for row in range(3):
            if mask[row].any():
                torch.testing.assert_close(logits[row, mask[row]], model(ids[row, mask[row]][None]).logits[0], **CLOSE)
    assert len(graphs) == 1


@torch.no_grad()
@pytest.mark.slow
def test_a_compiled_call_with_a_cache_refuses_packing():
    _, forward, _ = compiled(["attention"])
    torch.testing.assert_close(forward(tokens(1, 6), position_ids=torch.arange(6)[None]).shape, (1, 6, 40))
    with pytest.raises(RuntimeError, match="several sequences in a row"):
        forward(tokens(1, 6), position_ids=torch.arange(6)[None] % 3)


@torch.no_grad()
@pytest.mark.parametrize("reading", READING)
def test_block_causal_masks(model, reading):
    ids = tokens(2, 9)
    packed, holes = block_causal(4, 2, 3), (HOLES[:2, :, None] & HOLES[:2, None]).tril()[:, None]
    keep = torch.tensor([True, True, False, True, False, True, True, False, True])  # padding inside of sequences
    both = packed & keep  # queries of padding attend to tokens
    additive = torch.where(packed, 0.0, torch.finfo(torch.float16).min).half()
    with reading():
        logits = {
            name: model(ids, attention_mask=mask, use_cache=False).logits
            for name, mask in {"packed": packed, "additive": additive, "holes": holes, "both": both}.items()
        }
    for row in range(2):
        kept = HOLES[row]
        torch.testing.assert_close(logits["holes"][row, kept], model(ids[row, kept][None]).logits[0], **CLOSE)
        for start, stop in ((0, 4), (4, 6), (6, 9)):
            expected = model(ids[row, start:stop][None]).logits[0]
            for name in ("packed", "additive"):
                torch.testing.assert_close(logits[name][row, start:stop], expected, **CLOSE)
            kept = torch.arange(start, stop)[keep[start:stop]]
            torch.testing.assert_close(logits["both"][row, kept], model(ids[row, kept][None]).logits[0], **CLOSE)


def masks_of_other_forms() -> dict[str, torch.Tensor]:
    causal = block_causal(6)
    number = torch.tensor([0, 1, 0, 1, 1, 1])
    later = causal.clone()
    later[0, 0, 1, 2] = True
    return {
        "bidirectional": torch.ones(1, 1, 6, 6).bool(),
        "window": causal.triu(-2),
        "one later key": later,
        "without the token itself": causal.tril(-1),
        "interleaved": (number[:, None] == number).tril()[None, None],
        "bias": torch.where(causal, -0.5 * torch.arange(6.0), -torch.inf),
        "zeros and ones": causal.float(),
    }


@torch.no_grad()
@pytest.mark.parametrize("name", masks_of_other_forms())
def test_other_4d_masks_are_refused(name):
    model, mask = build("hybrid"), masks_of_other_forms()[name]
    with pytest.raises(ArgumentError, match="not block-causal"):
        model(tokens(1, 6), attention_mask=mask)
    with without_reading(), pytest.raises(RuntimeError, match="block-causal"):
        model(tokens(1, 6), attention_mask=mask, use_cache=False)


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (torch.ones(1, 1, 4, 4).long(), "dtype"),
        (torch.ones(1, 2, 4, 4).bool(), "shape"),
        (torch.ones(1, 1, 4, 9).bool(), "2-D mask"),
        (torch.ones(1, 4, 4).bool(), "shape"),
        ({"full_attention": None}, "dict"),
    ],
)
def test_masks_of_other_shapes_are_refused(mask, message):
    with pytest.raises(ArgumentError, match=message):
        build()(tokens(1, 4), attention_mask=mask)


def test_plain_inputs_need_no_layout():
    plain = InputLayout()
    assert find_layout(2, 4) == plain
    assert find_layout(2, 4, attention_mask=torch.ones(2, 9)) == plain
    assert find_layout(2, 4, position_ids=torch.arange(4)[None]) == plain
    assert find_layout(2, 4, attention_mask=block_causal(4)) == plain
    x = torch.randn(2, 4, 3)
    assert plain.compact(x) is x and plain.restore(x) is x and plain.truncate(2) == plain
