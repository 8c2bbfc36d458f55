"""sliceable_shareds: data that lives in shared variables, a part of it on each process.

    python demo_5.py --processes 2
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
    print(f"Demo 5: data in shared variables, on {n} process(es), this one included.")

    x, w = theano.shared(np.zeros((1, 2)), "x"), theano.shared(np.ones(2), "w")
    row_sums = T.dot(x, w)
    parallel = synk.function([], [row_sums.mean(), (row_sums, "gather")], sliceable_shareds=[x])
    n_rows = synk.function([], (x.shape[0], "gather"), sliceable_shareds=[x])
    synk.distribute()
    x_value = np.arange(8 * n).reshape(4 * n, 2).astype("float64")
    serial = theano.function([x], T.dot(x, w), on_unused_input="ignore") if False else None
    del serial


if __name__ == "__main__":
    main()
