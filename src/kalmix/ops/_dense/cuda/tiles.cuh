// What the chains of `dense` on Hopper are made of: 16 x 16 tiles in the registers of a warp, and their products.
//
// A chain is one block of threads, compiled for one width: P rows of the covariance, padded, K of which are there.
// Warp w has rows 16 w to 16 w + 15 of its matrix in registers, as tiles of 16 columns, and fetches the signals for
// them. One warp more, the assistant, does what is too small to share.
//
// A lane has 2 rows of 4 consecutive numbers of a tile. So all products are a b', and the layout of what one gives is
// the layout that the next one takes: nothing moves between lanes but to turn a tile. Float32 is taken apart into three
// of bfloat16, and products of these are summed: in a warp by mma, with all of the matrix by wgmma, while warps go on.

static_assert(BLOCK == 16, "a tile has as many rows as a block has tokens");

constexpr int TILES = P / 16, WARPS = P / 16, LANES = 32, ACTIVE = LANES * (WARPS + 1);
constexpr bool GROUPS = WARPS > 4;  // of 4 warps, which registers are shared out to anew
constexpr int THREADS = GROUPS ? LANES * (WARPS + 4) : ACTIVE;
constexpr int SQUARE = BLOCK * BLOCK;
enum Barrier { SUMMANDS = 1, WRITTEN = 2 };

#define INLINE __device__ __forceinline__

INLINE int lane() { return threadIdx.x % LANES; }
INLINE int warp() { return threadIdx.x / LANES; }
INLINE int row(int half) { return lane() / 8 * 4 + lane() / 4 % 2 + 2 * half; }
INLINE int column() { return lane() % 4 * 4; }

struct Line {  // x[c] lies in column() + c
    float x[4];
};

struct Tile {  // x[4 h + c] lies in row(h) and column() + c
    float x[8];
};

struct Split {  // a tile as the sum of three of bfloat16, which is exact; numbers side by side lie in one register
    uint4 part[3];
};

INLINE Line line(const float* from) {
    const float4 four = *reinterpret_cast<const float4*>(from + column());
    return {four.x, four.y, four.z, four.w};
}

INLINE Tile load(const float* from, int stride) {
    const Line above = line(from + row(0) * stride), below = line(from + row(1) * stride);
    return {above.x[0], above.x[1], above.x[2], above.x[3], below.x[0], below.x[1], below.x[2], below.x[3]};
}

INLINE void store(float* to, int stride, const Tile& tile) {
#pragma unroll
    for (int h = 0; h < 2; ++h)
        *reinterpret_cast<float4*>(to + row(h) * stride + column()) =
            make_float4(tile.x[4 * h], tile.x[4 * h + 1], tile.x[4 * h + 2], tile.x[4 * h + 3]);
}

// The upper halves of two numbers, which are cut off them.
INLINE unsigned cut(float& left, float& right) {
    const unsigned a = __float_as_uint(left), b = __float_as_uint(right);
    left -= __uint_as_float(a & 0xffff0000u), right -= __uint_as_float(b & 0xffff0000u);
    return __byte_perm(a, b, 0x7632);
}

INLINE Split split(Tile tile) {
    Split parts;
#pragma unroll
    for (int n = 0; n < 3; ++n) {
        parts.part[n].x = cut(tile.x[0], tile.x[1]), parts.part[n].y = cut(tile.x[2], tile.x[3]);
        parts.part[n].z = cut(tile.x[4], tile.x[5]), parts.part[n].w = cut(tile.x[6], tile.x[7]);
    }
    return parts;
}

// sum += a b', 16 x 16 and 8 x 16. Contraction may go through the columns in any order; here a lane's four are what the
// instruction takes for columns 2 n, 2 n + 1, 2 n + 8 and 2 n + 9, n = lane % 4.
INLINE void multiply(float& s0, float& s1, float& s2, float& s3, const uint4& a, unsigned b0, unsigned b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(s0), "+f"(s1), "+f"(s2), "+f"(s3)
        : "r"(a.x), "r"(a.z), "r"(a.y), "r"(a.w), "r"(b0), "r"(b1));
}

INLINE void multiply(Tile& sum, const uint4& a, const uint4& b) {
    multiply(sum.x[0], sum.x[1], sum.x[4], sum.x[5], a, b.x, b.y);
    multiply(sum.x[2], sum.x[3], sum.x[6], sum.x[7], a, b.z, b.w);
}

