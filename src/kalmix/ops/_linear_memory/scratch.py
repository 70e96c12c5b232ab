"""Sizes of tensors that the forward pass stores for the backward pass."""

SUBTILE = 16  # tokens per subtile, for decays per key
