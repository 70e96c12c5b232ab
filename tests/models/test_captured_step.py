"""Captured decoding steps give the tokens of `generate`. On a CPU, a tape of operations stands in for a CUDA graph."""

import copy
import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import DynamicCache, StaticCache

from kalmix import ArgumentError, checks
from kalmix.models import KalmixModel, capture_decoding, restore, snapshot
from kalmix.models.static_cache import _store

from .conftest import build, tokens
from .test_cache import EVERY_LAYER
from .test_static_cache import left_padded

STATIC = {"max_new_tokens": 7, "do_sample": False}


class Tape(TorchDispatchMode):
    """Stand-in for a CUDA graph: it records operations, undoes what they wrote, and repeats them in the same memory.

    Python code runs only while it captures. As in a CUDA graph, the host cannot read a number then, by `item` for one.
    """

    HOST_READS = (torch.ops.aten._local_scalar_dense, torch.ops.aten.equal)

    def __init__(self):
        super().__init__()
        self.calls, self.before = [], {}

    def capture(self, function):
        with self, checks(False):
            output = function()
        for storage, contents in self.before.values():
            storage.copy_(contents)
        return output

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func.overloadpacket not in self.HOST_READS, "the host reads a number"
        kwargs = kwargs or {}
        arguments = zip(func._schema.arguments, [*args, *kwargs.values()], strict=False)
        named = {x.name: x for x in func._schema.arguments}
        pairs = [*((x, y) for x, y in arguments if not x.kwarg_only), *((named[x], y) for x, y in kwargs.items())]
        for written in (y for x, y in pairs if x.alias_info is not None and x.alias_info.is_write):
            for tensor in (x for x in tree_leaves(written) if isinstance(x, torch.Tensor)):
                storage = tensor.untyped_storage()
                self.before.setdefault(storage.data_ptr(), (storage, storage.clone()))
        result = func(*args, **kwargs)
        self.calls.append((func, args, kwargs, result))
        return result

    def replay(self):
        for func, args, kwargs, result in self.calls:
            again = func(*args, **kwargs)
            for old, new in zip(tree_leaves(result), tree_leaves(again), strict=True):
                if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)


def prompts(*lengths):
    ids, mask = left_padded(*lengths)
    return {"inputs": ids, "attention_mask": mask}


@pytest.mark.parametrize(
    "options",
    [{}, {"num_beams": 3}, {"do_sample": True, "num_return_sequences": 2}, {"eos_token_id": list(range(0, 40, 3))}],
    ids=["greedy", "beams", "sampling", "stopping"],
)
@pytest.mark.slow
def test_captured_generation_equals_generation(options):
    """Left-padded prompts are continued, by a model with every layer or few; after two steps, replays run no layer."""
    model, options = build("space" if options else EVERY_LAYER), {**STATIC, **prompts(8, 5, 1), **options}
    torch.manual_seed(0)
    expected = model.generate(**options)
    calls = []
    model.model.layers[0].register_forward_hook(lambda *_: calls.append(1))
    with capture_decoding(model, Tape) as step:
        torch.manual_seed(0)
        assert torch.equal(model.generate(**options), expected)
    assert step.captures == 1 and len(calls) == 3  # prefill, first step, capture
    assert step.replays == expected.shape[1] - 8 - 2
    assert step.refusal is None and model.decoding_step is None and "forward" not in vars(model)


HISTORIES = [
    {"mixer": "afa", "confidence": True, "floor": True},
    {"mixer": "afa", "window": 5, "iterations": 2, "value_dynamics": True, "normalize": True, "weight": "exponential"},
    {"mixer": "controlled-afa", "window": 4},
    "afa-transformer",
    {"mixer": "afa-transformer", "window": 3},
    {"mixer": "attention", "heads": 4, "kv_heads": 2},
]


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}], ids=["greedy", "beams"])
@pytest.mark.slow
def test_histories_are_updated_in_place(options, monkeypatch):
    """Steps write past tokens to the buffers themselves, with windows or without; no buffer is copied."""
    model, options = build(HISTORIES), {**STATIC, **prompts(8, 5, 1), **options}
    expected = model.generate(**options, use_cache=False)
    stored = []
    monkeypatch.setattr("kalmix.models.static_cache._store", lambda *x: (stored.append(1), _store(*x)))
    with capture_decoding(model, Tape) as step:
        assert torch.equal(model.generate(**options), expected)
        assert step.captures == 1 and all(layer.rows is not None for layer in step.cache.layers)
    if not options.get("num_beams"):
        assert len(stored) == 10  # the prompt, by each layer; each `afa-transformer` has two histories


