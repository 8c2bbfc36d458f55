"""Tests of the status that ranks show, and of what another process makes of it."""

import errno
import fcntl
import mmap
import os
import pickle
import sys
import types

import pytest

from synkhronos.functions.call import CallFunction
from synkhronos.functions.replicate import load_functions
from synkhronos.host import status, top
from synkhronos.host.status import FINISHED, PROCESS, REACHED, REACHED_IN, ROWS, StatusPage, StatusReader
from synkhronos.stores.memory import SharedMemory
from synkhronos.transports.mailbox import Mailbox
from synkhronos.transports.waiting import BarrierProgress
from synkhronos.variables.replicas import Assign
from synkhronos.world.rank_state import SCHEDULE_NUMBER, Ask


def path_of(page):
    """Return the file of a page of this process, of ranks with these numbers."""
    paths = status.find(os.getpid()).values()
    numbers = [line[status.NUMBER] for line in map(page.line, range(3))]
    [path] = [one for one in paths if numbers_in(one) == numbers]
    return path


def numbers_in(path):
    return [line.number for line in StatusReader(path).read().lines]


def files():
    """The pages of this process; other tests may have left some to Python's collector."""
    return set(status.find(os.getpid()))


@pytest.fixture
def page():
    page = StatusPage(3, 1, [4, 5, 6], 1 << 12)
    page.line(1)[PROCESS] = os.getpid()
    return page


@pytest.fixture
def reader(page):
    return StatusReader(path_of(page))


def reach(page, rank, barrier):
    page.line(rank)[REACHED], page.line(rank)[REACHED_IN] = barrier, page.command[0]


def test_a_reader_sees_the_milestones(page, reader):
    barriers = BarrierProgress(page)
    assert reader.read().waiting() is None  # before the first command
    page.command[0] += 1
    assert reader.read().waiting() == [False] * 3
    reach(page, 0, 1)
    assert reader.read().waiting() == [True, False, False]
    reach(page, 2, 1)
    reach(page, 1, 1)  # all have passed it
    assert reader.read().waiting() == [False] * 3
    barriers.finish(0, 1)
    reach(page, 2, 2)
    assert reader.read().waiting() == [True, False, True]
    for rank in (1, 2):
        barriers.finish(rank, 2)
    assert reader.read().waiting() is None
    page.command[0] += 1
    assert reader.read().waiting() == [False] * 3
    snapshot = reader.read()
    assert (snapshot.command, [one.number for one in snapshot.lines]) == (2, [4, 5, 6])
    assert (reader.size, reader.master) == (3, 1)


def put(page, payload):
    box = Mailbox(SharedMemory(1), 1 << 12, (page.mapping, page.box))
    box.put(payload)
    assert box.get() == payload


def call(number):
    return CallFunction(number, (), range(10), None, 1, None)


@pytest.mark.parametrize(
    ("sent", "words"),
    [
        (SCHEDULE_NUMBER.pack(7), "function f"), ((7, None), "function f"),
        ((7, (0, 5, 1)), "function f"),
        ((7, None, call(8)), "function f"), (call(7), "function f"), (call(300), "function large"),
        (call(9), "CallFunction"), ([(7, (0, 5, 1)), (8, None)], "function f"),
        ([call(7), Assign([7], [1.0])], "function f"), (Assign([7], [1.0]), "Assign"), (b"", ""),
        (Ask(load_functions, None, [], None), "load functions"),
        (b"no pickle at all", ""), (SCHEDULE_NUMBER.pack(1234), ""),
    ],
)  # fmt: skip
def test_the_last_command_is_named(page, reader, sent, words):
    page.name(7, "function f")
    page.name(300, "function large")
    payload = sent if isinstance(sent, bytes) else pickle.dumps(sent, pickle.HIGHEST_PROTOCOL)
    put(page, payload)
    assert reader.last_command() == words


def test_a_command_that_is_too_long_for_its_place_has_no_name(page, reader):
    put(page, pickle.dumps(bytes(5000)))
    assert reader.last_command() == ""
    put(page, SCHEDULE_NUMBER.pack(7))
    page.name(7, "x" * 500)
    assert reader.last_command() == "x" * 112


def test_another_process_can_only_read(page, reader):
    number = os.open(path_of(page), os.O_RDWR)
    try:
        with pytest.raises(PermissionError):
            os.write(number, b"x")
        with pytest.raises(OSError, match="."):
            mmap.mmap(number, 4096)
        with pytest.raises(PermissionError):
            os.ftruncate(number, 0)
    finally:
        os.close(number)
    page.line(0)[ROWS] = 3  # the ranks' own mapping stays as it was
    assert reader.read().lines[0].rows == 3


def test_the_file_ends_with_the_page():
    before = files()
    page = StatusPage(1)
    assert len(files() - before) == 1
    del page
    assert files() <= before


def fails(number):
    def fail(*_):
        raise OSError(number, os.strerror(number))

    return fail


def test_where_files_in_memory_are_forbidden_nobody_can_look(monkeypatch):
    monkeypatch.setattr(os, "memfd_create", fails(errno.ENOSYS))
    before, page = files(), StatusPage(2)
    BarrierProgress(page).finish(1, 2)
    assert page.line(1)[FINISHED] == page.command[0] and files() <= before
    monkeypatch.setattr(os, "memfd_create", fails(errno.EMFILE))
    with pytest.raises(OSError, match="Too many open files"):
        StatusPage(2)


