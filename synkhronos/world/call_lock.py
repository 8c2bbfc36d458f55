"""Whose call it is: one call at a time uses the ranks, from its arguments to its outputs.

Outputs are read from the memory of workers, which the next command uses again; so the turn belongs to a
whole call of a public name, not to a command. A second call, of another thread or of a signal handler,
is refused. A call of another thread waits instead if `fork` has this option, or if it always waits, as
the evaluations of a graph do, whose thread a sampler chooses. Those that wait have a place in a queue.

The turn belongs to the frame of the call that has taken it, and is over when that frame is on the stack
of no thread any more. So if a signal handler raises an exception between any two steps, the turn may
not be given back, but it ends.

A call that the package makes inside another call is part of it. It is distinguished from the call of a
signal handler, or of an operation of a graph, by the frames between the two: none is the script's.
"""

from __future__ import annotations

import functools
import threading
import time
from collections import deque
from sys import _getframe
from threading import get_ident
from types import FrameType
from typing import Any, Callable, TypeVar

from synkhronos._errors import BUSY, SynkhronosError
from synkhronos.host.handler_errors import is_below, may_be_running, stacks, suppress

_Callable = TypeVar("_Callable", bound=Callable[..., Any])

_OWN = {__name__.partition(".")[0], "contextlib", "functools"}  # whose frames are not the script's
_AWAKE = 0.05  # seconds after which a thread that waits looks again
_HOLDER, _NEXT = "holder", "next"


class CallLock:
    """The lock that a public call takes for its turn, in its frame: ``with call_lock:``.

    Parameters
    ----------
    waits : bool
        Whether a call waits while another thread has the turn.
    check : callable
        Called before a call waits or is refused. It may raise a more specific error.

    Attributes
    ----------
    thread : int
        The thread that has taken the turn last, or 0.
    block : int
        The thread whose `fuse` block is open, or 0. It excludes other threads until it has ended.
    """

    def __init__(self, waits: bool, check: Callable[[], None]) -> None:
        self.thread = 0
        self._waits, self._check = waits, check
        # A dict for each turn: who has it and, once it is over, the next turn; neither entry changes.
        # Threads and handlers may come between any two steps, but not into one operation of a dict.
        self._last: dict[str, Any] = {}  # or an earlier turn
        self.block = 0
        self._waiting: deque[tuple[FrameType, Any]] = deque()  # the frames and gates of calls

    _make_gate = staticmethod(threading.Lock)
    _stacks = staticmethod(stacks)

    # Every call runs these two, so they are short.

    def __enter__(self) -> None:
        frame = _getframe(1)
        if self._last.setdefault(_HOLDER, frame) is not frame or self.block:
            self._take(frame, self._waits)
        self.thread = get_ident()

    def __exit__(self, *error: object) -> None:
        last = self._last
        if _NEXT not in last and not self._waiting and last.get(_HOLDER) is _getframe(1):
            self.thread = 0
            self._last = last.setdefault(_NEXT, {})
        else:
            self.give_back_of(_getframe(1))

    def give_back_of(self, frame: FrameType) -> None:
        """Give the turn back if a frame has it."""
        last = self._last
        if _NEXT in last:
            last = self._newest()
        if last.get(_HOLDER) is frame:
            self.thread = 0
            if self._waiting:
                self._pass_on(last)
            else:
                self._last = last.setdefault(_NEXT, {})

    def _newest(self) -> dict[str, Any]:
        last = self._last
        while _NEXT in last:
            last = last[_NEXT]
        return last

    def _pass_on(self, last: dict[str, Any]) -> None:
        """Give the next turn to the thread that has waited longest, unless a block excludes it."""
        following, gate = {}, None
        if not self.block:
            with suppress(IndexError):  # it no longer waits
                following[_HOLDER], gate = self._waiting.popleft()
        self._last = last.setdefault(_NEXT, following)
        if gate is not None:
            gate.release()

    @property
    def waited_for(self) -> WaitedFor:
        """The lock, for calls that always wait: ``with call_lock.waited_for:``."""
        return WaitedFor(self)

    def take_waiting(self, frame: FrameType) -> None:
        """Take the turn for a frame. If another thread has it, wait until it is over."""
        self._take(frame, True)
        self.thread = get_ident()

    def _take(self, frame: FrameType, waits: bool) -> None:
        if self._try(frame):  # as a part of a call always does
            return
        place = frame, self._make_gate()
        place[1].acquire()
        try:
            while not self._try(frame):
                self._check()
                holder = self._newest().get(_HOLDER)
                if holder is frame:  # it has just been given to this call
                    continue
                if not waits or is_below(frame, holder):
                    raise SynkhronosError(BUSY)
                self._wait(place)
        except BaseException:
            self._leave(place)
            self.give_back_of(frame)  # it may just have been given to this call
            raise
        self._leave(place)

    def _try(self, frame: FrameType) -> bool:
        """Return whether this frame, or the call that it is a part of, has the turn now."""
        while True:
            last = self._newest()
            if self.block not in (0, get_ident()) and last.get(_HOLDER) is not frame:
                return False
            holder = last.setdefault(_HOLDER, frame)
            if holder is frame:
                if self.block in (0, get_ident()):
                    return True
                self._last = last.setdefault(_NEXT, {})  # this call waits for the end of a block
                return False
            if _is_part(frame, holder):
                return True
            if may_be_running(holder, self._stacks().values()):
                return False
            self._last = last.setdefault(_NEXT, {})  # it is over: given back, or lost

    def _wait(self, place: tuple[FrameType, Any]) -> None:
        """Wait until the turn may have been given to a call. It keeps its place until it leaves."""
        if place in self._waiting:
            place[1].acquire(timeout=_AWAKE)
        else:  # and try once more, since the turn may have been over before
            self._waiting.append(place)

    def _leave(self, place: tuple[FrameType, Any]) -> None:
        with suppress(ValueError):  # it was given the turn, or did not wait
            self._waiting.remove(place)

    def take_within(self, seconds: float) -> bool:
        """Take the turn for the calling frame; return whether it was over within some seconds."""
        frame, end = _getframe(1), time.monotonic() + seconds
        while not self._try(frame):
            if time.monotonic() >= end or is_below(frame, self._newest().get(_HOLDER)):
                return False
            time.sleep(_AWAKE / 10)
        return True

    def give_back(self) -> None:
        """Give the turn back if the calling frame has it."""
        self.give_back_of(_getframe(1))


class WaitedFor:
    """A turn that a call takes in its frame, and waits for whatever the turn's own option says.

    Parameters
    ----------
    call_lock : CallLock
        The lock.
    """

    def __init__(self, call_lock: CallLock) -> None:
        self._call_lock = call_lock

    def __enter__(self) -> None:
        self._call_lock.take_waiting(_getframe(1))

    def __exit__(self, *error: object) -> None:
        self._call_lock.give_back_of(_getframe(1))


def takes_call_lock(method: _Callable) -> _Callable:
    """Decorate a method of an object that has a `call_lock`, which is held for the whole call."""

    @functools.wraps(method)
    def call(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        with self.call_lock:
            return method(self, *args, **kwargs)

    return call  # type: ignore[return-value]  # it has the method's signature


def _is_part(frame: FrameType | None, holder: FrameType | None) -> bool:
    """Whether a frame is below another frame, and no frame of the script is between them."""
    while frame is not None and frame is not holder:
        if frame.f_globals.get("__name__", "").partition(".")[0] not in _OWN:
            return False
        frame = frame.f_back
    return frame is not None
