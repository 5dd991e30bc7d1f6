/* The sum of `left(m, i) * right(i, n)` over i, any type: a block makes a tile of TILE x TILE sums, one for each of its
 * threads, from tiles in shared memory. m0 and n0 are the tile's first row and column. */
enum { MP_MATMUL_TILE = 16 };

template <typename A, typename Left, typename Right>
MP_FN A mp_matmul(const int64_t rows, const int64_t columns, const int64_t depth, const int64_t m0, const int64_t n0,
    const Left &left_at, const Right &right_at)
{
    enum { TILE = MP_MATMUL_TILE };
    __shared__ A left[TILE][TILE + 1], right[TILE][TILE + 1];
    const int tx = threadIdx.x % TILE, ty = threadIdx.x / TILE;
    A sum = 0;
    for (int64_t k0 = 0; k0 < depth; k0 += TILE) {
        left[ty][tx] = m0 + ty < rows && k0 + tx < depth ? (A)left_at(m0 + ty, k0 + tx) : (A)0;
        right[ty][tx] = k0 + ty < depth && n0 + tx < columns ? (A)right_at(k0 + ty, n0 + tx) : (A)0;
        __syncthreads();
        const int last = (int)mp_min(TILE, depth - k0); /* beyond it 0 would still meet inf */
        for (int j = 0; j < last; ++j) sum += left[ty][j] * right[j][tx];
        __syncthreads();
    }
    return sum;
}
