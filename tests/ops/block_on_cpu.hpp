// One block of a CUDA kernel on a CPU: its threads are coroutines that take turns. Each runs until `__syncthreads` or a
// shuffle, and goes on when all others have reached one, too. So all threads must call these functions equally often.
#include <ucontext.h>

#include <cmath>
#include <cstring>
#include <vector>

#define __global__
#define __device__
#define __shared__ static
#define __launch_bounds__(...)
struct uint4 {
    unsigned x, y, z, w;
};
struct Index {
    int x, y;
};
static Index threadIdx, blockIdx;
static char shared_memory[1 << 18];
#define memory memory_of_the_declaration[1];                   \
    uint4* const memory = reinterpret_cast<uint4*>(shared_memory)

static ucontext_t scheduler;
static std::vector<ucontext_t> contexts;
static double shuffled[2][1024];
static int phase[1024];

static void __syncthreads() { swapcontext(&contexts[threadIdx.x], &scheduler); }

template <class T>
static T __shfl_xor_sync(unsigned, T value, int mask) {
    const int own = threadIdx.x, turn = phase[own]++ % 2;  // two buffers: the next shuffle may begin at once
    std::memcpy(&shuffled[turn][own], &value, sizeof value);
    __syncthreads();
    T result;
    std::memcpy(&result, &shuffled[turn][own ^ mask], sizeof result);
    return result;
}
