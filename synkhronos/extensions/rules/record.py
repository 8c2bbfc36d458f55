"""`Record`: what a training has done, with the history of a rank, and the state for a checkpoint.

`Progress` shows it meanwhile.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import sys
import time
from typing import TYPE_CHECKING, Any, BinaryIO, Mapping, NamedTuple, Sequence

import numpy

import synkhronos as synk
from synkhronos._html import picture, table
from synkhronos._text import listed
from synkhronos._typing import AnyArray, PathLike
from synkhronos.arithmetic.comparison import digest
from synkhronos.host.handler_errors import suppress
from synkhronos.host.progress import DELAY, INTERVAL, PAUSE, is_off, is_terminal

if TYPE_CHECKING:
    from typing_extensions import Self


_SECONDS, _SAMPLES = 1, 2  # after the loss
_HEADER, _RECORD = "rules.train", "rules.record"
#: Where a validation was made, beside its numbers
POSITION = ("epoch", "rank", "step", "seconds", "samples")


def numbers_of(point: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of a validation, without its position."""
    return {name: value for name, value in point.items() if name not in POSITION}


def make_figure(what: str, width: float, columns: int, **options: Any) -> tuple[Any, Any]:
    """Return a figure and its axes, side by side; `what` is drawn if matplotlib is installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            f"{what} needs matplotlib: pip install matplotlib; or save() the record, and draw it "
            f"elsewhere"
        ) from error
    figure = Figure(figsize=(width, 3.5), layout="constrained")
    return figure, figure.subplots(1, columns, squeeze=False, **options)[0]


class Record:
    """What `train` has recorded. If a rank was replaced, it has the steps of the dead one as well.

    Attributes
    ----------
    losses : list of list of float
        The loss of each step, by rank.
    seconds : list of list of float
        The time after each step, by rank, since the ranks began. Time between two programs, in which
        checkpoints are saved, is not counted.
    samples : list of list of int
        The number of rows that the rank has used up to each step, by rank.
    validations : list of dict
        The validations in order of time, each with ``"epoch"`` from 1, ``"rank"`` (None if all ranks
        validated together), ``"step"``, ``"seconds"`` and ``"samples"`` of this rank (of rank 0), and
        the numbers.
    stopped : bool
        Whether training was stopped before its end, by ``rank.stop()`` or Ctrl-C.
    interrupted : bool
        Whether it was stopped by Ctrl-C.
    """

    _format: tuple[str, int] = ("synkhronos training record", 1)
    _fields: tuple[str, ...] = (
        "losses", "seconds", "samples", "validations", "stopped", "interrupted",
    )  # fmt: skip

    def __init__(self, size: int) -> None:
        self.losses: list[list[float]] = [[] for _ in range(size)]
        self.seconds: list[list[float]] = [[] for _ in range(size)]
        self.samples: list[list[int]] = [[] for _ in range(size)]
        self.validations: list[dict[str, Any]] = []
        self.stopped = self.interrupted = False

    def __repr__(self) -> str:
        steps = ", ".join(str(len(losses)) for losses in self.losses)
        return f"<Record of {steps} steps by rank, {len(self.validations)} validations>"

    def _repr_html_(self) -> str:
        rows = []
        for rank, (losses, seconds, samples) in enumerate(zip(self.losses, self.seconds, self.samples)):
            last = (f"{losses[-1]:.4g}", f"{seconds[-1]:.3g}", samples[-1]) if losses else ("",) * 3
            rows.append((f"rank {rank}", len(losses), *last))
        found = [table("Steps", rows, ("", "steps", "last loss", "seconds", "rows"))]
        names = ("epoch", *self.numbers)
        if self.validations:
            points = [
                [f"{validation[name]:.4g}" if name in validation else "" for name in names]
                for validation in self.validations
            ]
            found.append(table("Validations", points, names))
        with contextlib.suppress(ImportError):  # without matplotlib there is no picture
            if any(self.losses):
                found.insert(0, picture(self._figure(None), "The loss by time and by rows"))
        return "\n".join(found)

    def extend(self, rank: int, rows: Mapping[str, Sequence[float]]) -> None:
        """Add steps of a rank: columns of numbers by name."""
        self.losses[rank] += rows["loss"]
        self.seconds[rank] += rows["seconds"]
        self.samples[rank] += map(int, rows["samples"])

    @property
    def elapsed(self) -> float:
        """The seconds up to the last step or validation of the rank that ran longest."""
        steps = [seconds[-1] for seconds in self.seconds if seconds]
        return max([*steps, *(validation["seconds"] for validation in self.validations)], default=0.0)

    def to_json(self) -> str:
        """Return the record as JSON."""
        fields = {name: getattr(self, name) for name in self._fields}
        return json.dumps({"format": self._format, **fields})

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Return the record that `to_json` has written.

        Parameters
        ----------
        text : str
            The record in JSON.

        Raises
        ------
        ValueError
            If it is not such a record.
        """
        try:
            fields = json.loads(text)
            if tuple(fields["format"]) != cls._format:
                raise ValueError(f"expected the format {cls._format}, got {fields['format']}")
            record = cls(len(fields["losses"]))
            for name in cls._fields:
                setattr(record, name, fields[name])
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"Record: not a record of a training: {error!r}") from error
        return record

    def save(self, path: PathLike) -> None:
        """Write the record to a JSON file.

        Parameters
        ----------
        path : str or path-like
            The path of the file.
        """
        with open(path, "w", encoding="utf-8") as file:
            file.write(self.to_json())

    @classmethod
    def load(cls, path: PathLike) -> Self:
        """Read a record that `save` has written.

        Parameters
        ----------
        path : str or path-like
            The path of the file.

        Raises
        ------
        ValueError
            If the file is not such a record.
        """
        with open(path, encoding="utf-8") as file:
            return cls.from_json(file.read())

    def plot(self, path: PathLike | BinaryIO, numbers: Sequence[str] | None = None) -> None:
        """Draw the loss of each rank against time and against samples, with the validations.

        Parameters
        ----------
        path : str, path-like or file
            The image to write, such as ``"loss.png"`` or ``"loss.svg"``.
        numbers : list of str, optional
            The numbers of the validations to draw; all by default.

        Raises
        ------
        ImportError
            If matplotlib is not installed.
        """
        self._figure(numbers).savefig(path, dpi=120)

    def _figure(self, numbers: Sequence[str] | None) -> Any:
        figure, axes = make_figure("Record.plot", 9, 2, sharey=True)
        for axis, across in zip(axes, ("seconds", "samples")):
            for rank, losses in enumerate(self.losses):
                axis.plot(getattr(self, across)[rank], losses, lw=0.8, label=f"rank {rank}")
            for name in self.numbers if numbers is None else numbers:
                self.draw_validations(axis, across, name, f"validation: {name}")
            axis.set_xlabel("seconds" if across == "seconds" else "rows used by the rank")
        axes[0].set_ylabel("loss")
        axes[0].legend()
        return figure

    def draw_validations(self, axis: Any, across: str, name: str, label: str) -> None:
        """Draw one number of the validations, if any has it, across another one."""
        pairs = [(item[across], item[name]) for item in self.validations if name in item]
        axis.plot(*zip(*pairs) if pairs else ([], []), "o-", ms=3, label=label)

    @property
    def numbers(self) -> list[str]:
        """The names of the numbers of the validations."""
        return list(dict.fromkeys(name for item in self.validations for name in numbers_of(item)))


