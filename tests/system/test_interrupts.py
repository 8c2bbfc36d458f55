"""Tests of signals at any moment of a program: the world stays consistent, or is closed cleanly."""

import itertools
import os
import signal
import sys
import threading
import time

import numpy as np
import psutil
import pytest
import theano
import theano.tensor as tt
from prelude import LONG, NOTHING, SLEEP, all_gone_within, error_of, gone, interrupt, later, open_world
from processes import own_process
from striking import Moment, end_of, interrupted, send, strike

import synkhronos as synk
from synkhronos.host.signals import DeferredSignal
from synkhronos.world.threads import ThreadLimits
from synkhronos.world.world import current_world, world_exists

LOCAL = "synkhronos.transports.local"
ENGINE = "synkhronos.engines.theano.engine:TheanoEngine"
PLACES = {
    "fork": [
        f"{LOCAL}:Semaphore",
        "synkhronos.world.launch:make_local",
        f"{LOCAL}:SharedMemory",
        "synkhronos.world.launch:enter_world",
    ],
    "start": [
        f"{LOCAL}:LocalTransport.start",
        "multiprocessing.process:BaseProcess.start",
        "os:fork",
        f"{ENGINE}.before_fork",
        f"{LOCAL}:LocalTransport.collect",
        "synkhronos.functions.replicate:load_functions",
    ],
    "late": [
        f"{ENGINE}.dumps",
        f"{LOCAL}:LocalTransport.post",
        f"{LOCAL}:LocalTransport.collect",
        "synkhronos.stores.memory:SharedMemory.trim",
    ],
    "call": [
        f"{LOCAL}:LocalTransport.post",
        f"{LOCAL}:Mailbox.put",
        f"{ENGINE}.call",
        f"{LOCAL}:LocalTransport.collect",
    ],
    "collective": [
        "synkhronos.comms.shm:SharedMemoryCommunicator.reduce_part",
        f"{LOCAL}:LocalTransport.exchange",
        f"{LOCAL}:LocalTransport.barrier",
        f"{LOCAL}:LocalTransport.collect",
    ],
    "close": [
        f"{LOCAL}:LocalTransport.post",
        f"{LOCAL}:LocalTransport.close",
        "multiprocessing.process:BaseProcess.join",
        "synkhronos.stores.memory:SharedMemory.trim_others",
        "synkhronos.world.rank_state:RankState.copy_out_of_store",
    ],
    "restart": [
        "synkhronos.transports.children:Children.kill",
        "synkhronos.world.rank_state:RankState.copy_out_of_store",
        "synkhronos.world.world:World._connect",
        f"{LOCAL}:LocalTransport._fork_worker",
        "synkhronos.functions.replicate:load_functions",
    ],
    "program": [
        f"{LOCAL}:LocalTransport.attend",
        f"{LOCAL}:LocalTransport.post",
        f"{LOCAL}:LocalTransport.collect",
        "synkhronos.transports.children:_ForkedServiceProcess.end",
        "synkhronos.programs.spmd:pack",
        "synkhronos.services.controller:Controller.start",
        "synkhronos.services.controller:ControllerChannel.ask",
        "synkhronos.services.registers:Register.write",
        "synkhronos.services.messages:Mailbox.publish",
        "synkhronos.services.messages:Mailbox.take",
        "synkhronos.programs.own_call:prepare",
        "synkhronos.services.stripes:Stripes.change",
        "synkhronos.programs.spmd:Results",
        "synkhronos.stores.named_memory:Lock.try_acquire",
        "synkhronos.stores.named_memory:Lock.release",
        "synkhronos.stores.named_memory:NamedMemory.clear",
        "synkhronos.stores.named_memory:NamedMemory._create",
    ],
    "save": ["synkhronos.checkpoints.archive:_make_unfinished", "os:replace"],
}

# The signal goes to all processes of the program, as from a terminal, or only to the master.
TO = ["group", pytest.param("master", marks=pytest.mark.slow)]


def moments(*phases):
    return [
        Moment(phase, place, when)
        for phase in phases
        for place, when in itertools.product(PLACES[phase], ("before", "after"))
    ]


