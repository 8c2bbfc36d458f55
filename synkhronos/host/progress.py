"""Showing a person what takes long, such as compiling: on a terminal a line that counts the seconds.

If stderr is not a terminal, it is one line. Nothing is written about work that ends soon.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import threading
import time
from typing import Iterator

#: An environment variable. If it is 0, nothing is shown.
VARIABLE = "SYNKHRONOS_PROGRESS"

DELAY = 1.5  # seconds before anything is written
PAUSE = 60.0  # seconds between two lines, if stderr is not a terminal
_INTERVAL = 0.2  # seconds between two updates on a terminal
_SPINNER = "|/-\\"
_THREAD = "synkhronos-progress"


class Progress:
    """Shows work that takes long. An object remembers when it last wrote a line.

    A thread writes, as Theano compiles in the calling one. It has ended when the block ends, so no
    thread is left to be lost in a fork. Work inside work that is being shown is not shown.
    """

    def __init__(self) -> None:
        self._last_line = -PAUSE

    @contextlib.contextmanager
    def show(self, work: str, remark: str = "") -> Iterator[None]:
        """Show what the block does while it runs, unless it ends soon.

        Parameters
        ----------
        work : str
            What the block does, such as ``"compiling function 2"``.
        remark : str, optional
            A remark that follows in a line, if stderr is not a terminal.
        """
        if os.environ.get(VARIABLE) == "0" or sys.stderr is None or _is_shown():
            yield
            return
        done = threading.Event()
        arguments = work, remark, done
        thread = threading.Thread(target=self._write, args=arguments, name=_THREAD, daemon=True)
        try:
            thread.start()
            yield
        finally:
            done.set()
            if thread.ident is not None:
                thread.join()

    def _write(self, work, remark, done):
        start = time.monotonic()
        if done.wait(DELAY):
            return
        stream = sys.stderr
        try:
            if is_terminal(stream):
                _animate(stream, work, start, done)
            elif time.monotonic() - self._last_line >= PAUSE:
                self._last_line = time.monotonic()
                stream.write(f"synkhronos: {work}{remark and '; '}{remark}\n")
                stream.flush()
        except (OSError, ValueError):  # stderr is closed; the work goes on
            pass
        done.wait()  # the thread tells work inside this work that it is shown


def _is_shown():
    return any(thread.name == _THREAD for thread in threading.enumerate())


def is_terminal(stream: object) -> bool:
    """Whether a line that is written to this stream can be replaced by another one."""
    try:
        return stream.isatty() and os.environ.get("TERM") != "dumb"  # type: ignore[attr-defined]
    except (AttributeError, ValueError):
        return False


def _animate(stream, work, start, done):
    """Replace one line until the work is done, then clear it."""
    columns = shutil.get_terminal_size().columns
    step = 0
    while not done.is_set():
        sign = _SPINNER[step % len(_SPINNER)]
        text = f"{sign} synkhronos: {work}, {time.monotonic() - start:.0f} s"
        # The cursor goes back to the start, so that a message from elsewhere begins there.
        stream.write(f"\x1b[2K{text[: columns - 1]}\r")
        stream.flush()
        step += 1
        done.wait(_INTERVAL)
    stream.write("\x1b[2K")
    stream.flush()
