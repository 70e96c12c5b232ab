"""Gradients of signals with decays per key inside a subtile, through pairs of its tokens.

Keys form groups of GROUP_KEYS neighbours. The decays of a group over a subtile are moderate if all of them are at least
`MODERATE_DECAY`, otherwise strong. With c_t the log-decay from the start of the subtile through token t, minus half of
that over the subtile, the decay from s to t is the product of exp(c_t) and exp(-c_s). Both are finite if decays are
moderate, and one matrix product serves all pairs s < t. Otherwise products are computed by level, as in `vector_decay`.
Blocks have keys as rows and tokens as columns.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kalmix.ops._linear_memory.triton.vector_decay import SUBTILE, split_into_bf16
from kalmix.ops._shared.triton.tiles import matmul, num_levels

MODERATE_DECAY = tl.constexpr(2.0**-120)  # factors lie between 2^-60 and 2^60, which leaves room for signals
GROUP_KEYS = tl.constexpr(128)  # keys whose decays are moderate or strong together


@triton.jit
def sum_columns(terms, weights, PRECISION: tl.constexpr, total=None):
    """Return sums over i of terms `[keys, i]`, times bfloat16 weights `[t, i]`, as `[keys, t]`; added to `total`."""
    for i in tl.static_range(len(terms)):
        total = matmul(terms[i], tl.trans(weights), PRECISION, total)
    return total


@triton.jit
def mask_to_bf16(mask):
    return tl.where(mask, 1.0, 0.0).to(tl.bfloat16)


@triton.jit
def gradients_by_level(
    query, key_rows, write, terms, grad_in, grad_key_in, grad_out, diagonal, score_pairs, correction_pairs, level_ones,
    before, after, DTYPE: tl.constexpr, CORRECTS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Return gradients `[keys, SUBTILE]` of queries, keys, writes and log-decays, given those of `fold_decays`.

    A log-decay is part of every decay between a token before and a token after it. At each level, a log-decay in an
    upper half gets the products of gradients and queries from its token to the end of the half, one in a lower half the
    products of gradients and writes before its token.
    """
    decay = tl.exp2(sum_columns(terms, before, PRECISION))
    read_grads = decay * grad_in
    grad_query = read_grads + diagonal * write
    products = query * read_grads
    grad_key = tl.zeros(query.shape, tl.float32)
    if CORRECTS:
        grad_key = decay * grad_key_in
        products += key_rows * grad_key
    grad_decay = matmul(products.to(DTYPE), before.to(DTYPE), PRECISION)
    decay = tl.exp2(sum_columns(terms, after, PRECISION))
    write_grads = decay * grad_out
    grad_write = write_grads + diagonal * query
    grad_decay = matmul((write * write_grads).to(DTYPE), after.to(DTYPE), PRECISION, grad_decay)
    for level in tl.static_range(num_levels(SUBTILE)):
        decay = tl.exp2(sum_columns(terms, level_ones[level], PRECISION))
        decayed_writes, decayed_reads = write * decay, query * decay
        read_grads = matmul(decayed_writes.to(DTYPE), tl.trans(score_pairs[level]), PRECISION)
        grad_query += read_grads * decay
        products = decayed_reads * read_grads
        write_grads = matmul(decayed_reads.to(DTYPE), score_pairs[level], PRECISION)
        if CORRECTS:
            decayed_reads = key_rows * decay
            read_grads = matmul(decayed_writes.to(DTYPE), tl.trans(correction_pairs[level]), PRECISION)
            grad_key += read_grads * decay
            products += decayed_reads * read_grads
            write_grads = matmul(decayed_reads.to(DTYPE), correction_pairs[level], PRECISION, write_grads)
        grad_write += write_grads * decay
        products += decayed_writes * write_grads
        grad_decay = matmul(products.to(DTYPE), level_ones[level].to(DTYPE), PRECISION, grad_decay)
    return grad_query, grad_key, grad_write, grad_decay


@triton.jit
def gradients_for_moderate_decays(
    query, key_rows, write, terms, grad_in, grad_key_in, grad_out, diagonal, score, correction, edge_decay,
    before, after, DTYPE: tl.constexpr, CORRECTS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Return the gradients of `gradients_by_level`; all decays over the subtile must be moderate.

    `score` and `correction` are the gradients of pairs s < t, zeros elsewhere. `edge_decay` `[keys]` is the square root
    of the decay over the subtile.

    A log-decay gets, through the pairs that it lies between, the products of reads and their gradients from its token
    on, minus those of writes: pairs on one side of it cancel. They do so up to rounding in float32, because both
    products use the same rounded reads and writes, and their sum is split before it is summed over tokens.
    """
    half = sum_columns(terms, (before.to(tl.float32) - 0.5).to(tl.bfloat16), PRECISION)
    read_decay, write_decay = tl.exp2(half), tl.exp2(-half)
    reads, writes = (query * read_decay).to(DTYPE), (write * write_decay).to(DTYPE)
    read_grads = edge_decay[:, None] * grad_in + matmul(writes, tl.trans(score), PRECISION)
    grad_query = read_decay * read_grads + diagonal * write
    products = reads.to(tl.float32) * read_grads
    write_grads = matmul(reads, score, PRECISION)
    grad_key = tl.zeros(query.shape, tl.float32)
    if CORRECTS:
        reads = (key_rows * read_decay).to(DTYPE)
        read_grads = edge_decay[:, None] * grad_key_in + matmul(writes, tl.trans(correction), PRECISION)
        grad_key = read_decay * read_grads
        products += reads.to(tl.float32) * read_grads
        write_grads = matmul(reads, correction, PRECISION, write_grads)
    products -= writes.to(tl.float32) * write_grads
    edge_grads = edge_decay[:, None] * grad_out
    grad_write = write_decay * (edge_grads + write_grads) + diagonal * query
    grad_decay = matmul((writes.to(tl.float32) * edge_grads).to(DTYPE), after.to(DTYPE), PRECISION)
    grad_decay = sum_columns(split_into_bf16(products, DTYPE), tl.trans(before), PRECISION, grad_decay)
    return grad_query, grad_key, grad_write, grad_decay
