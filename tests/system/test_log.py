"""Tests of the log and of shown progress: their lines, the ranks, and that lines do not mix."""

import io
import logging
import logging.handlers
import os
import queue as queues
import re
import threading
import time
import warnings

import numpy as np
import pytest
import theano
import theano.tensor as tt
from processes import own_process

import synkhronos as synk
from synkhronos import _errors
from synkhronos.host import log, progress
from synkhronos.world.world import current_world

LINE = re.compile(r"\d\d:\d\d:\d\d\.\d{3} synkhronos(?: rank (\d))? (\w+): (.*)")


def few_calls():
    """Call two functions on three ranks, also in a fused step; one call fails on a worker."""
    log.set_up()
    synk.fork(3, use_gpu=False, master_rank=1)
    x, mean = tt.dvector("x"), theano.shared(0.0, "mean")
    f = synk.function([x], (x.sum(), "sum"), updates=[(mean, x.mean())], name="f")
    i = tt.lvector("i")
    chosen = synk.function([i], (tt.arange(5)[i], "gather"), name="folder/chosen")
    f(np.arange(7.0))
    with synk.fuse():
        f(np.arange(7.0))
        synk.all_reduce(mean)
    with pytest.raises(synk.WorkerError):
        chosen(np.array([0, 1, 9]))
    synk.close()


def lines_of(done):
    """Return ``(rank or None, level, message)`` of each line on stderr, which are all of the log."""
    found = [LINE.fullmatch(line) for line in done.check().stderr.splitlines()]
    assert all(found), done.stderr
    return [(None if one[1] is None else int(one[1]), one[2], one[3]) for one in found]


def messages(lines, rank):
    return [re.sub(r"[\d.]+ m?s\b", "N", text) for one, _, text in lines if one == rank]


def test_debug_shows_the_commands_of_each_rank(programs):
    lines = lines_of(programs.run(few_calls, environment={"SYNKHRONOS_LOG": "debug"}))
    by_worker = {rank: messages(lines, rank) for rank in (0, 2)}
    for rank, rows in ((0, 3), (2, 2)):
        own = by_worker[rank]
        assert re.fullmatch(r"started as process \d+", own[0])
        assert own[1:4] == [
            "load functions: N",
            f"function f, {rows} row(s) of this rank: N",
            f"function f, {rows} row(s) of this rank + Reduce: N",
        ]
    assert by_worker[2][4] == "raised IndexError, which the master reports"
    of_master = messages(lines, 1)
    assert re.match(r"BLAS: .*\d+\.\d+", of_master.pop(4))
    assert of_master[1:] == [
        "function 1 (f) compiled in N",
        "function 2 (chosen) compiled in N",
        "2 worker(s) started in N",
        "load functions: N with all ranks",
        "replicated 2 function(s), 1 shared variable(s)",
        "function f, 2 row(s) of this rank: N with all ranks",
        "function f, 2 row(s) of this rank + Reduce: N with all ranks",
        "function chosen, 1 row(s) of this rank: WorkerError after N",
        "closed after 3 command(s)",
    ]


@pytest.mark.parametrize("setting", ["", "warning"])
def test_without_it_nothing_is_written_and_nothing_is_measured(programs, setting):
    assert lines_of(programs.run(few_calls, environment={"SYNKHRONOS_LOG": setting})) == []


class Records(logging.Handler):
    def __init__(self):
        super().__init__()
        self.messages = []

    def emit(self, record):
        self.messages.append(record.getMessage())


def log_and_die(rank):
    """Log numbered lines and an exception on each rank; the last rank dies."""
    for number in range(300):
        logging.getLogger("script").info("line %d of rank %d", number, rank.rank)
    try:
        raise KeyError("lost")
    except KeyError:
        logging.getLogger("script").exception("rank %d", rank.rank)
    if rank.rank:
        os._exit(1)


