"""Settings of PyTorch while a cell runs, and after it."""

from __future__ import annotations

import pytest
import torch

from kalmix_bench.runner.determinism import deterministic_mode


@pytest.mark.parametrize(("tf32", "precision"), [(False, "highest"), (True, "high")])
def test_matrix_products_on_a_gpu_have_the_precision_that_is_asked_for(tf32: bool, precision: str) -> None:
    before = torch.get_float32_matmul_precision()
    with pytest.raises(KeyboardInterrupt), deterministic_mode(torch.device("cuda"), tf32=tf32):
        assert torch.get_float32_matmul_precision() == precision
        assert torch.are_deterministic_algorithms_enabled()
        raise KeyboardInterrupt
    assert torch.get_float32_matmul_precision() == before
    assert not torch.are_deterministic_algorithms_enabled()


def test_a_cpu_keeps_its_precision_and_has_one_thread() -> None:
    before, threads = torch.get_float32_matmul_precision(), torch.get_num_threads()
    with deterministic_mode(torch.device("cpu"), tf32=True):
        assert (torch.get_float32_matmul_precision(), torch.get_num_threads()) == (before, 1)
    assert torch.get_num_threads() == threads
