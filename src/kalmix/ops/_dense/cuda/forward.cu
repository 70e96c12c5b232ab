// Steps the covariance of `dense` from tile to tile, like `_forward_scan` in triton/forward.py (see there).

#include "fragments.cuh"

struct SharedMemory {
    Signals keys[2], queries[1 + VARIANCE];  // of the current and the next tile
    Rows updates;                            // of the last tile
    PrefetchBuffer partial_sums[WARPS][2];   // of C, one per warp
    float square[SQUARE];                    // C, then L^-1
    Flag result;                             // raised when L^-1 is stored
    struct {
        PrefetchBuffer key[2], query[2], noise[2], total_decay, added_noise, added_pair_noise;
    } prefetched[WARPS];
};

// Number of threads, and bytes of shared memory.
extern "C" __device__ int REQUIREMENTS[] = {THREADS, sizeof(SharedMemory)};

INLINE float inverse(float x) {
    float result;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
    return result;
}

INLINE float inverse_root(float x) {
    float estimate;
    asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(estimate) : "f"(x));
    return estimate + 0.5f * estimate * (1.0f - x * estimate * estimate);
}

// Replaces C = L L' by L^-1, eliminating two columns at a time; pivots are at least `floor`. A lane holds a column of
// C, or of the identity next to it, which becomes L^-1.
INLINE void invert_cholesky(float* square, float floor) {
    const int own_column = threadIdx.x % TILE;
    const bool in_identity = threadIdx.x / TILE % 2;
    float x[TILE];
    __syncwarp();
#pragma unroll
    for (int i = 0; i < TILE; ++i) x[i] = in_identity ? (i == own_column ? 1.0f : 0.0f) : square[i * TILE + own_column];
#pragma unroll
    for (int j = 0; j < TILE; j += 2) {
        float a[TILE], b[TILE];
#pragma unroll
        for (int i = j; i < TILE; ++i) a[i] = __shfl_sync(~0u, x[i], j), b[i] = __shfl_sync(~0u, x[i], j + 1);
        const float pivot = fmaxf(a[j], floor), scale = inverse(pivot);
#pragma unroll
        for (int i = j + 1; i < TILE; ++i) a[i] *= scale, b[i] -= a[i] * b[j], x[i] -= a[i] * x[j];
        const float next_pivot = fmaxf(b[j + 1], floor), next = inverse(next_pivot);
#pragma unroll
        for (int i = j + 2; i < TILE; ++i) x[i] -= b[i] * next * x[j + 1];
        x[j] *= inverse_root(pivot), x[j + 1] *= inverse_root(next_pivot);
    }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < TILE; ++i)
        if (in_identity) square[i * TILE + own_column] = x[i];
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) forward(
    const float* obs_noise, const float* keys, const float* queries, const float* noise_keys, float* innovation_cov,
    const float* tile_decays, const float* covariance, float* cov_keys, float* cov_queries, float* saved_cov,
    float* final_cov,
    const long long* sequence_table, long long length, long long tiles, long long n_stride, long long g_stride,
    long long i_stride, long long j_stride, long long G) {
    extern __shared__ uint4 memory[];
    SharedMemory& shared = *reinterpret_cast<SharedMemory*>(memory);
    constexpr int TILES_PER_CHUNK = CHUNK / TILE, DECAYS = (2 + PAIRED) * P;  // decays and noises of a tile
    const int sequence = blockIdx.x, head = blockIdx.y;
    const SequenceSpan span = sequence_span(sequence_table, sequence, length, tiles);
    const int num_tiles = (span.count + TILE - 1) / TILE;
    const auto slot = [&](int tile_index) { return (span.tile * TILES_PER_CHUNK + tile_index) * G + head; };

    if (threadIdx.x == 0) shared.result.reset();
    __syncthreads();
    if (warp() >= WARPS) {  // the assistant warp factors C
        release_registers<72>();
        if (warp() > WARPS) return;
        const auto load_obs_noise = [&](int tile_index) {
            const int t = tile_index * TILE + lane() % TILE;
            return t < span.count ? obs_noise[(span.token + t) * G + head] : __int_as_float(0x7f800000);
        };
        Fragment noise_cov{};
        float floor = 0.0f;
        for (int tile_index = 0; tile_index < num_tiles; ++tile_index) {
            noise_cov = load(innovation_cov + slot(tile_index) * SQUARE, TILE), floor = load_obs_noise(tile_index);
            for (int distance = 8; distance; distance /= 2) floor = fminf(floor, __shfl_xor_sync(~0u, floor, distance));
            wait<PARTIAL_SUMS, ACTIVE>();
            Fragment C = sum_over_warps(shared.partial_sums);
            add(C, noise_cov);
            store(shared.square, TILE, C);
            invert_cholesky(shared.square, floor);
            shared.result.raise();
            __syncwarp();
            store(innovation_cov + slot(tile_index) * SQUARE, TILE, load(shared.square, TILE));
        }
        return;
    }

    acquire_registers<216>();  // together with the 72: all registers of three warp groups
    const int first_row = 16 * warp();  // first row of this warp
    auto& prefetched = shared.prefetched[warp()];
    Fragment state[FRAGMENTS];
    const float* source = covariance + sequence * n_stride + head * g_stride;
#pragma unroll
    for (int m = 0; m < FRAGMENTS; ++m)
#pragma unroll
        for (int n = 0; n < 8; ++n) {
            const int i = first_row + row(n / 4), j = 16 * m + column() + n % 4;
            state[m].x[n] = i < K && j < K ? source[i * i_stride + j * j_stride] : 0.0f;
        }
    const auto prepare = [&](int tile_index) {  // prefetch the inputs of a tile
        if (tile_index + 1 < num_tiles) {
            prefetch(prefetched.key, keys + slot(tile_index + 1) * (TILE * P) + first_row, P);
            if (VARIANCE) prefetch(prefetched.query, queries + slot(tile_index + 1) * (TILE * P) + first_row, P);
        }
        if (tile_index < num_tiles) {
            prefetch(prefetched.noise, noise_keys + slot(tile_index) * (TILE * P) + first_row, P);
            const float* const decays = tile_decays + slot(tile_index) * DECAYS + first_row;
            prefetch(prefetched.total_decay, decays);
            prefetch(prefetched.added_noise, decays + P);
            if (PAIRED) prefetch(prefetched.added_pair_noise, decays + 2 * P);
        }
    };
    const auto store_signals = [&](int tile_index, const Fragment& key, const Fragment& query) {
        shared.keys[tile_index % 2].set(warp(), split(key));
        if (VARIANCE) shared.queries[VARIANCE ? tile_index % 2 : 0].set(warp(), split(query));
    };
    Split tile_update{};  // this warp's rows of the last tile's update
    shared.updates.set(warp(), tile_update);
    if (num_tiles) {
        const long long base = slot(0) * (TILE * P) + first_row;
        store_signals(0, load(keys + base, P), VARIANCE ? load(queries + base, P) : Fragment{});
    }
    prepare(0);
    fence_shared();
    wait<UPDATES_STORED, LANES * WARPS>();
    VectorFragment added_noise{}, added_pair_noise{};
    const auto update = [&](int tile_index) {  // apply the update of the tile before
        Fragment products[FRAGMENTS];
        wgmma_fence();
        multiply_async(products, tile_update, shared.updates, false);
        wgmma_commit();
        if (tile_index) decay_matrix(state, tile_decays + slot(tile_index - 1) * DECAYS);
#pragma unroll
        for (int m = 0; m < FRAGMENTS; ++m)
#pragma unroll
            for (int n = 0; n < 8; ++n) {
                if (on_diagonal(m, n)) state[m].x[n] += added_noise.x[n % 4];
                if (PAIRED && of_partners(m, n)) state[m].x[n] += added_pair_noise.x[n % 4];
            }
        prefetch_wait();
        store_signals(tile_index + 1, load_shared(prefetched.key), load_shared(prefetched.query));
        wgmma_wait<0>();
#pragma unroll
        for (int m = 0; m < FRAGMENTS; ++m) pin_registers(products[m]), subtract(state[m], products[m]);
    };
    for (int tile_index = 0; tile_index < num_tiles; ++tile_index) {
        const auto& key = shared.keys[tile_index % 2];
        update(tile_index);
        Fragment cov_key_t = transpose(project(state, key));  // keys times state, one row per token
        store_shared(shared.partial_sums[warp()], product(split(cov_key_t), key.get(warp())));
        arrive<PARTIAL_SUMS, ACTIVE>();

        const long long base = slot(tile_index) * (TILE * P);
        store(cov_keys + base + first_row, P, cov_key_t);
        if (SAVE && tile_index % TILES_PER_CHUNK == 0) {
            const long long chunk = (span.tile + tile_index / TILES_PER_CHUNK) * G + head;
            float* const dest = saved_cov + chunk * (P * P) + first_row * P;
#pragma unroll
            for (int m = 0; m < FRAGMENTS; ++m) store(dest + 16 * m, P, state[m]);
        }
        if (VARIANCE) {
#pragma unroll
            for (int m = 0; m < FRAGMENTS; ++m) pin_registers(state[m]);  // split again: not all terms fit in registers
            store(cov_queries + base + first_row, P,
                  transpose(project(state, shared.queries[VARIANCE ? tile_index % 2 : 0])));
        }
        const Fragment noise_key = load_shared(prefetched.noise);
        const VectorFragment total_decay = load_shared(prefetched.total_decay);
        added_noise = load_shared(prefetched.added_noise);
        if (PAIRED) added_pair_noise = load_shared(prefetched.added_pair_noise);
#pragma unroll
        for (int n = 0; n < 8; ++n) cov_key_t.x[n] = cov_key_t.x[n] * total_decay.x[n % 4] + noise_key.x[n];
        const Split update_t = split(transpose(cov_key_t));
        prepare(tile_index + 1);
        shared.result.wait(tile_index);
        tile_update = split(product(update_t, split(load(shared.square, TILE))));
        shared.updates.set(warp(), tile_update);
        fence_shared();
        wait<UPDATES_STORED, LANES * WARPS>();
    }
    update(num_tiles);
    float* dest = final_cov + (static_cast<long long>(sequence) * G + head) * (K * K);
#pragma unroll
    for (int m = 0; m < FRAGMENTS; ++m) {
#pragma unroll
        for (int n = 0; n < 8; ++n) {
            const int i = first_row + row(n / 4), j = 16 * m + column() + n % 4;
            if (i < K && j < K) dest[i * K + j] = state[m].x[n];
        }
    }
}
