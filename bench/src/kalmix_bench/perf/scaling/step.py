"""Training steps of one model by one method, and their time and memory."""

from __future__ import annotations

import gc
import statistics
import time
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from kalmix.distributed import ContextParallel, shard_dynamics
from kalmix.distributed.exchange import sum_over_ranks
from kalmix.distributed.sharding import DYNAMICS
from kalmix.models import KalmixConfig, KalmixForCausalLM, hybrid_layers
from kalmix.models.optimizer import optimizer_groups
from kalmix_bench.perf.scaling.group import make_mesh

WORDS = 32000
SIZES = {"340m": (1024, 24), "1b": (2048, 16), "toy": (64, 2), "narrow": (64, 24)}  # width, blocks; KLA has more
KLA_BLOCKS = {"340m": 52, "1b": 36, "toy": 4, "narrow": 52}  # without MLPs
ALONE = ("one", "context one")  # methods of one GPU
FSDP = {"fsdp2": (1, True), "fsdp2 by 4": (4, True), "fsdp2 by 4 kept": (4, False)}  # see `shard`
METHODS = (*ALONE, "fsdp2", "context two-phase", "fsdp2 by 4", "fsdp2 by 4 kept", "ddp", "context")
WARM_UP, LONG_STEP = 3, 2.0  # steps before those that are timed; seconds from which only two steps are timed
BEFORE_CAPTURE = 11  # steps before a capture, with DDP
LONGEST = 12  # kernels that a profile names


class Cell(NamedTuple):
    """Model, method and sizes of a row.

    Attributes:
        model: name, such as "kla-340m".
        method: one of `METHODS`.
        batch: sequences of a GPU; with "context", of all GPUs.
        length: tokens of a sequence.
        compiled: whether `torch.compile` compiles each block.
        checkpointing: whether the backward pass computes the blocks again.
        captured: whether a CUDA graph runs the steps, so that the host launches one graph instead of each kernel.
    """

    model: str
    method: str
    batch: int
    length: int
    compiled: bool
    checkpointing: bool = False
    captured: bool = False

    @property
    def is_context(self) -> bool:
        """Whether ranks divide each sequence."""
        return self.method.startswith("context") and self.method not in ALONE


def build(name: str, device: torch.device) -> KalmixForCausalLM:
    """Build a model, such as "kla-340m"; "hybrid" is Gated DeltaNet with attention in every fourth block."""
    mixer, size = name.rsplit("-", 1)
    width, blocks = SIZES[size]
    if mixer == "hybrid":
        layers: list[Any] = hybrid_layers("gated-deltanet", blocks=blocks, attention_at=range(3, blocks, 4))
    else:
        layers = [mixer] * (KLA_BLOCKS[size] if mixer == "kla" else blocks)
    torch.manual_seed(0)
    with device:
        config = KalmixConfig(vocab_size=WORDS, hidden_size=width, layers=layers, skip_logits=True)
        return KalmixForCausalLM(config).train()