class History:
    """The steps and validations of a rank, including those of ranks that it has replaced.

    Parameters
    ----------
    rank : Rank
        The rank whose steps are recorded.
    elapsed : float
        The seconds that the previous programs took.
    n_samples : int
        How many rows the rank has used in the previous programs.
    most : int
        The number of steps of this program, if it is not stopped.
    """

    def __init__(self, rank: synk.Rank, elapsed: float, n_samples: int, most: int) -> None:
        self._rank, self._before = rank, n_samples
        self._epochs: dict[int, dict[str, Any]] = {}
        began = self._array("begin", 1)
        # All processes of a machine have the same clock.
        began[0] = began[0] or time.perf_counter() - elapsed
        self._began = float(began[0])
        self._steps = self._array("steps", (max(most, 1), 3))
        self.n_steps = int(numpy.count_nonzero(self._steps[:, _SAMPLES]))

    def _array(self, name: str, shape: int | tuple[int, ...], dtype: str = "float64") -> AnyArray:
        if self._rank.may_meet:  # then no rank is replaced
            return numpy.zeros(shape, dtype)
        return self._rank.memory(f"rules.train: {name}", shape, dtype)

    @property
    def seconds(self) -> float:
        """The seconds since the ranks began."""
        return time.perf_counter() - self._began

    @property
    def n_samples(self) -> int:
        """How many rows the rank has used."""
        return int(self._steps[self.n_steps - 1, _SAMPLES]) if self.n_steps else self._before

    def cut(self, n_steps: int) -> None:
        """Drop the steps after the first `n_steps`; they are taken again."""
        self._steps[n_steps : self.n_steps] = 0
        self.n_steps = min(n_steps, self.n_steps)

    def add(self, loss: float, n_samples: int) -> None:
        """Add a step. Its time is the time of `finish_step`."""
        row, n_samples = self._steps[self.n_steps], n_samples + self.n_samples
        row[:_SAMPLES] = loss, self.seconds
        row[_SAMPLES] = n_samples  # last: this makes it count
        self.n_steps += 1

    def finish_step(self) -> None:
        """Set the time of the last step to now."""
        self._steps[self.n_steps - 1, _SECONDS] = self.seconds

    def add_validation(self, epoch: int, point: dict[str, Any]) -> None:
        """Add the validation after an epoch."""
        text = numpy.frombuffer(json.dumps(point).encode(), numpy.uint8)
        self._array(f"validation {epoch} of {len(text)} bytes", len(text), "uint8")[:] = text
        self._array(f"validation {epoch}", 1, "int64")[0] = len(text)
        self._epochs[epoch] = point

    def validation(self, epoch: int) -> dict[str, Any] | None:
        """Return the validation after an epoch, or None if this rank has added none."""
        if epoch not in self._epochs:
            length = int(self._array(f"validation {epoch}", 1, "int64")[0])
            if not length:
                return None
            text = self._array(f"validation {epoch} of {length} bytes", length, "uint8")
            self._epochs[epoch] = json.loads(text.tobytes())
        return self._epochs[epoch]

    def rows(self) -> dict[str, list[float]]:
        """Return the losses, seconds and samples of all steps."""
        return dict(zip(("loss", "seconds", "samples"), self._steps[: self.n_steps].T.tolist()))

    def validations(self, epochs: range) -> list[dict[str, Any]]:
        """Return the validations after these epochs."""
        return [item for item in map(self.validation, epochs) if item is not None]


