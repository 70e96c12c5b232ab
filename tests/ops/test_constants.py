"""Tests of tensors that calls share."""

import re
from pathlib import Path

from kalmix import ops

FILES = sorted(Path(ops.__file__).parent.glob("_*/custom_op.py"))


def test_custom_ops_share_no_constants():
    """A custom op may run in memory of a CUDA graph, which later calls must not use.

    `_shared/custom_op.py` calls `filled` outside a custom op, where `torch.compile` sees it.
    """
    imports = {file.parent.name: re.findall(r"constants import (.*)", file.read_text()) for file in FILES}
    assert imports.pop("_shared") == ["filled"]
    assert {name for lines in imports.values() for line in lines for name in line.split(", ")} == {"zeros"}
