"""Time the parts around the ops, forward and backward, next to other libraries' kernels for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import typer
from rich import box
from rich.console import Console
from rich.table import Table
from torch import Tensor

from kalmix.errors import ArgumentError
from kalmix.files import FORMAT
from kalmix.layers import fused
from kalmix.layers.fused import dispatch
from kalmix.training.provenance import provenance
from kalmix_bench.perf.models.protocol import PRESETS, ModelSize
from kalmix_bench.perf.ops import backward, hardware
from kalmix_bench.perf.timing import kernels_launched, measure
from kalmix_bench.runner import markdown_console, options
from kalmix_bench.runner.cells import Results, Row
from kalmix_bench.runner.markdown_console import RecordingConsole

Inputs = dict[str, Tensor]
Run = Callable[[Inputs], tuple[Tensor, ...]]
EPS = 1e-6
HEAD = 128  # columns of a head; fewer in narrow models


class Part(NamedTuple):
    """A part, and the implementations that compute it.

    Attributes:
        inputs: tensors, with gradients.
        ours: function of kalmix.
        peers: function that imports a library's implementation, by name of the library.
    """

    inputs: Inputs
    ours: Run
    peers: Mapping[str, Callable[[], Run]]


def make_parts(size: ModelSize, device: torch.device) -> dict[str, Part]:
    """Return the parts at the sizes of a Gated DeltaNet of this width."""
    dtype = getattr(torch, size.dtype)
    batch, width, head = (size.batch_size, size.seq_len), size.hidden_size, min(HEAD, size.hidden_size)

    def leaf(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(*shape, device=device, dtype=dtype).requires_grad_()

    x, heads = partial(leaf, *batch, dtype=dtype), (width // head, head)
    targets = torch.randint(size.vocab_size, batch, device=device)
    gated = {"x": x(width // head, 2 * head), "gate": x(width // head, 2 * head), "weight": leaf(2 * head)}
    return {
        f"convolution and SiLU, {3 * width:,} channels": Part(
            {"x": x(3 * width), "weight": leaf(3 * width, 4)}, _convolution, {"fla": _fla_convolution}
        ),
        f"unit norm of {heads[0]} heads x {head}": Part({"x": x(*heads)}, _unit_norm, {"fla": _fla_unit_norm}),
        f"RMS norm with gate, {heads[0]} heads x {2 * head}": Part(gated, _gated_norm, {"fla": _fla_gated_norm}),
        f"residual and RMS norm, {width:,} columns": Part(
            {"x": x(width), "residual": x(width), "weight": leaf(width)},
            _residual_norm,
            {"fla": _fla_residual_norm, "liger": _liger_residual_norm},
        ),
        f"SwiGLU, 2 x {8 * width // 3:,} columns": Part(
            {"x": x(2 * (8 * width // 3))}, _swiglu, {"fla": _fla_swiglu, "liger": _liger_swiglu}
        ),
        f"head and loss, {size.vocab_size:,} words": Part(
            {"x": x(width), "weight": leaf(size.vocab_size, width)},
            partial(_loss, targets),
            {"fla": partial(_fla_loss, targets), "liger": partial(_liger_loss, targets)},
        ),
    }


def _convolution(x: Inputs) -> tuple[Tensor, ...]:
    return fused.short_convolution(x["x"], x["weight"], activation="silu")[:1]


def _unit_norm(x: Inputs) -> tuple[Tensor, ...]:
    return (fused.l2_normalize(x["x"]),)


def _gated_norm(x: Inputs) -> tuple[Tensor, ...]:
    norm = fused.Norm(x["weight"].shape[0], EPS)
    return (fused.rms_norm(x["x"].flatten(-2), x["weight"], norm, fused.Gate(x["gate"].flatten(-2))),)


def _residual_norm(x: Inputs) -> tuple[Tensor, ...]:
    return fused.add_rms_norm(x["x"], x["residual"], x["weight"], EPS)


def _swiglu(x: Inputs) -> tuple[Tensor, ...]:
    return (fused.swiglu(x["x"]),)


def _loss(targets: Tensor, x: Inputs) -> tuple[Tensor, ...]:
    return (fused.linear_cross_entropy(x["x"], x["weight"].to(x["x"].dtype), targets),)


def _fla_convolution() -> Run:
    from fla.modules.conv.causal_conv1d import causal_conv1d

    return lambda x: causal_conv1d(x["x"], x["weight"], activation="silu")[:1]


def _fla_unit_norm() -> Run:
    from fla.modules.l2norm import l2norm

    return lambda x: (l2norm(x["x"]),)


def _fla_gated_norm() -> Run:
    from fla.modules.fused_norm_gate import rms_norm_gated

    return lambda x: (rms_norm_gated(x["x"], x["gate"], x["weight"], None, eps=EPS),)


def _fla_residual_norm() -> Run:
    from fla.modules.layernorm import rms_norm

    return lambda x: rms_norm(x["x"], x["weight"], None, residual=x["residual"], eps=EPS, prenorm=True)[::-1]


def _fla_swiglu() -> Run:
    from fla.modules.activations import swiglu

    return lambda x: (swiglu(*x["x"].chunk(2, dim=-1)),)


def _fla_loss(targets: Tensor) -> Run:
    from fla.modules.fused_linear_cross_entropy import fused_linear_cross_entropy_loss

    return lambda x: (
        fused_linear_cross_entropy_loss(x["x"].flatten(0, 1), targets.flatten(), x["weight"].to(x["x"].dtype)),
    )


def _liger_residual_norm() -> Run:
    from liger_kernel.transformers.functional import liger_fused_add_rms_norm

    return lambda x: liger_fused_add_rms_norm(x["x"], x["residual"], x["weight"], EPS, in_place=False)[::-1]


def _liger_swiglu() -> Run:
    from liger_kernel.transformers.functional import liger_swiglu

    return lambda x: (liger_swiglu(*x["x"].chunk(2, dim=-1)),)


def _liger_loss(targets: Tensor) -> Run:
    from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

    def run(x: Inputs) -> tuple[Tensor, ...]:
        result: Any = liger_fused_linear_cross_entropy(
            x["x"].flatten(0, 1), x["weight"].to(x["x"].dtype), targets.flatten()
        )
        return (result[0] if isinstance(result, tuple) else result,)

    return run


@contextmanager
def eager_forms() -> Iterator[None]:
    """Let all parts of kalmix run their eager form."""
    before = dispatch.DEVICES
    dispatch.DEVICES = ()
    try:
        yield
    finally:
        dispatch.DEVICES = before


def measure_part(part: Part, device: torch.device, compiled: bool) -> Iterator[Row]:
    """Yield a row for each implementation of a part, with the "reason" in place of measurements if it fails.

    Args:
        part: the part.
        device: device of its inputs.
        compiled: whether to measure it under `torch.compile`, too.
    """
    variants: dict[str, Callable[[], Run]] = {
        "kalmix": lambda: part.ours,
        "kalmix, eager form": partial(_eagerly, part),
    }
    if compiled:
        variants["kalmix, compiled"] = lambda: torch.compile(part.ours, dynamic=False)
    for name, make in {**variants, **part.peers}.items():
        try:
            yield {"implementation": name, **_measure(make(), part.inputs, device)}
        except Exception as error:
            lines = str(error).strip().splitlines() or [""]
            yield {"implementation": name, "reason": f"{type(error).__name__}: {lines[0]}"[:300]}


def _eagerly(part: Part) -> Run:
    def run(x: Inputs) -> tuple[Tensor, ...]:
        with eager_forms():
            return part.ours(x)

    return run


def _measure(run: Run, x: Inputs, device: torch.device) -> Row:
    with torch.no_grad():
        upstream = [torch.ones_like(y) for y in run(x)]
    both = partial(backward, run, x, upstream)
    times = measure({"both": both}, device.type)
    if not times:
        raise MemoryError("out of memory")
    row = {"ms": times["both"].ms, "peak_memory": times["both"].peak, "first_call_s": times["both"].first}
    if device.type == "cuda":
        row["kernels"] = kernels_launched(both)[0]
    return row


def tables(rows: list[Row]) -> list[Table]:
    """Return the table of the measured implementations, and that of the reasons of others."""
    first = rows[0]
    versions = ", ".join(f"{name} {version}" for name, version in first["versions"].items() if version)
    caption = f"{first['hardware']}; {ModelSize(**first['size'])}; {versions}; commit {first['commit']}"
    good = Table(box=box.SIMPLE_HEAD, title="[bold]parts, forward and backward", title_justify="left", caption=caption)
    bad = Table(
        "part", "implementation", "reason", box=box.SIMPLE_HEAD, title="[bold]not measured", title_justify="left"
    )
    for column in ("part", "implementation"):
        good.add_column(column)
    for column in ("ms", "time of kalmix / its", "kernels", "peak MiB"):
        good.add_column(column, justify="right")
    ours = {row["part"]: row["ms"] for row in rows if row["implementation"] == "kalmix" and "ms" in row}
    for row in rows:
        if "reason" in row:
            bad.add_row(row["part"], row["implementation"], row["reason"])
            continue
        ratio = f"{ours[row['part']] / row['ms']:.2f}" if row["part"] in ours else "-"
        peak = f"{row['peak_memory'] / 2**20:,.0f}"
        good.add_row(row["part"], row["implementation"], f"{row['ms']:.3f}", ratio, str(row.get("kernels", "-")), peak)
    return [table for table in (good, bad) if table.row_count]


def run(
    preset: Annotated[str, typer.Option(help="Sizes of the model: paper, or laptop for a CPU.")] = "laptop",
    only: Annotated[str, typer.Option(metavar="TEXT", help="Parts whose name contains this. Default: all.")] = "",
    compiled: Annotated[bool, typer.Option(help="Measure the parts under torch.compile, too.")] = True,
    device: options.Device = None,
    output: Annotated[Path, typer.Option(help="Output folder.")] = Path("runs/parts"),
) -> None:
    """Time the parts around the ops, forward and backward, next to flash-linear-attention's and liger's kernels.

    Prints a table and writes it to report.md. On a GPU, times are device times.
    """
    from kalmix_bench.perf.peers import has_fla

    size, torch_device = options.preset(preset, PRESETS), options.device(device)
    torch.manual_seed(0)
    parts = {name: part for name, part in make_parts(size, torch_device).items() if only in name}
    if not parts:
        raise ArgumentError("only", got=repr(only), expected="text that the name of a part contains")
    has_fla()
    console = RecordingConsole(Console(highlight=False))
    origin = {"size": asdict(size), "hardware": hardware(torch_device.type), "seconds": 0.0, "format": FORMAT}
    origin |= provenance(torch_device)
    output.mkdir(parents=True, exist_ok=True)
    results, rows = Results(output / "results.jsonl"), []
    for name, part in parts.items():
        for row in measure_part(part, torch_device, compiled):
            rows.append({"part": name, **row, **origin})
            results.add(rows[-1:])
    for table in tables(rows):
        console.print(table)
    report = markdown_console.write({"parts": console.tables}, output / "report.md")
    for path in (results.path, report):
        console.print(f"  {path}", soft_wrap=True)
