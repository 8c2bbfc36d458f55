// The gradient with respect to few filters without a matrix of columns, as in direct.h.
//
// Vectors have the gradients of a pixel of the output in several filters. The sums, over some rows, of
// their products with the pixels of the image stay in registers, for some elements of the filters at a
// time.

namespace synkhronos_convolution {

#ifdef CONVOLUTION_VECTOR

template <typename T>
class DirectGradient {
    typedef typename Vectors<T>::Vector Vector;
    enum { PANEL = Vectors<T>::PANEL, SUMS = Vectors<T>::SUMS };

    const Geometry &g;
    const npy_intp block;  // rows of the output
    const Scratch<T> memory;
    Padded<T> padded;
    T *sums, *pixels;

  public:
    static bool suits(const Geometry &g) {
        const npy_intp kernel = g.columns.kernel;
        return Vectors<T>::suits(g) && g.columns.dilation == 1 &&
               (kernel == 3 || kernel == 5 || kernel == 7) && kernel <= SUMS;
    }

    // The block of the output should take half of the first-level cache.
    explicit DirectGradient(const Geometry &g)
        : g(g),
          block(std::min(std::max<npy_intp>((1 << 14) / (g.columns.output * PANEL * sizeof(T)), 1),
                         g.rows.output)),
          memory(sums_size() + block * g.columns.output * PANEL + PANEL),
          padded(g),
          sums(Vectors<T>::align(memory.get())),
          pixels(sums + sums_size()) {
        std::fill_n(pixels, block * g.columns.output * PANEL, T(0));
    }

    // Computes one group.
    void run(const T *input, const T *output, T *filters) {
        const npy_intp area = g.output_area(), m = g.group_filters(), k = g.depth();
        std::fill_n(sums, sums_size(), T(0));
        for (npy_intp i = 0; i < g.images; ++i) {
            const T *image = padded.read(input + i * g.channels * g.image_area());
            for (npy_intp y = 0; y < g.rows.output; y += block)
                for (npy_intp filter = 0; filter < m; filter += PANEL) {
                    const npy_intp rows = std::min(block, g.rows.output - y);
                    transpose(output + (i * g.filters + filter) * area + y * g.columns.output,
                              std::min<npy_intp>(PANEL, m - filter), rows * g.columns.output, area,
                              pixels, PANEL);
                    add_block(image + y * g.rows.stride * padded.width, rows, sums + filter * k);
                }
        }
        for (npy_intp filter = 0; filter < m; filter += PANEL)
            transpose(sums + filter * k, k, std::min<npy_intp>(PANEL, m - filter), PANEL,
                      filters + filter * k, k);
    }

  private:
    npy_intp sums_size() const { return Vectors<T>::panels(g) * PANEL * g.depth(); }

    void add_block(const T *image, npy_intp rows, T *sums) const {
        for (npy_intp channel = 0; channel < g.group_channels(); ++channel, image += padded.area) {
            switch (g.columns.kernel) {
                case 3: sums = add_channel<3>(image, rows, sums); break;
                case 5: sums = add_channel<5>(image, rows, sums); break;
                case 7: sums = add_channel<7>(image, rows, sums); break;
            }
        }
    }

    // As many rows of the filters at a time as fit into the registers.
    template <int COLUMNS>
    T *add_channel(const T *image, npy_intp rows, T *sums) const {
        enum {
            FIT = SUMS / COLUMNS < 1 ? 1 : SUMS / COLUMNS,
            THREE = FIT < 3 ? 1 : 3,
            TWO = FIT < 2 ? 1 : 2
        };
        const npy_intp distance = g.rows.dilation * padded.width;
        for (npy_intp row = 0; row < g.rows.kernel;) {
            const npy_intp left = g.rows.kernel - row;
            const int taken = left >= THREE ? (THREE == 3 || left < TWO ? THREE : TWO)
                              : left >= TWO ? TWO
                                            : 1;
            const T *start = image + row * distance;
            if (taken == THREE) add<THREE, COLUMNS>(start, distance, rows, sums);
            else if (taken == TWO) add<TWO, COLUMNS>(start, distance, rows, sums);
            else add<1, COLUMNS>(start, distance, rows, sums);
            row += taken, sums += taken * COLUMNS * PANEL;
        }
        return sums;
    }

    template <int ROWS, int COLUMNS>
    void add(const T *image, npy_intp distance, npy_intp rows, T *to) const {
        const npy_intp width = g.columns.output, step = g.columns.stride;
        const Vector *gradients = reinterpret_cast<const Vector *>(pixels);
        Vector first[ROWS * COLUMNS] = {}, second[ROWS * COLUMNS] = {};
        for (npy_intp y = 0; y < rows; ++y, image += g.rows.stride * padded.width) {
            const T *pixel = image;
            for (npy_intp x = 0; x < width; ++x, pixel += step, gradients += 2) {
                const Vector a = gradients[0], b = gradients[1];
#pragma GCC unroll 16
                for (int i = 0; i < ROWS * COLUMNS; ++i) {
                    const T factor = pixel[i / COLUMNS * distance + i % COLUMNS];
                    first[i] += a * factor;
                    second[i] += b * factor;
                }
            }
        }
        Vector *sums = reinterpret_cast<Vector *>(to);
#pragma GCC unroll 16
        for (int i = 0; i < ROWS * COLUMNS; ++i) sums[2 * i] += first[i], sums[2 * i + 1] += second[i];
    }
};

// Returns whether it did.
template <typename T>
bool gradient_of_filters_directly(const Geometry &g, const T *input, const T *output, T *filters) {
    if (!DirectGradient<T>::suits(g)) return false;
    DirectGradient<T> direct(g);
    for (npy_intp group = 0; group < g.groups; ++group)
        direct.run(input + group * g.group_channels() * g.image_area(),
                   output + group * g.group_filters() * g.output_area(),
                   filters + group * g.group_filters() * g.depth());
    return true;
}

#else

template <typename T>
bool gradient_of_filters_directly(const Geometry &, const T *, const T *, T *) {
    return false;
}

#endif

}  // namespace synkhronos_convolution
