"""`import kalmix` needs torch alone: it imports neither Triton nor transformers, and works where they are absent."""

import subprocess
import sys

FILTERS = """
import torch, kalmix
x = dict(q=torch.randn(1, 9, 1, 4), k=torch.randn(1, 9, 1, 4), v=torch.randn(1, 9, 1, 6),
         precision=torch.rand(1, 9, 1, 6), log_decay=-torch.rand(1, 4, 6), process_noise=torch.rand(1, 4, 6))
assert kalmix.ops.diagonal(**x).mean.isfinite().all()
import kalmix.layers, kalmix.models
y, state = kalmix.layers.KLA(8)(torch.randn(1, 9, 8))
assert y.isfinite().all()
"""


def run(code: str) -> None:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_imports_neither_triton_nor_transformers():
    run(
        "import sys, torch; before = set(sys.modules)\n"
        + FILTERS
        + """
new = {name.partition(".")[0] for name in set(sys.modules) - before}
absent = "triton transformers typer rich matplotlib tokenizers datasets accelerate timm".split()
strange = new & set(absent)
assert not strange, strange
"""
    )


def test_works_without_triton_and_transformers():
    run(
        """
import sys
for name in ("triton", "transformers", "tokenizers", "datasets", "accelerate", "matplotlib", "rich", "typer"):
    sys.modules[name] = None  # as if it were not installed
"""
        + FILTERS
    )


def test_is_quick_beyond_torch():
    """Best of three, since other work may share the machine; the promise is well under a second."""
    code = "import time, torch; t = time.perf_counter(); import kalmix; print(time.perf_counter() - t)"
    took = [
        float(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout) for _ in range(3)
    ]
    assert min(took) < 0.5, took
