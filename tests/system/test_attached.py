"""Tests of processes that attach to a listener, which has not forked them."""

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time

import numpy as np
import pytest
from processes import ROOT, own_process

import synkhronos as synk

LIMIT = 120


def name():
    return f"test-{os.getpid()}-{os.urandom(4).hex()}"


def start(listener_name, code):
    """Start a process that attaches as ``attached``, and runs code with ``np`` and ``synk``."""
    text = "import os, sys\nimport numpy as np\nimport synkhronos as synk\n"
    text += f"attached = synk.attach({listener_name!r})\n"
    return subprocess.Popen(
        [sys.executable, "-c", text + textwrap.dedent(code)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip


def outcome(process, code=0):
    out, err = process.communicate(timeout=LIMIT)
    if process.returncode != code:
        pytest.fail(f"exit code {process.returncode}, not {code}\n{out}{err}", False)
    return out + err


def serve(listener, answer=lambda request, pid, info: info):
    return listener.serve(answer)


@pytest.mark.slow
@own_process(timeout=LIMIT)
def test_collectives_of_attached_processes_are_exact_and_in_step():
    code = """
    for length in (1, 1000, 100_000):
        own = np.random.RandomState(attached.rank).normal(size=length)
        all_ = [np.random.RandomState(rank).normal(size=length) for rank in range(attached.size)]
        for op, f in (("sum", sum), ("avg", lambda one: sum(one) / len(one)), ("max", np.max)):
            expected = np.max(all_, axis=0) if op == "max" else f(all_)
            np.testing.assert_allclose(attached.all_reduce(own, op), expected, rtol=1e-12)
    both = attached.all_reduce([np.full(3, attached.rank), 2.0 * attached.rank], "sum")
    assert both[0].tolist() == [3, 3, 3] and both[1] == 6, both
    assert attached.exchange({"rank": attached.rank}) == [{"rank": rank} for rank in range(3)]
    for number in range(300):  # the registers are used again and again
        assert attached.exchange(number + attached.rank) == [number + rank for rank in range(3)]
    attached.barrier()
    """
    own = name()
    with synk.Listener(own, size=3) as listener:
        started = [start(own, code) for _ in range(3)]
        assert serve(listener) == 0
        for one in started:
            outcome(one)


@pytest.mark.slow
@own_process(timeout=LIMIT)
def test_no_change_of_a_center_is_lost_and_locks_exclude():
    code = """
    import theano, time
    x = theano.shared(np.full(5, 1000.0 * attached.rank))
    center = attached.center(x)
    for _ in range(200):
        x.set_value(x.get_value() + 1)
        center.push()
    path = attached.ask("path")
    for _ in range(50):
        with attached.lock("file"):
            number = int(open(path).read())
            open(path, "w").write(str(number + 1))
    """
    own, path = name(), os.path.abspath("number")
    with open(path, "w") as file:
        file.write("0")
    with synk.Listener(own, size=2) as listener:
        started = [start(own, code + "\n    print(center.value()[0])\n") for _ in range(2)]
        assert serve(listener, lambda request, pid, info: path) == 0
        said = [outcome(one) for one in started]
    # The last one sees the changes of both, on the values of the first.
    assert {"400.0\n", "1400.0\n"} & set(said), said
    assert open(path).read() == "100"


@own_process(timeout=LIMIT)
def test_a_lock_is_waited_for_up_to_a_time_limit_and_free_when_its_holder_has_died():
    code = """
    lock = attached.lock()
    if attached.rank:
        assert lock.acquire()
    attached.barrier()
    if not attached.rank:
        assert lock.acquire(timeout=0.1) is False
    attached.barrier()
    if attached.rank:
        os.kill(os.getpid(), 9)
    assert lock.acquire(timeout=60) is True
    """
    own = name()
    with synk.Listener(own, size=2) as listener:
        started = [start(own, code) for _ in range(2)]
        assert serve(listener) == 1
        assert sorted(one.wait() for one in started) == [-signal.SIGKILL, 0]
        for one in started:
            one.communicate()


@own_process(timeout=LIMIT)
def test_wrong_uses_of_attached_processes_are_errors():
    code = """
    def fails(f, text):
        try:
            f()
        except Exception as error:
            assert text in str(error), error
        else:
            raise AssertionError("no error")

    fails(lambda: attached.all_reduce(np.zeros(2), "sum"), "need their number")
    fails(lambda: attached.all_reduce(np.zeros(2), "mean"), "op: expected one of")
    fails(lambda: attached.center([], "x"), "at least one")
    fails(lambda: attached.lock(3), "lock: name: expected a string")
    assert attached.receive(timeout=0.01) is None
    lock = attached.lock()
    assert lock.acquire() is True
    attached.close()
    attached.close()
    fails(lambda: attached.ask("x"), "no longer attached")
    fails(lambda: synk.attach("there is none", timeout=0.1), "there is no controller")
    """
    own = name()
    with synk.Listener(own) as listener:
        with pytest.raises(synk.SynkhronosError, match="another process listens"):
            synk.Listener(own)
        process = start(own, code)
        assert serve(listener) == 0
        outcome(process)
    for arguments in ((3,), (own, 0), (own, 1.5)):
        with pytest.raises((TypeError, ValueError), match="Listener: "):
            synk.Listener(*arguments)


@own_process(timeout=LIMIT)
def test_an_answer_that_comes_too_late_is_not_that_to_the_next_question():
    code = """
    import time

    def too_late():
        try:
            attached.ask("late", timeout=0.01)
        except synk.SynkhronosError as error:
            assert "no answer within 0.01 seconds" in str(error), error
        else:
            raise AssertionError("no error")

    too_late()
    assert attached.ask("next") == "next"  # asked before the late answer has come
    too_late()
    while not attached._connection.poll(0):
        time.sleep(0.01)
    assert attached.receive(timeout=0.01) is None
    assert attached.ask("last") == "last"
    """
    own = name()

    def answer(request, pid, info):
        time.sleep(0.5 if request == "late" else 0)
        return request

    with synk.Listener(own) as listener:
        process = start(own, code)
        assert serve(listener, answer) == 0
        outcome(process)


@pytest.mark.slow
@own_process(timeout=LIMIT)
def test_processes_at_different_collectives_get_errors_that_list_them():
    own = name()
    with synk.Listener(own, size=2) as listener:
        code = "attached.all_reduce(np.zeros(2 + attached.rank), 'sum')"
        started = [start(own, code) for _ in range(2)]
        serve(listener)
        for one in started:
            said = outcome(one, 1)
            assert "different collectives" in said and "float64[2]" in said and "float64[3]" in said


@own_process(timeout=LIMIT)
def test_a_process_that_dies_in_a_collective_does_not_keep_the_others_waiting():
    code = """
    if attached.rank:
        os.kill(os.getpid(), 9)
    attached.barrier()
    """
    own = name()
    with synk.Listener(own, size=2) as listener:
        started = [start(own, code) for _ in range(2)]
        assert serve(listener) == 1
        codes = sorted(one.wait() for one in started)
        said = "".join(one.communicate()[1] for one in started)
    assert codes == [-signal.SIGKILL, 1] and "the attached process 1 has ended" in said


@pytest.mark.slow
@own_process(timeout=LIMIT)
def test_an_error_of_the_answer_reaches_both_sides():
    own = name()
    with synk.Listener(own) as listener:
        process = start(own, "attached.ask('x')")
        with pytest.raises(ZeroDivisionError):
            serve(listener, lambda request, pid, info: 1 / 0)
    assert "the controller raised an exception" in outcome(process, 1)


@pytest.mark.slow
@own_process(timeout=LIMIT)
def test_a_listener_that_ends_ends_the_waits_of_the_attached():
    code = """
    attached.ask("here")
    attached.receive()
    """
    own = name()
    listener, came = synk.Listener(own), []
    process = start(own, code)
    listener.serve(lambda request, pid, info: came.append(pid), lambda: bool(came))
    assert came == [process.pid] == listener.pids
    listener.close()
    assert "has ended" in outcome(process, 1)


@own_process(timeout=LIMIT)
@pytest.mark.parametrize("size, said", [(None, "1 process to attach, but none"), (3, "3 .* but 1 came")])
def test_processes_that_never_come_are_waited_for_up_to_a_time_limit(size, said):
    own = name()
    with synk.Listener(own, size=size) as listener:
        if size:
            with_thread(listener, own)
        with pytest.raises(synk.SynkhronosError, match=f"{said}.* no other within 0.3 seconds"):
            listener.serve(lambda *_: None, timeout=0.3)
    with synk.Listener(own) as listener:
        for wrong in ("soon", -1):
            with pytest.raises((TypeError, ValueError), match="Listener.serve: timeout: expected"):
                listener.serve(lambda *_: None, timeout=wrong)


@own_process(timeout=LIMIT)
def test_a_process_that_comes_during_an_answer_is_not_late():
    own, threads = name(), []

    def come_and_ask():
        with synk.attach(own) as attached:
            attached.ask("x")

    def start_thread():
        threads.append(threading.Thread(target=come_and_ask))
        threads[-1].start()

    def answer(request, pid, info):
        if len(threads) < 2:
            start_thread()  # it waits at the socket, and is accepted after this answer
            time.sleep(2.5)

    with synk.Listener(own, size=2) as listener:
        start_thread()
        assert listener.serve(answer, timeout=2) == 0
        for thread in threads:
            thread.join()


def with_thread(listener, own):
    left = threading.Event()

    def come_and_go():
        synk.attach(own).close()
        left.set()

    thread = threading.Thread(target=come_and_go)
    thread.start()
    listener.serve(lambda *_: None, lambda: left.is_set() and not listener.pids)
    thread.join()


@own_process(timeout=LIMIT)
def test_arrays_are_received_once_and_in_order_also_from_a_forked_process():
    code = """
    while True:
        received = attached.receive(timeout=60)
        if not isinstance(received, np.ndarray):
            break
        assert attached.ask("got", int(received[0])) is None
    """
    own, got = name(), []
    with synk.Listener(own, size=2) as listener:
        pid = os.fork()
        if not pid:
            for number in range(30):
                listener.send(np.full(1000, number))
            for _ in range(2):
                listener.send([np.zeros(1)])
            os._exit(0)
        started = [start(own, code) for _ in range(2)]
        assert serve(listener, lambda request, pid, info: got.append(info)) == 0
        assert os.waitpid(pid, 0)[1] == 0
        for one in started:
            outcome(one)
    assert sorted(got) == list(range(30))
