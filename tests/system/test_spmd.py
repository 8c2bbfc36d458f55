"""Tests of programs that every rank runs at its own pace."""

import errno
import os
import signal
import threading
import time

import numpy as np
import pytest
import scipy.sparse
from compilers import compiler, sparse, tt
from processes import own_process

import synkhronos as synk
from synkhronos._errors import CollectiveAbortedError, MissingRankError, SynkhronosError
from synkhronos.transports.children import Children
from synkhronos.world.world import current_world

RANKS = 3
ROWS = np.arange(40.0).reshape(20, 2)
W = compiler.shared(np.zeros(2), "w")
COUNT = compiler.shared(np.zeros((4, 3), "int64"), "count")
FLOATS = compiler.shared(np.zeros((1, 2)), "floats")


@pytest.fixture(scope="module")
def functions(open_world):
    """Functions in a world of three ranks."""
    open_world(RANKS, timeout=30)
    x, scale, matrix = tt.dmatrix("x"), tt.dscalar("scale"), sparse.csr_matrix("matrix")
    made = {
        "mean": synk.function(
            [x], {"mean": x.mean(), "scaled": (x * scale, "gather")}, [synk.In(scale, value=3)]
        ),
        "add": synk.function([x], (x.sum(), "sum"), updates=[(W, W + x.sum(axis=0), "sum")]),
        "product": synk.function([matrix], (sparse.dense_from_sparse(matrix).sum(axis=1), "gather")),
        "share": synk.function([], [(FLOATS, "gather"), FLOATS.mean()], sliceable_shareds=[FLOATS]),
        "count": synk.function([], (COUNT.sum(), "sum"), updates=[(COUNT, COUNT + 1)]),
    }
    synk.distribute()
    return made


@pytest.fixture
def ready(functions):
    synk.broadcast([W, COUNT, FLOATS], [np.zeros(2), np.zeros((4, 3), "int64"), np.zeros((1, 2))])
    return functions


def replicas(shared):
    return [synk.get_value(rank, shared).tolist() for rank in range(RANKS)]


def describe(rank, *args, **kwargs):
    return rank.rank, rank.size, rank.is_master, rank.master_rank, rank.device, args, kwargs


def test_every_rank_runs_the_program_with_its_arguments(ready):
    results = synk.spmd(describe, 1, "two", key=[3])
    assert results == [(r, RANKS, r == 0, 0, "cpu", (1, "two"), {"key": [3]}) for r in range(RANKS)]
    assert not results.stopped and not results.interrupted and results.reports == [[], [], []]


def test_closures_see_the_values_of_the_call_and_replicas_of_their_rank(ready):
    late = compiler.shared(np.ones(1), "late")  # after the workers were forked
    double = synk.function([], late * 2)
    values = [5]

    def program(rank):
        late.set_value(late.get_value() + rank.rank)
        return rank.call(double).tolist(), values

    values.append(6)
    assert synk.spmd(program) == [([2.0 + 2 * rank], [5, 6]) for rank in range(RANKS)]
    assert [synk.get_value(rank, late).tolist() for rank in range(RANKS)] == [[1], [2], [3]]


def test_data_and_large_arrays_are_in_shared_memory(ready):
    data, large = synk.data(np.zeros(3)), np.arange(20_000.0)

    def program(rank):
        data[rank.rank] = rank.rank + 1  # a global of the closure
        rank.barrier()
        assert data.data.tolist() == [1, 2, 3] and type(data) is synk.Data
        return large.sum(), large.flags.writeable

    assert synk.spmd(program) == [(large.sum(), rank == 0) for rank in range(RANKS)]
    assert data.data.tolist() == [1, 2, 3]


def test_what_cannot_be_sent_is_named_and_nothing_runs(ready):
    ran = []
    with pytest.raises(TypeError, match="spmd: the program, its arguments.*cannot be sent.*generator"):
        synk.spmd(ran.append, (number for number in ()))
    assert ran == []

    def program(rank):
        return (number for number in ()) if rank.rank == 2 else rank.rank

    with pytest.raises(synk.WorkerError, match="returned on rank 2 cannot be pickled"):
        synk.spmd(program)


