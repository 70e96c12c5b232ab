"""The op `dense`: a memory with a covariance between its keys."""
