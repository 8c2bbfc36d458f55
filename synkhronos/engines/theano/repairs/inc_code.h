#include <complex>

// Adds one array to another of the same shape, or copies it there. The last axis is innermost.
template <typename T>
static void add_or_copy(char *to, const npy_intp *to_strides, const char *from,
                        const npy_intp *from_strides, const npy_intp *shape, int axes, int add)
{
    if (axes == 0) {
        if (add) *(T *)to += *(const T *)from;
        else *(T *)to = *(const T *)from;
        return;
    }
    const npy_intp length = shape[0], to_stride = to_strides[0], from_stride = from_strides[0];
    if (axes > 1) {
        for (npy_intp i = 0; i < length; ++i)
            add_or_copy<T>(to + i * to_stride, to_strides + 1, from + i * from_stride,
                           from_strides + 1, shape + 1, axes - 1, add);
    } else if (to_stride == sizeof(T) && from_stride == sizeof(T)) {
        T *target = (T *)to;
        const T *source = (const T *)from;
        if (add) for (npy_intp i = 0; i < length; ++i) target[i] += source[i];
        else for (npy_intp i = 0; i < length; ++i) target[i] = source[i];
    } else if (add) {
        for (npy_intp i = 0; i < length; ++i)
            *(T *)(to + i * to_stride) += *(const T *)(from + i * from_stride);
    } else {
        for (npy_intp i = 0; i < length; ++i)
            *(T *)(to + i * to_stride) = *(const T *)(from + i * from_stride);
    }
}

typedef void (*row_function)(char *, const npy_intp *, const char *, const npy_intp *,
                             const npy_intp *, int, int);

static row_function find_row_function(int type)
{
    switch (type) {
    case NPY_BYTE: return add_or_copy<npy_byte>;
    case NPY_UBYTE: return add_or_copy<npy_ubyte>;
    case NPY_SHORT: return add_or_copy<npy_short>;
    case NPY_USHORT: return add_or_copy<npy_ushort>;
    case NPY_INT: return add_or_copy<npy_int>;
    case NPY_UINT: return add_or_copy<npy_uint>;
    case NPY_LONG: return add_or_copy<npy_long>;
    case NPY_ULONG: return add_or_copy<npy_ulong>;
    case NPY_LONGLONG: return add_or_copy<npy_longlong>;
    case NPY_ULONGLONG: return add_or_copy<npy_ulonglong>;
    case NPY_FLOAT: return add_or_copy<npy_float>;
    case NPY_DOUBLE: return add_or_copy<npy_double>;
    case NPY_CFLOAT: return add_or_copy<std::complex<npy_float> >;
    case NPY_CDOUBLE: return add_or_copy<std::complex<npy_double> >;
    default: return NULL;
    }
}

// Does a[index] += inc, where an index may occur several times, or a[index] = inc, where the last
// one counts. Nothing is written if there is an error.
static int inplace_increment(PyArrayObject *a, PyObject *index, PyArrayObject *inc, int add)
{
    if (PyArray_FailUnlessWriteable(a, "input/output array") < 0) return -1;
    const int axes = PyArray_NDIM(a);
    if (axes == 0) {
        PyErr_SetString(PyExc_IndexError, "0-d arrays can't be indexed.");
        return -1;
    }
    const row_function function = find_row_function(PyArray_TYPE(a));
    if (function == NULL) {
        PyErr_SetString(PyExc_TypeError, "unsupported type for a");
        return -1;
    }
    int status = -1;
    PyArrayObject *values = NULL;
    PyArrayObject *rows = (PyArrayObject *)PyArray_FROMANY(
        index, NPY_INTP, 1, 1, NPY_ARRAY_IN_ARRAY | NPY_ARRAY_FORCECAST);
    if (rows == NULL) return -1;
    Py_INCREF(PyArray_DESCR(a));
    values = (PyArrayObject *)PyArray_FromAny(
        (PyObject *)inc, PyArray_DESCR(a), 0, 0,
        NPY_ARRAY_ALIGNED | NPY_ARRAY_NOTSWAPPED | NPY_ARRAY_FORCECAST, NULL);
    if (values != NULL) {
        const npy_intp count = PyArray_DIM(rows, 0), length = PyArray_DIM(a, 0);
        const npy_intp *row = (const npy_intp *)PyArray_DATA(rows);
        const int missing = axes - PyArray_NDIM(values);
        npy_intp strides[NPY_MAXDIMS];
        int fits = missing >= 0;
        for (int axis = 0; fits && axis < axes; ++axis) {
            const npy_intp wanted = axis ? PyArray_DIM(a, axis) : count;
            const npy_intp found = axis < missing ? 1 : PyArray_DIM(values, axis - missing);
            strides[axis] = found == 1 ? 0 : PyArray_STRIDE(values, axis - missing);
            fits = found == 1 || found == wanted;
        }
        if (!fits) {
            PyErr_SetString(PyExc_ValueError,
                            "the increment cannot be broadcast to the shape of the rows");
        } else {
            npy_intp i = 0;
            while (i < count && row[i] >= -length && row[i] < length) ++i;
            if (i < count) {
                PyErr_Format(PyExc_IndexError,
                             "index %zd is out of bounds for axis 0 with size %zd",
                             (Py_ssize_t)row[i], (Py_ssize_t)length);
            } else {
                char *to = PyArray_BYTES(a);
                const char *from = PyArray_BYTES(values);
                for (i = 0; i < count; ++i)
                    function(to + (row[i] < 0 ? row[i] + length : row[i]) * PyArray_STRIDE(a, 0),
                             PyArray_STRIDES(a) + 1, from + i * strides[0], strides + 1,
                             PyArray_DIMS(a) + 1, axes - 1, add);
                status = 0;
            }
        }
    }
    Py_XDECREF(values);
    Py_DECREF(rows);
    return status;
}
