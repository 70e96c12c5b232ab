"""Compute the cost of training on 64 and 1,024 GPUs on paper: bytes, latency and what dominates, per layer and step.

    python -m kalmix_bench.perf.scaling_plan

Nothing is measured: all figures follow from formulas and from the constants of `Cluster`. A layer is a mixer with 5 D^2
and an MLP with 8 D^2 parameters, for tokens of width D. A step is one forward and one backward pass.
"""

from __future__ import annotations

from typing import NamedTuple

MS = 1e3


class Cluster(NamedTuple):
    """Published figures of hosts with 8 H200 GPUs, and assumed shares of them.

    Attributes:
        gpus_per_host: GPUs that NVLink connects.
        nvlink: bytes per second and direction of a GPU; H200 datasheet: 900 GB/s in both directions.
        network: bytes per second and direction of a GPU; DGX H200 user guide: one 400 Gb/s adapter per GPU.
        half: FLOP/s in bfloat16, dense; H200 datasheet.
        double: FLOP/s in float64 on tensor cores; H200 datasheet.
        start: seconds that a collective takes beside its steps; NCCL's cost model (src/graph/tuning.cc), ring, Simple.
        nvlink_step: seconds of a step of a ring over NVLink; likewise.
        network_step: seconds of a step over the network; likewise.
        link_share: assumed share of the bandwidth of links that collectives reach.
        flops_share: assumed share of peak FLOP/s that a layer reaches.
    """

    gpus_per_host: int = 8
    nvlink: float = 450e9
    network: float = 50e9
    half: float = 989e12
    double: float = 67e12
    start: float = 8.4e-6
    nvlink_step: float = 3.4e-6
    network_step: float = 14e-6
    link_share: float = 0.8
    flops_share: float = 0.4


