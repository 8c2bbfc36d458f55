"""What a rank needs, in addition to its replica, to call a function that another rank has built."""

from __future__ import annotations

import contextlib
from typing import Any, Iterator, NamedTuple

from synkhronos.functions.signature import Input


class Sending:
    """Whether pickles are for the workers of a world, which need only specifications of functions."""

    is_active = False

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Inside the block, pickles are for the workers."""
        self.is_active = True
        try:
            yield
        finally:
            self.is_active = False


class Specification(NamedTuple):
    """What is needed to call the replica of a function on any rank. It can be pickled.

    Attributes
    ----------
    token : bytes
        Identifies the world.
    number : int
        The number of the function.
    inputs : list of Input
        Strings replace the variables.
    not_accumulated : list of str
        For each update that cannot accumulate over slices, a sentence that says why.
    form : list of str or bool
        The form of the result.
    """

    token: bytes
    number: int
    inputs: list[Input]
    not_accumulated: list[str]
    form: list[str] | bool


def specify(function: Any) -> Specification:
    """Return the specification of a function."""
    return Specification(
        function._world.registry.token,
        function.replica.number,
        [one._replace(variable=str(one.variable)) for one in function.inputs],
        function.not_accumulated,
        function.form,
    )