@own_process
def test_ranks_log_through_the_handlers_of_the_master(tmp_path):
    rotating = logging.handlers.RotatingFileHandler(tmp_path / "log", maxBytes=2000, backupCount=1000)
    plain, memory, removed = logging.FileHandler(tmp_path / "plain"), Records(), Records()
    queue = logging.handlers.QueueHandler(queues.Queue())
    memory.addFilter(lambda record: record.levelno > logging.INFO)
    handlers = [rotating, plain, memory, queue, removed]
    logging.basicConfig(level=logging.INFO, handlers=handlers, format="%(message)s")
    synk.fork(2, use_gpu=False)
    synk.distribute()
    logging.getLogger().removeHandler(removed)
    with pytest.raises(synk.WorldBrokenError):
        synk.spmd(log_and_die)
    synk.close()
    wanted = {f"line {number} of rank {rank}" for number in range(300) for rank in range(2)}
    for pattern in ("log*", "plain"):
        lines = [line for path in tmp_path.glob(pattern) for line in path.read_text().splitlines()]
        assert sorted(line for line in lines if line.startswith("line")) == sorted(wanted)
        assert lines.count("KeyError: 'lost'") == 2
    assert sorted(memory.messages) == ["rank 0", "rank 1"]  # without the traceback
    queued = [queue.queue.get().getMessage() for _ in range(queue.queue.qsize())]
    assert wanted <= set(queued) and not wanted & set(removed.messages)


def log_each_level(rank):
    for level in (logging.DEBUG, logging.INFO, logging.ERROR):
        logging.getLogger("script.part").log(level, "%d of rank %d", level, rank.rank, extra={"my": log})


@own_process
def test_levels_and_handlers_that_the_script_sets_later_apply_to_all_ranks():
    last = logging.lastResort = Records()
    last.setLevel(logging.WARNING)
    synk.fork(2, use_gpu=False)
    synk.distribute()
    synk.spmd(log_each_level)  # no handler yet
    assert sorted(last.messages) == ["40 of rank 0", "40 of rank 1"]
    handler = Records()
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    for level, logger in ((20, None), (10, "script"), (40, "script.part"), (0, "script.part")):
        logging.getLogger(logger).setLevel(level)
        synk.spmd(log_each_level)
        wanted = [f"{item} of rank {rank}" for item in (10, 20, 40) for rank in (0, 1)]
        assert sorted(handler.messages) == [line for line in wanted if int(line[:2]) >= (level or 10)]
        handler.messages.clear()
        assert synk.spmd(effective_level) == [logging.getLogger("script.part").getEffectiveLevel()] * 2
    handler.setLevel(logging.ERROR)
    handler.addFilter(lambda record: record.my is not None)
    synk.spmd(log_each_level)
    logging.disable(logging.ERROR)
    synk.spmd(log_each_level)
    assert sorted(handler.messages) == ["40 of rank 0", "40 of rank 1"]
    synk.close()


def effective_level(rank):
    return logging.getLogger("script.part").getEffectiveLevel()


@own_process
def test_levels_are_followed_after_an_interrupted_change():
    synk.fork(2, use_gpu=False)
    synk.distribute()
    relay = current_world().transport._children.log
    relay._version[0] += 1  # as a signal handler leaves it that raises in the middle
    logging.getLogger("script").setLevel(35)
    assert relay._version[0] % 2 == 0
    assert synk.spmd(effective_level) == [35, 35]
    synk.close()


@own_process
def test_a_handler_that_is_added_later_has_the_records_beside_the_lines_of_ranks():
    os.environ["SYNKHRONOS_LOG"] = "info"
    log.set_up()
    synk.fork(2, use_gpu=False)
    synk.distribute()
    handler = Records()
    logging.getLogger("synkhronos").addHandler(handler)
    synk.spmd(log_of_package)
    assert sorted(handler.messages)[:2] == ["from rank 0", "from rank 1"]
    synk.close()


def log_of_package(rank):
    logging.getLogger("synkhronos.script").info("from rank %d", rank.rank)


def log_to_own_file(rank):
    logging.getLogger().addHandler(logging.FileHandler(f"of_{rank.rank}"))
    logging.warning("line of rank %d", rank.rank)


@own_process
def test_the_handlers_that_a_rank_adds_are_its_own():
    logging.basicConfig(filename="of_all", format="%(message)s")
    synk.fork(2, use_gpu=False)
    synk.distribute()
    synk.spmd(log_to_own_file)
    synk.close()
    lines = [sorted(open(f"of_{name}").read().splitlines()) for name in (0, 1, "all")]
    assert lines == [["line of rank 0"], ["line of rank 1"], ["line of rank 0", "line of rank 1"]]


