// Convolutions of NumPy arrays: shapes are checked, and memory for the output is reused or allocated.

#include <climits>

namespace synkhronos_convolution {

inline void set_number(npy_intp *number, PyArrayObject *array) {
    if (array) *number = static_cast<npy_intp>(*static_cast<npy_int64 *>(PyArray_DATA(array)));
}

// What the arrays and Theano's parameters of the operation say; input or output can be missing.
template <typename Params>
Geometry geometry_of(const Params *params, PyArrayObject *input, PyArrayObject *filters,
                     PyArrayObject *output) {
    Geometry g = {};
    g.groups = params->num_groups;
    g.rows.stride = params->dH, g.columns.stride = params->dW;
    g.rows.dilation = params->dilH, g.columns.dilation = params->dilW;
    g.rows.before = params->padH_l, g.rows.after = params->padH_r;
    g.columns.before = params->padW_l, g.columns.after = params->padW_r;
    if (input) {
        g.images = PyArray_DIM(input, 0), g.channels = PyArray_DIM(input, 1);
        g.rows.image = PyArray_DIM(input, 2), g.columns.image = PyArray_DIM(input, 3);
    }
    if (filters) {
        g.filters = PyArray_DIM(filters, 0);
        if (!input) g.channels = PyArray_DIM(filters, 1) * g.groups;
        g.rows.kernel = PyArray_DIM(filters, 2), g.columns.kernel = PyArray_DIM(filters, 3);
    }
    if (output) {
        if (!input) g.images = PyArray_DIM(output, 0);
        if (!filters) g.filters = PyArray_DIM(output, 1);
        g.rows.output = PyArray_DIM(output, 2), g.columns.output = PyArray_DIM(output, 3);
    }
    return g;
}

// Whether the shapes are those of a convolution. Otherwise an exception is set. Sizes of the output are
// set if the array is missing.
inline bool check(Geometry &g, PyArrayObject *filters, PyArrayObject *output) {
    const char *problem = NULL;
    const npy_intp rows = g.rows.positions(), columns = g.columns.positions();
    if (g.channels % g.groups || (filters && PyArray_DIM(filters, 1) * g.groups != g.channels))
        problem = "the filters need the channels of the images, divided by the number of groups";
    else if (g.filters % g.groups)
        problem = "the number of filters must be divisible by the number of groups";
    else if (g.rows.kernel <= 0 || g.columns.kernel <= 0 || g.rows.image <= 0 || g.columns.image <= 0 ||
             rows <= 0 || columns <= 0)
        problem = "images and filters must not be empty, and filters not larger than padded images";
    else if (output && (PyArray_DIM(output, 0) != g.images || PyArray_DIM(output, 1) != g.filters ||
                        g.rows.output != rows || g.columns.output != columns))
        problem = "the output, or its gradient, needs the shape that images and filters give";
    else if (g.depth() > INT_MAX || g.image_area() > INT_MAX || rows * columns > INT_MAX)
        problem = "an image or a filter is too large";
    if (problem) {
        const npy_intp *got = output ? PyArray_DIMS(output) : NULL;
        char shape[128] = "computed";
        if (got)
            std::snprintf(shape, sizeof(shape), "%lld x %lld x %lld x %lld", (long long)got[0],
                          (long long)got[1], (long long)got[2], (long long)got[3]);
        PyErr_Format(PyExc_ValueError,
                     "CorrMM: shape inconsistency: %s. Got\n"
                     "  images: %lld x %lld x %lld x %lld\n"
                     "  filters: %lld x %lld x %lld x %lld, in %lld groups\n"
                     "  output: %s, expected %lld x %lld x %lld x %lld",
                     problem, (long long)g.images, (long long)g.channels, (long long)g.rows.image,
                     (long long)g.columns.image, (long long)g.filters,
                     (long long)(filters ? PyArray_DIM(filters, 1) : g.channels / g.groups),
                     (long long)g.rows.kernel, (long long)g.columns.kernel, (long long)g.groups, shape,
                     (long long)g.images, (long long)g.filters, (long long)rows, (long long)columns);
        return false;
    }
    g.rows.output = rows, g.columns.output = columns;
    return true;
}

// Makes an array of the shape, unless it is there.
inline bool prepare(PyArrayObject **array, npy_intp a, npy_intp b, npy_intp c, npy_intp d, int type) {
    const npy_intp shape[4] = {a, b, c, d};
    if (*array && PyArray_IS_C_CONTIGUOUS(*array) && PyArray_NDIM(*array) == 4 &&
        PyArray_CompareLists(PyArray_DIMS(*array), shape, 4))
        return true;
    Py_XDECREF(*array);
    *array = reinterpret_cast<PyArrayObject *>(PyArray_EMPTY(4, const_cast<npy_intp *>(shape), type, 0));
    return *array != NULL;
}

// The elements of an array, or of a contiguous copy.
template <typename T>
class Contiguous {
    PyArrayObject *array;

