"""Context parallelism: every layer gives the outputs and gradients of one process, or refuses."""

import re
from pathlib import Path

import pytest
import torch
from layers.conftest import LAYERS
from torch.distributed.device_mesh import init_device_mesh

from distributed import ranks
from distributed.processes import leave_group, run_ranks
from kalmix import ArgumentError, Segments, layers
from kalmix.distributed import ContextParallel
from kalmix.distributed.layout import LAYOUTS, Placement, find_runs, order_spans, shard_tokens
from kalmix.layers import AdaptiveFilterAttention, Attention, GatedDeltaNet
from kalmix.models import KalmixConfig, KalmixForCausalLM
from kalmix.ops import OPS

REFUSING = "recurrent-afa"
FAST = ["kla", "bayesian", "gated-deltanet", "gated-kalmanet", "afa", "mamba2", "attention"]


@pytest.mark.slow
def test_two_ranks_equal_one_process_or_refuse(tmp_path):
    """Run one layer of each op, and wrong calls."""
    run_ranks(ranks.check_fast, 2, tmp_path, FAST)


@pytest.mark.slow
@pytest.mark.parametrize(("world", "dtype", "tolerance"), [(2, torch.float32, 1e-5), (3, torch.float64, 1e-9)])
def test_every_layer_equals_one_process(world, dtype, tolerance, tmp_path):
    names = [name for name in LAYERS if name != REFUSING]
    run_ranks(ranks.check_layers, world, tmp_path, names, dtype, tolerance, "gather")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "dtype", "tolerance"), [(2, torch.float32, 1e-5), (3, torch.float64, 1e-9)], ids=["two", "three"]
)
def test_attention_in_a_ring_equals_one_process(world, dtype, tolerance, tmp_path):
    run_ranks(ranks.check_layers, world, tmp_path, [*ranks.RINGS], dtype, tolerance, "ring")


@pytest.mark.slow
def test_memories_in_two_phases_equal_one_process(tmp_path):
    names = [
        "gla",
        *(x for x in FAST if x not in ranks.RINGS),
        "bayesian-turning",
        "gated-kalmanet-bare",
        "design-cells",
    ]
    run_ranks(ranks.check_layers, 3, tmp_path, names, torch.float32, 1e-5, "two-phase")


@pytest.mark.slow
@pytest.mark.parametrize(("world", "sharded"), [(2, False), (4, True)], ids=["replicated", "fsdp2"])
def test_a_model_equals_one_process(world, sharded, tmp_path):
    run_ranks(ranks.check_model, world, tmp_path, sharded)


def test_accelerate_refuses_models_under_its_own_sequence_parallelism():
    big_modeling = pytest.importorskip("accelerate.big_modeling")
    model = torch.nn.Module()
    model.config = KalmixConfig(vocab_size=8, hidden_size=16, layers=["kla"])
    for refuse in ("_refuse_recurrent_layers_under_sequence_parallelism", "_attach_context_parallel_hooks"):
        if hasattr(big_modeling, refuse):  # older releases have neither check
            with pytest.raises(ValueError, match="parallelism does not support"):
                getattr(big_modeling, refuse)(model)


@pytest.mark.parametrize("name", ["cp_size", "sp_size"])
def test_models_refuse_sequence_parallelism_of_accelerate(name, monkeypatch):
    """Older releases of accelerate do not refuse them."""
    accelerate = pytest.importorskip("accelerate")
    model = KalmixForCausalLM(KalmixConfig(vocab_size=8, hidden_size=16, layers=["kla"]))
    config = accelerate.parallelism_config.ParallelismConfig()
    setattr(config, name, 2)
    monkeypatch.setitem(accelerate.state.AcceleratorState._shared_state, "parallelism_config", config)
    with pytest.raises(ArgumentError, match=rf"`{name}` is 2 .*kalmix.distributed.ContextParallel"):
        model(torch.zeros(1, 4, dtype=torch.int64))


@pytest.mark.slow
@pytest.mark.parametrize("mode", ranks.MODES)
def test_compiled_layers_take_part(mode):
    """The exchange itself is not compiled with a ring, and in two phases."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        for layer in (GatedDeltaNet(8, heads=2), Attention(8, heads=2), AdaptiveFilterAttention(8, heads=2)):
            torch._dynamo.reset()
            x = torch.randn(1, 32, 8)
            expected = layer(x)[0]
            weight = layer.out_proj.weight
            (grad,) = torch.autograd.grad(expected.square().sum(), weight)
            compiled = torch.compile(layer, backend="aot_eager")
            with ContextParallel(mesh, "head-tail", **ranks.MODES[mode]) as cp:
                y = compiled(cp.shard(x))[0]
                (found,) = torch.autograd.grad(y.square().sum(), weight)
            torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(found, grad, rtol=1e-4, atol=1e-5)
    finally:
        leave_group()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("world", "spans"), [(1, 1), (2, 1), (3, 1), (2, 3)])
def test_runs_of_all_ranks_are_the_documents(world, spans, layout):
    documents, tokens = [*ranks.PACKED, (1, 12, 12)], 24
    covered = torch.full((2, tokens), -1)
    expected = Segments.of(torch.tensor(documents, dtype=torch.int32)).segment_ids(2, tokens)
    token = torch.arange(tokens)
    for rank in range(world):
        placement = Placement(rank, world, layout, spans)
        own = shard_tokens(token, placement, 0)
        runs = find_runs(placement, 2, len(own), documents)
        assert len(runs.tails) == 2 * placement.spans
        for x in runs.every:
            at = own[x.start : x.stop]
            number = documents.index(next(d for d in documents if (d[0], d[1]) == (x.row, x.document)))
            assert (covered[x.row, at] == -1).all()
            covered[x.row, at] = number
            assert x.past == int(at[0]) - documents[number][1]
        for x in runs.tails:
            assert x in runs.every or (x.start == x.stop and x.past > 0)
    assert torch.equal(covered, expected)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("spans", [1, 4])
def test_spans_of_all_ranks_are_ordered_by_time(spans, layout):
    x = torch.arange(24).view(1, 24, 1)
    placements = [Placement(rank, 3, layout, spans) for rank in range(3)]
    held = torch.stack([torch.stack(shard_tokens(x, p, 1).chunk(p.spans, 1)) for p in placements])
    assert torch.equal(torch.cat(order_spans(held, placements[0]), 1), x)


def test_padding_alone_is_one_empty_run():
    runs = find_runs(Placement(1, 2, "contiguous"), 1, 8, [(0, 0, 5)])
    assert [(x.start, x.stop, x.past) for x in runs.every] == [(0, 0, 0)]
    assert [(x.start, x.stop) for x in runs.tails] == [(8, 8)]


def test_layers_call_ops_that_take_part():
    folder = Path(layers.__file__).parent
    sources = {path.name: path.read_text() for path in folder.glob("*.py")}
    assert len(sources) > 20
    direct = re.compile(r"^from kalmix import .*\bops\b|^import kalmix$|^from kalmix.filtering", re.MULTILINE)
    assert not [name for name, source in sources.items() if direct.search(source)]
    calls = {name for source in sources.values() for name in re.findall(r"[^.]\bops\.(\w+)\(", source)}
    assert calls == {*OPS, "attend_radial", "filter", "diagonal_matrix"}
