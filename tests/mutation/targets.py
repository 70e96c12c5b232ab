"""Files to mutate, and the tests that should detect their mutants."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

AREAS = {
    "ops": "src/kalmix/ops",
    "layers": "src/kalmix/layers",
    "training": "src/kalmix/training",
    "bench": "bench/src/kalmix_bench",
}
LAWS = "tests/laws/test_laws.py"
# Triton and CUDA code needs an interpreter or a GPU; presets are settings, not behaviour.
LEFT_OUT = (
    "presets.py",
    "recipe.py",
    "/triton",
    "ops/_shared/environment.py",
    "/cuda.py",
    "/cuda/",
    "custom_op",
    "layers/__init__",
    "ops/_ridge/tiles.py",
    "kalmix_bench/perf/",
)


class Tests(NamedTuple):
    """Test files, and an expression that selects laws (`pytest -k`); no laws if empty."""

    files: tuple[str, ...]
    laws: str = ""


def _laws(op: str, kernel: str = "") -> str:
    """Return the expression that selects laws of an op's kernels; not Triton's, whose interpreter is slow."""
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

_BENCH = "bench/tests"
_RECALL = tuple(f"{_BENCH}/experiments/test_recall_{name}.py" for name in ("checkpoints", "embedding", "models", "run"))
_CATALOG = f"{_BENCH}/datasets/test_catalog.py"


def _experiment(name: str, *tests: str) -> Tests:
    return Tests(tuple(f"{_BENCH}/experiments/test_{name}{test}.py" for test in tests))


# Tests of a module, by the first matching prefix of its path below `src` or `bench/src`.
TESTS: dict[str, Tests] = {
    **{
        f"kalmix/ops/_{op}/": Tests((*files, "tests/ops/test_bad_input.py", "tests/ops/test_opcheck.py"), _laws(op))
        for op, files in _OPS.items()
    },
    "kalmix/ops/_shared/kernel.py": Tests(
        ("tests/ops/test_select.py", "tests/ops/test_bad_input.py", "tests/ops/test_ridge.py")
    ),
    "kalmix/ops/_shared/dispatch.py": Tests(("tests/ops/test_select.py", "tests/ops/test_bad_input.py")),
    "kalmix/ops/_shared/": Tests(
        (*_SHARED, "tests/ops/test_segments.py"), "(additive or delta) and float32 and not triton and not compiles"
    ),
    "kalmix/ops/": Tests(("tests/ops/test_bad_input.py", *_SHARED, "tests/ops/test_segments.py")),
    "kalmix/layers/": Tests(("tests/layers",)),
    "kalmix/training/": Tests(
        (
            "tests/training/test_components.py",
            "tests/training/test_layer_diagnostics.py",
            "tests/training/test_run.py",
            "tests/test_evaluation.py",
            "tests/cli/test_run_report.py",
        )
    ),
    "kalmix_bench/datasets/collision/": _experiment("collision", "_mechanism", "_learning"),
    "kalmix_bench/datasets/sde/": _experiment("sde", "", "_references", "_learning"),
    "kalmix_bench/datasets/mad/": Tests((f"{_BENCH}/datasets/test_mad.py", _CATALOG)),
    "kalmix_bench/datasets/mqar/": Tests((f"{_BENCH}/datasets/test_mqar.py", _CATALOG)),
    "kalmix_bench/datasets/ruler/": Tests((f"{_BENCH}/datasets/test_ruler.py", _CATALOG)),
    "kalmix_bench/datasets/": Tests((f"{_BENCH}/datasets",)),
    "kalmix_bench/experiments/recall/": Tests(
        (*_RECALL, *(f"{_BENCH}/experiments/test_recall_{name}.py" for name in ("resume", "baselines", "command")))
    ),
    "kalmix_bench/experiments/collision/": _experiment("collision", "_learning", "_mechanism", "_command"),
    "kalmix_bench/experiments/sde/": _experiment("sde", "_learning", "", "_command"),
    "kalmix_bench/experiments/solvers/": _experiment("solvers", "", "_command"),
    "kalmix_bench/experiments/language/": _experiment("language", "", "_command"),
    "kalmix_bench/experiments/vision/": _experiment("vision", "", "_command"),
    "kalmix_bench/": Tests((f"{_BENCH}/runner", *_RECALL)),
}


def module_of(path: str) -> str:
    """Return the path of a source file below `src` or `bench/src`."""
    return path.removeprefix("bench/").removeprefix("src/")


def tests_of(path: str) -> Tests:
    """Return the tests of a source file. Tests with the file's name come first."""
    package, folder, *_ = name = Path(module_of(path)).parts
    tests = next(tests for prefix, tests in TESTS.items() if "/".join(name).startswith(prefix))
    root = Path("tests" if package == "kalmix" else _BENCH)
    own = sorted(str(x) for x in root.glob(f"{folder}/test_{Path(path).stem}.py"))
    return Tests((*own, *(file for file in tests.files if file not in own)), tests.laws)


def files_of(area: str) -> list[str]:
    """Return the source files of an area that can be mutated."""
    found = sorted(str(x) for x in Path(AREAS[area]).rglob("*.py"))
    return [path for path in found if not any(part in path for part in LEFT_OUT)]
