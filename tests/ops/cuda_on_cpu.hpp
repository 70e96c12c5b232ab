// Runs a CUDA kernel on a CPU. The threads of a block are coroutines that take turns: each runs until `__syncthreads` or
// a shuffle, and goes on when all others have reached one. So all threads must call these functions equally often. They
// take turns in the order of their numbers, or in the reversed one: a race gives other results in one of the two.
#include <ucontext.h>

#include <cmath>
#include <cstring>
#include <functional>
#include <vector>

#define __global__
#define __device__
#define __shared__
#define __launch_bounds__(...)
struct uint4 {
    unsigned x, y, z, w;
};
struct Index {
    int x, y;
};
Index threadIdx, blockIdx;
uint4 memory[1 << 14];  // shared memory

static std::function<void()> body;
static ucontext_t scheduler;
static std::vector<ucontext_t> contexts;
static double shuffled[2][1024];
static int shuffles[1024];
static bool ended[1024];

static void __syncthreads() { swapcontext(&contexts[threadIdx.x], &scheduler); }

template <class T>
static T __shfl_xor_sync(unsigned, T value, int mask) {
    const int own = threadIdx.x, turn = shuffles[own]++ % 2;  // two buffers: other threads may have begun the next one
    std::memcpy(&shuffled[turn][own], &value, sizeof value);
    __syncthreads();
    T result;
    std::memcpy(&result, &shuffled[turn][own ^ mask], sizeof result);
    return result;
}

static void run_thread() {
    body();
    ended[threadIdx.x] = true;
}

// Calls `kernel` for each thread of a grid of blocks. Shared memory holds NaN at first.
static void run_grid(int width, int height, int threads, bool reversed, std::function<void()> kernel) {
    constexpr int STACK = 1 << 16;
    std::vector<char> stacks(size_t(threads) * STACK);
    body = kernel;
    contexts.resize(threads);
    for (blockIdx.y = 0; blockIdx.y < height; ++blockIdx.y)
        for (blockIdx.x = 0; blockIdx.x < width; ++blockIdx.x) {
            std::memset(memory, 255, sizeof memory);
            for (int i = 0; i < threads; ++i) {
                getcontext(&contexts[i]);
                contexts[i].uc_stack.ss_sp = &stacks[size_t(i) * STACK];
                contexts[i].uc_stack.ss_size = STACK;
                contexts[i].uc_link = &scheduler;
                makecontext(&contexts[i], run_thread, 0);
                ended[i] = false;
                shuffles[i] = 0;
            }
            for (bool running = true; running;) {
                running = false;
                for (int turn = 0; turn < threads; ++turn) {
                    threadIdx.x = reversed ? threads - 1 - turn : turn;
                    if (!ended[threadIdx.x]) swapcontext(&scheduler, &contexts[threadIdx.x]), running = true;
                }
            }
        }
}