class Run:
    """Training steps of a cell on this rank's device."""

    def __init__(self, cell: Cell, device: torch.device) -> None:
        self.cell, self.device = cell, device
        model = build(cell.model, device)
        self.parameters: int = sum(p.numel() for p in model.parameters())
        if cell.checkpointing:
            model.gradient_checkpointing_enable()
        self.model: nn.Module = model
        self.context: ContextParallel | None = None
        self.replicated: list[nn.Parameter] = []
        if cell.method in FSDP:
            self.replicated = shard(model, *FSDP[cell.method], compiled=cell.compiled)
        elif cell.method not in ALONE:  # with "context", DDP sums the gradients during the backward pass
            # A group of its own, so that layers do not wait for sums of gradients that were sent before.
            group = distributed.new_group() if cell.is_context else None
            self.model = DistributedDataParallel(model, process_group=group, gradient_as_bucket_view=True)
        if cell.compiled:  # `forward` alone: hooks of FSDP2 stay outside, so that all blocks share a compilation
            for block in model.model.layers:
                block.forward = torch.compile(block.forward)
        if cell.is_context:
            layout = "head-tail" if cell.model.startswith("hybrid") else "contiguous"
            two_phase = cell.method == "context two-phase"
            self.context = ContextParallel(make_mesh(device), layout, two_phase=two_phase)
        groups = split_groups(optimizer_groups(model, learning_rate=3e-4, weight_decay=0.1), self.replicated)
        fused = device.type == "cuda"
        self.optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), fused=fused, capturable=cell.captured)
        own = distributed.get_rank() if cell.method in ("ddp", *FSDP) else 0
        generator = torch.Generator().manual_seed(own)
        self.ids: Tensor = torch.randint(WORDS, (cell.batch, cell.length), generator=generator).to(device)
        self.labels: Tensor = torch.cat([self.ids[:, 1:], torch.full_like(self.ids[:, :1], -100)], 1)

    @property
    def tokens(self) -> int:
        """Tokens of a step of all ranks that take part."""
        whole = self.cell.method in ALONE or self.context is not None
        return self.ids.numel() * (1 if whole else distributed.get_world_size())

    def loss(self, ids: Tensor, labels: Tensor) -> Tensor:
        """Return the mean loss of this rank's tokens, or its share in that of the divided sequence."""
        with torch.autocast(self.device.type, torch.bfloat16):
            count = self.labels.numel() - self.labels.shape[0]
            return self.model(input_ids=ids, labels=ids, shift_labels=labels, num_items_in_batch=count).loss

    def capture(self) -> None:
        """Capture a step in a CUDA graph, which all later steps replay.

        The run must be built and used on a stream other than the default one, as PyTorch asks for DDP. The steps
        before the capture let DDP end what it does in its first steps only.
        """
        for _ in range(BEFORE_CAPTURE):
            self.step()
        synchronize(self.device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=torch.cuda.current_stream(), capture_error_mode="thread_local"):
            self.step()
        self.step = graph.replay

    def step(self) -> None:
        """Take one step, without waiting for the device."""
        if self.context is None:
            self.loss(self.ids, self.labels).backward()
            average([x.grad for x in self.replicated if x.grad is not None])
        else:
            with self.context as cp:
                loss = self.loss(cp.shard(self.ids), cp.shard(self.labels))
                (distributed.get_world_size() * loss).backward()  # DDP averages
        self.optimizer.step()
        self.optimizer.zero_grad()


def shard(model: KalmixForCausalLM, together: int, reshard: bool, *, compiled: bool = False) -> list[nn.Parameter]:
    """Shard a model by FSDP2, with `together` blocks in a group; return the parameters that stay whole on each rank.

    With `reshard`, a group frees its gathered weights after its forward pass and gathers them again in the backward
    pass; otherwise it keeps them until then.

    If the blocks will be compiled, each rank has all parameters of the dynamics, and `average` must be called with
    their gradients: hooks of FSDP2 inside of a block would divide it into many graphs, each compiled for each block.
    """
    kept: list[nn.Parameter] = []
    if compiled:
        kept = [p for name, p in model.named_parameters() if DYNAMICS & set(name.split("."))]
    else:
        shard_dynamics(model)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    blocks = list(model.model.layers)
    options: dict[str, Any] = {"mp_policy": policy, "ignored_params": set(kept)}
    for start in range(0, len(blocks), together):
        group = blocks[start : start + together]
        fully_shard(group if together > 1 else group[0], reshard_after_forward=reshard, **options)
    fully_shard(model, **options)
    return kept


def average(gradients: list[Tensor]) -> None:
    """Replace small gradients by their averages over all ranks, in one collective."""
    if gradients:
        group = distributed.group.WORLD
        assert group is not None
        sum_over_ranks(gradients, group)
        torch._foreach_div_(gradients, distributed.get_world_size())


def split_groups(groups: list[dict[str, Any]], replicated: list[nn.Parameter]) -> list[dict[str, Any]]:
    """Divide groups of an optimizer, which cannot update sharded and replicated parameters together."""
    chosen = {id(p) for p in replicated}
    halves = [
        group | {"params": [p for p in group["params"] if (id(p) in chosen) == half]}
        for group in groups
        for half in (False, True)
    ]
    return [group for group in halves if group["params"]]


