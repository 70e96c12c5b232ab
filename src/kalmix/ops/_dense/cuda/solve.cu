// Solves linear systems in float64. Same algorithm as `_kernel` in triton/solve.py (see there).
//
// A thread holds every 16th row and every 32nd column of the matrix, and the same rows of one column of the right side.
// In each step, shared memory brings it the coefficients of the unknown and the scaled row that is chosen for it.

constexpr int LANES = 32, WARPS = 16, THREADS = WARPS * LANES;
// Rows and columns of the matrix that a thread holds
constexpr int ROWS = (K + WARPS - 1) / WARPS, MATRIX_COLUMNS = (K + LANES - 1) / LANES;
static_assert(COLUMNS == LANES, "a thread holds one column of the right side");

struct SharedMemory {  // of two steps, so that one may begin while other threads end the last
    double coefficients[2][ROWS * WARPS];
    double matrix_row[2][MATRIX_COLUMNS * LANES], right_row[2][COLUMNS];
};

// Number of threads, and bytes of shared memory.
extern "C" __device__ int REQUIREMENTS[] = {THREADS, sizeof(SharedMemory)};

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    solve(const double* matrices, const double* rights, double* solutions, long long columns) {
    extern __shared__ uint4 memory[];
    SharedMemory& shared = *reinterpret_cast<SharedMemory*>(memory);
    const int lane = threadIdx.x % LANES, warp = threadIdx.x / LANES;
    const long long system = blockIdx.x, column = static_cast<long long>(blockIdx.y) * COLUMNS + lane;
    const bool exists = column < columns;
    double matrix[ROWS][MATRIX_COLUMNS], right[ROWS];
    int unknown[ROWS];  // that each row solves for, set when the row is the pivot
    unsigned used = 0;  // bit i: row `lane` + 32 i has been chosen; the same in each warp
#pragma unroll
    for (int i = 0; i < ROWS; ++i) {
        const int row = warp + WARPS * i;
#pragma unroll
        for (int j = 0; j < MATRIX_COLUMNS; ++j) {
            const int other = lane + LANES * j;
            matrix[i][j] = row < K && other < K ? matrices[(system * K + row) * K + other] : 0.0;
        }
        right[i] = row < K && exists ? rights[(system * K + row) * columns + column] : 0.0;
        unknown[i] = 0;
    }
#pragma unroll
    for (int part = 0; part < MATRIX_COLUMNS; ++part) {
        for (int offset = 0; offset < LANES && part * LANES + offset < K; ++offset) {
            const int step = part * LANES + offset;
            double* coefficients = shared.coefficients[step % 2];
            double *matrix_row = shared.matrix_row[step % 2], *right_row = shared.right_row[step % 2];
            if (lane == offset) {
#pragma unroll
                for (int i = 0; i < ROWS; ++i) coefficients[warp + WARPS * i] = matrix[i][part];
            }
            __syncthreads();

            double largest = -1.0;
            int pivot = lane;
#pragma unroll
            for (int i = 0; i < MATRIX_COLUMNS; ++i) {
                const int row = lane + LANES * i;
                if (row < K && !(used >> i & 1)) {
                    const double size = fabs(coefficients[row]);
                    const double rank = size < 1e308 ? size : 1e308;  // also a row with NaN is chosen
                    if (rank > largest) largest = rank, pivot = row;
                }
            }
#pragma unroll
            for (int shift = LANES / 2; shift > 0; shift /= 2) {
                const double size = __shfl_xor_sync(~0u, largest, shift);
                const int row = __shfl_xor_sync(~0u, pivot, shift);
                if (size > largest || (size == largest && row < pivot)) largest = size, pivot = row;
            }
            if (pivot % LANES == lane) used |= 1u << (pivot / LANES);

            if (warp == pivot % WARPS) {
                const double scale = 1.0 / coefficients[pivot];
                double chosen[MATRIX_COLUMNS], chosen_right = right[0];
#pragma unroll
                for (int j = part; j < MATRIX_COLUMNS; ++j) chosen[j] = matrix[0][j];
#pragma unroll
                for (int i = 1; i < ROWS; ++i) {  // an index that varies would move `matrix` from registers to memory
                    const bool is_pivot = warp + WARPS * i == pivot;
                    chosen_right = is_pivot ? right[i] : chosen_right;
#pragma unroll
                    for (int j = part; j < MATRIX_COLUMNS; ++j) chosen[j] = is_pivot ? matrix[i][j] : chosen[j];
                }
                right_row[lane] = chosen_right * scale;
#pragma unroll
                for (int j = part; j < MATRIX_COLUMNS; ++j) matrix_row[lane + LANES * j] = chosen[j] * scale;
            }
            __syncthreads();
            double row[MATRIX_COLUMNS];
            const double in_right = right_row[lane];
#pragma unroll
            for (int j = part; j < MATRIX_COLUMNS; ++j) row[j] = matrix_row[lane + LANES * j];
#pragma unroll
            for (int i = 0; i < ROWS; ++i) {
                const double coefficient = coefficients[warp + WARPS * i];
                const bool is_pivot = warp + WARPS * i == pivot;
                unknown[i] = is_pivot ? step : unknown[i];
                right[i] = is_pivot ? in_right : right[i] - coefficient * in_right;
#pragma unroll
                for (int j = part; j < MATRIX_COLUMNS; ++j)
                    matrix[i][j] = is_pivot ? row[j] : matrix[i][j] - coefficient * row[j];
            }
        }
    }
#pragma unroll
    for (int i = 0; i < ROWS; ++i) {
        if (warp + WARPS * i < K && exists) solutions[(system * K + unknown[i]) * columns + column] = right[i];
    }
}
