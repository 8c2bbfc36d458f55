"""`Recorder`: everything that a session records; and the recorder that the model of a rank gets."""

from __future__ import annotations

import io
import os
import time
from abc import ABC, abstractmethod
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Callable, Mapping, Sequence

import numpy

from synkhronos._checks import check_int
from synkhronos._typing import PathLike
from synkhronos.extensions.rules.record import POSITION, Record, make_figure, numbers_of
from synkhronos.extensions.session.inforec import one_number, read_inforec
from synkhronos.profiles.log import note

if TYPE_CHECKING:
    from typing_extensions import Self

#: The times of a batch, by what a rank does
TIMES = ("load", "compute", "exchange", "wait")
#: How Theano-MPI calls times and outputs.
_NAMES = {"compute": "train", "exchange": "comm", "loss": "cost", "error_top5": "top_5_error"}

COLUMNS = ("loss", "seconds", "samples", "learning_rate", *TIMES)

#: The names of times that models of Theano-MPI give to `RankRecorder.end`.
MODES = {"calc": "compute", "comm": "exchange", "wait": "wait", "load": "load"}
_OUTPUT = "output "


class Sink(ABC):
    """Where the master writes numbers while the ranks train."""

    @abstractmethod
    def training(self, count: int, batches: int, numbers: Mapping[str, float]) -> None:
        """Write the means of the outputs of some batches, the learning rate, and the sums of times."""

    @abstractmethod
    def validation(self, point: Mapping[str, Any]) -> None:
        """Write a validation."""

    def close(self) -> None:  # noqa: B027
        """Write what is left, at the end."""


class Lines(Sink):
    """Writes lines as the recorder of Theano-MPI does.

    Parameters
    ----------
    write : callable
        Takes the text.
    """

    def __init__(self, write: Callable[[str], object]) -> None:
        self._write = write

    def training(self, count: int, batches: int, numbers: Mapping[str, float]) -> None:
        outputs = {name: numbers[name] for name in ("loss", "error") if name in numbers}
        others = {*outputs, *TIMES, "seconds", "samples", "learning_rate"}
        first = " ".join(f"{value:f}" for value in outputs.values())
        more = "".join(f" {name} {number:f}" for name, number in numbers.items() if name not in others)
        times = {name: numbers[name] for name in ("compute", "exchange", "wait", "load")}
        parts = " ".join(f"{_NAMES.get(name, name)} {time:.2f}" for name, time in times.items())
        total = sum(times.values())
        self._write(f"\n{count} {first}{more}\ntime per {batches} batches: {total:.2f} ({parts})\n")

    def validation(self, point: Mapping[str, Any]) -> None:
        lines = [
            f"validation {_NAMES.get(name, name)}:{value:.4f}\n"
            for name, value in numbers_of(point).items()
        ]
        self._write("\n" + "".join(lines))


class TensorBoard(Sink):
    """Writes the numbers to files of TensorBoard, by ``tensorboardX``.

    Parameters
    ----------
    folder : path
        The folder of the run.
    """

    def __init__(self, folder: PathLike) -> None:
        from tensorboardX import SummaryWriter

        self._writer = SummaryWriter(os.fspath(folder))

    def training(self, count: int, batches: int, numbers: Mapping[str, float]) -> None:
        for name, value in numbers.items():
            group = "time" if name in TIMES else "training"
            if name not in ("seconds", "samples"):
                self._writer.add_scalar(f"{group}/{name}", value, count)

    def validation(self, point: Mapping[str, Any]) -> None:
        for name, value in numbers_of(point).items():
            self._writer.add_scalar(f"validation/{name}", value, point["step"])

    def close(self) -> None:
        self._writer.close()


