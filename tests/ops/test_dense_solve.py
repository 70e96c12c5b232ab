"""Linear systems of updates of `dense`: the kernels agree with PyTorch, also for gradients and singular systems.

Without a GPU, Triton's interpreter runs one kernel, and the CPU the other one, in CUDA C++.
"""

import ctypes
import inspect
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from kalmix import DenseBelief, updates
from kalmix.ops._dense import solve as module
from kalmix.ops._dense.cuda import FOLDER
from kalmix.ops._dense.solve import solve
from kalmix.ops._dense.triton import solve as triton_solve
from kalmix.ops._dense.triton.solve import COLUMNS, _kernel

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
EPS = torch.finfo(torch.float64).eps


def draw(*shape):
    return torch.randn(*shape, dtype=torch.float64, device=DEVICE)


def systems(width, columns, scale=1.0, batch=(2, 3)):
    """Return matrices I + P J with P and J without negative eigenvalues, and right sides."""
    covariance, information = (x @ x.mT / width for x in (draw(*batch, width, width), draw(*batch, width, width)))
    eye = torch.eye(width, dtype=torch.float64, device=DEVICE)
    return eye + scale * covariance @ information, draw(*batch, width, columns)


@pytest.fixture
def triton(monkeypatch):
    monkeypatch.setattr(module, "DEVICES", (DEVICE,))


@pytest.mark.parametrize(
    ("width", "columns", "scale"), [(1, 1, 1.0), (5, 3, 1e3), (16, 33, 1e6), (33, 70, 10.0), (128, 40, 1e3)]
)
def test_solutions_are_as_exact_as_with_pytorch(width, columns, scale, triton, monkeypatch):
    torch.manual_seed(width)
    matrix, right = systems(width, columns, scale, batch=(2,) if width == 128 else (6,))
    check(solve(matrix, right), matrix, right)
    monkeypatch.setattr(triton_solve, "unsupported_gpu", lambda _: "Triton is tested")
    check(triton_solve.solve(matrix, right), matrix, right)


def check(found, matrix, right):
    """Check that solutions are backward stable, and as close to those of PyTorch as the matrices allow."""
    residual = (matrix @ found - right).norm(dim=(-2, -1)) / (matrix.norm(dim=(-2, -1)) * found.norm(dim=(-2, -1)))
    assert residual.max() < 4 * matrix.shape[-1] * EPS
    expected, allowed = torch.linalg.solve(matrix, right), 4 * matrix.shape[-1] * EPS * torch.linalg.cond(matrix).max()
    assert (found - expected).norm() / expected.norm() < allowed


def test_rows_are_chosen_by_their_size(triton):
    """Elimination in the order of rows would divide by 0 or lose all digits."""
    matrix = torch.tensor([[0.0, 1.0], [1.0, 0.0]], dtype=torch.float64, device=DEVICE)
    tiny = torch.tensor([[1e-20, 1.0], [1.0, 1.0]], dtype=torch.float64, device=DEVICE)
    right = torch.tensor([[3.0], [2.0]], dtype=torch.float64, device=DEVICE)
    found = solve(torch.stack([matrix, tiny]), torch.stack([right, right]))
    assert torch.equal(found[0, :, 0].cpu(), torch.tensor([2.0, 3.0], dtype=torch.float64))
    torch.testing.assert_close(found[1], torch.linalg.solve(tiny, right), rtol=4 * EPS, atol=0)


def test_gradients_of_first_and_second_order(triton):
    torch.manual_seed(0)
    matrix, right = (x.requires_grad_() for x in systems(3, 2, batch=(2,)))
    assert torch.autograd.gradcheck(solve, (matrix, right), fast_mode=True)
    assert torch.autograd.gradgradcheck(solve, (matrix, right), fast_mode=True)


def test_batch_axes_broadcast(triton):
    torch.manual_seed(0)
    matrix, _ = systems(4, 1)
    right = draw(4, 2)
    torch.testing.assert_close(solve(matrix, right), torch.linalg.solve(matrix, right.expand(2, 3, 4, 2)))
    assert solve(matrix[:0], right.expand(0, 3, 4, 2)).shape == (0, 3, 4, 2)
    assert solve(matrix[:0], right).shape == (0, 3, 4, 2)