def mix():
    """Log from four processes into one pipe."""
    log.set_up()
    for rank in range(4):
        if os.fork() == 0:
            log.set_rank(rank)
            for number in range(300):
                log.logger.debug("%d %s\nsecond", number, 3000 * str(rank))
            os._exit(0)
    for _ in range(4):
        os.wait()


def test_lines_of_several_processes_do_not_mix(programs):
    seen = {rank: [] for rank in range(4)}
    for line in programs.run(mix, environment={"SYNKHRONOS_LOG": "debug"}).stderr.splitlines():
        rank, level, text = LINE.fullmatch(line).groups()
        if text != "second":
            number, digits = text.split()
            assert digits == 3000 * rank and level == "debug"
            seen[int(rank)].append(int(number))
        else:
            seen[int(rank)].append("second")
    for numbers in seen.values():
        assert numbers[::2] == list(range(300)) and set(numbers[1::2]) == {"second"}


def test_an_unknown_level_is_a_warning_that_names_the_levels(monkeypatch):
    monkeypatch.setenv("SYNKHRONOS_LOG", "verbose")
    with pytest.warns(RuntimeWarning, match="expected debug, info, warning, error, got 'verbose'"):
        log.set_up()
    assert not [one for one in log.logger.handlers if isinstance(one, log.LineHandler)]


def test_a_closed_stderr_does_no_harm():
    reader, writer = os.pipe()
    os.close(reader)
    handler = log.LineHandler(writer)
    record = logging.LogRecord("synkhronos", logging.INFO, "", 0, "lost", (), None)
    handler.emit(record)
    os.close(writer)
    handler.emit(record)


TEXT = "w, set on the master only"


def warn_twice(configure=None, **filters):
    """Let a filter apply to two equal warnings; `configure` is the name of a function of this module."""
    globals().get(configure, lambda: None)()
    if filters:
        warnings.filterwarnings(**filters)
    for _ in range(2):
        _errors.warn(TEXT)


def log_to_a_file():
    logging.basicConfig(filename="log")


@pytest.mark.parametrize(
    "filters, written",
    [
        ({}, [f": SynkhronosWarning: {TEXT}", "  _errors.warn(TEXT)"]),  # by Python
        (
            {"action": "once", "category": UserWarning},
            [f": SynkhronosWarning: {TEXT}", "  _errors.warn(TEXT)"],
        ),
        ({"action": "ignore"}, [f": SynkhronosWarning: {TEXT}"]),
        ({"action": "ignore", "category": UserWarning}, [f": SynkhronosWarning: {TEXT}"]),
        ({"action": "ignore", "module": ".*log"}, [f": SynkhronosWarning: {TEXT}"]),
        ({"action": "ignore", "category": synk.SynkhronosWarning}, []),
        ({"action": "ignore", "message": "w, set"}, []),
    ],
)
def test_a_warning_is_on_stderr_once_unless_it_is_ignored_by_its_name(programs, filters, written):
    lines = programs.run(warn_twice, **filters).stderr.splitlines()
    assert len(lines) == len(written)
    assert all(line.endswith(end) for line, end in zip(lines, written))
    assert not lines or "test_log.py:" in lines[0]


def test_a_warning_that_is_an_error_is_not_logged_as_well(programs):
    done = programs.run(warn_twice, action="error")
    assert done.returncode == 1 and done.stderr.count(TEXT) == 1


def test_a_warning_is_in_the_log_that_a_program_has_set_up(programs, tmp_path):
    for filters in ({}, {"action": "ignore"}):
        done = programs.run(warn_twice, configure="log_to_a_file", cwd=tmp_path, **filters)
        assert done.stderr.count(TEXT) == (not filters)  # by Python
        [line] = (tmp_path / "log").read_text().splitlines()
        assert line.startswith("WARNING:synkhronos:") and line.endswith(f"SynkhronosWarning: {TEXT}")
        (tmp_path / "log").unlink()


def test_a_script_that_ignores_warnings_is_told_of_its_mistakes(programs):
    first, why, second = programs.run(ignoring_script).stderr.splitlines()
    where = r".*test_log\.py:\d+: SynkhronosWarning: <synkhronos.Function f>"
    assert re.match(where + ": on 2 rank.s. the call differs from one process:", first)
    assert why.startswith("- output 0 ") and "(output, 'sum')" in why
    assert re.match(where + " uses w, whose replicas differ", second)


