"""Tests of the algorithms of all-reduces between machines: threads, joined by a naive network."""

import itertools
import threading

import numpy as np
import pytest
from checks import communicators
from checks.machines import ThreadedMachines
from checks.ranks import Ranks

from synkhronos._errors import CollectiveAbortedError
from synkhronos.arithmetic.operations import OPERATIONS, find_operation
from synkhronos.arithmetic.pairwise import PairwiseReduction, core_of
from synkhronos.comms.algorithms import (
    DIRECT,
    DOUBLING,
    HALVING,
    MEETING,
    MIDDLE,
    NAMES,
    OF_PAIR,
    SMALL,
    USUAL,
    Costs,
    Limits,
    choose,
    decide,
    measure,
    parse,
    seconds,
)
from synkhronos.comms.direct import CHUNK
from synkhronos.comms.linked import LinkedCommunicator, _Batch
from synkhronos.machines.leaders import _FIRST, _MEETING, _STREAMS, Leaders
from synkhronos.machines.links import as_bytes
from synkhronos.machines.naive import NaiveLinks, NaiveNetwork

EVERY = "meeting:40,doubling:1000,halving:100000,direct"  # each algorithm for some arrays


def together(size, function, number=1):
    """Return the values of ``function(leaders)`` on threads that are the leaders of `size` machines."""
    found, every = [None] * size, [Leaders(links) for links in NaiveNetwork(size).links()]

    def run(leaders):
        leaders.begin(number)
        try:
            found[leaders.rank] = function(leaders)
        except Exception as error:
            found[leaders.rank] = error

    threads = [threading.Thread(target=run, args=(leaders,), daemon=True) for leaders in every]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive()
    for one in found:
        if isinstance(one, Exception):
            raise one
    return found


def draw(size, length, dtype):
    rng = np.random.default_rng(size + length)
    numbers = rng.normal(size=(2, size, length))
    if np.dtype(dtype).kind == "c":
        return (numbers[0] + 1j * numbers[1]).astype(dtype)
    scale = 1 if np.dtype(dtype).kind == "f" else 50
    return (scale * numbers[0]).astype(dtype)


CASES = [
    ("float32", "avg", "equal"),
    ("float32", "avg", "some are zero"),
    ("float16", "avg", "some are zero"),
    ("complex64", "avg", "a single one"),
    ("float64", "sum", "equal"),
    ("float16", "prod", "equal"),
    ("int16", "max", "equal"),
    ("bool", "min", "equal"),
]
WEIGHTS = {
    "equal": lambda size: [1.0] * size,
    "some are zero": lambda size: [float((rank + 1) % 3) / 7 for rank in range(size)],
    "a single one": lambda size: [*[0.0] * (size - 1), 3.0],
}


def bits_by_algorithm(size, length):
    """Reduce arrays by each algorithm; return the results as bytes by case, rank and algorithm."""
    drawn = {dtype: draw(size, length, dtype) for dtype, _, _ in CASES}

    def reduce(leaders):
        found = {}
        for dtype, op, kind in CASES:
            weight = WEIGHTS[kind](size)[leaders.rank]
            for name in NAMES:
                array = drawn[dtype][leaders.rank].copy()
                if op == "avg" and not weight:
                    array[...] = np.nan
                [reduced] = LinkedCommunicator(leaders, parse(name)).all_reduce([array], op, weight)
                found[dtype, op, kind, name] = reduced.tobytes()
        return found

    return together(size, reduce)


def check_bits(size, length):
    found = bits_by_algorithm(size, length)
    for dtype, op, kind in CASES:
        results = {one[dtype, op, kind, name] for one in found for name in NAMES}
        assert len(results) == 1, (dtype, op, kind)
        arrays, weights = draw(size, length, dtype), WEIGHTS[kind](size)
        wanted = communicators.expected(op, arrays, weights)
        rtol, atol = (3e-2, 3e-3) if dtype == "float16" else (1e-4, 1e-5)
        got = np.frombuffer(results.pop(), dtype)
        if np.dtype(dtype).kind in "fc":
            np.testing.assert_allclose(got, wanted, rtol=rtol, atol=atol)
        else:
            np.testing.assert_array_equal(got, wanted)