def test_wrong_arguments_are_refused_before_anything_starts(ready):
    with pytest.raises(TypeError, match="expected a function as program, got 3"):
        synk.spmd(3)
    with pytest.raises(TypeError, match="controller: expected a function"):
        synk.spmd(describe, controller="me")
    with pytest.raises(ValueError, match="on_death: expected 'raise' or 'continue', got 'stop'"):
        synk.spmd(describe, on_death="stop")


def test_random_generators_are_independent_and_follow_the_seed_of_the_script(ready):
    def program(rank):
        return rank.random.random()

    draws = []
    for _ in range(2):
        np.random.seed(4)
        state = np.random.get_state()[2]
        draws.append([synk.spmd(program), synk.spmd(program)])
        assert np.random.get_state()[2] == state  # the script's own stream is not changed
    assert len({number for one in draws[0] for number in one}) == 2 * RANKS
    first, again = [[one for by_rank in draw for one in by_rank] for draw in draws]
    assert len(set(first) & set(again)) == 0  # programs are counted
    np.random.seed(5)
    assert len(set(synk.spmd(program)) & set(first)) == 0


def test_a_rank_calls_its_own_replica_on_its_own_rows(ready):
    def program(rank):
        own = rank.rows(len(ROWS))
        result = rank.call(ready["mean"], ROWS, batch=own)
        np.testing.assert_array_equal(result["scaled"], 3 * ROWS[own.start : own.stop])
        for batch in (None, 4, slice(1, 9, 2), [5, 0, 0], np.arange(20) > 15):
            chosen = ROWS[slice(batch) if batch is None or isinstance(batch, int) else batch]
            for slices in (1, 3):
                for given in (ROWS, ROWS.tolist()):
                    got = rank.call(ready["mean"], given, scale=2, batch=batch, num_slices=slices)
                    np.testing.assert_allclose(got["mean"], chosen.mean())
                    np.testing.assert_allclose(got["scaled"], 2 * chosen)
        assert list(rank.call(ready["mean"], ROWS, output_subset=["mean"])) == ["mean"]
        return float(result["mean"])

    parts = np.array_split(ROWS, RANKS)
    assert synk.spmd(program) == [part.mean() for part in parts]


def test_updates_stay_with_the_rank_and_accumulate_over_slices(ready):
    def program(rank):
        return float(rank.call(ready["add"], ROWS, batch=rank.rank + 1, num_slices=2))

    assert synk.spmd(program) == [ROWS[: rank + 1].sum() for rank in range(RANKS)]
    assert replicas(W) == [ROWS[: rank + 1].sum(axis=0).tolist() for rank in range(RANKS)]


def test_sparse_inputs_and_rows_of_sliceable_variables(ready):
    matrix = scipy.sparse.csr_matrix(np.eye(5)[:, :3])

    def program(rank):
        product = rank.call(ready["product"], matrix, batch=[0, 4, rank.rank], num_slices=2)
        rank.scatter(FLOATS, ROWS if rank.is_master else None)
        rows, mean = rank.call(ready["share"], batch_s=slice(0, 2))
        return product.tolist(), rows.tolist(), float(mean)

    expected = []
    for part in np.array_split(ROWS, RANKS):
        expected.append(([1, 0, 1], part[:2].tolist(), part[:2].mean()))
    assert synk.spmd(program) == expected


