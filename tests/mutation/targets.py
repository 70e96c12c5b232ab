"""Which files are mutated, and which tests should notice."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

SOURCE = "src/kalmix"
AREAS = {"ops": ("ops", "kernels"), "layers": ("layers",), "training": ("training",), "tasks": ("tasks",)}
LAWS = "tests/laws/test_laws.py"
# Triton's and CUDA's code has an interpreter or a GPU to be tested with; presets are settings, not behaviour.
LEFT_OUT = (
    "presets.py",
    "recipe.py",
    "/triton",
    "ops/_shared/environment.py",
    "/cuda.py",
    "fused",
    "layers/__init__",
    "ops/_ridge/tiles.py",
)


class Tests(NamedTuple):
    """Test files, and an expression that selects laws (`pytest -k`); no laws if empty."""

    files: tuple[str, ...]
    laws: str = ""


def _laws(op: str, kernel: str = "") -> str:
    """Laws of an op's kernels, but for Triton's, which are interpreted slowly."""
    chosen = kernel or "reference or chunked"
    return f"({chosen}) and {op} and float32 and not triton and not compiles"


_OPS = {
    "additive": ("tests/ops/test_additive.py", "tests/ops/test_memory_chunked.py"),
    "delta": ("tests/ops/test_delta.py", "tests/ops/test_memory_chunked.py"),
    "diagonal": ("tests/ops/test_diagonal_chunked.py", "tests/reductions/test_kla_identities.py"),
    "dense": ("tests/ops/test_dense.py", "tests/reductions/test_covariance.py"),
    "ridge": ("tests/ops/test_ridge.py",),
    "attend": (
        "tests/ops/test_attend.py",
        "tests/ops/test_attend_forms.py",
        "tests/ops/test_attend_separable.py",
        "tests/ops/test_attend_corotating.py",
    ),
}
_SHARED = ("tests/ops/test_memory_chunked.py", "tests/ops/test_additive.py", "tests/ops/test_delta.py")

# The first prefix that fits a path, below `SOURCE`, names its tests.
TESTS: dict[str, Tests] = {
    **{
        f"kernels/{op}/": Tests((*files, "tests/ops/test_bad_input.py", "tests/ops/test_opcheck.py"), _laws(op))
        for op, files in _OPS.items()
    },
    **{f"ops/_{op}": Tests((*files, "tests/ops/test_bad_input.py"), _laws(op)) for op, files in _OPS.items()},
    "ops/_shared/kernel.py": Tests(
        ("tests/ops/test_select.py", "tests/ops/test_bad_input.py", "tests/ops/test_ridge.py")
    ),
    "ops/_shared/dispatch.py": Tests(("tests/ops/test_select.py", "tests/ops/test_bad_input.py")),
    "kernels/primitives/": Tests(
        (*_SHARED, "tests/ops/test_segments.py"), "(additive or delta) and float32 and not triton and not compiles"
    ),
    "ops/": Tests(("tests/ops/test_bad_input.py", *_SHARED, "tests/ops/test_segments.py")),
    "layers/": Tests(("tests/layers",)),
    "training/bench/": Tests(
        (
            "tests/training/test_bench_kept.py",
            "tests/training/test_bench_lookup.py",
            "tests/training/test_bench_models.py",
            "tests/training/test_bench_run.py",
            "tests/training/test_baselines.py",
            "tests/cli/test_benchmarks.py",
            "tests/cli/test_report.py",
        )
    ),
    "training/collision/": Tests(
        (
            "bench/tests/experiments/test_collision_learning.py",
            "bench/tests/experiments/test_collision_mechanism.py",
            "tests/cli/test_bench.py",
        )
    ),
    "training/sde/": Tests(
        ("bench/tests/experiments/test_sde_learning.py", "bench/tests/experiments/test_sde.py", "tests/cli/test_sde.py")
    ),
    "training/solvers/": Tests(("bench/tests/experiments/test_solvers.py", "tests/cli/test_solvers.py")),
    "training/vision": Tests(("tests/training/test_vision.py",)),
    "kalmix_bench/runner/scheduler.py": Tests(("tests/training/test_sweep.py", "tests/training/test_bench_run.py")),
    "kalmix_bench/runner/cells.py": Tests(("tests/training/test_sweep.py", "tests/training/test_bench_kept.py")),
    "training/": Tests(
        (
            "tests/training/test_parts.py",
            "tests/training/test_insight.py",
            "tests/training/test_run.py",
            "tests/test_evaluation.py",
            "tests/cli/test_run_report.py",
        )
    ),
    "tasks/collision/": Tests(
        ("bench/tests/experiments/test_collision_mechanism.py", "bench/tests/experiments/test_collision_learning.py")
    ),
    "tasks/sde/": Tests(
        (
            "bench/tests/experiments/test_sde.py",
            "bench/tests/experiments/test_sde_references.py",
            "bench/tests/experiments/test_sde_learning.py",
        )
    ),
    "tasks/solvers/": Tests(("bench/tests/experiments/test_solvers.py", "tests/cli/test_solvers.py")),
    "tasks/mad/": Tests(("bench/tests/datasets/test_mad.py", "bench/tests/datasets/test_catalog.py")),
    "tasks/mqar/": Tests(("bench/tests/datasets/test_mqar.py", "bench/tests/datasets/test_catalog.py")),
    "tasks/ruler/": Tests(
        (
            "bench/tests/datasets/test_ruler.py",
            "bench/tests/datasets/test_catalog.py",
            "bench/tests/datasets/test_words.py",
        )
    ),
    "tasks/": Tests(
        (
            "bench/tests/datasets/test_metrics.py",
            "bench/tests/datasets/test_words.py",
            "bench/tests/datasets/test_catalog.py",
            "bench/tests/datasets/test_mad.py",
            "bench/tests/datasets/test_mqar.py",
            "bench/tests/experiments/test_collision_learning.py",
        )
    ),
}


def tests_of(path: str) -> Tests:
    """Tests of a source file: those named like it first, so that they run first."""
    name = path.removeprefix(f"{SOURCE}/")
    tests = next(tests for prefix, tests in TESTS.items() if name.startswith(prefix))
    stem = Path(name).stem
    own = sorted(str(x) for x in Path("tests").glob(f"{name.split('/')[0]}/test_{stem}.py"))
    return Tests((*own, *(file for file in tests.files if file not in own)), tests.laws)


def files_of(area: str) -> list[str]:
    """Source files of an area that have something to mutate."""
    found = sorted(str(x) for folder in AREAS[area] for x in Path(SOURCE, folder).rglob("*.py"))
    return [path for path in found if not any(part in path for part in LEFT_OUT)]
