"""Tests of precompilation and of the launch cache, with fake kernels that log their calls."""

from concurrent.futures import Future
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

from launch_log import import_kernels
from triton import knobs

from kalmix.beliefs import DenseBelief, DiagonalBelief, PointBelief, RidgeBelief
from kalmix.ops._attend.api import empty_belief
from kalmix.ops._attend.custom_op import attend
from kalmix.ops._attend.dynamics import Dynamics, Weighting
from kalmix.ops._attend.signals import AttendSignals
from kalmix.ops._delta.signals import DeltaSignals
from kalmix.ops._dense import custom_op as fused
from kalmix.ops._dense.signals import DenseSignals
from kalmix.ops._diagonal.custom_op import diagonal
from kalmix.ops._diagonal.signals import DiagonalSignals
from kalmix.ops._linear_memory.custom_op import filter_memory
from kalmix.ops._ridge.custom_op import ridge
from kalmix.ops._ridge.signals import RidgeSignals
from kalmix.ops._ridge.solvers import Adaptive, Chebyshev
from kalmix.ops._shared.triton import compile_and_launch
from kalmix.ops._shared.triton.compile_and_launch import Launch, launch_cached, precompile
from kalmix.segments import Segments

SIZES = {"N": 3, "H": 2, "K": 4, "G": 2, "V": 4}


class Binary:
    function = packed_metadata = None

    def __init__(self, log):
        self.log, self.run = log, "loaded"

    def __getitem__(self, grid):
        return lambda *arguments: self.log.append(("launched cached", grid, *arguments[1:]))


class Kernel:
    params = ("x", "n", "SIZE")

    def __init__(self, log):
        self.log = log

    def __getitem__(self, grid):
        return lambda *arguments, **options: self.log.append(("looked up", grid, *options.values())) or Binary(self.log)

    def warmup(self, *_, grid, **options):
        self.log.append(("compiled", grid, *options.values()))
        future = Future()
        future.set_result(Binary(self.log))
        return SimpleNamespace(future=future)


@pytest.fixture
def log(monkeypatch):
    import_kernels()
    monkeypatch.setattr(knobs.runtime, "interpret", False)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(compile_and_launch, "_PRECOMPILED", set())
    monkeypatch.setattr(compile_and_launch, "_LAUNCH_CACHE", {})
    return []


def attend_signals(q, k, v):
    """Return signals with a decay, noises and frequencies for 2 heads of 4 columns."""
    ones = torch.ones(2)
    dynamics = Dynamics(-ones, torch.ones(2, 2), ones, ones, ones)
    return AttendSignals(q, k, v, None, dynamics, None, Weighting(ones, ones, ones, True, None, True))


def test_cached_launches_are_not_precompiled(log):
    calls = []

    def call(x):
        Launch(Kernel(log), (len(x),), (x, 3), {"SIZE": 4}).run()

    for _ in range(2):
        launch_cached(call, torch.zeros(3, 5), dry_run=lambda x: calls.append(len(x)))
    assert calls == [3]


def test_precompile_compiles_once_per_size_class_and_launches_nothing(log):
    kernel = Kernel(log)

    def call(x):
        Launch(kernel, (len(x),), (x, 3), {"SIZE": 4}).run()

    for shape in ((3, 5, 7), (4, 7, 7)):  # one size class
        precompile(call, torch.zeros(shape))
    assert log == [("compiled", (3,), 4)]
    for other in (torch.zeros(5, 5, 7), torch.zeros(3, 5, 8), torch.zeros(3, 5, 7).half(), torch.zeros(3, 7, 5).mT):
        precompile(call, other)
    assert len(log) == 5
    for length in (6, 7):  # heads before tokens: a stride depends on the length
        precompile(call, torch.zeros(1, 2, length, 16).transpose(1, 2))
    assert len(log) == 6


