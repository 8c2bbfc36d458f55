// The arrays of pooling operations, and the checks of their sizes. Functions return false after they
// have set a Python error.

#ifndef SYNKHRONOS_POOLING_ARRAYS
#define SYNKHRONOS_POOLING_ARRAYS

namespace synkhronos_pooling {

// Two rows or columns: of the window, the stride and the padding.
struct Pairs {
    npy_intp window[2], stride[2], pad[2];
};

template <class I>
static bool read_pair(PyArrayObject *from, const char *name, npy_intp *to) {
    if (PyArray_DIM(from, 0) != 2) {
        PyErr_Format(
            PyExc_ValueError,
            "Pooling expects %s as a vector of 2 numbers, for rows and columns, but got %zd numbers.",
            name, (Py_ssize_t)PyArray_DIM(from, 0));
        return false;
    }
    for (int i = 0; i < 2; i++) to[i] = *(I *)PyArray_GETPTR1(from, i);
    return true;
}

static bool check_pairs(const Pairs &of) {
    for (int i = 0; i < 2; i++) {
        if (of.window[i] < 1 || of.stride[i] < 1) {
            PyErr_Format(
                PyExc_ValueError,
                "Pooling expects windows and strides of at least 1, but got ws = (%zd, %zd) and "
                "stride = (%zd, %zd).",
                (Py_ssize_t)of.window[0], (Py_ssize_t)of.window[1], (Py_ssize_t)of.stride[0],
                (Py_ssize_t)of.stride[1]);
            return false;
        }
        if (of.pad[i] < 0 || of.pad[i] >= of.window[i]) {
            PyErr_Format(
                PyExc_ValueError,
                "Pooling expects padding from 0 to less than the window, but got pad = (%zd, %zd) and "
                "ws = (%zd, %zd). A window that is all padding has no value: use less padding.",
                (Py_ssize_t)of.pad[0], (Py_ssize_t)of.pad[1], (Py_ssize_t)of.window[0],
                (Py_ssize_t)of.window[1]);
            return false;
        }
    }
    return true;
}

static void set_axis(Axis &axis, PyArrayObject *x, const Pairs &of, int i) {
    axis.size = PyArray_DIM(x, PyArray_NDIM(x) - 2 + i);
    axis.window = of.window[i], axis.stride = of.stride[i], axis.pad = of.pad[i];
}

static npy_intp product(PyArrayObject *x, int begin, int end) {
    npy_intp result = 1;
    for (int i = begin; i < end; i++) result *= PyArray_DIM(x, i);
    return result;
}

// An array's elements one after another, copied if they are not.
class Elements {
    PyArrayObject *array;
    Elements(const Elements &);

  public:
    explicit Elements(PyArrayObject *of)
        : array((PyArrayObject *)(PyArray_ISCARRAY_RO(of) ? (Py_INCREF(of), (PyObject *)of)
                                                          : PyArray_NewCopy(of, NPY_CORDER))) {}
    ~Elements() { Py_XDECREF(array); }
    bool there() const { return array != NULL; }
    template <class T>
    const T *as() const {
        return (const T *)PyArray_DATA(array);
    }
};

// Make an output, or keep the one of the last call if its memory can be used.
static bool allocate(PyArrayObject **output, PyArrayObject *like, const npy_intp *shape) {
    const int dims = PyArray_NDIM(like);
    if (*output && PyArray_ISCARRAY(*output) && PyArray_NDIM(*output) == dims &&
        PyArray_TYPE(*output) == PyArray_TYPE(like) &&
        PyArray_CompareLists(PyArray_DIMS(*output), (npy_intp *)shape, dims))
        return true;
    Py_XDECREF(*output);
    *output = (PyArrayObject *)PyArray_SimpleNew(dims, (npy_intp *)shape, PyArray_TYPE(like));
    return *output != NULL;
}
}  // namespace synkhronos_pooling

#endif
