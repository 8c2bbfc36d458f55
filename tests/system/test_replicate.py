"""Tests of functions that are created after the workers have been forked."""

import pickle
import sys
import threading
import time

import numpy as np
import pytest
import theano
import theano.tensor as T
from prelude import Locked
from theano.gof.cc import get_module_cache
from theano.tensor.shared_randomstreams import RandomStreams

import synkhronos as synk
from synkhronos.engines.pickles import with_deep_stack
from synkhronos.functions import arguments
from synkhronos.functions.replicate import Replicate
from synkhronos.world.here import Command
from synkhronos.world.registry import Registry


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


def test_known_variables_travel_as_numbers_not_as_values(world_of):
    world_of(2)
    large = theano.shared(np.zeros(1_000_000), "large")
    synk.function([], (large.sum(), "sum"), mode="FAST_COMPILE")
    synk.distribute()
    world = synk.world.world.current_world()
    late = synk.function([], (large.max(), "max"), mode="FAST_COMPILE")
    known = {shared: number for number, shared in world.here.shareds.items()}
    assert len(world.here.engine.dumps(late.replica, known)) < 100_000
    assert late() == 0


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


def test_threads_that_pickle_at_once_leave_the_limits_as_they_were():
    """The limits apply to the whole process. If left raised, a deep recursion overflows the stack."""
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


def test_distribute_again_does_nothing_to_what_is_there(world_of, monkeypatch):
    world_of(2)
    x = T.dvector("x")
    s = theano.shared(np.zeros(()), "s")
    f = synk.function([x], updates=[(s, s + x.sum())], mode="FAST_COMPILE")
    synk.distribute()
    f([1.0, 2.0])
    with monkeypatch.context() as patch:
        patch.setattr(type(synk.world.world.current_world()), "run", None)  # forbid commands
        synk.distribute()
    assert synk.gather(s).tolist() == [1.0, 2.0]


def test_a_step_does_not_look_through_what_the_workers_have(world_of, monkeypatch):
    world_of(2)
    x, w, sums = T.dvector("x"), theano.shared(1.0, "w"), theano.shared(0.0, "sums")
    fill = synk.function([x], updates=[(sums, x.sum())], mode="FAST_COMPILE")
    add = synk.function([], w * 1, updates=[(w, w + sums)], mode="FAST_COMPILE")
    data = synk.data(np.ones(4))

    def step(batch):
        with synk.fuse():
            fill(data, batch=batch)
            synk.all_reduce(sums, weights=fill)
            before = add()
        return before.result()

    assert step(2) == 1
    searched, planned = [], []
    find, plan = Registry.new_shareds, arguments.plan
    monkeypatch.setattr(Registry, "new_shareds", lambda self: searched.append(1) or find(self))
    monkeypatch.setattr(arguments, "plan", lambda *of: planned.append(of[1].name) or plan(*of))
    assert [step(batch) for batch in (4, 4, 2)] == [2, 4, 6]
    assert not searched and not planned  # only the rows differ
    assert add() == 7 and synk.in_sync(w)
    theano.shared(0.0), synk.function([x], x.mean() + theano.shared(2.0), mode="FAST_COMPILE")
    synk.all_reduce(sums)
    assert searched


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

    def run(self, here):
        return self.read(here)


def look(read):
    return synk.world.world.current_world().run(Look(read))


def trusts_input(here):
    return [replica.compiled.trust_input for replica in here.functions.values()]


def test_arguments_of_late_functions_are_not_checked_again(world_of):
    """Theano's check of the arguments takes 40% of the time of a small call."""
    world_of(3)
    x = T.dvector("x")
    early = synk.function([x], (x.sum(), "sum"), mode="FAST_COMPILE")
    synk.distribute()
    late = synk.function([x], (x.max(), "max"), mode="FAST_COMPILE")
    synk.distribute()
    assert early.replica.compiled.trust_input and late.replica.compiled.trust_input
    assert look(trusts_input) == [[True, True]] * 3


@pytest.fixture
def failing(monkeypatch, tmp_path):
    """Path of a file. While it exists, the last rank fails after it has loaded new functions."""
    file = tmp_path / "failing"
    run = Replicate.run

    def run_or_fail(self, here):
        run(self, here)
        if here.rank == here.size - 1 and file.exists():
            raise RuntimeError("made to fail")

    monkeypatch.setattr(Replicate, "run", run_or_fail)
    return file


def shared_names(here):
    return [shared.name for shared in here.shareds.values()]


def test_a_second_attempt_replaces_what_the_first_has_left(world_of, failing):
    world_of(3)
    synk.distribute()
    x = T.dvector("x")
    functions, names = [], []
    for number in range(2):
        names.append(f"scale {number}")
        scale = theano.shared(float(number + 1), names[-1])
        functions.append(synk.function([x], ((x * scale).sum(), "sum"), mode="FAST_COMPILE"))
        failing.touch()
        for _ in range(2):
            with pytest.raises(synk.WorkerError, match="rank 2.*made to fail"):
                synk.distribute()
        failing.unlink()
        synk.distribute()
        assert look(shared_names) == [names] * 3
        assert [f([1.0, 2.0, 3.0]) for f in functions] == [6.0, 12.0][: number + 1]


def test_a_single_rank_needs_no_pickle(world_of):
    world_of(1)
    synk.distribute()
    x = T.dvector("x")
    locked = synk.function([x], (Locked()(x).sum(), "sum"), mode="FAST_COMPILE")
    synk.distribute()
    assert locked([1.0, 2.0]) == 3


def test_the_memory_of_a_large_pickle_is_returned(world_of):
    world_of(2)
    synk.distribute()
    memory = synk.world.world.current_world().here.store.memory
    before = memory._large.holes()
    large = theano.shared(np.ones(100_000), "large")
    total = synk.function([], (large.sum(), "sum"), mode="FAST_COMPILE")
    synk.distribute()
    assert memory._large.holes() == before and not memory._resident.holes()
    assert total() == 200_000


MODULE, ELSEWHERE = ("made up", "key"), ("made up", "key of another")


@pytest.fixture
def new_module(tmp_path):
    """Function that registers a new compiled module in the master's cache, with a file and without."""
    get_module_cache()
    (tmp_path / "module.so").touch()
    new = {MODULE: str(tmp_path / "module.so"), ELSEWHERE: "of another machine/module.so"}
    yield lambda: get_module_cache().entry_from_key.update(new)
    for key in new:
        get_module_cache().entry_from_key.pop(key, None)


def knows_module(here):
    return MODULE in get_module_cache().entry_from_key


def knows_module_without_file(here):
    return ELSEWHERE in get_module_cache().entry_from_key


def forget_module(here):
    if not here.is_master:
        del get_module_cache().entry_from_key[MODULE]


def test_modules_are_sent_until_the_workers_have_loaded_them(world_of, new_module, failing):
    world_of(3)
    synk.distribute()
    new_module()
    x = T.dvector("x")
    f = synk.function([x], (x.sum(), "sum"), mode="FAST_COMPILE")
    failing.touch()
    with pytest.raises(synk.WorkerError, match="made to fail"):
        synk.distribute()
    failing.unlink()
    look(forget_module)  # as if the workers had failed before they loaded the modules
    synk.distribute()
    assert look(knows_module) == [True] * 3
    assert look(knows_module_without_file) == [True, False, False]
    look(forget_module)
    g = synk.function([x], (x.max(), "max"), mode="FAST_COMPILE")
    synk.distribute()
    assert look(knows_module) == [True, False, False]  # not sent again
    assert [f(np.ones(3)), g(np.ones(3))] == [3, 1]


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
