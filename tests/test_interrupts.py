"""Ctrl-C and other signals, at any moment of a script: what is left is whole, or cleanly ended."""

import ast
import functools
import itertools
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest
from conftest import ROOT
from test_failures import PRELUDE

from synkhronos.host import signals
from synkhronos.host.signals import ENDING, DeferredSignal, defer_termination

# What a script does to itself: a signal to all of its processes, as a terminal sends it, or to the
# master alone, at a moment that `when` names: before or after a certain function of the library.
SIGNALS = (
    PRELUDE
    + """
import functools
from synkhronos.world import launch, threads, world
from synkhronos.functions import replicate
from synkhronos.comms import shm as comms
from synkhronos.transports import local
from synkhronos.stores import memory as shm
from synkhronos.engines import theano_engine

os.setsid()


def hit(to="group", number=signal.SIGINT):
    if to == "group":
        os.killpg(0, number)
    else:
        os.kill(MASTER, number)


def strike(owner, name, to, when, skip=0, number=signal.SIGINT):
    # Sends one signal before or after the master's next call of this function.
    original = getattr(owner, name)
    left = [skip]

    @functools.wraps(original)
    def struck(*args, **kwargs):
        if os.getpid() != MASTER:
            return original(*args, **kwargs)
        now = left[0] == 0
        left[0] -= 1
        if now and when == "before":
            hit(to, number)
        try:
            return original(*args, **kwargs)
        finally:
            if now and os.getpid() == MASTER:
                setattr(owner, name, original)
                if when == "after":
                    hit(to, number)

    setattr(owner, name, struck)


def interrupted(call):
    try:
        call()
        for _ in range(100):  # a signal that came last of all
            pass
    except KeyboardInterrupt:
        return
    raise AssertionError("no KeyboardInterrupt")


def check_whole(size=2):
    # The world computes, and its replicas are in step.
    check_usable(size)
    assert len({one.tobytes() for one in synk.gather([w])[0]}) == 1
"""
)

MOMENTS = {
    "fork": [
        ("local", "Semaphore"),
        ("launch", "LocalTransport"),
        ("local", "SharedMemory"),
        ("launch", "enter_world"),
    ],
    "start": [
        ("local.LocalTransport", "start"),
        ("local.multiprocessing.process.BaseProcess", "start"),
        ("os", "fork"),
        ("theano_engine.TheanoEngine", "before_fork"),
        ("local.LocalTransport", "collect"),
        ("replicate.Replicate", "run"),
    ],
    "late": [
        ("theano_engine.TheanoEngine", "dumps"),
        ("local.LocalTransport", "post"),
        ("local.LocalTransport", "collect"),
        ("shm.SharedMemory", "trim"),
    ],
    "call": [
        ("local.LocalTransport", "post"),
        ("local.Box", "put"),
        ("theano_engine.TheanoEngine", "call"),
        ("local.LocalTransport", "collect"),
        ("world.World", "_read"),
    ],
    "collective": [
        ("comms.SharedMemoryCommunicator", "all_reduce"),
        ("local.LocalTransport", "exchange"),
        ("local.LocalTransport", "barrier"),
        ("local.LocalTransport", "collect"),
    ],
    "close": [
        ("local.LocalTransport", "post"),
        ("local.LocalTransport", "close"),
        ("local.multiprocessing.process.BaseProcess", "join"),
        ("shm.SharedMemory", "trim_others"),
        ("world.World", "_copy_out_of_store"),
    ],
}

# As a terminal sends it, to all processes of the script; and to the master alone.
TO = ["group", pytest.param("master", marks=pytest.mark.slow)]


def moments(*phases):
    for phase in phases:
        for (owner, name), when in itertools.product(MOMENTS[phase], ("before", "after")):
            yield phase, owner, name, when


@pytest.fixture
def run_signals(run_python):
    def run(code, *arguments, **kwargs):
        return run_python(SIGNALS + code, *arguments, **{"timeout": 60, **kwargs})

    return run


