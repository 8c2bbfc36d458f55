// The loops of pooling over the last two axes. Results have the same bits as Theano's: the elements of a
// window, and the terms of an element's gradient, are taken in the order of Theano's loops.
//
// With strides of 1 and 2, a vector holds neighbouring windows; the last of a row overlaps the one before.
// Windows that are not wholly inside of the image, and any with other strides, are computed one by one.

#include <algorithm>
#include <cstring>
#include <vector>

#ifdef __clang__
#define SYNKHRONOS_SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SYNKHRONOS_SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (mask){__VA_ARGS__})
#endif

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
    if (columns.count != 1 || columns.window < columns.size || columns.pad || !columns.size) return *this;
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

// Vectors of so many elements: `evens` loads each second one, in two halves that overlap, so that it reads
// nothing behind the last; `twice` repeats each element; `even` is true for each second one.
template <class T, int LANES> struct Vectors;
template <class T> struct Vectors<T, 8> {
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
  static mask even() { return (mask){-1, 0, -1, 0, -1, 0, -1, 0}; }
};
template <class T> struct Vectors<T, 4> {
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
  static mask even() { return (mask){-1, 0, -1, 0}; }
};
template <class T> struct Vectors<T, 2> {
  typedef T type __attribute__((vector_size(2 * sizeof(T))));
  typedef __typeof__(type() == type()) mask;
  static void load(const T *from, type &v) { std::memcpy(&v, from, sizeof v); }
  static void evens(const T *from, type &v) { v = (type){from[0], from[2]}; }
  static void twice(const type &a, type *v) {
    v[0] = SYNKHRONOS_SHUFFLE(a, a, 0, 0);
    v[1] = SYNKHRONOS_SHUFFLE(a, a, 1, 1);
  }
  static mask even() { return (mask){-1, 0}; }
};

// What a window is reduced by. A maximum starts with the first element: a NaN there remains, and is ignored
// elsewhere. Padding with the outermost element changes no maximum, and zeros change no sum: that starts
// with +0, so it is never -0.
struct Maximum {
  template <class V> static void start(V &) {}
  template <class T> static T start(const T *first) { return *first; }
  template <class V> static void step(V &so_far, const V &next) { so_far = next > so_far ? next : so_far; }
  template <class V> static void finish(V &, const V &) {}
  template <class T> static T padding(T outermost) { return outermost; }
};
struct Sum {
  template <class V> static void start(V &first) { first = V(); }
  template <class T> static T start(const T *) { return 0; }
  template <class V> static void step(V &so_far, const V &next) { so_far = so_far + next; }
  template <class V> static void finish(V &sum, const V &count) { sum = sum / count; }
  template <class T> static T padding(T) { return 0; }
};

// The rows of an image, copied if there is something to add on their left or right.
template <class T, class By> class Rows {
  std::vector<T> copy;
  npy_intp rows, size, left, right;

 public:
  npy_intp stride;
  const T *start;

  Rows(npy_intp rows, npy_intp size, npy_intp left, npy_intp right)
      : rows(rows), size(size), left(std::max(left, (npy_intp)0)), right(std::max(right, (npy_intp)0)) {
    stride = this->left + size + this->right;
    if (stride > size) copy.resize(rows * stride);
  }
  void read(const T *image) {
    start = image;
    if (stride == size) return;
    for (npy_intp row = 0; row < rows; row++, image += size) {
      T *to = &copy[row * stride];
      std::fill(to, to + left, By::padding(image[0]));
      std::copy(image, image + size, to + left);
      std::fill(to + left + size, to + stride, By::padding(image[size - 1]));
    }
    start = &copy[left];
  }
};

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
  std::vector<T> divisors(at.windows());
  for (npy_intp r = 0; r < at.windows(); r++) divisors[r] = at.divisor(r / columns.count, r % columns.count);
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

