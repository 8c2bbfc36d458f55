// The gradients of pooling.

#ifndef SYNKHRONOS_POOLING_GRADIENTS
#define SYNKHRONOS_POOLING_GRADIENTS

namespace synkhronos_pooling {

// Numbers as integers.
template <class T>
struct Bits;
template <>
struct Bits<float> {
    typedef npy_int32 type;
};
template <>
struct Bits<double> {
    typedef npy_int64 type;
};

// What windows add to the gradient of the elements: with a maximum, those that equal it get its
// gradient. `one` adds for neighbouring elements of one window, and `lanes` returns what the windows
// from one on add, each to as many elements as the stride.
template <class T>
class OfMaximum {
    Rows<T, Sum> z, gz;
    const T *next_z, *next_gz;

  public:
    SYNKHRONOS_ONCE OfMaximum(const T *z, const T *gz, const Geometry &at, npy_intp left, npy_intp right)
        : z(at.rows.count, at.columns.count, left, right),
          gz(at.rows.count, at.columns.count, left, right),
          next_z(z),
          next_gz(gz) {}
    SYNKHRONOS_ONCE void next(const Geometry &at) {
        z.read(next_z), gz.read(next_gz);
        next_z += at.windows(), next_gz += at.windows();
    }
    void one(npy_intp row, npy_intp column, const T *__restrict__ x, T *__restrict__ gx,
             npy_intp count) const {
        const npy_intp r = row * z.stride + column;
        const T maximum = z.start[r];
        typename Bits<T>::type gradient;
        std::memcpy(&gradient, gz.start + r, sizeof gradient);
        for (npy_intp c = 0; c < count; c++) {  // without branches, which are mostly mispredicted
            const typename Bits<T>::type equal = x[c] == maximum, bits = gradient & -equal;
            T term;
            std::memcpy(&term, &bits, sizeof term);
            gx[c] += term;
        }
    }
    template <int STRIDE, int LANES, class V>
    void lanes(npy_intp row, npy_intp column, const V *x, V *terms) const {
        V maxima[3], gradients[3];
        const npy_intp r = row * z.stride + column;
        Vectors<T, LANES>::load(z.start + r, maxima[2]),
            Vectors<T, LANES>::load(gz.start + r, gradients[2]);
        STRIDE == 1 ? (void)(maxima[0] = maxima[2]) : Vectors<T, LANES>::twice(maxima[2], maxima);
        STRIDE == 1 ? (void)(gradients[0] = gradients[2])
                    : Vectors<T, LANES>::twice(gradients[2], gradients);
        for (int h = 0; h < STRIDE; h++) terms[h] = x[h] == maxima[h] ? gradients[h] : V();
    }
};

// With a sum or an average, all get the same share.
template <class T>
class OfSum {
    const Buffer<T> shares, divisors;
    Rows<T, Sum> rows;
    const T *gz;