@pytest.mark.parametrize("to", TO)
def test_a_ctrl_c_in_fork_or_its_start_leaves_a_usable_world_or_none(run_signals, to):
    """At each step of it: before a semaphore loses its name, between two workers ..."""
    run_signals(
        """
to, moments = sys.argv[1], eval(sys.argv[2])
for phase, owner, name, when in moments:
    if phase == "fork":
        strike(eval(owner), name, to, when)
        interrupted(lambda: synk.fork(3, use_gpu=False))
    else:
        synk.fork(3, use_gpu=False)
        x = T.dvector("x")
        function = synk.function([x], (x.sum(), "sum"), mode="FAST_COMPILE")
        strike(eval(owner), name, to, when)
        interrupted(synk.distribute)
        assert function(np.ones(4)) == 4, (owner, name, when)
    workers = psutil.Process().children()
    assert len(workers) in (0, 2), (owner, name, when, workers)
    if synk.world.world.world_exists():
        assert synk.world.world.current_world().broken is None, (owner, name, when)
        synk.close()
    assert psutil.Process().children() == [], (owner, name, when)
    assert synk.world.threads.ThreadLimits().before == threads, "BLAS has its threads again"
""".replace("to, moments =", "threads = synk.world.threads.ThreadLimits().before\nto, moments ="),
        to,
        list(moments("fork", "start")),
    )


@pytest.mark.parametrize("to", TO)
def test_a_ctrl_c_in_a_command_lets_it_end_on_every_rank(run_signals, to):
    """A call, a fused step, a collective, a late function: no rank has done what others have not."""
    run_signals(
        """
to, moments = sys.argv[1], eval(sys.argv[2])
open_world(3)
x = T.dvector("x")
count = theano.shared(0.0, name="count")
step = synk.function([x], x.sum(), updates=[(count, count + 1)], mode="FAST_COMPILE")
synk.distribute()
workers = pids()[1:]


def fused_step():
    with synk.fuse():
        step(np.ones(6))
        synk.all_reduce(w)


CALLS = {"call": lambda: step(np.ones(6)), "collective": fused_step,
         "late": lambda: synk.distribute()}
for phase, owner, name, when in moments:
    if phase == "late":
        late = synk.function([x], (x.sum() + w.sum(), "sum"), mode="FAST_COMPILE")
    before = count.get_value()
    strike(eval(owner), name, to, when)
    interrupted(CALLS[phase])
    assert synk.world.world.current_world().broken is None, (phase, owner, name, when)
    counts = [synk.get_value(rank, count) for rank in range(3)]
    assert counts == [before + (phase != "late")] * 3, (phase, owner, name, when, counts)
    check_whole(3)
    if phase == "late":
        assert late(np.ones(3)) == 12
    assert pids()[1:] == workers, (phase, owner, name, when)
""",
        to,
        list(moments("call", "collective", "late")),
    )


@pytest.mark.parametrize("to", TO)
def test_a_ctrl_c_in_close_comes_when_all_is_closed(run_signals, to):
    run_signals(
        """
to, moments = sys.argv[1], eval(sys.argv[2])
for phase, owner, name, when in moments:
    open_world(3)
    workers = pids()[1:]
    strike(eval(owner), name, to, when)
    interrupted(synk.close)
    assert not synk.world.world.world_exists(), (owner, name, when)
    assert all(map(gone, workers)), (owner, name, when)
open_world()
check_whole()
""",
        to,
        list(moments("close")),
    )


def test_a_ctrl_c_in_a_fuse_block_drops_its_calls(run_signals):
    run_signals("""
open_world()


def block():
    with synk.fuse():
        pending.append(plain(np.ones(2)))
        synk.broadcast(w, np.zeros(3))
        hit()
        time.sleep(10)


pending = []
interrupted(block)
error = error_of(pending[0].result)
assert isinstance(error, synk.FuseError) and "ended with an error" in str(error)
assert synk.get_value(1, w).tolist() == [0, 1, 2]
check_whole()
""")


def test_a_ctrl_c_that_waits_says_so_and_a_second_ends_the_workers(run_signals):
    done = run_signals("""
open_world()
workers = pids()[1:]
later(0.3, hit)
interrupted(lambda: f(np.array([NOTHING, SLEEP])))  # one second: it is waited for
check_whole()
later(0.3, hit)
later(1.2, hit)
began = time.monotonic()
interrupted(lambda: f(np.array([NOTHING, LONG])))
assert time.monotonic() - began < 3
assert all_gone_within(workers, 2)
check_broken_then_renew(error_of(lambda: plain(np.ones(2))), "interrupted")
""")
    assert done.stdout == ""
    said = done.stderr.splitlines()
    assert len(said) == 2 and said[0] == said[1], done.stderr
    assert "SIGINT" in said[0] and "a second one ends them" in said[0]


