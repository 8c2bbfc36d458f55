"""The C code of increments at indices, which Theano's ``AdvancedIncSubtensor1`` compiles.

Python loads it as the module ``theano.tensor.inc_code``. Theano's own uses an iterator that NumPy 2 has
made private.
"""

from __future__ import annotations

from pathlib import Path


def inc_code() -> str:
    """Return the code that defines ``inplace_increment``."""
    return "\n" + Path(__file__).with_suffix(".h").read_text(encoding="utf-8")
