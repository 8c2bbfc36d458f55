"""How far each rank has come in a command, in memory that all ranks share."""

_FINISHED = 1 << 62  # larger than the number of barriers in any command


class Milestones:
    """The barriers that each rank has reached, and whether the command was aborted.

    Parameters
    ----------
    store : Store
    size : int
    """

    def __init__(self, store, size):
        self._size = size
        self._arrived = store.empty((size,), "int64").data  # the barriers that a rank has reached
        self._passed = store.empty((size,), "int64").data  # those passed at its end; -1 before that
        self._aborted = store.empty((1,), "int64").data  # first barrier affected, from 1; 0 for none
        self._aborted[0] = 0
        for rank in range(size):
            self.start(rank)

    def start(self, rank):
        """Record that a rank starts a command."""
        self._arrived[rank], self._passed[rank] = 0, -1

    def reach(self, rank, barrier):
        """Record that a rank has reached a barrier; they are counted from 1."""
        self._arrived[rank] = barrier

    def finish(self, rank, passed):
        """Record that a rank has finished the command, and how many barriers it has passed."""
        self._passed[rank], self._arrived[rank] = passed, _FINISHED

    def has_finished(self, rank):
        """Whether a rank has finished the command."""
        return self._arrived[rank] == _FINISHED

    @property
    def aborted(self):
        """The first barrier at which the command is aborted; 0 if it is not."""
        return self._aborted[0]

    def abort(self, barrier):
        """Record that no rank can pass this barrier; 0 for the next command."""
        self._aborted[0] = barrier

    def missing(self, passed):
        """Return the ranks that have finished without reaching the barrier after the first `passed`."""
        return [rank for rank in range(self._size) if 0 <= self._passed[rank] <= passed]

    def describe_late(self, rank, labels):
        """Name the ranks that have reached the fewest barriers, for another rank that waits for them."""
        others = [other for other in range(self._size) if other != rank]
        first = min(self._arrived[other] for other in others)
        doing = "computing" if first == 0 else f"after barrier {first} of the command"
        behind = [other for other in others if self._arrived[other] == first]
        return ", ".join(f"rank {labels[other]} (running, {doing})" for other in behind)