  public:
    SYNKHRONOS_ONCE OfSum(const T *, const T *gz, const Geometry &at, npy_intp left, npy_intp right)
        : shares(at.windows()),
          divisors(at.windows()),
          rows(at.rows.count, at.columns.count, left, right),
          gz(gz) {
        for (npy_intp r = 0; r < at.windows(); r++)
            divisors[r] = at.divisor(r / at.columns.count, r % at.columns.count);
    }
    SYNKHRONOS_ONCE void next(const Geometry &at) {
        for (npy_intp r = 0; r < at.windows(); r++) shares[r] = gz[r] / divisors[r];
        rows.read(&shares[0]);
        gz += at.windows();
    }
    void one(npy_intp row, npy_intp column, const T *, T *gx, npy_intp count) const {
        const T share = rows.start[row * rows.stride + column];
        for (npy_intp c = 0; c < count; c++) gx[c] += share;
    }
    template <int STRIDE, int LANES, class V>
    void lanes(npy_intp row, npy_intp column, const V *, V *terms) const {
        V share;
        Vectors<T, LANES>::load(rows.start + row * rows.stride + column, share);
        STRIDE == 1 ? (void)(terms[0] = share) : Vectors<T, LANES>::twice(share, terms);
    }
};

// Of the rows of windows, those that contain a row of the image.
struct Range {
    npy_intp begin, end;
};
SYNKHRONOS_ONCE static void find_ranges(const Axis &rows, const Buffer<Range> &over) {
    for (npy_intp row = 0; row < rows.size; row++)
        over[row].begin = rows.ended(row), over[row].end = rows.begun(row + 1);
}

// Add up the terms of the elements of a row, from one column to before another.
template <class From, class T>
SYNKHRONOS_ONCE static void spread_one_by_one(const T *x, T *gx, const From &terms, const Geometry &at,
                                              Range over, npy_intp from, npy_intp to) {
    for (npy_intp c = from; c < to; c++) gx[c] = 0;
    const npy_intp first = at.columns.ended(from), last = at.columns.begun(to);
    for (npy_intp i = over.begin; i < over.end; i++)
        for (npy_intp j = first; j < last; j++) {
            const npy_intp begin = std::max(at.columns.begin(j), from);
            terms.one(i, j, x + begin, gx + begin, std::min(at.columns.end(j), to) - begin);
        }
}

// The same for all elements that the windows from `first` on begin with, each for as many as the stride.
template <int WINDOW, int STRIDE, int LANES, class From, class T>
static inline void spread_row(const T *x, T *gx, const From &terms, Range over, npy_intp any_window,
                              npy_intp first, npy_intp count) {
    typedef Vectors<T, LANES> Of;
    typedef typename Of::type V;
    const npy_intp window = WINDOW ? WINDOW : any_window, most = (window - 1) / STRIDE;
    for (npy_intp q = 0;; q = std::min(q + LANES, count - LANES)) {
        V elements[STRIDE], sums[STRIDE], added[2];
        for (int h = 0; h < STRIDE; h++)
            Of::load(x + STRIDE * q + h * LANES, elements[h]), sums[h] = V();
        for (npy_intp i = over.begin; i < over.end; i++)
            for (npy_intp t = most; t >= 0; t--) {
                terms.template lanes<STRIDE, LANES>(i, first + q - t, elements, added);
                for (int h = 0; h < STRIDE; h++) {
                    if (STRIDE == 2 && 2 * t + 2 > window) Of::keep_even(added[h]);
                    sums[h] = sums[h] + added[h];
                }
            }
        for (int h = 0; h < STRIDE; h++) std::memcpy(gx + STRIDE * q + h * LANES, sums + h, sizeof(V));
        if (q == count - LANES) return;
    }
}

template <int WINDOW, int STRIDE, int LANES, class From, class T>
static void spread_by_vectors(const T *x, const T *z, const T *gz, T *gx, const Geometry &at) {
    const npy_intp size = at.columns.size, window = at.columns.window;
    const npy_intp first = (at.columns.pad + STRIDE - 1) / STRIDE,
                   from = first * STRIDE - at.columns.pad;
    const npy_intp count = (size - from) / STRIDE, to = from + count * STRIDE;
    const Buffer<Range> over(at.rows.size);
    find_ranges(at.rows, over);
    From terms(z, gz, at, (window - 1) / STRIDE - first, first + count - at.columns.count);
    for (npy_intp n = 0; n < at.images; n++) {
        terms.next(at);
        for (npy_intp row = 0; row < at.rows.size; row++, x += size, gx += size) {
            if (from > 0) spread_one_by_one(x, gx, terms, at, over[row], 0, from);
            spread_row<WINDOW, STRIDE, LANES>(x + from, gx + from, terms, over[row], window, first,
                                              count);
            if (to < size) spread_one_by_one(x, gx, terms, at, over[row], to, size);
        }
    }
}

template <int WINDOW, int STRIDE, class From, class T>
static bool spread_was_by_vectors(const T *x, const T *z, const T *gz, T *gx, const Geometry &at) {
    const int lanes = 32 / sizeof(T);
    const Axis &columns = at.columns;
    if (columns.stride != STRIDE || (WINDOW && columns.window != WINDOW)) return false;
    if (!at.windows() || columns.window > columns.size + 2 * columns.pad) return false;
    const npy_intp count = (columns.size - columns.pad % STRIDE) / STRIDE;
    if (count >= lanes) spread_by_vectors<WINDOW, STRIDE, lanes, From>(x, z, gz, gx, at);
    else if (count >= lanes / 2) spread_by_vectors<WINDOW, STRIDE, lanes / 2, From>(x, z, gz, gx, at);
    return count >= lanes / 2;
}

template <int WINDOW, int STRIDE, class From, class T>
static void spread(const T *x, const T *z, const T *gz, T *gx, const Geometry &at) {
    if (STRIDE <= 1 && spread_was_by_vectors<WINDOW, 1, From>(x, z, gz, gx, at)) return;
    if ((!STRIDE || STRIDE == 2) && spread_was_by_vectors<WINDOW, 2, From>(x, z, gz, gx, at)) return;
    const Buffer<Range> over(at.rows.size);
    find_ranges(at.rows, over);
    From terms(z, gz, at, 0, 0);
    for (npy_intp n = 0; n < at.images; n++) {
        terms.next(at);
        for (npy_intp row = 0; row < at.rows.size; row++, x += at.columns.size, gx += at.columns.size)
            spread_one_by_one(x, gx, terms, at, over[row], 0, at.columns.size);
    }
}

// The windows of a gradient are those of the output that it is of, however many these are.
static bool gradient_geometry(PyArrayObject *x, PyArrayObject *gz, const Pairs &of, Geometry &at) {
    const int dims = PyArray_NDIM(x);
    at.images = product(x, 0, dims - 2);
    set_axis(at.rows, x, of, 0), set_axis(at.columns, x, of, 1);
    at.rows.count = PyArray_DIM(gz, dims - 2), at.columns.count = PyArray_DIM(gz, dims - 1);
    if (!PyArray_CompareLists(PyArray_DIMS(x), PyArray_DIMS(gz), dims - 2)) {
        PyErr_SetString(
            PyExc_ValueError,
            "The gradient of pooling expects as many images in the gradient as in the input, but got "
            "different shapes before the last two axes.");
        return false;
    }
    return check_pairs(of);
}

template <int WINDOW, int STRIDE, class T>
static bool max_pool_gradient(PyArrayObject *x, PyArrayObject *z, PyArrayObject *gz, const Pairs &of,
                              PyArrayObject **gx) {
    Geometry at;
    at.mode = MAX;
    if (!gradient_geometry(x, gz, of, at)) return false;
    if (!PyArray_SAMESHAPE(z, gz)) {
        PyErr_SetString(
            PyExc_ValueError,
            "The gradient of pooling expects the maxima and their gradient to have the same shape, "
            "but got different ones.");
        return false;
    }
    Elements elements(x), maxima(z), gradient(gz);
    if (!elements.there() || !maxima.there() || !gradient.there() || !allocate(gx, x, PyArray_DIMS(x)))
        return false;
    if (at.images && at.elements())
        spread<WINDOW, STRIDE, OfMaximum<T> >(elements.as<T>(), maxima.as<T>(), gradient.as<T>(),
                                              (T *)PyArray_DATA(*gx), at.flat());
    return true;
}

template <int WINDOW, int STRIDE, class T>
static bool average_pool_gradient(PyArrayObject *x, PyArrayObject *gz, const Pairs &of, Mode mode,
                                  PyArrayObject **gx) {
    Geometry at;
    at.mode = mode;
    if (!gradient_geometry(x, gz, of, at)) return false;
    if (mode == AVERAGE_WITHOUT_PADDING && (of.pad[0] || of.pad[1])) {
        PyErr_SetString(
            PyExc_ValueError,
            "The gradient of pooling in the mode 'average_exc_pad' expects no padding, but got some. "
            "Use the mode 'average_inc_pad' or 'sum'.");
        return false;
    }
    Elements gradient(gz);
    if (!gradient.there() || !allocate(gx, x, PyArray_DIMS(x))) return false;
    T *to = (T *)PyArray_DATA(*gx);  // also in place of the images, whose elements make no difference
    if (at.images && at.elements())
        spread<WINDOW, STRIDE, OfSum<T> >(to, (const T *)NULL, gradient.as<T>(), to, at.flat());
    return true;
}
}  // namespace synkhronos_pooling

#endif
