"""What kernels of several ops are made of."""
