// Convolutions without a matrix of columns, for few filters on wide vectors.
//
// With few filters, it takes as long to copy the columns, once here and once inside of BLAS, as a good
// part of the multiplication. Here a vector has an element of several filters. It is multiplied by
// single pixels, which are read from where they are in the image, and the sums for some pixels of a row
// stay in registers.

namespace synkhronos_convolution {

// The filters of a group, in any order, as one strided array.
template <typename T>
struct Strided {
    const T *start;
    npy_intp filter, channel, row, column;
};

#ifdef CONVOLUTION_VECTOR

template <typename T>
class Direct {
    typedef typename Vectors<T>::Vector Vector;
    enum { PANEL = Vectors<T>::PANEL };

    const Geometry &g;
    const npy_intp tile;  // how many pixels at a time
    const Scratch<T> memory;
    Padded<T> padded;
    T *filters, *sums;

  public:
    // Whether this is worth while: not if much of what is computed is padding.
    static bool suits(const Geometry &g) {
        const npy_intp tile = best_tile(g.columns.output);
        return g.rows.stride == 1 && g.columns.stride == 1 && Vectors<T>::suits(g) && tile &&
               2 * ceil_divide(g.columns.output, tile) * tile <= 3 * g.columns.image &&
               std::min(std::min(g.rows.before, g.rows.after),
                        std::min(g.columns.before, g.columns.after)) >= 0;
    }

    explicit Direct(const Geometry &g)
        : g(g),
          tile(best_tile(g.columns.output)),
          memory(filters_size() + g.columns.output * PANEL + PANEL),
          padded(g),
          filters(Vectors<T>::align(memory.get())),
          sums(filters + filters_size()) {}

    // Computes one group.
    void run(const T *input, const Strided<T> &given, T *output) {
        pack(given);
        for (npy_intp i = 0; i < g.images; ++i) {
            const T *image = padded.read(input + i * g.channels * g.image_area());
            for (npy_intp panel = 0; panel < panels(); ++panel)
                for (npy_intp y = 0; y < g.rows.output; ++y) {
                    sum_row(image, y, filters + panel * g.depth() * PANEL);
                    write_row(panel * PANEL,
                              output + i * g.filters * g.output_area() + y * g.columns.output);
                }
        }
    }

  private:
    npy_intp panels() const { return Vectors<T>::panels(g); }
    npy_intp filters_size() const { return panels() * PANEL * g.depth(); }

    // The number of pixels with which a row is computed with the fewest to spare; 0 if it is too short.
    static npy_intp best_tile(npy_intp pixels) {
        npy_intp best = 0, fewest = 0;
#define CONVOLUTION_TRY(N)                                             \
    if (N <= pixels && (!best || ceil_divide(pixels, N) * N < fewest)) \
        best = N, fewest = ceil_divide(pixels, N) * N;
        CONVOLUTION_TILES(CONVOLUTION_TRY)
#undef CONVOLUTION_TRY
        return best;
    }

    void pack(const Strided<T> &given) {
        T *to = filters;
        for (npy_intp first = 0; first < panels() * PANEL; first += PANEL)
            for (npy_intp channel = 0; channel < g.group_channels(); ++channel)
                for (npy_intp row = 0; row < g.rows.kernel; ++row)
                    for (npy_intp column = 0; column < g.columns.kernel; ++column, to += PANEL) {
                        const T *from = given.start + channel * given.channel + row * given.row +
                                        column * given.column;
                        for (npy_intp i = 0; i < PANEL; ++i)
                            to[i] = first + i < g.group_filters() ? from[(first + i) * given.filter] : 0;
                    }
    }

    // The last tile may overlap the one before. Rows of the kernel that meet only padding are left out.
    void sum_row(const T *image, npy_intp y, const T *panel) {
        const npy_intp pixels = g.columns.output;
        npy_intp row = 0, end = g.rows.kernel;
        while (row < end && g.rows.source(y, row) < 0) ++row;
        while (row < end && g.rows.source(y, end - 1) >= g.rows.image) --end;
        image += (y + row * g.rows.dilation) * padded.width;
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
    void sum_tile(const T *image, const T *panel, npy_intp rows, T *to) const {
        const npy_intp kernel = g.columns.kernel, apart = g.columns.dilation,
                       lines = g.rows.dilation * padded.width;
        Vector first[N] = {}, second[N] = {};
        for (npy_intp channel = 0; channel < g.group_channels(); ++channel) {
            const T *line = image + channel * padded.area;
            const Vector *weights =
                reinterpret_cast<const Vector *>(panel + channel * g.rows.kernel * kernel * PANEL);
            for (npy_intp row = 0; row < rows; ++row, line += lines) {
                const T *pixels = line;
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
        Vector *sums = reinterpret_cast<Vector *>(to);
#pragma GCC unroll 16
        for (int i = 0; i < N; ++i) sums[2 * i] = first[i], sums[2 * i + 1] = second[i];
    }

    // The sums of a row have the filters of a pixel next to each other, the output the pixels of a
    // filter.
    void write_row(npy_intp filter, T *output) const {
        const npy_intp size = g.output_area();
        transpose(sums, g.columns.output, std::min<npy_intp>(PANEL, g.group_filters() - filter), PANEL,
                  output + filter * size, size);
    }
};

// Returns whether it did.
template <typename T>
bool convolve_directly(const Geometry &g, const T *input, const Strided<T> &filters, npy_intp group_size,
                       T *output) {
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
bool convolve_directly(const Geometry &, const T *, const Strided<T> &, npy_intp, T *) {
    return false;
}

#endif

}  // namespace synkhronos_convolution
