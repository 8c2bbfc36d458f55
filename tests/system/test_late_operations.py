"""Operations that are defined when the workers are running, as in a later cell of a notebook."""

import gc
import sys
import textwrap
import types

import numpy as np
import pytest
import theano.tensor as T
from prelude import Locked
from theano.compile.nanguardmode import NanGuardMode

import synkhronos as synk

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


def test_a_cell_that_is_run_again_makes_a_new_operation_of_the_name(world_of, cell):
    world_of(2)
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


def test_a_function_inside_a_function_is_sent(world_of):
    """The mode that checks for NaN holds one."""
    world_of(2)
    synk.distribute()
    x = T.dvector("x")
    checked = synk.function([x], (x.sum(), "sum"), mode=NanGuardMode())
    assert checked(ONES) == 6
    with pytest.raises(synk.WorkerError, match="NaN"):
        checked([1.0, 2.0, 3.0, np.nan])
    assert checked(ONES) == 6


# What cannot be sent


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


def test_functions_that_cannot_be_pickled_or_loaded_are_refused_together(world_of, made_up):
    world_of(2)
    synk.distribute()
    refused = [summed(Locked(), name="locked"), summed(made_up().Scale(2.0), name="lost")]
    sent = summed(T.sqr)
    assert sent(2 * ONES) == 24
    for function, reason in zip(refused, ("pickle .*lock", "made_up_operations")):
        with pytest.raises(TypeError, match=f"{function.name}>: it cannot be sent .*{reason}"):
            function(ONES)


def test_too_little_memory_is_no_reason_to_refuse_a_function(world_of, monkeypatch, tmp_path):
    world_of(2)
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
