"""Shared variables that report when a script sets their value."""

import copy
import pickle

import numpy as np
import pytest
from compilers import compiler

from synkhronos.engines.base import Definition
from synkhronos.engines.cpu import CpuEngine
from synkhronos.engines.names import Container


@pytest.fixture
def engine():
    return CpuEngine()


@pytest.fixture
def w():
    return compiler.shared(np.zeros(3), "w")


def test_what_the_script_does_is_noticed_and_nothing_else(engine, w):
    noticed = []
    f = compiler.function([], w.sum(), updates=[(w, w + 1)], mode="FAST_COMPILE")
    own = engine.build(Definition([], [w.sum()], [False], [(w, w + 1)]), mode="FAST_COMPILE")
    engine.notice_changes(w, noticed.append)
    engine.call(own, [])
    engine.store(w, np.ones(3))
    engine.write(w, np.ones(3) * 2)
    assert not noticed
    f()
    assert noticed.pop() == "update"
    w.get_value()
    assert noticed.pop() == "read"
    assert w.container.storage[0] is w.container.value and noticed == ["read", "read"]
    noticed.clear()
    w.set_value(np.ones(3))
    w.set_value(np.ones(3), borrow=True)
    w.zero()
    assert noticed == ["set", "set", "read", "set"] and f() == 0
    with pytest.raises(ValueError):
        w.set_value("no array")
    assert len(noticed) == 5
    w.container.storage = w.container.storage
    assert noticed[5:] == ["read", "set"]
    del noticed[5:]
    engine.notice_changes(w, None)
    w.set_value(np.ones(3))
    assert len(noticed) == 5 and type(w.container) is Container
    engine.notice_changes(w, None)  # once more changes nothing
    assert f() == 3


@pytest.mark.parametrize("part", [np.s_[...], np.s_[1:], np.s_[None]])
def test_an_array_is_borrowed_while_the_script_has_it_or_a_view_of_it(engine, w, part):
    assert not engine.is_borrowed(w)
    held = w.get_value(borrow=True)[part]
    assert engine.is_borrowed(w)
    del held
    assert not engine.is_borrowed(w)


def test_copies_and_pickles_are_ordinary_variables(engine, w):
    def notify(how):
        if how != "read":
            raise AssertionError("a copy reported")

    engine.notice_changes(w, notify)
    copies = [copy.deepcopy(w), *(pickle.loads(pickle.dumps(w, protocol)) for protocol in range(5))]
    for one in copies:
        assert type(one.container) is Container and not hasattr(one.container, "notify")
        one.set_value(np.ones(3))
        assert one.get_value().sum() == 3 and w.get_value().sum() == 0
    assert b"synkhronos." not in pickle.dumps(w)  # no module of this package
