"""The command ``python -m synkhronos top``: what the ranks do, in a live view or in lines of text.

The ranks do nothing for it. What they have written to their status is read some hundred times per
second; the share of samples in which a rank waits is the share of its time.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from typing import TYPE_CHECKING, Any, Callable, NamedTuple, Sequence

from synkhronos.host.handler_errors import suppress
from synkhronos.host.status import Snapshot, StatusReader, find

COLUMNS = ("rank", "process", "rows/s", "computing", "waiting", "CPU", "memory", "shared")
NO_RICH = (
    "python -m synkhronos top: the live view needs rich (pip install rich); these are lines of text"
)
NO_RANKS = "no ranks: no script of yours on this machine has called synk.fork(), or it has ended"
_LONGEST = 100  # characters of a command line
_BAR = 20  # characters
_LONG = 2.0  # seconds after which a command is said to be running for so long
_NAP = 0.005  # seconds between two samples
_TICKS = os.sysconf("SC_CLK_TCK")

if TYPE_CHECKING:
    _Show = Callable[[Sequence["Report"]], None]


def top(process: int | None = None, once: bool = False, interval: float = 1.0) -> int:
    """Show what the ranks do until they end, and return the exit status.

    Parameters
    ----------
    process : int, optional
        The process of a rank; by default the ranks of all scripts of this user.
    once : bool
        Whether to print one report only.
    interval : float
        The seconds between two reports.
    """
    with contextlib.ExitStack() as stack:
        show = _write if once or not sys.stdout.isatty() else _live_view(stack)
        try:
            return _show_all(Watch(process), show, once, interval)
        except KeyboardInterrupt:
            return 0
        except BrokenPipeError:  # the reader, such as head, has read enough
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what is still buffered
            return 128 + signal.SIGPIPE


def _show_all(watch: Watch, show: _Show, once: bool, interval: float) -> int:
    seen = False
    while True:
        try:
            reports, complaint = watch.reports(interval), NO_RANKS
        except OSError as error:
            reports, complaint = [], _complaint(error)
        if not reports:
            if not seen:
                _complain(complaint)
            return int(not seen)
        show(reports)
        seen = True
        if once:
            return 0


def _complaint(error: OSError) -> str:
    process = (error.filename or "").split("/")[2:3]
    named = f"process {process[0]}" if process else "the process"
    if isinstance(error, PermissionError):
        return f"{named} belongs to another user; run this as that user"
    return f"{named} does not exist; expected the process of a rank, such as that of the script"


def headline(report: Report) -> str:
    """Return the line above the table of a script's ranks."""
    script = report.script
    if len(script) > _LONGEST:
        script = f"{script[:_LONGEST]}..."
    last = report.last or "-"
    if report.seconds >= _LONG and report.between < 1:
        last = f"{last}, running for {report.seconds:.0f} s"
    return (
        f"{script} (process {report.process}): {report.commands:.3g} commands/s, "
        f"{report.between:.0%} of the time between them; last: {last}"
    )


def cells(report: RankReport) -> tuple[str, ...]:
    """Return the cells of a rank."""
    if not report.is_alive:
        state = "ended" if report.process else "not started"
        return (str(report.rank), state, *[""] * (len(COLUMNS) - 2))
    return (
        str(report.rank),
        str(report.process),
        f"{report.rows:,.0f}",
        f"{report.computing:.0%}",
        f"{report.waiting:.0%}",
        f"{report.cores:.0%}",
        f"{report.memory / 1e6:,.0f} MB",
        f"{report.shared / 1e6:,.0f} MB",
    )


def lines(report: Report) -> list[str]:
    """Return a report as lines of text."""
    rows = [COLUMNS, *map(cells, report.ranks)]
    widths = [max(map(len, column)) for column in zip(*rows)]
    table = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]
    return [headline(report), *table]


def _write(reports: Sequence[Report]) -> None:
    for report in reports:
        sys.stdout.write("\n".join([*lines(report), "", ""]))
    sys.stdout.flush()


def _complain(text: str) -> None:
    sys.stderr.write(f"{text}\n")


def _live_view(stack: contextlib.ExitStack) -> _Show:
    """Return a function that shows reports in place, or as lines of text without rich."""
    try:
        from rich.console import Group
        from rich.live import Live
    except ImportError:
        _complain(NO_RICH)
        return _write
    live = Live(auto_refresh=False)
    live.start()
    stack.callback(live.stop)
    return lambda reports: live.update(Group(*map(drawn, reports)), refresh=True)