@pytest.mark.parametrize(
    "call, error",
    [
        (lambda rank, f: rank.call(f["mean"]), "no value for input 'x'"),
        (lambda rank, f: rank.call(f["mean"], ROWS, ROWS, 3), "expected at most 2 inputs, got 3"),
        (lambda rank, f: rank.call(f["mean"], ROWS, z=3), "no input is named 'z'"),
        (lambda rank, f: rank.call(f["mean"], ROWS, batch=[20]), "row 20 is out of range for 20 rows"),
        (lambda rank, f: rank.call(f["mean"], ROWS, batch=0), "no rows to compute on"),
        (lambda rank, f: rank.call(f["mean"], ROWS, num_slices=0), "num_slices: expected at least 1"),
        (lambda rank, f: rank.call(f["mean"], ROWS, output_subset=["best"]), "keys of"),
        (lambda rank, f: rank.call(f["mean"], ROWS, batch_s=[1]), "there are no sliceable_shareds"),
        (lambda rank, f: rank.call(f["share"], batch_s=[9]), "batch_s: row 9 is out of range"),
        (lambda rank, f: rank.call(np.mean, ROWS), "expected a function built with synk.function"),
        (lambda rank, f: f["mean"](ROWS), "use the methods of its argument|a copy"),
        (lambda rank, f: synk.broadcast(W), "use the methods of its argument"),
        (lambda rank, f: synk.function([], W), "use the methods of its argument"),
        (lambda rank, f: rank.rows(-1), "rank.rows: length: expected at least 0"),
        (lambda rank, f: rank.minibatches(2, 1), "length: expected at least 3, got 2"),
        (lambda rank, f: rank.minibatches(9, 1.5), "batch_size: expected an int, got 1.5"),
        (lambda rank, f: rank.broadcast([W, W]), "given more than once"),
        (lambda rank, f: rank.broadcast([]), "at least one shared variable"),
        (lambda rank, f: rank.broadcast(compiler.shared(1.0)), "not used by any function"),
        (lambda rank, f: rank.broadcast(ROWS), "expected shared variables"),
        (lambda rank, f: rank.all_reduce(COUNT), "avg"),
        (lambda rank, f: rank.all_reduce(W, "mean"), "mean"),
        (lambda rank, f: rank.all_reduce(W, "sum", weight=2), "weight: expected none"),
        (lambda rank, f: rank.all_reduce(W, weight=-1), "weight: expected a number of at least 0"),
        (lambda rank, f: rank.gather(W, nd_up=2), "nd_up: expected 0 or 1"),
        (lambda rank, f: rank.scatter(W), "expected values in the master"),
        (lambda rank, f: rank.report(), "expected numbers by name"),
        (lambda rank, f: rank.report(loss="low"), "loss: expected a number, got 'low'"),
        (lambda rank, f: rank.ask("me"), "there is no controller"),
    ],
)
def test_bad_input_is_refused_in_words_and_the_ranks_can_go_on(ready, call, error):
    def program(rank):
        call(rank, ready)

    with pytest.raises((ValueError, TypeError, IndexError, RuntimeError, SynkhronosError), match=error):
        synk.spmd(program)
    assert synk.spmd(lambda rank: rank.rank) == [0, 1, 2]


def test_a_rank_and_its_centers_are_refused_after_the_program(ready):
    kept = {}

    def program(rank):
        center = rank.center(W)
        if rank.is_master:
            kept.update(rank=rank, center=center, rows=rank.minibatches(9, 1))

    synk.spmd(program)
    rank, center, rows = kept.values()
    uses = [
        lambda: rank.call(ready["count"]), lambda: rank.center(W), lambda: rank.send(1, 1),
        lambda: rank.receive(wait=True), lambda: rank.ask("me"), lambda: rank.report(loss=1),
        lambda: rank.stop(), lambda: setattr(rank, "in_step", True), lambda: rank.should_stop,
        lambda: rank.latest, lambda: rank.clock, lambda: setattr(rank, "clock", 3), lambda: rank.clocks,
        lambda: rank.wait_for_clocks(0), lambda: rank.exchange(1), lambda: rank.barrier(),
        lambda: rank.broadcast(W), lambda: next(rows), lambda: center.pull(), lambda: center.push(),
        lambda: center.elastic(0.5), lambda: center.value(), lambda: center.assign(np.ones(2)),
    ]  # fmt: skip

    for use in uses:
        with pytest.raises(RuntimeError, match="the program of rank 0 has ended; use a rank"):
            use()
    assert ready["count"]() == 0 and replicas(W) == [[0, 0]] * RANKS


