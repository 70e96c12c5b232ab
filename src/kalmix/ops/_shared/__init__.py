"""Building blocks that the kernels of several ops share."""