// a b' in float32, all but the three least of the nine products of their parts. Add it to a large number afterwards:
// tensor cores drop what lies below the last bit of the sum so far.
INLINE Tile product(const Split& a, const Split& b) {
    Tile sum{}, rest{};
#pragma unroll
    for (int n = 0; n < 3; ++n) {
        multiply(rest, a.part[2 - n], b.part[n]);
        multiply(sum, a.part[n == 0], b.part[n == 1]);
    }
#pragma unroll
    for (int n = 0; n < 8; ++n) sum.x[n] += rest.x[n];
    return sum;
}

INLINE void add(Tile& sum, const Tile& other) {
#pragma unroll
    for (int n = 0; n < 8; ++n) sum.x[n] += other.x[n];
}

INLINE void subtract(Tile& sum, const Tile& other) {
#pragma unroll
    for (int n = 0; n < 8; ++n) sum.x[n] -= other.x[n];
}

// Split tiles in shared memory as wgmma takes its second factor: 8 rows of 16 bytes together, which is one word a lane.
// A part of all of them is a matrix of P rows; or all parts of each, of 48 rows.
template <bool PARTS_OF_ONE>
struct Shared {
    unsigned word[3 * TILES][4][LANES];

    INLINE static int place(int part, int m) { return PARTS_OF_ONE ? 3 * m + part : TILES * part + m; }

    INLINE unsigned long long matrix(int part, int m) const {  // from there on
        const unsigned long long at = __cvta_generic_to_shared(word[place(part, m)]);
        return (at & 0x3ffff) >> 4 | 128ull >> 4 << 16 | 256ull >> 4 << 32;  // bytes to the next 8 columns, and 8 rows
    }

    INLINE void set(int m, const Split& tile) {
#pragma unroll
        for (int n = 0; n < 3; ++n) {
            unsigned(&to)[4][LANES] = word[place(n, m)];
            to[0][lane()] = tile.part[n].x, to[1][lane()] = tile.part[n].y;
            to[2][lane()] = tile.part[n].z, to[3][lane()] = tile.part[n].w;
        }
    }

    INLINE Split get(int m) const {
        Split tile;
#pragma unroll
        for (int n = 0; n < 3; ++n) {
            const unsigned(&from)[4][LANES] = word[place(n, m)];
            tile.part[n] = make_uint4(from[0][lane()], from[1][lane()], from[2][lane()], from[3][lane()]);
        }
        return tile;
    }
};
using Rows = Shared<false>;
using Signals = Shared<true>;

// Four warps together, each for its 16 rows: sum (+)= a b' with a of registers, b of 16 rows a tile. It goes on while
// the warps do; what it takes and gives is not to be touched before it is `finished`.
#define WGMMA(columns, sum, a, b, onto)                                               \
    "{\n.reg .pred onto;\nsetp.ne.b32 onto, " onto ", 0;\n"                           \
    "wgmma.mma_async.sync.aligned.m64n" columns "k16.f32.bf16.bf16 {" sum "}, {" a "}, " \
    b ", onto, 1, 1, 0;\n}"
#define TILE_0 "%0, %1, %2, %3, %4, %5, %6, %7"
#define TILE_1 "%8, %9, %10, %11, %12, %13, %14, %15"
#define TILE_2 "%16, %17, %18, %19, %20, %21, %22, %23"
#define TILE_3 "%24, %25, %26, %27, %28, %29, %30, %31"
#define TILE_4 "%32, %33, %34, %35, %36, %37, %38, %39"
#define TILE_5 "%40, %41, %42, %43, %44, %45, %46, %47"
#define TILE_6 "%48, %49, %50, %51, %52, %53, %54, %55"
#define TILE_7 "%56, %57, %58, %59, %60, %61, %62, %63"
#define NUMBERS(t)                                                                                               \
    "+f"((t).x[0]), "+f"((t).x[1]), "+f"((t).x[4]), "+f"((t).x[5]), "+f"((t).x[2]), "+f"((t).x[3]), "+f"((t).x[6]), \
        "+f"((t).x[7])
#define FACTORS(a, b, onto) "r"((a).x), "r"((a).z), "r"((a).y), "r"((a).w), "l"(b), "r"((int)(onto))

INLINE void start(Tile& sum, const uint4& a, unsigned long long b, bool onto) {
    asm volatile(WGMMA("16", TILE_0, "%8, %9, %10, %11", "%12", "%13") : NUMBERS(sum) : FACTORS(a, b, onto));
}

