"""Tests of functions and operations that are created after the workers have been forked."""

import gc
import pickle
import sys
import textwrap
import types

import numpy as np
import pytest
import theano
import theano.tensor as T
from prelude import Locked
from theano.gof.cc import get_module_cache
from theano.tensor.shared_randomstreams import RandomStreams

import synkhronos as synk
from synkhronos.engines.cpu import CpuEngine
from synkhronos.world.rank_state import Command
from theano.compile.nanguardmode import NanGuardMode


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


def test_deep_graphs_can_be_pickled(two):
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


MAIN = sys.modules["__main__"]

# The text of cells, which define operations in ``__main__`` while the workers run.
SCALE = """
    import numpy as np
    import theano

    def times(x, factor):
        return x * factor

    plus = lambda x, factor: x + factor

    class Scale(theano.Op):
        __props__ = ("factor",)

        def __init__(self, factor):
            super().__init__()
            self.factor = factor

        def make_node(self, x):
            return theano.Apply(self, [x], [x.type()])

        def perform(self, node, inputs, outputs):
            outputs[0][0] = np.asarray({helper}(inputs[0], self.factor))
"""
TIMES, PLUS = "times", "plus"


@pytest.fixture
def cell():
    """A function that runs code in ``__main__``; what it defines is removed after the test."""
    names = vars(MAIN)
    kept = dict(names)

    def run(code):
        exec(textwrap.dedent(code), names)

    yield run
    for name in {*names} - {*kept}:
        del names[name]
    names.update(kept)


def summed(op, **kwargs):
    """Return a function of a vector: the sum of what an operation makes of it."""
    x = T.dvector("x")
    return synk.function([x], (op(x).sum(), "sum"), mode="FAST_COMPILE", **kwargs)


ONES = np.ones(6)


@pytest.mark.parametrize("helper", [TIMES, PLUS])
def test_an_operation_of_a_later_cell_reaches_the_workers(world_of, cell, helper):
    world_of(3)
    synk.distribute()
    cell(SCALE.format(helper=helper))
    f = summed(MAIN.Scale(3.0))
    assert f(ONES) == {TIMES: 18, PLUS: 24}[helper] == f.as_theano(ONES)
    assert summed(MAIN.Scale(5.0))(ONES) == {TIMES: 30, PLUS: 36}[helper]


def test_a_cell_that_is_run_again_makes_a_new_operation_of_the_name(two, cell):
    cell(SCALE.format(helper=TIMES))
    inherited = summed(MAIN.Scale(3.0))
    synk.distribute()
    by_name = summed(MAIN.Scale(4.0))
    assert [inherited(ONES), by_name(ONES)] == [18, 24]
    cell(SCALE.format(helper=PLUS))
    sent = summed(MAIN.Scale(3.0))
    cell(SCALE.format(helper=TIMES))
    latest = summed(MAIN.Scale(3.0))
    assert [f(ONES) for f in (inherited, by_name, sent, latest)] == [18, 24, 24, 18]


def test_a_function_inside_a_function_is_sent(two):
    """The mode that checks for NaN holds one."""
    synk.distribute()
    x = T.dvector("x")
    checked = synk.function([x], (x.sum(), "sum"), mode=NanGuardMode())
    assert checked(ONES) == 6
    with pytest.raises(synk.WorkerError, match="NaN"):
        checked([1.0, 2.0, 3.0, np.nan])
    assert checked(ONES) == 6


@pytest.fixture
def made_up(monkeypatch):
    """A function that imports a module into this process only; it has the class `Scale`."""
    module = types.ModuleType("made_up_operations")
    exec(textwrap.dedent(SCALE.format(helper=TIMES)), vars(module))

    def import_it():
        monkeypatch.setitem(sys.modules, module.__name__, module)
        return module

    return import_it


def test_a_function_that_workers_cannot_load_is_refused_alone(world_of, made_up):
    world_of(3)
    synk.distribute()
    scale = made_up().Scale(3.0)
    before = summed(T.sqr)
    lost = summed(scale, name="lost")
    beside = summed(T.neg)
    with pytest.raises(TypeError, match="lost>: it cannot be sent .*made_up_operations.*restart"):
        synk.distribute()
    synk.distribute()
    after = summed(T.exp)
    for _ in range(2):
        with pytest.raises(TypeError, match="lost>: it cannot be sent .*before the first distribute"):
            lost(ONES)
    assert lost.as_theano(ONES) == 18
    assert [f(ONES) for f in (before, beside)] == [6, -6]
    assert after(0 * ONES) == 6
    del lost
    gc.collect()
    assert not synk.world.world.current_world().registry.unsent
    assert summed(T.sqr)(2 * ONES) == 24
    again = summed(scale, name="again")
    with pytest.raises(TypeError, match="again>: it cannot be sent"):
        again(ONES)
    synk.restart()
    assert again(ONES) == 18


def test_functions_that_cannot_be_pickled_or_loaded_are_refused_together(two, made_up):
    synk.distribute()
    refused = [summed(Locked(), name="locked"), summed(made_up().Scale(2.0), name="lost")]
    sent = summed(T.sqr)
    assert sent(2 * ONES) == 24
    for function, reason in zip(refused, ("pickle .*lock", "made_up_operations")):
        with pytest.raises(TypeError, match=f"{function.name}>: it cannot be sent .*{reason}"):
            function(ONES)


def test_too_little_memory_is_no_reason_to_refuse_a_function(two, monkeypatch, tmp_path):
    engine = type(synk.world.world.current_world().rank_state.engine)
    loads, short = engine.loads, tmp_path / "short"

    def loads_or_fails(self, payload, known):
        if short.exists():
            raise MemoryError("too little, made up")
        return loads(self, payload, known)

    monkeypatch.setattr(engine, "loads", loads_or_fails)
    synk.distribute()
    f = summed(T.sqr)
    short.touch()
    for _ in range(2):
        with pytest.raises(synk.WorkerError, match="MemoryError: too little, made up"):
            f(ONES)
    short.unlink()
    assert f(ONES) == 6


def test_a_rank_has_the_dtype_of_floats_of_the_process_that_has_built_its_functions(monkeypatch):
    """On another machine, the script may not have set it yet when the rank begins."""
    engine, config = CpuEngine(), theano.config
    monkeypatch.setattr(config, "floatX", "float32")
    payload = engine.dumps([], {})
    monkeypatch.setattr(config, "floatX", "float64")
    assert engine.loads(payload, {}) == [] and config.floatX == "float32"