def test_kernels_are_looked_up_once_per_layout(log):
    one, two = Kernel(log), Kernel(log)
    options = {"SIZE": 4}

    def call(x):
        for kernel in (one, two):
            Launch(kernel, (1, len(x)), (x, 3), options).run()
        return x + 1

    x = torch.zeros(4, 4)
    looked_up, cached = ("looked up", (1, 4), 4), ("launched cached", (1, 4, 1), 3, None)
    for layout, expected in (
        (x, [looked_up] * 2),
        (torch.ones(4, 4), [cached] * 2),
        (x.mT, [looked_up] * 2),
        (x.half(), [looked_up] * 2),
        (torch.zeros(17)[1:].view(4, 4), [looked_up] * 2),  # not aligned to 16 bytes
    ):
        assert torch.equal(launch_cached(call, layout), layout + 1)
        assert log == expected
        log.clear()
    compile_and_launch._LAUNCH_CACHE.clear()
    launch_cached(call, x)
    log.clear()
    one, two = two, one
    launch_cached(call, x)
    assert log == [looked_up] * 2
    log.clear()
    compile_and_launch._LAUNCH_CACHE.clear()
    launch_cached(call, x)
    log.clear()
    options = {"SIZE": 8}
    launch_cached(call, x)
    assert log == [("looked up", (1, 4), 8)] * 2


def test_binary_for_one_integer_never_runs_with_another(log):
    kernel = Kernel(log)

    def call(x):  # a function that wrongly derives an argument from values
        Launch(kernel, (1,), (x, int(x.sum())), {"SIZE": 4}).run()

    for last in (12, 13):  # Triton compiles separately for multiples of 16
        launch_cached(call, torch.tensor([4, last]))
    assert log == [("looked up", (1,), 4)] * 2
    launch_cached(call, torch.tensor([4, 13]))
    assert log[2:] == [("launched cached", (1, 1, 1), 17, None)]


def kernel_and_options(step):
    dtypes = tuple(x.dtype for x in step.arguments if isinstance(x, torch.Tensor))
    return id(step.kernel), dtypes, *step.options.items()


@pytest.mark.parametrize(("op", "decay", "width"), [("additive", "key", 5), ("delta", "head", 5), ("delta", "key", 5),
    ("dense", "head", 5), ("dense", "key", 5), ("dense", "head", 130), ("diagonal", "cell", 5)])  # fmt: skip