INLINE void start(Tile& first, Tile& second, const uint4& a, unsigned long long b, bool onto) {
    asm volatile(WGMMA("32", TILE_0 "," TILE_1, "%16, %17, %18, %19", "%20", "%21")
                 : NUMBERS(first), NUMBERS(second)
                 : FACTORS(a, b, onto));
}

INLINE void start(Tile& first, Tile& second, Tile& third, const uint4& a, unsigned long long b, bool onto) {
    asm volatile(WGMMA("48", TILE_0 "," TILE_1 "," TILE_2, "%24, %25, %26, %27", "%28", "%29")
                 : NUMBERS(first), NUMBERS(second), NUMBERS(third)
                 : FACTORS(a, b, onto));
}

INLINE void start(Tile (&sum)[TILES], const uint4& a, unsigned long long b, bool onto) {
#if P == 128
    asm volatile(WGMMA("128", TILE_0 "," TILE_1 "," TILE_2 "," TILE_3 "," TILE_4 "," TILE_5 "," TILE_6 "," TILE_7,
                       "%64, %65, %66, %67", "%68", "%69")
                 : NUMBERS(sum[0]), NUMBERS(sum[1]), NUMBERS(sum[2]), NUMBERS(sum[3]), NUMBERS(sum[4]),
                   NUMBERS(sum[5]), NUMBERS(sum[6]), NUMBERS(sum[7])
                 : FACTORS(a, b, onto));
#else
    static_assert(P == 64, "a group of warps has 64 rows");
    asm volatile(WGMMA("64", TILE_0 "," TILE_1 "," TILE_2 "," TILE_3, "%32, %33, %34, %35", "%36", "%37")
                 : NUMBERS(sum[0]), NUMBERS(sum[1]), NUMBERS(sum[2]), NUMBERS(sum[3])
                 : FACTORS(a, b, onto));
#endif
}

// Registers are as they are to be taken; what was started is waited for together; stores are there for wgmma.
INLINE void ready() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
INLINE void seal() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

template <int left>  // what is sealed last may still go on
INLINE void finished() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(left) : "memory"); }
INLINE void publish() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

INLINE void settle(Tile& tile) {  // what reads it does so later
#pragma unroll
    for (int n = 0; n < 8; ++n) asm volatile("" : "+f"(tile.x[n])::"memory");
}

// sum (+)= a b' in float32, all but the three least of the nine products of their parts, b all P rows of a matrix.
INLINE void start(Tile (&sum)[TILES], const Split& a, const Rows& b, bool onto) {
#pragma unroll
    for (int n = 0; n < 3; ++n) start(sum, a.part[2 - n], b.matrix(n, 0), onto || n);
#pragma unroll
    for (int n = 0; n < 2; ++n) start(sum, a.part[1 - n], b.matrix(n, 0), true);
    start(sum, a.part[0], b.matrix(0, 0), true);
}

// a b' of this warp's rows of a matrix and 16 rows of P columns, in float32.
INLINE Tile project(const Tile (&matrix)[TILES], const Signals& b) {
    Tile by_first[3], by_second[2], by_third;  // parts of the matrix, and in each those of b
#pragma unroll
    for (int m = 0; m < TILES; ++m) {
        const Split a = split(matrix[m]);
        ready();
        start(by_first[0], by_first[1], by_first[2], a.part[0], b.matrix(0, m), m);
        start(by_second[0], by_second[1], a.part[1], b.matrix(0, m), m);
        start(by_third, a.part[2], b.matrix(0, m), m);
        seal();
        if (m) finished<1>();
    }
    finished<0>();
    settle(by_first[0]), settle(by_first[1]), settle(by_first[2]);
    settle(by_second[0]), settle(by_second[1]), settle(by_third);
    Tile sum = by_first[0];
#pragma unroll
    for (int n = 0; n < 8; ++n)
        sum.x[n] += by_first[1].x[n] + by_second[0].x[n] + (by_first[2].x[n] + by_second[1].x[n] + by_third.x[n]);
    return sum;
}

// Turn 8 x 8 numbers, two side by side in a lane: the instruction turns 16 bits of each.
INLINE void turn(float& left, float& right) {
    unsigned a = __float_as_uint(left), b = __float_as_uint(right);
    unsigned low = __byte_perm(a, b, 0x5410), high = __byte_perm(a, b, 0x7632);
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %0;" : "+r"(low));
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %0;" : "+r"(high));
    left = __uint_as_float(__byte_perm(low, high, 0x5410));
    right = __uint_as_float(__byte_perm(low, high, 0x7632));
}