@pytest.mark.slow
def test_a_ctrl_c_while_compiling_reaches_the_script_and_the_cache_can_be_used(
    run_signals, tmp_path
):
    """The compiler gets it too, as it would from a terminal; nobody waits for a lock afterwards."""
    run_signals(
        """
import subprocess
synk.fork(2, use_gpu=False)
x = T.dvector("x")
w = theano.shared(np.arange(3.0), name="w")


def build():
    return synk.function([x], (T.tanh(x * 3).sum() + w.sum(), "sum"))


def wait_for_the_compiler():
    end = time.monotonic() + 30
    while time.monotonic() < end:
        for child in psutil.Process().children(recursive=True):
            if "cc1plus" in child.name():
                return hit()
        time.sleep(0.005)


for _ in range(2):
    threading.Thread(target=wait_for_the_compiler).start()
    interrupted(build)
assert build()(np.zeros(4)) == 6
other = "import synkhronos, theano, theano.tensor as T; x = T.dscalar(); "
other += "print(theano.function([x], T.cos(x) + 1)(0.0))"
done = subprocess.run([sys.executable, "-c", other], stdout=subprocess.PIPE, timeout=50)
assert done.stdout == b"2.0\\n"
synk.close()
""",
        timeout=120,
        environment={"THEANO_FLAGS": f"base_compiledir={tmp_path / 'cache'}"},
    )


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("to", TO)
def test_sigterm_and_sighup_end_the_script_and_its_workers(run_python, number, to):
    """The master's own end; with a handler of the script's, what that does, once, in the master."""
    done = run_python(
        SIGNALS
        + """
to, number = sys.argv[1], int(sys.argv[2])
open_world(3)
print(*pids()[1:], flush=True)
later(0.3, hit, to, number)
fused(NOTHING, NOTHING, SLEEP)
time.sleep(10)
""",
        to,
        int(number),
        check=False,
    )
    assert done.returncode == -number and done.stderr == ""
    end = time.monotonic() + 2
    while time.monotonic() < end and any(psutil.pid_exists(int(pid)) for pid in done.stdout.split()):
        time.sleep(0.02)
    assert not any(psutil.pid_exists(int(pid)) for pid in done.stdout.split())

    done = run_python(
        SIGNALS
        + """
to, number = sys.argv[1], int(sys.argv[2])


def save(*_):  # as a batch system asks for it: save, and end
    with open("saved", "a") as file:
        print(*synk.get_value(1, w), file=file)
    sys.exit(5)


signal.signal(number, save)
open_world(3)
later(0.3, hit, to, number)
time.sleep(10)
""",
        to,
        int(number),
        check=False,
    )
    assert done.returncode == 5 and done.stderr == "", done.stderr


ENDS = """
import ctypes

PR_SET_CHILD_SUBREAPER = 36
ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)  # to see whom a script leaves
to, number, handled, moments = sys.argv[1], int(sys.argv[2]), sys.argv[3] == "handled", eval(sys.argv[4])
faulthandler.cancel_dump_traceback_later()  # its thread is not there after a fork
x = T.dvector("x")


def handler(*_):
    os.write(1, b"h")
    sys.exit(5)


def play(phase, owner, name, when):
    # A script that is ended in this phase; `strike` has the signal sent.
    global MASTER
    MASTER = os.getpid()
    os.setsid()
    if handled:
        signal.signal(number, handler)
    if phase in ("fork", "start"):
        strike(eval(owner), name, to, when, 0, number)
        return open_world(3)
    open_world(3)
    if phase == "save":
        synk.save("checkpoint", {"step": 0})
    if phase == "restart":
        psutil.Process().children()[0].kill()
    if phase == "late":
        late = synk.function([x], (x.sum() + w.sum(), "sum"), mode="FAST_COMPILE")
    strike(eval(owner), name, to, when, 0, number)
    PHASES[phase]()


def step():
    with synk.fuse():
        plain(np.ones(6))
        synk.all_reduce(w)


def renew():
    synk.restart()
    step()


PHASES = {"call": step, "collective": step, "late": synk.distribute, "close": synk.close,
          "restart": renew, "save": lambda: synk.save("checkpoint", {"step": 1})}


def ended(pid):
    status = os.waitpid(pid, 0)[1]
    end = time.monotonic() + 2
    while time.monotonic() < end and psutil.Process().children():
        try:
            os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            break
        time.sleep(0.005)
    return -os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)


for moment in moments:
    pid = os.fork()
    if not pid:
        play(*moment)
        time.sleep(0.1)  # a signal that came last of all
        print("not ended", flush=True)
        os._exit(0)
    code = ended(pid)
    left = psutil.Process().children(recursive=True)
    for one in left:
        one.kill()
    assert not left, (moment, left)
    assert code == (5 if handled else -number), (moment, code)
    if moment[0] == "save":
        open_world(3)
        assert synk.load("checkpoint")["step"] in (0, 1)
        synk.close()
    sys.stdout.write(".")
"""

