"""The options of a world: arguments of `fork`."""

from __future__ import annotations

from typing import NamedTuple, Sequence

#: The calls that are verified: the first; all; none; the first, with an error in place of a warning.
FIRST, ALWAYS, OFF, RAISE = MODES = ("first", "always", "off", "raise")

#: The operations of Theano's functions: this library's where possible, or only Theano's.
FAST, THEANO = CHOICES = ("fast", "theano")

#: A call during a call of another thread is refused, or waits.
REFUSE, WAIT = THREADS = ("refuse", "wait")


class Options(NamedTuple):
    """The options of a world.

    Attributes
    ----------
    profile_workers : bool
        Whether each worker writes a cProfile file.
    audits : bool
        Whether every call compares the replicas of shared variables.
    verify : str
        Which calls are compared with one rank: one of `MODES`.
    waits : bool
        Whether a call waits during a call of another thread; otherwise it is refused.
    pass_fds : sequence of int
        The file descriptors that workers inherit in any case.
    """

    profile_workers: bool = False
    audits: bool = False
    verify: str = FIRST
    waits: bool = False
    pass_fds: Sequence[int] = ()