class Saved(NamedTuple):
    """The state of training between two programs.

    Attributes
    ----------
    states : list of dict, or None
        The rule's state of each rank, its hyper-parameters included; None at the beginning.
    record : Record
        The record of the steps so far.
    seed : int
        The seed of the training.
    """

    states: list[dict[str, Any]] | None
    record: Record
    seed: int

    @property
    def steps(self) -> list[int]:
        """How many steps each rank has taken."""
        return list(map(len, self.record.losses))


def save_state(path: PathLike, saved: Saved, settings: Mapping[str, Any]) -> None:
    """Write a checkpoint.

    Parameters
    ----------
    path : str or path-like
        The path of the file.
    saved : Saved
        The state of the training.
    settings : dict
        Settings that must be the same in the script that continues.
    """
    arrays: dict[str, Any] = {}
    states = [
        {name: _packed(name, value, arrays) for name, value in state.items()}
        for state in saved.states or ()
    ]
    header = {"settings": settings, "steps": saved.steps, "seed": saved.seed, "states": states or None}
    record = saved.record.to_json()
    synk.save(path, {_HEADER: json.dumps(header), _RECORD: record, **arrays})


def _packed(name: str, value: Any, arrays: dict[str, Any]) -> list[Any]:
    """Return an item of a state for JSON; an array is added to `arrays`, once for all equal ones."""
    if isinstance(value, (numpy.ndarray, numpy.generic)):
        key = f"rules.{name} {digest(numpy.asarray(value)).hex()}"
        arrays[key] = numpy.asarray(value)
        return ["array", key]
    if value is None or isinstance(value, (bool, int, float, str)):
        return ["value", value]
    raise TypeError(
        f"rules.train: state of the rule: {name}: expected an array, a number, a string or None, got "
        f"{value!r}"
    )


def load_state(path: PathLike, settings: Mapping[str, Any], seed: int | None) -> Saved:
    """Restore the shared variables of all ranks from a checkpoint, and return the rest.

    Raises
    ------
    ValueError
        If it was not saved by `train`, or was saved with other settings. Nothing is changed then.
    """
    check = functools.partial(_saved, path, settings, seed)
    return check(synk.load(path, check=check))


def _saved(
    path: PathLike, settings: Mapping[str, Any], seed: int | None, extra: Mapping[str, Any]
) -> Saved:
    """Return the state in a checkpoint; raise if it is not a checkpoint of this training."""
    if _HEADER not in extra:
        raise ValueError(
            f"rules.train: checkpoint: {os.fspath(path)!r} was not saved by rules.train(); give another "
            f"path, or remove it to begin anew"
        )
    header = json.loads(extra[_HEADER])
    check_settings("rules.train", path, header["settings"], settings)
    if seed not in (None, header["seed"]):
        raise ValueError(
            f"rules.train: seed: the training in the checkpoint {os.fspath(path)!r} has the seed "
            f"{header['seed']}, got {seed}; leave it out, or remove the file to begin anew"
        )
    states = header["states"] and [_unpacked(state, extra) for state in header["states"]]
    return Saved(states, Record.from_json(extra[_RECORD]), header["seed"])


