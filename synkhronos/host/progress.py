"""Showing work that takes long, such as compiling: on a terminal a line that counts the seconds.

If stderr is not a terminal, it is one line. Nothing is written about work that ends soon.

Functions of `synkhronos.function` show that they are compiled, and so does ``theano.function``, by a
repair of Theano, which loads this file as the module ``theano.compat.progress``. So this file imports
neither the package nor Theano.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import sys
import time
from typing import TYPE_CHECKING, Any, Callable, Iterator, TextIO

if TYPE_CHECKING:
    import threading

#: An environment variable. If it is 0, nothing is shown.
VARIABLE = "SYNKHRONOS_PROGRESS"

DELAY = 1.5  # seconds before anything is written
PAUSE = 60.0  # seconds between two lines, if stderr is not a terminal
INTERVAL = 0.2  # seconds between two updates on a terminal
_SPINNER = "|/-\\"
_THREAD = "synkhronos-progress"

REMARK = "the first time this can take minutes; later the C code is taken from Theano's cache"


class Progress:
    """Shows work that takes long. An object remembers when it last wrote a line.

    A thread writes, as Theano compiles in the calling thread. It has ended when the block ends, so no
    thread is left to be lost in a fork. Work inside work that is being shown is not shown.
    """

    def __init__(self) -> None:
        self._last_line = -PAUSE

    @contextlib.contextmanager
    def show(self, work: str, remark: str = "") -> Iterator[None]:
        """Show the work of the block while it runs, unless it ends soon.

        Parameters
        ----------
        work : str
            The work of the block, such as ``"compiling function 2"``.
        remark : str, optional
            A remark that follows in a line, if stderr is not a terminal.
        """
        import threading

        if is_off() or any(thread.name == _THREAD for thread in threading.enumerate()):
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

    def _write(self, work: str, remark: str, done: threading.Event) -> None:
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


def is_off() -> bool:
    """Whether nothing is to be shown, or cannot be."""
    return os.environ.get(VARIABLE) == "0" or sys.stderr is None


def is_terminal(stream: object) -> bool:
    """Whether a line that is written to this stream can be replaced by another line."""
    try:
        return stream.isatty() and os.environ.get("TERM") != "dumb"  # type: ignore[attr-defined]
    except (AttributeError, ValueError):
        return False


def _animate(stream: TextIO, work: str, start: float, done: threading.Event) -> None:
    """Replace one line until the work is done, then clear it."""
    import shutil

    columns = shutil.get_terminal_size().columns
    step = 0
    while not done.is_set():
        sign = _SPINNER[step % len(_SPINNER)]
        text = f"{sign} synkhronos: {work}, {time.monotonic() - start:.0f} s"
        # The cursor goes back to the start, so that a message from elsewhere begins there.
        stream.write(f"\x1b[2K{text[: columns - 1]}\r")
        stream.flush()
        step += 1
        done.wait(INTERVAL)
    stream.write("\x1b[2K")
    stream.flush()


def shown(compile_function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the same function, which shows that it runs if that takes long."""
    progress, numbers = Progress(), itertools.count(1)

    @functools.wraps(compile_function)
    def compile_and_show(inputs: Any, outputs: Any, *args: Any, **kwargs: Any) -> Any:
        processes = sys.modules.get("multiprocessing.process")
        if processes is not None and processes.parent_process() is not None:  # only the master shows it
            return compile_function(inputs, outputs, *args, **kwargs)
        name = kwargs.get("name")
        called = f" ({os.path.basename(name)})" if isinstance(name, str) else ""
        with progress.show(f"compiling theano.function {next(numbers)}{called}", REMARK):
            return compile_function(inputs, outputs, *args, **kwargs)

    return compile_and_show
