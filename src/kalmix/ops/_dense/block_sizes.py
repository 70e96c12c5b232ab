"""Tile, chunk and block sizes of the GPU kernels of `dense`. They are also needed where Triton is not installed."""

from torch import Tensor

TILE = 16  # tokens per update of the covariance; with more, float32 does not keep it positive definite
CHUNK = 64  # tokens between two covariances that are stored for the backward pass
MIN_SPLIT_TOKENS = 1024  # minimum sequence length that is split in time, so that sequential kernels overlap with others
# Numbers of sequential programs for which splitting is faster: fewer are not the bottleneck, more fill the GPU.
SPLIT_PROGRAM_COUNTS = range(16, 128)
NUM_TIME_SPLITS = 2  # parts into which a sequence is split
MAX_PROGRAM_WIDTH = 128  # largest number of rows of a covariance that one program holds in registers
PROGRAM_NUMBERS = 16384  # numbers of a wider covariance that one program holds in registers: a block of rows
PREFETCH = 16  # tokens whose signals are prefetched together

# Spans into which a rank of a context-parallel group cuts its tokens, to filter them at the same time. The sequential
# kernels take about 0.25 us a token, in two forward and two backward passes. Each span of a rank adds about 0.7 ms for
# every rank, since beliefs and gradients pass one span after the other
# (`bench/results/2026-11-29-nvidia-h200-spans.jsonl`).
MAX_SPANS = 4
MAX_SPAN_PROGRAMS = 64  # sequential programs, far fewer than a GPU runs at the same time
SPAN_TOKENS = 2048  # tokens of a span, for each rank


def count_spans(v: Tensor, ranks: int) -> int:
    """Return the number of spans into which a rank should cut its tokens `[B, T, G, V]`, if there are `ranks` ranks."""
    batch, length, heads = v.shape[:3]
    spans = MAX_SPANS
    while spans > 1 and (
        length % spans or length < spans * ranks * SPAN_TOKENS or batch * heads * spans > MAX_SPAN_PROGRAMS
    ):
        spans //= 2
    return spans if v.is_cuda else 1


def may_split_time(batch: int, length: int, heads: int, packed: bool) -> bool:
    """Return whether sequences are long and few enough, but not too few, to be split in time."""
    return not packed and length >= MIN_SPLIT_TOKENS and batch * heads in SPLIT_PROGRAM_COUNTS
