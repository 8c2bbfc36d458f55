// The arrays of pooling operations: their checks, and what the loops make of them. Functions return false
// after they have set a Python error.

namespace synkhronos_pooling {

// Two rows or columns: of the window, the stride and the padding.
struct Pairs {
  npy_intp window[2], stride[2], pad[2];
};

template <class I> static bool read_pair(PyArrayObject *from, const char *name, npy_intp *to) {
  if (PyArray_DIM(from, 0) != 2) {
    PyErr_Format(PyExc_ValueError,
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
      PyErr_Format(PyExc_ValueError,
                   "Pooling expects windows and strides of at least 1, but got ws = (%zd, %zd) and "
                   "stride = (%zd, %zd).",
                   (Py_ssize_t)of.window[0], (Py_ssize_t)of.window[1], (Py_ssize_t)of.stride[0],
                   (Py_ssize_t)of.stride[1]);
      return false;
    }
    if (of.pad[i] < 0 || of.pad[i] >= of.window[i]) {
      PyErr_Format(PyExc_ValueError,
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
  template <class T> const T *as() const { return (const T *)PyArray_DATA(array); }
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

// Set how many windows there are along an axis.
static bool count_windows(Axis &axis, bool ignore_border) {
  const npy_intp padded = axis.size + 2 * axis.pad;
  if (ignore_border)
    axis.count = padded < axis.window ? 0 : (padded - axis.window) / axis.stride + 1;
  else if (axis.pad) {
    PyErr_SetString(PyExc_ValueError,
                    "Pooling with padding expects ignore_border=True, but got False. Use True, or no padding.");
    return false;
  } else if (axis.stride >= axis.window)
    axis.count = axis.size ? (padded - 1) / axis.stride + 1 : 0;
  else
    axis.count = std::max((padded - 1 - axis.window + axis.stride) / axis.stride, (npy_intp)0) + 1;
  return true;
}

template <int WINDOW, int STRIDE, class By, class T>
static bool pool(PyArrayObject *x, const Pairs &of, bool ignore_border, Mode mode, PyArrayObject **z) {
  const int dims = PyArray_NDIM(x);
  Geometry at = {product(x, 0, dims - 2), Axis(), Axis(), mode};
  set_axis(at.rows, x, of, 0), set_axis(at.columns, x, of, 1);
  if (!check_pairs(of) || !count_windows(at.rows, ignore_border) || !count_windows(at.columns, ignore_border))
    return false;
  if (mode == MAX && !at.elements() && at.windows() && at.images) {
    PyErr_Format(PyExc_ValueError,
                 "Pooling expects images with elements, but got a shape of %zd x %zd: there is no maximum.",
                 (Py_ssize_t)at.rows.size, (Py_ssize_t)at.columns.size);
    return false;
  }
  npy_intp shape[NPY_MAXDIMS];
  std::copy(PyArray_DIMS(x), PyArray_DIMS(x) + dims, shape);
  shape[dims - 2] = at.rows.count, shape[dims - 1] = at.columns.count;
  Elements from(x);
  if (!from.there() || !allocate(z, x, shape)) return false;
  if (at.images && at.windows())
    reduce<WINDOW, STRIDE, By>(from.as<T>(), (T *)PyArray_DATA(*z), at.flat());
  return true;
}

// The windows of a gradient are those of the output that it is of, however many these are.
static bool gradient_geometry(PyArrayObject *x, PyArrayObject *gz, const Pairs &of, Geometry &at) {
  const int dims = PyArray_NDIM(x);
  at.images = product(x, 0, dims - 2);
  set_axis(at.rows, x, of, 0), set_axis(at.columns, x, of, 1);
  at.rows.count = PyArray_DIM(gz, dims - 2), at.columns.count = PyArray_DIM(gz, dims - 1);
  if (!PyArray_CompareLists(PyArray_DIMS(x), PyArray_DIMS(gz), dims - 2)) {
    PyErr_SetString(PyExc_ValueError,
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
    PyErr_SetString(PyExc_ValueError,
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
    PyErr_SetString(PyExc_ValueError,
                    "The gradient of pooling in the mode 'average_exc_pad' expects no padding, but got some. "
                    "Use the mode 'average_inc_pad' or 'sum'.");
    return false;
  }
  Elements gradient(gz);
  if (!gradient.there() || !allocate(gx, x, PyArray_DIMS(x))) return false;
  T *to = (T *)PyArray_DATA(*gx);
  if (at.images && at.elements())
    spread<WINDOW, STRIDE, OfSum<T> >(to, (const T *)NULL, gradient.as<T>(), to, at.flat());
  return true;
}
}  // namespace synkhronos_pooling
