// Convolutions without a matrix of columns, for few filters on wide vectors.
//
// With few filters, it takes as long to copy the columns, once here and once inside of BLAS, as a good part of
// the multiplication. Here a vector has an element of several filters. It is multiplied by single pixels, which
// are read from where they are in the image, and the sums for some pixels of a row stay in registers.

#if defined(__GNUC__) && !defined(__clang__) && defined(__AVX512F__)
#define CONVOLUTION_VECTOR 64
#define CONVOLUTION_TILES(F) F(14) F(12) F(10) F(8) F(7) F(6)
#elif defined(__GNUC__) && !defined(__clang__) && defined(__AVX2__) && defined(__FMA__)
#define CONVOLUTION_VECTOR 32
#define CONVOLUTION_TILES(F) F(6) F(5) F(4)
#endif

namespace convolution {

// The filters of a group, in any order, as one strided array.
template <typename T>
struct Strided {
    const T* start;
    npy_intp filter, channel, row, column;
};

#ifdef CONVOLUTION_VECTOR

template <size_t size>
struct Integers {};
template <>
struct Integers<4> {
    typedef npy_int32 Quad __attribute__((vector_size(16)));
};
template <>
struct Integers<8> {
    typedef npy_int64 Quad __attribute__((vector_size(32)));
};

template <typename T>
class Direct {
    typedef T Vector __attribute__((vector_size(CONVOLUTION_VECTOR)));
    typedef T Quad __attribute__((vector_size(4 * sizeof(T)), aligned(sizeof(T)), may_alias));
    enum { LANES = CONVOLUTION_VECTOR / sizeof(T), PANEL = 2 * LANES };  // filters in a vector, and at a time

    const Geometry& g;
    const npy_intp width, area;  // of the padded image
    const npy_intp tile;         // how many pixels at a time
    const Scratch<T> memory;
    T *filters, *sums, *padded;

  public:
    // Whether this is worth while: not if sums of few terms have to be brought in order, filters have to be
    // read from outside of the second-level cache for each tile, or much of what is computed is padding.
    static bool suits(const Geometry& g) {
        const npy_intp cache = 1 << 19, m = g.group_filters(), tile = best_tile(g.columns.output);
        if (g.rows.stride != 1 || g.columns.stride != 1 || g.is_pointwise() || g.depth() < 16 || !tile ||
            std::min(g.rows.before, g.rows.after) < 0 || std::min(g.columns.before, g.columns.after) < 0)
            return false;
        return m <= 8 * PANEL && 4 * panels(g) * PANEL <= 5 * m &&
               g.depth() * PANEL * static_cast<npy_intp>(sizeof(T)) <= cache &&
               2 * ceil_divide(g.columns.output, tile) * tile <= 3 * g.columns.image;
    }

    explicit Direct(const Geometry& g)
        : g(g), width(g.columns.before + g.columns.image + g.columns.after),
          area((g.rows.before + g.rows.image + g.rows.after) * width), tile(best_tile(g.columns.output)),
          memory(filters_size() + sums_size() + padded_size() + PANEL) {
        const size_t offset = reinterpret_cast<size_t>(memory.get()) % CONVOLUTION_VECTOR;
        filters = memory.get() + (CONVOLUTION_VECTOR - offset) / sizeof(T);
        sums = filters + filters_size();
        padded = sums + sums_size();
        if (is_padded()) std::fill_n(padded, padded_size(), T(0));
    }

    // Computes one group.
    void run(const T* input, const Strided<T>& given, T* output) {
        pack(given);
        for (npy_intp i = 0; i < g.images; ++i) {
            const T* image = input + i * g.channels * g.image_area();
            if (is_padded()) image = pad(image);
            for (npy_intp panel = 0; panel < panels(g); ++panel)
                for (npy_intp y = 0; y < g.rows.output; ++y) {
                    sum_row(image, y, filters + panel * g.depth() * PANEL);
                    write_row(panel * PANEL, output + i * g.filters * g.output_area() + y * g.columns.output);
                }
        }
    }

  private:
    static npy_intp panels(const Geometry& g) { return ceil_divide(g.group_filters(), PANEL); }
    bool is_padded() const { return area != g.image_area(); }
    npy_intp filters_size() const { return panels(g) * PANEL * g.depth(); }
    npy_intp sums_size() const { return (g.columns.output + 4) * PANEL; }
    npy_intp padded_size() const { return is_padded() ? g.group_channels() * area : 0; }

    // The number of pixels with which a row is computed with the fewest to spare; 0 if it is too short.
    static npy_intp best_tile(npy_intp pixels) {
        npy_intp best = 0, fewest = 0;
#define CONVOLUTION_TRY(N)                                         \
    if (N <= pixels && (!best || ceil_divide(pixels, N) * N < fewest)) \
        best = N, fewest = ceil_divide(pixels, N) * N;
        CONVOLUTION_TILES(CONVOLUTION_TRY)
#undef CONVOLUTION_TRY
        return best;
    }

    void pack(const Strided<T>& given) {
        T* to = filters;
        for (npy_intp first = 0; first < panels(g) * PANEL; first += PANEL)
            for (npy_intp channel = 0; channel < g.group_channels(); ++channel)
                for (npy_intp row = 0; row < g.rows.kernel; ++row)
                    for (npy_intp column = 0; column < g.columns.kernel; ++column, to += PANEL) {
                        const T* from = given.start + channel * given.channel + row * given.row +
                                        column * given.column;
                        for (npy_intp i = 0; i < PANEL; ++i)
                            to[i] = first + i < g.group_filters() ? from[(first + i) * given.filter] : 0;
                    }
    }

