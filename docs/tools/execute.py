"""Run the Python blocks of a Markdown page and insert their output and figures."""

from __future__ import annotations

import io
import re
import textwrap
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

BLOCK = re.compile(r"^```python(?P<flags>[^\n]*)\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL)
FLAGS = {"", "no-run", "hide"}


class PageError(Exception):
    """A block of a page failed, or its fence has an unknown flag."""


def run_page(text: str, source: Path, figures: Path | None = None) -> str:
    """Run the ```` ```python ```` blocks of a page in order, in one namespace, and return the page with their results.

    Text that a block prints follows it as a text block. Figures that it leaves open in pyplot are saved as SVG and
    inserted; the title of their first axes becomes the alternative text.
    A block fenced ```` ```python no-run ```` is shown and not run. One fenced ```` ```python hide ```` is run, and
    shown folded below its figure.

    Args:
        text: the page in Markdown.
        source: file of the page, for error messages and names of figures.
        figures: folder to save figures in; figures are closed unsaved if absent.

    Raises:
        PageError: a block raised an exception, or its fence has an unknown flag.
    """
    namespace: dict[str, Any] = {"__name__": "__docs__"}
    saved = 0

    def run(match: re.Match[str]) -> str:
        nonlocal saved
        flag, code = match["flags"].strip(), match["code"]
        line = text.count("\n", 0, match.start()) + 2
        if flag not in FLAGS:
            raise PageError(f"{source}:{line - 1}: unknown flag {flag!r}; expected one of {sorted(FLAGS - {''})}")
        shown = f"```python\n{code}```"
        if flag == "no-run":
            return shown
        printed = run_code(code, source, line, namespace)
        images = []
        for image in save_figures(source, figures, saved):
            saved += 1
            images.append(image)
        output = f"\n\n```text\n{printed.rstrip()}\n```" if printed.strip() else ""
        pictures = "".join(f"\n\n{image}" for image in images)
        if flag == "hide":
            folded = textwrap.indent(shown, "    ")
            return f'{pictures.lstrip()}{output}\n\n??? note "Code of this figure"\n\n{folded}'
        return shown + output + pictures

    return BLOCK.sub(run, text)


def run_code(code: str, source: Path, line: int, namespace: dict[str, Any]) -> str:
    """Run a block in a namespace and return what it printed; `line` is that of its first line in `source`."""
    printed = io.StringIO()
    try:
        compiled = compile("\n" * (line - 1) + code, str(source), "exec")
        with redirect_stdout(printed):
            exec(compiled, namespace)
    except Exception as error:
        raise PageError(f"{source}:{line}: {type(error).__name__}: {error}") from error
    return printed.getvalue()


def save_figures(source: Path, figures: Path | None, count: int) -> list[str]:
    """Save and close the open figures of pyplot; return a Markdown image for each one saved."""
    import matplotlib.pyplot as plt

    images = []
    for number in plt.get_fignums():
        figure = plt.figure(number)
        if figures is not None:
            figures.mkdir(parents=True, exist_ok=True)
            name = f"{source.stem}-{count + len(images) + 1}.svg"
            figure.savefig(figures / name, metadata={"Date": None})
            title = next((axes.get_title("left") or axes.get_title() for axes in figure.axes), "")
            images.append(f"![{title or 'Figure'}]({name})")
        plt.close(figure)
    return images
