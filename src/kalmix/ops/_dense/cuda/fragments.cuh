// Building blocks of the sequential kernels of `dense` on Hopper: 16 x 16 fragments in the registers of a warp, and
// their products.
//
// A kernel has one block of threads per sequence and head. It is compiled for one width: P rows of the covariance, of
// which the first K are used. Warp w holds rows 16 w to 16 w + 15 of the matrix in registers, as fragments of 16
// columns, and prefetches the signals of these rows. One more warp, the assistant, does work that is too small to
// distribute.
//
// A lane holds 2 rows of 4 consecutive numbers of a fragment. All products are a b', and the result of a product has
// the layout of an input, so data moves between lanes only to transpose a fragment. A float32 number is split into
// three bfloat16 terms, and products of terms are summed: within a warp by mma, with the whole matrix by wgmma, which
// runs asynchronously.

static_assert(TILE == 16, "a fragment has one row per token of a tile");

constexpr int FRAGMENTS = P / 16, WARPS = P / 16, LANES = 32, ACTIVE = LANES * (WARPS + 1);
constexpr bool WARP_GROUPS = WARPS > 4;  // groups of 4 warps, between which registers are redistributed
constexpr int THREADS = WARP_GROUPS ? LANES * (WARPS + 4) : ACTIVE;
constexpr int SQUARE = TILE * TILE;
enum Barrier { PARTIAL_SUMS = 1, UPDATES_STORED = 2 };

#define INLINE __device__ __forceinline__

INLINE int lane() { return threadIdx.x % LANES; }
INLINE int warp() { return threadIdx.x / LANES; }
INLINE int row(int half) { return lane() / 8 * 4 + lane() / 4 % 2 + 2 * half; }
INLINE int column() { return lane() % 4 * 4; }

struct VectorFragment {  // x[c] is in column() + c
    float x[4];
};

struct Fragment {  // x[4 h + c] is in row(h) and column() + c
    float x[8];
};

struct Split {  // a fragment as the exact sum of three bfloat16 terms; adjacent numbers share a register
    uint4 term[3];
};

INLINE VectorFragment load_vector(const float* source) {
    const float4 values = *reinterpret_cast<const float4*>(source + column());
    return {values.x, values.y, values.z, values.w};
}

INLINE Fragment load(const float* source, int stride) {
    const VectorFragment upper = load_vector(source + row(0) * stride), lower = load_vector(source + row(1) * stride);
    return {upper.x[0], upper.x[1], upper.x[2], upper.x[3], lower.x[0], lower.x[1], lower.x[2], lower.x[3]};
}

INLINE void store(float* dest, int stride, const Fragment& fragment) {
#pragma unroll
    for (int h = 0; h < 2; ++h)
        *reinterpret_cast<float4*>(dest + row(h) * stride + column()) =
            make_float4(fragment.x[4 * h], fragment.x[4 * h + 1], fragment.x[4 * h + 2], fragment.x[4 * h + 3]);
}

// Returns the upper halves of two numbers, and subtracts them.
INLINE unsigned split_upper_halves(float& left, float& right) {
    const unsigned a = __float_as_uint(left), b = __float_as_uint(right);
    left -= __uint_as_float(a & 0xffff0000u), right -= __uint_as_float(b & 0xffff0000u);
    return __byte_perm(a, b, 0x7632);
}

INLINE Split split(Fragment fragment) {
    Split result;
#pragma unroll
    for (int n = 0; n < 3; ++n) {
        result.term[n].x = split_upper_halves(fragment.x[0], fragment.x[1]);
        result.term[n].y = split_upper_halves(fragment.x[2], fragment.x[3]);
        result.term[n].z = split_upper_halves(fragment.x[4], fragment.x[5]);
        result.term[n].w = split_upper_halves(fragment.x[6], fragment.x[7]);
    }
    return result;
}