def test_collectives_are_those_outside(ready):
    def program(rank):
        seen = []
        W.set_value(np.array([rank.rank, 10.0]))
        seen.append(rank.gather(W))
        seen.append(rank.gather([W], nd_up=0))
        seen.append(rank.reduce(W, "max", in_place=False))
        rank.all_reduce(W, weight=[1, 0, 3][rank.rank])
        seen.append(W.get_value())
        W.set_value(np.array([5.0 + rank.rank, 5]))
        rank.broadcast([W])
        seen.append(W.get_value())
        W.set_value(np.array([rank.rank, 1.0]))
        rank.reduce(W, "sum")
        seen.append(W.get_value())
        rank.scatter([W], [np.arange(7.0)] if rank.is_master else None)
        seen.append(W.get_value())
        rank.all_gather(W)
        seen.append(W.get_value())
        return [None if one is None else np.asarray(one).tolist() for one in seen]

    master, first, second = synk.spmd(program)
    assert master == [
        [[0, 10], [1, 10], [2, 10]], [[0, 10, 1, 10, 2, 10]], [2, 10], [1.5, 10], [5, 5], [3, 3],
        [0, 1, 2], list(range(7)),
    ]  # fmt: skip
    assert first == [None, None, None, [1.5, 10], [5, 5], [1, 1], [3, 4], list(range(7))]
    assert second == [None, None, None, [1.5, 10], [5, 5], [2, 1], [5, 6], list(range(7))]


def test_ranks_at_different_collectives_are_told_so(ready):
    def program(rank):
        try:
            rank.barrier() if rank.rank == 1 else rank.all_reduce(W)
        except SynkhronosError as error:
            return str(error)

    for text in synk.spmd(program):
        assert "rank 0: all_reduce(" in text and "rank 1: barrier()" in text

    def program(rank):
        rank.all_reduce([W, FLOATS][rank.rank % 2 :])

    with pytest.raises(SynkhronosError, match="different collectives"):
        synk.spmd(program)


def test_ranks_exchange_values_at_the_same_point(ready):
    def program(rank):
        return rank.may_meet, rank.exchange({"rank": rank.rank}), rank.exchange(2.5)

    given = [{"rank": number} for number in range(RANKS)]
    assert synk.spmd(program) == [(True, given, [2.5] * RANKS)] * RANKS


def test_ranks_read_the_clocks_of_all_and_wait_for_the_slowest(ready):
    def program(rank):
        ahead = []
        for step in range(1, 30):
            rank.clock = step
            rank.wait_for_clocks(step - 2)
            ahead.append(step - min(rank.clocks))
            if rank.rank == 1:
                time.sleep(0.003)
        if rank.rank:
            rank.clock = 40
            rank.wait_for_clocks(40)  # rank 0 does not count, once it has ended
        return max(ahead)

    assert max(synk.spmd(program)) == 2
    with pytest.raises((ValueError, synk.WorkerError), match="at most this rank's own clock, 0, got 1"):
        synk.spmd(lambda rank: rank.wait_for_clocks(1))


def test_nobody_waits_for_a_rank_that_has_ended(ready):
    def program(rank):
        rank.barrier()
        if rank.rank != 1:
            rank.barrier()

    began = time.monotonic()
    with pytest.raises((MissingRankError, CollectiveAbortedError, synk.WorkerError)):
        synk.spmd(program)
    assert time.monotonic() < began + 2
    assert ready["count"]() == 0


WHERE = ["computing", "barrier", "receive", "ask", "center", "latest", "clocks"]


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("failing", [0, 2])
def test_an_exception_reaches_the_others_within_a_second(ready, where, failing, tmp_path):
    def program(rank):
        if rank.rank == failing:
            time.sleep(0.2)
            raise LookupError("lost")
        try:
            center = rank.center(W)
            while True:
                if where == "computing":
                    rank.call(ready["count"])
                elif where == "center":
                    center.pull()
                elif where == "latest":
                    rank.latest  # noqa: B018
                elif where == "clocks":
                    rank.clocks  # noqa: B018
                elif where == "barrier":
                    rank.barrier()
                elif where == "receive":
                    rank.receive(wait=True)
                else:
                    rank.ask("wait")
        finally:
            (tmp_path / str(rank.rank)).write_text(str(time.time()))

    def answer(request, rank, info):
        time.sleep(0.5)

    began = time.time()
    with pytest.raises((LookupError, synk.WorkerError), match="lost") as caught:
        synk.spmd(program, controller=answer)
    if failing:
        assert caught.value.rank == 2 and "raise LookupError" in caught.value.traceback
    ends = [float(path.read_text()) for path in tmp_path.iterdir()]
    assert len(ends) == RANKS - 1 and max(ends) < began + 3
    assert synk.spmd(lambda rank: rank.rank) == [0, 1, 2]