class LivePlot(Sink):
    """Shows the losses in the output of a notebook's cell, and replaces the picture by the next one."""

    def __init__(self) -> None:
        self._record, self._shown = Record(1), None

    def training(self, count: int, batches: int, numbers: Mapping[str, float]) -> None:
        self._record.extend(0, {name: [numbers[name]] for name in ("loss", "seconds", "samples")})
        self._show()

    def validation(self, point: Mapping[str, Any]) -> None:
        self._record.validations.append(dict(point))
        self._show()

    def _show(self) -> None:
        from IPython import display as ipython

        display: Any = ipython  # it has no types
        png = io.BytesIO()
        self._record.plot(png)
        image = display.Image(data=png.getvalue())
        if self._shown is None:
            self._shown = display.display(image, display_id=True)
        else:
            self._shown.update(image)


class BatchRecorder:
    """What a model measures: times by `start` and `end`, and the outputs of its batches.

    Attributes
    ----------
    outputs_of_batch : list of dict
        What `train_error` has recorded.
    """

    _started: float | None = None

    def __init__(self) -> None:
        self.outputs_of_batch: list[dict[str, float]] = []
        self._validated: list[dict[str, float]] = []
        self._times = dict.fromkeys(TIMES, 0.0)

    def start(self) -> None:
        """Begin to measure a time."""
        self._started = time.perf_counter()

    def end(self, mode: str) -> None:
        """End the time that `start` has begun.

        Parameters
        ----------
        mode : {"load", "calc", "comm", "wait"}
            What took the time.
        """
        method = f"{type(self).__name__}.end"
        if mode not in MODES:
            raise ValueError(f"{method}: expected 'load', 'calc', 'comm' or 'wait', got {mode!r}")
        if self._started is None:
            raise RuntimeError(f"{method}: expected a call of start() before end({mode!r}), got none")
        seconds, self._started = time.perf_counter() - self._started, None
        self._times[MODES[mode]] += seconds
        if mode == "load":
            note(mode, "batch", seconds)

    def train_error(self, count: int, cost: Any, error: Any = None, **others: Any) -> None:
        """Record the outputs of a training step; `others` are further outputs by name."""
        self.outputs_of_batch.append(_numbers("train_error", {"loss": cost, "error": error, **others}))

    def val_error(
        self, count: int, cost: Any, error: Any = None, error_top5: Any = None, **others: Any
    ) -> None:
        """Record the outputs of a validation step; `others` are further outputs by name."""
        named = {"loss": cost, "error": error, "error_top5": error_top5, **others}
        self._validated.append(_numbers("val_error", named))

    def clear_train_info(self) -> None:
        """Forget the outputs and times of training steps."""
        self.outputs_of_batch.clear()
        self._times = dict.fromkeys(TIMES, 0.0)


