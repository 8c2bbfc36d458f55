"""Which entry of the page "Troubleshooting" explains a message.

It is named in warnings, and after the traceback of an error that ends the script or a cell of a
notebook.
"""

import builtins
import sys
from types import TracebackType
from typing import Any, Callable, Optional, Sequence, Type

_Hook = Callable[[Type[BaseException], BaseException, Optional[TracebackType]], Any]


def entry_of(message: str) -> Optional[str]:
    """Return the anchor of the entry for a message, or None.

    If a message contains several that the page explains, it is the entry of the longest.
    """
    from synkhronos.host.messages import MESSAGES  # only where there is a message

    text = message.partition("\n\nTraceback ")[0]
    best, longest = None, 0
    for line in MESSAGES.splitlines():
        anchor, _, explained = line.partition(" ")
        parts = [part.strip() for part in explained.split("...")]
        length = sum(map(len, parts))
        if length > longest and _has_in_order(text, parts):
            best, longest = anchor, length
    return best


def _has_in_order(text: str, parts: Sequence[str]) -> bool:
    for part in parts:
        _, found, text = text.partition(part) if part else ("", True, text)
        if not found:
            return False
    return True


def reference(message: str) -> str:
    """Return a line that says where a message is explained, or an empty string."""
    entry = entry_of(message)
    return f"See troubleshooting.html#{entry} in the documentation" if entry else ""


def with_reference(message: str) -> str:
    """Return a message and, on a line of its own, where it is explained."""
    return "\n".join(filter(None, (message, reference(message))))


def show_references(previous: _Hook) -> _Hook:
    """Return a hook for uncaught exceptions: another one, and then the entry of our own errors."""

    def hook(
        kind: Type[BaseException], error: BaseException, traceback: Optional[TracebackType]
    ) -> None:
        previous(kind, error, traceback)
        _write_reference(error)

    return hook


def show_references_in_cells() -> None:
    """Name the entries of errors in the cells of a notebook, if this is one."""
    shell = getattr(builtins, "get_ipython", lambda: None)()
    if shell is not None:
        shell.events.register("post_run_cell", lambda result: _write_reference(result.error_in_exec))


def _write_reference(error: Optional[BaseException]) -> None:
    if error is not None and _is_raised_here(error.__traceback__) and sys.stderr is not None:
        line = reference(str(error))
        if line:
            sys.stderr.write(f"{line}\n")


def _is_raised_here(traceback: Optional[TracebackType]) -> bool:
    """Whether the innermost frame of a traceback is this package's."""
    name = ""
    while traceback is not None:
        name = traceback.tb_frame.f_globals.get("__name__", "")
        traceback = traceback.tb_next
    return name.partition(".")[0] == "synkhronos"
