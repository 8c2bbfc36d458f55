"""Tests of all-reduces between machines: threads, joined by a naive network."""

import itertools
import threading

import numpy as np
import pytest
from checks import communicators
from checks.machines import ThreadedMachines
from checks.ranks import Ranks

from synkhronos._errors import CollectiveAbortedError
from synkhronos.arithmetic.operations import find_operation
from synkhronos.arithmetic.pairwise import PairwiseReduction
from synkhronos.comms import linked
from synkhronos.comms.linked import CHUNK, LinkedCommunicator
from synkhronos.machines.leaders import _FIRST, _MEETING, _STREAMS, Leaders, as_bytes
from specifications.links import NaiveLinks, NaiveNetwork

WAYS = {"meeting": 1 << 40, "direct": 0}  # the bytes of small arrays


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


def bits_of(size, length):
    """Reduce arrays; return the results of each machine as bytes by case."""
    drawn = {dtype: draw(size, length, dtype) for dtype, _, _ in CASES}

    def reduce(leaders):
        found = {}
        for dtype, op, kind in CASES:
            weight = WEIGHTS[kind](size)[leaders.rank]
            array = drawn[dtype][leaders.rank].copy()
            if op == "avg" and not weight:
                array[...] = np.nan
            [reduced] = LinkedCommunicator(leaders).all_reduce([array], op, weight)
            found[dtype, op, kind] = reduced.tobytes()
        return found

    return together(size, reduce)


def check_bits(size, length, monkeypatch):
    found = []
    for limit in WAYS.values():
        monkeypatch.setattr(linked, "SMALL", limit)
        found += bits_of(size, length)
    for dtype, op, kind in CASES:
        results = {one[dtype, op, kind] for one in found}
        assert len(results) == 1, (dtype, op, kind)
        arrays, weights = draw(size, length, dtype), WEIGHTS[kind](size)
        wanted = communicators.expected(op, arrays, weights)
        rtol, atol = (3e-2, 3e-3) if dtype == "float16" else (1e-4, 1e-5)
        got = np.frombuffer(results.pop(), dtype)
        if np.dtype(dtype).kind in "fc":
            np.testing.assert_allclose(got, wanted, rtol=rtol, atol=atol)
        else:
            np.testing.assert_array_equal(got, wanted)


@pytest.mark.parametrize("size", [2, 3, 4, 7])
def test_small_and_large_arrays_have_the_same_bits_on_every_machine(size, monkeypatch):
    for length in (1, 2, 4001):
        check_bits(size, length, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("size", [5, 8, 16, 27, 32])
def test_they_do_with_arrays_of_several_chunks(size, monkeypatch):
    check_bits(size, 9 * CHUNK // 8 + 5, monkeypatch)


REDUCTIONS = [
    check
    for check in communicators.CHECKS
    if any(word in check.__name__ for word in ("reduc", "average", "weight", "layout", "together"))
]


@pytest.fixture(scope="module")
def five():
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(linked, "SMALL", 160)  # arrays of either kind
        transport = ThreadedMachines([1] * 5, timeout=60, have_progress_processes=False)
        ranks = Ranks(transport, lambda one: LinkedCommunicator(one.leaders))
        yield ranks
        ranks.close()


@pytest.mark.parametrize("check", REDUCTIONS, ids=lambda check: check.__name__[len("check_") :])
def test_five_machines(check, five):
    check(five)


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


def test_an_all_reduce_that_is_aborted_on_its_way_is_left_by_all(monkeypatch):
    """Rank 2 fails in one of its meetings, of which all ranks count the same."""

    monkeypatch.setattr(linked, "SMALL", 0)

    def reduce(leaders, stop):
        complete, met = leaders.complete, itertools.count()

        def failing(*arguments):
            if leaders.rank == 2 and next(met) == stop:
                leaders.abort()
                raise KeyError("on purpose")
            return complete(*arguments)

        leaders.complete = failing
        try:
            LinkedCommunicator(leaders).all_reduce([np.ones(100)], "sum")
        except (CollectiveAbortedError, KeyError) as error:
            return type(error)
        return leaders.passed

    meetings = together(5, lambda leaders: reduce(leaders, -1))
    assert len(set(meetings)) == 1
    for stop in range(meetings[0] - 1):
        found = together(5, lambda leaders, stop=stop: reduce(leaders, stop))
        assert found[2] is KeyError
        assert set(found) <= {KeyError, CollectiveAbortedError, meetings[0]}


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


@pytest.mark.parametrize("size", [3, 4, 8])
def test_messages_and_bytes_of_a_large_array_are_the_fewest(size, messages, monkeypatch):
    monkeypatch.setattr(linked, "SMALL", 0)
    nbytes = 8 * 840  # a multiple of the number of machines
    together(size, lambda one: LinkedCommunicator(one).all_reduce([np.ones(nbytes // 8)], "sum"))
    meeting, arrays = messages
    for rank in range(size):
        own = [nbytes for one, nbytes in arrays if one == rank]
        assert (len(own), sum(own)) == (2 * (size - 1), 2 * nbytes * (size - 1) // size)
    assert len(meeting) == size * (size - 1).bit_length()


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