@pytest.mark.parametrize("size", range(2, 10))
def test_all_algorithms_give_the_same_bits_on_every_machine(size):
    for length in (1, 2, 4001):
        check_bits(size, length)


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3, 5, 8, 16, 27, 32])
def test_they_do_with_arrays_of_several_chunks(size):
    check_bits(size, 9 * CHUNK // 8 + 5)


@pytest.mark.slow
@pytest.mark.parametrize("size", range(10, 33))
def test_they_do_on_many_machines(size):
    check_bits(size, 701)


# The conformance checks


REDUCTIONS = [
    check
    for check in communicators.CHECKS
    if any(word in check.__name__ for word in ("reduc", "average", "weight", "layout", "together"))
]
QUICK = [
    one
    for one in REDUCTIONS
    if any(word in one.__name__ for word in ("refused", "together", "may_change"))
]


def named(check):
    return check.__name__[len("check_") :]


def linked(text):
    return lambda transport: LinkedCommunicator(transport.leaders, parse(text))


@pytest.fixture(scope="module")
def five():
    ranks = Ranks(ThreadedMachines([1] * 5, timeout=60, have_couriers=False), linked(EVERY))
    yield ranks
    ranks.close()


@pytest.mark.parametrize(
    "check",
    [one if one in QUICK else pytest.param(one, marks=pytest.mark.slow) for one in REDUCTIONS],
    ids=named,
)
def test_five_machines_with_all_algorithms(check, five):
    check(five)


@pytest.mark.slow
@pytest.mark.parametrize("text", [*NAMES, EVERY])
@pytest.mark.parametrize("size", [2, 3, 4, 6, 7, 8, 9, 16, 32])
def test_all_checks_with_each_algorithm(size, text):
    ranks = Ranks(ThreadedMachines([1] * size, timeout=120, have_couriers=False), linked(text))
    try:
        for check in communicators.CHECKS if size < 16 else REDUCTIONS:
            check(ranks)
    finally:
        ranks.close()


def reduce_or_fail(comm, length, failing):
    if comm.rank == failing:
        raise KeyError("on purpose")
    [reduced] = comm.all_reduce([np.full(length, comm.rank + 1.0)], "sum")
    return set(reduced.tolist())


def test_a_rank_that_fails_ends_the_all_reduce_of_the_others(five):
    for length in (2, 50, 3000, 50_000):
        for failing in (0, 1, 4):
            outcomes = five.run(reduce_or_fail, length, failing)
            errors = [CollectiveAbortedError] * 5
            errors[failing] = KeyError
            assert [one.error for one in outcomes] == errors
            assert five.values(reduce_or_fail, length, None) == [{15.0}] * 5


def test_an_all_reduce_that_is_aborted_on_its_way_is_left_by_all():
    """Rank 2 fails in one of its meetings, of which all ranks count the same."""

    def reduce(leaders, name, stop):
        complete, met = leaders.complete, itertools.count()

        def failing(*arguments):
            if leaders.rank == 2 and next(met) == stop:
                leaders.abort()
                raise KeyError("on purpose")
            return complete(*arguments)

        leaders.complete = failing
        try:
            LinkedCommunicator(leaders, parse(name)).all_reduce([np.ones(100)], "sum")
        except (CollectiveAbortedError, KeyError) as error:
            return type(error)
        return leaders.passed

    for name in (DOUBLING, HALVING, DIRECT):
        meetings = together(5, lambda leaders, name=name: reduce(leaders, name, -1))
        assert len(set(meetings)) == 1
        for stop in range(meetings[0] - 1):
            found = together(5, lambda leaders, name=name, stop=stop: reduce(leaders, name, stop))
            assert found[2] is KeyError
            assert set(found) <= {KeyError, CollectiveAbortedError, meetings[0]}


# How much is sent


@pytest.fixture
def messages(monkeypatch):
    """The sender and the bytes of each message of a meeting, and of each array."""
    found, send = ([], []), NaiveLinks.send

    def recorded(links, to, tag, data):
        if tag >= _FIRST:  # not a notice
            is_array = (tag - _FIRST) % _STREAMS != _MEETING
            found[is_array].append((links.rank, as_bytes(data).size))
        return send(links, to, tag, data)

    monkeypatch.setattr(NaiveLinks, "send", recorded)
    return found


@pytest.mark.parametrize("size", [3, 4, 6, 8])
@pytest.mark.parametrize("name", [DOUBLING, HALVING, DIRECT])
def test_messages_and_bytes_are_those_of_the_model(size, name, messages):
    nbytes = 8 * 840  # a multiple of the number of machines
    limits = parse(name)
    together(size, lambda one: LinkedCommunicator(one, limits).all_reduce([np.ones(nbytes // 8)], "sum"))
    meeting, arrays = messages
    core = core_of(size)
    rounds = {DOUBLING: core.rounds, HALVING: 2 * core.rounds, DIRECT: 2 * (size - 1)}[name]
    sent = {
        DOUBLING: core.rounds * nbytes,
        HALVING: 2 * nbytes * (core.size - 1) // core.size,
        DIRECT: 2 * nbytes * (size - 1) // size,
    }[name]
    for rank in range(size):
        own = [nbytes for one, nbytes in arrays if one == rank]
        number, total = (rounds, sent) if name == DIRECT or core.place(rank) is not None else (1, nbytes)
        is_second = name != DIRECT and core.place(rank) is not None and rank < 2 * core.pairs
        assert (len(own), sum(own)) == (number + is_second, total + is_second * nbytes)
    assert len(meeting) == size * (size - 1).bit_length()
    folding = 2 * nbytes if core.pairs and name != DIRECT else 0  # one way, and later the other
    assert seconds(name, size, nbytes, Costs(0, 0, 1)) == sent + folding


def test_a_meeting_sends_the_arrays_of_all(messages):
    together(8, lambda one: LinkedCommunicator(one, parse(MEETING)).all_reduce([np.ones(500)], "sum"))
    of_first = [nbytes for rank, nbytes in messages[0] if rank == 0]
    assert len(of_first) == 3 and 0 <= sum(of_first) - 7 * 4000 < 1000
    assert not messages[1]


def test_small_arrays_travel_in_a_message_by_doubling(messages):
    arrays = [np.ones(10, "float32"), np.ones(30), np.ones(7, "int8")]
    limits = Limits(0, 1000, 0)
    together(4, lambda one: LinkedCommunicator(one, limits).all_reduce(list(arrays), "sum"))
    assert [nbytes for rank, nbytes in messages[1] if rank == 0] == [48 + 240 + 16] * 2


def test_what_is_reduced_by_doubling_is_limited_in_total():
    batch = _Batch([np.ones(MIDDLE // 16) for _ in range(3)], Limits(0, MIDDLE // 2, 0))
    assert (batch.small, batch.middle, batch.large) == ([], [0, 1], [2])


# The order of the operands


@pytest.mark.parametrize("size", [*range(1, 20), 96, 128])
def test_the_places_of_the_core_have_all_ranks_in_order(size):
    core = core_of(size)
    assert core.size & (core.size - 1) == 0 and core.size <= size < 2 * core.size
    assert [rank for place in range(core.size) for rank in core.ranks(place)] == list(range(size))
    assert [core.place(core.rank(place)) for place in range(core.size)] == list(range(core.size))
    alone = [rank for rank in range(size) if core.place(rank) is None]
    assert alone == list(range(0, 2 * core.pairs, 2))
    length = 1
    while length <= core.size:
        blocks = [core.block(place, length) for place in range(0, core.size, length)]
        assert [rank for block in blocks for rank in block] == list(range(size))
        assert core.block(core.size - 1, length) == blocks[-1]
        length *= 2


def test_neighbours_are_added_first():
    big = 2.0**53  # to which adding 1 changes nothing
    for numbers, wanted in (
        ([big, 1.0, 1.0, 1.0], big + 2),
        ([1.0, 1.0, big, 1.0], big + 2),
        ([1.0, 1.0, 1.0, 1.0, big], big + 4),  # (0, 1), 2, 3 and 4: four places
        ([big, 1.0, 1.0], big),
        ([1.0, 1.0, big], big + 2),
    ):
        out = np.empty(1)
        arrays = [np.array([number]) for number in numbers]
        PairwiseReduction(find_operation("sum"), [1.0] * len(numbers)).reduce(out, arrays)
        assert out[0] == wanted, numbers


def test_one_and_two_arrays_are_reduced_as_an_operation_does():
    for op, size in itertools.product(OPERATIONS, (1, 2)):
        arrays = [np.array([1e-40, 3e38, 0.1 * rank], "float32") for rank in range(size)]
        weights = [3.0, 0.7][:size]
        out = np.empty(3, "float32")
        with np.errstate(over="ignore", under="ignore"):
            PairwiseReduction(find_operation(op), weights).reduce(out, arrays)
            wanted = find_operation(op).reduce(arrays, weights)
        assert out.tobytes() == wanted.tobytes()


def test_averages_of_the_largest_numbers_are_finite_and_infinities_stay():
    for dtype in ("float16", "float32", "float64", "complex64"):
        real = np.zeros(1, dtype).real.dtype
        largest = np.finfo(dtype).max
        array = np.array([largest, -largest, np.inf], real).astype(dtype)
        for weights in ([1.0] * 5, [1.1, 2.9, 0.0], [0.3, 0.3, 0.4], [1e30, 2e30, 3e30]):
            out = np.empty(3, dtype)
            PairwiseReduction(find_operation("avg"), weights).reduce(out, [array] * len(weights))
            np.testing.assert_allclose(out.real, array.real, rtol=2e-3)
    extreme, out = [1e300, 2e300, 3e300, 1.0], np.empty(2, "float32")
    arrays = [np.full(2, rank + 1, "float32") for rank in range(4)]
    PairwiseReduction(find_operation("avg"), extreme).reduce(out, arrays)
    np.testing.assert_allclose(out, 14 / 6, rtol=1e-6)


# The choice


def test_two_machines_have_no_choice():
    assert choose(2) == choose(1) == OF_PAIR == Limits(SMALL, 0, 0)
    assert decide(Leaders(NaiveNetwork(2).links()[0]), "direct") == OF_PAIR  # and nothing is sent


@pytest.mark.parametrize("size", [3, 4, 7, 8, 100, 128, 1024])
def test_the_least_time_of_the_model_is_chosen(size):
    for costs in (USUAL, Costs(1e-3, 2e-5, 1e-8), Costs(1e-5, 1e-5, 1e-10)):
        limits = choose(size, costs)
        for nbytes in (4, 100, 1000, 30_000, 10**6, 10**8):
            rest = [limit for limit in limits if nbytes > limit]
            chosen = NAMES[len(rest)]
            times = {name: seconds(name, size, nbytes, costs) for name in NAMES}
            if MEETING in (chosen, min(times, key=times.get)) and nbytes >= SMALL // 2:
                continue
            # The limits are powers of two.
            halved = {name: seconds(name, size, nbytes / 2, costs) for name in NAMES}
            least = min(times.values())
            if chosen == DIRECT and size <= 16:  # it is preferred if the others gain little
                assert times[chosen] <= least / 0.95 or halved[chosen] <= least / 0.95
            else:
                assert times[chosen] == least or halved[chosen] <= least


def test_a_network_with_long_ways_sends_few_messages_and_a_slow_one_few_bytes():
    far, slow = choose(16, Costs(1e-2, 2e-5, 1e-9)), choose(16, Costs(1e-6, 1e-6, 1e-6))
    assert far.meeting == SMALL and far.doubling == MIDDLE
    assert slow.doubling < 16
    assert choose(4, Costs(1e-3, 1e-9, 1e-9)).halving < 10**7  # direct has fewer rounds


def test_halving_is_for_many_machines_and_direct_for_few_and_for_other_numbers():
    costs = Costs(4e-5, 2e-5, 3e-10)
    assert choose(128, costs).halving == choose(1024, costs).halving > 10**12
    for size in (4, 8, 16, 96, 100):
        limits = choose(size, costs)
        assert limits.doubling < limits.halving < 10**8 or size == 4


def test_limits_are_text():
    for text in ("meeting:2048,doubling:65536,halving", "halving:9,direct", "meeting", *NAMES, EVERY):
        assert str(parse(text)) == text
    assert parse("meeting:10, direct") == Limits(10, 10, 10)
    for wrong in [
        *("", "ring", "direct,halving", "halving:x,direct", "halving,direct"),
        *("doubling:1,doubling", "halving:1", "meeting:-1,direct"),
    ]:
        with pytest.raises(ValueError, match="expected algorithms in the order meeting, doubling"):
            parse(wrong)


def test_all_machines_measure_and_choose_the_same():
    for size in (3, 4):
        [costs] = set(together(size, measure))
        assert costs.round > 0 and costs.message >= 0 and costs.byte > 0
        assert len(set(together(size, lambda leaders: decide(leaders, "")))) == 1


def test_the_first_machine_decides_if_it_was_told():
    texts = ["halving", "direct", ""]
    assert together(3, lambda one: decide(one, texts[one.rank])) == [parse("halving")] * 3

    def refuse(leaders):
        with pytest.raises(ValueError, match="expected algorithms"):
            decide(leaders, "ring" if not leaders.rank else "")
        return leaders.passed

    assert together(3, refuse) == [1] * 3
