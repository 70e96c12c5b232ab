"""Tests of the recording and replay of functions that launch kernels, with fake kernels that run PyTorch functions."""

import weakref
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

from triton import knobs

from kalmix.ops._shared.constants import zeros
from kalmix.ops._shared.triton import compile_and_launch, replay
from kalmix.ops._shared.triton.compile_and_launch import Launch, launch_cached, launch_on_side_stream
from kalmix.ops._shared.triton.replay import Replay

STREAM_ID = 7


class Kernel:
    """Kernel that calls a function of its arguments."""

    params = ()
    function, packed_metadata = "function", "metadata"

    def __init__(self, call, log=None):
        self.call, self.log = call, [] if log is None else log

    def __getitem__(self, grid):
        return lambda *arguments, **_: self.call(*arguments) or self

    def run(self, *arguments):
        """Launch the kernel as Triton's binaries do."""
        self.log.append(arguments[:9])
        self.call(*arguments[9:])


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch):
    active = SimpleNamespace(get_current_stream=lambda device: STREAM_ID)
    monkeypatch.setattr(knobs.runtime, "interpret", False)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(compile_and_launch, "driver", SimpleNamespace(active=active))
    monkeypatch.setattr(compile_and_launch, "RUN_TAKES_STREAM", True)
    monkeypatch.setattr(compile_and_launch, "_LAUNCH_CACHE", {})


def copy(x, y):
    y.copy_(x)


def is_replayed():
    (entry,) = compile_and_launch._LAUNCH_CACHE.values()
    return isinstance(entry, Replay)


def test_replay_uses_new_values_and_runs_no_python_code():
    calls, log = [], []
    kernel = Kernel(copy, log)

    def function(x, others, size, flag):
        calls.append(1)
        y = torch.empty(x.shape, dtype=x.dtype)
        Launch(kernel, (len(x), 2), (x, y), {"SIZE": 4}).run()
        first, second = (y.contiguous() if flag else y).split(size)
        y[0] = 5
        first.mul_(2)
        joined = torch.cat([first, second, *others], dim=0)
        out = joined.new_empty(joined.shape)
        torch.add(joined, 1, out=out)
        return out, [second.float(), None], x.mT.unflatten(0, (-1, 1))

    for i in range(5):
        x, others = torch.randn(4, 4, dtype=torch.float64), [torch.randn(3, 4, dtype=torch.float64)]
        out, (second, nothing), transposed = launch_cached(function, x, others, 2, True)
        expected = torch.cat([x.index_fill(0, torch.tensor(0), 5.0)[:2] * 2, x[2:], *others]) + 1
        assert torch.equal(out, expected)
        assert torch.equal(second, x[2:].float())
        assert nothing is None
        assert torch.equal(transposed, x.mT[:, None])
        assert len(calls) == min(i + 1, 2)
    assert log == [(4, 2, 1, STREAM_ID, "function", "metadata", None, None, None)] * 3


def test_scratch_shares_one_allocation(monkeypatch):
    addresses = []
    kernel = Kernel(lambda *arguments: addresses.append(arguments))

    def function(x):
        scratch, output = [torch.empty(3), torch.empty_like(x), x.new_empty(0)], torch.empty(5)
        Launch(kernel, (1,), (x, *scratch, output), {}).run()
        return output

    x = torch.zeros(70)
    results = [launch_cached(function, x) for _ in range(4)]
    assert len({y.data_ptr() for y in results}) == 4
    for found, result in zip(addresses[2:], results[2:], strict=True):
        assert found[0] is x
        assert found[4] is result
        assert [y - found[1] for y in found[1:4]] == [0, 512, 1024]
    compile_and_launch._LAUNCH_CACHE.clear()
    monkeypatch.setattr(replay, "MAX_SCRATCH", 1024)
    for _ in range(3):
        launch_cached(function, x)
    assert all(isinstance(y, torch.Tensor) for y in addresses[-1])


