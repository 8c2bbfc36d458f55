"""A controller: a process without a rank, which answers the questions of the ranks in their order.

Questions and answers are messages; the controller's box is the one after those of the ranks. The
controller holds a lock while it lives, so that every rank can see that it has died.
"""

from __future__ import annotations

import pickle
import time
import traceback
from typing import Any, Callable

import cloudpickle
import numpy as np

from synkhronos._errors import SynkhronosError
from synkhronos.programs.messages import Messages
from synkhronos.stores.commons import Commons
from synkhronos.transports.base import Attendant, Transport

_NAME = "controller"
_AWAKE = 0.2  # seconds between two checks for the end
_NAP = 1e-3
_GRACE = 1.0  # seconds for the controller to end by itself
_STATES = READY, ENDING = 1, 2

Answer = Callable[[Any, int, Any], Any]


class Controller:
    """The master's handle to the process that answers.

    Parameters
    ----------
    transport : Transport
    answer : callable
        ``answer(request, rank, info)`` returns what the rank gets.
    """

    def __init__(self, transport: Transport, answer: Answer) -> None:
        self._transport, self._answer = transport, answer
        self._state = _state(transport.store.commons)
        self._attendant: Attendant | None = None

    def start(self) -> None:
        """Start the process, and wait until the ranks can see whether it is alive.

        Raises
        ------
        SynkhronosError
            If it has ended, or is stopped for longer than the time limit.
        """
        commons, size, answer = self._transport.store.commons, self._transport.size, self._answer
        self._state[0] = 0
        self._attendant = self._transport.attend(_NAME, lambda: _serve(commons, size, answer))
        limit, began = self._transport.timeout, time.monotonic()
        while not self._state[0]:
            if not self._attendant.is_alive():
                raise SynkhronosError("spmd: the process of the controller has ended before the program")
            if limit is not None and time.monotonic() - began > limit:
                raise SynkhronosError(
                    f"spmd: the process of the controller did not start within fork(timeout={limit}) "
                    f"seconds"
                )
            time.sleep(_NAP)

    def end(self) -> None:
        """End the process."""
        self._state[0] = ENDING
        if self._attendant is not None:
            self._attendant.end(_GRACE)


def _state(commons):
    return commons.array("controller state", (1,), "int64")


def _questions(commons, size):
    """Return how many questions each rank has asked in this program, also before its death."""
    return commons.array("controller questions", (size,), "int64")


def _alive(commons):
    return commons.locks("controller is alive", 1)[0]


def _serve(commons: Commons, size: int, answer: Answer) -> None:
    """Answer questions until the program ends."""
    state = _state(commons)
    alive = _alive(commons)
    alive.try_acquire()
    messages = Messages(commons, size, size + 1, _NAME)
    if not state[0]:
        state[0] = READY
    replies: list[tuple[int, np.ndarray]] = []
    while state[0] != ENDING:
        # A rank has one question at a time, so its box has room, but may be locked for a moment.
        replies = [one for one in replies if not messages.send(*one)]
        message = messages.receive()
        if message is None:
            messages.wait(_NAP if replies else _AWAKE)
            continue
        rank, question = message
        number, *asked = pickle.loads(question)
        reply = cloudpickle.dumps((number, *_answered(answer, rank, *asked)))
        replies.append((rank, np.frombuffer(reply, np.uint8)))
    alive.release()


def _answered(answer, rank, request, info):
    """Return ``(answer, None)``, or ``(None, text)`` if the controller raised an exception."""
    try:
        value = answer(request, rank, info)
        cloudpickle.dumps(value)
    except Exception:
        return None, traceback.format_exc()
    return value, None


class Line:
    """The line of a rank to the controller.

    Parameters
    ----------
    commons : Commons
    rank, size : int
    pause : callable
        ``pause(seconds)`` is called while it waits; it raises if the program has to end.
    """

    def __init__(
        self, commons: Commons, rank: int, size: int, pause: Callable[[float], None]
    ) -> None:
        self._messages = Messages(commons, rank, size + 1, _NAME)
        self._controller = size
        self._state, self._alive, self._pause = _state(commons), _alive(commons), pause
        self._rank, self._questions = rank, _questions(commons, size)

    def ask(self, request: Any, info: Any) -> Any:
        """Return the controller's answer.

        Raises
        ------
        SynkhronosError
            If the controller raised an exception, or has died.
        """
        self._questions[self._rank] += 1
        current = int(self._questions[self._rank])
        question = np.frombuffer(cloudpickle.dumps((current, request, info)), np.uint8)
        while not self._messages.send(self._controller, question):
            self._wait()
        while True:
            message = self._messages.receive()
            if message is None:
                self._wait()
                continue
            number, value, failure = pickle.loads(message[1])
            if number != current:
                continue  # to a question that was given up, or of the rank that died in this place
            if failure is not None:
                raise SynkhronosError(f"rank.ask: the controller raised an exception:\n{failure}")
            return value

    def _wait(self):
        if self._state[0] == READY and self._alive.is_free():
            raise SynkhronosError(
                "rank.ask: the controller has died; ranks that need its answers cannot go on"
            )
        self._messages.wait(_AWAKE)
        self._pause(0)
