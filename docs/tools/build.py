"""Build the documentation site: run the pages, generate the rest, call zensical and check every link.

`make docs` runs it. The site is written to build/site; open build/site/index.html in a browser.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from check_links import broken_links
from execute import PageError, run_page
from generate import check_layers_documented, fill_tables, layer_pages
from mathml import render_math

ROOT = Path(__file__).resolve().parents[2]
SOURCE, PAGES, SITE = ROOT / "docs", ROOT / "build" / "docs", ROOT / "build" / "site"
TOOLS, NOTES = SOURCE / "tools", SOURCE / "layers" / "notes"


def main(arguments: Sequence[str] | None = None) -> int:
    """Build the site and return the exit status: 1 if a page fails or a link is broken."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", metavar="TEXT", help="run pages whose path contains TEXT, and build nothing")
    only = parser.parse_args(arguments).only
    begin = time.perf_counter()
    if only is None:
        shutil.rmtree(PAGES, ignore_errors=True)
    try:
        write_pages(only)
    except PageError as error:
        print(error, file=sys.stderr)
        return 1
    if only is not None:
        return 0
    check_layers_documented((ROOT / "zensical.toml").read_text(encoding="utf-8"))
    shutil.rmtree(SITE, ignore_errors=True)
    zensical = Path(sys.executable).with_name("zensical")
    built = subprocess.run([zensical, "build", "--strict", "--clean"], cwd=ROOT)
    if built.returncode:
        return 1
    broken = broken_links(SITE)
    print(
        "\n".join(broken) or f"{len(list(SITE.rglob('*.html')))} pages in {time.perf_counter() - begin:.0f} s: {SITE}"
    )
    return int(bool(broken))


def write_pages(only: str | None = None) -> None:
    """Write the pages to build/docs: copies of docs/ with blocks run and tables filled, and one page for each layer.

    Args:
        only: write and run only the pages whose path contains this text.

    Raises:
        PageError: a block of a page failed.
    """
    set_up_figures()
    for path in sorted(SOURCE.rglob("*")):
        relative = path.relative_to(SOURCE)
        if not path.is_file() or TOOLS in path.parents or NOTES in path.parents or "__pycache__" in relative.parts:
            continue
        if only is not None and only not in str(relative):
            continue
        target = PAGES / relative
        target.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".md":
            begin = time.perf_counter()
            text = run_page(path.read_text(encoding="utf-8"), path, target.parent)
            target.write_text(render_math(fill_tables(text)), encoding="utf-8")
            if (seconds := time.perf_counter() - begin) > 1:
                print(f"{relative}: {seconds:.1f} s", flush=True)
        else:
            shutil.copyfile(path, target)
    for name, text in layer_pages(NOTES).items():
        if only is None or only in f"layers/{name}":
            target = PAGES / "layers" / name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(render_math(run_page(text, NOTES / name, target.parent)), encoding="utf-8")


def set_up_figures() -> None:
    """Set matplotlib to draw off screen, in SVG with a colour-blind-safe palette."""
    import matplotlib as mpl

    mpl.use("agg")
    mpl.rcParams.update(
        {
            "axes.grid": True,
            "axes.axisbelow": True,
            "axes.prop_cycle": mpl.cycler(color=["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9"]),
            "axes.spines.right": False,
            "axes.spines.top": False,
            "figure.constrained_layout.use": True,
            "figure.figsize": (7, 3.2),
            "grid.color": "#e4e7eb",
            "legend.frameon": False,
            "svg.hashsalt": "kalmix",
        }
    )


if __name__ == "__main__":
    sys.exit(main())
