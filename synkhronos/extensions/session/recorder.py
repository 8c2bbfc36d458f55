"""`Recorder`: what a session records, and where it writes it while the ranks train."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Callable, Mapping, Sequence

from synkhronos._typing import PathLike
from synkhronos.extensions.rules.record import Record
from synkhronos.extensions.rules.rule import check_count
from synkhronos.extensions.session.inforec import read_inforec
from synkhronos.extensions.session.rank_recorder import TIMES, Sink, outputs_of
from synkhronos.extensions.session.sinks import Lines, LivePlot, TensorBoard, numbers_of

if TYPE_CHECKING:
    from typing_extensions import Self


class Recorder(Record):
    """The record of a session: that of `rules.train`, with outputs by name, learning rates and times.

    Parameters
    ----------
    size : int, optional
        The number of ranks, for a record that is built by hand.
    print_every : int, default: 40
        The number of batches of the master after which a line is printed, as Theano-MPI's recorder does,
        with the means of these batches; 0 for none, and then validations are not printed either.
    tensorboard : path, optional
        A folder, to which the same numbers are written for TensorBoard. It needs ``tensorboardX``.
    live : bool, default: False
        Whether to draw the losses in the output of a notebook's cell while the ranks train.

    Raises
    ------
    ImportError
        If a package that an option needs is not installed.

    Attributes
    ----------
    outputs : dict of list of list of float
        The further outputs of each batch, such as ``"error"``, by name and by rank.
    learning_rates : list of list of float
        The learning rate of each batch, by rank.
    times : dict of list of list of float
        The seconds of each batch, by rank: ``"load"``, ``"compute"``, ``"exchange"``, and ``"wait"``:
        the wait for slower ranks before an exchange, if the rule is synchronous, and what the model has
        measured as ``"wait"``.

    Examples
    --------
    >>> from synkhronos.extensions.session import Recorder
    >>> recorder = Recorder(2, print_every=0)
    >>> recorder.validations.append({"epoch": 1, "rank": None, "step": 40, "seconds": 2.5,
    ...                              "samples": 800, "loss": 0.31, "error": 0.075})
    >>> print(recorder.table())
    epoch  seconds    loss   error
        1      2.5  0.3100  0.0750
    """

    _format = ("synkhronos session record", 1)
    _fields = (*Record._fields, "outputs", "learning_rates", "times")

    def __init__(
        self,
        size: int = 0,
        *,
        print_every: int = 40,
        tensorboard: PathLike | None = None,
        live: bool = False,
    ) -> None:
        self._print_every = check_count("Recorder: print_every", print_every, 0)
        try:
            self._tensorboard = None if tensorboard is None else os.fspath(tensorboard)
        except TypeError:
            raise TypeError(f"Recorder: tensorboard: expected a path, got {tensorboard!r}") from None
        self._live = bool(live)
        if self._tensorboard is not None:
            TensorBoard.check()
        if self._live:
            LivePlot.check()
        self.clear(check_count("Recorder: size", size, 0))

    def clear(self, size: int) -> None:
        """Remove everything that was recorded.

        Parameters
        ----------
        size : int
            The number of ranks.
        """
        super().__init__(size)
        self.outputs: dict[str, list[list[float]]] = {}
        self.learning_rates: list[list[float]] = [[] for _ in range(size)]
        self.times: dict[str, list[list[float]]] = {name: [[] for _ in range(size)] for name in TIMES}

    @property
    def print_every(self) -> int:
        """The number of batches after which a line is printed; 0 for none."""
        return self._print_every

    def open_sinks(self, write: Callable[[str], object]) -> list[Sink]:
        """Return what the master writes to while the ranks train. `Session` calls it.

        Parameters
        ----------
        write : callable
            Writes lines.

        """
        sinks: list[Sink] = [Lines(write)] if self._print_every else []
        if self._tensorboard is not None:
            sinks.append(TensorBoard(self._tensorboard))
        if self._live:
            sinks.append(LivePlot())
        return sinks

    def set_rows(self, rank: int, rows: Mapping[str, Sequence[float]]) -> None:
        """Set what a rank has recorded. `Session` calls it.

        Parameters
        ----------
        rank : int
            The rank.
        rows : dict of list of float
            The columns by name.
        """
        self.losses[rank], self.seconds[rank] = list(rows["loss"]), list(rows["seconds"])
        self.samples[rank] = [int(one) for one in rows["samples"]]
        self.learning_rates[rank] = list(rows["learning_rate"])
        for name in TIMES:
            self.times[name][rank] = list(rows[name])
        for name, column in outputs_of({name: list(one) for name, one in rows.items()}).items():
            by_rank = self.outputs.setdefault(name, [[] for _ in self.losses])
            by_rank[rank] = column

    def table(self) -> str:
        """Return the validations as a table."""
        names = self._numbers()
        rows = [["epoch", "seconds", *names]]
        for one in self.validations:
            numbers = [f"{one[name]:.4f}" if name in one else "" for name in names]
            rows.append([str(one["epoch"]), f"{one['seconds']:.1f}", *numbers])
        widths = [max(map(len, column)) for column in zip(*rows)]
        lines = ["  ".join(text.rjust(width) for text, width in zip(row, widths)) for row in rows]
        return "\n".join(lines)

    @classmethod
    def from_inforec(cls, path: PathLike | Mapping[str, Any]) -> Self:
        """Return the record of a run of Theano-MPI, from its file ``inforec.pkl``.

        The file has the means of some batches for one process. They are the steps of this record, and
        its ``samples`` are the counts of batches. Only arrays and numbers are read from the pickle.

        Parameters
        ----------
        path : path, or dict of list
            The file, written by Python 2 or 3; or what it contains, as Theano-MPI's recorder has it in
            ``info_dict``.

        Raises
        ------
        ValueError
            If it is not such a file, or contains anything else than arrays and numbers.
        """
        lists = path if isinstance(path, Mapping) else read_inforec(path)
        record = cls(1)
        seconds, passed = [], 0.0
        times = {int(row[0]): row[1:] for row in lists["all_time"]}
        for count, cost, error in lists["train_info"]:
            total, calc, comm, wait = times.get(int(count), [0.0] * 4)
            passed += total
            seconds.append(passed)
            record.losses[0].append(cost)
            record.outputs.setdefault("error", [[]])[0].append(error)
            record.samples[0].append(int(count))
            for name, one in zip(TIMES, (0.0, calc, comm, wait)):
                record.times[name][0].append(one)
        record.seconds[0] = seconds
        record.learning_rates[0] = _at(record.samples[0], lists["lr"])
        for epoch, (count, cost, error, top5) in enumerate(lists["val_info"], 1):
            until = [one for one, each in zip(seconds, record.samples[0]) if each <= count]
            record.validations.append(
                {
                    "epoch": epoch, "rank": 0, "step": int(count), "samples": int(count),
                    "seconds": until[-1] if until else 0.0,
                    "loss": cost, "error": error, "error_top5": top5,
                }
            )  # fmt: skip
        return record


def _at(counts: Sequence[int], rates: Sequence[Sequence[float]]) -> list[float]:
    """Return the learning rate at each count; a rate is saved at the end of its epoch."""
    found = []
    for count in counts:
        later = [rate for until, rate in rates if until >= count]
        found.append(later[0] if later else (rates[-1][1] if rates else float("nan")))
    return found


def compare(records: Mapping[str, Record], path: PathLike, numbers: Sequence[str] | None = None) -> None:
    """Draw several runs in one picture.

    The first panels have the loss of each run against time and against rows, as the mean over the ranks
    and over about a hundredth of the steps. Each further panel has one number of the validations.

    Parameters
    ----------
    records : dict of Record
        Records of sessions or of `rules.train`, by the names that the picture shows.
    path : path
        The image to write, such as ``"runs.png"`` or ``"runs.svg"``.
    numbers : list of str, optional
        The numbers of the validations to draw; all by default.

    Raises
    ------
    TypeError, ValueError
        If `records` is not a dict of records, or empty.
    ImportError
        If matplotlib is not installed.

    Examples
    --------
    >>> import os, tempfile
    >>> from synkhronos.extensions.session import Recorder, compare
    >>> slow, fast = Recorder(1), Recorder(1)
    >>> for record, rate in ((slow, 0.9), (fast, 0.8)):
    ...     record.losses[0] += [rate**step for step in range(20)]
    ...     record.seconds[0] += [0.1 * step for step in range(20)]
    ...     record.samples[0] += [8 * step for step in range(20)]
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = os.path.join(folder, "runs.png")
    ...     compare({"slow": slow, "fast": fast}, path)
    ...     os.path.getsize(path) > 1000
    True
    """
    if not isinstance(records, Mapping) or not all(isinstance(one, Record) for one in records.values()):
        raise TypeError(f"compare: expected a dict of records by their names, got {records!r}")
    if not records:
        raise ValueError("compare: expected at least one record, got none")
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            "compare: expected the package matplotlib, which is not installed: pip install matplotlib"
        ) from error
    points = {name: one.validations for name, one in records.items()}
    found = dict.fromkeys(
        name for validations in points.values() for point in validations for name in numbers_of(point)
    )
    shown = list(found) if numbers is None else list(numbers)
    figure = Figure(figsize=(4 * (2 + len(shown)), 3.5), layout="constrained")
    axes = figure.subplots(1, 2 + len(shown), squeeze=False)[0]
    for axis, across in zip(axes, ("seconds", "samples")):
        for name, record in records.items():
            axis.plot(*_curve(record, across), lw=1, label=name)
        axis.set_xlabel("seconds" if across == "seconds" else "rows used by a rank")
        axis.set_ylabel("loss")
    for axis, number in zip(axes[2:], shown):
        for name, validations in points.items():
            pairs = [(one["epoch"], one[number]) for one in validations if number in one]
            axis.plot(*zip(*pairs) if pairs else ([], []), "o-", ms=3, label=name)
        axis.set_xlabel("epoch")
        axis.set_ylabel(f"validation: {number}")
    axes[0].legend()
    figure.savefig(path, dpi=120)


def _curve(record: Record, across: str) -> tuple[list[float], list[float]]:
    """Return the places and the means of the loss, over the ranks and over neighbouring steps."""
    by_rank: Any = list(zip(*record.losses)), list(zip(*getattr(record, across)))
    losses, places = ([sum(step) / len(step) for step in one] for one in by_rank)
    width = max(1, len(losses) // 100)
    starts = range(0, len(losses), width)
    means = [sum(losses[one : one + width]) / len(losses[one : one + width]) for one in starts]
    return [places[min(one + width, len(places)) - 1] for one in starts], means
