// Where the positions of a convolution's output lie in its input.

#include <algorithm>

namespace synkhronos_convolution {

inline npy_intp floor_divide(npy_intp a, npy_intp b) {
    return a / b - (a % b < 0);
}
inline npy_intp ceil_divide(npy_intp a, npy_intp b) {
    return -floor_divide(-a, b);
}

// Theano's codes of border modes, in place of numbers.
enum { HALF = -1, FULL = -2 };

// The rows, or the columns, of the image, the kernel and the output.
struct Axis {
    npy_intp stride, dilation, before, after;  // before and after: the padding
    npy_intp image, kernel, output;

    npy_intp extent() const { return (kernel - 1) * dilation + 1; }

    // The kernel must be known.
    void set_padding() {
        if (before == HALF || after == HALF) before = after = extent() / 2;
        else if (before == FULL || after == FULL) before = after = extent() - 1;
    }

    // The size of the output that image and kernel give.
    npy_intp positions() const { return floor_divide(image + before + after - extent(), stride) + 1; }

    // The size of the kernel that image and output allow, if Theano does not give it.
    npy_intp inferred_kernel() const {
        const npy_intp covered = (output - 1) * stride + 1;
        const bool is_full = before == FULL || after == FULL;
        const npy_intp rest = is_full ? covered - image : image + before + after - covered;
        return floor_divide(rest, dilation) + 1;
    }

    // The size of the image that output and kernel allow, if Theano does not give it.
    npy_intp inferred_image() const { return (output - 1) * stride + extent() - before - after; }

    // The place in the image that an element of the kernel meets at an output position.
    npy_intp source(npy_intp position, npy_intp element) const {
        return position * stride + element * dilation - before;
    }

    // The positions at which an element of the kernel meets the image rather than padding.
    void inside(npy_intp element, npy_intp *first, npy_intp *end) const {
        const npy_intp shift = source(0, element);
        *first = std::min(std::max<npy_intp>(ceil_divide(-shift, stride), 0), output);
        *end = std::min(std::max(ceil_divide(image - shift, stride), *first), output);
    }

    // Those of the gradient with respect to the image, a convolution of the output, if the stride is 1.
    Axis turned() const {
        const Axis axis = {1,      dilation, extent() - 1 - before, extent() - 1 - after, output,
                           kernel, image};
        return axis;
    }

    // Whether the output has the places of the image.
    bool is_same() const { return stride == 1 && output == image; }
};

struct Geometry {
    npy_intp images, channels, filters, groups;
    Axis rows, columns;

    npy_intp image_area() const { return rows.image * columns.image; }
    npy_intp output_area() const { return rows.output * columns.output; }
    npy_intp group_channels() const { return channels / groups; }
    npy_intp group_filters() const { return filters / groups; }

    // The number of elements of one filter.
    npy_intp depth() const { return group_channels() * rows.kernel * columns.kernel; }

    // Whether an image, as it is, is the matrix that the filters multiply.
    bool is_pointwise() const {
        return rows.kernel == 1 && columns.kernel == 1 && rows.is_same() && columns.is_same() &&
               rows.before == 0 && columns.before == 0;
    }
};

}  // namespace synkhronos_convolution
