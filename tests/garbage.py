"""Rare garbage collection. Import this module before torch: imports make many objects, and little garbage."""

import gc

gc.disable()


def collect_rarely() -> None:
    """Collect garbage from now on, but not among the modules imported by now.

    Compilers and Triton's interpreter make so many objects that Python would spend a tenth of its time.
    """
    gc.freeze()
    gc.set_threshold(20_000, 10, 10)
    gc.enable()
