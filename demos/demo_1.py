"""The basics: a function that computes on all processes, and one that computes in slices.

    python demo_1.py --processes 2
"""

import argparse

import synkhronos as synk  # before Theano
import theano
import theano.tensor as T

import numpy as np


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-n", "--processes", type=int, default=2, help="in all (default: 2)")
    n = synk.fork(parser.parse_args().processes, use_gpu=False)
    print(f"Demo 1: functions. {n} processes: this one, the master, and {n - 1} workers.\n")

    print("1. As in Theano, but built with synk.function.")
    x = T.matrix("x")
    square = theano.function([x], (x**2).mean())
    synk_square = synk.function([x], (x**2).mean())
    x_value = np.arange(20.0).reshape(10, 2)
    print("   Theano:     mean of the squares of 10 rows =", square(x_value))
    print("   Synkhronos: mean of the squares of 10 rows =", synk_square(x_value))
    assert np.allclose(synk_square(x_value), square(x_value))

    print("\n2. The rows were split over the processes. A gathered output shows how:")
    n_rows = synk.function([x], (x.shape[0], "gather"))
    print("   rows that each process had, of 10:", n_rows(x_value))
    print("   rows that each process had, of 7: ", n_rows(x_value[:7]))
    assert n_rows(x_value[:7]).sum() == 7
    print("   A mean over unequal shares is still the mean over all rows:", synk_square(x_value[:7]))
    assert np.allclose(synk_square(x_value[:7]), square(x_value[:7]))

    print("\n3. Each output says how the processes' results become one; the default is 'avg'.")
    outputs = [x.mean(), (x.sum(axis=0), "sum"), (x.max(), "max"), (x[:, 0] + x[:, 1], "gather")]
    parallel = synk.function([x], outputs)
    serial = theano.function([x], [x.mean(), x.sum(axis=0), x.max(), x[:, 0] + x[:, 1]])
    synk.distribute()  # the functions built since then go to the workers; a call would do it too
    results = parallel(x_value)
    for name, result in zip(("avg", "sum", "max", "gather"), results):
        print(f"   {name:7}", result)
    for result, expected in zip(results, serial(x_value)):
        assert np.allclose(result, expected)
    print("   Only the third:", parallel(x_value, output_subset=[2]))
    assert parallel(x_value, output_subset=[2]) == [19.0]

    print("\n4. An input in bcast_inputs is not split: every process gets all of it.")
    w = T.vector("w")
    dot = synk.function([x], (T.dot(x, w), "gather"), bcast_inputs=[w])
    w_value = np.array([1.0, -1.0])
    print("   x . w =", dot(x_value, w_value))
    assert np.allclose(dot(x_value, w_value), x_value.dot(w_value))

    print("\n5. num_slices: each process computes its rows in that many parts, to save memory.")
    print("   rows in one call of the Theano function, 1 slice: ", n_rows(x_value))
    print("   rows in one call of the Theano function, 2 slices:", n_rows(x_value, num_slices=2))
    assert n_rows(x_value, num_slices=2).max() <= -(-n_rows(x_value).max() // 2)
    print("   The results are the same:", parallel(x_value, num_slices=2)[:3])
    for sliced, expected in zip(parallel(x_value, num_slices=2), serial(x_value)):
        assert np.allclose(sliced, expected)

    print("\n6. Updates of shared variables accumulate over slices, and are written once at the end.")
    total = theano.shared(np.zeros(2), "total")
    add = synk.function([x], updates=[(total, total + x.sum(axis=0), "sum")])
    add(x_value, num_slices=2)
    print("   What the master added up from its own rows:", total.get_value())
    n_own = n_rows(x_value)[0]
    assert np.allclose(total.get_value(), x_value[:n_own].sum(axis=0))
    print("   Each process updates its own replica. demo_3.py is about bringing these together.")

    synk.close()
    print("\nAll results equal plain Theano's.")


if __name__ == "__main__":
    main()
