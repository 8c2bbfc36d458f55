"""A controller: a process without a rank, which answers the questions of the ranks in order.

Each rank has a channel for its questions, which needs no locks, unlike mailboxes, to which all ranks
write. This matters because a rank asks after it has computed, when none of this code is in its caches,
so that each line takes several times as long as usual. The controller holds one lock as long as it
lives, so that every rank can tell when it has died.
"""

from __future__ import annotations

import pickle
import time
import traceback
from typing import Any, Callable, Iterable, Mapping

import cloudpickle

from synkhronos._errors import SynkhronosError
from synkhronos.host.handler_errors import reraise_if_handlers
from synkhronos.host.signals import DeferredSignals
from synkhronos.services.registers import Channel, wakeup_semaphores
from synkhronos.stores.named_memory import NamedMemory
from synkhronos.transports.base import ServiceProcess, Transport

_NAME = "controller"
_AWAKE = 0.2  # seconds between two checks of a rank that waits
_LONGEST = 60.0  # seconds of one wait of the controller, which is woken at the end of a program
_NAP = 1e-3
_GRACE = 1.0  # seconds for the controller to end by itself
READY, ENDING = 1, 2  # states

Answer = Callable[[Any, int, Any], Any]


class Controller:
    """The master's handle to the process that answers.

    Parameters
    ----------
    transport : Transport
        Starts the process.
    answer : callable
        ``answer(request, rank, info)`` returns the answer to a question of a rank.
    """

    def __init__(self, transport: Transport, answer: Answer) -> None:
        self._transport, self._answer = transport, answer
        self._memory = ControllerMemory(transport.store.named_memory, transport.size)
        self._service_process: ServiceProcess | None = None

    def start(self) -> None:
        """Start the process, and wait until the ranks can see whether it is alive.

        Raises
        ------
        SynkhronosError
            If it has ended, or is stopped for longer than the time limit.
        """
        memory, size, answer = self._memory, self._transport.size, self._answer
        memory.state[0] = 0
        with DeferredSignals():  # `end` must know the process
            self._service_process = self._transport.attend(_NAME, lambda: _serve(memory, size, answer))
        limit, began = self._transport.timeout, time.monotonic()
        while not memory.state[0]:
            if not self._service_process.is_alive():
                raise SynkhronosError("spmd: the process of the controller has ended before the program")
            if limit is not None and time.monotonic() - began > limit:
                raise SynkhronosError(
                    f"spmd: the process of the controller did not start within fork(timeout={limit}) "
                    f"seconds"
                )
            time.sleep(_NAP)

    def end(self) -> None:
        """End the process."""
        self._memory.state[0] = ENDING
        self._memory.bell.post()
        if self._service_process is not None:
            self._service_process.end(_GRACE)


class ControllerMemory:
    """What the controller and the ranks share.

    Parameters
    ----------
    named_memory : NamedMemory
        Where it is.
    size : int
        The number of ranks.

    Attributes
    ----------
    state : numpy.ndarray
        One number, which becomes `READY` when the controller has started, and `ENDING` at its end.
    alive : Lock
        The controller holds it while it lives.
    bell : Semaphore
        Posted for the controller.
    """

    def __init__(self, named_memory: NamedMemory, size: int) -> None:
        self._named_memory = named_memory
        self.state = named_memory.array("controller state", (1,), "int64")
        [self.alive] = named_memory.locks("controller is alive", 1)
        *self._bells, self.bell = wakeup_semaphores(named_memory, "controller", size + 1)

    def channels(self, ranks: Iterable[int]) -> dict[int, Channel]:
        """Return the channel to the controller of each of these ranks, by rank."""
        memory, bells, call = self._named_memory, self._bells, self.bell.post
        return {rank: Channel(memory, f"controller, rank {rank}", bells[rank], call) for rank in ranks}


def _serve(memory: ControllerMemory, size: int, answer: Answer) -> None:
    """Answer questions until the program ends, by ``(answer, None)`` or ``(None, traceback)``."""
    state, bell = memory.state, memory.bell
    memory.alive.try_acquire()
    channels = memory.channels(range(size))
    if not state[0]:
        state[0] = READY
    while state[0] != ENDING:
        bell.drain()
        found = _oldest(channels)
        if found is None:
            bell.wait(_LONGEST)
            continue
        rank, number, question = found
        try:
            request, info = pickle.loads(question)
            channels[rank].reply(number, _dumps((answer(request, rank, info), None)))
        except Exception:
            channels[rank].reply(number, _dumps((None, traceback.format_exc())))
    memory.alive.release()


def _oldest(channels: Mapping[int, Channel]) -> tuple[int, int, bytes] | None:
    """Return the rank, the number and the bytes of the oldest question; None if there is none."""
    waiting = []
    for rank, channel in channels.items():
        moment = channel.question.written_since()
        if moment is not None:
            waiting.append((moment, rank))
    for _, rank in sorted(waiting):
        complete = channels[rank].question.read_new()
        if complete is not None:  # otherwise it is still being written, and the bell will ring
            return (rank, *complete)
    return None


def _dumps(value: Any) -> bytes:
    """Return a pickle. Cloudpickle takes six times as long, so it is used only if necessary.

    Cloudpickle includes the script's own definitions, which may be newer than the other process.
    """
    try:
        data = pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
        is_plain = b"__main__" not in data and not cloudpickle.list_registry_pickle_by_value()
    except Exception as error:  # any exception that a class of the script raises
        reraise_if_handlers(error)
        is_plain = False
    return data if is_plain else cloudpickle.dumps(value)


class ControllerChannel:
    """A rank's connection to the controller.

    Parameters
    ----------
    named_memory : NamedMemory
        Where its memory is.
    rank, size : int
        This rank, and the number of ranks.
    pause : callable
        ``pause(seconds)`` is called while it waits; it raises if the program has to end.
    """

    def __init__(
        self, named_memory: NamedMemory, rank: int, size: int, pause: Callable[[float], None]
    ) -> None:
        self._memory, self._pause = ControllerMemory(named_memory, size), pause
        self._channel = self._memory.channels([rank])[rank]

    def ask(self, request: Any, info: Any) -> Any:
        """Return the controller's answer.

        Raises
        ------
        TypeError
            If the question cannot be pickled.
        SynkhronosError
            If the controller raised an exception, or has died.
        """
        try:
            question = _dumps((request, info))
        except MemoryError:
            raise
        except Exception as error:
            reraise_if_handlers(error)
            raise TypeError(
                f"rank.ask: the request or the info cannot be pickled: {error}; ask with numbers, text, "
                f"arrays, or lists and dictionaries of these"
            ) from error
        value, failure = pickle.loads(self._channel.ask(question, _AWAKE, self._check))
        if failure is not None:
            raise SynkhronosError(f"rank.ask: the controller raised an exception:\n{failure}")
        return value

    def _check(self) -> None:
        if self._memory.state[0] == READY and self._memory.alive.is_free():
            raise SynkhronosError(
                "rank.ask: the controller has died; ranks that need its answers cannot continue"
            )
        self._pause(0)
