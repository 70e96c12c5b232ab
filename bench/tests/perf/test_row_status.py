"""Tests of rows that are given up."""

import time

import torch

from kalmix_bench.perf.row_status import row_or_reason


def test_a_row_given_up_in_the_middle_of_no_grad_leaves_gradients_on():
    def measure():
        torch.set_grad_enabled(False)  # as `torch.no_grad` does before its body
        time.sleep(5)

    assert row_or_reason(measure, limit=0.05)["status"] == "too slow"
    assert torch.is_grad_enabled()
