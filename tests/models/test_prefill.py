"""Long prompts are filtered in chunks: memory does not grow with them, and results stay the same."""

import copy

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import DynamicCache, StaticCache

from kalmix.models import snapshot
from kalmix.models.prefill import PREFILL_TOKENS, prefill_bounds

from .conftest import LAYERS, build, tokens
from .test_cache import EVERY_LAYER

CLOSE = {"atol": 2e-5, "rtol": 0}
RECURRENT = [name for name in LAYERS if name not in ("gpt", "hybrid", "ridge-hybrid", "filters", "directions")]
WINDOWS = [x for x in EVERY_LAYER if "window" in x]


class LargestTensor(TorchDispatchMode):
    """Record the bytes of the largest floating-point tensor that any operation returns."""

    def __init__(self):
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        floats = (x for x in tree_leaves(result) if isinstance(x, torch.Tensor) and x.is_floating_point())
        self.bytes = max([self.bytes, *(x.untyped_storage().nbytes() for x in floats)])
        return result


def long_prompts(lengths, seed=2):
    """Return random prompts of these lengths, padded on the left, with their mask."""
    longest = max(lengths)
    mask = torch.arange(longest) >= longest - torch.tensor(lengths)[:, None]
    return tokens(len(lengths), longest, seed) * mask, mask.long()


@torch.no_grad()
@pytest.mark.parametrize(
    ("layers", "static"),
    [*((name, False) for name in RECURRENT), (WINDOWS, False), ([*LAYERS["delta"], WINDOWS[0]], True)],
    ids=[*RECURRENT, "windows", "static"],
)
def test_memory_of_prefill_does_not_grow_with_the_prompt(layers, static):
    model = build(layers, prefill_tokens=128)
    largest = {}
    for length in (128, 256):
        ids, mask = long_prompts((length, length - 70))
        cache = StaticCache(config=model.config, max_cache_len=256) if static else DynamicCache(config=model.config)
        with LargestTensor() as seen:
            model(ids, attention_mask=mask, past_key_values=cache, logits_to_keep=1)
        largest[length] = seen.bytes
    assert largest[128] == largest[256]
    model.config.prefill_tokens = 2 * 256
    with LargestTensor() as at_once:
        model(ids, attention_mask=mask, logits_to_keep=1)
    assert at_once.bytes > 2 * largest[256]


def check_generation(model, **options):
    """Check that left-padded prompts are continued by the same tokens, whether filtered in chunks or at once."""
    ids, mask = long_prompts((200, 75))
    options = {"attention_mask": mask, "max_new_tokens": 6, "do_sample": False, **options}
    at_once = model.generate(ids, **options)
    model.config.prefill_tokens = 2 * 64
    lengths = []
    model.model.layers[0].register_forward_pre_hook(lambda _, args: lengths.append(args[0].shape[1]))
    assert torch.equal(model.generate(ids, **options), at_once)
    assert lengths[:5] == [64, 64, 64, 8, 1]


def test_generation_after_chunked_prefill(model):
    check_generation(model)


@pytest.mark.parametrize("options", [{"cache_implementation": "static"}, {"num_beams": 2}], ids=["static", "beams"])
def test_modes_of_generation_after_chunked_prefill(options):
    check_generation(build(["kla", "attention", {"mixer": "gated-deltanet", "heads": 1, "norm_eps": 0.01}]), **options)


@torch.no_grad()
def test_chunked_prefill_gives_the_same_logits_and_states(model):
    ids, mask = long_prompts((150, 81))
    mask[0, 100:120] = 0  # padding inside
    whole = model(ids, attention_mask=mask)
    model.config.prefill_tokens = 1
    chunked = model(ids, attention_mask=mask)
    torch.testing.assert_close(chunked.logits[mask > 0], whole.logits[mask > 0], **CLOSE)
    probe = tokens(2, 3, seed=5)
    found, expected = (model(probe, past_key_values=copy.deepcopy(x.past_key_values)).logits for x in (chunked, whole))
    torch.testing.assert_close(found, expected, **CLOSE)
    kept = model(ids, attention_mask=mask, logits_to_keep=30).logits  # in two chunks
    torch.testing.assert_close(kept, chunked.logits[:, -30:], rtol=0, atol=0)


