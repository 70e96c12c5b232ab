"""What a cache holds: constant for recurrent layers, and the past only on request."""

import warnings
import weakref

import pytest
import torch
from torch.utils._pytree import tree_leaves
from transformers.cache_utils import DynamicCache, StaticCache

from kalmix import ArgumentError
from kalmix.layers import MIXERS
from kalmix.models import restore, snapshot
from kalmix.models.cache_name import CACHE_NAME

from .conftest import DESIGN, build, tokens

# One block of every layer, and of those whose histories a window limits.
EVERY_LAYER = [
    *({"mixer": name} | ({"design": DESIGN} if name == "design" else {}) for name in MIXERS),
    *({"mixer": name, "window": 5} for name in ("afa", "rt-afa", "afa-transformer", "controlled-afa")),
]


def layer_bytes(layer) -> int:
    """Return the bytes of all memory that a layer of a cache keeps alive."""
    tensors = (x for x in tree_leaves(list(vars(layer).values())) if isinstance(x, torch.Tensor))
    storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors}
    return sum(storages.values())


@torch.no_grad()
@pytest.mark.slow
def test_cache_holds_only_states():
    """Recurrent layers hold the same number of bytes for any prompt; histories grow by the tokens they store."""
    model = build(EVERY_LAYER)
    held = []
    for length in (6, 24):
        cache = model(tokens(2, length)).past_key_values
        for token in tokens(2, 2, seed=2).split(1, 1):
            held.append([layer_bytes(layer) for layer in cache.layers])
            model(token, past_key_values=cache)
    for mixer, short, _, long, after_next in zip(model.model.layers.mixers, *held, strict=True):
        name, stored = type(mixer).__name__, 2 * 4 * mixer.state_size(24)
        if mixer.state_size(24) == mixer.state_size(6):
            assert short == long == after_next, name
        assert after_next <= 1.1 * long, name
        assert long < 1.3 * stored + 2 * 8 * 3 * 64, name  # positions, times, and inputs of a convolution


@torch.no_grad()
def test_padding_changes_no_shape_of_a_cache():
    """Exported and compiled code cannot shorten histories to the longest sequence, so eager code does not either."""
    model, ids = build(EVERY_LAYER), tokens(2, 12)
    mask = torch.tensor([[1] * 2 + [0] * 5, [0] * 4 + [1] * 3])  # a row has no more than 3 tokens
    shapes = []
    for first, both in ((mask, torch.cat([mask, mask[:, :5]], 1)), (None, None)):
        cache = model(ids[:, :7], attention_mask=first).cache
        shapes.append([[x.shape for x in layer.tensors] for layer in cache.layers])
        model(ids[:, 7:], attention_mask=both, **{CACHE_NAME: cache})
        shapes[-1] += [[x.shape for x in layer.tensors] for layer in cache.layers]
    names = [type(mixer).__name__ for mixer in model.model.layers.mixers] * 2
    for name, padded, plain in zip(names, *shapes, strict=True):
        assert padded == plain, name


@torch.no_grad()
@pytest.mark.parametrize("kind", [DynamicCache, StaticCache])
@pytest.mark.slow
def test_a_state_in_one_dtype_continues(kind):
    """The exporters of transformers cast all tensors of a cache, also times in float64, to the dtype of the model."""
    model, ids = build(EVERY_LAYER), tokens(2, 9)
    outputs = []
    for cast in (False, True):
        cache = kind(config=model.config, **({"max_cache_len": 16} if kind is StaticCache else {}))
        model(ids[:, :6], **{CACHE_NAME: cache})
        for layer in cache.layers if cast else []:
            layer.tensors = [x.float() if x.is_floating_point() else x for x in layer.tensors]
        outputs.append([model(token, **{CACHE_NAME: cache}).logits for token in ids[:, 6:].split(1, 1)])
    torch.testing.assert_close(*outputs, atol=1e-5, rtol=0)


