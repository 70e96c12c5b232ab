"""Static caches give the results of dynamic ones, and their buffers keep their addresses."""

import copy

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters
from transformers import CompileConfig, DynamicCache, GenerationConfig, StaticCache

from kalmix import ArgumentError
from kalmix.models import restore, snapshot

from .conftest import build, tokens
from .test_cache import EVERY_LAYER

CLOSE = {"atol": 1e-5, "rtol": 0}


def left_padded(*lengths):
    """Return random prompts of these lengths, with their mask."""
    ids, longest = tokens(len(lengths), max(lengths), seed=2), max(lengths)
    mask = torch.arange(longest) >= longest - torch.tensor(lengths)[:, None]
    return ids * mask, mask.long()


def addresses(cache):
    return [x.data_ptr() for layer in cache.layers for x in layer.tensors]


@torch.no_grad()
def filled(model, ids, mask=None, max_cache_len=16):
    cache = StaticCache(config=model.config, max_cache_len=max_cache_len)
    model(ids, attention_mask=mask, past_key_values=cache)
    return cache


@pytest.mark.parametrize(
    "options",
    [
        {},
        pytest.param({"num_beams": 2}, marks=pytest.mark.slow),
        pytest.param({"do_sample": True, "num_return_sequences": 2}, marks=pytest.mark.slow),
        {"prefill_chunk_size": 3},
    ],
    ids=["greedy", "beams", "sampling", "chunked"],
)
@pytest.mark.slow
def test_static_generation_equals_dynamic_generation(options):
    """A model with every layer continues padded prompts; windows of 5 tokens are shorter than the texts."""
    model = build(EVERY_LAYER)
    ids, mask = left_padded(8, 5, 1)
    sequences = []
    for cache_implementation in ("dynamic", "static"):
        torch.manual_seed(0)
        out = model.generate(
            ids, attention_mask=mask, max_new_tokens=7, cache_implementation=cache_implementation, **options
        )
        sequences.append(out)
    assert torch.equal(*sequences)


@torch.no_grad()
def test_buffers_are_updated_in_place(model):
    ids, mask = left_padded(9, 6)
    mask = torch.cat([mask, torch.ones(2, 6, dtype=torch.long)], 1)
    mask[1, 10] = 0  # padding between two turns
    ids = torch.cat([ids, tokens(2, 6, seed=5)], 1)
    cache = filled(model, ids[:, :9], mask[:, :9], max_cache_len=15)
    before, length = addresses(cache), 9
    outputs = []
    for tokens_of_call in (1, 4, 1):
        outputs.append(
            model(
                ids[:, length : length + tokens_of_call],
                attention_mask=mask[:, : length + tokens_of_call],
                past_key_values=cache,
            ).logits
        )
        length += tokens_of_call
        assert cache.get_seq_length() == length
    assert addresses(cache) == before
    expected = model(ids, attention_mask=mask).logits[:, 9:]
    torch.testing.assert_close(torch.cat(outputs, 1)[mask[:, 9:] > 0], expected[mask[:, 9:] > 0], **CLOSE)
    with pytest.raises(ArgumentError, match="max_cache_len >= 16"):
        model(ids[:, :1], past_key_values=cache)
    cache.reset()
    assert cache.get_seq_length() == 0
    again = model(ids[:, :9], attention_mask=mask[:, :9], past_key_values=cache).logits
    assert addresses(cache) == before
    torch.testing.assert_close(
        again[mask[:, :9] > 0], model(ids, attention_mask=mask).logits[:, :9][mask[:, :9] > 0], **CLOSE
    )


@torch.no_grad()
def test_snapshot_restore_and_reorder_static_caches(model):
    ids = tokens(2, 8)
    cache = filled(model, ids[:, :5])
    before, held = addresses(cache), snapshot(cache)
    for _ in range(2):
        model(tokens(2, 5, seed=8), past_key_values=cache)
        cache.reorder_cache(torch.tensor([1, 0]))
        restore(cache, held)
        assert cache.get_seq_length() == 5 and addresses(cache) == before
        torch.testing.assert_close(model(ids[:, 5:], past_key_values=cache).logits, model(ids).logits[:, 5:], **CLOSE)
    other = copy.deepcopy(cache)
    other.batch_repeat_interleave(2)
    other.batch_select_indices(torch.tensor([3, 0]))
    probe = tokens(2, 1, seed=3)
    expected = model(torch.cat([ids[[1, 0]], probe], 1)).logits[:, -1:]
    torch.testing.assert_close(model(probe, past_key_values=other).logits, expected, **CLOSE)
    with pytest.raises(ArgumentError, match="snapshot"):
        cache.crop(-1)
    cache.crop(0)
    with pytest.raises(ArgumentError, match="another cache"):
        restore(StaticCache(config=model.config, max_cache_len=16), held)


