"""Convert TeX formulas of a Markdown page to MathML, which browsers show without scripts."""

from __future__ import annotations

import re

from latex2mathml.converter import convert

CODE = re.compile(r"(^```.*?^```$|`[^`\n]*`)", re.MULTILINE | re.DOTALL)
FORMULA = re.compile(r"\$\$(?P<block>.+?)\$\$|\$(?P<inline>[^\s$](?:[^$\n]*[^\s$])?)\$", re.DOTALL)


def render_math(text: str) -> str:
    """Replace `$...$` and `$$...$$` outside code by MathML."""
    parts = CODE.split(text)
    parts[::2] = [FORMULA.sub(_convert, part) for part in parts[::2]]
    return "".join(parts)


def _convert(match: re.Match[str]) -> str:
    if match["block"] is not None:
        return f'<div class="formula">{convert(" ".join(match["block"].split()), display="block")}</div>'
    return f"<span>{convert(match['inline'])}</span>"  # Markdown takes a line that begins with `<math` for a block
