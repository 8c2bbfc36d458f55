"""What a communicator must do. `naive` says it in the fewest words; `checks` are its conformance."""

from abc import ABC, abstractmethod

from synkhronos._operations import find_operation


class Communicator(ABC):
    """Collectives on one array a rank; all ranks call the same ones in the same order.

    A communicator may use the memory of the array that it is given, and may return an array that other
    ranks can reach: work on with the returned array and forget the given one.

    Attributes
    ----------
    rank, size : int
    """

    def __init__(self, transport):
        self.transport = transport
        self.size = transport.size

    @property
    def rank(self):
        return self.transport.rank

    @abstractmethod
    def broadcast(self, array, root):
        """Return the array of rank `root`. What the others give is ignored, or used as room for it."""

    @abstractmethod
    def gather(self, array, root):
        """Return, to rank `root`, a list of every rank's array; shapes may differ. None to others."""

    @abstractmethod
    def all_gather(self, array):
        """Return a list of every rank's array, by rank; shapes may differ."""

    @abstractmethod
    def reduce(self, array, op, root, weight=1):
        """Return, to rank `root`, the reduction of all arrays; the given array to the others.

        Parameters
        ----------
        op : str
            A name of `synkhronos._operations.OPERATIONS`.
        weight : float
            This rank's weight in ``"avg"``.

        Raises
        ------
        ValueError
            On every rank, if the shapes or dtypes differ; the message lists them by rank.
        """

    @abstractmethod
    def all_reduce(self, array, op, weight=1):
        """Return the reduction of all arrays to every rank, the same bits to each. See `reduce`."""

    @staticmethod
    def check_reducible(op, types, weights):
        """Return the `Operation` if arrays of these ``(shape, dtype)``, by rank, can be reduced."""
        operation = find_operation(op)
        if any(one != types[0] for one in types):
            listed = "; ".join(
                f"rank {rank}: {tuple(shape)} {dtype}" for rank, (shape, dtype) in enumerate(types)
            )
            raise ValueError(
                f"reduction {op!r}: expected the same shape on every rank, got {listed}; use gather "
                f"for unequal shapes"
            )
        operation.check_dtype(types[0][1], "a shared variable")
        if operation.weighted and not any(weights):
            raise ValueError(f"reduction {op!r}: the weights of all ranks are zero: {weights}")
        return operation