// sum += a b', for 16 x 16 and 8 x 16. The order of columns in the contraction is arbitrary: the four of a lane are
// passed as columns 2 n, 2 n + 1, 2 n + 8 and 2 n + 9 of the instruction, with n = lane % 4.
INLINE void multiply(float& s0, float& s1, float& s2, float& s3, const uint4& a, unsigned b0, unsigned b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(s0), "+f"(s1), "+f"(s2), "+f"(s3)
        : "r"(a.x), "r"(a.z), "r"(a.y), "r"(a.w), "r"(b0), "r"(b1));
}

INLINE void multiply(Fragment& sum, const uint4& a, const uint4& b) {
    multiply(sum.x[0], sum.x[1], sum.x[4], sum.x[5], a, b.x, b.y);
    multiply(sum.x[2], sum.x[3], sum.x[6], sum.x[7], a, b.z, b.w);
}

// a b' in float32, from the six largest of the nine products of terms. Add the result to a large number afterwards:
// tensor cores drop bits below the last bit of the sum so far.
INLINE Fragment product(const Split& a, const Split& b) {
    Fragment sum{}, rest{};
#pragma unroll
    for (int n = 0; n < 3; ++n) {
        multiply(rest, a.term[2 - n], b.term[n]);
        multiply(sum, a.term[n == 0], b.term[n == 1]);
    }
#pragma unroll
    for (int n = 0; n < 8; ++n) sum.x[n] += rest.x[n];
    return sum;
}

INLINE void add(Fragment& sum, const Fragment& other) {
#pragma unroll
    for (int n = 0; n < 8; ++n) sum.x[n] += other.x[n];
}

INLINE void subtract(Fragment& sum, const Fragment& other) {
#pragma unroll
    for (int n = 0; n < 8; ++n) sum.x[n] -= other.x[n];
}

// Split fragments in shared memory, in the layout of the second factor of wgmma: 8 rows of 16 bytes, one word per lane.
// One term of all fragments is a matrix of P rows; with TERMS_TOGETHER, all terms of a fragment are one of 48 rows.
template <bool TERMS_TOGETHER>
struct Shared {
    unsigned word[3 * FRAGMENTS][4][LANES];

    INLINE static int index_of(int term, int m) { return TERMS_TOGETHER ? 3 * m + term : FRAGMENTS * term + m; }

    INLINE unsigned long long matrix(int term, int m) const {  // descriptor of the matrix that begins there
        const unsigned long long at = __cvta_generic_to_shared(word[index_of(term, m)]);
        return (at & 0x3ffff) >> 4 | 128ull >> 4 << 16 | 256ull >> 4 << 32;  // strides to 8 columns, 8 rows
    }

    INLINE void set(int m, const Split& fragment) {
#pragma unroll
        for (int n = 0; n < 3; ++n) {
            unsigned(&dest)[4][LANES] = word[index_of(n, m)];
            dest[0][lane()] = fragment.term[n].x, dest[1][lane()] = fragment.term[n].y;
            dest[2][lane()] = fragment.term[n].z, dest[3][lane()] = fragment.term[n].w;
        }
    }

    INLINE Split get(int m) const {
        Split fragment;
#pragma unroll
        for (int n = 0; n < 3; ++n) {
            const unsigned(&source)[4][LANES] = word[index_of(n, m)];
            fragment.term[n] = make_uint4(source[0][lane()], source[1][lane()], source[2][lane()], source[3][lane()]);
        }
        return fragment;
    }
};
using Rows = Shared<false>;
using Signals = Shared<true>;

// Four warps together, each for its 16 rows: sum (+)= a b', with a in registers and b of 16 rows per fragment. It runs
// asynchronously; its inputs and outputs must not be accessed before `wgmma_wait`.
#define WGMMA(columns, sum, a, b, accumulate)                                               \
    "{\n.reg .pred onto;\nsetp.ne.b32 onto, " accumulate ", 0;\n"                           \
    "wgmma.mma_async.sync.aligned.m64n" columns "k16.f32.bf16.bf16 {" sum "}, {" a "}, " \
    b ", onto, 1, 1, 0;\n}"
