"""``theanompi.lib.recorder``: the recorder for a loop of the script's own.

In a session, models get a `RankRecorder <synkhronos.extensions.session.RankRecorder>` in its place, with
the methods that models use.
"""

from __future__ import annotations

import math
import os
import pickle
import sys
import time
from typing import Any, Mapping

from synkhronos.extensions import session
from synkhronos.extensions.session.inforec import read_inforec
from synkhronos.extensions.session.recorder import MODES, BatchRecorder, Lines, means_of

_OUTPUTS = ("loss", "error", "error_top5")  # of a validation; training has the first two


class Recorder(BatchRecorder):
    """Records costs, errors and times, and writes their means.

    Parameters
    ----------
    comm : object or None
        A communicator with ``allgather``, for `gather_val_info` only.
    printFreq : float
        The means of this many batches are recorded, and written if `verbose`.
    modelname : str
        The name of the model.
    verbose : bool
        Whether to write lines.

    Attributes
    ----------
    info_dict : dict of list
        Rows of numbers: ``train_info`` (count, cost, error), ``val_info`` (count, cost, error, top-5
        error), ``all_time`` (count, all, calc, comm, wait), ``epoch_time`` (count, seconds) and ``lr``
        (count, rate).
    """

    def __init__(self, comm: Any, printFreq: float, modelname: str, verbose: bool) -> None:  # noqa: N803
        self.comm, self.printFreq, self.modelname, self.verbose = comm, printFreq, modelname, verbose
        super().__init__()
        names = ("train_info", "val_info", "epoch_time", "all_time", "lr")
        self.info_dict: dict[str, list[list[float]]] = {name: [] for name in names}
        self._lines = Lines(sys.stdout.write)
        self._epoch_began: float | None = None

    def start_epoch(self) -> None:
        """Begin an epoch."""
        self._epoch_began = time.perf_counter()

    def end_epoch(self, count: int, uepoch: int) -> None:
        """End an epoch, and record its time."""
        if self._epoch_began is None:
            raise RuntimeError("Recorder.end_epoch: expected a call of start_epoch() before, got none")
        seconds, self._epoch_began = time.perf_counter() - self._epoch_began, None
        self.info_dict["epoch_time"].append([count, seconds])
        if self.verbose:
            sys.stdout.write(f"global epoch {uepoch} took {seconds / 3600:.4f} h\n\n")

    def train_error(self, count: int, cost: Any, error: Any) -> None:  # type: ignore[override]
        """Record the cost and the error of a training batch."""
        super().train_error(count, float(cost), float(error))

    def val_error(  # type: ignore[override]
        self, count: int, cost: Any, error: Any, error_top5: Any
    ) -> None:
        """Record the cost and the errors of a validation batch."""
        super().val_error(count, float(cost), float(error), float(error_top5))

    def print_train_info(self, count: int) -> None:
        """Record and write the means of the last batches, if `count` is a multiple of ``printFreq``."""
        batches = len(self.outputs_of_batch)
        if count % self.printFreq != 0 or not batches:
            return
        means, times = means_of(self.outputs_of_batch), self._times
        parts = (times[name] for name in ("compute", "exchange", "wait"))
        self.info_dict["train_info"].append([count, *_row(means, 2)])
        self.info_dict["all_time"].append([count, sum(times.values()), *parts])
        if self.verbose:
            self._lines.training(count, batches, {**means, **times})
        self.clear_train_info()

    @property
    def train_info(self) -> dict[str, list[float]]:
        """The outputs of the training batches since the last means, by name."""
        return _columns(self.outputs_of_batch, 2)

    @property
    def val_info(self) -> dict[str, list[float]]:
        """The outputs of the validation batches since the last means, by name."""
        return _columns(self._validated, 3)

    @property
    def all_time(self) -> dict[str, list[float]]:
        """The seconds since the last means, by the name that `end` takes."""
        return {mode: [self._times[name]] for mode, name in MODES.items()}

    def gather_val_info(self) -> None:
        """Collect the validation batches of all processes, by the communicator."""
        if self.comm is None:
            raise RuntimeError("Recorder.gather_val_info: expected a communicator, got comm=None")
        self._validated = [item for part in self.comm.allgather(self._validated) for item in part]

    def print_val_info(self, count: int, comment: str | None = None) -> None:
        """Record and write the means of the validation batches, and forget these."""
        if not self._validated:
            raise RuntimeError("Recorder.print_val_info: expected calls of val_error() before, got none")
        means = means_of(self._validated)
        self.info_dict["val_info"].append([count, *_row(means, 3)])
        if self.verbose:
            sys.stdout.write(f"{comment}\n" if comment is not None else "")
            self._lines.validation(means)
        self._validated.clear()

    def get_latest_val_info(self) -> list[float] | None:
        """Return the latest row of ``val_info``; None if there is none."""
        rows = self.info_dict["val_info"]
        return rows[-1] if rows else None

    def save(self, count: int, lr: Any, filepath: str = "./inforec/") -> None:
        """Record the learning rate, and write everything to a file.

        Parameters
        ----------
        count : int
            The count of batches.
        lr : float or array
            The learning rate.
        filepath : str
            A folder, which is made, for ``inforec.pkl``; or the file, with ``.pkl`` at its end.
        """
        self.info_dict["lr"].append([count, float(lr)])
        if not filepath.endswith(".pkl"):
            filepath = os.path.join(filepath, "inforec.pkl")
        os.makedirs(os.path.dirname(filepath) or os.curdir, exist_ok=True)
        with open(filepath, "wb") as file:
            pickle.dump(self.info_dict, file, protocol=2)  # which Theano-MPI's Python 2 can read

    def load(self, filepath: str = "../run/inforec/inforec.pkl") -> None:
        """Add the rows of a file that `save` has written, here or in Theano-MPI.

        Only arrays and numbers are read from the pickle.

        Raises
        ------
        ValueError
            If it is not such a file, or contains anything else.
        """
        for name, rows in read_inforec(filepath).items():
            self.info_dict[name].extend(rows)

    def cut(self, load_epoch: int) -> None:
        """Keep the first rows of each list only."""
        for rows in self.info_dict.values():
            del rows[load_epoch:]

    def show(self, label: str = "", color_id: int = 0, show: bool = True) -> None:
        """Draw the record into the file ``train.png``: the loss, and the numbers of the validations.

        Parameters
        ----------
        label : str
            Is added to the name of the model.
        color_id, show
            Accepted; no window is opened. `synkhronos.extensions.session.compare` draws several records
            in one picture.
        """
        record = session.Recorder.from_inforec(self.info_dict)
        session.compare({self.modelname + label: record}, "train.png")


def _columns(batches: list[dict[str, float]], length: int) -> dict[str, list[float]]:
    """Return the first numbers of `_OUTPUTS` of batches, by their names in Theano-MPI."""
    rows = zip(*[_row(batch, length) for batch in batches]) if batches else [()] * length
    return {name: list(column) for name, column in zip(("cost", *_OUTPUTS[1:]), rows)}


def _row(means: Mapping[str, float], length: int) -> list[float]:
    """Return the first numbers of `_OUTPUTS`; those that are missing are not a number."""
    return [means.get(name, math.nan) for name in _OUTPUTS[:length]]
