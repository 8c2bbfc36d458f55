"""`Record`: the losses of training, with times and samples, and the validations."""

from __future__ import annotations

import contextlib
import json
from typing import TYPE_CHECKING, Any, Sequence

from synkhronos._html import picture, table
from synkhronos._typing import PathLike

if TYPE_CHECKING:
    from typing_extensions import Self


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
        names = ("epoch", *self._numbers())
        if self.validations:
            points = [
                [f"{one[name]:.4g}" if name in one else "" for name in names] for one in self.validations
            ]
            found.append(table("Validations", points, names))
        with contextlib.suppress(ImportError):  # without matplotlib there is no picture
            if any(self.losses):
                found.insert(0, picture(self._figure(None), "The loss by time and by rows"))
        return "\n".join(found)

    @property
    def elapsed(self) -> float:
        """The seconds up to the last step or validation of the rank that ran longest."""
        steps = [seconds[-1] for seconds in self.seconds if seconds]
        return max([*steps, *(one["seconds"] for one in self.validations)], default=0.0)

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

    def plot(self, path: PathLike, numbers: Sequence[str] | None = None) -> None:
        """Draw the loss of each rank against time and against samples, with the validations.

        Parameters
        ----------
        path : str or path-like
            The image to write, such as ``"loss.png"`` or ``"loss.svg"``.
        numbers : list of str, optional
            The numbers of the validations to draw; all by default.

        Raises
        ------
        ImportError
            If matplotlib is not installed.
        """
        try:
            figure = self._figure(numbers)
        except ImportError as error:
            raise ImportError(
                "Record.plot needs matplotlib: pip install matplotlib; or save() the record, and draw "
                "it elsewhere"
            ) from error
        figure.savefig(path, dpi=120)

    def _figure(self, numbers: Sequence[str] | None) -> Any:
        from matplotlib.figure import Figure

        figure = Figure(figsize=(9, 3.5), layout="constrained")
        axes = figure.subplots(1, 2, sharey=True)
        for axis, across in zip(axes, ("seconds", "samples")):
            for rank, losses in enumerate(self.losses):
                axis.plot(getattr(self, across)[rank], losses, lw=0.8, label=f"rank {rank}")
            for name in self._numbers() if numbers is None else numbers:
                points = [(one[across], one[name]) for one in self.validations if name in one]
                axis.plot(*zip(*points), "o-", ms=3, label=f"validation: {name}")
            axis.set_xlabel("seconds" if across == "seconds" else "rows used by the rank")
        axes[0].set_ylabel("loss")
        axes[0].legend()
        return figure

    def _numbers(self) -> list[str]:
        known = {"epoch", "rank", "step", "seconds", "samples"}
        names = [name for one in self.validations for name in one if name not in known]
        return list(dict.fromkeys(names))
