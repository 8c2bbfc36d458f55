"""The recorder that the model of a rank is given: Theano-MPI's methods, and one row for each batch."""

from __future__ import annotations

import time
from typing import Any, Mapping, Protocol, Sequence

import numpy

from synkhronos.profiles.log import note

TIMES = ("load", "compute", "exchange", "wait")
COLUMNS = ("loss", "seconds", "samples", "learning_rate", *TIMES)

#: The names of times that models of Theano-MPI give to `RankRecorder.end`.
_MODES = {"calc": "compute", "comm": "exchange", "wait": "wait", "load": "load"}
_OUTPUT = "output "


class Sink(Protocol):
    """A place to which the master writes numbers while the ranks train."""

    def training(self, count: int, batches: int, numbers: Mapping[str, float]) -> None:
        """Write the means of the outputs of some batches, the learning rate, and the sums of times."""

    def validation(self, point: Mapping[str, Any]) -> None:
        """Write a validation."""

    def close(self) -> None:
        """Write everything, and end."""


class RankRecorder:
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
        self._sinks, self._every = sinks, print_every
        self.rows: dict[str, list[float]] = {name: list(rows.get(name, ())) for name in COLUMNS}
        self.rows.update({name: list(one) for name, one in rows.items() if name not in COLUMNS})
        self._began = time.perf_counter() - elapsed
        self._started: float | None = None
        self._times = dict.fromkeys(TIMES, 0.0)
        self._outputs: list[dict[str, float]] = []
        self._validated: list[dict[str, float]] = []
        self._since = len(self.rows["loss"])  # the first batch that was not printed
        self._latest: list[Any] | None = None

    # Theano-MPI's methods

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
        if mode not in _MODES:
            raise ValueError(f"recorder.end: expected 'load', 'calc', 'comm' or 'wait', got {mode!r}")
        if self._started is None:
            raise RuntimeError(
                f"recorder.end: expected a call of start() before end({mode!r}), got none"
            )
        seconds = time.perf_counter() - self._started
        self._times[_MODES[mode]] += seconds
        if mode == "load":
            note(mode, "batch", seconds)
        self._started = None

    def train_error(self, count: int, cost: Any, error: Any = None, **others: Any) -> None:
        """Record the outputs of a training step; `others` are further outputs by name."""
        self._outputs.append(_numbers("train_error", {"loss": cost, "error": error, **others}))

    def val_error(
        self, count: int, cost: Any, error: Any = None, error_top5: Any = None, **others: Any
    ) -> None:
        """Record the outputs of a validation step; `others` are further outputs by name."""
        named = {"loss": cost, "error": error, "error_top5": error_top5, **others}
        self._validated.append(_numbers("val_error", named))

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
        for sink in self._sinks:
            sink.training(count, batches, {_without_prefix(name): one for name, one in numbers.items()})

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
    def n_outputs(self) -> int:
        """How often `train_error` was called in this batch."""
        return len(self._outputs)

    @property
    def latest_loss(self) -> float:
        """The cost that was recorded last."""
        return self._outputs[-1]["loss"]

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
        names = list(dict.fromkeys(name for one in self._outputs for name in one))
        means = {
            name: float(numpy.mean([one[name] for one in self._outputs if name in one]))
            for name in names
        }
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
        self._outputs.clear()
        self._times = dict.fromkeys(TIMES, 0.0)

    def take_validation(self) -> tuple[float, dict[str, float]]:
        """Return the number of validated batches and the means of their outputs; begin anew."""
        names = dict.fromkeys(name for one in self._validated for name in one)
        count = len(self._validated)
        means = {
            name: float(numpy.mean([one[name] for one in self._validated if name in one]))
            for name in names
        }
        self._validated.clear()
        self._times = dict.fromkeys(TIMES, 0.0)
        return float(count), means


def _numbers(method: str, named: Mapping[str, Any]) -> dict[str, float]:
    found = {}
    for name, value in named.items():
        if value is None:
            continue
        array = numpy.asarray(value)
        if array.size != 1 or array.dtype.kind not in "biuf":
            raise ValueError(
                f"recorder.{method}: {name}: expected one number, got {array.dtype} {list(array.shape)}"
            )
        found[name] = float(array.reshape(()))
    return found


def _without_prefix(name: str) -> str:
    return name[len(_OUTPUT) :] if name.startswith(_OUTPUT) else name


def outputs_of(rows: Mapping[str, list[float]]) -> dict[str, list[float]]:
    """Return the columns of further outputs, by their names."""
    return {_without_prefix(name): one for name, one in rows.items() if name.startswith(_OUTPUT)}
