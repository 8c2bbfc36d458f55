"""Values that Keras sets, sent to every rank before the next command."""

from __future__ import annotations

import weakref
from typing import Any, Callable, Iterable

from theano.compile.sharedvalue import SharedVariable

import synkhronos as synk


class Setting:
    """Replaces Keras's ``set_value`` and ``batch_set_value``, and records which variables they set.

    They change the master's variables only. Callbacks, ``set_weights`` and ``load_weights`` call them.

    Attributes
    ----------
    changed : set of shared variables
        Variables that were set but not yet sent to the other ranks.
    """

    def __init__(self, backend: Any) -> None:
        self.changed: weakref.WeakSet = weakref.WeakSet()
        self._set_value: Callable = backend.set_value
        self._batch_set_value: Callable = backend.batch_set_value

    def set_value(self, x: SharedVariable, value: Any) -> None:
        """Set a variable on the master."""
        self._set_value(x, value)
        self.changed.add(x)

    def batch_set_value(self, tuples: Iterable[tuple]) -> None:
        """Set several variables on the master."""
        pairs = list(tuples)
        self._batch_set_value(pairs)
        self.changed.update([x for x, _ in pairs])

    def send(self, variables: Iterable[SharedVariable]) -> None:
        """Broadcast the variables that were set."""
        if not self.changed:
            return
        stale = [one for one in variables if one in self.changed]
        if stale:
            synk.broadcast(stale)
            self.changed.difference_update(stale)


def setting_of(backend: Any) -> Setting:
    """Return the `Setting` of Keras's back end, after installing it if necessary."""
    setting = getattr(backend.set_value, "__self__", None)
    if not isinstance(setting, Setting):
        setting = Setting(backend)
        backend.set_value = setting.set_value
        backend.batch_set_value = setting.batch_set_value
    return setting
