"""`kalmix doctor`: versions, devices and kernels of this machine, and each kernel's error against float64."""

from __future__ import annotations

import platform
import textwrap
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

import typer
from rich.console import Console
from rich.text import Text

if TYPE_CHECKING:
    from kalmix.testing.doctor import Check

_PACKAGES = ("kalmix", "torch", "triton", "transformers", "tokenizers", "accelerate", "numpy", "matplotlib")
_MACHINE = (14, 1)  # widths of columns
_KERNELS = (10, 11, 6, 1)
_CHECKS = (15, 10, 7, 9, 8, 8, 7, 1)


def run() -> None:
    """Print versions, devices and kernels, then compare each kernel with float64; exit with 1 if one is wrong."""
    console = Console(highlight=False)
    _print_machine(console)
    console.print()
    _print_kernels(console)
    console.print()
    from kalmix.testing.doctor import check_all

    header = ("problem", "kernel", "device", "dtype", "error", "budget", "result", "worst quantity")
    _print_row(console, header, _CHECKS, style="bold")
    counts = {True: 0, False: 0, None: 0}
    for check in check_all():
        counts[check.ok] += 1
        if check.ok is not None:  # the table of kernels above has the reasons for those that cannot run
            _print_check(console, check)
    console.print()
    tried = counts[True] + counts[False]
    if counts[False] or not tried:
        console.print(f"[bold red]{counts[False]} of {tried} checks failed[/]")
        raise typer.Exit(1)
    console.print(f"[green]All {tried} checks passed[/]; {counts[None]} cannot run on this machine.")


def _print_check(console: Console, check: Check) -> None:
    cells = (check.problem, check.kernel, check.device, check.dtype, f"{check.error:.1e}", f"{check.budget:.1e}")
    result = ("passed", check.quantity) if check.ok else ("FAILED", f"{check.quantity} {check.note}".strip())
    _print_row(console, (*cells, *result), _CHECKS, style="" if check.ok else "bold red")


def _print_machine(console: Console) -> None:
    import torch

    rows = [("Python", f"{platform.python_version()} on {platform.system()} {platform.machine()}")]
    for name in _PACKAGES:
        try:
            rows.append((name, version(name)))
        except PackageNotFoundError:
            rows.append((name, "not installed"))
    rows.append(("CPU", f"{torch.get_num_threads()} threads, {torch.backends.cpu.get_cpu_capability()}"))
    for index in range(torch.cuda.device_count()):
        device = torch.cuda.get_device_properties(index)
        memory = f"{device.total_memory / 2**30:.0f} GiB"
        rows.append((f"cuda:{index}", f"{device.name}, {memory}, compute capability {device.major}.{device.minor}"))
    for row in rows:
        _print_row(console, row, _MACHINE)


def _print_kernels(console: Console) -> None:
    """Print whether each kernel accepts a plain float32 call on each device of this machine."""
    import torch

    from kalmix.ops import OPS
    from kalmix.ops._shared.kernel import KernelRequest

    _print_row(console, ("op", "kernel", "device", "float32 input"), _KERNELS, style="bold")
    for name, op in OPS.items():
        for kernel in op.kernels:
            for device in ["cpu"] + ["cuda"] * torch.cuda.is_available():
                keys = max(16, kernel.min_key_width)
                reason = kernel.unsupported_reason(KernelRequest(device, torch.float32, keys, 16, 64))
                cells = (name, kernel.name, device, "supported" if reason is None else reason)
                _print_row(console, cells, _KERNELS, style="" if reason is None else "dim")


def _print_row(console: Console, cells: tuple[str, ...], widths: tuple[int, ...], *, style: str = "") -> None:
    """Print cells at fixed columns, so that rows need no others; on a narrow terminal as words, wrapped."""
    if console.width < sum(widths):
        line = textwrap.fill(" ".join(cells), console.width, subsequent_indent="  ")
        console.print(Text(line, style=style), soft_wrap=True)
        return
    padded = [cell.ljust(width - 1) for cell, width in zip(cells, widths, strict=True)]
    console.print(Text(" ".join(padded).rstrip(), style=style), soft_wrap=True)
