// Differentiates the tokens of tiles, like `tile_gradients` in triton/gradients.py (see there).

#include "cells.cuh"

constexpr int ORDERS = CHANNEL_LANES < 4 ? CHANNEL_LANES : 4, GROUPS = CHUNK / TOKENS;

struct SharedMemory {
    float queries[2][CHUNK][ORDERS][P], keys[2][CHUNK][ORDERS][P];
    float4 values[2][CHUNK][BLOCK];  // value, precision, gradients of mean and variance of the read-out
    float means[GROUPS][THREADS][CELLS], vars[GROUPS][THREADS][CELLS];  // belief before each group of tokens
    float sums[2][TOKENS][WARPS][2][P];  // over the channels of a warp: gradients of queries and keys
};

// Number of threads, and bytes of shared memory.
extern "C" __device__ int REQUIREMENTS[] = {THREADS, sizeof(SharedMemory)};

template <bool is_full>
struct Full {
    static constexpr bool value = is_full;
};

INLINE int order() { return channel_lane() % ORDERS; }

// Sums over the channels of a warp, and stores the sums.
INLINE void sum_over_channels(float (&dest)[2][P], const Cells& left, const Cells& right) {
    const int slot = CELLS * slot_lane();
    if constexpr (ORDERS == 1) {
        store_shared(dest[0] + slot, left);
        store_shared(dest[1] + slot, right);
    } else {
        float x[2][2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            x[0][i] = left.x[2 * i] + swap(left.x[2 * i + 1], SLOT_LANES);
            x[1][i] = right.x[2 * i] + swap(right.x[2 * i + 1], SLOT_LANES);
        }
        if constexpr (ORDERS == 2) {
#pragma unroll
            for (int i = 0; i < 4; ++i) dest[i / 2][slot + (2 * (i % 2) ^ order())] = x[i / 2][i % 2];
        } else {
            const float first = x[0][0] + swap(x[0][1], 2 * SLOT_LANES);
            const float second = x[1][0] + swap(x[1][1], 2 * SLOT_LANES);
            if constexpr (CHANNEL_LANES == 4) {
                dest[0][slot + order()] = first;
                dest[1][slot + order()] = second;
            } else {
                dest[channel_lane() / 4][slot + order()] = exchange(first, second, 4 * SLOT_LANES);
            }
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 8 / WARPS) backward(
    const Storage<Q_TYPE>::Type* q, const Storage<Q_TYPE>::Type* k, const Storage<V_TYPE>::Type* v,
    const Storage<W_TYPE>::Type* precision, const float* log_decay, const float* noise, const float* stored,
    float* grad_exits, const float* grad_final_mean, const float* grad_final_var,
    const Storage<V_TYPE>::Type* grad_mean, const float* grad_var, Storage<V_TYPE>::Type* dv,
    Storage<W_TYPE>::Type* dprecision, float* dqk, float* grad_prior_mean, float* grad_prior_var,
    const int64* tile_table, int64 length, int64 size, int64 tiles, int64 splits, int64 tokens, int64 q_head,
    int64 k_head, int64 v_head, int64 p_head, int64 gm_head, int64 gv_head, int64 mean_n, int64 mean_g, int64 mean_k,
    int64 mean_v, int64 var_n, int64 var_g, int64 var_k, int64 var_v, int64 group) {
    extern __shared__ float4 memory[];
    SharedMemory& shared = *reinterpret_cast<SharedMemory*>(memory);
    const int64 head = blockIdx.y, split = blockIdx.x % splits;
    const int slot = CELLS * slot_lane();
    const Tile tile = locate_tile(tile_table, blockIdx.x / splits, length, size, tiles);
    const int64 plane = static_cast<int64>(G) * V * P;
    const int chunks = (tile.count + CHUNK - 1) / CHUNK;
    int buffer = 0, sum_buffer = 0;

    for (int first = split * BLOCK; first < V; first += splits * BLOCK) {
        const int channel = first + block_channel(), load_channel = first + threadIdx.x % BLOCK;
        SlotSignal<Q_TYPE, Q_TOKEN> queries{q + tile.token * Q_TOKEN + head / group * q_head};
        SlotSignal<Q_TYPE, K_TOKEN> keys{k + tile.token * K_TOKEN + head / group * k_head};
        ChannelSignal<V_TYPE, V_TOKEN> values{v + tile.token * V_TOKEN + head * v_head + load_channel};
        ChannelSignal<W_TYPE, P_TOKEN> weights{precision + tile.token * P_TOKEN + head * p_head + load_channel};
        ChannelSignal<V_TYPE, GM_TOKEN> grads{grad_mean + tile.token * GM_TOKEN + head * gm_head + load_channel};
        ChannelSignal<0, GV_TOKEN> var_grads{grad_var};
        if (VARIANCE) var_grads.base += tile.token * GV_TOKEN + head * gv_head + load_channel;
        const int64 cell = (head * V + channel) * P + slot;
        Cells next_mean, next_var;
        const auto load = [&](int chunk) {
            const int start = chunk * CHUNK, count = tile.count - start;
            queries.load(start, count);
            keys.load(start, count);
            values.load(start, count, load_channel < V);
            weights.load(start, count, load_channel < V);
            grads.load(start, count, load_channel < V);
            if (VARIANCE) var_grads.load(start, count, load_channel < V);
            const float* belief = stored + (tile.stored + chunk) * 2 * plane + cell;
#pragma unroll
            for (int r = 0; r < CELLS; ++r) {
                next_mean.x[r] = channel < V ? belief[r ^ order()] : 0.0f;
                next_var.x[r] = channel < V ? belief[plane + (r ^ order())] : 0.0f;
            }
        };
        if (chunks) load(chunks - 1);
        const Dynamics dynamics = load_dynamics(log_decay, noise, head, channel, order());
        Cells gm, gs, grad_noise, mean_part, var_part;  // gm and gs: gradients of the belief after a token
#pragma unroll
        for (int r = 0; r < CELLS; ++r) {
            const int at = slot + (r ^ order());
            gm.x[r] = gs.x[r] = grad_noise.x[r] = mean_part.x[r] = var_part.x[r] = 0.0f;
            if (SINGLE) {
                if (tile.count && channel < V && at < K) {
                    gm.x[r] = grad_final_mean[tile.sequence * mean_n + head * mean_g + at * mean_k + channel * mean_v];
                    gs.x[r] = grad_final_var[tile.sequence * var_n + head * var_g + at * var_k + channel * var_v];
                }
            } else if (channel < V && tile.count) {
                gm.x[r] = grad_exits[tile.index * 2 * plane + cell + (r ^ order())];
                gs.x[r] = grad_exits[(tile.index * 2 + 1) * plane + cell + (r ^ order())];
            }
        }
        const int64 output = (tile.token * G + head) * V + channel;
        const bool accumulate = first > split * BLOCK;

        for (int chunk = chunks - 1; chunk >= 0; --chunk) {
            queries.store<ORDERS>(shared.queries[buffer]);
            keys.store<ORDERS>(shared.keys[buffer]);
#pragma unroll
            for (int i = 0; i < CHANNEL_LOADS; ++i)
                shared.values[buffer][threadIdx.x / BLOCK + i * STEP][threadIdx.x % BLOCK] =
                    make_float4(values.get(i), weights.get(i), grads.get(i), VARIANCE ? var_grads.get(i) : 0.0f);
            Cells mean = next_mean, var = next_var;
            __syncthreads();
            if (chunk) load(chunk - 1);
            const int start = chunk * CHUNK, count = tile.count - start < CHUNK ? tile.count - start : CHUNK;
            const int groups = (count + TOKENS - 1) / TOKENS;
            const auto key_of = [&](int t) { return load_shared(shared.keys[buffer][t][order()] + slot); };
            const auto values_of = [&](int t) { return shared.values[buffer][t][block_channel()]; };

            // Store the belief before each group.
            for (int g = 0; g < groups - 1; ++g) {
                store_shared(shared.means[g][threadIdx.x], mean);
                store_shared(shared.vars[g][threadIdx.x], var);
#pragma unroll
                for (int i = 0; i < TOKENS; ++i) {
                    const Cells key = key_of(g * TOKENS + i);
                    const float4 value = values_of(g * TOKENS + i);
#pragma unroll
                    for (int r = 0; r < CELLS; ++r)
                        filter_cell(mean.x[r], var.x[r], key.x[r], value.x, value.y, dynamics.decay.x[r],
                                    dynamics.squared_decay.x[r], dynamics.noise.x[r]);
                }
            }
            const auto differentiate = [&](int g, auto full, int in_group) {
                const int group_start = g * TOKENS;
                Cells means[TOKENS], vars[TOKENS], shrinkages[TOKENS];
                const Cells first_mean = mean, first_var = var;
#pragma unroll
                for (int i = 0; i < TOKENS; ++i) {
                    if (decltype(full)::value || i < in_group) {
                        const Cells key = key_of(group_start + i);
                        const float4 value = values_of(group_start + i);
#pragma unroll
                        for (int r = 0; r < CELLS; ++r)
                            shrinkages[i].x[r] =
                                filter_cell(mean.x[r], var.x[r], key.x[r], value.x, value.y, dynamics.decay.x[r],
                                            dynamics.squared_decay.x[r], dynamics.noise.x[r]);
                        means[i] = mean, vars[i] = var;
                    }
                }
#pragma unroll
                for (int i = TOKENS - 1; i >= 0; --i) {
                    if (!decltype(full)::value && i >= in_group) continue;
                    const int t = group_start + i;
                    const Cells query = load_shared(shared.queries[buffer][t][order()] + slot), key = key_of(t);
                    const float4 value = values_of(t);
                    const Cells& previous_mean = i ? means[i ? i - 1 : 0] : first_mean;
                    const Cells& previous_var = i ? vars[i ? i - 1 : 0] : first_var;
                    Cells dquery, dkey;
                    float dvalue = 0.0f, dweight = 0.0f;
#pragma unroll
                    for (int r = 0; r < CELLS; ++r) {
                        const float posterior_mean = means[i].x[r], posterior = vars[i].x[r];
                        const float shrinkage = shrinkages[i].x[r], decay = dynamics.decay.x[r];
                        const float grad = fmaf(query.x[r], value.z, gm.x[r]);
                        dquery.x[r] = value.z * posterior_mean;
                        float grad_posterior = gs.x[r];
                        if (VARIANCE) {
                            const float weighted = query.x[r] * value.w;
                            grad_posterior = fmaf(query.x[r], weighted, grad_posterior);
                            dquery.x[r] = fmaf(2.0f * weighted, posterior, dquery.x[r]);
                        }
                        // In terms of the information 1 / posterior and of posterior_mean / posterior, to which the
                        // token adds key^2 weight and key weight value.
                        const float grad_predicted_mean = grad * shrinkage;
                        const float error_grad =
                            grad_predicted_mean * fmaf(-key.x[r], decay * previous_mean.x[r], value.x);
                        const float scaled = posterior * grad_posterior;
                        const float change = fmaf(-key.x[r], scaled, error_grad), gain = key.x[r] * posterior;
                        dvalue = fmaf(gain, grad, dvalue);
                        dweight = fmaf(gain, change, dweight);
                        dkey.x[r] =
                            value.y * posterior * fmaf(-key.x[r], fmaf(grad, posterior_mean, scaled), change);
                        const float grad_predicted =
                            shrinkage * fmaf(key.x[r] * value.y, error_grad, shrinkage * grad_posterior);
                        grad_noise.x[r] += grad_predicted;
                        gm.x[r] = decay * grad_predicted_mean;
                        gs.x[r] = dynamics.squared_decay.x[r] * grad_predicted;
                        mean_part.x[r] = fmaf(previous_mean.x[r], gm.x[r], mean_part.x[r]);
                        var_part.x[r] = fmaf(previous_var.x[r], gs.x[r], var_part.x[r]);
                    }
                    sum_over_channels(shared.sums[sum_buffer][i][warp()], dquery, dkey);
                    float sum = exchange(dvalue, dweight, 1);
#pragma unroll
                    for (int distance = 2; distance < SLOT_LANES; distance *= 2) sum += swap(sum, distance);
                    const int64 at = output + static_cast<int64>(start + t) * (G * V);
                    if (slot_lane() == 0 && channel < V) dv[at] = from_float<V_TYPE>(value.y * sum);
                    if (slot_lane() == 1 && channel < V) dprecision[at] = from_float<W_TYPE>(sum);
                }
                __syncthreads();
                for (int i = warp(); i < in_group; i += WARPS) {  // sum a token over warps
                    const int64 row = split * tokens + tile.token + start + group_start + i;
                    float* dest = dqk + (row * G + head) * 2 * K;
#pragma unroll
                    for (int at = lane(); at < 2 * P; at += 32) {
                        const int which = at / P, index = at % P;
                        if (index < K) {
                            float sum = accumulate ? dest[which * K + index] : 0.0f;
#pragma unroll
                            for (int w = 0; w < WARPS; ++w)
                                sum += shared.sums[sum_buffer][i][w][which][index];
                            dest[which * K + index] = sum;
                        }
                    }
                }
                sum_buffer ^= 1;
            };
            for (int g = groups - 1; g >= 0; --g) {
                if (g < groups - 1) {
                    mean = load_shared(shared.means[g][threadIdx.x]);
                    var = load_shared(shared.vars[g][threadIdx.x]);
                }
                const int in_group = count - g * TOKENS;
                if (!RAGGED || in_group >= TOKENS)
                    differentiate(g, Full<true>(), TOKENS);
                else
                    differentiate(g, Full<false>(), in_group);
            }
            buffer ^= 1;
        }
#pragma unroll
        for (int r = 0; r < CELLS; ++r) {
            const int at = slot + (r ^ order());
            if (channel < V) {
                grad_exits[tile.index * 2 * plane + cell + (r ^ order())] = fmaf(2.0f, var_part.x[r], mean_part.x[r]);
                grad_exits[(tile.index * 2 + 1) * plane + cell + (r ^ order())] = grad_noise.x[r];
            }
            if (SINGLE && tile.count && channel < V && at < K) {
                const int64 to = ((tile.sequence * G + head) * K + at) * V + channel;
                grad_prior_mean[to] = gm.x[r];
                grad_prior_var[to] = gs.x[r];
            }
        }
    }
}