@torch.no_grad()
def test_packed_prompts_continue_from_states(model):
    """Three prompts in one row, of which each continues from a state of its own, and all are filtered in chunks."""
    starts, lengths = tokens(3, 9, seed=3), (90, 20, 80)
    bounds = torch.tensor([0, *lengths]).cumsum(0)
    packed = tokens(1, 190)
    cache = model(starts).past_key_values
    whole = copy.deepcopy(cache)
    model.config.prefill_tokens = 64
    found = model(packed, cu_seq_lens_q=bounds, past_key_values=cache).logits[0]
    model.config.prefill_tokens = 190
    torch.testing.assert_close(model(packed, cu_seq_lens_q=bounds, past_key_values=whole).logits[0], found, **CLOSE)
    probe = tokens(3, 2, seed=7)
    after = model(probe, past_key_values=cache).logits
    for row, part in enumerate(packed[0].split(lengths)):
        alone = model(torch.cat([starts[row], part, probe[row]])[None]).logits[0]
        torch.testing.assert_close(found[bounds[row] : bounds[row + 1]], alone[9:-2], **CLOSE)
        torch.testing.assert_close(after[row], alone[-2:], **CLOSE)


@torch.no_grad()
@pytest.mark.parametrize("layers", ["kla", "hybrid"])
def test_rejected_drafts_filter_few_tokens_of_the_prompt_again(layers):
    """The first call of speculative decoding holds the prompt; a crop after it does not filter all of it again."""
    model, ids = build(layers), tokens(1, 300)
    cache = DynamicCache(config=model.config)
    cache.activate_past_recording()
    model(ids, past_key_values=cache, logits_to_keep=1)
    cache.crop(-5)
    lengths = []
    for block in model.model.layers:
        block.mixer.register_forward_pre_hook(lambda _, args: lengths.append(args[0].shape[1]))
    after = model(ids[:, 295:], past_key_values=cache).logits
    assert lengths == [59] * len(model.model.layers)
    torch.testing.assert_close(after, model(ids, use_cache=False).logits[:, 295:], **CLOSE)


def bounds_of(model, *shape, cache=None):
    layers = [] if cache is None else cache.layers
    return prefill_bounds(torch.empty(*shape, dtype=torch.long, device="meta"), layers, model.model.layers.mixers, None)


def test_rule_of_chunks():
    """Models with bounded states filter at most 32,768 tokens at a time; gradients need all of them."""
    recurrent, hybrid = build(["kla", {"mixer": "afa", "window": 5}]), build("hybrid")
    cache = DynamicCache(config=recurrent.config)
    with torch.no_grad():
        model_call = recurrent(tokens(1, 3), past_key_values=cache)
        assert len(snapshot(model_call.past_key_values)) == 2
        assert bounds_of(recurrent, 64, 8192, cache=cache) == list(range(0, 8193, PREFILL_TOKENS // 64))
        assert bounds_of(recurrent, 1, 32768, cache=cache) == [0, 32768]
        assert bounds_of(recurrent, 1, 32769, cache=cache) == [0, 16448, 32769]
        assert bounds_of(recurrent, 4096, 100, cache=cache) == [0, 64, 100]
        assert bounds_of(hybrid, 64, 8192, cache=cache) == [0, 8192]
        assert bounds_of(recurrent, 64, 8192) == [0, 8192]
        cache.activate_past_recording()
        assert bounds_of(hybrid, 1, 8192, cache=cache) == [0, 8128, 8192]
        assert bounds_of(recurrent, 1, 64, cache=cache) == [0, 64]
    assert bounds_of(recurrent, 64, 8192, cache=cache) == [0, 8192]
