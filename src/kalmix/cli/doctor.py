"""`kalmix doctor`: what this machine has, and whether every kernel is right on it."""

from __future__ import annotations

import platform
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version

import typer
from rich import box
from rich.console import Console
from rich.table import Table

_PACKAGES = ("kalmix", "torch", "triton", "transformers", "tokenizers", "accelerate", "numpy", "matplotlib")


def run() -> None:
    """Devices, versions and kernels; then every kernel that runs here against float64. Fails if any is off."""
    console = Console(highlight=False)
    console.print(_machine())
    console.print(_kernels())
    from kalmix.testing.doctor import check_all

    with console.status("comparing every kernel with float64"):
        checks = check_all()
    table = Table("op", "kernel", "quantity", "error", "budget", "", box=box.SIMPLE_HEAD)
    for check in checks:
        verdict = "[green]ok[/]" if check.ok else "[bold red]off[/]"
        note = f" [dim]{check.note}[/]" if check.note else ""
        table.add_row(check.op, check.kernel, check.quantity, f"{check.error:.1e}", f"{check.budget:.1e}", verdict + note)
    console.print(table)
    wrong = sum(not check.ok for check in checks)
    if wrong or not checks:
        console.print(f"[bold red]{wrong} of {len(checks)} checks are off[/]" if checks else "[bold red]nothing could be checked[/]")
        raise typer.Exit(1)
    console.print(f"[green]all {len(checks)} checks are within their budgets[/]")


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

    from kalmix import ops
    from kalmix.kernels.kernel import Call

    devices = ["cpu"] + ["cuda"] * torch.cuda.is_available()
    table = Table("op", "kernel", *devices, box=box.SIMPLE_HEAD)
    for op in sorted(name for name in ops.__all__ if name.islower()):
        try:
            rows = import_module(f"kalmix.kernels.{op}").KERNELS
        except ImportError:  # a function of `ops` that is no op, such as a matrix for pictures
            continue
        for row in rows:
            refusals = [row.refuses(Call(device, torch.float32, 16, 16)) for device in devices]
            table.add_row(op, row.name, *("[green]serves[/]" if no is None else f"[dim]{no}[/]" for no in refusals))
    return table
