"""What scripts do in odd orders and odd places: in a worker, in threads, after deaths, as they end."""

import pytest
from test_failures import PRELUDE


@pytest.fixture
def run_script(run_python):
    """As `run_python`, with what the scripts share put first."""

    def run(code, *arguments, **kwargs):
        return run_python(PRELUDE + code, *arguments, **{"timeout": 45, **kwargs})

    return run


@pytest.mark.parametrize("body", ["return 5", "raise OSError('no words')"])
def test_an_exception_whose_text_cannot_be_had_is_a_worker_error(run_script, body):
    run_script(f"""
class Speechless(Exception):
    def __init__(self):  # Theano cannot make it anew with words of its own
        super().__init__()

    def __str__(self):
        {body}


def speechless():
    raise Speechless


ACTIONS[RAISE] = speechless
open_world()
error = error_of(lambda: f(np.array([NOTHING, RAISE])))
assert type(error) is synk.WorkerError and error.rank == 1, repr(error)
assert "rank 1" in str(error) and "in speechless" in str(error)
check_usable()
""")


def test_a_worker_that_closes_the_world_gets_an_error_and_harms_nothing(run_script):
    run_script("""
ACTIONS[RAISE] = synk.close
open_world(3)
data = synk.data(np.ones((600, 600)))
error = error_of(lambda: f(np.array([NOTHING, RAISE, NOTHING])))
assert type(error) is synk.WorkerError and error.type_name == "SynkhronosError", repr(error)
assert "close(): this process is rank 1, a worker" in str(error)
assert (data.data == 1).all()
check_usable(3)
""")


def test_what_a_worker_forks_can_forget_the_world_and_harms_nothing(run_script):
    run_script("""
def in_child():
    child = os.fork()
    if not child:
        try:
            synk.close()
            synk.fork(1, use_gpu=False)
            synk.close()
        except BaseException:
            os._exit(1)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0


ACTIONS[RAISE] = in_child
open_world(3)
f(np.array([NOTHING, RAISE, NOTHING]))
check_usable(3)
""")


def test_a_call_from_another_thread_is_no_part_of_an_open_fuse_block(run_script):
    run_script("""
open_world()
with synk.fuse():
    pending = plain(np.ones(4))
    errors = []
    thread = threading.Thread(target=lambda: errors.append(error_of(lambda: plain(np.ones(4)))))
    thread.start()
    thread.join()
assert type(errors[0]) is synk.SynkhronosError and "one thread at a time" in str(errors[0])
assert pending.result() == [10]
check_usable()
""")


def test_who_calls_while_another_thread_closes_is_not_told_of_an_interruption(run_script):
    run_script("""
open_world()
transport = synk.world.world.current_world().transport
errors = []
end_workers = transport.close


def meanwhile(grace):
    thread = threading.Thread(target=lambda: errors.append(error_of(lambda: plain(np.ones(2)))))
    thread.start()
    thread.join()
    end_workers(grace)


transport.close = meanwhile
synk.close()
assert type(errors[0]) is synk.WorldBrokenError and "close() has begun" in str(errors[0]), errors
""")


def test_a_memmap_that_has_lost_its_name_is_there_after_a_restart(run_script):
    run_script("""
np.arange(10.0).tofile("numbers")
numbers = np.memmap("numbers", float, "r+")
open_world(3)
data = synk.data(numbers)
assert plain(data) == [45 + 9]
os.unlink("numbers")
for n in (3, 2):
    synk.restart(n)
    assert plain(data) == [45 + 3 * n]
numbers[0] = 100
assert plain(data) == [145 + 6]
""")


def test_deaths_in_a_row_and_as_workers_start_can_each_be_followed_by_a_restart(run_script):
    run_script("""
from synkhronos.transports.local import LocalTransport

become_worker = LocalTransport._become_worker


def die(transport, rank, *args):
    if rank == 2:
        os._exit(9)
    become_worker(transport, rank, *args)


open_world(3)
check_usable(3)
for _ in range(3):
    for worker in multiprocessing.active_children():
        worker.kill()
    error = error_of(lambda: plain(np.ones(3)))
    assert "rank 1 (killed by SIGKILL), rank 2 (killed by SIGKILL)" in str(error)
    LocalTransport._become_worker = die
    for _ in range(2):
        synk.restart()
        for _ in range(2):
            error = error_of(lambda: plain(np.ones(3)))
            assert type(error) is synk.WorldBrokenError and "rank 2 (exit code 9)" in str(error)
    LocalTransport._become_worker = become_worker
    synk.restart()
    check_usable(3)
""")


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_world_made_as_the_script_ends_leaves_nothing(run_python, when):
    """Functions of ``atexit`` that were registered before the library's run after it has closed."""
    handler = """
import atexit, sys


def at_exit():
    open_world(3)
    check_usable(3)
    print(*pids()[1:], flush=True)


"""
    register = "atexit.register(at_exit)\n"
    done = run_python(
        handler + (register + PRELUDE if when == "before" else PRELUDE + register), timeout=45
    )
    assert len(done.stdout.split()) == 2 and done.stderr == ""


def test_a_handler_that_raises_ends_the_command_with_its_exception(run_script):
    """As scripts do it for a time limit: in the master's share, or where the master waits."""
    run_script("""
class TimeIsUp(Exception):
    pass


def handler(*_):
    raise TimeIsUp


signal.signal(signal.SIGALRM, handler)
open_world(3)
signal.setitimer(signal.ITIMER_REAL, 0.3)
error = error_of(lambda: fused(SLEEP, NOTHING, NOTHING))
assert type(error) is TimeIsUp, repr(error)
check_usable(3)
signal.setitimer(signal.ITIMER_REAL, 0.3)
error = error_of(lambda: fused(NOTHING, SLEEP, NOTHING), 3)  # in the all-reduce, where it waits
assert type(error) is TimeIsUp, repr(error)
check_usable(3)
signal.setitimer(signal.ITIMER_REAL, 0.3)
error = error_of(lambda: f(np.array([NOTHING, LONG, NOTHING])))  # at the finish barrier
assert type(error) is TimeIsUp, repr(error)
assert "interrupted" in str(error_of(lambda: plain(np.ones(3))))
synk.restart()
check_usable(3)
""")


@pytest.mark.parametrize("failing", [0, 1], ids=["master", "worker"])
def test_who_did_not_fail_has_made_its_updates_but_none_after_a_collective(run_script, failing):
    """What the documentation says of replicas after an exception; `broadcast` makes them alike."""
    run_script(f"""
open_world(3)
x = T.dvector("x")
before, after = (theano.shared(0.0, name=name) for name in ("before", "after"))
compute = synk.function([x], (Act()(x), "gather"), updates=[(before, before + 1)], mode="FAST_COMPILE")
update = synk.function([], updates=[(after, after + 1)], mode="FAST_COMPILE")
synk.distribute()
actions = [RAISE if rank == {failing} else NOTHING for rank in range(3)]


def step():
    with synk.fuse():
        compute(np.array(actions, float))
        synk.all_reduce(w)
        update()


for count in (1, 2):
    error = error_of(step)
    assert type(error) is (synk.WorkerError if {failing} else WorkerTrouble), repr(error)
    counts = synk.gather(before)
    assert set(np.delete(counts, {failing})) == {{count}}, counts
    assert counts[{failing}] <= count
    assert set(synk.gather(after)) == {{0}}
synk.broadcast(before)
assert len(set(synk.gather(before))) == 1
check_usable(3)
""")
