// Layout and loads of the kernels of `diagonal` on Hopper.
//
// A block has BLOCK channels with all their slots, and steps through the tokens of a tile. A lane holds 4 slots of a
// channel in registers. All signals of a chunk of tokens are loaded one chunk ahead, and stored in shared memory in
// float32.
//
// The lanes of 2 (or 4) adjacent channels hold their 4 slots in different orders: register r of lane l has slot
// 4 (l % SLOT_LANES) + (r ^ order(l)). So a sum over these channels that leaves one slot per lane needs no selects.

constexpr int THREADS = 32 * WARPS, CELLS = 4;
constexpr int SLOT_LANES = P / CELLS, CHANNEL_LANES = 32 / SLOT_LANES, BLOCK = WARPS * CHANNEL_LANES;
constexpr int STEP = THREADS / BLOCK;  // tokens whose channels the block loads at once
constexpr int CHANNEL_LOADS = CHUNK / STEP, SLOT_LOADS = CHUNK * P / THREADS;

static_assert(SLOT_LANES >= 4 && SLOT_LANES <= 32, "from 16 to 128 slots");

#define INLINE __device__ __forceinline__

typedef long long int64;

INLINE int lane() { return threadIdx.x % 32; }
INLINE int warp() { return threadIdx.x / 32; }
INLINE int slot_lane() { return lane() % SLOT_LANES; }
INLINE int channel_lane() { return lane() / SLOT_LANES; }
INLINE int block_channel() { return warp() * CHANNEL_LANES + channel_lane(); }  // in the block

template <int type>
struct Storage;  // of float32 (0), bfloat16 (1) and float16 (2)
template <>
struct Storage<0> {
    typedef float Type;
};
template <>
struct Storage<1> {
    typedef unsigned short Type;
};
template <>
struct Storage<2> {
    typedef unsigned short Type;
};

template <int type>
INLINE float to_float(typename Storage<type>::Type x) {
    if constexpr (type == 0) {
        return x;
    } else if constexpr (type == 1) {
        return __uint_as_float(static_cast<unsigned>(x) << 16);
    } else {
        float y;
        asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x));
        return y;
    }
}

template <int type>
INLINE typename Storage<type>::Type from_float(float x) {
    if constexpr (type == 0) {
        return x;
    } else {
        unsigned short y;
        if constexpr (type == 1)
            asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y) : "f"(x));
        else
            asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y) : "f"(x));
        return y;
    }
}

// Signal of one number per channel and token, of a tile and a block of channels; `stride` is the one between tokens.
template <int type, int64 stride>
struct ChannelSignal {
    typedef typename Storage<type>::Type Type;
    const Type* base;
    Type loaded[CHANNEL_LOADS];

    INLINE void load(int start, int count, bool real) {
        const Type* row = base + (start + threadIdx.x / BLOCK) * stride;
        if (real && count >= CHUNK) {
#pragma unroll
            for (int i = 0; i < CHANNEL_LOADS; ++i) loaded[i] = row[i * STEP * stride];
        } else {
#pragma unroll
            for (int i = 0; i < CHANNEL_LOADS; ++i)
                loaded[i] = real && static_cast<int>(threadIdx.x) / BLOCK + i * STEP < count ? row[i * STEP * stride]
                                                                                            : Type(0);
        }
    }

    INLINE float get(int i) const { return to_float<type>(loaded[i]); }
};

// Signal of one number per slot and token: queries or keys.
template <int type, int64 stride>
struct SlotSignal {
    typedef typename Storage<type>::Type Type;
    const Type* base;
    Type loaded[SLOT_LOADS];

    INLINE void load(int start, int count) {
        const Type* row = base + (start + threadIdx.x / P) * stride + threadIdx.x % P;
        const bool real = threadIdx.x % P < K;
        if (real && count >= CHUNK) {
#pragma unroll
            for (int i = 0; i < SLOT_LOADS; ++i) loaded[i] = row[i * (THREADS / P) * stride];
        } else {
#pragma unroll
            for (int i = 0; i < SLOT_LOADS; ++i)
                loaded[i] = real && static_cast<int>(threadIdx.x) / P + i * (THREADS / P) < count
                                ? row[i * (THREADS / P) * stride]
                                : Type(0);
        }
    }

    // Stores the slots of a token in each of `orders` orders.
    template <int orders>
    INLINE void store(float (&dest)[CHUNK][orders][P]) const {
#pragma unroll
        for (int i = 0; i < SLOT_LOADS; ++i) {
            const int at = threadIdx.x + i * THREADS, t = at / P, slot = at % P;
#pragma unroll
            for (int order = 0; order < orders; ++order) dest[t][order][slot ^ order] = to_float<type>(loaded[i]);
        }
    }
};

struct Tile {
    int64 index, sequence, token, stored;  // `stored`: index of its first stored belief
    int count;
    bool first, last;
};

INLINE Tile locate_tile(const int64* table, int64 index, int64 length, int64 size, int64 tiles) {
#if PACKED
    const int64* row = table + 5 * index;
    return {index, row[0], row[1], row[4], static_cast<int>(row[2]), (row[3] & 1) != 0, (row[3] & 2) != 0};
#else
    const int64 sequence = index / tiles, first = index % tiles * size, rest = length - first;
    return {index, sequence, sequence * length + first, sequence * ((length + CHUNK - 1) / CHUNK) + first / CHUNK,
            static_cast<int>(rest < size ? rest : size), first == 0, rest <= size};
#endif
}

INLINE float reciprocal(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

struct Cells {
    float x[CELLS];
};

INLINE Cells load_shared(const float* source) {
    const float4 values = *reinterpret_cast<const float4*>(source);
    return {values.x, values.y, values.z, values.w};
}

INLINE void store_shared(float* dest, const Cells& cells) {
    *reinterpret_cast<float4*>(dest) = make_float4(cells.x[0], cells.x[1], cells.x[2], cells.x[3]);
}

INLINE float swap(float x, int distance) { return __shfl_xor_sync(0xffffffff, x, distance); }

// Returns the sum over two lanes at `distance` of `left` in the lower lane, and of `right` in the upper.
INLINE float exchange(float left, float right, int distance) {
    const bool upper = lane() & distance;
    return (upper ? right : left) + swap(upper ? left : right, distance);
}

struct Dynamics {
    Cells decay, squared_decay, noise;
};

INLINE Dynamics load_dynamics(const float* log_decay, const float* noise, int64 head, int channel, int order) {
    Dynamics result;
#pragma unroll
    for (int r = 0; r < CELLS; ++r) {
        const int slot = CELLS * slot_lane() + (r ^ order);
        const bool inside = channel < V && slot < K;
        const int64 at = (head * K + slot) * V + channel;
        result.decay.x[r] = expf(inside ? log_decay[at] : 0.0f);
        result.squared_decay.x[r] = result.decay.x[r] * result.decay.x[r];
        result.noise.x[r] = inside ? noise[at] : 0.0f;
    }
    return result;
}

// Predicts and updates by one token (equations 16 and 20 of Kalman Linear Attention, in moments).
INLINE float filter_cell(float& mean, float& var, float key, float value, float weight, float decay,
                         float squared_decay, float noise) {
    const float predicted = fmaf(squared_decay, var, noise), weighted_key = key * weight;
    const float shrinkage = reciprocal(fmaf(key * weighted_key, predicted, 1.0f)), predicted_mean = decay * mean;
    var = predicted * shrinkage;
    mean = fmaf(var, weighted_key * fmaf(-key, predicted_mean, value), predicted_mean);
    return shrinkage;
}
