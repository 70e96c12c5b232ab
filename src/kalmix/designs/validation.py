"""Check that values and decays have the shapes that a design describes, where its op accepts others, too."""

from collections.abc import Mapping
from typing import Any

from kalmix.designs.spec import Design
from kalmix.errors import ArgumentError


def check_shared_signals(design: Design, width: int, signals: Mapping[str, Any]) -> None:
    """Check that noises and decays are shared as the design describes.

    Args:
        design: the design.
        width: width V of the values.
        signals: tensors by name.

    Raises:
        ArgumentError: values are wider than 1 in a design with one noise per column, or a design with one decay per
            head has one per key.
    """
    if design.evidence.columns and width != 1:
        hint = f"Design {design.name!r} has one noise per column: pass each column as a value head"
        raise ArgumentError("v", problem=f"has width {width}", expected="width 1", hint=hint)
    if design.transition.decay == "head" and signals["log_decay"].ndim == 4:
        hint = f"Design {design.name!r} has one decay per head"
        problem = f"has shape {list(signals['log_decay'].shape)}"
        raise ArgumentError("log_decay", problem=problem, expected="[B, T, G]", hint=hint)
