"""Extension of griffe: let mkdocstrings show `Example:` sections of docstrings as code."""

import re
from typing import Any

import griffe

SECTION = re.compile(r"^(\s*)Example:$", re.MULTILINE)


class ExampleSections(griffe.Extension):
    """Rename `Example:` sections to `Examples:`, the name that griffe knows."""

    def on_object(self, *, obj: Any, **_: Any) -> None:
        """Rename the sections of one object's docstring."""
        if obj.docstring:
            obj.docstring.value = SECTION.sub(r"\1Examples:", obj.docstring.value)