  public:
    explicit Contiguous(PyArrayObject *any) : array(PyArray_GETCONTIGUOUS(any)) {}
    ~Contiguous() { Py_XDECREF(array); }
    Contiguous(const Contiguous &) = delete;
    Contiguous &operator=(const Contiguous &) = delete;
    bool is_missing() const { return array == NULL; }
    const T *data() const { return static_cast<const T *>(PyArray_DATA(array)); }
};

// Calls function(geometry, first, second, result), unless there is nothing to sum. Returns whether it
// succeeded; otherwise an exception is set.
template <typename T, typename F>
bool compute(const Geometry &g, PyArrayObject *first, PyArrayObject *second, PyArrayObject *result,
             F function) {
    if (g.images == 0 || g.channels == 0 || g.filters == 0) {
        PyArray_FILLWBYTE(result, 0);
        return true;
    }
    const Contiguous<T> a(first), b(second);
    if (a.is_missing() || b.is_missing()) return false;
    try {
        function(g, a.data(), b.data(), static_cast<T *>(PyArray_DATA(result)));
    } catch (const std::bad_alloc &) {
        PyErr_NoMemory();
        return false;
    }
    return true;
}

// For each operation: returns whether it succeeded; otherwise an exception is set.

template <typename T, typename Params>
bool apply_forward(const Params *params, PyArrayObject *input, PyArrayObject *filters,
                   PyArrayObject **output) {
    Geometry g = geometry_of(params, input, filters, NULL);
    g.rows.set_padding(), g.columns.set_padding();
    return check(g, filters, NULL) &&
           prepare(output, g.images, g.filters, g.rows.output, g.columns.output, PyArray_TYPE(input)) &&
           compute<T>(g, input, filters, *output, forward<T>);
}

template <typename T, typename Params>
bool apply_gradient_of_filters(const Params *params, PyArrayObject *input, PyArrayObject *output,
                               PyArrayObject *rows, PyArrayObject *columns, PyArrayObject **filters) {
    Geometry g = geometry_of(params, input, NULL, output);
    g.rows.kernel = g.rows.inferred_kernel(), g.columns.kernel = g.columns.inferred_kernel();
    set_number(&g.rows.kernel, rows), set_number(&g.columns.kernel, columns);
    g.rows.set_padding(), g.columns.set_padding();
    return check(g, NULL, output) &&
           prepare(filters, g.filters, g.group_channels(), g.rows.kernel, g.columns.kernel,
                   PyArray_TYPE(input)) &&
           compute<T>(g, input, output, *filters, gradient_of_filters<T>);
}

template <typename T, typename Params>
bool apply_gradient_of_input(const Params *params, PyArrayObject *filters, PyArrayObject *output,
                             PyArrayObject *rows, PyArrayObject *columns, PyArrayObject **input) {
    Geometry g = geometry_of(params, NULL, filters, output);
    g.rows.set_padding(), g.columns.set_padding();
    g.rows.image = g.rows.inferred_image(), g.columns.image = g.columns.inferred_image();
    set_number(&g.rows.image, rows), set_number(&g.columns.image, columns);
    return check(g, filters, output) &&
           prepare(input, g.images, g.channels, g.rows.image, g.columns.image, PyArray_TYPE(output)) &&
           compute<T>(g, filters, output, *input, gradient_of_input<T>);
}

}  // namespace synkhronos_convolution
