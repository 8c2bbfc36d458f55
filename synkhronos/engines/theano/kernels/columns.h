// The matrix of columns: each column has the elements of the image that one position's filter meets.
//
// A row of the matrix belongs to one element of the filter. It has, for each row of the output, part of
// a row of the image, so rows are copied and added whole; only the ends can be padding.

#include <cstring>
#include <vector>

namespace synkhronos_convolution {

// Some rows, and how far apart they are.
template <typename T>
struct Rows {
    T *start;
    npy_intp distance, step;  // of rows, and of the elements in each
};

// Rows of chunk to 2 chunk elements, as two pieces that may overlap: with a size that the compiler
// knows, these are a few instructions.
template <int bytes, typename T>
void copy_pieces(Rows<const T> from, Rows<T> to, npy_intp rows, npy_intp size) {
    const npy_intp rest = size - bytes / sizeof(T);
    for (npy_intp y = 0; y < rows; ++y, from.start += from.distance, to.start += to.distance) {
        std::memcpy(to.start, from.start, bytes);
        std::memcpy(to.start + rest, from.start + rest, bytes);
    }
}

template <typename T>
void copy_rows(Rows<const T> from, Rows<T> to, npy_intp rows, npy_intp size) {
    const npy_intp bytes = size * sizeof(T);
    if (from.step == 1) {
        if (bytes >= 16 && bytes <= 32) return copy_pieces<16>(from, to, rows, size);
        if (bytes > 32 && bytes <= 64) return copy_pieces<32>(from, to, rows, size);
        if (bytes > 64 && bytes <= 128) return copy_pieces<64>(from, to, rows, size);
        if (bytes > 128 && bytes <= 256) return copy_pieces<128>(from, to, rows, size);
    }
    for (npy_intp y = 0; y < rows; ++y, from.start += from.distance, to.start += to.distance) {
        const T *__restrict__ a = from.start;
        T *__restrict__ b = to.start;
        if (from.step == 1) std::memcpy(b, a, bytes);
        else if (from.step == 2)
            for (npy_intp x = 0; x < size; ++x) b[x] = a[2 * x];
        else
            for (npy_intp x = 0; x < size; ++x) b[x] = a[from.step * x];
    }
}

// As copy_pieces: both pieces are added before either is written.
template <int bytes, typename T>
void add_pieces(Rows<const T> from, Rows<T> to, npy_intp rows, npy_intp size) {
    const int chunk = bytes / sizeof(T);
    const npy_intp rest = size - chunk;
    for (npy_intp y = 0; y < rows; ++y, from.start += from.distance, to.start += to.distance) {
        T first[chunk], last[chunk];
        for (int x = 0; x < chunk; ++x) first[x] = to.start[x] + from.start[x];
        for (int x = 0; x < chunk; ++x) last[x] = to.start[rest + x] + from.start[rest + x];
        std::memcpy(to.start, first, bytes);
        std::memcpy(to.start + rest, last, bytes);
    }
}

template <typename T>
void add_rows(Rows<const T> from, Rows<T> to, npy_intp rows, npy_intp size) {
    const npy_intp bytes = size * sizeof(T);
    if (to.step == 1) {
        if (bytes >= 16 && bytes <= 32) return add_pieces<16>(from, to, rows, size);
        if (bytes > 32 && bytes <= 64) return add_pieces<32>(from, to, rows, size);
        if (bytes > 64 && bytes <= 128) return add_pieces<64>(from, to, rows, size);
    }
    for (npy_intp y = 0; y < rows; ++y, from.start += from.distance, to.start += to.distance) {
        const T *__restrict__ a = from.start;
        T *__restrict__ b = to.start;
        if (to.step == 1)
            for (npy_intp x = 0; x < size; ++x) b[x] += a[x];
        else if (to.step == 2)
            for (npy_intp x = 0; x < size; ++x) b[2 * x] += a[x];
        else
            for (npy_intp x = 0; x < size; ++x) b[to.step * x] += a[x];
    }
}

// One row of the matrix: an element of the filter, and rows first to end of an output.
struct Line {
    npy_intp first, end;       // rows of the output
    npy_intp inside, outside;  // those between meet the image
    npy_intp left, right;      // and so do these columns of the output
    npy_intp row, column;      // the element

