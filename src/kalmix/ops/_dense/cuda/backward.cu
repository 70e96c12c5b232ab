// Steps the adjoint of the covariance of `dense` from the last tile to the first, like `_backward_scan` in
// triton/backward.py (see there).

#include "fragments.cuh"

struct SharedMemory {
    Signals exit_gains[2];                                // of the current and the next tile
    Rows keys, grad_cov_keys, queries[VARIANCE ? 2 : 1];  // contributions of the last tile, transposed
    PrefetchBuffer partial_sums[WARPS][2];                // of exit_gain adjoint_gain', one per warp
    Flag result;                                          // raised when `half` is stored
    PrefetchBuffer half[2];                               // half the sum over warps
    struct {
        PrefetchBuffer exit_gain[2], queries[2], key[2], tile_terms[2], total_decay;
    } prefetched[WARPS];
};

// Number of threads, and bytes of shared memory.
extern "C" __device__ int REQUIREMENTS[] = {THREADS, sizeof(SharedMemory)};

extern "C" __global__ void __launch_bounds__(THREADS, 1) backward(
    const float* keys, const float* exit_gains, const float* tile_terms, const float* queries, const float* grad_var,
    const float* tile_decays, const float* saved_cov, const float* grad_final_cov, float* adjoint_gains,
    float* adjoint_diags, float* adjoint_cov_diag,
    float* grad_prior, const long long* sequence_table, long long length, long long tiles, long long G) {
    extern __shared__ uint4 memory[];
    SharedMemory& shared = *reinterpret_cast<SharedMemory*>(memory);
    constexpr int TILES_PER_CHUNK = CHUNK / TILE;
    const int sequence = blockIdx.x, head = blockIdx.y;
    const SequenceSpan span = sequence_span(sequence_table, sequence, length, tiles);
    const int num_tiles = (span.count + TILE - 1) / TILE;
    const auto slot = [&](int tile_index) { return (span.tile * TILES_PER_CHUNK + tile_index) * G + head; };

    if (threadIdx.x == 0) shared.result.reset();
    __syncthreads();
    if (warp() >= WARPS) {  // the assistant warp sums over warps
        release_registers<72>();
        if (warp() > WARPS) return;
        for (int tile_index = 0; tile_index < num_tiles; ++tile_index) {
            wait<PARTIAL_SUMS, ACTIVE>();
            Fragment sum = sum_over_warps(shared.partial_sums);
#pragma unroll
            for (int n = 0; n < 8; ++n) sum.x[n] *= 0.5f;
            store_shared(shared.half, sum);
            shared.result.raise();
        }
        return;
    }

    acquire_registers<216>();
    const int first_row = 16 * warp();  // first row of this warp
    auto& prefetched = shared.prefetched[warp()];
    const long long offset = (static_cast<long long>(sequence) * G + head) * (K * K);
    Fragment adjoint[FRAGMENTS];
#pragma unroll
    for (int m = 0; m < FRAGMENTS; ++m)
#pragma unroll
        for (int n = 0; n < 8; ++n) {
            const int i = first_row + row(n / 4), j = 16 * m + column() + n % 4;
            adjoint[m].x[n] = i < K && j < K ? grad_final_cov[offset + i * K + j] : 0.0f;
        }
    const auto prepare = [&](int tile_index) {  // prefetch the inputs of a tile
        if (tile_index > 0)
            prefetch(prefetched.exit_gain, exit_gains + slot(tile_index - 1) * (TILE * P) + first_row, P);
        if (tile_index >= 0) {
            if (VARIANCE) prefetch(prefetched.queries, queries + slot(tile_index) * (TILE * P) + first_row, P);
            prefetch(prefetched.key, keys + slot(tile_index) * (TILE * P) + first_row, P);
            prefetch(prefetched.tile_terms, tile_terms + slot(tile_index) * (TILE * P) + first_row, P);
            prefetch(prefetched.total_decay, tile_decays + slot(tile_index) * P + first_row);
        }
    };
    Split key{}, grad_cov_key{}, query{};  // this warp's rows of the last tile's contributions
    shared.keys.set(warp(), key), shared.grad_cov_keys.set(warp(), grad_cov_key);
    if (VARIANCE) shared.queries[num_tiles & 1].set(warp(), query);
    // Diagonal of adjoint times covariance; if PAIRED, also the numbers of each key with its partner.
    const auto store_diagonal_product = [&](int chunk) {
        const long long at = (span.tile + chunk) * G + head;
        const float* const source = saved_cov + at * (P * P) + first_row * P;
        float* const dest = adjoint_cov_diag + at * ((1 + PAIRED) * P) + first_row;
#pragma unroll
        for (int of_partners = 0; of_partners < 1 + PAIRED; ++of_partners) {
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                float sum = 0.0f;
#pragma unroll
                for (int m = 0; m < FRAGMENTS; ++m) {
                    const VectorFragment state = load_vector(source + (row(h) ^ of_partners) * P + 16 * m);
#pragma unroll
                    for (int n = 0; n < 4; ++n) sum += adjoint[m].x[4 * h + n] * state.x[n];
                }
                for (int distance = 1; distance < 4; distance *= 2) sum += __shfl_xor_sync(~0u, sum, distance);
                if (lane() % 4 == 0) dest[of_partners * P + row(h)] = sum;
            }
        }
    };
    const auto update = [&](int tile_index) {  // add the contributions of the tile after
        Fragment products[FRAGMENTS];
        Fragment next_query{};
        wgmma_fence();
        multiply_async(products, grad_cov_key, shared.keys, false);
        multiply_async(products, key, shared.grad_cov_keys, true);
        if (VARIANCE) multiply_async(products, query, shared.queries[VARIANCE ? (tile_index + 1) & 1 : 0], true);
        wgmma_commit();
        if (DECAY && tile_index + 2 < num_tiles && (tile_index + 2) % TILES_PER_CHUNK == 0)
            store_diagonal_product((tile_index + 2) / TILES_PER_CHUNK);
        if (tile_index + 1 < num_tiles) decay_matrix(adjoint, tile_decays + slot(tile_index + 1) * P);
        prefetch_wait();
        shared.exit_gains[(tile_index - 1) & 1].set(warp(), split(load_shared(prefetched.exit_gain)));
        if (VARIANCE && tile_index >= 0) {
            next_query = transpose(load_shared(prefetched.queries));
            shared.queries[VARIANCE ? tile_index & 1 : 0].set(warp(), split(next_query));
#pragma unroll
            for (int n = 0; n < 8; ++n) {
                const int t = tile_index * TILE + column() + n % 4;
                next_query.x[n] *= t < span.count ? grad_var[(span.token + t) * G + head] : 0.0f;
            }
        }
        wgmma_wait<0>();
        pin_registers(next_query);
        query = split(next_query);
#pragma unroll
        for (int m = 0; m < FRAGMENTS; ++m) pin_registers(products[m]), add(adjoint[m], products[m]);
    };
    if (num_tiles) {
        const float* first = exit_gains + slot(num_tiles - 1) * (TILE * P) + first_row;
        shared.exit_gains[(num_tiles - 1) & 1].set(warp(), split(load(first, P)));
    }
    prepare(num_tiles - 1);
    fence_shared();
    wait<UPDATES_STORED, LANES * WARPS>();
    for (int tile_index = num_tiles - 1; tile_index >= 0; --tile_index) {
        const auto& exit_gain = shared.exit_gains[tile_index % 2];
        update(tile_index);
        const Fragment adjoint_gain = transpose(project(adjoint, exit_gain));  // one row per token
        store_shared(shared.partial_sums[warp()], product(split(adjoint_gain), exit_gain.get(warp())));
        arrive<PARTIAL_SUMS, ACTIVE>();

        const long long base = slot(tile_index) * (TILE * P);
        store(adjoint_gains + base + first_row, P, adjoint_gain);
#pragma unroll
        for (int m = 0; m < FRAGMENTS; ++m)
            if (on_diagonal(m)) {
#pragma unroll
                for (int n = 0; n < 8; ++n) {
                    float* const dest = adjoint_diags + slot(tile_index) * ((1 + PAIRED) * P) + first_row + row(n / 4);
                    if (on_diagonal(m, n)) dest[0] = adjoint[m].x[n];
                    if (PAIRED && of_partners(m, n)) dest[P] = adjoint[m].x[n];
                }
            }
        const VectorFragment total_decay = load_shared(prefetched.total_decay);
        Fragment term = load_shared(prefetched.tile_terms);
#pragma unroll
        for (int n = 0; n < 8; ++n) term.x[n] -= adjoint_gain.x[n] * total_decay.x[n % 4];
        term = transpose(term);
        key = split(transpose(load_shared(prefetched.key)));
        prepare(tile_index - 1);
        shared.result.wait(num_tiles - 1 - tile_index);
        add(term, product(key, split(load_shared(shared.half))));
        grad_cov_key = split(term);
        shared.keys.set(warp(), key), shared.grad_cov_keys.set(warp(), grad_cov_key);
        fence_shared();
        wait<UPDATES_STORED, LANES * WARPS>();
    }
    update(-1);
    if (DECAY && num_tiles) store_diagonal_product(0);
#pragma unroll
    for (int m = 0; m < FRAGMENTS; ++m)
#pragma unroll
        for (int n = 0; n < 8; ++n) {
            const int i = first_row + row(n / 4), j = 16 * m + column() + n % 4;
            if (i < K && j < K) grad_prior[offset + i * K + j] = adjoint[m].x[n];
        }
}
