// Filters the tokens of tiles, like `_read_out` in triton/forward.py (see there).

#include "cells.cuh"

struct SharedMemory {
    float queries[2][CHUNK][1][P], keys[2][CHUNK][1][P];
    float2 values[2][CHUNK][BLOCK];  // value, precision
};

// Number of threads, and bytes of shared memory.
extern "C" __device__ int REQUIREMENTS[] = {THREADS, sizeof(SharedMemory)};

constexpr int GROUP = 4;  // tokens whose read-outs are summed over lanes at once

// Sums 4 numbers per lane over the lanes of a channel; returns number `slot_lane() % 4`.
INLINE float sum_of_four(const float (&x)[GROUP]) {
    float sum = exchange(exchange(x[0], x[1], 1), exchange(x[2], x[3], 1), 2);
#pragma unroll
    for (int distance = 4; distance < SLOT_LANES; distance *= 2) sum += swap(sum, distance);
    return sum;
}

extern "C" __global__ void __launch_bounds__(THREADS, 16 / WARPS) forward(
    const Storage<Q_TYPE>::Type* q, const Storage<Q_TYPE>::Type* k, const Storage<V_TYPE>::Type* v,
    const Storage<W_TYPE>::Type* precision, const float* log_decay, const float* noise, const float* prior_mean,
    const float* prior_var, const float* entries, Storage<V_TYPE>::Type* read_mean, float* read_var,
    float* final_mean, float* final_var, float* stored, const int64* tile_table, int64 length, int64 size, int64 tiles,
    int64 q_head, int64 k_head, int64 v_head, int64 p_head, int64 mean_n, int64 mean_g,
    int64 mean_k, int64 mean_v, int64 var_n, int64 var_g, int64 var_k, int64 var_v, int64 group) {
    extern __shared__ float4 memory[];
    SharedMemory& shared = *reinterpret_cast<SharedMemory*>(memory);
    constexpr int BLOCKS = (V + BLOCK - 1) / BLOCK;
    const int64 head = blockIdx.y;
    const int first = blockIdx.x % BLOCKS * BLOCK, channel = first + block_channel(), slot = CELLS * slot_lane();
    const Tile tile = locate_tile(tile_table, blockIdx.x / BLOCKS, length, size, tiles);
    const int load_channel = first + threadIdx.x % BLOCK;
    SlotSignal<Q_TYPE, Q_TOKEN> queries{q + tile.token * Q_TOKEN + head / group * q_head};
    SlotSignal<Q_TYPE, K_TOKEN> keys{k + tile.token * K_TOKEN + head / group * k_head};
    ChannelSignal<V_TYPE, V_TOKEN> values{v + tile.token * V_TOKEN + head * v_head + load_channel};
    ChannelSignal<W_TYPE, P_TOKEN> weights{precision + tile.token * P_TOKEN + head * p_head + load_channel};
    const auto load = [&](int start) {
        const int count = tile.count - start;
        queries.load(start, count);
        keys.load(start, count);
        values.load(start, count, load_channel < V);
        weights.load(start, count, load_channel < V);
    };
    load(0);
    const Dynamics dynamics = load_dynamics(log_decay, noise, head, channel, 0);
    Cells mean, var;
    const int64 plane = static_cast<int64>(G) * V * P, cell = (head * V + channel) * P + slot;
    const bool from_prior = SINGLE || tile.first;  // other tiles start from a result of `_scan_tiles`
    const float* entry = entries + tile.index * 2 * plane + cell;
    const int64 n = tile.sequence;
#pragma unroll
    for (int r = 0; r < CELLS; ++r) {
        mean.x[r] = var.x[r] = 0.0f;
        if (channel < V && slot + r < K && tile.count) {
            mean.x[r] = from_prior ? prior_mean[n * mean_n + head * mean_g + (slot + r) * mean_k + channel * mean_v]
                                   : entry[r];
            var.x[r] = from_prior ? prior_var[n * var_n + head * var_g + (slot + r) * var_k + channel * var_v]
                                  : entry[plane + r];
        }
    }
    float* to_stored = stored + tile.stored * 2 * plane + cell;
    const int64 output = (tile.token * G + head) * V + channel;

    for (int start = 0; start < tile.count; start += CHUNK) {
        const int buffer = start / CHUNK % 2;
        queries.store<1>(shared.queries[buffer]);
        keys.store<1>(shared.keys[buffer]);
#pragma unroll
        for (int i = 0; i < CHANNEL_LOADS; ++i)
            shared.values[buffer][threadIdx.x / BLOCK + i * STEP][threadIdx.x % BLOCK] =
                make_float2(values.get(i), weights.get(i));
        __syncthreads();
        if (start + CHUNK < tile.count) load(start + CHUNK);
        if (STORE && channel < V) {
            store_shared(to_stored, mean);
            store_shared(to_stored + plane, var);
        }
        to_stored += 2 * plane;
        const int count = tile.count - start < CHUNK ? tile.count - start : CHUNK;
        const auto filter = [&](int t, float& read, float& read_variance) {
            const Cells query = load_shared(shared.queries[buffer][t][0] + slot);
            const Cells key = load_shared(shared.keys[buffer][t][0] + slot);
            const float2 value = shared.values[buffer][t][block_channel()];
            read = read_variance = 0.0f;
#pragma unroll
            for (int r = 0; r < CELLS; ++r) {
                filter_cell(mean.x[r], var.x[r], key.x[r], value.x, value.y, dynamics.decay.x[r],
                            dynamics.squared_decay.x[r], dynamics.noise.x[r]);
                read = r ? fmaf(query.x[r], mean.x[r], read) : query.x[r] * mean.x[r];
                if (VARIANCE) read_variance = fmaf(query.x[r] * query.x[r], var.x[r], read_variance);
            }
        };
        const auto write = [&](int t, int tokens, const float(&read)[GROUP], const float(&read_variance)[GROUP]) {
            const int64 at = output + static_cast<int64>(start + t + slot_lane()) * (G * V);
            const bool writes = slot_lane() < tokens && channel < V;
            const float sum = sum_of_four(read);
            if (writes) read_mean[at] = from_float<V_TYPE>(sum);
            if (VARIANCE) {
                const float variance = sum_of_four(read_variance);
                if (writes) read_var[at] = variance;
            }
        };
        int t = 0;
        float read[GROUP], read_variance[GROUP];
#pragma unroll 2
        for (; t + GROUP <= count; t += GROUP) {
#pragma unroll
            for (int i = 0; i < GROUP; ++i) filter(t + i, read[i], read_variance[i]);
            write(t, GROUP, read, read_variance);
        }
        if (RAGGED && t < count) {
#pragma unroll
            for (int i = 0; i < GROUP; ++i) {
                read[i] = read_variance[i] = 0.0f;
                if (t + i < count) filter(t + i, read[i], read_variance[i]);
            }
            write(t, count - t, read, read_variance);
        }
    }
    if (tile.last) {
#pragma unroll
        for (int r = 0; r < CELLS; ++r) {
            const int64 at = ((tile.sequence * G + head) * K + slot + r) * V + channel;
            if (channel < V && slot + r < K) final_mean[at] = mean.x[r], final_var[at] = var.x[r];
        }
    }
}
