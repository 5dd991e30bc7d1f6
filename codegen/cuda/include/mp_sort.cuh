/* Sorting the indices of a row by a block: a bottom-up merge sort. In every pass an element finds its place among the
 * elements of the run beside its own by bisection, so the order of equals is kept. */

/* The indices 0 to n - 1 in order, in one half of `room`, which has 2 n places. `right_first(a, b)`: element b, which
 * comes later in the row, goes before a. */
template <int THREADS, typename Order> MP_FN const int64_t *mp_sort(int64_t *room, const int64_t n,
    const Order &right_first)
{
    int64_t *from = room, *into = room + n;
    for (int64_t i = threadIdx.x; i < n; i += THREADS) from[i] = i;
    __syncthreads();
    for (int64_t width = 1; width < n; width *= 2) {
        for (int64_t i = threadIdx.x; i < n; i += THREADS) {
            const int64_t pair = i / (2 * width) * 2 * width, middle = mp_min(pair + width, n);
            const bool left = i < middle;
            const int64_t begin = left ? middle : pair, end = left ? mp_min(pair + 2 * width, n) : middle;
            /* Elements of the other run that go before this one: of equals, the left run's are first. */
            int64_t low = begin, high = end;
            while (low < high) {
                const int64_t probe = (low + high) / 2;
                const bool right = right_first(from[left ? i : probe], from[left ? probe : i]);
                if (left ? right : !right) low = probe + 1;
                else high = probe;
            }
            into[pair + (i - (left ? pair : middle)) + (low - begin)] = from[i];
        }
        __syncthreads();
        int64_t *const swap = from;
        from = into;
        into = swap;
    }
    return from;
}
