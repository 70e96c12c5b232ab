"""The plan on paper: formulas against hand calculations and against the sizes of real updates."""

from pathlib import Path

import pytest
import torch

from kalmix import updates
from kalmix_bench.perf.scaling_plan import MIXERS, Cluster, K, exchange, passed_on, ring, sharded, tables

ROOT = Path(__file__).parents[3]
SIMPLE = Cluster(nvlink=400.0, network=50.0, start=1.0, nvlink_step=0.25, network_step=2.0, link_share=1.0)


def test_ring_in_a_host_is_limited_by_nvlink():
    assert ring(SIMPLE, 8, 3200.0) == (7.0, 1.0 + 7 * 0.25)  # each GPU receives 7/8 of 3,200 bytes at 400 bytes/s


def test_ring_across_hosts_uses_all_adapters():
    # Each of 4 hosts receives 3/4 of the bytes through 8 adapters; 28 steps inside of hosts and 3 between them.
    assert ring(SIMPLE, 32, 3200.0) == (max(3200 * 31 / 32 / 400, 2400 / 400), 1 + 28 * 0.25 + 3 * 2.0)


def test_passing_blocks_on_uses_one_adapter():
    assert passed_on(SIMPLE, 32, 3200.0) == (3200 * 31 / 32 / 50, 31 * (1 + 2.0))
    assert passed_on(SIMPLE, 8, 3200.0) == (3200 * 7 / 8 / 400, 7 * (1 + 0.25))


def test_shards_of_a_host_are_summed_between_hosts():
    size = 26 * 16**2
    inside, between = ring(SIMPLE, 8, size).times(3), ring(SIMPLE, 4, size / 8, hosts=4).times(2)
    assert sharded(SIMPLE, 16, 32, 8) == inside + between
    assert sharded(SIMPLE, 16, 32, 32) == ring(SIMPLE, 32, size).times(3)


@pytest.mark.parametrize("mixer", [x for x in MIXERS if x.name != "diagonal"], ids=lambda x: x.name)
def test_update_sizes_are_those_of_real_updates(mixer):
    k, v = torch.randn(2, 1, 4, 2, K)  # two heads
    k, one = torch.nn.functional.normalize(k, dim=-1), torch.full((1, 4, 2), 0.5)
    arguments = {"obs_noise": one, "process_noise": one} if mixer.name == "dense" else {"gain": one}
    update = getattr(updates, mixer.name)(k, v, **arguments)
    assert sum(x.numel() for x in update) == pytest.approx(mixer.update * 2 * K, rel=0.01)
    assert sum(x.nbytes for x in update) == pytest.approx(mixer.size * 2 * K, rel=0.01)


def test_cost_grows_with_ranks():
    costs = [exchange(Cluster(), MIXERS[1], 4096, ranks).seconds for ranks in (2, 8, 64)]
    assert costs == sorted(costs)


def test_page_has_the_tables_of_the_program():
    page = (ROOT / "docs" / "results" / "scaling.md").read_text()
    assert all(table in page for table in tables())
