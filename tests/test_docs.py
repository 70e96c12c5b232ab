"""The snippets of README run, and the tools that build the site find broken blocks and links."""

import importlib
import json
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "docs" / "tools"))

import speed  # noqa: E402
from check_links import broken_links  # noqa: E402
from execute import BLOCK, PageError, run_page  # noqa: E402
from speed import ratio_table, training_table  # noqa: E402

from kalmix.layers import MIXERS  # noqa: E402


def test_readme_snippets_run():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert [block["flags"].strip() for block in BLOCK.finditer(text)] == [""] * 5
    run_page(text, ROOT / "README.md")


# Tests of kalmix-bench add layers.
LAYERS = {name: layer for name, layer in MIXERS.items() if layer.__module__.startswith("kalmix.")}


def test_readme_lists_all_layers_and_measured_times():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    missing = [layer.__name__ for layer in LAYERS.values() if f"`{layer.__name__}`" not in text]
    assert not missing
    assert ratio_table() in text
    assert training_table() in text


def test_ratios_are_of_the_kernel_that_an_op_chooses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def row(kernel: str, shape: list[int], ms: float) -> dict[str, object]:
        return {"kernel": kernel, "shape": shape, "dtype": "float32", "forward_ms": ms, "both_ms": 3 * ms}

    rows = [row("cuda", [8, 1], 0.5), row("triton", [8, 1], 1.0), row("peer", [8, 1], 4.0)]
    rows += [row("triton", [2, 1], 1.0), row("peer", [2, 1], 2.0), row("cuda", [4, 1], 1.0)]
    (tmp_path / "x.json").write_text(json.dumps({"rows": rows}))
    monkeypatch.setattr(speed, "RESULTS", tmp_path)
    monkeypatch.setitem(speed.FILES, "diagonal", "x.json")
    assert speed.ratio_rows("diagonal", "peer", "float32") == [
        "| `diagonal` | 8, 1 | 0.50 / 4.00 (0.12) | 1.50 / 12.00 (0.12) |",
        "| `diagonal` | 2, 1 | 1.00 / 2.00 (0.50) | 3.00 / 6.00 (0.50) |",
    ]


def test_documents_name_the_layers_that_need_no_mlp():
    """The README, the first page and the layer's own page say it."""
    layers = {name: mixer for name, mixer in LAYERS.items() if mixer.includes_mlp}
    assert len(layers) >= 3
    trap = next(x for x in (ROOT / "README.md").read_text().split("\n\n") if "need no MLP" in x)
    for name, mixer in layers.items():
        assert f"`{mixer.__name__}`" in trap
        assert "No MLP behind it" in (ROOT / "docs" / "layers" / "notes" / f"{name}.md").read_text()


def test_files_that_documents_name_exist():
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    named = re.compile(r"(?<![\w/.-])(?:bench|src|tests|examples|docs)/[\w./-]+\.(?:py|md|jsonl?|ya?ml|toml|png)\b")
    missing = [
        f"{page.relative_to(ROOT)}: {path}"
        for page in pages
        if page.name != "CHANGELOG.md"
        for path in named.findall(page.read_text(encoding="utf-8"))
        if not ((ROOT / path).exists() or "NAME" in path or "FOLDER" in path)
    ]
    assert not missing


def test_python_names_in_documents_exist():
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    named = re.compile(r"`(kalmix(?:_bench)?(?:\.[A-Za-z_]\w*)+)(?:\(|`)")
    names = {name for page in pages if page.name != "CHANGELOG.md" for name in named.findall(page.read_text("utf-8"))}
    assert len(names) > 10
    assert not [name for name in sorted(names) if not _exists(name)]


def _exists(name: str) -> bool:
    """Return whether a dotted name is a module, or an attribute of one."""
    module, _, attribute = name.rpartition(".")
    try:
        importlib.import_module(name)
    except ModuleNotFoundError:
        try:
            return hasattr(importlib.import_module(module), attribute)
        except ModuleNotFoundError:
            return False
    return True


def test_page_shows_output_and_figures(tmp_path):
    page = (
        "Text.\n\n```python\nx = 2\nprint(x + 1)\n```\n\n```python\nimport matplotlib.pyplot as plt\n"
        "plt.figure()\nplt.title('Square')\nplt.plot([1, x])\n```\n\n```python no-run\n1 / 0\n```\n"
    )
    built = run_page(page, Path("page.md"), tmp_path)
    assert "```text\n3\n```" in built
    assert "![Square](page-1.svg)" in built
    assert (tmp_path / "page-1.svg").exists()


@pytest.mark.parametrize(("fence", "message"), [("python", "page.md:2: ZeroDivisionError"), ("python run", "unknown")])
def test_page_with_a_wrong_block_is_refused(fence, message):
    with pytest.raises(PageError, match=message):
        run_page(f"```{fence}\n1 / 0\n```\n", Path("page.md"))


def test_broken_links_are_found(tmp_path):
    (tmp_path / "index.html").write_text(
        '<h1 id="top"></h1><a href="other/">1</a><a href="other/#here">2</a><a href="#top">3</a>'
        '<a href="https://example.org/x">4</a><img src="no.png"><a href="gone/">5</a><a href="other/#there">6</a>'
    )
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "index.html").write_text('<h2 id="here"></h2><a href="../">back</a>')
    found = broken_links(tmp_path)
    assert [line.split(": ")[1] for line in found] == ["'no.png'", "'gone/'", "'other/#there'"]
