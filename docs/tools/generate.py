"""Generate pages and tables from the code: one page per layer, the tables of kernels and layers, the command line."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from papers import CODE, PAPERS
from speed import cpu_table, decoding_table, ratio_table, speed_table, training_table

from kalmix import layers, ops
from kalmix.designs import CATALOGUE, Design
from kalmix.layers import MIXERS, FilterConv2d
from kalmix.layers.base import Mixer

HIDDEN, LENGTH = 256, 1024  # sizes at which layer pages count the floats of a state
MARKER = re.compile(r"^<!-- generated: (?P<table>[a-z-]+)(?: (?P<argument>[a-z-]+))? -->$", re.MULTILINE)


def fill_tables(text: str) -> str:
    """Replace each `<!-- generated: TABLE [ARGUMENT] -->` line of a page by the table."""

    def fill(match: re.Match[str]) -> str:
        arguments = [match["argument"]] if match["argument"] else []
        return TABLES[match["table"]](*arguments)

    return MARKER.sub(fill, text)


def layer_pages(notes: Path) -> dict[str, str]:
    """Return the page of each layer by file name.

    Args:
        notes: folder of hand-written sections, `NAME.md`, that follow the summary of a layer.
    """
    pages = {f"{name}.md": _layer_page(name, layer, notes / f"{name}.md") for name, layer in MIXERS.items()}
    pages["filter-conv2d.md"] = _page("FilterConv2d", "filter-conv2d", FilterConv2d, notes / "filter-conv2d.md", [])
    return pages


def _layer_page(name: str, layer: type[Mixer], note: Path) -> str:
    facts: list[tuple[str, str]] = [("name in a model's configuration", f"`{name}`")]
    design = layer.design
    if isinstance(design, Design):
        facts += [
            ("assumes of the state", design.transition.description),
            ("a token is evidence of", design.evidence.description),
            ("covariance", design.covariance.description),
            ("op", f"[`{design.op}`](../ops/{design.op}.md)"),
        ]
    if name != "design":
        options = {"horizon": 1} if name == "none" else {}
        built = layer(HIDDEN, **options)
        sizes = [built.state_size(length) for length in (LENGTH, 2 * LENGTH)]
        grows = "grows with the sequence" if sizes[1] > sizes[0] else "whatever the length"
        facts.append(
            (f"state of a sequence, `hidden_size={HIDDEN}`, {LENGTH:,} tokens", f"{4 * sizes[0]:,} bytes, {grows}")
        )
        posterior = "yes" if built.has_posterior else "no"
        facts.append(("gives a variance", posterior))
        facts.append(("needs an MLP behind it", "no: it gates its own output" if _has_mlp(layer) else "yes"))
    return _page(layer.__name__, name, layer, note, facts)


def _has_mlp(layer: type[Mixer]) -> bool:
    return bool(layer.includes_mlp)


def _page(title: str, name: str, layer: type[Any], note: Path, facts: Iterable[tuple[str, str]]) -> str:
    design = getattr(layer, "design", None)
    rows = [*facts, ("paper", _papers(name)), ("code of its authors", _code(name))]
    table = "\n".join(f"| {key} | {value} |" for key, value in rows if value)
    parts = [f"# {title}", _summary(layer), f"| | |\n|---|---|\n{table}"]
    if isinstance(design, Design):
        update = "\n".join(line.strip() for line in re.split(r";  |,  (?=\S)", design.update))
        parts.append(f"Its filter, equations {design.equations}:\n\n```text\n{update}\n```")
    parts.append(f"## Example\n\n{_example(name, title)}")
    if note.exists():
        parts.append(note.read_text(encoding="utf-8").strip())
    parts.append(
        f"## Reference\n\n::: kalmix.layers.{title}\n"
        "    options:\n      heading_level: 3\n      members: [forward, filter]"
    )
    return "\n\n".join(parts) + "\n"


def _example(name: str, title: str) -> str:
    """Return a block of Python that builds a layer and calls it."""
    if name == "filter-conv2d":
        call = "layer = FilterConv2d(3, 8, 5)\ny = layer(torch.randn(2, 3, 16, 16))\nprint(tuple(y.shape))"
        return f"```python\nimport torch\nfrom kalmix.layers import {title}\n\n{call}\n```"
    options = ', design="kda"' if name == "design" else ""
    call = f"layer = {title}(64{options})\nx = torch.randn(2, 10, 64)  # 2 sequences of 10 tokens\ny, state = layer(x)"
    more = "y, state = layer(torch.randn(2, 1, 64), state)  # one more token of each\nprint(tuple(y.shape))"
    posterior = "posterior = layer.filter(x, variance=True)\nprint(tuple(posterior.variance.shape))\n"
    last = posterior if MIXERS[name].has_posterior is True else ""
    return f"```python\nimport torch\nfrom kalmix.layers import {title}\n\n{call}\n{more}\n{last}```"


def _summary(layer: type[Any]) -> str:
    """Return the first paragraph of a docstring."""
    return " ".join((inspect.getdoc(layer) or "").split("\n\n")[0].split())


def _papers(name: str) -> str:
    return "; ".join(f"[{title}]({link})" if link else title for title, link in PAPERS[name])


def _code(name: str) -> str:
    return ", ".join(f"[{link.removeprefix('https://github.com/')}]({link})" for link in CODE.get(name, ()))


def layer_table() -> str:
    """Return the table of layers: name, paper, op, whether it gives a variance."""
    rows = ["| layer | name | paper | op | variance |", "|---|---|---|---|---|"]
    for name, layer in MIXERS.items():
        design = layer.design if isinstance(layer.design, Design) else None
        op = f"[`{design.op}`](../ops/{design.op}.md)" if design else ""
        variance = "yes" if layer.has_posterior else ""
        rows.append(f"| [{layer.__name__}]({name}.md) | `{name}` | {_papers(name)} | {op} | {variance} |")
    return "\n".join(rows)


def kernel_table(op: str) -> str:
    """Return the table of an op's kernels in order of preference."""
    rows = ["| kernel | runs on | fewest tokens at which it is preferred |", "|---|---|---|"]
    for kernel in ops.OPS[op].kernels:
        devices = " or ".join(sorted(kernel.devices)) if kernel.devices else "every device"
        tokens = kernel.min_tokens
        rows.append(f"| `{kernel.name}` | {devices} | {tokens or ''} |")
    return "\n".join(rows)


