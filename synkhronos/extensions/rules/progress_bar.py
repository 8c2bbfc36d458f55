"""Shows the progress of training: a bar on a terminal, otherwise a line from time to time."""

from __future__ import annotations

import sys
import time
from typing import Any

import synkhronos as synk
from synkhronos.host.progress import DELAY, INTERVAL, PAUSE, is_off, is_terminal


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
        latest = [one for one in self._rank.latest if one is not None]
        losses = " ".join(f"{one['loss']:.4g}" for one in latest)
        rates = " ".join(f"{one['rate']:.0f}" for one in latest)
        epochs, text = f"epoch {epoch}/{self._epochs}", f"loss {losses}, rows/s {rates}"
        if self._bar is not None:
            self._bar.n = min(self._rows, int(sum(one["samples"] for one in latest)))
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
