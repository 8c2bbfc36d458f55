// Convolutions as products of matrices: of the filters and the columns, block by block.

namespace synkhronos_convolution {

inline void blas(char ta, char tb, int m, int n, int k, const float *a, int lda, const float *b, int ldb,
                 float beta, float *c, int ldc) {
    const float one = 1;
    sgemm_(&ta, &tb, &m, &n, &k, &one, a, &lda, b, &ldb, &beta, c, &ldc);
}

inline void blas(char ta, char tb, int m, int n, int k, const double *a, int lda, const double *b,
                 int ldb, double beta, double *c, int ldc) {
    const double one = 1;
    dgemm_(&ta, &tb, &m, &n, &k, &one, a, &lda, b, &ldb, &beta, c, &ldc);
}

// A matrix with rows one after another, or its transpose.
template <typename T>
struct Matrix {
    T *data;
    npy_intp width;  // from row to row
    bool transposed;
};

// c = a b + beta c, where the product has the given number of rows and columns, and depth terms. BLAS
// has columns one after another, hence computes the transposed product.
template <typename T>
void multiply(npy_intp rows, npy_intp columns, npy_intp depth, Matrix<const T> a, Matrix<const T> b,
              T beta, T *c, npy_intp width) {
    blas(b.transposed ? 'T' : 'N', a.transposed ? 'T' : 'N', static_cast<int>(columns),
         static_cast<int>(rows), static_cast<int>(depth), b.data, static_cast<int>(b.width), a.data,
         static_cast<int>(a.width), beta, c, static_cast<int>(width));
}

// The output of a group in a block, as a matrix of filters x positions.
template <typename T>
struct OutputOf {
    const Geometry &g;
    const Block &block;
    npy_intp start;  // of the group in the first image

    OutputOf(const Geometry &g, const Block &block, npy_intp group)
        : g(g),
          block(block),
          start((block.image * g.filters + group * g.group_filters()) * g.output_area() +
                block.row * g.columns.output) {}

    // A block of one image is a matrix as it is; several are copied.
    Matrix<const T> read(const T *output, T *copy) const {
        const npy_intp area = g.output_area(), images = g.filters * area;
        if (block.images == 1) return {output + start, area, false};
        for (npy_intp filter = 0; filter < g.group_filters(); ++filter)
            copy_rows<T>({output + start + filter * area, images, 1},
                         {copy + filter * block.width, area, 1}, block.images, area);
        return {copy, block.width, false};
    }

    void write(const T *copy, T *output) const {
        const npy_intp area = g.output_area(), images = g.filters * area;
        for (npy_intp filter = 0; filter < g.group_filters(); ++filter)
            copy_rows<T>({copy + filter * block.width, area, 1},
                         {output + start + filter * area, images, 1}, block.images, area);
    }
};

// The channels of a group in a block, as a matrix of columns.
template <typename T>
struct InputOf {
    const Geometry &g;
    const Block &block;
    Lines<T> lines;

    InputOf(const Geometry &g, const Block &block)
        : g(g), block(block), lines(g, block.row, block.row + block.rows) {}

    bool is_matrix() const { return g.is_pointwise() && block.images == 1; }
    npy_intp start(npy_intp group) const {
        return (block.image * g.channels + group * g.group_channels()) * g.image_area();
    }

    Matrix<const T> read(const T *input, npy_intp group, T *copy) const {
        if (is_matrix()) return {input + start(group), g.image_area(), false};
        lines.gather(input + start(group), block.images, copy, block.padded_width());
        return {copy, block.padded_width(), false};
    }