def check_whole(world):
    """Check that the world is usable, and that its replicas are equal."""
    world.check_usable()
    assert len({one.tobytes() for one in synk.gather([world.w])[0]}) == 1


@own_process
@pytest.mark.parametrize("to", TO)
def test_a_ctrl_c_in_fork_or_its_start_leaves_a_usable_world_or_none(to):
    """Interrupt each stage, e.g. before a semaphore is unlinked, or between the start of two workers."""
    threads = ThreadLimits().before
    for moment in moments("fork", "start"):
        if moment.phase == "fork":
            strike(moment, to)
            interrupted(lambda: synk.fork(3, use_gpu=False))
        else:
            synk.fork(3, use_gpu=False)
            x = tt.dvector("x")
            function = synk.function([x], (x.sum(), "sum"), mode="FAST_COMPILE")
            strike(moment, to)
            interrupted(synk.distribute)
            assert function(np.ones(4)) == 4, moment
        workers = psutil.Process().children()
        assert len(workers) in (0, 2), (moment, workers)
        if world_exists():
            assert current_world().broken is None, moment
            synk.close()
        assert psutil.Process().children() == [], moment
        assert ThreadLimits().before == threads, "BLAS has its threads again"


@own_process
@pytest.mark.parametrize("to", TO)
def test_a_ctrl_c_in_a_command_lets_it_end_on_every_rank(to):
    """Interrupt a call, a fused step with a collective, and a late function.

    Afterwards, all ranks must have executed the same operations.
    """
    world = open_world(3, verify="off")  # otherwise the first call is interrupted before it begins
    x = tt.dvector("x")
    count = theano.shared(0.0, name="count")
    step = synk.function([x], x.mean(), updates=[(count, count + 1)], mode="FAST_COMPILE")
    synk.distribute()
    workers = world.workers()

    def call():
        step(np.ones(6))

    def fused_step():
        with synk.fuse():
            call()
            synk.all_reduce(world.w)

    calls = {"call": call, "collective": fused_step, "late": synk.distribute}
    for moment in moments(*calls):
        if moment.phase == "late":
            late = synk.function([x], (x.sum() + world.w.sum(), "sum"), mode="FAST_COMPILE")
        before = count.get_value()
        strike(moment, to)
        interrupted(calls[moment.phase])
        assert current_world().broken is None, moment
        counts = [synk.get_value(rank, count) for rank in range(3)]
        assert counts == [before + (moment.phase != "late")] * 3, (moment, counts)
        check_whole(world)
        if moment.phase == "late":
            assert late(np.ones(3)) == 12
        assert world.workers() == workers, moment


@own_process
@pytest.mark.parametrize("to", TO)
def test_a_ctrl_c_in_the_verification_of_a_first_call_changes_nothing(to):
    world = open_world(3)
    x, count = tt.dvector("x"), theano.shared(0.0, name="count")
    for moment in moments("call"):
        step = synk.function([x], x.mean(), updates=[(count, count + 1)], mode="FAST_COMPILE")
        synk.distribute()
        before = count.get_value()
        strike(moment, to)
        interrupted(lambda step=step: step(np.ones(6)))
        assert current_world().broken is None, moment
        assert [synk.get_value(rank, count) for rank in range(3)] == [before] * 3, moment
        check_whole(world)
        assert step(np.ones(6)) == 1


def exchange(rank, world, f):
    """Use all that a program can use."""
    center, came = rank.center(world.w, "numbers"), 0
    for batch in rank.minibatches(4, 1, epochs=3, seed=0):
        world.w.set_value(world.w.get_value() + 1)
        assert rank.call(f, np.ones(4), batch=batch).tolist() == [2]
        center.push()
        rank.send(1 - rank.rank, batch)
        while rank.receive():
            came += 1
        assert rank.ask("next", len(batch)) == ("next", rank.rank, 1)
    return center.value()


