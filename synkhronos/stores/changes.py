"""Which changes of shared data are in progress, and whether an exception has ended one halfway."""

from __future__ import annotations

import sys
from types import FrameType

from synkhronos.host.handler_errors import is_below


class Changes:
    """A context manager for each change.

    Threads and signal handlers may make several changes at the same time.

    Attributes
    ----------
    any_lost : bool
        Whether an exception, such as that of a signal handler, has come in a change.
    """

    def __init__(self) -> None:
        self.any_lost = False
        self._running: dict[FrameType, None] = {}  # the functions with a change

    def __enter__(self) -> None:
        self._running[sys._getframe(1)] = None

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if kind is not None:
            self.any_lost = True
        self._running.pop(sys._getframe(1), None)

    def is_alone(self) -> bool:
        """Whether no change is in progress but that of the calling function."""
        own, alone = sys._getframe(1), True
        for frame in list(self._running):
            if frame is not own:
                if any(is_below(top, frame) for top in sys._current_frames().values()):
                    alone = False
                else:  # its exit was interrupted
                    self._running.pop(frame, None)
        return alone