    void add(T *copy, npy_intp group, T *input) const {
        lines.add_back(copy, block.images, block.padded_width(), input + start(group));
    }
};

template <typename T>
void forward(const Geometry &g, const T *input, const T *filters, T *output) {
    const npy_intp m = g.group_filters(), k = g.depth();
    const Strided<T> strided = {filters, k, g.rows.kernel * g.columns.kernel, g.columns.kernel, 1};
    if (convolve_directly(g, input, strided, m * k, output)) return;
    const Blocks blocks(g, sizeof(T));
    const npy_intp width = blocks.width(g);
    const Scratch<T> columns(k * width), joined(blocks.joins_images() ? m * width : 0);
    blocks.each(g, [&](const Block &block) {
        const InputOf<T> inputs(g, block);
        for (npy_intp group = 0; group < g.groups; ++group) {
            const OutputOf<T> outputs(g, block, group);
            const Matrix<const T> b = inputs.read(input, group, columns.get());
            const Matrix<const T> a = {filters + group * m * k, k, false};
            if (block.images == 1) {
                multiply(m, block.width, k, a, b, T(0), output + outputs.start, g.output_area());
            } else {
                multiply(m, block.width, k, a, b, T(0), joined.get(), block.width);
                outputs.write(joined.get(), output);
            }
        }
    });
}

// BLAS routines are faster with few columns than with few rows, so the transposed gradient is computed
// if there are few filters. With many, this makes no difference, and the gradient is large.
template <typename T>
void gradient_of_filters(const Geometry &g, const T *input, const T *output, T *filters) {
    if (gradient_of_filters_directly(g, input, output, filters)) return;
    const Blocks blocks(g, sizeof(T));
    const npy_intp m = g.group_filters(), k = g.depth(), width = blocks.width(g);
    const Scratch<T> columns(k * width), joined(blocks.joins_images() ? m * width : 0);
    const bool transposed = m < 100 && m < k;
    const Scratch<T> sums(transposed ? g.groups * m * k : 0);
    T beta = 0;
    blocks.each(g, [&](const Block &block) {
        const InputOf<T> inputs(g, block);
        for (npy_intp group = 0; group < g.groups; ++group) {
            Matrix<const T> a = OutputOf<T>(g, block, group).read(output, joined.get());
            Matrix<const T> b = inputs.read(input, group, columns.get());
            if (transposed) {
                a.transposed = true;
                multiply(k, m, block.width, b, a, beta, sums.get() + group * m * k, m);
            } else {
                b.transposed = true;
                multiply(m, k, block.width, a, b, beta, filters + group * m * k, k);
            }
        }
        beta = 1;
    });
    for (npy_intp group = 0; transposed && group < g.groups; ++group)
        transpose(sums.get() + group * m * k, k, m, m, filters + group * m * k, k);
}

// If the stride is 1, the gradient is itself a convolution, of the output with the filters turned
// around.
template <typename T>
bool gradient_of_input_directly(const Geometry &g, const T *filters, const T *output, T *input) {
    if (g.rows.stride != 1 || g.columns.stride != 1) return false;
    Geometry turned = g;
    std::swap(turned.channels, turned.filters);
    turned.rows = g.rows.turned(), turned.columns = g.columns.turned();
    const npy_intp size = g.rows.kernel * g.columns.kernel;
    const Strided<T> strided = {filters + size - 1, size, g.depth(), -g.columns.kernel, -1};
    return convolve_directly(turned, output, strided, g.group_filters() * g.depth(), input);
}

template <typename T>
void gradient_of_input(const Geometry &g, const T *filters, const T *output, T *input) {
    if (gradient_of_input_directly(g, filters, output, input)) return;
    const Blocks blocks(g, sizeof(T));
    const npy_intp m = g.group_filters(), k = g.depth(), width = blocks.width(g);
    const Scratch<T> columns(k * width), joined(blocks.joins_images() ? m * width : 0);
    blocks.each(g, [&](const Block &block) {
        const InputOf<T> inputs(g, block);
        if (block.row == 0 && !inputs.is_matrix())
            std::fill_n(input + inputs.start(0), block.images * g.channels * g.image_area(), T(0));
        for (npy_intp group = 0; group < g.groups; ++group) {
            const Matrix<const T> a = {filters + group * m * k, k, true};
            const Matrix<const T> b = OutputOf<T>(g, block, group).read(output, joined.get());
            if (inputs.is_matrix()) {
                multiply(k, block.width, m, a, b, T(0), input + inputs.start(group), g.image_area());
            } else {
                multiply(k, block.width, m, a, b, T(0), columns.get(), block.padded_width());
                inputs.add(columns.get(), group, input);
            }
        }
    });
}

}  // namespace synkhronos_convolution
