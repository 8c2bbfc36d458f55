"""Writers of what a training records: the progress; and `Sink`: lines, TensorBoard, a live picture."""

from __future__ import annotations

import io
import os
import sys
import time
from abc import ABC, abstractmethod
from importlib.util import find_spec
from typing import Any, Callable, Mapping

import synkhronos as synk
from synkhronos._typing import PathLike
from synkhronos.extensions.rules.record import make_figure, numbers_of
from synkhronos.host.progress import DELAY, INTERVAL, PAUSE, is_off, is_terminal

#: The times of a batch, by what a rank does
TIMES = ("load", "compute", "exchange", "wait")
#: How Theano-MPI calls times and outputs.
_NAMES = {"compute": "train", "exchange": "comm", "loss": "cost", "error_top5": "top_5_error"}


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
        self._is_shown = is_shown and rank.is_master and not is_off()
        if self._is_shown and is_terminal(sys.stderr):
            self._bar = _make_bar(rows)

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
        latest = [item for item in self._rank.latest if item is not None]
        losses = " ".join(f"{item['loss']:.4g}" for item in latest)
        rates = " ".join(f"{item['rate']:.0f}" for item in latest)
        epochs, text = f"epoch {epoch}/{self._epochs}", f"loss {losses}, rows/s {rates}"
        if self._bar is not None:
            self._bar.n = min(self._rows, int(sum(item["samples"] for item in latest)))
            self._bar.set_description(epochs, refresh=False)
            self._bar.set_postfix_str(text)
        else:
            self._next_line = now + PAUSE
            _write(f"synkhronos: training, {epochs}; {text}\n")

    def write(self, text: str) -> None:
        """Write text to stdout, above the bar."""
        if sys.stdout is None:
            return
        if self._bar is not None:
            self._bar.clear()
        sys.stdout.write(text)
        sys.stdout.flush()
        if self._bar is not None:
            self._bar.refresh()

    def close(self) -> None:
        """End the bar."""
        if self._bar is not None:
            self._bar.close()


def _make_bar(rows: int) -> Any:
    try:
        from tqdm import tqdm
    except ImportError:
        return None
    return tqdm(total=rows, unit=" rows", unit_scale=True, leave=False, file=sys.stderr)


def _write(line: str) -> None:
    try:
        sys.stderr.write(line)
        sys.stderr.flush()
    except TimeoutError:  # of a handler of the script
        raise
    except (OSError, ValueError):  # stderr is closed; training continues
        return


class Sink(ABC):
    """Where the master writes numbers while the ranks train."""

    #: The option of a `Recorder` that asks for it, and the packages that it needs
    _option: tuple[str, ...] = ()

    @classmethod
    def check(cls) -> None:
        """Raise ``ImportError`` unless the packages are installed."""
        option, *packages = cls._option
        missing = [name for name in packages if find_spec(name) is None]
        if missing:
            raise ImportError(
                f"Recorder: {option}: expected installed packages, missing are {', '.join(missing)}: "
                f"pip install {' '.join(missing)}; or leave {option}= out"
            )

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

    _option = ("tensorboard", "tensorboardX")

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

    _option = ("live", "IPython", "matplotlib")

    def __init__(self) -> None:
        self._lines: dict[str, list[tuple[int, float]]] = {}
        self._shown: Any = None

    def training(self, count: int, batches: int, numbers: Mapping[str, float]) -> None:
        self._show(count, {"loss": numbers["loss"]})

    def validation(self, point: Mapping[str, Any]) -> None:
        numbers = numbers_of(point)
        self._show(point["step"], {f"validation: {name}": numbers[name] for name in numbers})

    def _show(self, count: int, numbers: Mapping[str, float]) -> None:
        from IPython import display as ipython

        display: Any = ipython  # it has no types
        figure, (axis,) = make_figure("Recorder: live", 7, 1)
        for name, value in numbers.items():
            self._lines.setdefault(name, []).append((count, value))
        for name, points in self._lines.items():
            axis.plot(*zip(*points), ".-", ms=4, lw=0.8, label=name)
        axis.set_xlabel("batches of a rank")
        axis.legend()
        png = io.BytesIO()
        figure.savefig(png, dpi=100)
        image = display.Image(data=png.getvalue())
        if self._shown is None:
            self._shown = display.display(image, display_id=True)
        else:
            self._shown.update(image)
