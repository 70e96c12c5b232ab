"""CUDA C++ kernels of `dense` for Hopper GPUs, compiled when they first run."""