    Line(const Geometry &g, npy_intp first, npy_intp end, npy_intp row, npy_intp column)
        : first(first), end(end), row(row), column(column) {
        g.rows.inside(row, &inside, &outside);
        inside = std::min(std::max(inside, first), end);
        outside = std::max(std::min(outside, end), inside);
        g.columns.inside(column, &left, &right);
        if (left == right) outside = inside;
    }
};

// Where rows of the image meet the matrix: those of a line that are not padding.
//
// If the output has the columns of the image, its rows follow each other in the image too, and can be
// copied as one. The padding among them then gets elements of neighbouring rows, and is overwritten.
struct Overlap {
    npy_intp matrix, image;  // where the first is
    npy_intp rows, size;
    npy_intp matrix_distance, image_distance, step;

    Overlap(const Geometry &g, const Line &line) {
        const npy_intp width = g.columns.output, first = line.inside * width;
        const npy_intp corner = g.rows.source(line.inside, line.row) * g.columns.image;
        step = g.columns.stride;
        if (g.columns.is_same() && g.rows.stride == 1) {
            // Positions differ from places in the image by a constant; the image may begin later, or end
            // earlier.
            const npy_intp shift = corner + g.columns.source(0, line.column) - first;
            const npy_intp begin = std::max(first, -shift);
            const npy_intp end = std::min(line.outside * width, g.image_area() - shift);
            matrix = begin - line.first * width, image = begin + shift;
            rows = 1, size = end - begin;
            matrix_distance = image_distance = 0;
        } else {
            matrix = first - line.first * width + line.left;
            image = corner + g.columns.source(line.left, line.column);
            rows = line.outside - line.inside, size = line.right - line.left;
            matrix_distance = width, image_distance = g.rows.stride * g.columns.image;
        }
    }
};

template <typename T>
void set_padding(const Geometry &g, const Line &line, T *to) {
    const npy_intp width = g.columns.output;
    std::fill(to, to + (line.inside - line.first) * width, T(0));
    std::fill(to + (line.outside - line.first) * width, to + (line.end - line.first) * width, T(0));
    if (line.left == 0 && line.right == width) return;
    for (npy_intp y = line.inside; y < line.outside; ++y) {
        T *row = to + (y - line.first) * width;
        for (npy_intp x = 0; x < line.left; ++x) row[x] = 0;
        for (npy_intp x = line.right; x < width; ++x) row[x] = 0;
    }
}

template <typename T>
void gather_line(const Geometry &g, const Line &line, const T *plane, T *to) {
    if (line.inside < line.outside) {
        const Overlap o(g, line);
        copy_rows<T>({plane + o.image, o.image_distance, o.step}, {to + o.matrix, o.matrix_distance, 1},
                     o.rows, o.size);
    }
    set_padding(g, line, to);
}

// The line is overwritten where it is padding.
template <typename T>
void add_line(const Geometry &g, const Line &line, T *from, T *plane) {
    if (line.inside == line.outside) return;
    const Overlap o(g, line);
    if (o.rows == 1) set_padding(g, line, from);
    add_rows<T>({from + o.matrix, o.matrix_distance, 1}, {plane + o.image, o.image_distance, o.step},
                o.rows, o.size);
}

// The rows of the matrix that belong to one channel.
template <typename T>
class Lines {
    const Geometry &g;
    std::vector<Line> lines;

  public:
    Lines(const Geometry &g, npy_intp first, npy_intp end) : g(g) {
        for (npy_intp row = 0; row < g.rows.kernel; ++row)
            for (npy_intp column = 0; column < g.columns.kernel; ++column)
                lines.push_back(Line(g, first, end, row, column));
    }

    // Fills the matrix, whose rows are width elements apart, from a group's channels in some images.
    void gather(const T *input, npy_intp images, T *matrix, npy_intp width) const {
        each([&](const Line &line, npy_intp plane,
                 npy_intp place) { gather_line(g, line, input + plane, matrix + place); },
             images, width);
    }

    // Adds each element of the matrix to the images where gather takes it from. Overwrites the matrix.
    void add_back(T *matrix, npy_intp images, npy_intp width, T *input) const {
        each([&](const Line &line, npy_intp plane,
                 npy_intp place) { add_line(g, line, matrix + place, input + plane); },
             images, width);
    }

  private:
    // Images are the innermost loop, so that the matrix is written row by row.
    template <typename F>
    void each(F function, npy_intp images, npy_intp width) const {
        const npy_intp area = g.image_area(), positions = g.output_area(), size = g.channels * area;
        npy_intp row = 0;
        for (npy_intp channel = 0; channel < g.group_channels(); ++channel)
            for (const Line &line : lines) {
                for (npy_intp image = 0; image < images; ++image)
                    function(line, image * size + channel * area, row + image * positions);
                row += width;
            }
    }
};

}  // namespace synkhronos_convolution
