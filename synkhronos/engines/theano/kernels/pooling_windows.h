// Pooling: the maximum, sum or average of each window.

#ifndef SYNKHRONOS_POOLING_WINDOWS
#define SYNKHRONOS_POOLING_WINDOWS

namespace synkhronos_pooling {

// Reduce neighbouring windows, at least as many as a vector has lanes. WINDOW is 0 if it is not known.
template <int WINDOW, int STRIDE, int LANES, class By, class T>
static inline void reduce_row(const T *x, T *z, npy_intp rows, npy_intp row_stride, npy_intp any_window,
                              npy_intp count, const T *divisors) {
    typedef Vectors<T, LANES> Of;
    const npy_intp window = WINDOW ? WINDOW : any_window;
    for (npy_intp r = 0;; r = std::min(r + LANES, count - LANES)) {
        const T *row = x + STRIDE * r;
        typename Of::type result, next;
        STRIDE == 1 ? Of::load(row, result) : Of::evens(row, result);
        By::start(result);
        for (npy_intp i = 0; i < rows; i++, row += row_stride)
            for (npy_intp k = 0; k < window; k++) {
                STRIDE == 1 ? Of::load(row + k, next) : Of::evens(row + k, next);
                By::step(result, next);
            }
        Of::load(divisors + r, next);
        By::finish(result, next);
        std::memcpy(z + r, &result, sizeof result);
        if (r == count - LANES) return;
    }
}

template <int WINDOW, int STRIDE, int LANES, class By, class T>
static void reduce_by_vectors(const T *x, T *z, const Geometry &at) {
    const Axis &columns = at.columns;
    Rows<T, By> image(at.rows.size, columns.size, columns.pad,
                      (columns.count - 1) * STRIDE - columns.pad + columns.window - columns.size);
    const Buffer<T> divisors(at.windows());
    for (npy_intp r = 0; r < at.windows(); r++)
        divisors[r] = at.divisor(r / columns.count, r % columns.count);
    for (npy_intp n = 0; n < at.images; n++, x += at.elements()) {
        image.read(x);
        for (npy_intp row = 0; row < at.rows.count; row++, z += columns.count)
            reduce_row<WINDOW, STRIDE, LANES, By>(
                image.start - columns.pad + at.rows.begin(row) * image.stride, z, at.rows.length(row),
                image.stride, columns.window, columns.count, &divisors[row * columns.count]);
    }
}

// Reduce the windows of so many images one by one, side by side as none waits for another.
template <int IMAGES, class By, class T>
static void reduce_one_by_one(const T *x, T *z, const Geometry &at) {
    const npy_intp elements = at.elements(), windows = at.windows(), size = at.columns.size;
    for (npy_intp row = 0; row < at.rows.count; row++)
        for (npy_intp column = 0; column < at.columns.count; column++, z++) {
            const npy_intp begin = at.columns.begin(column), end = at.columns.end(column);
            T result[IMAGES];
            for (int n = 0; n < IMAGES; n++)
                result[n] = By::start(x + n * elements + at.rows.begin(row) * size + begin);
            for (npy_intp i = at.rows.begin(row) * size; i < at.rows.end(row) * size; i += size)
                for (npy_intp k = i + begin; k < i + end; k++)
#pragma GCC unroll 8
                    for (int n = 0; n < IMAGES; n++) By::step(result[n], x[n * elements + k]);
            const T divisor = at.divisor(row, column);
            for (int n = 0; n < IMAGES; n++) By::finish(result[n], divisor), z[n * windows] = result[n];
        }
}

// WINDOW and STRIDE are those of the columns as far as they are known when this is compiled, or 0.
// Return whether there are enough windows, and the sizes are those.
template <int WINDOW, int STRIDE, class By, class T>
static bool reduced_by_vectors(const T *x, T *z, const Geometry &at) {
    const int lanes = 32 / sizeof(T);
    if (at.columns.stride != STRIDE || (WINDOW && at.columns.window != WINDOW) || !at.elements())
        return false;
    if (at.columns.count >= lanes) reduce_by_vectors<WINDOW, STRIDE, lanes, By>(x, z, at);
    else if (at.columns.count >= lanes / 2) reduce_by_vectors<WINDOW, STRIDE, lanes / 2, By>(x, z, at);
    return at.columns.count >= lanes / 2;
}

template <int WINDOW, int STRIDE, class By, class T>
static void reduce(const T *x, T *z, const Geometry &at) {
    if (STRIDE <= 1 && reduced_by_vectors<WINDOW, 1, By>(x, z, at)) return;
    if ((!STRIDE || STRIDE == 2) && reduced_by_vectors<WINDOW, 2, By>(x, z, at)) return;
    npy_intp n = 0;
    for (; n + 8 <= at.images; n += 8)
        reduce_one_by_one<8, By>(x + n * at.elements(), z + n * at.windows(), at);
    for (; n < at.images; n++) reduce_one_by_one<1, By>(x + n * at.elements(), z + n * at.windows(), at);
}

// Set how many windows there are along an axis.
static bool count_windows(Axis &axis, bool ignore_border) {
    const npy_intp padded = axis.size + 2 * axis.pad;
    if (ignore_border) axis.count = padded < axis.window ? 0 : (padded - axis.window) / axis.stride + 1;
    else if (axis.pad) {
        PyErr_SetString(
            PyExc_ValueError,
            "Pooling with padding expects ignore_border=True, but got False. Use True, or no padding.");
        return false;
    } else if (axis.stride >= axis.window) axis.count = axis.size ? (padded - 1) / axis.stride + 1 : 0;
    else axis.count = std::max((padded - 1 - axis.window + axis.stride) / axis.stride, (npy_intp)0) + 1;
    return true;
}

template <int WINDOW, int STRIDE, class By, class T>
static bool pool(PyArrayObject *x, const Pairs &of, bool ignore_border, Mode mode, PyArrayObject **z) {
    const int dims = PyArray_NDIM(x);
    Geometry at = {product(x, 0, dims - 2), Axis(), Axis(), mode};
    set_axis(at.rows, x, of, 0), set_axis(at.columns, x, of, 1);
    if (!check_pairs(of) || !count_windows(at.rows, ignore_border) ||
        !count_windows(at.columns, ignore_border))
        return false;
    if (mode == MAX && !at.elements() && at.windows() && at.images) {
        PyErr_Format(
            PyExc_ValueError,
            "Pooling expects images with elements, but got a shape of %zd x %zd: there is no maximum.",
            (Py_ssize_t)at.rows.size, (Py_ssize_t)at.columns.size);
        return false;
    }
    npy_intp shape[NPY_MAXDIMS];
    std::memcpy(shape, PyArray_DIMS(x), dims * sizeof(npy_intp));
    shape[dims - 2] = at.rows.count, shape[dims - 1] = at.columns.count;
    Elements from(x);
    if (!from.there() || !allocate(z, x, shape)) return false;
    if (at.images && at.windows())
        reduce<WINDOW, STRIDE, By>(from.as<T>(), (T *)PyArray_DATA(*z), at.flat());
    return true;
}
}  // namespace synkhronos_pooling

#endif
