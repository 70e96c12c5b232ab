"""CUDA C++ kernels of `dense` for Hopper GPUs."""
