"""Writers of what a training records: the progress, lines, TensorBoard's files and a live picture.

The last three have the methods ``training``, for the means of the outputs of some batches, the learning
rate, and the sums of times; ``validation``; and ``close``, at the end.
"""

from __future__ import annotations

import io
import os
import sys
import time
from importlib.util import find_spec
from typing import Any, Callable, Mapping

import synkhronos as synk
from synkhronos._typing import PathLike
from synkhronos.extensions.rules.record import numbers_of
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


class Lines:
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

    def close(self) -> None:
        """Nothing is left to write."""


class TensorBoard:
    """Writes the numbers to files of TensorBoard, by ``tensorboardX``.

    Parameters
    ----------
    folder : path
        The folder of the run.
    """

    def __init__(self, folder: PathLike) -> None:
        from tensorboardX import SummaryWriter

        self._writer = SummaryWriter(os.fspath(folder))

    @staticmethod
    def check() -> None:
        """Raise ``ImportError`` unless the package is installed."""
        _need("tensorboard", "tensorboardX")

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


class LivePlot:
    """Shows the losses in the output of a notebook's cell, and replaces the picture by the next one."""

    def __init__(self) -> None:
        from IPython.display import Image, display
        from matplotlib.figure import Figure

        self._figure: Any = Figure
        self._image: Any = Image  # they have no types
        self._display: Any = display
        self._shown: Any = None
        self._training: list[tuple[int, float]] = []
        self._validations: dict[str, list[tuple[int, float]]] = {}

    def training(self, count: int, batches: int, numbers: Mapping[str, float]) -> None:
        self._training.append((count, numbers["loss"]))
        self._show()

    def validation(self, point: Mapping[str, Any]) -> None:
        for name, value in numbers_of(point).items():
            self._validations.setdefault(name, []).append((point["step"], value))
        self._show()

    def _show(self) -> None:
        figure = self._figure(figsize=(7, 3), layout="constrained")
        axis = figure.subplots()
        lines = {"loss": self._training}
        lines.update({f"validation: {name}": item for name, item in self._validations.items()})
        for name, points in lines.items():
            if points:
                axis.plot(*zip(*points), ".-", ms=4, lw=0.8, label=name)
        axis.set_xlabel("batches of a rank")
        axis.legend()
        png = io.BytesIO()
        figure.savefig(png, dpi=100)
        image = self._image(data=png.getvalue())
        if self._shown is None:
            self._shown = self._display(image, display_id=True)
        else:
            self._shown.update(image)

    def close(self) -> None:
        """The last picture stays."""

    @staticmethod
    def check() -> None:
        """Raise ``ImportError`` unless the packages are installed."""
        _need("live", "IPython", "matplotlib")


def _need(option: str, *packages: str) -> None:
    """Raise ``ImportError`` unless packages are installed."""
    missing = [name for name in packages if find_spec(name) is None]
    if missing:
        raise ImportError(
            f"Recorder: {option}: expected installed packages, missing are {', '.join(missing)}: pip "
            f"install {' '.join(missing)}; or leave {option}= out"
        )
