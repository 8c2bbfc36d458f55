"""The log: the loggers below ``synkhronos``, lines on stderr if wanted, and the records of children.

Without a setting, Python shows warnings and nothing else. A program that sets up `logging` itself gets
the records as from any other library.

Children log through the handlers of the master, with the levels that it has now. A child appends its
records to a file without a name, which the master reads while it waits for the workers and at the end of
each command. Appending never waits, and what a child has written before it dies is not lost. When the
script sets a level, it is written to memory that the children share. Handlers that a child itself has
added are its own, and so are `LineHandler` objects, which keep no state.
"""

from __future__ import annotations

import copy
import ctypes
import fcntl
import itertools
import logging
import mmap
import os
import pickle
import select
import struct
import time
import warnings
import weakref
from typing import Any, BinaryIO, Callable, TypeVar

from synkhronos.host.handler_errors import reraise_if_handlers

#: An environment variable: ``debug``, ``info``, ``warning`` or ``error``
VARIABLE = "SYNKHRONOS_LOG"

LEVELS = {name.lower(): getattr(logging, name) for name in ("DEBUG", "INFO", "WARNING", "ERROR")}

logger = logging.getLogger("synkhronos")

_STDERR = 2
_LENGTH = struct.Struct("<I")
_PUNCH_HOLE = 3  # of fallocate: with this, the file keeps its size
_MANY = 1 << 20  # bytes that have been read, and are kept for a while
_ROOM = 1 << 20  # bytes of the memory with the levels, which come after two numbers
_LEVELS = 8  # bytes of such a number


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


T = TypeVar("T")


