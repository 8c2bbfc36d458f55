"""The command ``python -m synkhronos top``: a live view of the ranks, or lines of text."""

from __future__ import annotations

import os
import signal
import sys
from typing import Any, Sequence

from synkhronos.host.watching import RankReport, Report, Watch

COLUMNS = ("rank", "process", "rows/s", "computing", "waiting", "CPU", "memory", "shared")
NO_RICH = (
    "python -m synkhronos top: the live view needs rich (pip install rich); these are lines of text"
)
NO_RANKS = "no ranks: no script of yours on this machine has called synk.fork(), or it has ended"
_LONGEST = 100  # characters of a command line
_BAR = 20  # characters
_LONG = 2.0  # seconds after which a command is said to be running for so long


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
    watch = Watch(process)
    show: Any = _write
    if not once and sys.stdout.isatty():
        live = _live_view()
        if live is None:
            _complain(NO_RICH)
        else:
            show = live
    try:
        return _show_all(watch, show, once, interval)
    except KeyboardInterrupt:
        return 0
    except BrokenPipeError:  # the reader, such as head, has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what is still buffered
        return 128 + signal.SIGPIPE
    finally:
        if show is not _write:
            show.close()


def _show_all(watch: Watch, show: Any, once: bool, interval: float) -> int:
    seen = False
    while True:
        try:
            reports = watch.reports(interval)
        except OSError as error:
            reports = []
            if not seen:
                _complain(_complaint(error))
                return 1
        if not reports:
            if not seen:
                _complain(NO_RANKS)
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


def _live_view() -> Any:
    """Return a function that shows reports in place, or None without rich."""
    try:
        from rich.live import Live
    except ImportError:
        return None
    return _LiveView(Live(auto_refresh=False))


class _LiveView:
    """Shows reports in the same place of the terminal."""

    def __init__(self, live: Any) -> None:
        self._live = live
        live.start()

    def __call__(self, reports: Sequence[Report]) -> None:
        from rich.console import Group

        self._live.update(Group(*map(drawn, reports)), refresh=True)

    def close(self) -> None:
        self._live.stop()


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