def test_a_program_is_not_disturbed_by_another_thread(ready):
    results = []

    def program(rank):
        center = rank.center(W)
        while rank.rank and not rank.should_stop:
            time.sleep(0.01)
        return center.value().tolist()

    synk.broadcast(W, [3.0, 4.0])
    thread = threading.Thread(target=lambda: results.extend(synk.spmd(program)))
    thread.start()
    time.sleep(0.3)  # the master has ended its program and waits
    with pytest.raises(SynkhronosError, match="another call has not returned yet"):
        synk.spmd(describe)
    current_world().rank_state.store.named_memory.array("stop", (1,), "int64")[0] = 1
    thread.join()
    assert results == [[3, 4]] * RANKS


def count_steps(rank, ready, period, meets):
    steps = 0
    for _ in rank.minibatches(300, 10, epochs=10_000, seed=1):
        steps += 1
        if rank.rank == 1 and steps == 7:
            rank.stop()
        if meets and steps % period == 0:
            rank.all_reduce(W)
        if rank.rank == 2:
            time.sleep(1e-3)
    if meets:
        rank.barrier()
    return steps


@pytest.mark.parametrize("period", [1, 5])
def test_ranks_that_meet_stop_after_the_same_step(ready, period):
    steps = synk.spmd(count_steps, ready, period, True)
    assert len(set(steps)) == 1 and 7 <= steps[0] <= 7 + period and steps.stopped


def test_ranks_that_do_not_meet_stop_at_their_next_minibatch(ready):
    steps = synk.spmd(count_steps, ready, 1, False)
    assert steps[1] == 7 and steps.stopped and not steps.interrupted


@pytest.mark.parametrize("use", ["call", "clock", "clocks", "latest"])
def test_a_program_that_never_asks_is_ended(ready, use):
    def program(rank):
        if rank.rank == 2:
            rank.stop()
        while True:
            rank.call(ready["count"]) if use == "call" else getattr(rank, use)

    results = synk.spmd(program)
    assert results == [None] * RANKS and results.stopped


def test_ranks_in_a_collective_are_ended_if_the_others_have_stopped(ready):
    def program(rank):
        rank.minibatches(3, 1)
        if rank.rank == 1:
            rank.stop()
            return "stopped"
        rank.barrier()

    assert synk.spmd(program) == [None, "stopped", None]


def interrupt_master(rank, ends):
    if rank.is_master:
        os.kill(os.getpid(), signal.SIGINT)
    steps = 0
    while not (rank.should_stop and ends):
        time.sleep(0.01)
        steps += 1
        if not ends and rank.is_master and steps == 30:
            os.kill(os.getpid(), signal.SIGINT)
    return steps


@own_process
def test_the_first_interrupt_stops_the_ranks_and_the_second_ends_them():
    synk.fork(RANKS, use_gpu=False)
    results = synk.spmd(interrupt_master, True)
    assert max(results) < 100 and results.stopped and results.interrupted

    def careless(rank):
        if rank.is_master:
            os.kill(os.getpid(), signal.SIGINT)
        while True:
            rank.report(step=1)

    with pytest.raises(KeyboardInterrupt):  # it did not end by itself
        synk.spmd(careless)
    assert synk.spmd(lambda rank: rank.rank) == [0, 1, 2]
    with pytest.raises(KeyboardInterrupt):
        synk.spmd(interrupt_master, False)
    with pytest.raises(synk.WorldBrokenError):
        synk.spmd(describe)
    synk.close()


def test_messages_go_from_rank_to_rank(ready):
    def program(rank):
        following = (rank.rank + 1) % rank.size
        assert rank.send(following, [np.full(3, rank.rank), ROWS], tag=4)
        source, (number, rows) = rank.receive(tag=4, wait=True)
        assert (rows == ROWS).all() and rank.receive() is None
        if rank.rank == 0:
            with pytest.raises(SynkhronosError, match="no message will come"):
                rank.receive(tag=9, wait=True)
        return source, number.tolist()

    assert synk.spmd(program) == [(2, [2] * 3), (0, [0] * 3), (1, [1] * 3)]


