"""Shared variables that report when a script sets their value."""

import copy
import pickle

import numpy as np
import pytest
from compilers import compiler

from synkhronos.engines.cpu import CpuEngine
from synkhronos.engines.names import Container


@pytest.fixture
def engine():
    return CpuEngine()


@pytest.fixture
def w():
    return compiler.shared(np.zeros(3), "w")


def test_the_scripts_assignments_are_noticed_and_no_others(engine, w):
    noticed = []
    engine.notice_writes(w, lambda: noticed.append(1))
    f = compiler.function([], w.sum(), updates=[(w, w + 1)], mode="FAST_COMPILE")
    f()
    engine.store(w, np.ones(3))
    engine.write(w, np.ones(3) * 2)
    w.get_value()
    assert not noticed
    w.set_value(np.ones(3))
    w.set_value(np.ones(3), borrow=True)
    w.zero()
    assert len(noticed) == 3 and f() == 0
    with pytest.raises(ValueError):
        w.set_value("no array")
    assert len(noticed) == 3
    engine.notice_writes(w, None)
    w.set_value(np.ones(3))
    assert len(noticed) == 3 and type(w.container) is Container
    engine.notice_writes(w, None)  # once more changes nothing
    assert f() == 3


def test_copies_and_pickles_are_ordinary_variables(engine, w):
    def notify():
        raise AssertionError("a copy reported")

    engine.notice_writes(w, notify)
    copies = [copy.deepcopy(w), *(pickle.loads(pickle.dumps(w, protocol)) for protocol in range(5))]
    for one in copies:
        assert type(one.container) is Container and not hasattr(one.container, "notify")
        one.set_value(np.ones(3))
        assert one.get_value().sum() == 3 and w.get_value().sum() == 0
    assert b"synkhronos." not in pickle.dumps(w)  # no module of this package
