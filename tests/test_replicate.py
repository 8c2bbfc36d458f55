"""Functions that are built after the workers were forked."""

import copy
import pickle
import sys
import threading
import time

import numpy as np
import pytest
import theano
import theano.tensor as T
from processes import FOLDER
from theano.compile.nanguardmode import NanGuardMode
from theano.tensor.shared_randomstreams import RandomStreams

import synkhronos as synk
from synkhronos.engines.theano_pickles import with_deep_stack


def test_workers_take_over_new_functions_without_compiling_anything(run_python, tmp_path):
    """In a cache of its own: in that of all tests the modules of the function may be there already."""
    code = (FOLDER / "programs" / "modules_compiled.py").read_text()
    run_python(code, environment={"THEANO_FLAGS": f"base_compiledir={tmp_path}/modules"})


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


def test_known_variables_travel_as_numbers_not_as_values(world_of):
    world_of(2)
    large = theano.shared(np.zeros(1_000_000), "large")
    synk.function([], (large.sum(), "sum"), mode="FAST_COMPILE")
    synk.distribute()
    world = synk.world.world.current_world()
    late = synk.function([], (large.max(), "max"), mode="FAST_COMPILE")
    known = {shared: number for number, shared in enumerate(world.here.shareds)}
    assert len(world.here.engine.dumps(late, known)) < 100_000
    assert late() == 0


def test_deep_graphs_can_be_pickled(world_of):
    world_of(2)
    synk.distribute()
    x = T.dvector("x")
    y = x
    for _ in range(150):
        y = y + T.dot(y, y)
    f = synk.function([x], (y.sum(), "sum"), mode=theano.Mode(linker="py", optimizer=None))
    with pytest.raises(RecursionError):
        pickle.dumps(f.replica.compiled)
    assert f(np.zeros(4)) == 0


def test_threads_that_pickle_at_once_leave_the_limits_as_they_were():
    """The limits hold for the whole process: a recursion without end would overflow the stack."""
    before = sys.getrecursionlimit(), threading.stack_size()
    inside = threading.Event()

    def first():
        inside.set()
        time.sleep(0.1)

    threads = [threading.Thread(target=with_deep_stack, args=(first,))]
    threads[0].start()
    assert inside.wait(10)
    threads.append(threading.Thread(target=with_deep_stack, args=(lambda: time.sleep(0.2),)))
    threads[1].start()
    for thread in threads:
        thread.join()
    assert (sys.getrecursionlimit(), threading.stack_size()) == before


def test_distribute_again_does_nothing_to_what_is_there(world_of):
    world_of(2)
    x = T.dvector("x")
    s = theano.shared(np.zeros(()), "s")
    f = synk.function([x], updates=[(s, s + x.sum())], mode="FAST_COMPILE")
    synk.distribute()
    f([1.0, 2.0])
    synk.distribute()
    assert synk.gather(s).tolist() == [1.0, 2.0]


def test_a_function_that_a_worker_cannot_take_over_can_be_tried_again(world_of, monkeypatch):
    world_of(3)
    synk.distribute()
    x = T.dvector("x")
    f = synk.function([x], (x.sum(), "sum"), mode="FAST_COMPILE")
    engine = synk.world.world.current_world().here.engine
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
    # Its mode holds a function inside a function, which has no pickle.
    mode = NanGuardMode()
    checked = synk.function([x], [(total, "sum"), (numbers, "gather")], mode=mode, name="checked")
    with pytest.raises(TypeError, match="checked>: it cannot be sent .*nan_check.*distribute"):
        synk.distribute()
    synk.distribute()
    outputs = [(2 * total, "sum"), (numbers, "gather")]
    after = synk.function([x], outputs, mode="FAST_COMPILE")
    ones = np.ones(4)
    with pytest.raises(TypeError, match="checked>: it cannot be sent"):
        checked(ones)
    with pytest.raises(TypeError, match="checked>: it cannot be sent"), synk.fuse():
        checked(ones)
    assert checked.as_theano(ones)[0] == 4
    assert before(ones) == 4
    drawn = after(ones)
    assert drawn[0] == 8 and len(np.unique(drawn[1])) == 6
    synk.restart()
    assert [checked(ones)[0], before(ones), after(ones)[0]] == [4, 4, 8]
    with pytest.raises(synk.WorkerError, match="NaN"):
        checked([1.0, 2.0, np.nan])
    assert checked(ones)[0] == 4


@pytest.mark.parametrize(
    "copied", [copy.copy, copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))]
)
def test_copies_of_functions_say_that_they_cannot_be_called(world_of, copied):
    world_of(2)
    x = T.dvector("x")
    f = synk.function([x], (x.sum(), "sum"), name="f", mode="FAST_COMPILE")
    other = copied(f)
    calls = [other, other.as_theano, other.build_inputs, other.set_input_shmems]
    for call in [*calls, lambda _: other.get_shared(), lambda _: other.get_input_shmems()]:
        with pytest.raises(TypeError, match="Function f>: this is a copy"):
            call(np.ones(2))
    assert f(np.ones(2)) == 2