INLINE Tile turned(Tile tile) {
#pragma unroll
    for (int n = 0; n < 8; n += 2) turn(tile.x[n], tile.x[n + 1]);
    return {tile.x[0], tile.x[1], tile.x[4], tile.x[5], tile.x[2], tile.x[3], tile.x[6], tile.x[7]};
}

// Rows of the matrix fade, and its columns alike.
INLINE void fade(Tile (&matrix)[TILES], const float* reach) {
    if (DECAY == 1) {
        const float all = reach[0] * reach[0];
#pragma unroll
        for (int m = 0; m < TILES; ++m)
#pragma unroll
            for (int n = 0; n < 8; ++n) matrix[m].x[n] *= all;
    }
    if (DECAY == 2) {
        const float mine[2] = {reach[16 * warp() + row(0)], reach[16 * warp() + row(1)]};
#pragma unroll
        for (int m = 0; m < TILES; ++m) {
            const Line others = line(reach + 16 * m);
#pragma unroll
            for (int n = 0; n < 8; ++n) matrix[m].x[n] *= mine[n / 4] * others.x[n % 4];
        }
    }
}

// A lane on the diagonal of the matrix has one number of it in each of its rows, all in one tile.
INLINE bool on_diagonal(int m) { return m == warp() && lane() % 4 == lane() / 8; }
INLINE bool on_diagonal(int m, int n) { return on_diagonal(m) && row(n / 4) == column() + n % 4; }

// The chain's tokens and tiles, as in triton_tiles.run_of.
struct Run {
    long long tile, token;
    int count;
};

INLINE Run run_of(const long long* runs, int sequence, long long length, long long tiles) {
#if PACKED
    return {runs[3 * sequence], runs[3 * sequence + 1], static_cast<int>(runs[3 * sequence + 2])};
#else
    return {sequence * tiles, sequence * length, static_cast<int>(length)};
#endif
}

template <int which, int threads>
INLINE void arrive() { asm volatile("barrier.cta.arrive %0, %1;" ::"n"(which), "n"(threads) : "memory"); }

template <int which, int threads>
INLINE void wait() { asm volatile("barrier.cta.sync %0, %1;" ::"n"(which), "n"(threads) : "memory"); }

// Raised by the assistant, block after block. Waiting is a loop, which the compiler moves nothing past.
struct Flag {
    unsigned long long barrier;

    INLINE unsigned address() const { return (unsigned)__cvta_generic_to_shared(&barrier); }
    INLINE void reset() { asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(address()), "n"(LANES) : "memory"); }
    INLINE void raise() { asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(address()) : "memory"); }
    INLINE void wait(int turn) const {
        asm volatile(
            "{\n.reg .pred up;\nagain: mbarrier.try_wait.parity.shared.b64 up, [%0], %1;\n@!up bra again;\n}" ::"r"(
                address()),
            "r"(turn % 2)
            : "memory");
    }
};

// What a lane will want of global memory, on its way to shared memory ahead of time.
using Ahead = float4[LANES];

INLINE void fetch(Ahead& to, const float* from) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 16;" ::"r"((unsigned)__cvta_generic_to_shared(&to[lane()])),
                 "l"(from + column())
                 : "memory");
}

INLINE void fetch(Ahead (&to)[2], const float* from, int stride) {
    fetch(to[0], from + row(0) * stride), fetch(to[1], from + row(1) * stride);
}

INLINE void fetched() { asm volatile("cp.async.wait_all;" ::: "memory"); }

INLINE Line here(const Ahead& from) {
    const float4 four = from[lane()];
    return {four.x, four.y, four.z, four.w};
}

INLINE Tile here(const Ahead (&from)[2]) {
    const float4 above = from[0][lane()], below = from[1][lane()];
    return {above.x, above.y, above.z, above.w, below.x, below.y, below.z, below.w};
}

INLINE void leave(Ahead (&to)[2], const Tile& tile) {
    to[0][lane()] = make_float4(tile.x[0], tile.x[1], tile.x[2], tile.x[3]);
    to[1][lane()] = make_float4(tile.x[4], tile.x[5], tile.x[6], tile.x[7]);
}

// The sum of what every warp left.
INLINE Tile gathered(const Ahead (&from)[WARPS][2]) {
    Tile sum = here(from[0]);
#pragma unroll
    for (int w = 1; w < WARPS; ++w) add(sum, here(from[w]));
    return sum;
}

template <int registers>
INLINE void give() {
    if (GROUPS) asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(registers));
}

template <int registers>
INLINE void take() {
    if (GROUPS) asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(registers));
}