#define FRAGMENT_0 "%0, %1, %2, %3, %4, %5, %6, %7"
#define FRAGMENT_1 "%8, %9, %10, %11, %12, %13, %14, %15"
#define FRAGMENT_2 "%16, %17, %18, %19, %20, %21, %22, %23"
#define FRAGMENT_3 "%24, %25, %26, %27, %28, %29, %30, %31"
#define FRAGMENT_4 "%32, %33, %34, %35, %36, %37, %38, %39"
#define FRAGMENT_5 "%40, %41, %42, %43, %44, %45, %46, %47"
#define FRAGMENT_6 "%48, %49, %50, %51, %52, %53, %54, %55"
#define FRAGMENT_7 "%56, %57, %58, %59, %60, %61, %62, %63"
#define NUMBERS(t)                                                                                               \
    "+f"((t).x[0]), "+f"((t).x[1]), "+f"((t).x[4]), "+f"((t).x[5]), "+f"((t).x[2]), "+f"((t).x[3]), "+f"((t).x[6]), \
        "+f"((t).x[7])
#define FACTORS(a, b, accumulate) "r"((a).x), "r"((a).z), "r"((a).y), "r"((a).w), "l"(b), "r"((int)(accumulate))

INLINE void multiply_async(Fragment& sum, const uint4& a, unsigned long long b, bool accumulate) {
    asm volatile(WGMMA("16", FRAGMENT_0, "%8, %9, %10, %11", "%12", "%13") : NUMBERS(sum) : FACTORS(a, b, accumulate));
}

INLINE void multiply_async(Fragment& first, Fragment& second, const uint4& a, unsigned long long b, bool accumulate) {
    asm volatile(WGMMA("32", FRAGMENT_0 "," FRAGMENT_1, "%16, %17, %18, %19", "%20", "%21")
                 : NUMBERS(first), NUMBERS(second)
                 : FACTORS(a, b, accumulate));
}

INLINE void multiply_async(Fragment& first, Fragment& second, Fragment& third, const uint4& a, unsigned long long b,
                           bool accumulate) {
    asm volatile(WGMMA("48", FRAGMENT_0 "," FRAGMENT_1 "," FRAGMENT_2, "%24, %25, %26, %27", "%28", "%29")
                 : NUMBERS(first), NUMBERS(second), NUMBERS(third)
                 : FACTORS(a, b, accumulate));
}

INLINE void multiply_async(Fragment (&sum)[FRAGMENTS], const uint4& a, unsigned long long b, bool accumulate) {
#if P == 128
    asm volatile(WGMMA("128",
                       FRAGMENT_0 "," FRAGMENT_1 "," FRAGMENT_2 "," FRAGMENT_3 "," FRAGMENT_4 "," FRAGMENT_5
                                  "," FRAGMENT_6 "," FRAGMENT_7,
                       "%64, %65, %66, %67", "%68", "%69")
                 : NUMBERS(sum[0]), NUMBERS(sum[1]), NUMBERS(sum[2]), NUMBERS(sum[3]), NUMBERS(sum[4]),
                   NUMBERS(sum[5]), NUMBERS(sum[6]), NUMBERS(sum[7])
                 : FACTORS(a, b, accumulate));
#else
    static_assert(P == 64, "a group of warps has 64 rows");
    asm volatile(WGMMA("64", FRAGMENT_0 "," FRAGMENT_1 "," FRAGMENT_2 "," FRAGMENT_3,
                       "%32, %33, %34, %35", "%36", "%37")
                 : NUMBERS(sum[0]), NUMBERS(sum[1]), NUMBERS(sum[2]), NUMBERS(sum[3])
                 : FACTORS(a, b, accumulate));
#endif
}

// Order register accesses before wgmma; close a group of wgmma; make shared-memory stores visible to wgmma.
INLINE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
INLINE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

template <int left>  // number of groups that may still run
INLINE void wgmma_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(left) : "memory"); }
INLINE void fence_shared() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

