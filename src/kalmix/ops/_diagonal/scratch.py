"""How the Triton kernels of `diagonal` lay out beliefs in memory, known also where Triton is not."""

SPACING = 32  # tokens from one belief kept for the backward pass to the next


def padded(slots: int) -> int:
    """Slots a channel takes in scratch memory: a power of two, four at least."""
    return max(4, 1 << (int(slots) - 1).bit_length())
