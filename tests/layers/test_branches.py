"""Branches of decoding steps: the results of their functions, and the edges between them in a CUDA graph."""

from contextlib import contextmanager
from functools import partial

import pytest
import torch

from kalmix.layers import branches
from kalmix.layers.branches import run_branches

CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


class FakeGPU:
    """Stand-in for streams of a capture: `log` has launches and waits in the order of the host."""

    def __init__(self, monkeypatch):
        self.log, self.count, self.current = [], 0, self.Stream(self, "main")
        monkeypatch.setattr(branches, "_captures", lambda device: True)
        monkeypatch.setattr(branches, "_IDLE", {"gpu": []})
        monkeypatch.setattr(torch.cuda, "Stream", self.create)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: self.current)
        monkeypatch.setattr(torch.cuda, "stream", self.use)

    class Stream:
        def __init__(self, gpu, name):
            self.gpu, self.name = gpu, name

        def wait_stream(self, other):
            self.gpu.log.append(f"{self.name} waits for {other.name}")

    def create(self, device):
        self.count += 1
        return self.Stream(self, f"side {self.count}")

    @contextmanager
    def use(self, stream):
        before, self.current = self.current, stream
        yield
        self.current = before

    def launch(self, name):
        self.log.append(f"{self.current.name}: {name}")
        return name


def test_functions_run_one_after_another_outside_captures():
    calls = []
    assert run_branches(torch.device("cpu"), *(lambda i=i: calls.append(i) or i for i in range(3))) == [0, 1, 2]
    assert calls == [0, 1, 2]


def test_branches_fork_before_the_present_stream_goes_on_and_join_after(monkeypatch):
    gpu = FakeGPU(monkeypatch)
    for _ in range(2):  # the second call has the same streams
        gpu.log.clear()
        assert run_branches("gpu", *(partial(gpu.launch, x) for x in "abc")) == ["a", "b", "c"]
        assert gpu.log == [
            "side 1 waits for main", "side 1: b", "side 2 waits for main", "side 2: c", "main: a",
            "main waits for side 1", "main waits for side 2",
        ]  # fmt: skip


def test_a_branch_may_fork_again(monkeypatch):
    gpu = FakeGPU(monkeypatch)
    inner = partial(run_branches, "gpu", partial(gpu.launch, "b"), partial(gpu.launch, "c"))
    assert run_branches("gpu", partial(gpu.launch, "a"), inner) == ["a", ["b", "c"]]
    assert gpu.log == [
        "side 1 waits for main", "side 2 waits for side 1", "side 2: c", "side 1: b", "side 1 waits for side 2",
        "main: a", "main waits for side 1",
    ]  # fmt: skip


def test_a_branch_does_not_take_streams_of_branches_of_another_one(monkeypatch):
    """Memory that was freed on such a stream may still be read by the other branch."""
    gpu = FakeGPU(monkeypatch)
    inner = partial(run_branches, "gpu", partial(gpu.launch, "b"), partial(gpu.launch, "c"))
    for _ in range(2):
        gpu.log.clear()
        assert run_branches("gpu", partial(gpu.launch, "a"), inner, partial(gpu.launch, "d")) == ["a", ["b", "c"], "d"]
        assert [x for x in gpu.log if ":" in x] == ["side 2: c", "side 1: b", "side 3: d", "main: a"]


def test_branches_join_if_a_function_raises(monkeypatch):
    gpu = FakeGPU(monkeypatch)
    with pytest.raises(ZeroDivisionError):
        run_branches("gpu", lambda: 1 / 0, partial(gpu.launch, "b"))
    assert gpu.log[-1] == "main waits for side 1"
    assert len(branches._IDLE["gpu"]) == 1


@CUDA
def test_a_graph_with_branches_gives_the_results_of_one_stream():
    """Each layer's branches allocate memory that those of earlier layers have freed."""
    torch.manual_seed(0)
    x = torch.randn(64, 256, device="cuda")
    weights = torch.randn(8, 3, 256, 256, device="cuda") / 16

    @torch.no_grad()
    def run():
        y = x
        for layer in weights:
            a, b, c = run_branches(y.device, *(partial(torch.mm, y, weight) for weight in layer))
            y = a.tanh() + b.sigmoid() * c
        return y

    expected, graph = run(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        result = run()
    for _ in range(3):
        result.zero_()
        graph.replay()
        torch.testing.assert_close(result, expected, rtol=0, atol=0)
