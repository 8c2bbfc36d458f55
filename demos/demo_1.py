"""Functions: how inputs are split, outputs are reduced, and rows are computed in slices.

Usage: python demo_1.py --processes 2
"""

import script
import synkhronos as synk
from script import NAME, TITLE, T, compiler

import numpy as np


def main():
    parser = script.parser(__doc__)
    script.add_processes(parser, default=2)
    options = parser.parse_args()
    n = script.fork(devices=options.devices or ["cpu"] * options.processes)
    print(f"Demo 1: functions, on {n} process(es), including this one.")
    script.say_too_small()

    print(f"\n1. Build a function with synk.function instead of {NAME}.function.")
    x = T.matrix("x")
    serial = compiler.function([x], (x**2).mean())
    parallel = synk.function([x], (x**2).mean())
    synk.distribute()  # replicates the functions built so far
    x_value = np.arange(20.0).reshape(10, 2)
    print(f"   {TITLE + ':':11} the mean square over 10 rows is", serial(x_value))
    print("   Synkhronos: the mean square over 10 rows is", parallel(x_value))
    assert np.allclose(parallel(x_value), serial(x_value))

    print("\n2. The rows are split over the processes, as a gathered output shows.")
    n_rows = synk.function([x], (x.shape[0], "gather"))
    synk.distribute()
    print("   Rows that each process had, of 10:", n_rows(x_value))
    print("   Rows that each process had, of 7: ", n_rows(x_value[:7]))
    print("   A mean over unequal shares is weighted, so it is exact:", parallel(x_value[:7]))
    assert n_rows(x_value).sum() == 10 and n_rows(x_value[:7]).sum() == 7
    assert np.allclose(parallel(x_value[:7]), serial(x_value[:7]))

    print("\n3. The op of an output combines the values of the processes; the default is 'avg'.")
    row_sums = x.sum(axis=1)
    outputs = [x.mean(), (x.sum(axis=0), "sum"), (x.max(), "max"), (row_sums, "gather")]
    serial = compiler.function([x], [x.mean(), x.sum(axis=0), x.max(), row_sums])
    parallel = synk.function([x], [*outputs, (x.shape[0], None)])
    synk.distribute()
    results = parallel(x_value)
    print("   x.mean()                      ", results[0])
    print("   x.sum(axis=0), 'sum'          ", results[1])
    print("   x.max(), 'max'                ", results[2])
    print("   x.sum(axis=1), 'gather'       ", results[3])
    print("   x.shape[0], None (the master's)", results[4])
    for result, expected in zip(results, serial(x_value)):
        assert np.allclose(result, expected)
    print("   Only the third output, with output_subset=[2]:", parallel(x_value, output_subset=[2]))
    assert parallel(x_value, output_subset=[2]) == serial(x_value)[2:3]

    print("\n4. An input in bcast_inputs is not split: every process gets the whole array.")
    w = T.vector("w")
    serial = compiler.function([x, w], T.dot(x, w))
    parallel = synk.function([x], (T.dot(x, w), "gather"), bcast_inputs=[w])
    synk.distribute()
    w_value = np.array([2.0, -1.0])
    print("   x . w =", parallel(x_value, w_value))
    assert np.allclose(parallel(x_value, w_value), serial(x_value, w_value))

    print("\n5. With num_slices, each process computes on its rows in slices, to save memory.")
    print("   Rows at once, by process:        ", n_rows(x_value))
    print("   Rows at once, with num_slices=2: ", n_rows(x_value, num_slices=2))
    assert n_rows(x_value, num_slices=2).max() == (n_rows(x_value).max() + 1) // 2
    parallel = synk.function([x], outputs)
    serial = compiler.function([x], [x.mean(), x.sum(axis=0), x.max(), row_sums])
    synk.distribute()
    print("   The results are the same as above:", parallel(x_value, num_slices=2)[:3])
    for result, expected in zip(parallel(x_value, num_slices=2), serial(x_value)):
        assert np.allclose(result, expected)

    print("\n6. Updates of shared variables are accumulated over the slices and written at the end.")
    total = compiler.shared(np.zeros(2), "total")
    write_total = synk.function([x], updates=[(total, x.sum(axis=0), "sum")])
    synk.distribute()
    write_total(x_value, num_slices=2)
    print("   The sum over the master's own rows:", total.get_value())
    assert np.allclose(total.get_value(), x_value[: n_rows(x_value)[0]].sum(axis=0))
    print("   Each process updates its own replica; demo_3.py combines the replicas.")

    synk.close()
    print(f"\nAll results match plain {TITLE}.")


if __name__ == "__main__":
    script.run(main)