def ignoring_script():
    warnings.filterwarnings("ignore")
    synk.fork(2, use_gpu=False)
    x, w = tt.dmatrix("x"), theano.shared(np.ones(3), "w")
    f = synk.function([x], tt.dot(x, w).sum(), name="f")
    f(np.ones((4, 3)))
    w.set_value(np.zeros(3))
    for _ in range(3):
        f(np.ones((4, 3)))
    synk.close()


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def stream(monkeypatch):
    """Function that replaces stderr by a stream of a class, and returns it; nothing is delayed."""
    monkeypatch.setattr(progress, "DELAY", 0.0)
    monkeypatch.setattr(progress, "INTERVAL", 0.01)
    monkeypatch.delenv(progress.VARIABLE, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "60")

    def replace(kind):
        made = kind()
        monkeypatch.setattr("sys.stderr", made)
        return made

    return replace


def wait_for(condition):
    limit = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < limit
        time.sleep(0.005)


def test_a_terminal_shows_a_line_that_moves_and_is_cleared(stream):
    terminal = stream(Terminal)
    with progress.Progress().show("compiling function 3 (train)"):
        wait_for(lambda: terminal.getvalue().count("\r") >= 3)
    *frames, last = terminal.getvalue().split("\r")
    assert last == "\x1b[2K"
    assert len({frame[4] for frame in frames[:3]}) == 3  # the spinner
    for frame in frames:
        assert frame.startswith("\x1b[2K")
        assert frame[5:].startswith(" synkhronos: compiling function 3 (train), 0 s")
    assert "\n" not in terminal.getvalue()


@pytest.mark.parametrize("kind", [io.StringIO, Terminal])
def test_elsewhere_it_is_one_line_with_the_remark(stream, monkeypatch, kind):
    monkeypatch.setenv("TERM", "dumb")
    file = stream(kind)
    shown = progress.Progress()
    for number in (1, 2):  # the second is soon after the first
        with shown.show(f"compiling function {number}", "it takes minutes"):
            wait_for(file.getvalue)
            time.sleep(0.05)
    assert file.getvalue() == "synkhronos: compiling function 1; it takes minutes\n"


def test_work_inside_of_work_that_is_shown_is_not_shown(stream):
    file = stream(io.StringIO)
    with progress.Progress().show("outer"):
        wait_for(file.getvalue)
        before = threading.active_count()
        with progress.Progress().show("inner"):
            assert threading.active_count() == before
    assert file.getvalue() == "synkhronos: outer\n"


@pytest.mark.parametrize("setting, delay, threads", [("0", 0.0, 0), ("1", 60.0, 1)])
def test_work_that_ends_soon_or_is_not_to_be_shown_writes_nothing(
    stream, monkeypatch, setting, delay, threads
):
    monkeypatch.setenv(progress.VARIABLE, setting)
    monkeypatch.setattr(progress, "DELAY", delay)
    file, before = stream(io.StringIO), threading.active_count()
    with progress.Progress().show("compiling"):
        assert threading.active_count() == before + threads
    assert file.getvalue() == ""


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_no_thread_is_left_after_an_error(stream, error):
    stream(Terminal)
    before = threading.active_count()
    with pytest.raises(error):
        with progress.Progress().show("compiling"):
            assert threading.active_count() == before + 1
            raise error
    assert threading.active_count() == before


def test_a_closed_stderr_does_progress_no_harm(stream):
    stream(io.StringIO).close()
    with progress.Progress().show("compiling"):
        time.sleep(0.05)


@own_process
def test_compiling_and_sending_functions_is_shown_with_their_number():
    shown = []
    os.environ.pop(progress.VARIABLE, None)
    progress.Progress._write = lambda self, work, remark, done: shown.append((work, remark))
    synk.fork(2, use_gpu=False)
    x = tt.dvector("x")
    for name in ("first", "second"):
        f = synk.function([x], (x.sum(), "sum"), name=name)
    assert f(np.arange(4.0)) == 6  # starts the workers
    assert threading.active_count() == 1
    late = synk.function([x], (x.max(), "max"), name="/folder/late.py:7")
    synk.distribute()
    assert late(np.arange(4.0)) == 3
    synk.close()
    assert [work for work, _ in shown] == [
        "compiling function 1 (first)",
        "compiling function 2 (second)",
        "compiling function 3 (late.py:7)",
        "sending 1 function(s) to 1 worker(s)",
    ]
    assert "taken from Theano's cache" in shown[0][1]
