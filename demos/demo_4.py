"""batch: the rows of the data that a call uses, selected without copying them in the script.

Usage: python demo_4.py --processes 2
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
    print(f"Demo 4: batches, on {n} process(es), including this one.")
    script.say_too_small()

    x, y = T.matrix("x"), T.vector("y")
    outputs = [T.sqr(x.sum(axis=1) - y).mean(), x[:, 0]]
    serial = compiler.function([x, y], outputs)
    parallel = synk.function([x, y], [outputs[0], (outputs[1], "gather")], name="f")
    synk.distribute()
    x_value, y_value = np.arange(20.0).reshape(10, 2), np.ones(10)
    x_value[:, 0] = np.arange(10)  # the first column is the number of the row
    x_data, y_data = synk.data(x_value), synk.data(y_value)

    def show(what, batch, rows):
        """Print the rows that a call used, and compare the results with the compiler on these rows."""
        loss, used = parallel(x_data, y_data, batch=batch)
        print(f"   {what:30} rows {used.astype(int).tolist()}, loss {loss:.2f}")
        expected_loss, expected_used = serial(x_value[rows], y_value[rows])
        assert np.allclose(loss, expected_loss) and np.array_equal(used, expected_used)

    print("\n1. The whole data set is in shared memory; batch selects the rows to use.")
    show("no batch", None, slice(None))
    show("batch=4", 4, slice(4))
    show("batch=slice(4, 8)", slice(4, 8), slice(4, 8))
    show("batch=slice(None, None, -3)", slice(None, None, -3), slice(None, None, -3))
    show("batch=[7, 0, 0, -1]", [7, 0, 0, -1], [7, 0, 0, -1])
    show("batch=x_value[:, 0] > 6", x_value[:, 0] > 6, x_value[:, 0] > 6)
    print("   The selected rows are split over the processes, which read them in parallel.")

    print("\n2. For an epoch in random order, loop over the parts of a permutation.")
    order = np.random.RandomState(1).permutation(10)
    for start in range(0, 10, 4):
        batch = order[start : start + 4]
        show(f"batch={batch.tolist()}", batch, batch)

    print("\n3. batch can be combined with num_slices: each process computes in slices.")
    loss, used = parallel(x_data, y_data, batch=order, num_slices=3)
    print(f"   batch=order, num_slices=3      rows {used.astype(int).tolist()}, loss {loss:.2f}")
    assert np.array_equal(used, order) and np.allclose(loss, serial(x_value, y_value)[0])

    print("\n4. Data with minibatch=True holds the rows of one batch only.")
    noise = synk.data(np.full((3, 2), 0.5), minibatch=True)
    z = T.matrix("z")
    noisy = synk.function([x, z], ((x + z)[:, 0], "gather"))
    synk.distribute()
    print("   Rows 5 to 7 and 3 rows of noise:", noisy(x_data, noise, batch=slice(5, 8)))
    assert np.array_equal(noisy(x_data, noise, batch=slice(5, 8)), [5.5, 6.5, 7.5])

    print("\n5. Data may be bound to variables; a call then needs only the rows.")
    synk.set_shmems({x: x_data, y: y_data})
    loss, used = parallel(batch=[1, 2, 3])
    print(f"   f(batch=[1, 2, 3])             rows {used.astype(int).tolist()}, loss {loss:.2f}")
    assert np.allclose(loss, serial(x_value[1:4], y_value[1:4])[0])

    print("\n6. Rows that do not exist are an error in the master, before anything runs.")
    try:
        parallel(x_data, y_data, batch=[3, 10])
    except IndexError as error:
        print("   IndexError:", error)

    synk.close()
    print(f"\nAll results match plain {TITLE} on the same rows.")


if __name__ == "__main__":
    script.run(main)