def design_table() -> str:
    """Return the catalogue of designs."""
    rows = ["| design | state | evidence | covariance | op |", "|---|---|---|---|---|"]
    for name, design in CATALOGUE.items():
        kind = design.covariance.kind
        rows.append(f"| `{name}` | {design.transition.description} | {design.evidence.kind} | {kind} | `{design.op}` |")
    return "\n".join(rows)


def command_reference() -> str:
    """Return a section with a table of options for each command."""
    import typer

    from kalmix.cli.app import app

    commands = dict(typer.main.get_command(app).commands)  # type: ignore[attr-defined]
    commands.pop("bench", None)
    commands |= {f"data {name}": command for name, command in commands.pop("data").commands.items()}
    sections = [_command(f"kalmix {name}", command) for name, command in commands.items()]
    from kalmix_bench.cli import app as bench

    group = dict(typer.main.get_command(bench).commands)  # type: ignore[attr-defined]
    perf = group.pop("perf").commands
    group |= {f"perf {name}": command for name, command in perf.items()}
    sections += [_command(f"kalmix bench {name}", command) for name, command in group.items()]
    return "\n\n".join(sections)


def _command(title: str, command: Any) -> str:
    parts = [f"## {title}", " ".join((command.help or "").split())]
    rows = ["| option | default | |", "|---|---|---|"]
    for parameter in command.params:
        help_text = " ".join((getattr(parameter, "help", None) or "").split()).replace("|", "\\|")
        if parameter.param_type_name == "argument":
            name, default = f"`{(parameter.name or '').upper()}`", "required" if parameter.required else ""
        else:
            name, default = ", ".join(f"`{option}`" for option in parameter.opts), _default(parameter)
        rows.append(f"| {name} | {default} | {help_text} |")
    return "\n\n".join([*parts, "\n".join(rows)] if len(rows) > 2 else parts)


def _default(parameter: Any) -> str:
    value = parameter.default
    if callable(value) or value in (None, False, "", ()) or str(value) == ".":
        return ""
    return f"`{value}`"


def check_layers_documented(nav: str) -> None:
    """Check that the navigation lists the page of every layer.

    Raises:
        ValueError: a page is missing.
    """
    missing = [name for name in [*MIXERS, "filter-conv2d"] if f'"layers/{name}.md"' not in nav]
    if missing:
        raise ValueError(f"zensical.toml lists no page for the layers {missing}")
    assert layers.__all__


TABLES: dict[str, Callable[..., str]] = {
    "kernels": kernel_table,
    "speed": speed_table,
    "ratios": ratio_table,
    "cpu-speed": cpu_table,
    "training-speed": training_table,
    "decoding-speed": decoding_table,
    "layers": layer_table,
    "designs": design_table,
    "commands": command_reference,
}