INLINE void pin_registers(Fragment& fragment) {  // later reads are not moved before this point
#pragma unroll
    for (int n = 0; n < 8; ++n) asm volatile("" : "+f"(fragment.x[n])::"memory");
}

// sum (+)= a b' in float32, from the six largest of the nine products of terms; b has P rows.
INLINE void multiply_async(Fragment (&sum)[FRAGMENTS], const Split& a, const Rows& b, bool accumulate) {
#pragma unroll
    for (int n = 0; n < 3; ++n) multiply_async(sum, a.term[2 - n], b.matrix(n, 0), accumulate || n);
#pragma unroll
    for (int n = 0; n < 2; ++n) multiply_async(sum, a.term[1 - n], b.matrix(n, 0), true);
    multiply_async(sum, a.term[0], b.matrix(0, 0), true);
}

// a b' in float32, for this warp's rows of a matrix and 16 rows of P columns.
INLINE Fragment project(const Fragment (&matrix)[FRAGMENTS], const Signals& b) {
    Fragment from_first[3], from_second[2], from_third;  // by term of the matrix, then by term of b
#pragma unroll
    for (int m = 0; m < FRAGMENTS; ++m) {
        const Split a = split(matrix[m]);
        wgmma_fence();
        multiply_async(from_first[0], from_first[1], from_first[2], a.term[0], b.matrix(0, m), m);
        multiply_async(from_second[0], from_second[1], a.term[1], b.matrix(0, m), m);
        multiply_async(from_third, a.term[2], b.matrix(0, m), m);
        wgmma_commit();
        if (m) wgmma_wait<1>();
    }
    wgmma_wait<0>();
    pin_registers(from_first[0]), pin_registers(from_first[1]), pin_registers(from_first[2]);
    pin_registers(from_second[0]), pin_registers(from_second[1]), pin_registers(from_third);
    Fragment sum = from_first[0];
#pragma unroll
    for (int n = 0; n < 8; ++n)
        sum.x[n] += from_first[1].x[n] + from_second[0].x[n] +
                    (from_first[2].x[n] + from_second[1].x[n] + from_third.x[n]);
    return sum;
}

// Transposes 8 x 8 numbers, two adjacent ones per lane; the instruction transposes 16 bits at a time.
INLINE void transpose_8x8(float& left, float& right) {
    unsigned a = __float_as_uint(left), b = __float_as_uint(right);
    unsigned low = __byte_perm(a, b, 0x5410), high = __byte_perm(a, b, 0x7632);
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %0;" : "+r"(low));
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %0;" : "+r"(high));
    left = __uint_as_float(__byte_perm(low, high, 0x5410));
    right = __uint_as_float(__byte_perm(low, high, 0x7632));
}

INLINE Fragment transpose(Fragment fragment) {
#pragma unroll
    for (int n = 0; n < 8; n += 2) transpose_8x8(fragment.x[n], fragment.x[n + 1]);
    return {fragment.x[0], fragment.x[1], fragment.x[4], fragment.x[5],
            fragment.x[2], fragment.x[3], fragment.x[6], fragment.x[7]};
}

// Applies decays to the rows and columns of the matrix.
INLINE void decay_matrix(Fragment (&matrix)[FRAGMENTS], const float* total_decay) {
    if (DECAY == 1) {
        const float all = total_decay[0] * total_decay[0];
#pragma unroll
        for (int m = 0; m < FRAGMENTS; ++m)
#pragma unroll
            for (int n = 0; n < 8; ++n) matrix[m].x[n] *= all;
    }
    if (DECAY == 2) {
        const float row_decay[2] = {total_decay[16 * warp() + row(0)], total_decay[16 * warp() + row(1)]};
#pragma unroll
        for (int m = 0; m < FRAGMENTS; ++m) {
            const VectorFragment column_decay = load_vector(total_decay + 16 * m);
#pragma unroll
            for (int n = 0; n < 8; ++n) matrix[m].x[n] *= row_decay[n / 4] * column_decay.x[n % 4];
        }
    }
}

