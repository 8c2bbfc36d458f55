// One pass over arrays that are broadcast against each other: elementwise results, and sums of such
// results over some axes. A sum of float32 is accumulated in double precision.
//
// The elements are processed in blocks along the innermost axis. What is summed is computed into a
// buffer that stays in the first cache, and added from there.

#include <vector>

namespace synkhronos {

const npy_intp BLOCK = 512;  // elements

// Eight numbers; the compiler takes the widest instructions that the processor has.
template <typename T>
struct Eight {
    typedef T type __attribute__((vector_size(8 * sizeof(T)), aligned(sizeof(T)), may_alias));
};
typedef Eight<double>::type Doubles;

template <typename T>
static inline Doubles load(const T *values) {
    return __builtin_convertvector(*(const typename Eight<T>::type *)values, Doubles);
}

// The sum of contiguous numbers, in 32 partial sums.
template <typename T>
static double sum_of(const T *values, npy_intp count) {
    Doubles a = {0}, b = {0}, c = {0}, d = {0};
    npy_intp i = 0;
    for (; i + 32 <= count; i += 32) {
        a += load(values + i);
        b += load(values + i + 8);
        c += load(values + i + 16);
        d += load(values + i + 24);
    }
    for (; i + 8 <= count; i += 8) a += load(values + i);
    double rest = 0;
    for (; i < count; ++i) rest += values[i];
    a = (a + b) + (c + d);
    return ((a[0] + a[4]) + (a[2] + a[6])) + ((a[1] + a[5]) + (a[3] + a[7])) + rest;
}

// Adds numbers to one sum, or with a stride of 1 each to its own.
template <typename T>
static void add(double *__restrict__ sums, npy_intp stride, const T *__restrict__ values,
                npy_intp count) {
    if (stride == 0) *sums += sum_of(values, count);
    else
        for (npy_intp i = 0; i < count; ++i) sums[i] += values[i];
}

// An axis of the loop, and for each operand how many elements its neighbours are apart.
template <int OPERANDS>
struct Axis {
    npy_intp extent;
    npy_intp strides[OPERANDS];
};

// The operands of a loop: inputs, then outputs. `Body` says what is computed:
//   enum { NDIM, INPUTS, OUTPUTS };
//   broadcast[INPUTS][NDIM]   the axes along which an input has one element
//   summed[OUTPUTS][NDIM]     the axes over which an output is summed
//   sums[OUTPUTS]             whether it is a sum
//   types[OUTPUTS]            NumPy's types
//   sizes[INPUTS + OUTPUTS]   the bytes of an element
//   inplace[OUTPUTS]          the input whose memory an output gets, or -1
//   compute(count, operands, strides)           computes a block; sums have a buffer
//   add(output, sums, stride, values, count)    adds a buffer to the sums of an output
template <class Body>
class Loop {
    enum { NDIM = Body::NDIM, INPUTS = Body::INPUTS, OUTPUTS = Body::OUTPUTS };
    enum { OPERANDS = INPUTS + OUTPUTS };
    typedef Axis<OPERANDS> axis_type;

    PyArrayObject *inputs[INPUTS];
    PyArrayObject **outputs;
    npy_intp shape[NDIM];
    axis_type axes[NDIM];
    int depth;  // of the axes that are left when neighbours are joined
    std::vector<double> sums[OUTPUTS];
    double buffers[OUTPUTS][BLOCK];  // of any type

  public:
    explicit Loop(PyArrayObject **outputs) : outputs(outputs), depth(0) {
        for (int i = 0; i < INPUTS; ++i) inputs[i] = NULL;
    }

    ~Loop() {
        for (int i = 0; i < INPUTS; ++i) Py_XDECREF(inputs[i]);
    }

    // Returns false if a Python exception has been set.
    bool run(PyArrayObject *const *given) {
        if (!find_shape(given)) return false;
        for (int i = 0; i < INPUTS; ++i) {
            inputs[i] = (PyArrayObject *)PyArray_FROM_OF((PyObject *)given[i],
                                                         NPY_ARRAY_C_CONTIGUOUS | NPY_ARRAY_ALIGNED);
            if (inputs[i] == NULL) return false;
        }
        for (int output = 0; output < OUTPUTS; ++output)
            if (!allocate(output)) return false;
        find_axes();
        npy_intp count = 1;
        for (int axis = 0; axis < NDIM; ++axis) count *= shape[axis];
        if (count) walk();
        for (int output = 0; output < OUTPUTS; ++output)
            if (Body::sums[output]) store(output);
        return true;
    }

