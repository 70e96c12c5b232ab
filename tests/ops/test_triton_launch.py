"""When kernels are compiled, found and run: told by kernels that only take notes."""

from concurrent.futures import Future
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

from rehearsals import import_kernels
from triton import knobs

from kalmix.beliefs import DenseBelief, DiagonalBelief, PointBelief
from kalmix.ops._delta.signals import DeltaSignals
from kalmix.ops._dense import custom_op as fused
from kalmix.ops._dense.signals import DenseSignals
from kalmix.ops._diagonal.custom_op import diagonal
from kalmix.ops._diagonal.signals import DiagonalSignals
from kalmix.ops._linear_memory.custom_op import filter_memory
from kalmix.ops._shared.triton import compile_and_launch as triton_launch
from kalmix.ops._shared.triton.compile_and_launch import Launch, launch, perform, rehearse
from kalmix.segments import Segments


class Code:
    def __init__(self, notes):
        self.notes, self.run = notes, "loaded"

    def __getitem__(self, grid):
        return lambda *arguments: self.notes.append(("ran", grid, *arguments[1:]))


class Kernel:
    params = ("x", "n", "SIZE")

    def __init__(self, notes):
        self.notes = notes

    def __getitem__(self, grid):
        return lambda *arguments, **options: self.notes.append(("found", grid, *options.values())) or Code(self.notes)

    def warmup(self, *_, grid, **options):
        self.notes.append(("compiled", grid, *options.values()))
        coming = Future()
        coming.set_result(Code(self.notes))
        return SimpleNamespace(future=coming)


@pytest.fixture
def notes(monkeypatch):
    import_kernels()
    monkeypatch.setattr(knobs.runtime, "interpret", False)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(triton_launch, "_COMPILED", set())
    monkeypatch.setattr(triton_launch, "_SCORES", {})
    return []


def test_what_is_new_is_compiled_first(notes):
    steps = [Launch(kernel, (2,), (torch.zeros(3), 3), {"SIZE": 4}) for kernel in (Kernel(notes), Kernel(notes))]
    launch(steps)
    launch(steps)
    assert notes == [("compiled", (2,), 4)] * 2 + [("found", (2,), 4)] * 4


def test_a_rehearsal_compiles_and_runs_nothing_once_a_kind(notes):
    kernel = Kernel(notes)

    def call(x):
        launch([Launch(kernel, (len(x),), (x, 3), {"SIZE": 4})])

    for shape in ((3, 5, 7), (4, 7, 7)):  # of one kind
        rehearse(call, torch.zeros(shape))
    assert notes == [("compiled", (3,), 4)]
    for other in (torch.zeros(5, 5, 7), torch.zeros(3, 5, 8), torch.zeros(3, 5, 7).half()):
        rehearse(call, other)
    assert len(notes) == 4


def test_kernels_are_found_once_for_calls_laid_out_alike(notes):
    one, two = Kernel(notes), Kernel(notes)
    options = {"SIZE": 4}

    def call(x):
        for kernel in (one, two):
            Launch(kernel, (1, len(x)), (x, 3), options).run()
        return x + 1

    x = torch.zeros(4, 4)
    found, ran = ("found", (1, 4), 4), ("ran", (1, 4, 1), 3, None)
    for layout, expected in (
        (x, [found] * 2),
        (torch.ones(4, 4), [ran] * 2),
        (x.mT, [found] * 2),
        (x.half(), [found] * 2),
        (torch.zeros(17)[1:].view(4, 4), [found] * 2),  # not where 16 bytes start
    ):
        assert torch.equal(perform(call, layout), layout + 1)
        assert notes == expected
        notes.clear()
    one, two = two, one
    perform(call, x)
    assert notes == [found] * 2
    notes.clear()
    options = {"SIZE": 8}
    perform(call, x)
    assert notes == [("found", (1, 4), 8)] * 2


def test_code_made_for_one_number_never_runs_with_another(notes):
    kernel = Kernel(notes)

    def call(cuts):  # what a call with values in its shapes would do
        Launch(kernel, (1,), (cuts, int(cuts.sum())), {"SIZE": 4}).run()

    for last in (12, 13):  # multiples of 16 are compiled apart
        perform(call, torch.tensor([4, last]))
    assert notes == [("found", (1,), 4)] * 2
    perform(call, torch.tensor([4, 13]))
    assert notes[2:] == [("ran", (1, 1, 1), 17, None)]


@pytest.mark.parametrize(("op", "decay", "width"), [("additive", "key", 5), ("delta", "head", 5), ("delta", "key", 5),
    ("dense", "head", 5), ("dense", "key", 5), ("dense", "head", 130), ("diagonal", "cell", 5)])  # fmt: skip
def test_all_that_a_call_runs_was_rehearsed_gradients_too(notes, monkeypatch, op, decay, width):
    def note(kind):
        def add(step):
            dtypes = tuple(x.dtype for x in step.arguments if isinstance(x, torch.Tensor))
            notes.append((kind, id(step.kernel), dtypes, *step.options.items()))
            return None, ()

        return add

    monkeypatch.setattr(triton_launch, "_compile", note("compiled"))
    monkeypatch.setattr(triton_launch, "_run", note("found"))
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
    compiled, found = ({tuple(what) for kind, *what in notes if kind == wanted} for wanted in ("compiled", "found"))
    assert compiled == found


@pytest.mark.parametrize("op", ["additive", "delta", "dense", "diagonal"])
def test_no_number_that_kernels_are_made_for_follows_from_values(notes, monkeypatch, op):
    """Packed sequences of other lengths run what was found."""
    monkeypatch.setattr(triton_launch, "_compile", lambda step: None)
    monkeypatch.setattr(triton_launch, "_run", lambda step: notes.append("found") or (Code(notes), ()))
    inputs = [torch.zeros(2, 100, 2, 5, dtype=torch.bfloat16) for _ in range(3)]
    ones = torch.ones(2, 100, 2)
    for stops, expected in ((17, 83, 100), {"found"}), ((16, 96, 97), {"ran"}):
        rows = [[0, 0, stops[0]], [0, stops[0], stops[1]], [1, 3, stops[2]]]
        segments = Segments.of(torch.tensor(rows))
        if op == "dense":
            belief = DenseBelief(torch.zeros(3, 2, 5, 5), torch.eye(5).expand(3, 2, 5, 5))
            fused.dense(DenseSignals(*inputs, ones, ones, -ones, None), belief, segments, False)
        elif op == "diagonal":
            cells, belief = torch.ones(2, 5, 5), DiagonalBelief(*torch.ones(2, 3, 2, 5, 5))
            signals = DiagonalSignals(*inputs, torch.ones(inputs[2].shape), -cells, cells)
            diagonal(signals, belief, segments, False)
        else:
            belief = PointBelief(torch.zeros(3, 2, 5, 5))
            filter_memory(DeltaSignals(*inputs, ones, -ones), belief, segments, op == "delta")
        assert {note if note == "found" else note[0] for note in notes} == expected
        notes.clear()
