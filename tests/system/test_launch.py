"""fork as a context manager, replacing a world, and what asks whether there is one."""

import warnings

import numpy as np
import pytest
import theano.tensor as tt

import synkhronos as synk
from synkhronos.host.machine import cores
from synkhronos.world.world import current_world

pytestmark = pytest.mark.usefixtures("in_python")


@pytest.fixture(autouse=True)
def closed():
    yield
    if synk.is_forked():
        synk.close()


def call():
    x = tt.dvector("x")
    return synk.function([x], (x.sum(), "sum"))(np.arange(4.0))


def test_the_block_of_fork_ends_with_its_processes():
    assert not synk.is_forked()
    with synk.fork(2, use_gpu=False) as n:
        assert n == 2 == synk.size() and synk.is_forked() and call() == 6
        world = current_world()
    assert world.closed and not synk.is_forked()
    with pytest.raises(LookupError), synk.fork(2, use_gpu=False):
        raise LookupError
    assert not synk.is_forked()


def test_by_default_there_is_a_process_for_each_core(monkeypatch):
    monkeypatch.setattr("synkhronos.world.devices.cores", lambda: 3)
    assert synk.fork(use_gpu=False) == 3 and call() == 6


def test_many_more_processes_than_cores_are_questioned(caplog):
    synk.fork(3, use_gpu=False)
    assert not caplog.messages
    synk.fork(16 * cores() + 1, use_gpu=False, restart=True)
    assert [text.split(":")[0] for text in caplog.messages] == [
        f"{16 * cores() + 1} processes share {cores()} core(s)"
    ]


def test_a_block_closes_no_other_processes_and_none_twice():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with synk.fork(2, use_gpu=False):
            synk.close()
        with synk.fork(2, use_gpu=False):
            synk.close()
            synk.fork(3, use_gpu=False)
        assert synk.size() == 3


def test_size_and_is_forked_follow_the_processes():
    with pytest.raises((synk.NotForkedError, synk.ClosedError)):
        synk.size()
    synk.fork(3, use_gpu=False)
    call()
    synk.restart(2)
    assert synk.size() == 2 and synk.is_forked()
    synk.close()
    assert not synk.is_forked()
    with pytest.raises(synk.ClosedError):
        synk.size()


def test_fork_replaces_processes_if_told_to():
    synk.fork(2, use_gpu=False, restart=True)  # there are none to replace
    assert call() == 6
    former, data = current_world(), synk.data(np.ones(3))
    with pytest.raises(synk.AlreadyForkedError, match=r"fork\(restart=True\)"):
        synk.fork(2, use_gpu=False)
    synk.fork(3, use_gpu=False, restart=True)
    assert former.closed and synk.size() == 3 and call() == 6
    x = tt.dvector("x")
    with pytest.raises(synk.ClosedError):
        synk.function([x], x.mean())(data)


def test_wrong_arguments_leave_the_processes_that_are_there():
    synk.fork(2, use_gpu=False)
    former = current_world()
    for error, options in [
        (TypeError, {"restart": 1}), (TypeError, {"restart": None}), (TypeError, {"check": "yes"}),
        (ValueError, {"n_parallel": 0}), (ValueError, {"master_rank": 5}), (TypeError, {"timeout": "1"}),
        (ValueError, {"devices": ["gpu"]}),
    ]:  # fmt: skip
        with pytest.raises(error):
            synk.fork(**{"n_parallel": 1, "use_gpu": None, "restart": True, **options})
    assert current_world() is former and call() == 6
