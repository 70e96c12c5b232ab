// The covariance of `dense` from block to block of tokens: what `_advance` in triton/forward.py does, which see.

#include "tiles.cuh"

struct Space {                               // shared memory
    Signals keys[2], queries[1 + VARIANCE];  // of this block of tokens, and the next
    Rows writes;                             // what the last one wrote
    Ahead summands[WARPS][2];                // of C
    float square[SQUARE];                    // C, and its root
    Flag result;                             // it is there
    struct {
        Ahead key[2], query[2], noise[2], reach, gained;
    } ahead[WARPS];
};

// Threads, and bytes of shared memory.
extern "C" __device__ int NEEDS[] = {THREADS, sizeof(Space)};

INLINE float inverse(float x) {
    float result;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
    return result;
}

INLINE float inverse_root(float x) {
    float guess;
    asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(guess) : "f"(x));
    return guess + 0.5f * guess * (1.0f - x * guess * guess);
}

// L^-1 of C = L L', in place, by elimination of two columns at a time; no pivot lies below `floor`. A lane has a column
// of C, or of the identity beside it, which becomes L^-1.
INLINE void invert_cholesky(float* square, float floor) {
    const int mine = threadIdx.x % BLOCK;
    const bool aside = threadIdx.x / BLOCK % 2;
    float x[BLOCK];
    __syncwarp();
#pragma unroll
    for (int i = 0; i < BLOCK; ++i) x[i] = aside ? (i == mine ? 1.0f : 0.0f) : square[i * BLOCK + mine];
#pragma unroll
    for (int j = 0; j < BLOCK; j += 2) {
        float a[BLOCK], b[BLOCK];
#pragma unroll
        for (int i = j; i < BLOCK; ++i) a[i] = __shfl_sync(~0u, x[i], j), b[i] = __shfl_sync(~0u, x[i], j + 1);
        const float above = fmaxf(a[j], floor), scale = inverse(above);
#pragma unroll
        for (int i = j + 1; i < BLOCK; ++i) a[i] *= scale, b[i] -= a[i] * b[j], x[i] -= a[i] * x[j];
        const float below = fmaxf(b[j + 1], floor), next = inverse(below);
#pragma unroll
        for (int i = j + 2; i < BLOCK; ++i) x[i] -= b[i] * next * x[j + 1];
        x[j] *= inverse_root(above), x[j + 1] *= inverse_root(below);
    }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < BLOCK; ++i)
        if (aside) square[i * BLOCK + mine] = x[i];
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) forward(
    const float* obs_noise, const float* keys, const float* queries, const float* noises, float* innovations,
    const float* edges, const float* covariance, float* projected, float* asked, float* kept, float* last,
    const long long* runs, long long length, long long tiles, long long n_stride, long long g_stride,
    long long i_stride, long long j_stride, long long G) {
    extern __shared__ uint4 memory[];
    Space& space = *reinterpret_cast<Space*>(memory);
    constexpr int WINDOWS = WINDOW / BLOCK;  // blocks in one
    const int sequence = blockIdx.x, head = blockIdx.y;
    const Run run = run_of(runs, sequence, length, tiles);
    const int blocks = (run.count + BLOCK - 1) / BLOCK;
    const auto slot = [&](int block) { return (run.tile * WINDOWS + block) * G + head; };

    if (threadIdx.x == 0) space.result.reset();
    __syncthreads();
    if (warp() >= WARPS) {  // the assistant
        give<72>();
        if (warp() > WARPS) return;
        const auto observed = [&](int block) {
            const int t = block * BLOCK + lane() % BLOCK;
            return t < run.count ? obs_noise[(run.token + t) * G + head] : __int_as_float(0x7f800000);
        };
        Tile own{};
        float floor = 0.0f;
        for (int block = 0; block < blocks; ++block) {
            own = load(innovations + slot(block) * SQUARE, BLOCK), floor = observed(block);
            for (int away = 8; away; away /= 2) floor = fminf(floor, __shfl_xor_sync(~0u, floor, away));
            wait<SUMMANDS, ACTIVE>();
            Tile C = gathered(space.summands);
            add(C, own);
            store(space.square, BLOCK, C);
            invert_cholesky(space.square, floor);
            space.result.raise();
            __syncwarp();
            store(innovations + slot(block) * SQUARE, BLOCK, load(space.square, BLOCK));
        }
        return;
    }

    take<216>();  // with the 72: all that three groups of warps have
    const int mine = 16 * warp();  // the first of this warp's rows
    auto& ahead = space.ahead[warp()];
    Tile state[TILES];
    const float* from = covariance + sequence * n_stride + head * g_stride;
#pragma unroll
    for (int m = 0; m < TILES; ++m)
#pragma unroll
        for (int n = 0; n < 8; ++n) {
            const int i = mine + row(n / 4), j = 16 * m + column() + n % 4;
            state[m].x[n] = i < K && j < K ? from[i * i_stride + j * j_stride] : 0.0f;
        }
    const auto prepare = [&](int block) {  // what is there when it enters
        if (block + 1 < blocks) {
            fetch(ahead.key, keys + slot(block + 1) * (BLOCK * P) + mine, P);
            if (VARIANCE) fetch(ahead.query, queries + slot(block + 1) * (BLOCK * P) + mine, P);
        }
        if (block < blocks) {
            fetch(ahead.noise, noises + slot(block) * (BLOCK * P) + mine, P);
            fetch(ahead.reach, edges + slot(block) * (2 * P) + mine);
            fetch(ahead.gained, edges + slot(block) * (2 * P) + P + mine);
        }
    };
    const auto announce = [&](int block, const Tile& key, const Tile& query) {
        space.keys[block % 2].set(warp(), split(key));
        if (VARIANCE) space.queries[VARIANCE ? block % 2 : 0].set(warp(), split(query));
    };
    Split write{};  // this warp's rows of what the last block wrote
    space.writes.set(warp(), write);
    if (blocks) {
        const long long base = slot(0) * (BLOCK * P) + mine;
        announce(0, load(keys + base, P), VARIANCE ? load(queries + base, P) : Tile{});
    }
    prepare(0);
    publish();
    wait<WRITTEN, LANES * WARPS>();
    Line gained{};
    const auto update = [&](int block) {  // by what the one before wrote
        Tile by[TILES];
        ready();
        start(by, write, space.writes, false);
        seal();
        if (block) fade(state, edges + slot(block - 1) * (2 * P));
#pragma unroll
        for (int m = 0; m < TILES; ++m)
#pragma unroll
            for (int n = 0; n < 8; ++n)
                if (on_diagonal(m, n)) state[m].x[n] += gained.x[n % 4];
        fetched();
        announce(block + 1, here(ahead.key), here(ahead.query));
        finished<0>();
#pragma unroll
        for (int m = 0; m < TILES; ++m) settle(by[m]), subtract(state[m], by[m]);
    };
    for (int block = 0; block < blocks; ++block) {
        const auto& key = space.keys[block % 2];
        update(block);
        Tile seen = turned(project(state, key));  // keys state, the tokens its rows
        leave(space.summands[warp()], product(split(seen), key.get(warp())));
        arrive<SUMMANDS, ACTIVE>();

        const long long base = slot(block) * (BLOCK * P);
        store(projected + base + mine, P, seen);
        if (KEEP && block % WINDOWS == 0) {
            float* const to = kept + ((run.tile + block / WINDOWS) * G + head) * (P * P) + mine * P;
#pragma unroll
            for (int m = 0; m < TILES; ++m) store(to + 16 * m, P, state[m]);
        }
        if (VARIANCE) {
#pragma unroll
            for (int m = 0; m < TILES; ++m) settle(state[m]);  // split it anew: registers do not hold all parts
            store(asked + base + mine, P, turned(project(state, space.queries[VARIANCE ? block % 2 : 0])));
        }
        const Tile local = here(ahead.noise);
        const Line reach = here(ahead.reach);
        gained = here(ahead.gained);
#pragma unroll
        for (int n = 0; n < 8; ++n) seen.x[n] = seen.x[n] * reach.x[n % 4] + local.x[n];
        const Split leaving = split(turned(seen));
        prepare(block + 1);
        space.result.wait(block);
        write = split(product(leaving, split(load(space.square, BLOCK))));
        space.writes.set(warp(), write);
        publish();
        wait<WRITTEN, LANES * WARPS>();
    }
    update(blocks);
    float* to = last + (static_cast<long long>(sequence) * G + head) * (K * K);
#pragma unroll
    for (int m = 0; m < TILES; ++m) {
#pragma unroll
        for (int n = 0; n < 8; ++n) {
            const int i = mine + row(n / 4), j = 16 * m + column() + n % 4;
            if (i < K && j < K) to[i * K + j] = state[m].x[n];
        }
    }
}
