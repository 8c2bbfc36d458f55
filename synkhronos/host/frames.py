"""The frames of functions that run, on the stacks of threads."""

from __future__ import annotations

from types import FrameType


def is_below(frame: FrameType | None, caller: FrameType | None) -> bool:
    """Whether a frame is another one, or was called below it; False if the other one is None."""
    while frame is not None and frame is not caller:
        frame = frame.f_back
    return frame is not None