class LogRelay:
    """The records of children for the handlers of the master, and its levels for the children.

    Parameters
    ----------
    file : file
        An empty file, which the children inherit.

    Attributes
    ----------
    has_records : memoryview
        Its only element is 1 if there are records that `emit` has not seen.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._rest = file, b""
        self._read = self._freed = 0
        number = file.fileno()
        fcntl.fcntl(number, fcntl.F_SETFL, fcntl.fcntl(number, fcntl.F_GETFL) | os.O_APPEND)
        self._memory = mmap.mmap(-1, _ROOM)
        numbers = memoryview(self._memory)[: 2 * _LEVELS].cast("Q")
        self.has_records, self._version = numbers[:1], numbers[1:]
        self._seen, self._owner = 0, os.getpid()
        loggers = [logging.root, *logging.Logger.manager.loggerDict.values()]
        handlers = itertools.chain.from_iterable(getattr(each, "handlers", ()) for each in loggers)
        self._inherited = {handler for handler in handlers if not isinstance(handler, LineHandler)}
        _relays.add(self)
        logging.Logger.manager._clear_cache = _levels_changed  # type: ignore[attr-defined]  # internal

    # In a child

    def redirect(self) -> None:
        """Let the handlers of the master have all records of this process, and follow its levels."""
        call_handlers = logging.Logger.callHandlers

        def call_or_send(logger: logging.Logger, record: logging.LogRecord) -> None:
            if logger is not logging.root and logger.manager.loggerDict.get(logger.name) is not logger:
                return call_handlers(logger, record)  # the master could not find it by its name
            own = [handler for handler in _handlers_of(logger) if handler not in self._inherited]
            _call(own, record)
            has_own = not all(isinstance(handler, LineHandler) for handler in own)
            try:
                self._send(_with_texts(record), has_own)
            except Exception as error:  # its message and its arguments do not fit
                reraise_if_handlers(error)
                logging.NullHandler().handleError(record)

        for name in ("isEnabledFor", "getEffectiveLevel"):
            setattr(logging.Logger, name, self._following(getattr(logging.Logger, name)))
        logging.Logger.callHandlers = call_or_send  # type: ignore[method-assign, assignment]

    def _following(self, method: Callable[..., T]) -> Callable[..., T]:
        """Return a method of loggers that follows the levels of the master first."""

        def call(logger: logging.Logger, *args: Any) -> T:
            if self._version[0] != self._seen:
                self._follow()
            return method(logger, *args)

        return call

    def _send(self, record: logging.LogRecord, has_own: bool) -> None:
        try:
            payload = pickle.dumps((record, has_own))
        except Exception as error:  # a value of the script that cannot be pickled
            reraise_if_handlers(error)
            record.msg, record.args = record.getMessage(), None
            for name, value in vars(record).items():
                if not isinstance(value, (str, int, float, type(None))):
                    setattr(record, name, repr(value))
            payload = pickle.dumps((record, has_own))
        os.write(self._file.fileno(), _LENGTH.pack(len(payload)) + payload)
        self.has_records[0] = 1

    def _follow(self) -> None:
        """Set the levels of the master."""
        version = self._version[0]
        content = self._memory[2 * _LEVELS :]
        if version % 2 or self._version[0] != version:
            return  # they are being written
        try:
            disabled, levels = pickle.loads(content)
        except Exception as error:  # two threads have written
            reraise_if_handlers(error)
            return
        self._seen = version
        logging.disable(disabled)
        for name, level in levels.items():
            if logging.getLogger(name).level != level:
                logging.getLogger(name).setLevel(level)

    # In the master

    def publish(self) -> None:
        """Let the children have the levels of now."""
        if os.getpid() != self._owner:
            return
        levels: dict[str | None, int] = {None: logging.root.level}
        for name, logger in list(logging.Logger.manager.loggerDict.items()):
            if isinstance(logger, logging.Logger):
                levels[name] = logger.level
        content = pickle.dumps((logging.root.manager.disable, levels))
        if len(content) <= _ROOM - 2 * _LEVELS:
            odd = self._version[0] | 1  # also if a signal handler has ended an earlier call
            self._version[0] = odd
            self._memory[2 * _LEVELS : 2 * _LEVELS + len(content)] = content
            self._version[0] = odd + 1

    def emit(self) -> None:
        """Let the handlers emit what has come since the last call."""
        self.has_records[0] = 0
        end = os.fstat(self._file.fileno()).st_size
        if end == self._read:
            return
        self._rest += os.pread(self._file.fileno(), end - self._read, self._read)
        self._read = end
        for payload in self._received():
            record = logging.makeLogRecord({"msg": "a record that cannot be unpickled"})
            try:
                record, has_own = pickle.loads(payload)
                self._handle(record, has_own)
            except Exception as error:  # by default, handlers catch them
                reraise_if_handlers(error)
                logging.NullHandler().handleError(record)
        if self._read - self._freed > _MANY:
            place, length = ctypes.c_long(self._freed), ctypes.c_long(self._read - self._freed)
            ctypes.CDLL(None).fallocate(self._file.fileno(), _PUNCH_HOLE, place, length)
            self._freed = self._read

    def _handle(self, record: logging.LogRecord, has_own: bool) -> None:
        """Call the handlers of a record; if the child has its own, only those that it has inherited."""
        logger = logging.getLogger(None if record.name == logging.root.name else record.name)
        handlers = _handlers_of(logger)
        if has_own:
            _call([handler for handler in handlers if handler in self._inherited], record)
        elif handlers and not logger.disabled:  # the child has a `LineHandler` of its own
            _call([handler for handler in handlers if not isinstance(handler, LineHandler)], record)
        elif not logger.disabled:
            logger.callHandlers(record)

    def close(self) -> None:
        """Emit the rest and close the file, when the children have ended."""
        self.emit()
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


_PLAIN = (str, int, float, bool, type(None))
_relays: weakref.WeakSet[LogRelay] = weakref.WeakSet()


def _levels_changed() -> None:
    """Called by `logging` when a level is set; let children have it, too."""
    manager = logging.Logger.manager
    type(manager)._clear_cache(manager)  # type: ignore[attr-defined]  # internal
    for relay in list(_relays):
        relay.publish()


def _handlers_of(logger: logging.Logger | None) -> list[logging.Handler]:
    """Return the handlers that records of a logger reach."""
    found: list[logging.Handler] = []
    while logger is not None:
        found += logger.handlers
        logger = logger.parent if logger.propagate else None
    return found


def _with_texts(record: logging.LogRecord) -> logging.LogRecord:
    """Return a copy that can be pickled, with texts in place of exceptions and arguments but numbers."""
    copied = copy.copy(record)
    given = record.args if isinstance(record.args, tuple) else (record.args,)
    if not all(type(value) in _PLAIN for value in (record.msg, *given)):
        copied.msg, copied.args = record.getMessage(), None
    if record.exc_info:
        copied.exc_text = record.exc_text or logging.Formatter().formatException(record.exc_info)
        copied.exc_info = None
    return copied


def _call(handlers: list[logging.Handler], record: logging.LogRecord) -> None:
    for handler in handlers:
        if record.levelno >= handler.level:
            handler.handle(record)
