"""Triton's interpreter stands in for a GPU where there is none: it must be chosen before Triton is imported."""

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
torch.set_num_threads(1)  # the suite runs one process a core
