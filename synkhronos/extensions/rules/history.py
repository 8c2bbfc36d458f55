"""`History`: the record of a rank in a program, kept where it outlives a rank that may be replaced."""

from __future__ import annotations

import json
import time
from typing import Any

import numpy

import synkhronos as synk
from synkhronos._typing import AnyArray

_BLOCK = 4096  # steps
_LOSS, _SECONDS, _SAMPLES = range(3)


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
    """

    def __init__(self, rank: synk.Rank, elapsed: float, n_samples: int) -> None:
        self._rank, self._before = rank, n_samples
        self._blocks: list[AnyArray] = []
        self._epochs: dict[int, dict[str, Any]] = {}
        began = self._array("begin", 1)
        # All processes of a machine have the same clock.
        began[0] = began[0] or time.perf_counter() - elapsed
        self._began = float(began[0])
        self.n_steps = 0
        while self.n_steps == _BLOCK * len(self._blocks):
            self._blocks.append(self._block(len(self._blocks)))
            self.n_steps += int(numpy.count_nonzero(self._blocks[-1][:, _SAMPLES]))

    def _array(self, name: str, shape: int | tuple[int, ...], dtype: str = "float64") -> AnyArray:
        if self._rank.may_meet:  # then no rank is replaced
            return numpy.zeros(shape, dtype)
        return self._rank.memory(f"rules.train: {name}", shape, dtype)

    def _block(self, number: int) -> AnyArray:
        return self._array(f"steps from {number * _BLOCK}", (_BLOCK, 3))

    @property
    def seconds(self) -> float:
        """The seconds since the ranks began."""
        return time.perf_counter() - self._began

    @property
    def n_samples(self) -> int:
        """How many rows the rank has used."""
        if not self.n_steps:
            return self._before
        block, place = divmod(self.n_steps - 1, _BLOCK)
        return int(self._blocks[block][place, _SAMPLES])

    def cut(self, n_steps: int) -> None:
        """Drop the steps after the first `n_steps`; they are taken again."""
        for step in range(n_steps, self.n_steps):
            self._blocks[step // _BLOCK][step % _BLOCK] = 0
        self.n_steps = min(n_steps, self.n_steps)

    def add(self, loss: float, n_samples: int) -> None:
        """Add a step. Its time is the time of `finish_step`."""
        block, place = divmod(self.n_steps, _BLOCK)
        if block == len(self._blocks):
            self._blocks.append(self._block(block))
        n_samples += self.n_samples
        self._blocks[block][place, :_SAMPLES] = loss, self.seconds
        self._blocks[block][place, _SAMPLES] = n_samples  # last: this makes it count
        self.n_steps += 1

    def finish_step(self) -> None:
        """Set the time of the last step to now."""
        block, place = divmod(self.n_steps - 1, _BLOCK)
        self._blocks[block][place, _SECONDS] = self.seconds

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

    def steps(self) -> tuple[list[float], list[float], list[int]]:
        """Return the losses, seconds and samples of all steps."""
        rows = numpy.concatenate(self._blocks)[: self.n_steps]
        return (
            rows[:, _LOSS].tolist(),
            rows[:, _SECONDS].tolist(),
            rows[:, _SAMPLES].astype(int).tolist(),
        )

    def validations(self, epochs: range) -> list[dict[str, Any]]:
        """Return the validations after these epochs."""
        return [one for one in map(self.validation, epochs) if one is not None]