def test_dry_run_compiles_every_launched_kernel(log, monkeypatch, op, decay, width):
    def record(kind):
        def add(step):
            log.append((kind, *kernel_and_options(step)))
            return None, ()

        return add

    monkeypatch.setattr(compile_and_launch, "_compile", record("compiled"))
    monkeypatch.setattr(compile_and_launch, "_launch", record("launched"))
    shape = (1, 70, 2)
    log_decay = torch.zeros(*shape, *[width] * (decay == "key"))
    inputs = [torch.zeros(*shape, width, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
    if op == "dense":
        belief = DenseBelief(torch.zeros(1, 2, width, width), torch.eye(width).expand(1, 2, width, width))
        signals = DenseSignals(*inputs, torch.ones(shape), torch.ones(shape), log_decay, None)
        mean = fused.dense(signals, belief, None, False).mean
    elif op == "diagonal":
        cells, belief = torch.ones(2, width, width), DiagonalBelief(*torch.ones(2, 1, 2, width, width))
        signals = DiagonalSignals(*inputs, torch.ones(inputs[2].shape), -cells, cells)
        mean = diagonal(signals, belief, None, False).mean
    else:
        belief = PointBelief(torch.zeros(1, 2, width, width))
        signals = DeltaSignals(*inputs, torch.ones(shape), log_decay)
        mean = filter_memory(signals, belief, None, op == "delta").mean
    mean.sum().backward()
    compiled, launched = ({tuple(x) for kind, *x in log if kind == wanted} for wanted in ("compiled", "launched"))
    assert compiled == launched


def run(op, inputs, rows=None):
    """Call an op without gradients on queries, keys and values `[B, T, 2, width]`, packed if there are `rows`."""
    segments, (batch, *_, width) = None if rows is None else Segments.of(torch.tensor(rows)), inputs[0].shape
    count, ones = batch if rows is None else len(rows), torch.ones(inputs[2].shape[:3])
    square = (count, 2, width, width)
    if op == "dense":
        belief = DenseBelief(torch.zeros(square), torch.eye(width).expand(square))
        fused.dense(DenseSignals(*inputs, ones, ones, -ones, None), belief, segments, False)
    elif op == "diagonal":
        cells, belief = torch.ones(2, width, width), DiagonalBelief(*torch.ones(2, *square))
        signals = DiagonalSignals(*inputs, torch.ones(inputs[2].shape), -cells, cells)
        diagonal(signals, belief, segments, False)
    elif op == "ridge":
        belief = RidgeBelief(*torch.zeros(2, *square))
        ridge(RidgeSignals(*inputs, -ones, ones, None), belief, segments, False, Adaptive(0.1), Chebyshev(3))
    elif op == "attend":
        belief = empty_belief(inputs[2], SIZES | {"N": count})
        attend(attend_signals(*(x[..., :4] for x in inputs)), belief, segments, False)
    else:
        filter_memory(DeltaSignals(*inputs, ones, -ones), PointBelief(torch.zeros(square)), segments, op == "delta")


@pytest.mark.parametrize("op", ["additive", "attend", "delta", "dense", "diagonal", "ridge"])
def test_packed_sequences_of_other_lengths_reuse_cached_launches(log, monkeypatch, op):
    """Integers that Triton compiles for must not depend on values of tensors."""
    monkeypatch.setattr(compile_and_launch, "_compile", lambda step: None)
    monkeypatch.setattr(compile_and_launch, "_launch", lambda step: log.append(("looked up",)) or (Binary(log), ()))
    inputs = [torch.zeros(2, 100, 2, 5, dtype=torch.bfloat16) for _ in range(3)]
    for stops, expected in ((17, 83, 100), {"looked up"}), ((16, 96, 97), {"launched cached"}):
        run(op, inputs, [[0, 0, stops[0]], [0, stops[0], stops[1]], [1, 3, stops[2]]])
        assert {kind for kind, *_ in log} == expected
        log.clear()


@pytest.mark.parametrize(
    ("op", "width", "calls"),  # calls: batch, length, packed sequences
    [
        *((op, 5, [(1, 128, 3), (1, 66, 4), (1, 120, 3)]) for op in ("delta", "dense", "ridge")),  # tiles of 32 or 16
        *((op, 64, [(1, 128, 63), (1, 128, 64)]) for op in ("delta", "additive", "dense", "ridge")),  # columns
        *((op, 64, [(63, 2, None), (64, 2, None)]) for op in ("delta", "ridge")),
        ("dense", 5, [(7, 1024, None), (8, 1024, None), (8, 1023, None)]),  # split in time or not
        ("diagonal", 5, [(1, 127, None), (1, 128, None), (1, 124, None)]),  # one tile or two, whole groups or not
        ("diagonal", 5, [(1, 100, 3), (1, 128, 3)]),
    ],
)
def test_calls_of_one_size_class_launch_precompiled_kernels(log, monkeypatch, op, width, calls):
    compiled, launched = set(), set()
    monkeypatch.setattr(compile_and_launch, "_compile", lambda step: compiled.add(kernel_and_options(step)))
    monkeypatch.setattr(
        compile_and_launch, "_launch", lambda step: launched.add(kernel_and_options(step)) or (None, ())
    )
    monkeypatch.setattr(compile_and_launch, "_run_on_side_stream", lambda run, *x: lambda: run(*x))
    shapes = [(*((size - 1).bit_length() for size in (batch, length, count or 1)),) for batch, length, count in calls]
    assert len(set(shapes)) == 1, "one size class"
    for batch, length, count in calls:
        inputs = [torch.zeros(batch, length, 2, width, dtype=torch.bfloat16) for _ in range(3)]
        size = length // (count or 1)
        run(op, inputs, count and [[0, size * i, size * i + size] for i in range(count)])
        assert launched <= compiled


def test_similar_calls_are_precompiled_once(log, monkeypatch):
    compiled = []
    monkeypatch.setattr(compile_and_launch, "_compile", lambda step: compiled.append(step))
    monkeypatch.setattr(compile_and_launch, "_launch", lambda step: (None, ()))
    for length, expected in ((128, True), (120, False)):
        run("delta", [torch.zeros(1, length, 2, 5, dtype=torch.bfloat16) for _ in range(3)])
        assert bool(compiled) == expected
        compiled.clear()
