// Vectors of the processor, and the padded images and matrices that are computed with them.

#if defined(__ELF__) && defined(__GNUC__) && !defined(__clang__) && defined(__AVX512F__)
#define CONVOLUTION_VECTOR 64
#define CONVOLUTION_TILES(F) F(14) F(12) F(10) F(8) F(7) F(6)
#elif defined(__ELF__) && defined(__GNUC__) && !defined(__clang__) && defined(__AVX2__) && \
    defined(__FMA__)
#define CONVOLUTION_VECTOR 32
#define CONVOLUTION_TILES(F) F(6) F(5) F(4)
#endif

#ifdef CONVOLUTION_VECTOR
// Null pointers if no library has them.
extern "C" {
int openblas_get_num_threads(void) __attribute__((weak));
int MKL_Get_Max_Threads(void) __attribute__((weak));
}
#endif

namespace synkhronos_convolution {

#ifdef CONVOLUTION_VECTOR

inline bool blas_has_threads() {
    return (openblas_get_num_threads && openblas_get_num_threads() > 1) ||
           (MKL_Get_Max_Threads && MKL_Get_Max_Threads() > 1);
}

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
struct Vectors {
    typedef T Vector __attribute__((vector_size(CONVOLUTION_VECTOR)));
    // A panel has the elements of two vectors: how many filters are computed at a time. The sums for so
    // many pixels, or elements of the filters, fit into the registers.
    enum { PANEL = 2 * CONVOLUTION_VECTOR / sizeof(T), SUMS = CONVOLUTION_VECTOR == 64 ? 14 : 6 };

    static npy_intp panels(const Geometry &g) { return ceil_divide(g.group_filters(), PANEL); }

    // Whether computing with panels, in one thread, is worth while: not if BLAS has several, sums of few
    // terms have to be brought in order, many lanes have no filter, or a panel of filters does not fit
    // into a part of the second-level cache.
    static bool suits(const Geometry &g) {
        const npy_intp cache = 1 << 19, m = g.group_filters();
        return !blas_has_threads() && !g.is_pointwise() && g.depth() >= 16 && m <= 8 * PANEL &&
               4 * panels(g) * PANEL <= 5 * m &&
               g.depth() * PANEL * static_cast<npy_intp>(sizeof(T)) <= cache;
    }

    static T *align(T *memory) {
        const size_t offset = reinterpret_cast<size_t>(memory) % CONVOLUTION_VECTOR;
        return memory + (CONVOLUTION_VECTOR - offset) / sizeof(T);
    }
};

// The channels of a group in one image, with padding around it.
template <typename T>
class Padded {
    const Geometry &g;

  public:
    const npy_intp width, area;  // with padding

  private:
    const npy_intp size;
    const Scratch<T> memory;

    static npy_intp size_of(const Axis &axis) { return axis.before + axis.image + axis.after; }

  public:
    explicit Padded(const Geometry &g)
        : g(g),
          width(size_of(g.columns)),
          area(size_of(g.rows) * width),
          size(area == g.image_area() ? 0 : g.group_channels() * area),
          memory(size) {
        std::fill_n(memory.get(), size, T(0));
    }

    const T *read(const T *image) {
        if (!size) return image;
        T *to = memory.get() + g.rows.before * width + g.columns.before;
        for (npy_intp channel = 0; channel < g.group_channels(); ++channel)
            copy_rows<T>({image + channel * g.image_area(), g.columns.image, 1},
                         {to + channel * area, width, 1}, g.rows.image, g.columns.image);
        return memory.get();
    }
};

template <typename T>
void transpose_quad(const T *from, npy_intp width, T *to, npy_intp height) {
    typedef T Quad __attribute__((vector_size(4 * sizeof(T)), aligned(sizeof(T)), may_alias));
    typedef typename Integers<sizeof(T)>::Quad Places;
    const Places low = {0, 4, 1, 5}, high = {2, 6, 3, 7}, left = {0, 1, 4, 5}, right = {2, 3, 6, 7};
    Quad rows[4];
    for (int i = 0; i < 4; ++i) rows[i] = *reinterpret_cast<const Quad *>(from + i * width);
    const Quad a = __builtin_shuffle(rows[0], rows[1], low),
               b = __builtin_shuffle(rows[2], rows[3], low);
    const Quad c = __builtin_shuffle(rows[0], rows[1], high),
               d = __builtin_shuffle(rows[2], rows[3], high);
    *reinterpret_cast<Quad *>(to) = __builtin_shuffle(a, b, left);
    *reinterpret_cast<Quad *>(to + height) = __builtin_shuffle(a, b, right);
    *reinterpret_cast<Quad *>(to + 2 * height) = __builtin_shuffle(c, d, left);
    *reinterpret_cast<Quad *>(to + 3 * height) = __builtin_shuffle(c, d, right);
}

#endif

// Writes the transpose of a matrix, whose rows are width elements apart, to one whose rows are height
// apart.
template <typename T>
void transpose(const T *from, npy_intp rows, npy_intp columns, npy_intp width, T *to, npy_intp height) {
    npy_intp i = 0;
#ifdef CONVOLUTION_VECTOR
    for (; i + 4 <= rows; i += 4) {
        npy_intp j = 0;
        for (; j + 4 <= columns; j += 4)
            transpose_quad(from + i * width + j, width, to + j * height + i, height);
        for (; j < columns; ++j)
            for (npy_intp k = i; k < i + 4; ++k) to[j * height + k] = from[k * width + j];
    }
#endif
    for (; i < rows; ++i)
        for (npy_intp j = 0; j < columns; ++j) to[j * height + i] = from[i * width + j];
}

}  // namespace synkhronos_convolution
