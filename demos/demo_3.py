"""Shared variables: one replica per process, and collectives that combine the replicas.

Usage: python demo_3.py --processes 2
"""

import textwrap

import script
import synkhronos as synk
from script import TITLE, T, compiler

import numpy as np


def main():
    parser = script.parser(__doc__)
    script.add_processes(parser, default=2)
    options = parser.parse_args()
    n = script.fork(devices=options.devices or ["cpu"] * options.processes)
    print(f"Demo 3: shared variables, on {n} process(es), including this one.")
    script.say_too_small()

    x = T.matrix("x")
    s = compiler.shared(np.ones(2), "s")
    update = synk.function([x], updates=[(s, T.sum(x * s, axis=0))])
    synk.distribute()
    x_value = np.repeat(np.arange(1.0, 2 * n + 1), 2).reshape(2 * n, 2)  # two rows per process
    x_data = synk.data(x_value)

    print(f"\n1. The value of s after the same update with plain {TITLE}, in the master only:")
    update.as_theano(x_data)
    expected = s.get_value()
    print("   s =", expected)
    assert np.allclose(expected, x_value.sum(axis=0))

    print("\n2. Updates are local: each process updates its own replica, using its own rows.")
    s.set_value(np.ones(2))
    update(x_data)
    print("   s.get_value(), the master's replica:", s.get_value())
    print("   gather(s), by process:", synk.gather(s).tolist())
    assert np.allclose(synk.gather(s), x_value.reshape(n, 2, 2).sum(axis=1))

    print("\n3. reduce combines the values in the master.")
    total = synk.reduce(s, op="sum", in_place=False)
    print("   The sum, as a new array:", total)
    synk.reduce(s, op="sum")
    print("   Written to the master's s:", synk.gather(s).tolist())
    assert np.allclose(total, expected) and np.allclose(s.get_value(), expected)

    print("\n4. broadcast gives every process the same value, and so does all_reduce.")
    synk.broadcast(s, np.ones(2))
    print("   After broadcast: ", synk.gather(s).tolist())
    update(x_data)
    synk.all_reduce(s, op="sum")
    print("   After all_reduce:", synk.gather(s).tolist())
    assert np.allclose(synk.gather(s), np.tile(expected, (n, 1)))

    print("\n5. The ops are avg, sum, prod, min and max; avg, the default, can be weighted.")
    for rank in range(n):
        synk.set_value(rank, s, np.full(2, rank + 1.0))
    print("   set_value(rank, s, ...):  ", synk.gather(s).tolist())
    print("   get_value(n - 1, s):      ", synk.get_value(n - 1, s))
    print("   reduce with 'max':        ", synk.reduce(s, "max", in_place=False))
    print("   reduce with 'avg':        ", synk.reduce(s, in_place=False))
    weighted = synk.reduce(s, in_place=False, weights=range(1, n + 1))
    print("   with weights 1, 2, ...:   ", weighted)
    assert np.allclose(synk.reduce(s, in_place=False), (n + 1) / 2)
    assert np.allclose(weighted, np.average(np.arange(1, n + 1), weights=np.arange(1, n + 1)))

    print("\n6. A function without inputs uses the replica of each process.")
    double = synk.function([], updates=[(s, 2 * s)])
    synk.distribute()  # variables that are already replicated keep their values
    double()
    print("   Doubled on every process:      ", synk.gather(s).tolist())
    assert np.allclose(synk.gather(s)[:, 0], 2 * np.arange(1, n + 1))
    double.as_theano()
    print("   as_theano, in the master only: ", synk.gather(s).tolist())
    assert np.allclose(synk.gather(s)[:, 0], [4, *2 * np.arange(2, n + 1)])

    print("\n7. scatter splits rows over the processes. The shapes of the replicas may then differ.")
    rows = compiler.shared(np.zeros((1, 2)), "rows")
    largest = synk.function([], (rows.max(), "max"))
    synk.distribute()
    values = np.arange(4 * n + 2.0).reshape(2 * n + 1, 2)
    synk.scatter(rows, values)
    print(f"   Rows of each process, of {len(values)} in all:", synk.get_lengths(rows))
    print("   Their shapes:", synk.get_shapes(rows))
    print("   The maximum of all rows, computed by a function:", largest())
    assert sum(synk.get_lengths(rows)) == len(values) and largest() == values.max()

    print("\n8. Values of different shapes are never truncated or padded.")
    print("   gather(rows, nd_up=0) concatenates them along axis 0:", synk.gather(rows, nd_up=0).shape)
    assert np.array_equal(synk.gather(rows, nd_up=0), values)
    shapes = [np.shape(one) for one in synk.gather(rows)]
    print("   gather(rows) cannot stack them and returns a list:", shapes)
    try:
        synk.all_reduce(rows)
    except ValueError as error:
        print("   all_reduce(rows) raises a ValueError:")
        print(textwrap.indent(textwrap.fill(str(error), 90), "      "))
    synk.all_gather(rows)
    print("   After all_gather every process has all rows: ", synk.get_lengths(rows))
    assert np.array_equal(synk.get_value(n - 1, rows), values)

    synk.close()
    print(f"\nAll results match plain {TITLE} and NumPy.")


if __name__ == "__main__":
    script.run(main)