  private:
    bool find_shape(PyArrayObject *const *given) {
        for (int axis = 0; axis < NDIM; ++axis) {
            int first = -1;
            shape[axis] = 1;
            for (int i = 0; i < INPUTS; ++i) {
                if (Body::broadcast[i][axis]) continue;
                const npy_intp extent = PyArray_DIM(given[i], axis);
                if (first < 0) {
                    first = i;
                    shape[axis] = extent;
                } else if (extent != shape[axis]) {
                    PyErr_Format(PyExc_ValueError,
                                 "Input dimension mis-match. (input[%i].shape[%i] = %lld, "
                                 "input[%i].shape[%i] = %lld)",
                                 first, axis, (long long)shape[axis], i, axis, (long long)extent);
                    return false;
                }
            }
        }
        return true;
    }

    bool allocate(int output) {
        npy_intp dims[NDIM];
        int ndim = 0;
        size_t size = 1;
        for (int axis = 0; axis < NDIM; ++axis)
            if (!Body::summed[output][axis]) size *= dims[ndim++] = shape[axis];
        if (Body::sums[output]) sums[output].assign(size, 0.0);
        PyArrayObject *&array = outputs[output];
        if (Body::inplace[output] >= 0) {
            PyArrayObject *input = inputs[Body::inplace[output]];
            Py_INCREF(input);
            Py_XDECREF(array);
            array = input;
            return true;
        }
        if (array != NULL && PyArray_NDIM(array) == ndim &&
            PyArray_CompareLists(PyArray_DIMS(array), dims, ndim) && PyArray_ISCARRAY(array))
            return true;
        Py_XDECREF(array);
        array = (PyArrayObject *)PyArray_EMPTY(ndim, dims, Body::types[output], 0);
        return array != NULL;
    }

    void store(int output) {
        void *data = PyArray_DATA(outputs[output]);
        for (size_t i = 0; i < sums[output].size(); ++i) {
            if (Body::types[output] == NPY_FLOAT32)
                ((npy_float32 *)data)[i] = (npy_float32)sums[output][i];
            else ((npy_float64 *)data)[i] = sums[output][i];
        }
    }

    // Drops axes of one element, and joins neighbours along which every operand is contiguous.
    void find_axes() {
        npy_intp next[OPERANDS];
        for (int i = 0; i < OPERANDS; ++i) next[i] = 1;
        depth = 0;
        for (int axis = NDIM - 1; axis >= 0; --axis) {
            axis_type found;
            found.extent = shape[axis];
            for (int i = 0; i < OPERANDS; ++i) {
                const bool stays =
                    i < INPUTS ? Body::broadcast[i][axis] : Body::summed[i - INPUTS][axis];
                found.strides[i] = stays ? 0 : next[i];
                if (!stays) next[i] *= shape[axis];
            }
            if (found.extent == 1) continue;
            if (depth > 0 && joins(axes[depth - 1], found)) axes[depth - 1].extent *= found.extent;
            else axes[depth++] = found;
        }
        if (depth == 0) {
            axes[0].extent = 1;
            for (int i = 0; i < OPERANDS; ++i) axes[0].strides[i] = 0;
            depth = 1;
        }
    }

    static bool joins(const axis_type &inner, const axis_type &outer) {
        for (int i = 0; i < OPERANDS; ++i)
            if (outer.strides[i] != inner.strides[i] * inner.extent) return false;
        return true;
    }

    // Visits every position of all axes but the innermost.
    void walk() {
        npy_intp place[NDIM] = {0}, offsets[OPERANDS] = {0};
        for (;;) {
            walk_row(offsets);
            int axis = 1;
            for (; axis < depth; ++axis) {
                for (int i = 0; i < OPERANDS; ++i) offsets[i] += axes[axis].strides[i];
                if (++place[axis] < axes[axis].extent) break;
                for (int i = 0; i < OPERANDS; ++i)
                    offsets[i] -= axes[axis].strides[i] * axes[axis].extent;
                place[axis] = 0;
            }
            if (axis == depth) return;
        }
    }

    void walk_row(const npy_intp *offsets) {
        const axis_type &row = axes[0];
        char *operands[OPERANDS];
        npy_intp strides[OPERANDS];
        for (npy_intp start = 0; start < row.extent; start += BLOCK) {
            const npy_intp count = row.extent - start < BLOCK ? row.extent - start : BLOCK;
            for (int i = 0; i < OPERANDS; ++i) {
                const int output = i - INPUTS;
                const bool is_sum = output >= 0 && Body::sums[output];
                strides[i] = is_sum ? 1 : row.strides[i];
                if (is_sum) {
                    operands[i] = (char *)buffers[output];
                } else {
                    PyArrayObject *array = output < 0 ? inputs[i] : outputs[output];
                    operands[i] =
                        PyArray_BYTES(array) + (offsets[i] + start * strides[i]) * Body::sizes[i];
                }
            }
            Body::compute(count, operands, strides);
            for (int output = 0; output < OUTPUTS; ++output) {
                if (!Body::sums[output]) continue;
                const npy_intp stride = row.strides[INPUTS + output];
                Body::add(output, &sums[output][offsets[INPUTS + output] + start * stride], stride,
                          buffers[output], count);
            }
        }
    }
};

}  // namespace synkhronos