def test_reports_are_returned_and_the_latest_can_be_read_by_all(ready):
    def program(rank):
        for step in range(3):
            rank.report(step=step, loss=np.float32(0.5) + rank.rank)
        rank.barrier()
        return rank.latest

    results = synk.spmd(program)
    for rank in range(RANKS):
        own = results.reports[rank]
        assert [(one["step"], one["loss"]) for one in own] == [(step, 0.5 + rank) for step in range(3)]
        assert sorted(one["seconds"] for one in own) == [one["seconds"] for one in own]
    for latest in results:
        assert [one["loss"] for one in latest] == [0.5 + rank for rank in range(RANKS)]
    with pytest.raises((ValueError, synk.WorkerError), match="at most 4094 bytes"):
        synk.spmd(lambda rank: rank.report(**{"x" * 5000: 1}))


def test_no_report_is_lost_or_torn_while_others_read_all_the_time(ready):
    def program(rank, count):
        if rank.rank == 1:
            for number in range(count):
                rank.report(number=number, square=number**2, text_of_some_length=1 / 3)
            return count - 1
        last = -1
        while last < count - 1:
            one = rank.latest[1]
            if one is not None:
                assert one["number"] >= last and one["square"] == one["number"] ** 2
                last = one["number"]
        return last

    assert synk.spmd(program, 2000) == [1999] * RANKS


def test_profile_sees_the_parts_of_a_program(ready):
    def program(rank):
        rank.call(ready["count"])
        rank.all_reduce(W)
        rank.ask("time")
        rank.center(W).elastic(0.5)
        rank.send(rank.rank, ROWS)
        rank.receive()

    with synk.profile() as measured:
        synk.spmd(program, controller=lambda *question: question)
    for events in measured.events:
        names = {event.name for event in events}
        assert {"ask", "send", "receive", "elastic", "barrier", "reduce_part"} <= names
        assert any(event.category == "compute" for event in events)


def test_a_dead_rank_breaks_the_world(world_of):
    world_of(RANKS)

    def program(rank, how):
        if rank.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        while True:
            rank.barrier() if how == "meet" else rank.rows(3) and rank.should_stop

    for how in ("meet", "compute"):
        began = time.monotonic()
        with pytest.raises(synk.WorldBrokenError, match="rank 1 .*SIGKILL"):
            synk.spmd(program, how)
        assert time.monotonic() < began + 5
        synk.restart()
        assert synk.spmd(lambda rank: rank.rank) == [0, 1, 2]


def test_fresh_ranks_take_the_place_of_dead_ones(world_of, caplog):
    world_of(RANKS)
    w, total = compiler.shared(np.zeros(2), "w"), compiler.shared(0.0, "total")
    add = synk.function([], total.sum(), updates=[(w, w + 1), (total, total + w.sum())])
    synk.all_reduce(w)  # its storage is in shared memory

    def program(rank):
        center = rank.center(w)
        steps = 0
        while rank.rank == 0 and not all(rank.latest[1:]) or steps < 20:
            rank.call(add)
            steps += 1
            center.push()
            if rank.rank == 1 and not rank.restarts and steps == 5:
                os.kill(os.getpid(), signal.SIGKILL)
            if rank.rank == 2 and rank.restarts < 2 and steps == 10:
                os._exit(3)
            time.sleep(0.005)
        rank.report(done=1)
        with pytest.raises(RuntimeError, match="cannot use collectives"):
            rank.barrier()
        return rank.restarts, steps, center.value().tolist()

    results = synk.spmd(program, on_death="continue")
    assert [restarts for restarts, _, _ in results] == [0, 1, 2]
    assert "rank 1 died (killed by SIGKILL)" in caplog.text
    pushed = results[0][1] + (5 + 20) + (10 + 10 + 20)
    assert max(value[0] for *_, value in results) == pushed
    synk.broadcast(w, np.zeros(2))
    assert add.get_shared() and synk.gather(w).tolist() == [[0, 0]] * RANKS  # the ranks are usable