class RankRecorder(BatchRecorder):
    """Records the batches and validations of one rank.

    Models call `start` and `end` around loading and computing, `train_error` and `val_error`. The
    session calls the others.

    Parameters
    ----------
    sinks : list of Sink
        Empty except in the master.
    print_every : int
        The number of batches of which the sinks get the means.
    rows : dict of list
        The rows of earlier programs, by column.
    elapsed : float
        The seconds that earlier programs took.
    """

    def __init__(
        self, sinks: Sequence[Sink], print_every: int, rows: Mapping[str, list[float]], elapsed: float
    ) -> None:
        super().__init__()
        self._sinks, self._every = sinks, print_every
        self.rows = {name: list(rows.get(name, ())) for name in (*COLUMNS, *rows)}
        self._began = time.perf_counter() - elapsed
        self._since = len(self.rows["loss"])  # the first batch that was not printed
        self._latest: list[Any] | None = None

    # Theano-MPI's methods

    def print_train_info(self, count: int) -> None:
        """Write the means of the last batches, if `count` is a multiple of ``print_every``."""
        batches = len(self.rows["loss"]) - self._since
        if not self._every or count % self._every or not batches:
            return
        numbers = {}
        for name, column in self.rows.items():
            last = column[self._since :]
            numbers[name] = sum(last) if name in TIMES else sum(last) / batches
        for name in ("seconds", "samples"):
            numbers[name] = self.rows[name][-1]
        self._since += batches
        numbers = {_without_prefix(name): number for name, number in numbers.items()}
        for sink in self._sinks:
            sink.training(count, batches, numbers)

    def print_val_info(self, count: int, point: Mapping[str, Any]) -> None:
        """Write the averages of a validation over all ranks."""
        self._latest = [count, *(point.get(name) for name in ("loss", "error", "error_top5"))]
        for sink in self._sinks:
            sink.validation(point)

    def get_latest_val_info(self) -> list[Any] | None:
        """Return ``[count, cost, error, error_top5]`` of the latest validation, or None."""
        return self._latest

    # The session's methods

    @property
    def seconds(self) -> float:
        """The seconds since the ranks began."""
        return time.perf_counter() - self._began

    @property
    def n_samples(self) -> int:
        """The number of rows up to the last batch."""
        return int(self.rows["samples"][-1]) if self.rows["samples"] else 0

    @property
    def measured(self) -> float:
        """The seconds of this batch that the model has measured, apart from computing."""
        return sum(self._times[name] for name in ("load", "wait", "exchange"))

    def add_time(self, name: str, seconds: float) -> None:
        """Add to one of the times of this batch."""
        self._times[name] += seconds

    def finish_batch(self, learning_rate: float, computed: float, samples: int) -> None:
        """Add a row.

        Parameters
        ----------
        learning_rate : float
            The rate of this batch.
        computed : float
            The seconds in ``train_iter`` apart from those that the model has measured.
        samples : int
            The number of rows in the batch.
        """
        means = means_of(self.outputs_of_batch)
        self._times["compute"] = computed
        row = {
            "loss": means.pop("loss"), "seconds": self.seconds, "samples": self.n_samples + samples,
            "learning_rate": learning_rate, **self._times,
            **{_OUTPUT + name: value for name, value in means.items()},
        }  # fmt: skip
        done = len(self.rows["loss"])
        for name in {**self.rows, **row}:
            column = self.rows.setdefault(name, [float("nan")] * done)
            column.append(float(row.get(name, float("nan"))))
        self.clear_train_info()

    def take_validation(self) -> tuple[float, dict[str, float]]:
        """Return the number of validated batches and the means of their outputs; begin anew."""
        count, means = len(self._validated), means_of(self._validated)
        self._validated.clear()
        self._times = dict.fromkeys(TIMES, 0.0)
        return float(count), means


