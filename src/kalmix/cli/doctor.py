"""`kalmix doctor`: what this machine has, and whether every kernel is right on it."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

if TYPE_CHECKING:
    from kalmix.testing.doctor import Check

_PACKAGES = ("kalmix", "torch", "triton", "transformers", "tokenizers", "accelerate", "numpy", "matplotlib")


def run() -> None:
    """Devices, versions and kernels; then every kernel that runs here against float64. Fails if any is off."""
    console = Console(highlight=False)
    console.print(_machine())
    console.print(_kernels())
    from kalmix.testing.doctor import check_all

    with console.status("comparing every kernel with float64"):
        checks = list(check_all())
    console.print(_verdicts(checks))
    tried = [check for check in checks if check.ok is not None]
    wrong = [check for check in tried if not check.ok]
    if wrong or not tried:
        console.print(f"[bold red]{len(wrong)} of {len(tried)} checks are off[/]")
        raise typer.Exit(1)
    console.print(
        f"[green]all {len(tried)} checks are within their budgets[/], {len(checks) - len(tried)} not possible here"
    )


def _verdicts(checks: Sequence[Check]) -> Table:
    """The worst quantity of each kernel, device and dtype; what could not be tried is in the table of kernels."""
    table = Table("op", "kernel", "device", "dtype", "worst quantity", "error", "budget", "", box=box.SIMPLE_HEAD)
    for check in checks:
        if check.ok is None:
            continue
        verdict = "[green]ok[/]" if check.ok else f"[bold red]off[/] {escape(check.note)}"
        numbers = (f"{check.error:.1e}", f"{check.budget:.1e}")
        table.add_row(check.problem, check.kernel, check.device, check.dtype, check.quantity, *numbers, verdict)
    return table


def _machine() -> Table:
    import torch

    table = Table(box=box.SIMPLE, show_header=False)
    table.add_row("python", f"{platform.python_version()} on {platform.system()} {platform.machine()}")
    for name in _PACKAGES:
        try:
            table.add_row(name, version(name))
        except PackageNotFoundError:
            table.add_row(name, "[dim]not installed[/]")
    table.add_row("cpu", f"{torch.get_num_threads()} threads, {torch.backends.cpu.get_cpu_capability()}")
    for index in range(torch.cuda.device_count()):
        device = torch.cuda.get_device_properties(index)
        memory = f"{device.total_memory / 2**30:.0f} GiB"
        table.add_row(f"cuda:{index}", f"{device.name}, {memory}, compute capability {device.major}.{device.minor}")
    return table


def _kernels() -> Table:
    """Every row of every op's table, and what it says to a plain float32 call on each device of this machine."""
    import torch

    from kalmix.ops import OPS
    from kalmix.ops._shared.kernel import KernelRequest

    devices = ["cpu"] + ["cuda"] * torch.cuda.is_available()
    table = Table("op", "kernel", *devices, box=box.SIMPLE_HEAD)
    for name, op in OPS.items():
        for kernel in op.kernels:
            keys = max(16, kernel.min_key_width)
            refusals = [
                kernel.unsupported_reason(KernelRequest(device, torch.float32, keys, 16, 64)) for device in devices
            ]
            table.add_row(
                name, kernel.name, *("[green]serves[/]" if no is None else f"[dim]{no}[/]" for no in refusals)
            )
    return table