def test_the_memory_of_a_rank_outlives_it_and_ends_with_the_program(world_of):
    world_of(3)

    def program(rank):
        lived, losses = rank.memory("lives", 1, "int64"), rank.memory("losses", (2, 3))
        assert lived.dtype == "int64" and losses.dtype == "float64"
        lived += 1
        losses[rank.restarts] = rank.rank
        if rank.rank == 1 and not rank.restarts:
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(ValueError, match="use the same everywhere"):
            rank.memory("losses", 6)
        return int(lived[0]), losses.tolist()

    for _ in range(2):
        results = synk.spmd(program, on_death="continue")
        assert results == [(1, [[0] * 3] * 2), (2, [[1] * 3] * 2), (1, [[2] * 3, [0] * 3])]


def test_a_rank_that_dies_after_its_result_is_not_restarted(two):
    def program(rank):
        if rank.rank == 1:
            threading.Timer(0.2, os._exit, [3]).start()
        else:
            time.sleep(0.6)
            rank.report(step=1)  # sees the death
        return rank.restarts

    former = synk.spmd(identify)
    assert synk.spmd(program, on_death="continue") == [0, 0]
    now = synk.spmd(identify)
    assert now[0] == former[0] and now[1][0] != former[1][0] and now[1][1] == 0


def identify(rank):
    return os.getpid(), rank.restarts


def test_a_rank_that_cannot_be_replaced_breaks_the_world(two, monkeypatch):
    def program(rank):
        if rank.rank == 1:
            os._exit(5)
        monkeypatch.setattr(Children, "fork_worker", refuse)
        while True:
            rank.report(step=1)

    def refuse(*_):
        raise OSError(errno.EAGAIN, "try again")

    words = "rank 1 died .exit code 5.*no other process.*ulimit"
    with pytest.raises(synk.WorldBrokenError, match=words):
        synk.spmd(program, on_death="continue")
    monkeypatch.undo()
    synk.restart()
    assert synk.spmd(lambda rank: rank.rank) == [0, 1]


def test_a_rank_that_dies_again_and_again_breaks_the_world(two):
    def program(rank):
        if rank.rank == 1:
            os._exit(5)
        while True:
            rank.report(step=1)

    with pytest.raises(synk.WorldBrokenError, match="rank 1 died 4 times in a program.*exit code 5"):
        synk.spmd(program, on_death="continue")
    synk.restart()
    assert synk.spmd(describe)[1][0] == 1


def test_a_wait_inside_is_limited_but_not_the_program(world_of):
    world_of(2, timeout=0.6)

    def program(rank, late):
        if rank.rank == late:
            time.sleep(1.8)
        if late is not None:
            rank.barrier()
        else:
            time.sleep(1.0 * rank.rank)
        return rank.rank

    def play(rank):
        """Wait for many short times, longer than the limit together."""
        for number in range(20):
            if number % 2 == rank.rank:
                time.sleep(0.05)
                rank.send(1 - rank.rank, number)
            else:
                assert rank.receive(wait=True) == (1 - rank.rank, number)
        return rank.rank

    assert synk.spmd(program, None) == [0, 1]
    assert synk.spmd(play) == [0, 1]
    with pytest.raises(synk.WorkerError, match=r"waited longer than fork\(timeout=0.6\).*rank 0"):
        synk.spmd(program, 0)
    assert synk.spmd(program, None) == [0, 1]

    def wait_each_time(rank, seconds):
        for step in range(1, 8):
            time.sleep(seconds * rank.rank)
            rank.clock = step
            rank.wait_for_clocks(step)
        return rank.clocks

    assert synk.spmd(wait_each_time, 0.1) == [[7, 7]] * 2  # no single wait is too long
    with pytest.raises(SynkhronosError, match=r"rank 0 waited longer than fork\(timeout=0.6\)"):
        synk.spmd(wait_each_time, 0.9)  # it ends in time for the others
    with pytest.raises(synk.WorldBrokenError, match="timeout=0.6"):
        synk.spmd(program, 1)