def drawn(report: Report) -> Any:
    """Return a report as an object that rich prints: a table, in which long waits are coloured."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    title = Text(headline(report), style="bold")
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    for name in COLUMNS:
        table.add_column(name, justify="right")
    table.add_column("", min_width=_BAR)
    for rank in report.ranks:
        bar = Text()
        if rank.is_alive:
            bar.append("█" * round(_BAR * rank.computing), style="blue")
            bar.append("█" * round(_BAR * rank.waiting), style="dark_orange")
        style = "red" if not rank.is_alive and rank.process else ""
        table.add_row(*cells(rank), bar, style=style)
    return table


# Reports


class RankReport(NamedTuple):
    """What a rank has done in an interval.

    Attributes
    ----------
    rank, process : int
        Its number, and its process; 0 before it was started.
    is_alive : bool
        Whether the process runs.
    rows : float
        The rows per second that functions have computed on.
    computing, waiting : float
        The shares of the time inside commands, without and with waits for other ranks.
    cores : float
        How many cores it has used.
    memory, shared : int
        The bytes of its own memory, and of the memory that it shares and has used.
    """

    rank: int
    process: int
    is_alive: bool
    rows: float
    computing: float
    waiting: float
    cores: float
    memory: int
    shared: int


class Report(NamedTuple):
    """What the ranks of a script on this machine have done in an interval.

    Attributes
    ----------
    script : str
        The command line of the script.
    process : int
        The process of its master.
    commands : float
        The commands per second.
    between : float
        The share of the time between commands, in which the script itself works.
    last : str
        What the last command does.
    seconds : float
        For how long it is the last one, as far as is known.
    ranks : list of RankReport
        One for each rank.
    """

    script: str
    process: int
    commands: float
    between: float
    last: str
    seconds: float
    ranks: list[RankReport]


class Watched:
    """The ranks of a script on this machine.

    Parameters
    ----------
    reader : StatusReader
        Reads their status.
    """

    def __init__(self, reader: StatusReader) -> None:
        self._reader = reader
        self._now = self._first = reader.read()
        self._since = time.monotonic()  # when the last command was first seen
        self._began = self._since
        self._start()

    def _start(self) -> None:
        self._first, self._began = self._now, time.monotonic()
        self._cores = [_processor_seconds(line.process) for line in self._now.lines]
        self._samples = self._between = 0
        self._waits = [0] * len(self._now.lines)

    def sample(self) -> None:
        """Look once."""
        before, self._now = self._now, self._reader.read()
        if self._now.command != before.command:
            self._since = time.monotonic()
        self._samples += 1
        waiting = self._now.waiting()
        if waiting is None:
            self._between += 1
        else:
            self._waits = [count + item for count, item in zip(self._waits, waiting)]

    def is_alive(self) -> bool:
        """Whether the master's process runs."""
        return _is_alive(self._master(self._now))

    def _master(self, snapshot: Snapshot) -> int:
        return snapshot.lines[self._reader.master].process

    def report(self) -> Report:
        """Return what was seen since the last report, and begin anew."""
        seconds = max(time.monotonic() - self._began, 1e-9)
        samples = max(self._samples, 1)
        ranks = []
        for before, now, waits, cores in zip(
            self._first.lines, self._now.lines, self._waits, self._cores
        ):
            memory, shared = _memory(now.process)
            ranks.append(
                RankReport(
                    now.number,
                    now.process,
                    _is_alive(now.process),
                    (now.rows - before.rows) / seconds,
                    (samples - self._between - waits) / samples,
                    waits / samples,
                    max(_processor_seconds(now.process) - cores, 0.0) / seconds,
                    memory,
                    shared,
                )
            )
        process = self._master(self._now)
        made = Report(
            _command_line(process),
            process,
            (self._now.command - self._first.command) / seconds,
            self._between / samples,
            self._reader.last_command(),
            time.monotonic() - self._since,
            ranks,
        )
        self._start()
        return made


class Watch:
    """All ranks that this user may look at, or those of one script.

    Parameters
    ----------
    process : int, optional
        The process of a rank.
    """

    def __init__(self, process: int | None = None) -> None:
        self._process = process
        self._watched: dict[tuple[int, int], Watched] = {}

    def reports(self, seconds: float) -> list[Report]:
        """Look for some seconds, and return a report for each script.

        Raises
        ------
        OSError
            If the process does not exist, or its files cannot be read.
        """
        self._find()
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            for value in self._watched.values():
                value.sample()
            time.sleep(_NAP)
        return [value.report() for value in self._watched.values()]

    def _find(self) -> None:
        found = find(self._process)
        for key, path in found.items():
            if key not in self._watched:
                with suppress(OSError, ValueError):  # it has ended, or is of another version
                    self._watched[key] = Watched(StatusReader(path))
        for key in [*self._watched]:
            if key not in found or not self._watched[key].is_alive():
                del self._watched[key]


def _read(process: int, name: str) -> str:
    with suppress(OSError), open(f"/proc/{process}/{name}", errors="replace") as file:
        return file.read()
    return ""


def _is_alive(process: int) -> bool:
    """Whether a process runs; one that has ended may still have an entry."""
    return _read(process, "stat").rpartition(")")[2].strip()[:1] not in ("", "Z", "X")


def _processor_seconds(process: int) -> float:
    fields = _read(process, "stat").rpartition(")")[2].split()
    return sum(map(int, fields[11:13])) / _TICKS if fields else 0.0


def _memory(process: int) -> tuple[int, int]:
    """Return the bytes of the memory of a process alone, and of memory that it shares."""
    sizes = {"RssAnon": 0, "RssShmem": 0}
    for line in _read(process, "status").splitlines():
        name, _, value = line.partition(":")
        if name in sizes:
            sizes[name] = 1024 * int(value.split()[0])
    return sizes["RssAnon"], sizes["RssShmem"]


def _command_line(process: int) -> str:
    """Return the script of a process with its arguments, without the interpreter."""
    words = _read(process, "cmdline").rstrip("\0").split("\0")
    return " ".join(words[1:] or words)
