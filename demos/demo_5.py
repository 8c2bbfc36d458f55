"""sliceable_shareds: data that stays in shared variables, with a part of it on each process.

Usage: python demo_5.py --processes 2
"""

import script
import synkhronos as synk
from script import TITLE, T, compiler

import numpy as np


def main():
    parser = script.parser(__doc__)
    script.add_processes(parser, default=2)
    options = parser.parse_args()
    n = script.fork(devices=options.devices or ["cpu"] * options.processes)
    print(f"Demo 5: data in shared variables, on {n} process(es), including this one.")
    script.say_too_small()

    x, w = T.matrix("x"), compiler.shared(np.ones(2), "w")
    row_sums = T.dot(x, w)
    serial = compiler.function([x], [row_sums.mean(), row_sums])
    x_value = np.repeat(np.arange(4.0 * n), 2).reshape(4 * n, 2)  # the sum of row i is 2 * i

    print("\n1. The data is in shared variables: scatter sends each process its rows once.")
    x_rows = compiler.shared(np.zeros((1, 2)), "x_rows")
    parallel = synk.function(
        [],
        [row_sums.mean(), (row_sums, "gather")],
        givens={x: x_rows},
        sliceable_shareds=[x_rows],
    )
    synk.distribute()
    synk.scatter(x_rows, x_value)
    print("   Rows of each process:", synk.get_lengths(x_rows))
    assert synk.get_lengths(x_rows) == [4] * n

    def show(what, result, rows):
        """Print the result of a call, and compare it with the compiler on the same rows."""
        mean, sums = result
        print(f"   {what:32} {sums.tolist()}, mean {mean:g}")
        expected_mean, expected_sums = serial(x_value[rows])
        assert np.allclose(mean, expected_mean) and np.allclose(sums, expected_sums)

    print("\n2. A call then needs no input: on each process, its own x_rows replaces x.")
    show("f(), the sums of all rows:", parallel(), slice(None))

    print("\n3. batch_s selects rows of each process, here the same row numbers on all processes.")
    first, last = [4 * rank for rank in range(n)], [4 * rank + 3 for rank in range(n)]
    two = [row for pair in zip(last, first) for row in pair]
    show("f(batch_s=slice(0, 1)):", parallel(batch_s=slice(0, 1)), first)
    show("f(batch_s=[3, 0]):", parallel(batch_s=[3, 0]), two)

    print("\n4. A list with one batch per process selects different rows on each.")
    slices = [slice(0, 3)] + [slice(3, 4)] * (n - 1)
    show("f(batch_s=[:3, 3:, ...]):", parallel(batch_s=slices), [0, 1, 2, *last[1:]])
    print("   Each process is weighted by its rows, so this is the mean of all rows used.")

    print("\n5. num_slices: each process computes on its rows in slices, to save memory.")
    n_rows = synk.function([], (x_rows.shape[0], "gather"), sliceable_shareds=[x_rows])
    synk.distribute()
    print("   Rows at once, by process:       ", n_rows())
    print("   Rows at once, with num_slices=2:", n_rows(num_slices=2))
    assert n_rows(num_slices=2).tolist() == [2] * (2 * n)
    show("f(num_slices=2):", parallel(num_slices=2), slice(None))

    print("\n6. scatter takes a batch, for example the next part of a large data set.")
    data = synk.data(x_value)
    synk.scatter(x_rows, data, batch=slice(2 * n, 4 * n))
    show(f"Rows {2 * n} to {4 * n - 1}:", parallel(), slice(2 * n, None))

    print("\n7. Other shared variables are used whole: w is the same for every row.")
    synk.broadcast(w, np.array([1.0, -1.0]))
    show("f() with w = [1, -1]:", parallel(), slice(2 * n, None))

    synk.close()
    print(f"\nAll results match plain {TITLE} on the same rows.")


if __name__ == "__main__":
    script.run(main)