@torch.no_grad()
@pytest.mark.slow
def test_other_calls_continue_histories_of_steps():
    """Between steps, tokens with padding, several tokens and restored contents go through the general path."""
    model, ids, mask = build(HISTORIES), tokens(2, 16), torch.ones(2, 16, dtype=torch.long)
    mask[1, [0, 1, 9]] = 0
    expected = model(ids, attention_mask=mask).logits
    with capture_decoding(model, Tape) as step:
        cache, found = StaticCache(config=model.config, max_cache_len=16), []
        for start, stop in ((0, 5), (5, 6), (6, 7), (7, 8), (8, 9), (9, 10), (10, 11), (11, 14), (14, 15), (15, 16)):
            padding = {"attention_mask": mask[:, :stop]} if start in (0, 9) else {}
            found.append(model(ids[:, start:stop], past_key_values=cache, **padding).logits.clone())
            if start == 6:
                held = snapshot(cache)
                model(ids[:, :1], past_key_values=cache)
                restore(cache, held)
        assert (step.captures, step.replays) == (1, 7)
    entry = cache.layers[1].entry.state
    assert entry.positions.tolist() == [list(range(11, 16)), list(range(8, 13))]
    is_token = mask > 0
    torch.testing.assert_close(torch.cat(found, 1)[is_token], expected[is_token], rtol=0, atol=1e-5)


@pytest.mark.parametrize("layers", ["hybrid", "delta", "filters"])
def test_buffers_and_graph_serve_later_calls(layers):
    """A second prompt of the same batch size replays the graph of the first; another batch size is captured anew."""
    model = build(layers)
    first, second, wider = prompts(7, 4), prompts(5, 2), prompts(3, 6, 4)
    expected = [model.generate(**x, **STATIC) for x in (first, second, wider)]
    with capture_decoding(model, Tape) as step:
        assert torch.equal(model.generate(**first, **STATIC), expected[0])
        assert (step.captures, step.replays) == (1, 5)
        assert torch.equal(model.generate(**second, **STATIC), expected[1])
        assert (step.captures, step.replays) == (1, 11)
        assert torch.equal(model.generate(**wider, **STATIC), expected[2])
        assert step.captures == 2


def test_returned_caches_are_not_used_again():
    model, options = (
        build("hybrid"),
        {**prompts(6, 3), **STATIC, "return_dict_in_generate": True, "output_logits": True},
    )
    plain = model.generate(**options)
    with capture_decoding(model, Tape):
        found = model.generate(**options)
        cache = copy.deepcopy(found.past_key_values)
        model.generate(**prompts(5, 5), **STATIC)
    torch.testing.assert_close(torch.stack(found.logits), torch.stack(plain.logits), rtol=0, atol=1e-5)
    for kept, now in zip(cache.layers, found.past_key_values.layers, strict=True):
        assert all(map(torch.equal, kept.tensors, now.tensors))


def test_other_calls_run_without_a_graph():
    """Speculative decoding, hidden states, and dynamic or no caches need more than plain steps."""
    model, ids = build("hybrid"), tokens(1, 6)
    expected = model.generate(ids, **STATIC)
    with capture_decoding(model, Tape) as step, warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(model.generate(ids, **STATIC, assistant_model=build("kla", seed=9)), expected)
        assert torch.equal(model.generate(ids, **STATIC, use_cache=False), expected)
        assert torch.equal(model.generate(ids, **STATIC, cache_implementation="dynamic"), expected)
        hidden = model.generate(ids, **STATIC, output_hidden_states=True, return_dict_in_generate=True)
        assert torch.equal(hidden.sequences, expected) and len(hidden.hidden_states) == 7
        assert step.captures == 0


@torch.no_grad()
def test_steps_of_a_loop_are_captured():
    """A loop with a static cache is captured; a step with a mask runs as usual, on the same buffers."""
    model, ids = build("hybrid"), tokens(2, 12)
    mask = torch.ones(2, 12, dtype=torch.long)
    mask[1, 9] = 0
    expected = model(ids, attention_mask=mask).logits
    with capture_decoding(model, Tape) as step:
        cache, found = StaticCache(config=model.config, max_cache_len=12), []
        model(ids[:, :5], past_key_values=cache)
        for index in range(5, 12):
            padding = {"attention_mask": mask[:, : index + 1]} if index == 9 else {}
            found.append(model(ids[:, index : index + 1], past_key_values=cache, **padding).logits.clone())
        assert (step.captures, step.replays) == (1, 5)
    is_token = mask[:, 5:] > 0
    torch.testing.assert_close(torch.cat(found, 1)[is_token], expected[:, 5:][is_token], rtol=0, atol=1e-5)


@torch.no_grad()
def test_steps_update_buffers_in_place(monkeypatch):
    """Memory layers, KLA and attention write to the buffers themselves, in steps; only other states are copied."""
    model, ids = build(["kla", "gated-deltanet", "mamba2", "attention", "rt-afa"]), tokens(2, 9)
    expected = model(ids).logits[:, 6:7]
    with capture_decoding(model, Tape) as step:
        cache = StaticCache(config=model.config, max_cache_len=12)
        model(ids[:, :5], past_key_values=cache)
        model(ids[:, 5:6], past_key_values=cache)
        copied = []
        monkeypatch.setattr("kalmix.models.static_cache._store", lambda *args: copied.append(type(args[1]).__name__))
        found = model(ids[:, 6:7], past_key_values=cache).logits
        assert copied == ["HistoryBelief"] and step.captures == 1
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    assert [layer.rows is not None for layer in cache.layers] == [True, True, True, True, False]


