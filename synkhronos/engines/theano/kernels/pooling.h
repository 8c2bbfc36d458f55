// What pooling over the last two axes and its gradients share: sizes, vectors and padding. Results have
// the same bits as Theano's: the elements of a window, and the terms of an element's gradient, are taken
// in the order of Theano's loops.
//
// With strides of 1 and 2, a vector holds neighbouring windows; the last of a row overlaps the one
// before. With other strides, and for few windows, they are computed one by one.

#ifndef SYNKHRONOS_POOLING
#define SYNKHRONOS_POOLING

#include <algorithm>
#include <cstring>
#include <new>

#ifdef __clang__
#define SYNKHRONOS_SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SYNKHRONOS_SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (mask){__VA_ARGS__})
#endif

// For functions that take little time, so that the compiler compiles them once.
#define SYNKHRONOS_ONCE __attribute__((noinline))

namespace synkhronos_pooling {

enum Mode { MAX, SUM, AVERAGE_WITH_PADDING, AVERAGE_WITHOUT_PADDING };

// One of the two axes. Positions count from the start of the image, so the padding has negative ones.
struct Axis {
    npy_intp size, window, stride, pad, count;  // count: the number of windows

    npy_intp begin(npy_intp r) const { return std::max(r * stride - pad, (npy_intp)0); }
    npy_intp end(npy_intp r) const { return std::min(r * stride - pad + window, size); }
    npy_intp length(npy_intp r) const { return end(r) - begin(r); }
    npy_intp padded_length(npy_intp r) const { return std::min(window, size + 2 * pad - r * stride); }

    // The number of windows that begin before a position, and of those that end there or before.
    npy_intp begun(npy_intp at) const { return std::min((at + pad + stride - 1) / stride, count); }
    npy_intp ended(npy_intp at) const {
        return at + pad < window ? 0 : std::min((at + pad - window) / stride + 1, count);
    }
};

struct Geometry {
    npy_intp images;
    Axis rows, columns;
    Mode mode;

    // If each row of the image is wholly in one window, the image as one row. Its windows have the same
    // elements in the same order.
    Geometry flat() const {
        if (columns.count != 1 || columns.window < columns.size || columns.pad || !columns.size)
            return *this;
        const npy_intp n = columns.size;
        const Axis row = {1, 1, 1, 0, 1};
        const Axis all = {rows.size * n, rows.window * n, rows.stride * n, rows.pad * n, rows.count};
        const Geometry result = {images, row, all, mode};
        return result;
    }

    npy_intp elements() const { return rows.size * columns.size; }  // of an image
    npy_intp windows() const { return rows.count * columns.count; }

