"""One compiled graph of a Triton kernel, forward and backward, serves all lengths.

Kernels run on fake tensors, which have shapes but no data, so that long sequences cost nothing.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map_only

from kalmix.ops import OPS
from kalmix.segments import segments_without_checks
from kalmix.testing.cases import Case
from kalmix.testing.laws import CountingBackend
from kalmix.testing.measure import differentiable
from kalmix.types import Filtered

pytest.importorskip("triton")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LENGTHS = (200, 5, 16, 17, 48, 65, 128, 129, 1000, 4096)
SLOW = pytest.mark.slow
PROBLEMS = ("delta-keys", "dense", "diagonal", "ridge", "additive-keys", "attend")
# `delta-keys` has the kernels of `additive-keys`. `attend` takes seconds to compile, one row by the same code as two.
COMPILED = [(name, 1, False) for name in PROBLEMS[:4]]
COMPILED += [pytest.param(name, 2, packed, marks=SLOW) for name in PROBLEMS for packed in (False, True)]


@pytest.mark.parametrize(("name", "batch", "packed"), COMPILED)
@pytest.mark.slow
def test_two_graphs_serve_training_at_all_lengths(name: str, batch: int, packed: bool):
    """A graph is compiled for the first length, and one for all others."""
    case, counting, graphs = Case(name, "triton", DEVICE, batch=batch), CountingBackend("aot_eager"), []
    rows = torch.tensor([(0, 0, 3), (0, 3, 5), (1, 0, 5)], dtype=torch.int32, device=DEVICE) if packed else None
    torch.compiler.reset()

    @torch.compile(fullgraph=True, backend=counting)
    def compiled(inputs: dict[str, Tensor], rows: Tensor | None) -> Filtered:
        return case.run_op(inputs, None if rows is None else segments_without_checks(rows))

    for length in LENGTHS:
        inputs = case.op_inputs(case.with_changes(length=length).inputs(sequences=3 if packed else None))
        inputs |= {name: x.detach().requires_grad_() for name, x in differentiable(inputs).items()}
        with FakeTensorMode() as mode:
            results = compiled(*tree_map_only(Tensor, mode.from_tensor, (inputs, rows)))
            torch.stack([x.sum() for x in tree_leaves(results) if x is not None and x.requires_grad]).sum().backward()
        graphs.append(counting.graphs)
    assert graphs == [1] + [2] * (len(LENGTHS) - 1)


@pytest.mark.parametrize("name", [pytest.param("additive-keys", marks=SLOW), "delta-keys", "diagonal", "ridge"])
@pytest.mark.slow
def test_two_graphs_serve_all_packed_training_without_a_prior(name: str):
    """The tensors that are stored then have other sizes than with a prior."""
    case, counting, graphs = Case(name, "triton", DEVICE), CountingBackend("aot_eager"), []
    rows = torch.tensor([(0, 0, 2), (0, 2, 3), (0, 3, 5)], dtype=torch.int32, device=DEVICE)
    torch.compiler.reset()

    @torch.compile(fullgraph=True, backend=counting)
    def compiled(inputs: dict[str, Tensor], rows: Tensor) -> Tensor:
        result = OPS[case.op].function(**inputs, segments=segments_without_checks(rows), kernel="triton")
        return result.mean.sum() + result.belief[0].sum()

    for length, count in ((200, 3), (5, 2), (48, 3), (65, 2), (4096, 3)):
        inputs = case.op_inputs(case.with_changes(length=length).inputs())
        leaves = differentiable(inputs)
        inputs = {x: leaves.get(x, y).detach() for x, y in inputs.items() if not x.startswith("prior.")}
        inputs = {x: y.requires_grad_() if y.is_floating_point() else y for x, y in inputs.items()}
        own_rows = rows[:count].clone()
        with FakeTensorMode() as mode:
            compiled(*tree_map_only(Tensor, mode.from_tensor, (inputs, own_rows))).sum().backward()
        graphs.append(counting.graphs)
    assert graphs == [1] + [2] * 4
