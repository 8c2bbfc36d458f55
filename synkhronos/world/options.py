"""How a world works, as `fork` was told."""

from __future__ import annotations

from typing import NamedTuple, Sequence

#: What is verified: the first call; every call; none; the first call, with an error, not a warning.
FIRST, ALWAYS, OFF, RAISE = MODES = ("first", "always", "off", "raise")

#: Whose operations Theano's functions have: this library's where it has one, or only Theano's.
FAST, THEANO = CHOICES = ("fast", "theano")

#: A call while another thread makes one is refused, or waits.
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
        Whether a call waits while another thread makes one; otherwise it is refused.
    pass_fds : sequence of int
        The file descriptors that workers inherit in any case.
    """

    profile_workers: bool = False
    audits: bool = False
    verify: str = FIRST
    waits: bool = False
    pass_fds: Sequence[int] = ()
