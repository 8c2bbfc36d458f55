"""The interface of the ranks that call a function together, as the collectives in its graph see them."""

from __future__ import annotations

from typing import Protocol

from synkhronos._typing import Array
from synkhronos.arithmetic.buckets import Buckets


class Peers(Protocol):
    """The ranks that call a function together, as the collectives in its graph see them.

    The ranks call the same methods in the same order, which the numbers confirm. Arrays are of the
    engine's types. They are not changed, and results do not share their memory.

    Attributes
    ----------
    is_master : bool
    """

    is_master: bool

    def all_reduce(self, array: Array, op: str, number: int | None) -> Array:
        """Return the reduction of the arrays of all ranks.

        Parameters
        ----------
        op : str
            An operation of `synkhronos.arithmetic.operations`; or one of two that use the numbers of
            rows of the ranks, n_r, and of this rank, n_s: ``"weighted_sum"``, the sum of the arrays
            times ``n_r / n_s``, and ``"share_of_sum"``, the sum of the arrays, times n_s over the sum
            of n_r.
        number : int or None
            The number of the collective in the function.
        """

    def all_gather(self, array: Array, number: int | None) -> Array:
        """Return the arrays of all ranks, concatenated along axis 0."""

    def own_rows(self, array: Array, op: str, n_rows: int, number: int | None) -> Array:
        """Return `n_rows` rows of a reduction, after the rows of the ranks before this one."""

    def broadcast(self, array: Array, number: int | None) -> Array:
        """Return the array of the master."""

    def zeros_like(self, array: Array) -> Array:
        """Return zeros in the shape and type of an array."""

    def start(self, array: Array, buckets: Buckets, number: int) -> None:
        """If possible, let a bucket of a vector be reduced while the function computes the others."""