    const T* pad(const T* image) {
        T* to = padded + g.rows.before * width + g.columns.before;
        for (npy_intp channel = 0; channel < g.group_channels(); ++channel)
            copy_rows<T>({image + channel * g.image_area(), g.columns.image, 1}, {to + channel * area, width, 1},
                         g.rows.image, g.columns.image);
        return padded;
    }

    // The last tile may overlap the one before. Rows of the kernel that meet only padding are left out.
    void sum_row(const T* image, npy_intp y, const T* panel) {
        const npy_intp pixels = g.columns.output;
        npy_intp row = 0, end = g.rows.kernel;
        while (row < end && g.rows.source(y, row) < 0) ++row;
        while (row < end && g.rows.source(y, end - 1) >= g.rows.image) --end;
        image += (y + row * g.rows.dilation) * width;
        panel += row * g.columns.kernel * PANEL;
        for (npy_intp x = 0; x < pixels; x += tile) {
            const npy_intp first = std::min(x, pixels - tile);
#define CONVOLUTION_CASE(N) \
    case N: sum_tile<N>(image + first, panel, end - row, sums + first * PANEL); break;
            switch (tile) { CONVOLUTION_TILES(CONVOLUTION_CASE) }
#undef CONVOLUTION_CASE
        }
    }

    template <int N>
    void sum_tile(const T* image, const T* panel, npy_intp rows, T* to) const {
        const npy_intp kernel = g.columns.kernel, apart = g.columns.dilation, lines = g.rows.dilation * width;
        Vector first[N] = {}, second[N] = {};
        for (npy_intp channel = 0; channel < g.group_channels(); ++channel) {
            const T* line = image + channel * area;
            const Vector* weights =
                reinterpret_cast<const Vector*>(panel + channel * g.rows.kernel * kernel * PANEL);
            for (npy_intp row = 0; row < rows; ++row, line += lines) {
                const T* pixels = line;
                for (npy_intp column = 0; column < kernel; ++column, pixels += apart, weights += 2) {
                    const Vector a = weights[0], b = weights[1];
#pragma GCC unroll 16
                    for (int i = 0; i < N; ++i) {
                        first[i] += a * pixels[i];
                        second[i] += b * pixels[i];
                    }
                }
            }
        }
        Vector* sums = reinterpret_cast<Vector*>(to);
#pragma GCC unroll 16
        for (int i = 0; i < N; ++i) sums[2 * i] = first[i], sums[2 * i + 1] = second[i];
    }

    // The sums of a row have the filters of a pixel next to each other, the output the pixels of a filter.
    void write_row(npy_intp filter, T* output) const {
        const npy_intp pixels = g.columns.output, size = g.output_area();
        const npy_intp m = std::min<npy_intp>(PANEL, g.group_filters() - filter);
        output += filter * size;
        npy_intp x = 0;
        for (; x + 4 <= pixels && m % 4 == 0; x += 4)
            for (npy_intp i = 0; i < m; i += 4) transpose_quad(sums + x * PANEL + i, output + i * size + x, size);
        for (npy_intp i = 0; i < m; ++i)
            for (npy_intp j = x; j < pixels; ++j) output[i * size + j] = sums[j * PANEL + i];
    }

    static void transpose_quad(const T* from, T* to, npy_intp size) {
        typedef typename Integers<sizeof(T)>::Quad Places;
        const Quad a = get(from), b = get(from + PANEL), c = get(from + 2 * PANEL), d = get(from + 3 * PANEL);
        const Places low = {0, 4, 1, 5}, high = {2, 6, 3, 7}, left = {0, 1, 4, 5}, right = {2, 3, 6, 7};
        const Quad ab = __builtin_shuffle(a, b, low), cd = __builtin_shuffle(c, d, low);
        const Quad ab2 = __builtin_shuffle(a, b, high), cd2 = __builtin_shuffle(c, d, high);
        put(to, __builtin_shuffle(ab, cd, left));
        put(to + size, __builtin_shuffle(ab, cd, right));
        put(to + 2 * size, __builtin_shuffle(ab2, cd2, left));
        put(to + 3 * size, __builtin_shuffle(ab2, cd2, right));
    }

    static Quad get(const T* from) { return *reinterpret_cast<const Quad*>(from); }
    static void put(T* to, Quad quad) { *reinterpret_cast<Quad*>(to) = quad; }
};

// Returns whether it did.
template <typename T>
bool convolve_directly(const Geometry& g, const T* input, const Strided<T>& filters, npy_intp group_size,
                       T* output) {
    if (!Direct<T>::suits(g)) return false;
    Direct<T> direct(g);
    for (npy_intp group = 0; group < g.groups; ++group) {
        Strided<T> own = filters;
        own.start += group * group_size;
        direct.run(input + group * g.group_channels() * g.image_area(), own,
                   output + group * g.group_filters() * g.output_area());
    }
    return true;
}

#else

template <typename T>
bool convolve_directly(const Geometry&, const T*, const Strided<T>&, npy_intp, T*) {
    return false;
}

#endif

}  // namespace convolution