@own_process
@pytest.mark.parametrize("to", TO)
@pytest.mark.parametrize("twice", [False, True], ids=["once", "twice"])
def test_a_ctrl_c_in_a_program_stops_it_and_the_next_one_runs(to, twice):
    """The second of two ends the workers if it comes while they are in the program."""
    world = open_world(2)
    x = tt.dvector("x")
    f = synk.function([x], (2 * x, "gather"), mode="FAST_COMPILE")

    def run():
        return synk.spmd(exchange, world, f, controller=lambda *question: (*question[:2], 1))

    synk.distribute()
    chosen = moments("program")
    for moment in chosen[twice::2] if to == "group" else chosen:
        if twice and moment.place.endswith("pack"):
            continue  # the first one is not deferred there
        for _ in range(1 + twice):
            strike(moment, to)
        try:
            results = run()
            assert not twice and results.interrupted and results.stopped, moment
        except KeyboardInterrupt:
            pass
        assert twice or current_world().broken is None, moment
        if current_world().broken is not None:
            synk.restart()
        synk.broadcast(world.w, np.zeros(3))
        sums = run()
        assert not sums.stopped and np.max(sums, axis=0).tolist() == [12] * 3, (moment, sums)
        assert len(psutil.Process().children()) == 1, moment
        assert current_world().rank_state.store.named_memory._file.held == {}, moment
    synk.close()
    assert psutil.Process().children() == []


@own_process
@pytest.mark.parametrize("to", TO)
def test_a_ctrl_c_in_close_comes_when_all_is_closed(to):
    for moment in moments("close"):
        workers = open_world(3).workers()
        strike(moment, to)
        interrupted(synk.close)
        assert not world_exists(), moment
        assert all(map(gone, workers)), moment
    check_whole(open_world())


@own_process
def test_a_ctrl_c_in_a_fuse_block_drops_its_calls():
    world = open_world()
    pending = []

    def block():
        with synk.fuse():
            pending.append(world.plain(np.ones(2)))
            synk.broadcast(world.w, np.zeros(3))
            interrupt()
            time.sleep(10)

    interrupted(block)
    error = error_of(pending[0].result)
    assert isinstance(error, synk.FuseError) and "ended with an error" in str(error)
    assert synk.get_value(1, world.w).tolist() == [0, 1, 2]
    check_whole(world)


def be_interrupted_once_and_twice():
    world = open_world()
    workers = world.workers()
    later(0.3, interrupt)
    interrupted(lambda: world.act(NOTHING, SLEEP))  # waits until SLEEP, of one second, has ended
    check_whole(world)
    later(0.3, interrupt)
    later(1.2, interrupt)
    began = time.monotonic()
    interrupted(lambda: world.act(NOTHING, LONG))
    assert time.monotonic() - began < 3
    assert all_gone_within(workers, 2)
    world.check_broken(error_of(lambda: world.plain(np.ones(2))), "interrupted")


def test_a_ctrl_c_that_waits_says_so_and_a_second_ends_the_workers(programs):
    done = programs.run(be_interrupted_once_and_twice).check()
    assert done.stdout == ""
    said = done.stderr.splitlines()
    assert len(said) == 2 and said[0] == said[1], done.stderr
    assert "SIGINT" in said[0] and "a second one ends them" in said[0]


@pytest.mark.slow
def test_a_ctrl_c_while_compiling_reaches_the_script_and_the_cache_can_be_used(run_python, tmp_path):
    """The compiler is interrupted too, as from a terminal. No lock may be left that blocks others.

    The compile cache is empty. Theano reads its path from the environment at start.
    """
    run_python(
        "interrupt_the_compiler.py",
        environment={"THEANO_FLAGS": f"base_compiledir={tmp_path / 'cache'}"},
    )


def be_ended_in_a_step(to, number):
    world = open_world(3)
    print(*world.workers(), flush=True)
    later(0.3, send, to, number)
    world.fused(NOTHING, NOTHING, SLEEP)
    time.sleep(10)


def save_and_exit(to, number):
    def save(*_):  # as on a batch system, which sends a signal before a job's time is up
        print(*synk.get_value(1, world.w), flush=True)
        sys.exit(5)

    signal.signal(number, save)
    world = open_world(3)
    later(0.3, send, to, number)
    time.sleep(10)


