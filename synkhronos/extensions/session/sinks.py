"""Where the master writes numbers while the ranks train: lines, TensorBoard, a plot in a notebook."""

from __future__ import annotations

import io
import os
from importlib.util import find_spec
from typing import Any, Callable, Mapping

from synkhronos._typing import PathLike
from synkhronos.extensions.session.rank_recorder import TIMES

_POSITION = ("epoch", "rank", "step", "seconds", "samples")
#: How Theano-MPI calls times and outputs.
_NAMES = {"compute": "train", "exchange": "comm", "loss": "cost", "error_top5": "top_5_error"}


def numbers_of(point: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of a validation, without its position."""
    return {name: value for name, value in point.items() if name not in _POSITION}


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
        more = "".join(f" {name} {one:f}" for name, one in numbers.items() if name not in others)
        times = {name: numbers[name] for name in ("compute", "exchange", "wait", "load")}
        parts = " ".join(f"{_NAMES.get(name, name)} {one:.2f}" for name, one in times.items())
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
        lines.update({f"validation: {name}": one for name, one in self._validations.items()})
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