class Cost(NamedTuple):
    """Time of an exchange in seconds: bytes over bandwidth of the slowest link, and latency of its steps."""

    transfer: float
    latency: float

    @property
    def seconds(self) -> float:
        """Sum of both."""
        return self.transfer + self.latency

    def times(self, count: float) -> Cost:
        """Return the cost of `count` such exchanges, one after the other."""
        return Cost(count * self.transfer, count * self.latency)

    def __add__(self, other: Cost) -> Cost:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return the cost of both exchanges, one after the other."""
        return Cost(self.transfer + other.transfer, self.latency + other.latency)


def ring(cluster: Cluster, ranks: int, size: float, *, hosts: int | None = None) -> Cost:
    """Return the cost of an all-gather, or reduce-scatter, of `size` bytes in total among `ranks` ranks in a ring.

    Each GPU receives what it lacks over NVLink. Each host receives what its ranks lack over its network adapters, which
    work at the same time.

    Args:
        cluster: the constants.
        ranks: number of ranks.
        size: bytes that each rank has in the end.
        hosts: hosts of these ranks; by default they fill hosts. With as many hosts as ranks, each of the 8 GPUs of a
            host does this with its own group.
    """
    hosts = -(-ranks // cluster.gpus_per_host) if hosts is None else hosts
    inside = size * (ranks - 1) / ranks / cluster.nvlink if hosts < ranks else 0.0
    outside = size * (hosts - 1) / hosts / (cluster.network * (ranks / hosts)) if hosts > 1 else 0.0
    steps = cluster.nvlink_step * (ranks - hosts) + cluster.network_step * (hosts - 1)
    return Cost(max(inside, outside) / cluster.link_share, cluster.start + steps)


def passed_on(cluster: Cluster, ranks: int, size: float) -> Cost:
    """Return the cost of passing blocks of `size` bytes in total from rank to rank, until each rank has seen all.

    Ranks are in the order of hosts. One GPU of a host sends to the next host, so the network carries a block at a time.
    """
    inside = ranks <= cluster.gpus_per_host
    link, step = (cluster.nvlink, cluster.nvlink_step) if inside else (cluster.network, cluster.network_step)
    transfer = size * (ranks - 1) / ranks / (link * cluster.link_share)
    return Cost(transfer, (ranks - 1) * (cluster.start + step))


class Mixer(NamedTuple):
    """Sizes of a mixer at width D, with heads of 128 key and value columns if it has heads.

    Attributes:
        name: the op, or "attention".
        state: numbers of its belief, divided by D.
        update: numbers of its update, divided by D.
        size: bytes of its update, divided by D.
        fold: FLOPs of combining two updates, divided by D.
    """

    name: str
    state: float
    update: float
    size: float
    fold: float


K = V = 128
SLOTS, CHANNELS = 32, 2 / 3  # of `diagonal`: slots, and channels divided by D
MIXERS = (
    Mixer("additive", V, V + 1, 4 * (V + 1), 3 * V),
    Mixer("delta", V, K + V, 4 * (K + V), 2 * K * (K + V)),
    Mixer("ridge", K + V, K + V, 4 * (K + V), 3 * (K + V)),
    Mixer("diagonal", 2 * SLOTS * CHANNELS, 5 * SLOTS * CHANNELS, 20 * SLOTS * CHANNELS, 20 * SLOTS * CHANNELS),
    Mixer("dense", K + V, 3 * K + 2 * V, 4 * (2 * K + V) + 8 * (K + V), 14 * K * K + 6 * K * V),  # J, eta: float64
)


def layer_seconds(cluster: Cluster, width: int, tokens: int, op_flops: float) -> float:
    """Return the time of a step of one layer on `tokens` tokens; `op_flops` are those of the op, forward, per token."""
    return 3 * tokens * (2 * 13 * width**2 + op_flops) / (cluster.half * cluster.flops_share)


def sharded(cluster: Cluster, width: int, gpus: int, shards: int) -> Cost:
    """Return the cost of FSDP2 in bfloat16 for one layer: weights are gathered twice, gradients scattered once.

    With fewer shards than GPUs, the shards of gradients are also summed over all groups, in bfloat16.
    """
    size = 2 * 13 * width**2
    cost = ring(cluster, shards, size).times(3)
    groups = gpus // shards
    if groups > 1:  # a sum is a reduce-scatter and an all-gather
        cost += ring(cluster, groups, size / shards, hosts=groups).times(2)
    return cost


def exchange(cluster: Cluster, mixer: Mixer, width: int, ranks: int) -> Cost:
    """Return the cost of context parallelism for one sequence: updates are gathered, their gradients scattered."""
    return ring(cluster, ranks, mixer.size * width * ranks).times(2)


def extra_seconds(cluster: Cluster, mixer: Mixer, width: int, ranks: int, tokens: int) -> float:
    """Return the time of computing an update of `tokens` tokens, and of combining those of `ranks` ranks, backward too.

    An update takes 4 FLOPs per number and token. Updates are combined in order, in float64.
    """
    compute = 3 * 4 * mixer.update * width * tokens / (cluster.half * cluster.flops_share)
    return compute + 3 * (ranks - 1) * mixer.fold * width / (cluster.double * cluster.flops_share)


def dominant(**seconds: float) -> str:
    """Return the name of the largest."""
    return max(seconds, key=lambda name: seconds[name]).replace("_", " ")


def sharding_rows(cluster: Cluster) -> list[list[str]]:
    """Return the table of FSDP2, with 8,192 tokens per GPU and gated delta layers."""
    rows, tokens = [], 8192
    for width in (2048, 4096):
        for gpus, shards in ((64, 64), (1024, 1024), (1024, 8)):
            compute = layer_seconds(cluster, width, tokens, 4 * MIXERS[1].state * width)
            cost = sharded(cluster, width, gpus, shards)
            exposed = max(0.0, cost.seconds - compute)
            largest = dominant(compute=compute, transfer=cost.transfer, latency=cost.latency)
            numbers = [f"{x * MS:.2f}" for x in (compute, *cost, exposed)]
            rows.append([f"{width:,}", f"{gpus:,}", f"{shards:,}", *numbers, largest])
    return rows


def context_rows(cluster: Cluster) -> list[list[str]]:
    """Return the table of context parallelism: 8 ranks in a host, and 64 ranks on 8 hosts; one sequence per group."""
    rows, width = [], 4096
    for ranks, tokens in ((8, 1 << 18), (64, 1 << 20)):
        own = tokens // ranks
        for mixer in MIXERS:
            compute = layer_seconds(cluster, width, own, 4 * mixer.state * width)
            cost = exchange(cluster, mixer, width, ranks)
            extra = extra_seconds(cluster, mixer, width, ranks, own)
            share = (cost.seconds + extra) / compute
            largest = dominant(transfer=cost.transfer, latency=cost.latency, update=extra)
            mib = mixer.size * width / 2**20
            numbers = [f"{mib:.1f}", *(f"{x * MS:.2f}" for x in (compute, *cost, extra)), f"{share:.0%}"]
            rows.append([str(ranks), f"{tokens:,}", mixer.name, *numbers, largest])
    return rows


def attention_rows(cluster: Cluster, heads: int = 8) -> list[list[str]]:
    """Return the table of `Attention` with 8 heads of keys: keys and values gathered, or in a ring."""
    rows, width = [], 4096
    for ranks, tokens in ((8, 1 << 18), (64, 1 << 20)):
        own = tokens // ranks
        compute = layer_seconds(cluster, width, own, 2 * tokens * width)
        numbers = 2 * K * heads * tokens  # keys and values of all ranks
        gathered = ring(cluster, ranks, 2 * numbers).times(2)  # bfloat16; gradients are scattered
        # In a ring the blocks visit the ranks forward, and again backward together with their float32 gradients.
        passed = passed_on(cluster, ranks, 2 * numbers).times(2) + passed_on(cluster, ranks, 4 * numbers)
        for name, cost, held in (("gather", gathered, ranks), ("ring", passed, 3)):
            hidden = min(cost.seconds, compute) if name == "ring" else 0.0
            mib = 2 * numbers * held / ranks / 2**20
            times = [f"{x * MS:.1f}" for x in (compute, cost.seconds, cost.seconds - hidden)]
            rows.append([str(ranks), f"{tokens:,}", name, f"{mib:,.0f}", *times])
    return rows


HEADS = {
    sharding_rows: "D|GPUs|shards|compute, ms|transfer, ms|latency, ms|not hidden, ms|largest",
    context_rows: "ranks|tokens of a sequence|op|update, MiB|compute, ms|transfer, ms|latency, ms|update and fold, ms|"
    "added to compute|largest added",
    attention_rows: "ranks|tokens of a sequence|keys and values|held, MiB|compute, ms|exchange, ms|not hidden, ms",
}


def tables(cluster: Cluster | None = None) -> list[str]:
    """Return the tables in Markdown."""
    result = []
    for build, head in HEADS.items():
        names = head.split("|")
        rows = [names, ["---"] * len(names), *build(Cluster() if cluster is None else cluster)]
        result.append("\n".join(f"| {' | '.join(row)} |" for row in rows))
    return result


if __name__ == "__main__":
    print("\n\n".join(tables()))