MOMENTS_OF_THE_END = [
    ("restart", "local.LocalTransport", "kill"),
    ("restart", "world.World", "_copy_out_of_store"),
    ("restart", "world.World", "_connect"),
    ("restart", "local.LocalTransport", "_fork_worker"),
    ("restart", "replicate.Replicate", "run"),
    ("save", "archive", "_make_unfinished"),
    ("save", "os", "replace"),
]


def moments_of_the_end(to):
    # Workers compile what is distributed late, which takes them seconds each time.
    late = ["late"] if to == "master" else []
    chosen = list(moments("fork", "start", "call", "collective", "close", *late))
    chosen += [(*one, when) for one in MOMENTS_OF_THE_END for when in ("before", "after")]
    return chosen


@pytest.mark.parametrize("how", ["handled", "default"])
@pytest.mark.parametrize(
    "number, to, every",
    [
        (signal.SIGTERM, "group", 3),
        pytest.param(signal.SIGTERM, "master", 1, marks=pytest.mark.slow),
        pytest.param(signal.SIGHUP, "group", 1, marks=pytest.mark.slow),
    ],
)
def test_sigterm_and_sighup_at_any_stage_end_the_script_and_its_workers(
    run_signals, number, to, every, how
):
    """In fork(), the start, a call, a collective, close(), restart() and save()."""
    chosen = moments_of_the_end(to)[::every]
    code = "from synkhronos.checkpoints import archive\n" + ENDS
    done = run_signals(code, to, int(number), how, chosen, timeout=200)
    assert done.stderr == ""
    assert done.stdout.replace(".", "") == (len(chosen) * "h" if how == "handled" else "")


def test_a_handler_that_exits_in_the_middle_of_a_command_leaves_nothing(run_signals):
    done = run_signals(
        """
signal.signal(signal.SIGTERM, lambda *_: sys.exit(5))
open_world(3)
later(0.3, hit, "group", signal.SIGTERM)
fused(SLEEP, NOTHING, SLEEP)
""",
        check=False,
    )
    assert done.returncode == 5 and done.stderr == ""


def test_a_call_from_a_signal_handler_in_the_middle_of_a_call_is_refused(run_signals):
    run_signals("""
said = []


def handler(*_):
    try:
        plain(np.ones(2))
    except synk.SynkhronosError as error:
        said.append(str(error))


signal.signal(signal.SIGUSR1, handler)
open_world()
later(0.3, hit, "group", signal.SIGUSR1)
f(np.array([SLEEP, SLEEP]))
assert len(said) == 1 and "one thread at a time" in said[0], said
check_whole()
assert plain(np.ones(2)) == [8]
""")


def test_an_uncaught_ctrl_c_prints_one_traceback(run_signals):
    """At the top of a script, in each phase; the workers say nothing."""
    for call in ("fused(NOTHING, SLEEP)", "fused(SLEEP, NOTHING)", "time.sleep(5)", "late()"):
        done = run_signals(
            f"""
open_world(3)


def late():
    while True:
        x = T.dvector("x")
        synk.function([x], x.sum(), mode="FAST_COMPILE")(np.ones(3))


later(0.3, hit)
{call}
""",
            check=False,
        )
        assert done.returncode in (-signal.SIGINT, 130)
        said = [line for line in done.stderr.splitlines() if "a second one ends them" not in line]
        assert said[0].startswith("Traceback") and said[-1].startswith("KeyboardInterrupt")
        assert done.stderr.count("Traceback") == 1, done.stderr
        assert done.stdout == ""