def means_of(measured: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the mean of each number, over the times when it was measured."""
    names = dict.fromkeys(name for item in measured for name in item)
    return {name: float(numpy.mean([item[name] for item in measured if name in item])) for name in names}


def _numbers(method: str, named: Mapping[str, Any]) -> dict[str, float]:
    return {
        name: one_number(value, f"recorder.{method}: {name}: ")
        for name, value in named.items()
        if value is not None
    }


def _without_prefix(name: str) -> str:
    return name[len(_OUTPUT) :] if name.startswith(_OUTPUT) else name


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
    print_every : int
        The parameter.
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
        self.print_every = check_int(print_every, "Recorder: print_every", 0)
        try:
            self._tensorboard = None if tensorboard is None else os.fspath(tensorboard)
        except TypeError:
            raise TypeError(f"Recorder: tensorboard: expected a path, got {tensorboard!r}") from None
        self._live = bool(live)
        needed = {"tensorboard": ["tensorboardX"], "live": ["IPython", "matplotlib"]}
        for option, is_on in (("tensorboard", tensorboard is not None), ("live", live)):
            missing = [name for name in needed[option] if is_on and find_spec(name) is None]
            if missing:
                raise ImportError(
                    f"Recorder: {option}: expected installed packages, missing are "
                    f"{', '.join(missing)}: pip install {' '.join(missing)}; or leave {option}= out"
                )
        self.clear(check_int(size, "Recorder: size", 0))

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

    def open_sinks(self, write: Callable[[str], object]) -> list[Sink]:
        """Return what the master writes to while the ranks train. `Session` calls it.

        Parameters
        ----------
        write : callable
            Writes lines.

        """
        sinks: list[Sink] = [Lines(write)] if self.print_every else []
        if self._tensorboard is not None:
            sinks.append(TensorBoard(self._tensorboard))
        if self._live:
            sinks.append(LivePlot())
        return sinks

    def extend(self, rank: int, rows: Mapping[str, Sequence[float]]) -> None:
        """Add what a rank has recorded. `Session` calls it.

        Parameters
        ----------
        rank : int
            The rank.
        rows : dict of list of float
            The columns by name.
        """
        super().extend(rank, rows)
        self.learning_rates[rank] += rows["learning_rate"]
        for name in TIMES:
            self.times[name][rank] += rows[name]
        for name, column in rows.items():
            if name.startswith(_OUTPUT):
                by_rank = self.outputs.setdefault(_without_prefix(name), [[] for _ in self.losses])
                by_rank[rank] += column

    def table(self) -> str:
        """Return the validations as a table."""
        names = self.numbers
        rows = [["epoch", "seconds", *names]]
        for validation in self.validations:
            numbers = [f"{validation[name]:.4f}" if name in validation else "" for name in names]
            rows.append([str(validation["epoch"]), f"{validation['seconds']:.1f}", *numbers])
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
        record, rows = cls(1), lists["train_info"]
        counts = [int(row[0]) for row in rows]
        by_count = {int(row[0]): row[1:] for row in lists["all_time"]}
        times = numpy.array([by_count.get(count, [0.0] * 4) for count in counts]).reshape(-1, 4)
        total, calc, comm, wait = times.T.tolist()
        seconds = numpy.cumsum(total).tolist()
        record.extend(0, {
            "loss": [cost for _, cost, _ in rows], _OUTPUT + "error": [error for _, _, error in rows],
            "seconds": seconds, "samples": counts, "learning_rate": _at(counts, lists["lr"]),
            "load": [0.0] * len(rows), "compute": calc, "exchange": comm, "wait": wait,
        })  # fmt: skip
        for epoch, (count, cost, error, top5) in enumerate(lists["val_info"], 1):
            until = [second for second, each in zip(seconds, counts) if each <= count]
            position = (epoch, 0, int(count), until[-1] if until else 0.0, int(count))
            numbers = {"loss": cost, "error": error, "error_top5": top5}
            record.validations.append({**dict(zip(POSITION, position)), **numbers})
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
    if not isinstance(records, Mapping) or not all(
        isinstance(item, Record) for item in records.values()
    ):
        raise TypeError(f"compare: expected a dict of records by their names, got {records!r}")
    if not records:
        raise ValueError("compare: expected at least one record, got none")
    found = dict.fromkeys(name for record in records.values() for name in record.numbers)
    shown = list(found if numbers is None else numbers)
    figure, axes = make_figure("compare", 4 * (2 + len(shown)), 2 + len(shown))
    for axis, across in zip(axes, ("seconds", "samples")):
        for name, record in records.items():
            axis.plot(*_curve(record, across), lw=1, label=name)
        axis.set_xlabel("seconds" if across == "seconds" else "rows used by a rank")
        axis.set_ylabel("loss")
    for axis, number in zip(axes[2:], shown):
        for name, record in records.items():
            record.draw_validations(axis, "epoch", number, name)
        axis.set_xlabel("epoch")
        axis.set_ylabel(f"validation: {number}")
    axes[0].legend()
    figure.savefig(path, dpi=120)


def _curve(record: Record, across: str) -> tuple[list[float], list[float]]:
    """Return the places and the means of the loss, over the ranks and over neighbouring steps."""
    by_rank: Any = list(zip(*record.losses)), list(zip(*getattr(record, across)))
    losses, places = ([sum(step) / len(step) for step in item] for item in by_rank)
    width = max(1, len(losses) // 100)
    starts = range(0, len(losses), width)
    means = [sum(losses[start : start + width]) / len(losses[start : start + width]) for start in starts]
    return [places[min(start + width, len(places)) - 1] for start in starts], means
