"""Memory layout of beliefs in the Triton and CUDA kernels of `diagonal`; does not import Triton."""

CHUNK = 32  # tokens between two beliefs stored for the backward pass


def padded_slots(slots: int) -> int:
    """Return the number of slots per channel in memory, for K slots: a power of two, at least 4."""
    return max(4, 1 << (int(slots) - 1).bit_length())