def test_replay_makes_its_own_zeros():
    """Custom ops use `zeros` in functions that are replayed, and calls in CUDA graphs share no memory."""
    memories = []

    def function(x):
        return zeros((*x.shape, 3), x.device)

    for _ in range(4):
        result = launch_cached(function, torch.ones(2))
        assert result.shape == (2, 3) and not result.any()
        memories.append(result)
        result.untyped_storage().fill_(1)
    assert is_replayed()
    assert len({x.data_ptr() for x in memories}) == 4


def test_a_call_with_another_cached_call_inside_is_not_replayed():
    def inner(x):
        y = torch.empty_like(x)
        Launch(Kernel(copy), (1,), (x, y), {}).run()
        return y

    def outer(x):
        return launch_cached(inner, x) + 1

    for value in range(4):
        assert launch_cached(outer, torch.full((2,), float(value))).tolist() == [value + 1] * 2
    kinds = {layout[0]: type(entry) for layout, entry in compile_and_launch._LAUNCH_CACHE.items()}
    assert kinds[inner] is Replay and kinds[outer] is not Replay


def test_replay_frees_tensors_after_their_last_use():
    alive, made = [], []

    def log(x):
        alive.append([y() is not None for y in made])
        made.append(weakref.ref(x))

    def function(x):
        for _ in range(3):
            x = x + 1
            Launch(Kernel(log), (1,), (x,), {}).run()
        return x

    for _ in range(3):
        alive.clear(), made.clear()
        assert launch_cached(function, torch.zeros(2)).tolist() == [3, 3]
    assert alive == [[], [False], [False, False]]


CONSTANT = torch.ones(3)


@pytest.mark.parametrize("call", [lambda x: x * float(x[0]), lambda x: x * x.tolist()[0], lambda x: x * CONSTANT,
    lambda x: x if x.sum() > 2 else -x], ids=["number", "list", "foreign", "condition"])  # fmt: skip
def test_functions_of_values_or_of_other_tensors_are_not_replayed(call):
    for i in range(4):
        x = torch.full((3,), float(i))
        assert torch.equal(launch_cached(call, x), call(x))
    assert not is_replayed()


def test_one_tensor_for_two_arguments_is_another_layout():
    def function(x, y):
        return x - y

    x, y = torch.ones(2), torch.zeros(2)
    for _ in range(3):
        assert launch_cached(function, x, x).tolist() == [0, 0]
    for _ in range(3):
        assert launch_cached(function, x, y).tolist() == [1, 1]
    assert all(isinstance(entry, Replay) for entry in compile_and_launch._LAUNCH_CACHE.values())


def test_side_streams_are_replayed(monkeypatch):
    log = []

    def run(call, *arguments):
        call(*arguments)
        log.append("started")
        return lambda: log.append("waited")

    def function(x):
        y = torch.empty_like(x)
        wait = launch_on_side_stream(Launch(Kernel(copy), (1,), (x, y), {}))
        Launch(Kernel(lambda _: log.append("launched")), (1,), (x,), {}).run()
        wait()
        return y * 2

    monkeypatch.setattr(compile_and_launch, "_run_on_side_stream", run)
    for i in range(4):
        log.clear()
        assert launch_cached(function, torch.full((2,), i)).tolist() == [2 * i] * 2
        assert log == ["started", "launched", "waited"]
    assert is_replayed()


def test_hooks_of_a_profiler_see_every_launch(monkeypatch):
    log, x = [], torch.ones(2)

    def function(x):
        Launch(Kernel(lambda _: log.append("launched")), (1,), (x,), {}).run()

    for _ in range(3):
        launch_cached(function, x)
    kernel_calls = []
    monkeypatch.setattr(Kernel, "run", lambda *_: kernel_calls.append(1))
    monkeypatch.setattr(knobs.runtime.launch_enter_hook, "calls", [print])
    launch_cached(function, x)
    assert not kernel_calls  # Triton's own launch calls hooks
    assert len(log) == 4
