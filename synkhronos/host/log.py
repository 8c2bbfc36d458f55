"""The log: the loggers below ``synkhronos``, and lines on stderr, if the environment requests them.

Without a setting, Python shows warnings and nothing else. A program that sets up `logging` itself gets
the records as from any other library.
"""

import logging
import os
import select
import time
import warnings
from typing import List, Optional

from synkhronos.host.handler_errors import reraise_if_handlers

#: An environment variable: ``debug``, ``info``, ``warning`` or ``error``
VARIABLE = "SYNKHRONOS_LOG"

LEVELS = {name.lower(): getattr(logging, name) for name in ("DEBUG", "INFO", "WARNING", "ERROR")}

logger = logging.getLogger("synkhronos")

_STDERR = 2


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
        self.rank: Optional[int] = None
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

    def lines(self, record: logging.LogRecord) -> List[bytes]:
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


def set_rank(rank: Optional[int]) -> None:
    """Let the lines of this process begin with its rank."""
    handler = _handler()
    if handler is not None:
        handler.rank = rank


def _handler() -> Optional[LineHandler]:
    return next((handler for handler in logger.handlers if isinstance(handler, LineHandler)), None)
