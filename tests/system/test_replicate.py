"""Tests of functions that are created after the workers have been forked."""

import pickle
import sys

import numpy as np
import pytest
import theano
import theano.tensor as T
from prelude import Locked
from theano.gof.cc import get_module_cache
from theano.tensor.shared_randomstreams import RandomStreams

import synkhronos as synk
from synkhronos.world.rank_state import Command


def test_workers_take_over_new_functions_without_compiling_anything(run_python, tmp_path):
    """The compile cache is separate, as the tests' cache may already contain the function's modules."""
    environment = {"THEANO_FLAGS": f"base_compiledir={tmp_path}/modules"}
    run_python("modules_compiled.py", environment=environment)


@pytest.mark.filterwarnings("ignore:.*replicas differ:synkhronos.SynkhronosWarning")
def test_a_pickled_function_uses_the_variables_that_are_there(world_of):
    world_of(3)
    x = T.dvector("x")
    total = theano.shared(0.0, "total")
    first = synk.function([x], updates=[(total, total + x.sum())], mode="FAST_COMPILE")
    synk.distribute()
    first([1.0, 2.0, 4.0])
    second = synk.function([x], (x.sum() * total, "gather"), mode="FAST_COMPILE")
    synk.distribute()
    assert second([1.0, 1.0, 1.0]).tolist() == [1.0, 2.0, 4.0]
    first([1.0, 1.0, 1.0])
    assert second([1.0, 1.0, 1.0]).tolist() == [2.0, 3.0, 5.0]


def test_deep_graphs_can_be_pickled(world_of):
    world_of(2)
    synk.distribute()
    x = T.dvector("x")
    y = x
    for _ in range(150 if sys.version_info < (3, 12) else 600):
        y = y + T.dot(y, y)
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(10_000)  # for Theano, which recurses once per node
    try:
        f = synk.function([x], (y.sum(), "sum"), mode=theano.Mode(linker="py", optimizer=None))
    finally:
        sys.setrecursionlimit(before)
    if sys.version_info < (3, 14):  # where only the size of the stack counts
        with pytest.raises(RecursionError):
            pickle.dumps(f.replica.compiled)
    assert f(np.zeros(4)) == 0


def test_a_function_that_a_worker_cannot_take_over_can_be_tried_again(world_of, monkeypatch):
    world_of(3)
    synk.distribute()
    x = T.dvector("x")
    f = synk.function([x], (x.sum(), "sum"), mode="FAST_COMPILE")
    engine = synk.world.world.current_world().rank_state.engine
    with monkeypatch.context() as patch:
        patch.setattr(type(engine), "dumps", lambda *_: b"not a pickle")
        with pytest.raises(synk.WorkerError, match="UnpicklingError|EOFError|unpickl"):
            synk.distribute()
    assert f([1.0, 2.0, 3.0]) == 6


def test_a_function_that_cannot_be_sent_is_refused_alone(world_of):
    world_of(3)
    synk.distribute()
    x = T.dvector("x")
    streams = RandomStreams(1)
    total, numbers = x.sum(), streams.uniform((2,))
    before = synk.function([x], (total, "sum"), mode="FAST_COMPILE")
    outputs = [(Locked()(total), "sum"), (numbers, "gather")]
    locked = synk.function([x], outputs, mode="FAST_COMPILE", name="locked")
    with pytest.raises(TypeError, match="locked>: it cannot be sent .*lock.*distribute"):
        synk.distribute()
    synk.distribute()
    outputs = [(2 * total, "sum"), (numbers, "gather")]
    after = synk.function([x], outputs, mode="FAST_COMPILE")
    ones = np.ones(4)
    with pytest.raises(TypeError, match="locked>: it cannot be sent"):
        locked(ones)
    with pytest.raises(TypeError, match="locked>: it cannot be sent"), synk.fuse():
        locked(ones)
    assert locked.as_theano(ones)[0] == 4
    assert before(ones) == 4
    drawn = after(ones)
    assert drawn[0] == 8 and len(np.unique(drawn[1])) == 6
    synk.restart()
    assert [locked(ones)[0], before(ones), after(ones)[0]] == [4, 4, 8]


class Look(Command):
    """Returns the result of ``read(here)`` on each rank."""

    def __init__(self, read):
        self.read = read

    def run(self, state):
        return self.read(state)


def look(read):
    return synk.world.world.current_world().run(Look(read))


def test_a_single_rank_needs_no_pickle(world_of):
    world_of(1)
    synk.distribute()
    x = T.dvector("x")
    locked = synk.function([x], (Locked()(x).sum(), "sum"), mode="FAST_COMPILE")
    synk.distribute()
    assert locked([1.0, 2.0]) == 3


MODULE = ("made up", "key")


@pytest.fixture
def new_module(tmp_path):
    """Function that registers a new compiled module in the master's cache."""
    get_module_cache()
    (tmp_path / "module.so").touch()
    yield lambda: get_module_cache().entry_from_key.update({MODULE: str(tmp_path / "module.so")})
    get_module_cache().entry_from_key.pop(MODULE, None)


def knows_module(state):
    return MODULE in get_module_cache().entry_from_key


def test_modules_are_sent_beside_a_function_that_cannot_be(world_of, new_module):
    world_of(3)
    synk.distribute()
    new_module()
    x = T.fmatrix("x")
    w = theano.shared(np.eye(2, dtype="float32"), "w")
    y = T.nnet.softmax(x.dot(w))
    locked = synk.function([x], (Locked()(y).sum(), "sum"), name="locked")
    late = synk.function([x], (y.sum(), "sum"))
    with pytest.raises(TypeError, match="locked>: it cannot be sent"):
        synk.distribute()
    assert look(knows_module) == [True] * 3
    ones = np.ones((6, 2), "float32")
    assert late(ones) == locked.as_theano(ones) == pytest.approx(6)