def test_a_ctrl_c_as_the_script_ends_leaves_nothing_and_prints_no_traceback(run_signals):
    for owner, name, when in [
        ("local.LocalTransport", "post", "before"),
        ("local.multiprocessing.process.BaseProcess", "join", "before"),
        ("threads.ThreadLimits", "restore", "after"),
    ]:
        done = run_signals(f"open_world(3)\nstrike({owner}, {name!r}, 'group', {when!r})\n", check=False)
        assert done.returncode == 0 and done.stderr == "", done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_a_ctrl_c_at_a_random_moment_of_a_whole_script_leaves_no_process(tmp_path, seed):
    """From the first import to the last step of the end: a demo, as started from a terminal."""
    for round in range(8):
        seconds = (0.05 + 0.15 * (6 * round + seed) / 6) % 4 + 0.02
        demo = subprocess.Popen(
            [sys.executable, str(ROOT / "demos" / "demo_3.py"), "--processes", "3"],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
            cwd=tmp_path,
        )  # fmt: skip
        time.sleep(seconds)
        try:
            psutil.Process(demo.pid).status()
            os.killpg(demo.pid, signal.SIGINT)
        except (psutil.NoSuchProcess, ProcessLookupError):
            pass
        _, errors = demo.communicate(timeout=30)
        left = [one.pid for one in psutil.process_iter(["cwd"]) if one.info["cwd"] == str(tmp_path)]
        assert not left
        # The demo says so in a word; while Python still imports, its own traceback comes.
        assert "import" in errors or errors in ("", "Interrupted.\n"), errors


# The hold itself


def test_a_hold_lets_the_second_signal_through_and_forgets_more():
    heard = []
    before = signal.signal(signal.SIGUSR2, lambda number, frame: heard.append(number))
    try:
        hold = DeferredSignal(signal.SIGUSR2)
        with hold:
            with hold:
                signal.raise_signal(signal.SIGUSR2)
            assert heard == []
            signal.raise_signal(signal.SIGUSR2)
            assert len(heard) == 1
            signal.raise_signal(signal.SIGUSR2)
            assert len(heard) == 1
        assert len(heard) == 1
        with hold:
            signal.raise_signal(signal.SIGUSR2)
        assert len(heard) == 2
        signal.raise_signal(signal.SIGUSR2)
        assert len(heard) == 3
    finally:
        signal.signal(signal.SIGUSR2, before)


def test_a_hold_leaves_signals_without_a_python_handler_alone():
    before = signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    try:
        with DeferredSignal(signal.SIGUSR2):
            signal.raise_signal(signal.SIGUSR2)
            assert signal.getsignal(signal.SIGUSR2) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGUSR2, before)


def test_a_hold_whose_second_signal_raises_puts_the_handler_back(monkeypatch):
    def refuse(*_):
        raise KeyError

    before = signal.signal(signal.SIGUSR2, refuse)
    try:
        hold = DeferredSignal(signal.SIGUSR2)
        for times in (2, 1, 2):  # each hold counts anew
            with pytest.raises(KeyError), hold:
                for _ in range(times):
                    signal.raise_signal(signal.SIGUSR2)
            assert signal.getsignal(signal.SIGUSR2) is refuse

        # As the hold ends: a call from there that raises the signal, and finds the right thread.
        monkeypatch.setattr(hold, "_main_thread", None)
        raise_it = functools.partial(signal.raise_signal, signal.SIGUSR2)
        for come_before in (0, 1, 2):
            with pytest.raises(KeyError), monkeypatch.context() as patch:
                patch.setattr(signals, "get_ident", lambda: None)
                with hold:
                    for _ in range(come_before):
                        signal.raise_signal(signal.SIGUSR2)
                    patch.setattr(signals, "get_ident", raise_it)
            assert signal.getsignal(signal.SIGUSR2) is refuse
    finally:
        signal.signal(signal.SIGUSR2, before)


def test_of_the_signals_that_end_a_script_each_waits_for_itself():
    heard = []
    before = {one: signal.signal(one, lambda *came: heard.append(came[0])) for one in ENDING}
    try:
        with defer_termination():
            signal.raise_signal(signal.SIGTERM)
            signal.raise_signal(signal.SIGINT)
            assert heard == []
            signal.raise_signal(signal.SIGTERM)
            assert heard == [signal.SIGTERM]
        assert heard == [signal.SIGTERM, signal.SIGINT]

        handlers = {one: signal.getsignal(one) for one in ENDING}
        handlers[signal.SIGHUP] = lambda *_: sys.exit(5)
        signal.signal(signal.SIGHUP, handlers[signal.SIGHUP])
        with pytest.raises(SystemExit), defer_termination():
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGHUP)
        assert heard[2:] == [signal.SIGINT]
        assert {one: signal.getsignal(one) for one in ENDING} == handlers
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)


def test_the_moments_name_functions_that_there_are():
    """A moment that a change of the library has renamed would be no test any more."""
    used = {name for phase in MOMENTS.values() for _, name in phase}
    used |= {name for _, _, name in MOMENTS_OF_THE_END}
    used -= {"Semaphore", "fork", "join", "replace"}
    defined = set()
    for path in (ROOT / "synkhronos").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                defined.add(node.name)
    assert used <= defined | {"start"}, used - defined