def check_end(program, *args, code):
    assert end_of(program, *args) == code, args


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("to", TO)
def test_sigterm_and_sighup_end_the_script_and_its_workers(programs, number, to):
    """The signal ends the master. If the script has a handler, it runs once, in the master."""
    done = programs.run(check_end, be_ended_in_a_step, to, number, code=-number).check()
    assert len(done.stdout.split()) == 2 and done.stderr == ""
    assert all(map(gone, map(int, done.stdout.split())))

    done = programs.run(save_and_exit, to, number)
    assert done.returncode == 5 and done.stderr == "", done
    assert done.stdout == "0.0 1.0 2.0\n"


def be_ended(moment, to, number, handled):
    """Run into a signal at a moment, which ends this process."""

    def handle(*_):
        os.write(1, b"h")
        sys.exit(5)

    if handled:
        signal.signal(number, handle)
    if moment.phase in ("fork", "start"):
        strike(moment, to, number)
        open_world(3)
    else:
        world = open_world(3)

        def step():
            with synk.fuse():
                world.plain(np.ones(6))
                synk.all_reduce(world.w)

        def restart():
            synk.restart()
            step()

        if moment.phase == "save":
            synk.save("checkpoint", {"step": 0})
        if moment.phase == "restart":
            psutil.Process().children()[0].kill()
        if moment.phase == "late":
            x = tt.dvector("x")
            world.late = synk.function([x], (x.sum() + world.w.sum(), "sum"), mode="FAST_COMPILE")
        strike(moment, to, number)
        {
            "call": step,
            "collective": step,
            "late": synk.distribute,
            "close": synk.close,
            "restart": restart,
            "save": lambda: synk.save("checkpoint", {"step": 1}),
        }[moment.phase]()
    time.sleep(0.1)  # let the signal arrive if it was sent at the very end


def moments_of_the_end(to):
    # "late" is left out in the other case, as workers take seconds to compile late functions.
    late = ["late"] if to == "master" else []
    return moments("fork", "start", "call", "collective", "close", *late, "restart", "save")


def be_ended_at_each_moment(to, number, handled, every):
    for moment in moments_of_the_end(to)[::every]:
        code = end_of(be_ended, moment, to, number, handled)
        assert code == (5 if handled else -number), (moment, code)
        if moment.phase == "save":
            world = open_world(3)
            assert synk.load("checkpoint")["step"] in (0, 1)
            world.plain(np.ones(6))
            synk.close()


@pytest.mark.parametrize("handled", [True, False], ids=["handled", "default"])
@pytest.mark.parametrize(
    "number, to, every",
    [
        pytest.param(signal.SIGTERM, "group", 3, marks=pytest.mark.slow),
        pytest.param(signal.SIGTERM, "master", 1, marks=pytest.mark.slow),
        pytest.param(signal.SIGHUP, "group", 1, marks=pytest.mark.slow),
    ],
)
def test_sigterm_and_sighup_at_any_stage_end_the_script_and_its_workers(
    programs, tmp_path, number, to, every, handled
):
    """The stages are fork(), the start, a call, a collective, close(), restart() and save()."""
    done = programs.run(
        be_ended_at_each_moment, to, number, handled, every, timeout=200, cwd=tmp_path
    ).check()
    times = len(moments_of_the_end(to)[::every])
    assert done.stdout == (times * "h" if handled else "") and done.stderr == ""


@own_process
def test_a_handler_that_is_set_after_the_start_is_the_masters_alone():
    heard, world = [], open_world(3)
    numbers = [signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU]
    for number in numbers:
        signal.signal(number, lambda number, frame: heard.append(number))
        send("group", number)
        world.plain(np.ones(6))
    assert heard == numbers
    for number in numbers:
        signal.signal(number, signal.SIG_DFL)
    psutil.Process().children()[0].terminate()  # nobody handles it any more
    with pytest.raises(synk.WorldBrokenError, match="SIGTERM"):
        world.act(SLEEP, SLEEP)


def add_functions(world):
    while True:
        x = tt.dvector("x")
        synk.function([x], x.mean(), mode="FAST_COMPILE")(np.ones(3))


OCCUPATIONS = {
    "a worker computes": lambda world: world.fused(NOTHING, SLEEP),
    "the master computes": lambda world: world.fused(SLEEP, NOTHING),
    "no command": lambda world: time.sleep(5),
    "late functions": add_functions,
}