def decode_compiled(layers, cache_type):
    """Check that decoding steps run one graph and give the logits of a single call; return how often it is compiled."""
    model, (ids, mask) = build(layers), left_padded(14, 11)
    counter = CompileCounterWithBackend("eager")
    torch._dynamo.reset()
    step = torch.compile(model.forward, backend=counter, fullgraph=True)
    options = {"max_cache_len": 14} if cache_type is StaticCache else {}
    cache = cache_type(config=model.config, **options)
    with torch.no_grad():
        model(ids[:, :8], attention_mask=mask[:, :8], past_key_values=cache)
        before = addresses(cache)
        logits = [step(token, past_key_values=cache).logits for token in ids[:, 8:].split(1, 1)]
        torch.testing.assert_close(torch.cat(logits, 1), model(ids, attention_mask=mask).logits[:, 8:], **CLOSE)
    assert cache_type is not StaticCache or addresses(cache) == before
    return counter.frame_count


# Three layers per model: one model compiles faster than three, and more layers round more.
STATIC = [EVERY_LAYER[i : i + 3] for i in range(0, len(EVERY_LAYER), 3)]
BAYESIAN = {"mixer": "bayesian", "norm_eps": 0.01}
GROWING = [["kla", "kda", BAYESIAN], ["rt-afa", "attention", "gated-kalmanet"]]


@pytest.mark.slow
@pytest.mark.parametrize("layers", STATIC, ids=["+".join(x["mixer"] for x in layers) for layers in STATIC])
def test_compiled_decoding_with_a_static_cache_is_one_graph(layers):
    assert decode_compiled(layers, StaticCache) == 1


@pytest.mark.slow
@pytest.mark.parametrize("layers", GROWING, ids=str)
def test_compiled_decoding_with_a_growing_cache_is_two_graphs(layers):
    """A graph is compiled for the first token, and one for any number of tokens in the cache."""
    assert decode_compiled(layers, DynamicCache) == 2


@pytest.mark.slow
@torch.no_grad()
def test_decoding_is_compiled_by_inductor():
    """With other layouts of the state, sums of torch 2.11 write beyond their output (pytorch issue 196681)."""
    model, ids = build(["deltanet", "deltanet"], hidden_size=32), tokens(2, 9)
    cache = filled(model, ids[:, :6])
    torch._dynamo.reset()
    step = torch.compile(model.forward, fullgraph=True)
    for t in range(6, 9):
        found = step(ids[:, t : t + 1], past_key_values=cache, output_hidden_states=True)
        torch.testing.assert_close(found.logits, model(ids).logits[:, t : t + 1], **CLOSE)


@pytest.mark.slow
def test_generate_compiles_decoding_once():
    """`generate` decodes with one graph, and again for another text whose static cache has the same size."""
    model = build("hybrid")
    compile_config = CompileConfig(backend="eager", mode=None, fullgraph=True)
    compile_config._compile_all_devices = True  # without it, generate compiles on a GPU only
    torch._dynamo.reset()
    counters.clear()
    for seed, prompts in ((0, left_padded(6, 4)), (1, left_padded(5, 2))):
        ids, mask = prompts
        options = {"max_new_tokens": 5 + seed, "do_sample": False, "attention_mask": mask}
        static = model.generate(ids, cache_implementation="static", compile_config=compile_config, **options)
        assert torch.equal(static, model.generate(ids, **options))
        assert counters["stats"]["unique_graphs"] == 1


def test_continuous_batching_is_refused():
    options = GenerationConfig(max_new_tokens=2, eos_token_id=1, pad_token_id=0)
    with pytest.raises(ArgumentError, match="padded batch"):
        build("kla").generate_batch([[3, 4, 5]], generation_config=options)


@torch.no_grad()
def test_static_caches_continue_packed_sequences(model):
    """Three sequences in two rows continue in a batch of three; their histories share 12 slots at first."""
    ids, probe = tokens(2, 6), tokens(3, 2, seed=3)
    cache = StaticCache(config=model.config, max_cache_len=11)
    model(ids, seq_idx=torch.tensor([[0, 0, 0, 1, 1, 1], [2, 2, 2, 2, 2, 2]]), past_key_values=cache)
    continued = model(probe, past_key_values=cache).logits
    for row, start in enumerate((ids[0, :3], ids[0, 3:], ids[1])):
        alone = model(torch.cat([start, probe[row]])[None]).logits[0, -2:]
        torch.testing.assert_close(continued[row], alone, **CLOSE)


@pytest.mark.slow
@torch.no_grad()
def test_chunked_prefill_uses_buffers_allocated_before():
    """A compiled prefill must not allocate buffers: CUDA graphs would reuse their memory."""
    model, (ids, mask) = build(EVERY_LAYER), left_padded(9, 4)
    options = {"batch_size": 2, "max_cache_len": 13, "prefill_chunk_size": 4, "model_kwargs": {}}
    cache = model._prepare_static_cache("static", **options)
    before = addresses(cache)
    assert len(before) > 2 * len(cache.layers) and cache.get_seq_length() == 0
    generation = {"attention_mask": mask, "max_new_tokens": 4, "do_sample": False}
    out = model.generate(ids, past_key_values=cache, prefill_chunk_size=4, **generation)
    assert addresses(cache) == before and cache.get_seq_length() == 12
    assert torch.equal(out, model.generate(ids, **generation))