def test_a_wrong_system_changes_no_other(triton):
    torch.manual_seed(0)
    matrix, right = systems(4, 3, batch=(4,))
    expected = solve(matrix, right)
    matrix[1, 2, 3], matrix[2], right[3, 0, 1] = float("nan"), 0.0, float("inf")
    found = solve(matrix, right)
    assert torch.equal(found[0], expected[0])
    assert not found[1].isfinite().any() and not found[2].isfinite().any()
    assert torch.equal(found[3][:, [0, 2]], expected[3][:, [0, 2]]) and not found[3, :, 1].isfinite().any()


def test_updates_use_the_kernel(monkeypatch):
    """Applying an update and its gradients do not depend on the solver."""
    torch.manual_seed(0)
    k = torch.nn.functional.normalize(draw(2, 9, 1, 4), dim=-1)
    noise = torch.full((2, 9, 1), 0.1, device=DEVICE, dtype=torch.float64)
    update = updates.dense(k, draw(2, 9, 1, 3), obs_noise=noise, process_noise=0.1 * noise)
    prior = DenseBelief(draw(2, 1, 4, 3), torch.eye(4, dtype=torch.float64, device=DEVICE).expand(2, 1, 4, 4).clone())
    grads = [draw(*x.shape) for x in prior]
    results, calls = [], []
    kernel = module._solve
    for devices in ((), (DEVICE,)):
        monkeypatch.setattr(module, "DEVICES", devices)
        monkeypatch.setattr(module, "_solve", lambda *x: (calls.append(1), kernel(*x))[1])
        results.append([*update.then(update).apply(prior), *update.pull_back(prior, *grads)])
        assert bool(calls) == bool(devices)
    for x, y in zip(*results, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12)


WIDEST = pytest.param(128, 3, 1e3, marks=pytest.mark.slow)


@pytest.mark.parametrize(("width", "columns", "scale"), [(1, 1, 1.0), (5, 33, 1e3), (33, 2, 1e6), WIDEST])
@pytest.mark.slow
def test_cuda_code_solves_systems(width, columns, scale, tmp_path):
    """The kernel in CUDA C++, compiled for the CPU; also with pivots beside the diagonal, and with a wrong system."""
    torch.manual_seed(width)
    run = compile_for_cpu(width, tmp_path)
    matrix, right = (x.cpu() for x in systems(width, columns, scale, batch=(2,)))
    if width > 1:
        matrix[1] = matrix[1].roll(1, 0)  # the largest coefficients are beside the diagonal
    found = run(matrix, right)
    check(found, matrix, right)
    assert torch.equal(run(matrix, right, turns="reversed"), found)
    matrix[0, 0, -1] = float("nan")
    changed = run(matrix, right)
    assert torch.equal(changed[1], found[1]) and not changed[0].isfinite().any()


def compile_for_cpu(width, folder):
    """Return a function of matrices and right sides that runs the CUDA kernel on the CPU."""
    if shutil.which("g++") is None:
        pytest.skip("g++ is missing")
    source, library = folder / "solve.cpp", folder / "solve.so"
    parameters = "const double* a, const double* b, double* x, long long columns"
    source.write_text(
        f'#include "{Path(__file__).parent / "cuda_on_cpu.hpp"}"\n#include "{FOLDER / "solve.cu"}"\n'
        f'extern "C" void run(int width, int height, int reversed, {parameters}) '
        "{ run_grid(width, height, REQUIREMENTS[0], reversed, [=] { solve(a, b, x, columns); }); }\n"
    )
    defines = [f"-DK={width}", f"-DCOLUMNS={COLUMNS}"]
    options = ["-O1", "-std=c++17", "-shared", "-fPIC", "-Wno-unknown-pragmas"]
    subprocess.run(["g++", *options, *defines, "-o", library, source], check=True)
    call = ctypes.CDLL(str(library)).run

    def run(matrix, right, turns="in order"):
        tensors = [matrix.contiguous(), right.contiguous(), torch.full_like(right, float("nan"))]
        addresses, columns = (ctypes.c_void_p(x.data_ptr()) for x in tensors), right.shape[-1]
        call(len(matrix), -(-columns // COLUMNS), turns == "reversed", *addresses, ctypes.c_longlong(columns))
        return tensors[-1]

    return run


def test_cuda_and_triton_kernels_have_the_same_arguments():
    parameters = inspect.signature(_kernel.fn).parameters.values()
    names = [x.name for x in parameters if x.annotation == inspect.Parameter.empty]
    signature = re.search(r"\bsolve\((.*?)\) {", (FOLDER / "solve.cu").read_text(), re.DOTALL).group(1)
    assert [re.split(r"[ *]+", x.strip())[-1] for x in signature.split(",")] == names
