"""Data: arrays in shared memory, which calls use without copying them.

Usage: python demo_2.py --processes 2
"""

import tempfile
from pathlib import Path

import script
import synkhronos as synk
from script import TITLE, T, compiler

import numpy as np


def main():
    parser = script.parser(__doc__)
    script.add_processes(parser, default=2)
    options = parser.parse_args()
    n = script.fork(devices=options.devices or ["cpu"] * options.processes)
    print(f"Demo 2: data, on {n} process(es), including this one.")
    script.say_too_small()

    x = T.matrix("x", dtype="float32")
    y = T.ivector("y")
    expression = (x.sum(axis=1) * y).mean()
    serial = compiler.function([x, y], expression)
    parallel = synk.function([x, y], expression)
    synk.distribute()

    print("\n1. synk.data copies an array to shared memory, where every process reads it directly.")
    x_value = np.arange(12, dtype="float32").reshape(6, 2)
    y_value = np.array([1, 1, 1, -1, -1, -1], dtype="int32")
    x_data, y_data = synk.data(x_value), synk.data(y_value)
    print("   Data:", x_data, y_data)
    print("   f(x_data, y_data) =", parallel(x_data, y_data))
    print("   f(x_value, y_value) gives the same result, but copies the arrays in each call.")
    assert np.allclose(parallel(x_data, y_data), serial(x_value, y_value))
    assert np.allclose(parallel(x_value, y_value), serial(x_value, y_value))

    print("\n2. Read and write Data like a NumPy array; the next call uses the new values.")
    x_data[0] = 100
    x_data[1:3] += 0.5
    print("   x_data[:3] =", x_data[:3].tolist())
    print("   f(x_data, y_data) =", parallel(x_data, y_data))
    print("   x_data.data is a NumPy view; its mean is", x_data.data.mean())
    assert np.allclose(parallel(x_data, y_data), serial(x_data.data, y_value))

    print("\n3. The dtype and the number of dimensions are fixed, but the shape can change.")
    x_data.set_value(x_value[:4])
    y_data.set_length(4)
    print("   After set_value and set_length:", x_data, y_data)
    assert np.allclose(parallel(x_data, y_data), serial(x_value[:4], y_value[:4]))
    x_data.set_length(6)
    print("   When it grows again, the new rows are zero:", x_data[-2:].tolist())
    assert not x_data[-2:].any()
    x_data.set_length(8, oversize=1.5)
    print(f"   With oversize=1.5 it has room to grow: {x_data.size} of {x_data.alloc_size} items used.")

    print("\n4. A value that would lose precision is a TypeError, unless you set force_cast.")
    doubles = x_value.astype("float64") / 3
    try:
        x_data.set_value(doubles)
    except TypeError as error:
        print("   TypeError:", str(error).replace(", which", ",\n   which"))
    x_data.set_value(doubles, force_cast=True)
    assert x_data.dtype == "float32" and np.allclose(x_data, doubles)

    print("\n5. build_inputs creates the Data for the inputs of a function, with the right dtypes.")
    x_data, y_data = parallel.build_inputs([[1, 2], [3, 4], [5, 6]], [1, 2, 3])
    print("   From lists:", x_data, y_data)
    print("   f(x_data, y_data) =", parallel(x_data, y_data))
    assert np.allclose(parallel(x_data, y_data), serial(x_data.data, y_data.data))

    print("\n6. A file may be larger than the memory: every process maps it instead of copying it.")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "rows.npy")
        np.save(path, x_value)
        x_file = synk.data(np.load(path, mmap_mode="r"))
        y_data = synk.data(y_value)
        print("   f(x_file, y_data) =", parallel(x_file, y_data))
        assert np.allclose(parallel(x_file, y_data), serial(x_value, y_value))

    print("\n7. free_memory frees the memory of one Data; synk.close frees the memory of all Data.")
    y_data.free_memory()
    print("  ", y_data)

    synk.close()
    print(f"\nAll results match plain {TITLE}.")


if __name__ == "__main__":
    script.run(main)