def test_without_seals_nobody_can_look(monkeypatch):
    monkeypatch.setattr(fcntl, "fcntl", fails(errno.EINVAL))
    before, page = files(), StatusPage(2)
    assert page.lines.nbytes and files() <= before


def test_another_version_is_refused(page):
    path = path_of(page)
    page.mapping[8] = 99
    with pytest.raises(ValueError, match="expected a status of version 1, got 99"):
        StatusReader(path)


def test_a_report_has_shares_and_rates(page, reader, monkeypatch):
    clock = iter(range(100))
    monkeypatch.setattr(top.time, "monotonic", lambda: float(next(clock)))
    watched = top.Watched(reader)
    BarrierProgress(page)
    for command in range(1, 3):
        page.command[0] += 1
        watched.sample()
        page.line(0)[FINISHED] = command
        watched.sample()
        for rank in range(3):
            page.line(rank)[ROWS] += 10
            page.line(rank)[FINISHED] = command
        watched.sample()
    report = watched.report()
    seconds = 20 / report.ranks[0].rows
    assert report.commands * seconds == pytest.approx(2) and report.between == pytest.approx(1 / 3)
    assert [one.waiting for one in report.ranks] == pytest.approx([1 / 3, 0, 0])
    assert [one.computing for one in report.ranks] == pytest.approx([1 / 3, 2 / 3, 2 / 3])
    assert [one.is_alive for one in report.ranks] == [False, True, False]
    assert report.ranks[1].memory > 1e6 and report.process == os.getpid()
    assert watched.report().ranks[0].rows == 0


def report_of(**changes):
    ranks = [
        top.RankReport(0, 11, True, 1234.5, 0.75, 0.25, 0.99, 310_000_000, 25_000_000),
        top.RankReport(1, 12, False, 0, 0, 0, 0, 0, 0),
        top.RankReport(2, 0, False, 0, 0, 0, 0, 0, 0),
    ]
    fields = {
        "script": "train.py", "process": 11, "commands": 23.44, "between": 0.07,
        "last": "function f", "seconds": 0.1, "ranks": ranks, **changes,
    }  # fmt: skip
    return top.Report(**fields)


def test_a_report_as_text():
    assert top.lines(report_of()) == [
        "train.py (process 11): 23.4 commands/s, 7% of the time between them; last: function f",
        "rank      process  rows/s  computing  waiting  CPU  memory  shared",
        "   0           11   1,234        75%      25%  99%  310 MB   25 MB",
        "   1        ended",
        "   2  not started",
    ]


def test_the_live_view_has_the_same_cells():
    pytest.importorskip("rich")
    from rich.console import Console

    console = Console(width=140, record=True)
    console.print(top.drawn(report_of()))
    text = console.export_text()
    for cell in ("train.py (process 11)", "1,234", "75%", "310 MB", "ended", "█" * 20):
        assert cell in text


class Watching:
    """Gives reports, and then none."""

    def __init__(self, *reports):
        self.reports_left = [*reports]

    def reports(self, seconds):
        reports = self.reports_left.pop(0) if self.reports_left else []
        if isinstance(reports, BaseException):
            raise reports
        return reports


def shown(monkeypatch, *reports, **options):
    watch = Watching(*reports)
    monkeypatch.setattr(top, "Watch", lambda process: watch)
    return top.top(**options)


def test_reports_are_printed_until_the_ranks_end(monkeypatch, capsys):
    assert shown(monkeypatch, [report_of()], [report_of()]) == 0
    assert capsys.readouterr().out.count("train.py") == 2
    assert shown(monkeypatch, [report_of()], [report_of()], once=True) == 0
    assert capsys.readouterr().out.count("train.py") == 1
    assert shown(monkeypatch, [report_of()], KeyboardInterrupt()) == 0


def test_without_ranks_it_says_so(monkeypatch, capsys):
    assert shown(monkeypatch) == 1
    assert capsys.readouterr().err.strip() == top.NO_RANKS


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (PermissionError, "process 12 belongs to another user"),
        (FileNotFoundError, "process 12 does not exist"),
    ],
)
def test_a_process_that_cannot_be_read_is_named(monkeypatch, capsys, error, words):
    assert shown(monkeypatch, error(1, "no", "/proc/12/fd")) == 1
    assert words in capsys.readouterr().err


def test_on_a_terminal_without_rich_it_prints_lines_and_says_why(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "rich.live", None)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    assert shown(monkeypatch, [report_of()]) == 0
    found = capsys.readouterr()
    assert found.err.strip() == top.NO_RICH and "train.py" in found.out


def test_on_a_terminal_the_view_is_live(monkeypatch):
    seen = []
    live = types.SimpleNamespace(
        start=lambda: seen.append("start"), stop=lambda: seen.append("stop"),
        update=lambda *one, **options: seen.append(options),
    )  # fmt: skip
    module = types.ModuleType("rich.live")
    module.Live = lambda **options: live
    console = types.ModuleType("rich.console")
    console.Group = lambda *one: one
    monkeypatch.setitem(sys.modules, "rich", types.ModuleType("rich"))
    monkeypatch.setitem(sys.modules, "rich.live", module)
    monkeypatch.setitem(sys.modules, "rich.console", console)
    monkeypatch.setattr(top, "drawn", lambda report: report)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    assert shown(monkeypatch, [report_of()], [report_of()]) == 0
    assert seen == ["start", {"refresh": True}, {"refresh": True}, "stop"]