def be_interrupted(occupation):
    world = open_world(3)
    later(0.3, interrupt)
    OCCUPATIONS[occupation](world)


@pytest.mark.parametrize("occupation", OCCUPATIONS)
def test_an_uncaught_ctrl_c_prints_one_traceback(programs, occupation):
    """The traceback is the master's, in each phase of a script. The workers print nothing."""
    done = programs.run(be_interrupted, occupation)
    # After the traceback Python ends by the signal itself, by which a shell sees why: not with 130.
    assert done.returncode == -signal.SIGINT
    said = [line for line in done.stderr.splitlines() if "a second one ends them" not in line]
    assert said[0].startswith("Traceback") and said[-1].startswith("KeyboardInterrupt")
    assert done.stderr.count("Traceback") == 1, done.stderr
    assert done.stdout == ""


def be_interrupted_at_the_end(moment):
    open_world(3)
    strike(moment, "group")


@pytest.mark.parametrize(
    "place, when",
    [
        (f"{LOCAL}:LocalTransport.post", "before"),
        ("multiprocessing.process:BaseProcess.join", "before"),
        ("synkhronos.world.threads:ThreadLimits.restore", "after"),
    ],
)
def test_a_ctrl_c_as_the_script_ends_leaves_nothing_and_prints_no_traceback(programs, place, when):
    done = programs.run(be_interrupted_at_the_end, Moment("end", place, when))
    assert done.returncode == 0 and done.stderr == "", done.stderr


@own_process
def test_the_script_may_set_and_restore_handlers_between_holds():
    heard, number, hold = [], signal.SIGUSR2, DeferredSignal(signal.SIGUSR2)

    def raise_inside(times=1):
        """Return what has been heard inside a hold, and altogether."""
        heard.clear()
        with hold:
            for _ in range(times):
                signal.raise_signal(number)
            inside = list(heard)
        return inside, list(heard)

    signal.signal(number, lambda *_: heard.append("first"))
    assert raise_inside() == ([], ["first"])
    before = signal.signal(number, lambda *_: heard.append("second"))
    assert raise_inside() == ([], ["second"])
    signal.signal(number, before)  # a handler that was installed by the hold
    assert raise_inside(times=3) == (["first"], ["first"])

    def both(*came):
        heard.append("both")
        before(*came)

    signal.signal(number, both)
    assert raise_inside(times=2) == (["both", "first"],) * 2
    with hold:
        signal.signal(number, signal.SIG_IGN)
    hold.remove()  # not its own any more
    assert signal.getsignal(number) == signal.SIG_IGN
    assert raise_inside() == ([], [])


@own_process
def test_asyncio_finds_pythons_own_handler_after_a_hold():
    """Otherwise, Ctrl-C would no longer cancel the main task, but raise an exception anywhere in it."""
    import asyncio

    signal.signal(signal.SIGINT, signal.default_int_handler)
    with pytest.raises(KeyboardInterrupt), DeferredSignal(signal.SIGINT):
        signal.raise_signal(signal.SIGINT)
    cancelled = []

    async def sleep():
        try:
            with DeferredSignal(signal.SIGINT):  # around the handler of asyncio
                signal.raise_signal(signal.SIGINT)
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.append(True)
            raise

    with pytest.raises(KeyboardInterrupt):
        asyncio.run(sleep())
    assert cancelled
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@own_process
def test_a_world_that_is_closed_restores_the_handler_of_ctrl_c():
    for installed in (signal.default_int_handler, lambda *_: None):
        signal.signal(signal.SIGINT, installed)
        synk.fork(2, use_gpu=False)
        x = tt.dvector()
        assert synk.function([x], (x.sum(), "sum"))(np.ones(2)) == 2
        synk.close()
        assert signal.getsignal(signal.SIGINT) is installed
    synk.fork(2, use_gpu=False)
    thread = threading.Thread(target=synk.close)  # where handlers cannot be changed
    thread.start()
    thread.join()
    assert not world_exists()
    signal.raise_signal(signal.SIGINT)  # still reaches the script's own handler
    signal.signal(signal.SIGINT, signal.default_int_handler)