def measure(run: Run, steps: int, wait: Callable[[], None], slowest: Callable[[float], float]) -> dict[str, Any]:
    """Return times of steps and the peak memory of this rank.

    Steps are timed without waiting for the device between them, as in training.

    Args:
        run: the steps.
        steps: number of timed steps; 2 if a step takes longer than `LONG_STEP`.
        wait: function that waits for all ranks, after the warm-up.
        slowest: function of seconds that returns those of the slowest rank that takes part.
    """
    device, begin = run.device, time.perf_counter()
    run.step()
    synchronize(device)
    first = time.perf_counter() - begin
    if run.cell.captured:
        run.capture()
    for _ in range(WARM_UP - 1):
        begin = time.perf_counter()
        run.step()
        synchronize(device)
    steps = steps if slowest(time.perf_counter() - begin) < LONG_STEP else min(steps, 2)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    wait()
    gc.collect()
    gc.disable()
    times = timed(run, steps)
    gc.enable()
    seconds = slowest(statistics.median(times))
    peak = float(torch.cuda.max_memory_allocated()) if device.type == "cuda" else 0.0
    return {
        "ms": 1e3 * seconds,
        "times_ms": [round(1e3 * x, 2) for x in times],
        "first_step_s": round(first, 2),
        "tokens": run.tokens,
        "tokens_per_s": run.tokens / seconds,
        "peak_memory": int(slowest(peak)),
        "parameters": run.parameters,
    }


def timed(run: Run, steps: int) -> list[float]:
    """Return the seconds of steps on the device; on a CPU those of the host."""
    if run.device.type != "cuda":
        times = [time.perf_counter()]
        for _ in range(steps):
            run.step()
            times.append(time.perf_counter())
        return [end - begin for begin, end in pairwise(times)]
    events = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
    events[0].record()
    for event in events[1:]:
        run.step()
        event.record()
    synchronize(run.device)
    return [begin.elapsed_time(end) / 1e3 for begin, end in pairwise(events)]


def profile_step(run: Run, records: bool) -> dict[str, Any]:
    """Take one step and, if `records`, return the milliseconds of its kernels on a GPU, NCCL's by themselves.

    Kernels of NCCL include the time in which they wait for other ranks. A step in which "compute_ms" is much less than
    the time of the step waits for the host or for other ranks. In "idle_ms" no kernel runs: the device waits for the
    host.
    """
    if not records or run.device.type != "cuda":
        run.step()
        synchronize(run.device)
        return {}
    from torch.profiler import DeviceType, ProfilerActivity, profile

    synchronize(run.device)
    with profile(activities=[ProfilerActivity.CUDA]) as recording:
        run.step()
        synchronize(run.device)
    total: Counter[str] = Counter()
    count: Counter[str] = Counter()
    intervals: list[tuple[float, float]] = []
    for event in recording.events() or ():
        if event.device_type == DeviceType.CUDA and not getattr(event, "is_user_annotation", False):
            total[event.name] += event.time_range.elapsed_us()
            count[event.name] += 1
            intervals.append((event.time_range.start, event.time_range.end))
    nccl = sum(us for name, us in total.items() if name.startswith("nccl"))
    return {
        "compute_ms": (sum(total.values()) - nccl) / 1e3,
        "nccl_ms": nccl / 1e3,
        "idle_ms": idle(intervals) / 1e3,
        "kernels": sum(count.values()),
        "longest": [[name[:80], count[name], round(us / 1e3, 2)] for name, us in total.most_common(LONGEST)],
    }


def idle(intervals: list[tuple[float, float]]) -> float:
    """Return the time between the first start and the last end that no interval covers."""
    total, reached = 0.0, min((start for start, _ in intervals), default=0.0)
    for start, end in sorted(intervals):
        total += max(0.0, start - reached)
        reached = max(reached, end)
    return total


def synchronize(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize()


def release(device: torch.device) -> None:
    """Free the memory of a run that nothing refers to."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