@torch.no_grad()
@pytest.mark.parametrize("name", ["cache", "past_key_values"])
@pytest.mark.parametrize("base", [False, True])
def test_the_cache_has_the_names_of_all_versions_of_transformers(name, base):
    """In calls and in outputs, without the warning of transformers 5.24."""
    model, ids = build("hybrid"), tokens(1, 8)
    model = model.model if base else model
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        first = model(ids[:, :5])
        output = model(ids[:, 5:], **{name: first.cache})
    assert first.cache is first.past_key_values is output.cache is output.past_key_values
    assert output.cache.get_seq_length() == 8 and isinstance(first[CACHE_NAME], DynamicCache)
    torch.testing.assert_close(output[0], model(ids)[0][:, 5:])


def test_two_caches_in_one_call_are_refused():
    model, ids = build("kla"), tokens(1, 4)
    cache = model(ids).cache
    with pytest.raises(ArgumentError, match="`cache` and `past_key_values` are both given"):
        model(ids, cache=cache, past_key_values=cache)


@torch.no_grad()
def test_calls_free_inputs_and_states_block_by_block():
    """While the third block runs, nothing holds the input and the previous state of the first."""
    model = build(["kla", "attention", "kla"])
    cache = model(tokens(1, 4)).past_key_values
    first, _, third = model.model.layers
    watched, held = [weakref.ref(cache.layers[0].tensors[0])], []
    first.register_forward_hook(lambda block, args, output: watched.append(weakref.ref(output.mixer_input)))
    third.register_forward_pre_hook(lambda *_: held.extend(x() for x in watched))
    model(tokens(1, 4), past_key_values=cache)
    assert held == [None, None]


@torch.no_grad()
def test_recording_ends_with_each_crop():
    model = build("kla")
    cache = DynamicCache(config=model.config)
    model(tokens(1, 4), past_key_values=cache)
    assert all(not layer.entry.calls for layer in cache.layers)
    cache.activate_past_recording()
    for _ in range(3):
        for token in tokens(1, 4).T:
            model(token[None], past_key_values=cache)
        recorded = [[call.mixer_input.shape[1] for call in layer.entry.calls] for layer in cache.layers]
        assert recorded == [[4], [4]]
        cache.crop(-2)


@torch.no_grad()
def test_recorded_tokens_share_an_initial_state():
    """While 8 tokens are drafted, attention holds its keys and values before and after them, not after each."""
    model = build("gpt")
    cache = DynamicCache(config=model.config)
    cache.activate_past_recording()
    model(tokens(1, 70), past_key_values=cache)
    alone = layer_bytes(model(tokens(1, 78)).past_key_values.layers[0])
    for token in tokens(1, 8).T:
        model(token[None], past_key_values=cache)
    inputs = 4 * 16 * 78
    assert layer_bytes(cache.layers[0]) <= 2 * alone + inputs
    cache.crop(-3)
    expected = model(torch.cat([tokens(1, 70), tokens(1, 8)], 1)).logits[:, -3:]
    after = model(tokens(1, 8)[:, 5:], past_key_values=cache).logits
    torch.testing.assert_close(after, expected, atol=1e-5, rtol=0)


@torch.no_grad()
@pytest.mark.slow
def test_a_drafted_token_keeps_its_inputs_alone():
    """A recorded token adds D numbers per layer, no copy of a state; a history also grows by the token."""
    model = build(EVERY_LAYER)
    cache = DynamicCache(config=model.config)
    model(tokens(1, 8), past_key_values=cache)
    cache.activate_past_recording()
    held = []
    for token in tokens(1, 9).T:
        model(token[None], past_key_values=cache)
        held.append([layer_bytes(layer) for layer in cache.layers])
    for mixer, first, last in zip(model.model.layers.mixers, held[0], held[-1], strict=True):
        if mixer.state_size(100) == mixer.state_size(1):
            assert last - first == 8 * 4 * 16, type(mixer).__name__
        else:
            assert last - first <= 8 * (4 * 16 + 4 * mixer.state_size(1) + 3 * 8), type(mixer).__name__


@pytest.mark.slow
@torch.no_grad()
def test_compiled_calls_are_recorded():
    """A compiled call of one token joins the call before it; a crop then leaves one token of both."""
    model, ids = build(["kla"]), tokens(1, 9)
    cache = model(ids[:, :5]).past_key_values
    cache.activate_past_recording()
    step = torch.compile(model.forward, backend="eager", fullgraph=True)
    for token in (ids[:, 5:6], ids[:, :1], ids[:, 1:2]):
        step(token, past_key_values=cache)
    cache.crop(-2)
    torch.testing.assert_close(
        step(ids[:, 6:], past_key_values=cache).logits, model(ids).logits[:, 6:], atol=1e-5, rtol=0
    )