    // By what the sum over a window is divided.
    npy_intp divisor(npy_intp row, npy_intp column) const {
        if (mode == AVERAGE_WITH_PADDING) return rows.padded_length(row) * columns.padded_length(column);
        if (mode == AVERAGE_WITHOUT_PADDING) return rows.length(row) * columns.length(column);
        return 1;
    }
};

// Vectors of so many elements: `evens` loads each second one, in two halves that overlap, so that it
// reads nothing behind the last; `twice` repeats each element; `keep_even` makes each other one 0.
template <class T, int LANES>
struct Vectors;
template <class T>
struct Vectors<T, 8> {
    typedef T type __attribute__((vector_size(8 * sizeof(T))));
    typedef __typeof__(type() == type()) mask;
    static void load(const T *from, type &v) { std::memcpy(&v, from, sizeof v); }
    static void evens(const T *from, type &v) {
        type a, b;
        load(from, a), load(from + 7, b);
        v = SYNKHRONOS_SHUFFLE(a, b, 0, 2, 4, 6, 9, 11, 13, 15);
    }
    static void twice(const type &a, type *v) {
        v[0] = SYNKHRONOS_SHUFFLE(a, a, 0, 0, 1, 1, 2, 2, 3, 3);
        v[1] = SYNKHRONOS_SHUFFLE(a, a, 4, 4, 5, 5, 6, 6, 7, 7);
    }
    static void keep_even(type &v) { v = (mask){-1, 0, -1, 0, -1, 0, -1, 0} ? v : type(); }
};
template <class T>
struct Vectors<T, 4> {
    typedef T type __attribute__((vector_size(4 * sizeof(T))));
    typedef __typeof__(type() == type()) mask;
    static void load(const T *from, type &v) { std::memcpy(&v, from, sizeof v); }
    static void evens(const T *from, type &v) {
        type a, b;
        load(from, a), load(from + 3, b);
        v = SYNKHRONOS_SHUFFLE(a, b, 0, 2, 5, 7);
    }
    static void twice(const type &a, type *v) {
        v[0] = SYNKHRONOS_SHUFFLE(a, a, 0, 0, 1, 1);
        v[1] = SYNKHRONOS_SHUFFLE(a, a, 2, 2, 3, 3);
    }
    static void keep_even(type &v) { v = (mask){-1, 0, -1, 0} ? v : type(); }
};
template <class T>
struct Vectors<T, 2> {
    typedef T type __attribute__((vector_size(2 * sizeof(T))));
    typedef __typeof__(type() == type()) mask;
    static void load(const T *from, type &v) { std::memcpy(&v, from, sizeof v); }
    static void evens(const T *from, type &v) { v = (type){from[0], from[2]}; }
    static void twice(const type &a, type *v) {
        v[0] = SYNKHRONOS_SHUFFLE(a, a, 0, 0);
        v[1] = SYNKHRONOS_SHUFFLE(a, a, 1, 1);
    }
    static void keep_even(type &v) { v = (mask){-1, 0} ? v : type(); }
};

// What a window is reduced by. A maximum starts with the first element: a NaN there remains, and is
// ignored elsewhere. Padding with the outermost element changes no maximum, and zeros change no sum:
// that starts with +0, so it is never -0.
struct Maximum {
    template <class V>
    static void start(V &) {}
    template <class T>
    static T start(const T *first) {
        return *first;
    }
    template <class V>
    static void step(V &so_far, const V &next) {
        so_far = next > so_far ? next : so_far;
    }
    template <class V>
    static void finish(V &, const V &) {}
    template <class T>
    static T padding(T outermost) {
        return outermost;
    }
};
struct Sum {
    template <class V>
    static void start(V &first) {
        first = V();
    }
    template <class T>
    static T start(const T *) {
        return 0;
    }
    template <class V>
    static void step(V &so_far, const V &next) {
        so_far = so_far + next;
    }
    template <class V>
    static void finish(V &sum, const V &count) {
        sum = sum / count;
    }
    template <class T>
    static T padding(T) {
        return 0;
    }
};

// Memory for a call. The compiler needs longer for the standard library's.
template <class T>
class Buffer {
    T *const data;
    Buffer(const Buffer &);

  public:
    explicit Buffer(npy_intp size) : data(new T[size]) {}
    ~Buffer() { delete[] data; }
    T &operator[](npy_intp i) const { return data[i]; }
};

// The rows of an image, copied if there is something to add on their left or right.
template <class T, class By>
class Rows {
    const npy_intp rows, size, left, right;
    Buffer<T> copy;

  public:
    const npy_intp stride;
    const T *start;

    Rows(npy_intp rows, npy_intp size, npy_intp added_left, npy_intp added_right)
        : rows(rows),
          size(size),
          left(std::max(added_left, (npy_intp)0)),
          right(std::max(added_right, (npy_intp)0)),
          copy(left + right ? rows * (left + size + right) : 0),
          stride(left + size + right),
          start(NULL) {}
    SYNKHRONOS_ONCE void read(const T *image) {
        start = image;
        if (stride == size) return;
        start = &copy[left];
        T *to = &copy[0];
        for (npy_intp row = 0; row < rows; row++, image += size) {
            for (npy_intp i = 0; i < left; i++) *to++ = By::padding(image[0]);
            std::memcpy(to, image, size * sizeof(T)), to += size;
            for (npy_intp i = 0; i < right; i++) *to++ = By::padding(image[size - 1]);
        }
    }
};
}  // namespace synkhronos_pooling

#endif