// A lane on the diagonal of the matrix holds one diagonal number in each of its rows, in one fragment.
INLINE bool on_diagonal(int m) { return m == warp() && lane() % 4 == lane() / 8; }
INLINE bool on_diagonal(int m, int n) { return on_diagonal(m) && row(n / 4) == column() + n % 4; }
// It also holds the numbers of each row's key with its partner (key index ^ 1).
INLINE bool of_partners(int m, int n) { return on_diagonal(m) && (row(n / 4) ^ 1) == column() + n % 4; }

// First tile, first token and token count of a sequence, like `locate_sequence` in _shared/triton/tiles.py.
struct SequenceSpan {
    long long tile, token;
    int count;
};

INLINE SequenceSpan sequence_span(const long long* sequence_table, int sequence, long long length, long long tiles) {
#if PACKED
    return {sequence_table[3 * sequence], sequence_table[3 * sequence + 1],
            static_cast<int>(sequence_table[3 * sequence + 2])};
#else
    return {sequence * tiles, sequence * length, static_cast<int>(length)};
#endif
}

template <int which, int threads>
INLINE void arrive() { asm volatile("barrier.cta.arrive %0, %1;" ::"n"(which), "n"(threads) : "memory"); }

template <int which, int threads>
INLINE void wait() { asm volatile("barrier.cta.sync %0, %1;" ::"n"(which), "n"(threads) : "memory"); }

// Raised by the assistant once per tile. The wait is a loop in assembly, past which the compiler moves nothing.
struct Flag {
    unsigned long long barrier;

    INLINE unsigned address() const { return (unsigned)__cvta_generic_to_shared(&barrier); }
    INLINE void reset() { asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(address()), "n"(LANES) : "memory"); }
    INLINE void raise() { asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(address()) : "memory"); }
    INLINE void wait(int phase) const {
        asm volatile(
            "{\n.reg .pred up;\nagain: mbarrier.try_wait.parity.shared.b64 up, [%0], %1;\n@!up bra again;\n}" ::"r"(
                address()),
            "r"(phase % 2)
            : "memory");
    }
};

// Data of each lane, prefetched from global to shared memory.
using PrefetchBuffer = float4[LANES];

INLINE void prefetch(PrefetchBuffer& dest, const float* source) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 16;" ::"r"((unsigned)__cvta_generic_to_shared(&dest[lane()])),
                 "l"(source + column())
                 : "memory");
}

INLINE void prefetch(PrefetchBuffer (&dest)[2], const float* source, int stride) {
    prefetch(dest[0], source + row(0) * stride), prefetch(dest[1], source + row(1) * stride);
}

INLINE void prefetch_wait() { asm volatile("cp.async.wait_all;" ::: "memory"); }

INLINE VectorFragment load_shared(const PrefetchBuffer& source) {
    const float4 values = source[lane()];
    return {values.x, values.y, values.z, values.w};
}

INLINE Fragment load_shared(const PrefetchBuffer (&source)[2]) {
    const float4 upper = source[0][lane()], lower = source[1][lane()];
    return {upper.x, upper.y, upper.z, upper.w, lower.x, lower.y, lower.z, lower.w};
}

INLINE void store_shared(PrefetchBuffer (&dest)[2], const Fragment& fragment) {
    dest[0][lane()] = make_float4(fragment.x[0], fragment.x[1], fragment.x[2], fragment.x[3]);
    dest[1][lane()] = make_float4(fragment.x[4], fragment.x[5], fragment.x[6], fragment.x[7]);
}

// Sum of the fragments that the warps stored.
INLINE Fragment sum_over_warps(const PrefetchBuffer (&source)[WARPS][2]) {
    Fragment sum = load_shared(source[0]);
#pragma unroll
    for (int w = 1; w < WARPS; ++w) add(sum, load_shared(source[w]));
    return sum;
}

template <int registers>
INLINE void release_registers() {
    if (WARP_GROUPS) asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(registers));
}

template <int registers>
INLINE void acquire_registers() {
    if (WARP_GROUPS) asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(registers));
}
