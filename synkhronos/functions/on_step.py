"""`on_step`: a function of the script that is told of each step.

Without one, a call asks only whether there is one.
"""

from __future__ import annotations

import time
from threading import get_ident
from typing import Any, Callable, NamedTuple, Sequence

import numpy as np

from synkhronos.functions.replica import Replica
from synkhronos.world.world import World, current_world


class StepReport(NamedTuple):
    """A step: a call of a training step, or of a function outside such a step.

    Attributes
    ----------
    number : int
        The number of the step, from 1, since `fork`, as far as steps were reported.
    name : str
        The name of the function, or of the training step: ``"step"`` unless it was given one.
    seconds : float
        How long the call has taken.
    rows : int
        The number of rows of all ranks; 0 if the function has no rows.
    outputs : numpy.ndarray, list or dict
        What the call has returned.
    """

    number: int
    name: str
    seconds: float
    rows: int
    outputs: Any

    @property
    def loss(self) -> float | None:
        """The first output, if it is one number; else None."""
        first = self.outputs
        if isinstance(first, dict):
            first = list(first.values())
        if isinstance(first, (list, tuple)):
            first = first[0] if first else None
        is_number = first is not None and np.ndim(first) == 0 and np.asarray(first).dtype.kind in "biuf"
        return float(first) if is_number else None


Told = Callable[[StepReport], object]


class StepHook:
    """What `on_step` returns. It is also a context manager, which removes the function at its end."""

    def __init__(self, hooks: Hooks, told: Told) -> None:
        self._hooks, self._told = hooks, told

    def remove(self) -> None:
        """Do not call the function any more. It may be called again."""
        self._hooks.remove(self)

    def __call__(self, report: StepReport) -> None:
        self._told(report)

    def __enter__(self) -> StepHook:
        return self

    def __exit__(self, *error: object) -> None:
        self.remove()

    def __repr__(self) -> str:
        state = "" if self in self._hooks.told else ", removed"
        return f"<StepHook of {getattr(self._told, '__qualname__', repr(self._told))}{state}>"


class Hooks:
    """The functions that are told of the steps of a world."""

    def __init__(self) -> None:
        self.told: tuple[StepHook, ...] = ()
        self._number = 0
        self._busy: set[int] = set()  # the threads that are in a step that will be reported
        self._rows: dict[int, int] = {}  # of all ranks in the last call of a function, by number

    def add(self, told: Told) -> StepHook:
        """Add a function."""
        hook = StepHook(self, told)
        self.told = (*self.told, hook)
        return hook

    def remove(self, hook: StepHook) -> None:
        """Remove a function, unless it was removed before."""
        self.told = tuple(item for item in self.told if item is not hook)

    def are_due(self, world: World) -> bool:
        """Whether a call is a step to report: not a part of one, and not made by such a function."""
        return bool(self.told) and not world.is_recording and get_ident() not in self._busy

    def note(self, replica: Replica, by_rank: Sequence[int]) -> None:
        """Note on how many rows each rank has computed a function."""
        self._rows[replica.number] = sum(by_rank) if replica.has_rows else 0

    def run(self, world: World, name: str, number: int, call: Callable[[], Any]) -> Any:
        """Return ``call()``, and report it.

        Parameters
        ----------
        world : World
            The world of the call.
        name : str
            The name of the step.
        number : int
            The number of the function that is called on rows.
        call : callable
            Makes the call.
        """
        thread = get_ident()
        self._busy.add(thread)
        try:
            with world.call_lock:
                began = time.perf_counter()
                outputs = call()
                seconds, rows = time.perf_counter() - began, self._rows.get(number, 0)
                self._rows.clear()
        finally:
            self._busy.discard(thread)
        self.report(name, seconds, rows, outputs)
        return outputs

    def report(self, name: str, seconds: float, rows: int, outputs: Any) -> None:
        """Report a step that has been taken, unless it is a part of one, or made by such a function."""
        thread = get_ident()
        if not self.told or thread in self._busy:
            return
        self._busy.add(thread)
        try:
            self._number += 1
            report = StepReport(self._number, name, seconds, rows, outputs)
            for hook in self.told:
                hook(report)
        finally:
            self._busy.discard(thread)


def on_step(told: Told) -> StepHook:
    """Have a function called after each step, with a `StepReport`.

    A step is a call of a training step, or of a `Function` outside of one, in the script; with
    ``rules.train`` and sessions it is a step of the script's rank. The calls inside a ``fuse()`` block,
    and calls that the function makes itself, are no steps. Without such a function, nothing is measured.

    Parameters
    ----------
    told : callable
        Called in the script's process, when the step is done. An exception that it raises is raised by
        the call; the processes can be used further, and the step has been taken.

    Returns
    -------
    StepHook
        Its method ``remove()`` ends this, and so does the end of a ``with`` block. Otherwise it lasts
        until `close`; after `restart` it goes on.

    Raises
    ------
    TypeError
        If it is not callable.
    NotForkedError, ClosedError
        If there are no processes.

    Examples
    --------
    >>> import numpy as np
    >>> import synkhronos as synk
    >>> import theano.tensor as T
    >>> synk.fork(2, use_gpu=False)
    2
    >>> x = T.dvector("x")
    >>> f = synk.function([x], x.mean(), name="f")
    >>> with synk.on_step(lambda step: print(step.number, step.name, step.rows, step.loss)):
    ...     for rows in (3, 5):
    ...         _ = f(np.arange(float(rows)))
    1 f 3 1.0
    2 f 5 2.0
    >>> _ = f(np.ones(2))
    >>> synk.close()
    """
    if not callable(told):
        raise TypeError(f"on_step: expected a function that takes a StepReport, got {told!r}")
    world = current_world()
    world.step_hooks = hooks = world.part(Hooks)
    return hooks.add(told)
