"""Tests of files with values of every rank of a program."""

import os
import signal
from pathlib import Path

import numpy as np
import pytest
from compilers import compiler

import synkhronos as synk

RANKS = 3
REFUSED = (TypeError, ValueError, OSError, RuntimeError, synk.SynkhronosError)


@pytest.fixture(scope="module")
def world(open_world):
    open_world(RANKS, timeout=60)
    compiler.shared(np.zeros(1))
    synk.distribute()


@pytest.fixture
def path(world, tmp_path):
    return str(tmp_path / "values.npz")


def test_each_rank_gets_its_values_back(path):
    def program(rank):
        generator = np.random.RandomState(rank.rank)
        generator.rand(5)
        values = {
            "number": 0.1 + rank.rank, "text": f"rank {rank.rank}", "nothing": None, "flag": True,
            "equal": np.arange(6.0).reshape(2, 3), "empty": np.zeros((0, 2), "int8"),
            "own": np.full((2, rank.rank + 1), rank.rank, "float32"), "scalar": np.array(rank.rank),
            "big-endian": np.arange(3, dtype=">i4"), "generator": generator,
            f"only on {rank.rank}": np.arange(rank.rank),
        }  # fmt: skip
        rank.save(path, values)
        return values, rank.load(path)

    for rank, (values, loaded) in enumerate(synk.spmd(program)):
        assert list(loaded) == list(values) and f"only on {rank}" in loaded
        assert loaded.pop("generator").rand() == values.pop("generator").rand()
        for name, value in values.items():
            found = np.asarray(loaded[name])
            assert found.dtype == np.asarray(value).dtype and np.array_equal(found, value), name
        loaded["own"][:] = 7  # it is the rank's own


def test_the_master_may_be_any_rank(open_world, tmp_path):
    open_world(2, master_rank=1, timeout=60)

    def program(rank, path):
        rank.save(path, {"x": np.full(3, rank.rank), "rank": rank.rank})
        there = rank.load(path)
        return there["x"].tolist(), there["rank"], rank.is_master

    found = synk.spmd(program, tmp_path / "values")
    assert found == [([0] * 3, 0, False), ([1] * 3, 1, True)]
    open_world(RANKS, timeout=60)


def test_wrong_values_and_files_are_refused_on_every_rank(path, tmp_path):
    for values, words in (
        ([1], "values: expected a dict"),
        ({1: 2}, "expected names that are strings"),
        ({"x": object()}, r"values\['x'\]: expected numbers"),
    ):
        with pytest.raises(REFUSED, match=words):
            synk.spmd(lambda rank, values=values: rank.save(path, values))
        assert not os.path.exists(path)
    with pytest.raises(REFUSED, match="there is no folder"):
        synk.spmd(lambda rank: rank.save(tmp_path / "no" / "file", {}))
    with pytest.raises(FileNotFoundError, match="there is no file"):
        synk.spmd(lambda rank: rank.load(path))
    synk.save(path)
    with pytest.raises(ValueError, match="expected the format"):
        synk.spmd(lambda rank: rank.load(path))
    assert synk.spmd(lambda rank: rank.rank) == [0, 1, 2]  # the processes can be used


def test_a_damaged_file_is_refused_before_any_rank_gets_something(path):
    synk.spmd(lambda rank: rank.save(path, {"x": np.full(100, rank.rank), "g": rank.random}))
    whole = Path(path).read_bytes()
    for at in (len(whole) // 3, len(whole) // 2):
        with open(path, "wb") as file:
            file.write(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        with pytest.raises(ValueError, match="is damaged"):
            synk.spmd(lambda rank: rank.load(path))


def test_a_file_of_another_number_of_ranks_is_refused(open_world, tmp_path):
    path = tmp_path / "values"
    open_world(2, timeout=60)
    synk.spmd(lambda rank: rank.save(path, {}))
    open_world(RANKS, timeout=60)
    with pytest.raises(ValueError, match=r"expected a file of 3 rank\(s\), got 2"):
        synk.spmd(lambda rank: rank.load(path))


def test_ranks_at_another_point_do_not_wait(path):
    def program(rank):
        if rank.rank:
            rank.barrier()
        else:
            rank.save(path, {})

    with pytest.raises(REFUSED, match="at different collectives"):
        synk.spmd(program)
    assert not os.path.exists(path)


def test_a_rank_that_dies_while_saving_leaves_the_former_file(open_world, tmp_path):
    path = tmp_path / "values"
    open_world(RANKS, timeout=60)
    synk.spmd(lambda rank: rank.save(path, {"x": 1}))
    former = path.read_bytes()

    class Deadly:
        def __array__(self, *args, **kwargs):
            os.kill(os.getpid(), signal.SIGKILL)

    def program(rank):
        rank.save(path, {"x": Deadly() if rank.rank == 1 else 2})

    with pytest.raises(synk.WorldBrokenError):
        synk.spmd(program)
    assert path.read_bytes() == former
    assert os.listdir(tmp_path) == ["values"]
    open_world(RANKS, timeout=60)