@torch.no_grad()
def test_a_step_that_fails_does_not_change_the_count_of_later_calls(monkeypatch):
    """A block raises after the first one has updated its buffers in place."""
    model, ids = build(["kla", "gated-deltanet"]), tokens(2, 9)
    with capture_decoding(model, Tape):
        cache = StaticCache(config=model.config, max_cache_len=12)
        model(ids[:, :5], past_key_values=cache)
        before = snapshot(cache)
        with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="out of memory"):
            patch.setattr(model.model.layers[1], "forward", fail)
            model(ids[:, 5:6], past_key_values=cache)
        restore(cache, before)
        model(ids[:, 5:8], past_key_values=cache)
    assert [int(layer.get_seq_length()) for layer in cache.layers] == [8, 8]


def fail(*arguments, **options):
    raise RuntimeError("out of memory")


def test_generation_captures_by_itself():
    """On a GPU; here a tape stands in for the graph. Calls that need another cache run as usual."""
    model, options = build("hybrid"), {**prompts(6, 3), "max_new_tokens": 9, "do_sample": False}
    expected, captures = model.generate(**options), []

    class Counted(Tape):
        def capture(self, function):
            captures.append(1)
            return super().capture(function)

    model.graph = Counted
    for count in (1, 2):
        assert torch.equal(model.generate(**options), expected)
        assert len(captures) == count and model.decoding_step is None
    plain = [{"cache_implementation": "dynamic"}, {"disable_compile": True}, {"use_cache": False}]
    for more in [*plain, {"past_key_values": DynamicCache(config=model.config)}]:
        assert torch.equal(model.generate(**options | more), expected)
    assert torch.equal(model.generate(**options | {"max_new_tokens": 7}), expected[:, :-2])
    returned = model.generate(**options, return_dict_in_generate=True)
    assert torch.equal(returned.sequences, expected) and isinstance(returned.past_key_values, DynamicCache)
    one = {"inputs": tokens(1, 4), "max_new_tokens": 9}
    expected = model.generate(**one, disable_compile=True)
    assert torch.equal(model.generate(**one, assistant_model=build("kla")), expected)
    assert len(captures) == 2
    model.train()
    model.generate(**options)
    assert len(captures) == 2
    model.eval().enable_input_require_grads()  # by hooks that do nothing here
    model.generate(**options)
    assert len(captures) == 3


@pytest.mark.parametrize("kind", ["register_forward_hook", "register_forward_pre_hook"])
def test_hooks_run_at_every_step_of_generation(kind):
    model, calls = build("hybrid"), []
    model.graph = Tape
    getattr(model.model.layers[0].norm, kind)(lambda *_: calls.append(1))
    model.generate(tokens(1, 5), max_new_tokens=9, do_sample=False, eos_token_id=None)
    assert len(calls) == 9


@pytest.mark.parametrize("register", [register_module_forward_hook, register_module_forward_pre_hook])
def test_global_hooks_run_at_every_step_of_generation(register):
    model, calls = build("hybrid"), []
    model.graph = Tape
    norm = model.model.layers[0].norm
    handle = register(lambda module, *_: calls.append(1) if module is norm else None)
    try:
        model.generate(tokens(1, 5), max_new_tokens=9, do_sample=False, eos_token_id=None)
    finally:
        handle.remove()
    assert len(calls) == 9


def test_other_threads_run_as_usual():
    """A thread that generates while another one does uses no graph, and neither result changes."""
    model, ids = build("hybrid"), [tokens(1, 5), tokens(1, 5, seed=2)]
    expected = [model.generate(x, **STATIC) for x in ids]
    with capture_decoding(model, Tape) as step, ThreadPoolExecutor(1) as pool:
        model.generate(ids[0], **STATIC)
        captures, replays = step.captures, step.replays
        assert torch.equal(pool.submit(model.generate, ids[1], **STATIC).result(), expected[1])
        assert (step.captures, step.replays) == (captures, replays)
        assert torch.equal(model.generate(ids[0], **STATIC), expected[0])


def test_refusals():
    """Without a GPU, and after a failed capture, `generate` runs as usual and warns once, in one sentence."""
    model, ids = build("kla"), tokens(2, 5)
    expected = model.generate(ids, **STATIC)

    class Failing(Tape):
        def capture(self, function):
            raise RuntimeError("operation not permitted")

    for graph, reason in ((None, "the model is on cpu"), (Failing, "operation not permitted")):
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            with capture_decoding(model, graph) as step:
                for _ in range(2):
                    assert torch.equal(model.generate(ids, **STATIC), expected)
        found = [str(x.message) for x in seen if "captured" in str(x.message)]
        assert len(found) == 1 and reason in found[0] and step.captures == 0
    with capture_decoding(model, Tape), pytest.raises(ArgumentError, match="one context at a time"):
        capture_decoding(model, Tape).__enter__()
    with pytest.raises(ArgumentError, match="KalmixForCausalLM"):
        capture_decoding(KalmixModel(model.config)).__enter__()
