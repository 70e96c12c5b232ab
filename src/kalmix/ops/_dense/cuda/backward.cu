// The adjoint of the covariance of `dense`, from block to block of tokens, last to first: what `_retreat` in
// triton_backward.py does, which see.

#include "tiles.cuh"

struct Space {                                    // shared memory
    Signals writes[2];                            // of this block of tokens, and the next
    Rows keys, changes, asked[VARIANCE ? 2 : 1];  // what the last one adds, turned
    Ahead summands[WARPS][2];                     // of writes leaving'
    Flag result;                                  // it is there:
    Ahead half[2];                                // half their sum
    struct {
        Ahead write[2], asked[2], key[2], local[2], reach;
    } ahead[WARPS];
};

// Threads, and bytes of shared memory.
extern "C" __device__ int NEEDS[] = {THREADS, sizeof(Space)};

extern "C" __global__ void __launch_bounds__(THREADS, 1) backward(
    const float* keys, const float* writes, const float* local, const float* asked, const float* grad_read,
    const float* edges, const float* kept, const float* grad_last, float* exits, float* spreads, float* balance,
    float* grad_prior, const long long* runs, long long length, long long tiles, long long G) {
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
        for (int block = 0; block < blocks; ++block) {
            wait<SUMMANDS, ACTIVE>();
            Tile sum = gathered(space.summands);
#pragma unroll
            for (int n = 0; n < 8; ++n) sum.x[n] *= 0.5f;
            leave(space.half, sum);
            space.result.raise();
        }
        return;
    }

    take<216>();
    const int mine = 16 * warp();  // the first of this warp's rows
    auto& ahead = space.ahead[warp()];
    const long long whole = (static_cast<long long>(sequence) * G + head) * (K * K);
    Tile adjoint[TILES];
#pragma unroll
    for (int m = 0; m < TILES; ++m)
#pragma unroll
        for (int n = 0; n < 8; ++n) {
            const int i = mine + row(n / 4), j = 16 * m + column() + n % 4;
            adjoint[m].x[n] = i < K && j < K ? grad_last[whole + i * K + j] : 0.0f;
        }
    const auto prepare = [&](int block) {  // what is there when it leaves
        if (block > 0) fetch(ahead.write, writes + slot(block - 1) * (BLOCK * P) + mine, P);
        if (block >= 0) {
            if (VARIANCE) fetch(ahead.asked, asked + slot(block) * (BLOCK * P) + mine, P);
            fetch(ahead.key, keys + slot(block) * (BLOCK * P) + mine, P);
            fetch(ahead.local, local + slot(block) * (BLOCK * P) + mine, P);
            fetch(ahead.reach, edges + slot(block) * P + mine);
        }
    };
    Split key{}, change{}, query{};  // this warp's rows of what the last block adds
    space.keys.set(warp(), key), space.changes.set(warp(), change);
    if (VARIANCE) space.asked[blocks & 1].set(warp(), query);
    const auto weigh = [&](int window) {  // the diagonal of the adjoint times the covariance
        const long long at = (run.tile + window) * G + head;
        float sums[2] = {};
#pragma unroll
        for (int m = 0; m < TILES; ++m) {
            const Tile state = load(kept + at * (P * P) + mine * P + 16 * m, P);
#pragma unroll
            for (int n = 0; n < 8; ++n) sums[n / 4] += adjoint[m].x[n] * state.x[n];
        }
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            for (int away = 1; away < 4; away *= 2) sums[h] += __shfl_xor_sync(~0u, sums[h], away);
            if (lane() % 4 == 0) balance[at * P + mine + row(h)] = sums[h];
        }
    };
    const auto update = [&](int block) {  // by what the one after adds
        Tile by[TILES];
        Tile next{};
        ready();
        start(by, change, space.keys, false);
        start(by, key, space.changes, true);
        if (VARIANCE) start(by, query, space.asked[VARIANCE ? (block + 1) & 1 : 0], true);
        seal();
        if (DECAY && block + 2 < blocks && (block + 2) % WINDOWS == 0) weigh((block + 2) / WINDOWS);
        if (block + 1 < blocks) fade(adjoint, edges + slot(block + 1) * P);
        fetched();
        space.writes[(block - 1) & 1].set(warp(), split(here(ahead.write)));
        if (VARIANCE && block >= 0) {
            next = turned(here(ahead.asked));
            space.asked[VARIANCE ? block & 1 : 0].set(warp(), split(next));
#pragma unroll
            for (int n = 0; n < 8; ++n) {
                const int t = block * BLOCK + column() + n % 4;
                next.x[n] *= t < run.count ? grad_read[(run.token + t) * G + head] : 0.0f;
            }
        }
        finished<0>();
        settle(next);
        query = split(next);
#pragma unroll
        for (int m = 0; m < TILES; ++m) settle(by[m]), add(adjoint[m], by[m]);
    };
    if (blocks) {
        const float* first = writes + slot(blocks - 1) * (BLOCK * P) + mine;
        space.writes[(blocks - 1) & 1].set(warp(), split(load(first, P)));
    }
    prepare(blocks - 1);
    publish();
    wait<WRITTEN, LANES * WARPS>();
    for (int block = blocks - 1; block >= 0; --block) {
        const auto& write = space.writes[block % 2];
        update(block);
        const Tile leaving = turned(project(adjoint, write));  // writes adjoint, the tokens its rows
        leave(space.summands[warp()], product(split(leaving), write.get(warp())));
        arrive<SUMMANDS, ACTIVE>();

        const long long base = slot(block) * (BLOCK * P);
        store(exits + base + mine, P, leaving);
#pragma unroll
        for (int m = 0; m < TILES; ++m)
            if (on_diagonal(m)) {
#pragma unroll
                for (int n = 0; n < 8; ++n)
                    if (on_diagonal(m, n)) spreads[slot(block) * P + mine + row(n / 4)] = adjoint[m].x[n];
            }
        const Line reach = here(ahead.reach);
        Tile rest = here(ahead.local);
#pragma unroll
        for (int n = 0; n < 8; ++n) rest.x[n] -= leaving.x[n] * reach.x[n % 4];
        rest = turned(rest);
        key = split(turned(here(ahead.key)));
        prepare(block - 1);
        space.result.wait(blocks - 1 - block);
        add(rest, product(key, split(here(space.half))));
        change = split(rest);
        space.keys.set(warp(), key), space.changes.set(warp(), change);
        publish();
        wait<WRITTEN, LANES * WARPS>();
    }
    update(-1);
    if (DECAY && blocks) weigh(0);
#pragma unroll
    for (int m = 0; m < TILES; ++m)
#pragma unroll
        for (int n = 0; n < 8; ++n) {
            const int i = mine + row(n / 4), j = 16 * m + column() + n % 4;
            if (i < K && j < K) grad_prior[whole + i * K + j] = adjoint[m].x[n];
        }
}
