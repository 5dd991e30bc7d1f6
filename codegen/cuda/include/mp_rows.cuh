/* Rows of a cache by their positions: at equal distances, or in pages of PAGE rows that a table names. `at` with `more`
 * is the row so many behind a position: of a page the row `last` where that comes before. RUN rows, up to 32, are in one
 * piece if the first has a multiple of it as its position. */
template <typename T> struct mp_rows {
    enum { RUN = 32 };
    const T *first;
    int64_t pitch;
    MP_FN const T *at(const int64_t position) const { return first + position * pitch; }
    MP_FN const T *at(const int64_t position, const int more, const int64_t) const { return at(position) + more * pitch; }
};

template <typename T, int PAGE> struct mp_paged_rows {
    enum { RUN = PAGE % 32 ? PAGE & -PAGE : 32 };
    const T *first; /* the first row of page 0 */
    const int32_t *table;
    int64_t pages, page_pitch, pitch;
    MP_FN const T *at(const int64_t position) const
    {
        return first + MP_PAGE(table[position / PAGE], pages) * page_pitch + position % PAGE * pitch;
    }
    MP_FN const T *at(const int64_t position, const int more, const int64_t last) const
    {
        return at(mp_min(position + more, last)); /* the table ends there */
    }
};

template <typename T> MP_FN mp_rows<T> mp_rows_of(const T *first, const int64_t pitch) { return {first, pitch}; }
template <int PAGE, typename T>
MP_FN mp_paged_rows<T, PAGE> mp_paged_rows_of(
    const T *first, const int32_t *table, const int64_t pages, const int64_t page_pitch, const int64_t pitch)
{
    return {first, table, pages, page_pitch, pitch};
}