// WINDOW and STRIDE are those of the columns as far as they are known when this is compiled, or 0. Return
// whether there are enough windows, and the sizes are those.
template <int WINDOW, int STRIDE, class By, class T>
static bool reduced_by_vectors(const T *x, T *z, const Geometry &at) {
  const int lanes = 32 / sizeof(T);
  if (at.columns.stride != STRIDE || (WINDOW && at.columns.window != WINDOW) || !at.elements()) return false;
  if (at.columns.count >= lanes)
    reduce_by_vectors<WINDOW, STRIDE, lanes, By>(x, z, at);
  else if (at.columns.count >= lanes / 2)
    reduce_by_vectors<WINDOW, STRIDE, lanes / 2, By>(x, z, at);
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

// What windows add to the gradient of the elements: with a maximum, those that equal it get its gradient.
// `one` adds for neighbouring elements of one window, and `lanes` returns what the windows from one on add,
// each to as many elements as the stride.
template <class T> class OfMaximum {
  Rows<T, Sum> z, gz;
  const T *next_z, *next_gz;

 public:
  OfMaximum(const T *z, const T *gz, const Geometry &at, npy_intp left, npy_intp right)
      : z(at.rows.count, at.columns.count, left, right), gz(at.rows.count, at.columns.count, left, right),
        next_z(z), next_gz(gz) {}
  void next(const Geometry &at) {
    z.read(next_z), gz.read(next_gz);
    next_z += at.windows(), next_gz += at.windows();
  }
  void one(npy_intp row, npy_intp column, const T *__restrict__ x, T *__restrict__ gx, npy_intp count) const {
    const npy_intp r = row * z.stride + column;
    const T maximum = z.start[r], gradient = gz.start[r];
    for (npy_intp c = 0; c < count; c++) gx[c] += x[c] == maximum ? gradient : 0;
  }
  template <int STRIDE, int LANES, class V>
  void lanes(npy_intp row, npy_intp column, const V *x, V *terms) const {
    V maxima[3], gradients[3];
    const npy_intp r = row * z.stride + column;
    Vectors<T, LANES>::load(z.start + r, maxima[2]), Vectors<T, LANES>::load(gz.start + r, gradients[2]);
    STRIDE == 1 ? (void)(maxima[0] = maxima[2]) : Vectors<T, LANES>::twice(maxima[2], maxima);
    STRIDE == 1 ? (void)(gradients[0] = gradients[2]) : Vectors<T, LANES>::twice(gradients[2], gradients);
    for (int h = 0; h < STRIDE; h++) terms[h] = x[h] == maxima[h] ? gradients[h] : V();
  }
};

// With a sum or an average, all get the same share.
template <class T> class OfSum {
  std::vector<T> shares, divisors;
  Rows<T, Sum> rows;
  const T *gz;

 public:
  OfSum(const T *, const T *gz, const Geometry &at, npy_intp left, npy_intp right)
      : shares(at.windows()), divisors(at.windows()),
        rows(at.rows.count, at.columns.count, left, right), gz(gz) {
    for (npy_intp r = 0; r < at.windows(); r++)
      divisors[r] = at.divisor(r / at.columns.count, r % at.columns.count);
  }
  void next(const Geometry &at) {
    if (shares.empty()) return;
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
static inline std::vector<Range> over_rows(const Axis &rows) {
  std::vector<Range> over(rows.size);
  for (npy_intp row = 0; row < rows.size; row++)
    over[row].begin = rows.ended(row), over[row].end = rows.begun(row + 1);
  return over;
}

// Add up the terms of the elements of a row, from one column to before another.
template <class From, class T>
static inline void spread_one_by_one(const T *x, T *gx, const From &terms, const Geometry &at, Range over,
                                     npy_intp from, npy_intp to) {
  if (from == to) return;
  std::fill(gx + from, gx + to, (T)0);
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
    for (int h = 0; h < STRIDE; h++) Of::load(x + STRIDE * q + h * LANES, elements[h]), sums[h] = V();
    for (npy_intp i = over.begin; i < over.end; i++)
      for (npy_intp t = most; t >= 0; t--) {
        terms.template lanes<STRIDE, LANES>(i, first + q - t, elements, added);
        for (int h = 0; h < STRIDE; h++) {
          if (STRIDE == 2 && 2 * t + 2 > window) added[h] = Of::even() ? added[h] : V();
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
  const npy_intp first = (at.columns.pad + STRIDE - 1) / STRIDE, from = first * STRIDE - at.columns.pad;
  const npy_intp count = (size - from) / STRIDE, to = from + count * STRIDE;
  const std::vector<Range> over = over_rows(at.rows);
  From terms(z, gz, at, (window - 1) / STRIDE - first, first + count - at.columns.count);
  for (npy_intp n = 0; n < at.images; n++) {
    terms.next(at);
    for (npy_intp row = 0; row < at.rows.size; row++, x += size, gx += size) {
      spread_one_by_one(x, gx, terms, at, over[row], 0, from);
      spread_row<WINDOW, STRIDE, LANES>(x + from, gx + from, terms, over[row], window, first, count);
      spread_one_by_one(x, gx, terms, at, over[row], to, size);
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
  if (count >= lanes)
    spread_by_vectors<WINDOW, STRIDE, lanes, From>(x, z, gz, gx, at);
  else if (count >= lanes / 2)
    spread_by_vectors<WINDOW, STRIDE, lanes / 2, From>(x, z, gz, gx, at);
  return count >= lanes / 2;
}

template <int WINDOW, int STRIDE, class From, class T>
static void spread(const T *x, const T *z, const T *gz, T *gx, const Geometry &at) {
  if (STRIDE <= 1 && spread_was_by_vectors<WINDOW, 1, From>(x, z, gz, gx, at)) return;
  if ((!STRIDE || STRIDE == 2) && spread_was_by_vectors<WINDOW, 2, From>(x, z, gz, gx, at)) return;
  const std::vector<Range> over = over_rows(at.rows);
  From terms(z, gz, at, 0, 0);
  for (npy_intp n = 0; n < at.images; n++) {
    terms.next(at);
    for (npy_intp row = 0; row < at.rows.size; row++, x += at.columns.size, gx += at.columns.size)
      spread_one_by_one(x, gx, terms, at, over[row], 0, at.columns.size);
  }
}
}  // namespace synkhronos_pooling
