"""The log: the loggers below ``synkhronos``, lines on stderr if wanted, and the records of children.

Without a setting, Python shows warnings and nothing else. A program that sets up `logging` itself gets
the records as from any other library.

A handler that keeps state, such as one that rotates its file, must not be used by several processes. So
in a child, each handler of before the fork appends the record to a file without a name instead, which
the master reads while it waits for the workers and at the end of each command. Appending never waits,
and what a child has written before it dies is not lost. Handlers that write to a standard stream, or
append to a file, keep no state and stay in use.
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import logging
import os
import pickle
import select
import struct
import time
import warnings
from typing import TYPE_CHECKING, BinaryIO

from synkhronos.host.handler_errors import reraise_if_handlers

if TYPE_CHECKING:
    from logging.handlers import QueueHandler

#: An environment variable: ``debug``, ``info``, ``warning`` or ``error``
VARIABLE = "SYNKHRONOS_LOG"

LEVELS = {name.lower(): getattr(logging, name) for name in ("DEBUG", "INFO", "WARNING", "ERROR")}

logger = logging.getLogger("synkhronos")

_STDERR = 2
_LENGTH = struct.Struct("<I")
_PUNCH_HOLE = 3  # of fallocate: with this, the file keeps its size
_MANY = 1 << 20  # bytes that have been read, and are kept for a while


class LineHandler(logging.Handler):
    """Writes each line in a single system call, so that lines of different processes do not mix.

    A message of several lines, such as a traceback, is written as several lines with the same beginning.
    Lines longer than the kernel writes to a pipe at once are cut.

    Parameters
    ----------
    descriptor : int, optional
        The file descriptor; by default the descriptor of stderr.

    Attributes
    ----------
    rank : int or None
        This process's rank, which is part of each line.
    """

    def __init__(self, descriptor: int = _STDERR) -> None:
        super().__init__()
        self.rank: int | None = None
        self._descriptor = descriptor

    def emit(self, record: logging.LogRecord) -> None:
        try:
            for line in self.lines(record):
                os.write(self._descriptor, line)
        except OSError as error:  # stderr is closed, or a pipe without a reader
            reraise_if_handlers(error)
        except Exception as error:
            reraise_if_handlers(error)
            self.handleError(record)

    def lines(self, record: logging.LogRecord) -> list[bytes]:
        """Return the lines that are written for a record."""
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        rank = "" if self.rank is None else f" rank {self.rank}"
        beginning = f"{clock}.{int(record.msecs):03d} synkhronos{rank} {record.levelname.lower()}: "
        text = self.format(record).splitlines() or [""]
        encoded = [f"{beginning}{line}".encode(errors="backslashreplace") for line in text]
        return [line[: select.PIPE_BUF - 1] + b"\n" for line in encoded]


def set_up() -> None:
    """Write the log to stderr if the environment requests it."""
    setting = os.environ.get(VARIABLE, "").strip().lower()
    if not setting:
        return
    if setting not in LEVELS:
        warnings.warn(
            f"{VARIABLE}: expected {', '.join(LEVELS)}, got {setting!r}; the variable is ignored",
            RuntimeWarning,
            stacklevel=2,
        )
        return
    own = logging.getLogger(logger.name)
    own.setLevel(LEVELS[setting])
    own.propagate = False  # each record is written once
    if _handler() is None:
        own.addHandler(LineHandler())


def set_rank(rank: int | None) -> None:
    """Let the lines of this process begin with its rank."""
    handler = _handler()
    if handler is not None:
        handler.rank = rank


def _handler() -> LineHandler | None:
    return next((handler for handler in logger.handlers if isinstance(handler, LineHandler)), None)


class LogRelay:
    """The records of children for some handlers.

    Parameters
    ----------
    handlers : list of logging.Handler
        The `handlers_with_state`.
    file : file
        An empty file, which the children inherit.
    """

    def __init__(self, handlers: list[logging.Handler], file: BinaryIO) -> None:
        self._handlers = handlers
        self._file, self._rest = file, b""
        self._read = self._freed = 0
        number = file.fileno()
        fcntl.fcntl(number, fcntl.F_SETFL, fcntl.fcntl(number, fcntl.F_GETFL) | os.O_APPEND)

    def redirect(self) -> None:
        """In a child: let the handlers send their records to the master."""
        from logging.handlers import QueueHandler  # takes milliseconds

        queue = QueueHandler(None)  # type: ignore[arg-type]  # only for `prepare`
        for number, handler in enumerate(self._handlers):
            handler.handle = functools.partial(self._send, queue, number)  # type: ignore[method-assign]

    def _send(self, queue: QueueHandler, number: int, record: logging.LogRecord) -> bool:
        handler = self._handlers[number]
        chosen = handler.filter(record)
        if not chosen:
            return False
        try:
            prepared = queue.prepare(chosen if isinstance(chosen, logging.LogRecord) else record)
            payload = pickle.dumps((number, prepared))
        except Exception as error:  # a value of the script that cannot be pickled
            reraise_if_handlers(error)
            handler.handleError(record)
            return True
        os.write(self._file.fileno(), _LENGTH.pack(len(payload)) + payload)
        return True

    def emit(self) -> None:
        """In the master: let the handlers emit what has come since the last call."""
        end = os.fstat(self._file.fileno()).st_size
        if end == self._read:
            return
        self._rest += os.pread(self._file.fileno(), end - self._read, self._read)
        self._read = end
        attached = _attached()
        for payload in self._received():
            number, record = pickle.loads(payload)
            handler = self._handlers[number]
            if handler in attached:  # otherwise the script has removed it since
                handler.acquire()
                try:
                    handler.emit(record)
                except Exception as error:  # by default, handlers catch them
                    reraise_if_handlers(error)
                    handler.handleError(record)
                finally:
                    handler.release()
        if self._read - self._freed > _MANY:
            place, length = ctypes.c_long(self._freed), ctypes.c_long(self._read - self._freed)
            ctypes.CDLL(None).fallocate(self._file.fileno(), _PUNCH_HOLE, place, length)
            self._freed = self._read

    def close(self) -> None:
        """Close the file, when the children have ended."""
        self._file.close()

    def _received(self) -> list[bytes]:
        """Return what has been read of whole records, and keep the rest, which is being written."""
        found, start = [], 0
        while len(self._rest) >= start + _LENGTH.size:
            end = start + _LENGTH.size + _LENGTH.unpack_from(self._rest, start)[0]
            if len(self._rest) < end:
                break
            found.append(self._rest[start + _LENGTH.size : end])
            start = end
        self._rest = self._rest[start:]
        return found


def handlers_with_state() -> list[logging.Handler]:
    """Return the handlers of loggers that only one process must use."""
    return [handler for handler in _attached() if not _is_without_state(handler)]


def _attached() -> list[logging.Handler]:
    """Return the handlers of all loggers."""
    loggers = [logging.getLogger(), *logging.Logger.manager.loggerDict.values()]
    each = [item for logger in loggers for item in getattr(logger, "handlers", ())]
    return list(dict.fromkeys(each))


def _is_without_state(handler: logging.Handler) -> bool:
    """Whether several processes can use a handler: each record is written at once, to the same file."""
    if type(handler) is logging.FileHandler:
        return handler.stream is not None
    if isinstance(handler, logging.FileHandler) or not isinstance(handler, logging.StreamHandler):
        return isinstance(handler, (logging.NullHandler, LineHandler))
    try:
        return handler.stream.fileno() >= 0
    except (AttributeError, OSError, ValueError) as error:
        reraise_if_handlers(error)
        return False
