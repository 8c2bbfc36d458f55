"""A user's script. mypy accepts it in its strict mode, and what it infers is what there is."""

from typing import Any, List, Tuple

import numpy as np
import theano
import theano.tensor as tt
from numpy.typing import NDArray
from typing_extensions import assert_type

import synkhronos as synk
from synkhronos import Comparison, Data, Function, Profile

Array = NDArray[Any]


def parameters() -> List[Any]:
    return [theano.shared(np.zeros(2), name="w"), theano.shared(np.zeros(()), name="b")]


def main() -> None:
    n: int = synk.fork(2, use_gpu=False)
    x, y, weights = tt.dmatrix("x"), tt.dvector("y"), parameters()
    w, b = weights
    loss = ((x.dot(w) + b - y) ** 2).mean()
    f = synk.function(
        [x, synk.In(y)],
        [loss, (x.sum(), "sum"), (y, "gather"), (b, None), synk.Out(x.max(), "max")],
        updates=[(b, b + loss), (w, w + 1, "sum")],
        mode="FAST_COMPILE",
    )
    assert_type(f, Function)
    named = synk.function([x], {"mean": x.mean(), "most": (x.max(), "max")}, mode="FAST_COMPILE")
    rows = synk.data(np.ones((4, 2)), minibatch=False)
    assert_type(rows, Data)
    assert_type(rows.data, Array)
    assert_type(rows.shape, Tuple[int, ...])
    assert_type(f.build_inputs([[1.0, 2.0]]), Data)
    assert_type(f.build_inputs(np.ones((4, 2)), [1.0] * 4), Tuple[Data, ...])
    f(rows, np.zeros(4), batch=slice(2), num_slices=2, output_subset=[0])
    f(rows, y=[0, 0, 0, 0], batch=[0, 1, -1])
    named(x=rows)
    assert_type(named.check(rows), Comparison)
    with synk.profile() as measured:
        named(rows)
    assert_type(measured, Profile)
    assert_type(measured.seconds, Array)

    # One or many
    synk.broadcast(weights)
    synk.all_reduce(w, op="max")
    values: Array = synk.get_value(1, w)
    several = synk.get_value(1, [w, b])
    assert values.shape == several[0].shape == (2,)
    shapes = synk.get_shapes([w, b])
    assert [shape[0] for shape in shapes[0]] == [2] * n
    lengths: List[int] = synk.get_lengths(w)
    assert len(lengths) == n
    reduced = synk.reduce([w, b], "sum", in_place=False)
    assert reduced[0].ndim == 1
    gathered = synk.gather([w], nd_up=0)
    assert len(gathered[0]) == 2 * n
    synk.set_shmems({x: rows})
    assert_type(synk.get_shmems(x), Data)
    with synk.fuse():
        later = synk.get_value(0, [w])
        synk.all_reduce(weights)
    assert later.result()[0].shape == (2,)

    step = synk.extensions.train.make_train_function(
        loss, weights, x, y, synk.extensions.updates.sgd, learning_rate=0.1
    )
    step(rows, np.zeros(4))
    synk.close()


if __name__ == "__main__":
    main()