def _unpacked(state: Mapping[str, Any], extra: Mapping[str, Any]) -> dict[str, Any]:
    return {name: extra[item] if kind == "array" else item for name, (kind, item) in state.items()}


def check_settings(
    what: str, path: PathLike, saved: Mapping[str, Any], settings: Mapping[str, Any]
) -> None:
    """Raise ``ValueError`` if a checkpoint was saved with other settings."""
    differing = [
        f"{name} was {saved.get(name)!r}, is {value!r}"
        for name, value in settings.items()
        if saved.get(name) != value
    ]
    if differing:
        raise ValueError(
            f"{what}: checkpoint: {os.fspath(path)!r} is of another training: "
            f"{listed(differing, '; ')}; use the same, or remove it to begin anew"
        )


def check_path(path: PathLike, what: str = "rules.train") -> None:
    """Raise an error that says why, unless a checkpoint can be written there."""
    try:
        text = os.path.abspath(os.fspath(path))
    except TypeError:
        raise TypeError(f"{what}: checkpoint: expected a path, got {path!r}") from None
    folder = os.path.dirname(text)
    if not os.path.isdir(folder):
        raise FileNotFoundError(
            f"{what}: checkpoint: there is no folder {folder!r}; create it, or give another path"
        )
    if os.path.isdir(text):
        raise IsADirectoryError(
            f"{what}: checkpoint: expected the path of a file, got the folder {text!r}"
        )
    if not os.access(folder, os.W_OK):
        raise PermissionError(
            f"{what}: checkpoint: cannot write to the folder {folder!r}; give another path"
        )


class Progress:
    """Reports the loss and the rows of this rank to the master, which shows the totals of all ranks.

    Parameters
    ----------
    rank : Rank
        The rank whose progress is reported.
    is_shown : bool
        Whether the script asked for the progress.
    rows : int
        How many rows all ranks will use.
    epochs : int
        The number of epochs.
    """

    def __init__(self, rank: synk.Rank, is_shown: bool, rows: int, epochs: int) -> None:
        self._rank, self._rows, self._epochs = rank, rows, epochs
        self._began = self._reported = time.perf_counter()
        self._first: int | None = None
        self._next_line = self._began + DELAY
        self._bar: Any = None
        self._latest: dict[int, dict[str, float]] = {}
        self._is_shown = is_shown and rank.is_master and not is_off()
        if self._is_shown and is_terminal(sys.stderr):
            with contextlib.suppress(ImportError):
                from tqdm import tqdm

                options = {"unit": " rows", "unit_scale": True, "leave": False, "file": sys.stderr}
                self._bar = tqdm(total=rows, **options)

    def step(self, epoch: int, loss: float, samples: int) -> None:
        """Report a step of this rank, and show the latest of all, unless that was done a moment ago."""
        now = time.perf_counter()
        if self._first is None:
            self._first = samples
        if now - self._reported < INTERVAL:
            return
        self._reported = now
        rate = (samples - self._first) / (now - self._began)
        self._rank.report(loss=loss, samples=samples, rate=rate)
        if not self._is_shown or (self._bar is None and now < self._next_line):
            return
        for number, item in enumerate(self._rank.latest):
            if item and {"loss", "samples", "rate"} <= item.keys():  # the script may report others
                self._latest[number] = item
        latest = [item for _, item in sorted(self._latest.items())]
        losses = " ".join(f"{item['loss']:.4g}" for item in latest)
        rates = " ".join(f"{item['rate']:.0f}" for item in latest)
        epochs, text = f"epoch {epoch}/{self._epochs}", f"loss {losses}, rows/s {rates}"
        if self._bar is not None:
            self._bar.n = min(self._rows, int(sum(item["samples"] for item in latest)))
            self._bar.set_description(epochs, refresh=False)
            self._bar.set_postfix_str(text)
        else:
            self._next_line = now + PAUSE
            with suppress(OSError, ValueError):  # stderr is closed; training continues
                sys.stderr.write(f"synkhronos: training, {epochs}; {text}\n")
                sys.stderr.flush()

    def write(self, text: str) -> None:
        """Write text to stdout, above the bar."""
        if sys.stdout is None:
            return
        if self._bar is None:
            sys.stdout.write(text)
        else:
            self._bar.write(text, file=sys.stdout, end="")
        sys.stdout.flush()

    def close(self) -> None:
        """End the bar."""
        if self._bar is not None:
            self._bar.close()
