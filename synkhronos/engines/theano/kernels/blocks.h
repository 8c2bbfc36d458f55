// The blocks in which a convolution is computed: rows of an image, or several images.
//
// The matrix of columns of a block should stay in the cache between the copying and the multiplication,
// and should be wide enough for the multiplication to be efficient. Large images are divided, small ones
// joined.

#include <cstdlib>
#include <new>

namespace synkhronos_convolution {

// Memory without initial values.
template <typename T>
class Scratch {
    T *memory;

  public:
    explicit Scratch(npy_intp size) : memory(static_cast<T *>(std::malloc((size + 16) * sizeof(T)))) {
        if (!memory) throw std::bad_alloc();
    }
    ~Scratch() { std::free(memory); }
    Scratch(const Scratch &) = delete;
    Scratch &operator=(const Scratch &) = delete;
    T *get() const { return memory; }
};

struct Block {
    npy_intp image, images;  // the first one, and how many
    npy_intp row, rows;      // of the output of each
    npy_intp width;          // how many positions these are in all

    // The distance of rows in a matrix of columns. Were it a multiple of a large power of two, all rows
    // would compete for the same places in the cache.
    npy_intp padded_width() const { return width + 16; }
};

class Blocks {
    npy_intp images, rows;  // of a block, at most

  public:
    Blocks(const Geometry &g, size_t item) {
        // A quarter to a half of the second-level cache of most processors; the panels of BLAS routines
        // need the rest. These are some hundred columns wide, and fewer do not fill them.
        const npy_intp cache = 1 << 18, least = 192, most = 1024;
        const npy_intp fitting = cache / static_cast<npy_intp>(item * g.depth());
        const npy_intp wanted = std::min(std::max(fitting, least), most), area = g.output_area();
        images = 1;
        rows = g.rows.output;
        if (area > wanted && !g.is_pointwise()) rows = even_share(rows, area, wanted);
        else if (area < wanted) images = even_share(g.images, g.images * area, wanted);
    }

    // The whole divided into equal parts, about one for each time that wanted is in size.
    static npy_intp even_share(npy_intp whole, npy_intp size, npy_intp wanted) {
        const npy_intp parts = std::max<npy_intp>((size + wanted / 2) / wanted, 1);
        return ceil_divide(whole, std::min(parts, whole));
    }

    npy_intp width(const Geometry &g) const { return images * rows * g.columns.output + 16; }
    bool joins_images() const { return images > 1; }

    template <typename F>
    void each(const Geometry &g, F function) const {
        for (npy_intp image = 0; image < g.images; image += images)
            for (npy_intp row = 0; row < g.rows.output; row += rows) {
                Block block = {image, std::min(images, g.images - image), row,
                               std::min(rows, g.rows.output - row), 0};
                block.width = block.images * block.rows * g.columns.output;
                function(block);
            }
    }
};

}  // namespace synkhronos_convolution