@torch.no_grad()
@pytest.mark.parametrize("kind", ["kla", "hybrid"])
def test_recording_may_end_after_a_crop(kind):
    """transformers clears `record_past` when generation stops; the next call still starts from the cropped state."""
    model, ids = build(kind), tokens(1, 8)
    cache = model(ids[:, :4]).past_key_values
    cache.activate_past_recording()
    model(ids[:, 4:], past_key_values=cache)
    cache.crop(-2)
    for layer in cache.layers:
        layer.record_past = False
    torch.testing.assert_close(
        model(ids[:, 6:], past_key_values=cache).logits, model(ids).logits[:, 6:], atol=1e-5, rtol=0
    )
    assert all(not layer.entry.calls for layer in cache.layers)


@torch.no_grad()
@pytest.mark.parametrize("static", [False, True])
def test_layers_hold_plain_tensors(static):
    """The exporters of transformers rebuild tuples and lists of a cache; named tuples do not survive this."""
    model = build(EVERY_LAYER)
    cache = StaticCache(config=model.config, max_cache_len=8) if static else DynamicCache(config=model.config)
    model(tokens(2, 6), past_key_values=cache)
    for layer in cache.layers:
        values = vars(layer).values()
        assert sum(isinstance(x, list) and isinstance(x[0], torch.Tensor) for x in values) == 1
        assert not any(isinstance(x, tuple) and hasattr(x, "_fields") for x in values)


def test_snapshot_of_another_object_is_refused():
    with pytest.raises(ArgumentError, match="cache"):
        snapshot(None)


@torch.no_grad()
@pytest.mark.parametrize("static", [False, True])
def test_refused_snapshots_leave_the_cache_as_it_is(static):
    model, ids = build(["kla", "attention"]), tokens(1, 4)
    cache = StaticCache(config=model.config, max_cache_len=8) if static else DynamicCache(config=model.config)
    model(ids, past_key_values=cache)
    before = [x.clone() for entry in snapshot(cache) for x in tree_leaves(entry.state)]
    other = snapshot(build(["kla", "kla"])(ids, use_cache=True).past_key_values)
    for entries in (None, (), other[:1], (1, 2), other, [tuple(x) for x in other]):
        with pytest.raises(ArgumentError, match="`entries`"):
            restore(cache, entries)
    with pytest.raises(ArgumentError, match="`cache`"):
        restore(None, other)
    after = [x for entry in snapshot(cache) for x in tree_leaves(entry.state)]
    assert all(map(torch.equal, before, after)) and cache.get_seq_length() == 4


DESIGN = {"mixer": "design", "heads": 2, "head_dim": 8}


@torch.no_grad()
@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize(
    ("mixer", "other"),
    [
        ({"mixer": "deltanet", "heads": 2}, {"mixer": "kda", "heads": 2}),
        (DESIGN | {"design": "deltanet"}, DESIGN | {"design": "kda"}),
    ],
)
def test_states_of_another_mixer_are_refused(static, mixer, other):
    model, another, ids = build([mixer]), build([other]), tokens(1, 4)

    def new_cache():
        return StaticCache(config=model.config, max_cache_len=8) if static else DynamicCache(config=model.config)

    cache, foreign = new_cache(), new_cache()
    expected = model(ids, past_key_values=cache).logits
    another(ids, past_key_values=foreign)
    with pytest.raises(ArgumentError, match="`entries` belong to another cache"):
        restore(cache, snapshot(foreign))
    with pytest.raises(ArgumentError, match=rf"`{CACHE_NAME}` has a state of .*expected a cache of this model"):
        model(ids, past_key_values=foreign)
    new = DynamicCache(config=model.config)
    restore(new, snapshot(foreign))
    with pytest.raises(ArgumentError, match=f"`{CACHE_NAME}` has a state of"):
        model(ids, past_key_values=new)
    foreign.reset()
    torch.testing.assert_close(model(ids, past_key_values=foreign).logits, expected)
