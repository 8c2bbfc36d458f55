"""Tests of checkpoints: they are restored completely or not at all, even after damage or a crash."""

import functools
import json
import os
import re
import resource
import signal
import sys
import zipfile
from pathlib import Path

import numpy as np
import psutil
import pytest
from compilers import FLOAT16, NAME, RandomStreams, Streams, compiler, tt
from prelude import run_file
from processes import own_process
from programs.training import print_training
from striking import end_of

import synkhronos as synk
from synkhronos.checkpoints import archive
from synkhronos.extensions import train
from synkhronos.world.world import current_world

VALUES = {
    "half": np.array([1.5, -0.0, np.nan, np.inf], FLOAT16), "number": np.array(2.5),
    "nothing": np.zeros((0, 3), "float32"), "flags": np.array([[True, False]]),
    "whole": np.array([-(2**63), 2**63 - 1]), "bytes": np.arange(256, dtype="uint8"),
    "complex": np.array([1 + 2j, -3j], "complex64"),
    "fortran": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
}  # fmt: skip


class Made:
    """Functions with many kinds of variables, and two random streams."""

    def __init__(self):
        self.shareds = {name: compiler.shared(value, name) for name, value in VALUES.items()}
        self.own = compiler.shared(np.zeros(2), "own")
        streams = [make(7) for make in (Streams, RandomStreams)]
        x = tt.dmatrix("x")
        self.draw = synk.function(
            [],
            [
                (stream.uniform(size=(2, 3)) + 0 * stream.normal(size=(2, 3)), "gather")
                for stream in streams
            ],
            mode="FAST_COMPILE",
        )
        self.use = synk.function(
            [x],
            [(x.sum(), "sum")],
            updates=[
                (self.own, self.own + x.sum(axis=0)),
                *((shared, shared) for shared in self.shareds.values()),
            ],
            mode="FAST_COMPILE",
        )
        synk.distribute()

    def spoil(self):
        self.draw()
        for shared in self.shareds.values():
            value = shared.get_value()
            synk.broadcast(shared, np.ones(value.shape, value.dtype))
        self.use(np.ones((5, 2)))

    def values(self):
        variables = [*self.shareds.values(), self.own]
        return [
            [(value.dtype, value.shape, value.tobytes()) for value in synk.get_value(rank, variables)]
            for rank in range(current_world().size)
        ]


@pytest.fixture
def made(world_of):
    def make(n, **kwargs):
        world_of(n, **kwargs)
        return Made()

    return make


@pytest.mark.parametrize("n, master_rank", [(1, 0), (2, 1), (3, 0)])
def test_every_rank_gets_back_what_it_had(made, tmp_path, n, master_rank):
    one = made(n, master_rank=master_rank)
    one.draw()
    one.use(np.arange(10.0).reshape(5, 2))  # `own` differs by rank
    before = one.values()
    synk.save(tmp_path / "file", {"step": 3})
    assert one.values() == before
    drawn = [values.tolist() for values in one.draw()]
    one.spoil()
    assert one.values() != before
    assert synk.load(tmp_path / "file") == {"step": 3}
    assert one.values() == before
    assert [values.tolist() for values in one.draw()] == drawn
    # Load it again in a new world whose workers have not started yet.
    other = made(n, master_rank=master_rank)
    assert synk.load(str(tmp_path / "file")) == {"step": 3}
    assert other.values() == before
    assert [values.tolist() for values in other.draw()] == drawn


def test_a_variable_is_written_once_unless_its_replicas_differ(made, tmp_path):
    one = made(2)
    synk.save(tmp_path / "same")
    synk.set_value(1, one.own, [1.0, -0.0])
    synk.set_value(0, one.own, [1.0, 0.0])  # equal, but with different bits
    synk.save(tmp_path / "differing")
    same, differing = (np.load(tmp_path / name) for name in ("same", "differing"))
    assert len(differing.files) == len(same.files) + 1
    assert sum(array.size == 256 for array in differing.values() if not isinstance(array, bytes)) == 1
    synk.load(tmp_path / "differing")
    assert np.signbit(synk.gather(one.own)).tolist() == [[False, False], [False, True]]


def test_the_same_state_gives_the_same_bytes(made, tmp_path):
    made(2)
    for name in ("first", "second"):
        synk.save(tmp_path / name, {"order": np.arange(4)})
    assert (tmp_path / "first").read_bytes() == (tmp_path / "second").read_bytes()


def test_extra_comes_back_as_it_was(made, tmp_path):
    made(1)
    random = np.random.RandomState(4)
    random.normal()  # the generator keeps a second normal number in its state
    extra = {
        "step": 2**70, "loss": float("nan"), "rate": np.float32(0.1), "flag": np.True_, "none": None,
        "név \ud800": "Zürich \ud800\n", "order": np.arange(3, dtype="int16"),
        "history": [[1.0, 2.0], [3.0, 4.0]], "empty": np.zeros((0, 2)), "scalar": np.array(5.0),
        "columns": np.asfortranarray(np.arange(4.0).reshape(2, 2)), "complex": 1j,
        "data": synk.data(np.arange(4.0)), "random": random,
    }  # fmt: skip
    synk.save(tmp_path / "file", extra)
    expected = random.normal(size=5).tolist()
    got = synk.load(tmp_path / "file")
    assert list(got) == list(extra)
    assert got.pop("random").normal(size=5).tolist() == expected
    assert np.isnan(got.pop("loss"))
    assert type(got["step"]) is int and type(got["flag"]) is bool and type(got["rate"]) is float
    for name, value in got.items():
        if isinstance(value, np.ndarray):
            want = np.asarray(extra[name])
            assert (value.dtype, value.shape) == (want.dtype, want.shape)
            np.testing.assert_array_equal(value, want)
        else:
            assert value == extra[name]
    synk.save(tmp_path / "file")
    assert synk.load(tmp_path / "file") == {}


def test_a_check_of_extra_comes_before_anything_is_changed(made, tmp_path):
    one = made(2)
    synk.save(tmp_path / "file", {"model": "a", "order": np.arange(3)})
    one.spoil()
    before, seen = one.values(), []

    def check(extra):
        seen.append((extra["model"], extra["order"].tolist()))
        if extra["model"] != "b":
            raise LookupError("another model")

    with pytest.raises(LookupError, match="another model"):
        synk.load(tmp_path / "file", check=check)
    assert one.values() == before and seen == [("a", [0, 1, 2])]
    assert synk.load(tmp_path / "file", check=seen.append)["model"] == "a"
    assert one.values() != before and seen[1]["model"] == "a"


@pytest.mark.parametrize(
    "extra, message",
    [
        ([1], "expected a dict"), ({1: 2}, "names that are strings"),
        ({"a": object()}, r"extra\['a'\]"), ({"a": np.array([None])}, r"extra\['a'\]"),
        ({"a": {"b": 1}}, r"extra\['a'\]"),
    ],
)  # fmt: skip
def test_extra_that_cannot_be_saved_is_refused_before_the_file_is_touched(
    made, tmp_path, extra, message
):
    made(1)
    with pytest.raises(TypeError, match=message):
        synk.save(tmp_path / "file", extra)
    with pytest.raises(ValueError, match="without"):
        synk.save(tmp_path / "file", without=compiler.shared(1.0))
    with pytest.raises(ValueError, match="without"):
        synk.save(tmp_path / "file", without=np.ones(2))
    assert list(tmp_path.iterdir()) == []


def test_what_is_no_tensor_is_refused_or_left_out(world_of, tmp_path):
    world_of(1)
    thing = compiler.shared([1, 2], "thing")
    number = compiler.shared(1.0, "number")
    synk.function([], [number * 2], givens={}, updates=[(thing, thing), (number, number + 1)])
    with pytest.raises(TypeError, match="thing.*without="):
        synk.save(tmp_path / "file")
    synk.save(tmp_path / "file", without=thing)
    synk.load(tmp_path / "file")


def named(names, values):
    shareds = [compiler.shared(np.full(2, float(value)), name) for name, value in zip(names, values)]
    for shared in shareds:
        synk.function([], updates=[(shared, shared + 1)], mode="FAST_COMPILE")
    return shareds


def networks(order, names=True, shapes=(3, 3), same_line=False):
    """Build functions of the networks "a" and "b" in this order; each has two weights called W."""
    x = tt.dmatrix("x")
    weights = {
        name: [compiler.shared(np.zeros(size), "W") for _ in range(2)]
        for name, size in zip("ab", shapes)
    }
    made = []
    for name in order:
        first, second = weights[name]
        output = tt.dot(x, first).sum() + 2 * second.sum()
        options = {"name": name} if names else {}
        if same_line or name == "a":
            made.append(synk.function([x], (output, None), mode="FAST_COMPILE", **options))
        else:
            made.append(synk.function([x], [(output, None)], mode="FAST_COMPILE", **options))
    return made, {name: weights[name] for name in order}


def save_networks(world_of, path, which, **options):
    """Save the weights of networks, and open another world."""
    world_of(1)
    made, weights = networks(which, **options)
    for start, pair in zip((1, 3), weights.values()):
        for number, one in enumerate(pair):
            one.set_value(np.full_like(one.get_value(), start + number))
    synk.save(path)
    world_of(1)
    del made


def read(weights):
    return {name: [one.get_value()[0] for one in pair] for name, pair in weights.items()}


@pytest.mark.parametrize(
    "options", [{}, {"names": False}, {"names": False, "shapes": (3, 4), "same_line": True}]
)
def test_equal_names_are_distinguished_by_functions_and_places_and_shapes(world_of, tmp_path, options):
    save_networks(world_of, tmp_path / "file", "ab", **options)
    made, weights = networks("ba", **options)  # noqa: F841  # keeps the functions
    synk.load(tmp_path / "file")
    assert read(weights) == {"a": [1, 2], "b": [3, 4]}


def test_equal_names_that_nothing_distinguishes_are_an_error_or_a_warning(world_of, tmp_path):
    save_networks(world_of, tmp_path / "file", "ab", names=False, same_line=True)
    again, weights = networks("ab", names=False, same_line=True)
    with pytest.warns(synk.SynkhronosWarning, match="variables 'W' are matched by the order"):
        synk.load(tmp_path / "file")
    assert read(weights) == {"a": [1, 2], "b": [3, 4]}
    world_of(1)
    again, weights = networks("ab")
    with pytest.raises(ValueError, match="not certain which variable of the file is 'W'"):
        synk.load(tmp_path / "file")
    assert read(weights) == {"a": [0, 0], "b": [0, 0]}
    del again


def test_the_updates_of_functions_may_be_listed_in_another_order(world_of, tmp_path):
    def build(order):
        world_of(2)
        x = tt.dmatrix("x")
        weights, targets = ([compiler.shared(np.ones((2, 2)), "W") for _ in range(3)] for _ in range(2))
        loss = tt.sqr(
            tt.dot(tt.tanh(tt.dot(tt.tanh(tt.dot(x, weights[0])), weights[1])), weights[2])
        ).sum()
        updates = [(weight, weight - 0.1 * tt.grad(loss, weight)) for weight in weights]
        copies = [(target, weight + 0 * target) for target, weight in zip(targets, weights)]
        step, copy = (
            synk.function(inputs, updates=[pairs[place] for place in order], mode="FAST_COMPILE")
            for inputs, pairs in (([x], updates), ([], copies))
        )
        return step, copy, [*weights, *targets]

    *functions, variables = build([0, 1, 2])
    for number, variable in enumerate(variables):
        synk.broadcast(variable, np.full((2, 2), float(number)))
    synk.save(tmp_path / "file")
    del functions
    *functions, variables = build([2, 0, 1])
    synk.load(tmp_path / "file")
    assert [variable.get_value()[0, 0] for variable in variables] == [0, 1, 2, 3, 4, 5]
    del functions


def test_equal_names_in_changed_functions_are_found_by_the_outputs_or_refused(world_of, tmp_path):
    def build(order, dtype="float64", has_output=True, function=tt.sqr):
        world_of(1)
        x, pair = tt.dmatrix("x"), [compiler.shared(np.ones((2, 2)), "W") for _ in range(2)]
        bias = compiler.shared(np.ones(2, dtype), "bias")
        shifted = tt.cast(x, dtype) + bias
        loss = function(tt.dot(tt.dot(x, pair[0]), pair[1])).mean() + tt.sqr(shifted).mean()
        updates = [(item, tt.cast(item - tt.grad(loss, item), item.dtype)) for item in [*pair, bias]]
        ordered = [updates[place] for place in order]
        outputs = loss if has_output else []
        make = train.parallel_function if has_output else synk.function
        return make([x], outputs, updates=ordered, mode="FAST_COMPILE"), pair

    for has_output in (True, False):
        step, pair = build([0, 1, 2], has_output=has_output)
        synk.broadcast(pair[1], np.zeros((2, 2)))
        synk.save(tmp_path / f"file{has_output}")
        del step
    step, pair = build([1, 0, 2])
    synk.load(tmp_path / "fileTrue")
    assert [variable.get_value()[0, 0] for variable in pair] == [1, 0]
    del step
    step, _ = build([0, 1, 2], "float32")
    with pytest.raises(ValueError, match="not fit: 'bias.* is float32, in the file float64"):
        synk.load(tmp_path / "fileTrue")
    del step
    step, _ = build([1, 0, 2], has_output=False, function=tt.cosh)
    with pytest.raises(ValueError, match="not certain which variable of the file is 'W'"):
        synk.load(tmp_path / "fileFalse")
    del step


def test_a_part_is_loaded_if_the_script_asks_for_it(world_of, tmp_path):
    save_networks(world_of, tmp_path / "file", "ab")
    made, weights = networks("b")
    new = compiler.shared(np.full(3, 7.0), "new")
    other = synk.function([], updates=[(new, new)], mode="FAST_COMPILE")
    with pytest.raises(ValueError, match=r"'new' is not in the file; .* or load\(path, strict=False\)"):
        synk.load(tmp_path / "file")
    assert read(weights) == {"b": [0, 0]}
    synk.load(tmp_path / "file", strict=False)
    assert (read(weights), new.get_value()[0]) == ({"b": [3, 4]}, 7)
    del made, other


def test_a_file_without_functions_as_of_older_versions_is_loaded_by_order(world_of, tmp_path):
    save_networks(world_of, tmp_path / "file", "ab")
    path = rewritten(tmp_path, lambda description: description.pop("functions"))
    made, weights = networks("ab", names=False)
    synk.load(path)
    assert read(weights) == {"a": [1, 2], "b": [3, 4]}
    del made


def test_other_variables_are_an_error_that_names_them(world_of, tmp_path):
    world_of(1)
    saved = named(["W", "b", None], [1, 2, 3])
    synk.save(tmp_path / "file")
    assert len(saved) == 3
    world_of(1)
    shareds = named(["W", "W", "c"], [7, 8, 9])
    with pytest.raises(ValueError) as error:
        synk.load(tmp_path / "file")
    for words in (
        "'b' is in the file, but no function here uses it",
        "a variable without a name (number 1 of these) is in the file",
        "not certain which variable of the file is 'W'; it is",
        "'c' is not in the file",
        "nothing was changed",
    ):
        assert words in str(error.value)
    assert [shared.get_value()[0] for shared in shareds] == [7, 8, 9]


def test_other_shapes_and_dtypes_are_an_error_and_nothing_is_changed(world_of, tmp_path):
    def make(shape, dtype):
        world_of(2)
        a, b = compiler.shared(np.ones(3), "a"), compiler.shared(np.ones(shape, dtype), "b")
        synk.function([], updates=[(a, a + 1), (b, b)], mode="FAST_COMPILE")
        synk.distribute()
        return a, b

    a, b = make((2, 2), "float32")
    synk.broadcast(a, np.zeros(3))
    synk.save(tmp_path / "file")
    for shape, dtype in (((2, 3), "float32"), ((2, 2), "float64")):
        a, b = make(shape, dtype)
        message = "'b' on rank 0 is .*; 'b' on rank 1 .*nothing was changed"
        with pytest.raises(ValueError, match=message) as error:
            synk.load(tmp_path / "file")
        remedy = "dtypes as in the script" if dtype == "float64" else "shapes first"
        assert remedy in str(error.value)
        assert synk.gather(a).tolist() == np.ones((2, 3)).tolist()
    a, b = make((2, 2), "float32")
    synk.set_value(1, b, np.ones((1, 2), "float32"))
    with pytest.raises(ValueError, match="rank 1 .*set_value or scatter"):
        synk.load(tmp_path / "file")
    # The number of a rank's own rows may differ from the file, but nothing else.
    synk.save(tmp_path / "file")
    synk.set_value(1, b, np.zeros((3, 2), "float32"))
    synk.load(tmp_path / "file")
    assert synk.get_shapes(b) == [(2, 2), (1, 2)] and synk.get_value(1, b).tolist() == [[1, 1]]
    a, b = make((2, 3), "float32")
    with pytest.raises(ValueError, match="rank 1 is float32"):
        synk.load(tmp_path / "file")


def test_scattered_rows_are_saved_by_rank_or_left_out(world_of, tmp_path):
    def make(n):
        world_of(n)
        rows, w = compiler.shared(np.zeros((1, 2)), "rows"), compiler.shared(np.zeros(2), "w")
        f = synk.function([], (rows.sum(), "sum"), updates=[(w, w + 1)], sliceable_shareds=[rows],
                          mode="FAST_COMPILE")  # fmt: skip
        synk.scatter(rows, np.arange(10.0).reshape(5, 2))
        return rows, w, f

    rows, w, f = make(2)
    assert f() == 45
    synk.save(tmp_path / "whole")
    synk.save(tmp_path / "left_out", without=[rows])
    synk.scatter(rows, np.zeros((5, 2)))
    synk.load(tmp_path / "left_out")
    assert f() == 0
    synk.load(tmp_path / "whole")
    assert f() == 45 and w.get_value()[0] == 2
    # After a restart, every rank has the master's rows until it loads its own from the file.
    synk.restart()
    assert synk.get_lengths(rows) == [3, 3]
    synk.load(tmp_path / "whole")
    assert synk.get_lengths(rows) == [3, 2] and f() == 45
    # Load it with a different number of ranks.
    rows, w, f = make(3)
    message = r"saved by 2 ranks, but there are 3 ranks now.*'rows'.*fork\(2\).*without="
    with pytest.raises(ValueError, match=message):
        synk.load(tmp_path / "whole")
    assert synk.gather(w).sum() == 0
    synk.load(tmp_path / "left_out")
    assert synk.gather(w).tolist() == [[1, 1]] * 3 and f() == 45


@pytest.mark.parametrize("saved, loaded", [(3, 2), (2, 3), (1, 2), (2, 1)])
def test_another_number_of_ranks_loads_what_was_alike_and_separates_the_streams(
    made, tmp_path, saved, loaded
):
    one = made(saved, master_rank=saved - 1)
    one.draw()
    synk.broadcast(one.own, [3.0, 4.0])
    synk.save(tmp_path / "file")
    before = one.values()[0]
    masters = [values[2 * saved - 2 :].tolist() for values in one.draw()]
    other = made(loaded)
    other.spoil()
    synk.load(tmp_path / "file")
    assert other.values() == [before] * loaded
    for values, of_master in zip(other.draw(), masters):
        assert values[:2].tolist() == of_master
        assert len(np.unique(values)) == values.size


def test_paths_that_are_no_place_for_a_file_are_refused(made, tmp_path):
    made(1)
    with pytest.raises(FileNotFoundError, match="no folder"):
        synk.save(tmp_path / "missing" / "file")
    with pytest.raises(IsADirectoryError):
        synk.save(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    os.symlink("pipe", tmp_path / "link")
    for name in ("pipe", "link"):  # likewise a device: root could replace /dev/null with a file
        with pytest.raises(OSError, match="device, pipe or socket"):
            synk.save(tmp_path / name)
        assert (tmp_path / name).is_fifo()
    for name in ("missing", ".", "pipe"):
        with pytest.raises(FileNotFoundError, match="no file"):
            synk.load(tmp_path / name)


def test_leftovers_of_the_dead_are_removed_and_nothing_else(made, tmp_path):
    import fcntl

    made(1)
    left = [f".f*le.npz.{number:016x}.unfinished" for number in range(3)]
    others = [".f*le.npz.unfinished", f".file.npz.{0:016x}.unfinished"]
    others += [f".f*le.npz.{0:016x}.unfinished2"]
    for name in left + others:
        (tmp_path / name).write_bytes(b"part")
    os.symlink("/etc/passwd", tmp_path / f".f*le.npz.{5:016x}.unfinished")
    with open(tmp_path / left[0]) as written_by_another:
        fcntl.flock(written_by_another, fcntl.LOCK_EX)
        synk.save(tmp_path / "f*le.npz")
    there = {path.name for path in tmp_path.iterdir()}
    assert there == {*others, left[0], "f*le.npz", f".f*le.npz.{5:016x}.unfinished"}
    synk.save(tmp_path / "f*le.npz")
    assert not (tmp_path / left[0]).exists()


@own_process
def test_a_full_disk_leaves_the_old_file_and_nothing_else():
    synk.fork(2, use_gpu=False)
    w = compiler.shared(np.zeros(100_000), "w")
    f = synk.function([], updates=[(w, w + 1)], mode="FAST_COMPILE")
    synk.save("file")
    f()
    for limit in (0, 1, 100, 4096, 100_000, 799_999, 800_300):
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
        with pytest.raises(OSError, match="File too large"):
            synk.save("file")
    resource.setrlimit(resource.RLIMIT_FSIZE, (-1, -1))
    assert os.listdir() == ["file"]
    synk.load("file")
    assert synk.gather(w).tolist() == [[0] * 100_000] * 2
    f()
    synk.save("file")


def open_counting():
    synk.fork(2, use_gpu=False)
    w = compiler.shared(np.zeros(300_000), "w")  # large enough to be written in several pieces
    return w, synk.function([], updates=[(w, w + 1)], mode="FAST_COMPILE")


def traced(write, last, *args):
    """Write a file, and save the number of lines of Python executed. Die at line number `last`."""
    count = 0

    def trace(frame, event, argument):
        nonlocal count
        if event == "line":
            count += 1
            if count == last:
                os.kill(os.getpid(), signal.SIGKILL)
        return trace

    sys.settrace(trace)
    write(*args)
    sys.settrace(None)
    Path("moments").write_text(str(count))


def save_next(moment):
    """Load the checkpoint, check it, and save the next step. Die at a moment, unless it is None."""
    w, f = open_counting()
    step = synk.load("file")["step"]
    assert (synk.gather(w) == step).all()
    with open("seen", "a") as file:
        file.write(f"{step}\n")
    f()
    archive.write = functools.partial(traced, archive.write, moment)
    synk.save("file", {"step": step + 1})
    synk.close()


def save_first():
    w, _ = open_counting()
    synk.save("file", {"step": 0})
    assert not w.get_value().any()
    synk.close()


def unfinished():
    return list(Path().glob("*unfinished*"))


def leave_one():
    """Leave exactly one unfinished file, so that each child runs the same lines."""
    for path in unfinished():
        path.unlink()
    Path(".file.0123456789abcdef.unfinished").touch()


@pytest.mark.slow
@own_process(timeout=200)
def test_a_process_that_is_killed_while_saving_leaves_a_whole_checkpoint():
    assert end_of(save_first) == 0
    leave_one()
    assert end_of(save_next, None) == 0
    moments = int(Path("moments").read_text())
    # In the last lines, the new file replaces the old one, so all of them are tried.
    chosen = sorted({*range(1, moments + 1, moments // 12), *range(moments - 24, moments + 1)})
    for moment in chosen:
        leave_one()
        assert end_of(save_next, moment) == -signal.SIGKILL
        assert len(unfinished()) <= 1, unfinished()
    assert end_of(save_next, None) == 0
    assert not unfinished()
    assert end_of(save_next, None) == 0
    # From one run to the next, the step increases by 1 if the run had replaced the file before it
    # was killed, or else by 0.
    seen = [int(line) for line in Path("seen").read_text().split()][1:-1]
    new = np.diff(seen)
    assert len(new) == len(chosen) >= 30 and set(new) == {0, 1}


@pytest.fixture
def small(world_of, tmp_path):
    """Shared variable in a world of one rank, with a small checkpoint in ``tmp_path / "file"``."""
    world_of(1)
    w = compiler.shared(np.arange(3.0), "w")
    streams = RandomStreams(3)
    f = synk.function([], streams.uniform(size=(2,)), updates=[(w, w + 1)], mode="FAST_COMPILE")
    synk.save(tmp_path / "file", {"step": 7, "order": np.arange(4)})
    f()
    yield w
    assert f.get_shared()  # what is dropped would not be loaded


def test_a_file_that_is_cut_off_or_changed_anywhere_is_an_error_or_as_good_as_whole(small, tmp_path):
    content = (tmp_path / "file").read_bytes()
    damaged = [content[:length] for length in range(0, len(content), 41)]
    damaged += [content + b"x", content[1:], b"", os.urandom(1000), content[:500] + content[600:]]
    for position in range(0, len(content), 5):
        one = bytearray(content)
        one[position] ^= 1 << position % 8
        damaged.append(bytes(one))
    refused = 0
    for one in damaged:
        small.set_value(np.ones(3))
        (tmp_path / "damaged").write_bytes(one)
        try:
            extra = synk.load(tmp_path / "damaged")
        except ValueError:
            refused += 1
            assert small.get_value().tolist() == [1, 1, 1]
        else:  # the damaged byte has no meaning, e.g. in a date
            assert small.get_value().tolist() == [0, 1, 2]
            assert extra["order"].tolist() == [0, 1, 2, 3] and extra["step"] == 7
    assert refused > 0.8 * len(damaged)
    synk.load(tmp_path / "file")


def rewritten(tmp_path, change=None, members=None, compression=zipfile.ZIP_STORED):
    with zipfile.ZipFile(tmp_path / "file") as archive:
        content = {name: archive.read(name) for name in archive.namelist()}
    description = json.loads(content["synkhronos.json"])
    if change is not None:
        change(description)
    content["synkhronos.json"] = json.dumps(description).encode()
    content.update(members or {})
    path = tmp_path / "hostile"
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, one in content.items():
            archive.writestr(name, one)
    return path


def member(description, name):
    return next(entry[4][0] for entry in description["entries"] if entry[0] == name) + ".npy"


def npy(header, body=b""):
    return b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + body


class Trap:
    def __reduce__(self):
        return os.mkdir, ("trapped",)


def pickled(tmp_path):
    import io

    buffer = io.BytesIO()
    np.save(buffer, np.array([Trap()], object), allow_pickle=True)
    return buffer.getvalue()


def hostile_members(tmp_path):
    doc = json.loads(zipfile.ZipFile(tmp_path / "file").read("synkhronos.json"))
    w, state = member(doc, "w"), next(e[4][0] for e in doc["entries"] if e[2] == "uint32") + ".npy"
    shape = b"{'descr': '%s', 'fortran_order': False, 'shape': %s, }\n"
    numbers = np.zeros(628, "uint32")
    numbers[624] = 2**31
    yield {w: pickled(tmp_path)}
    yield {"extra_0.npy": pickled(tmp_path)}
    yield {w: npy(shape % (b"<f8", b"(1000000000000,)"))}
    yield {"extra_0.npy": npy(shape % (b"<f8", b"(1000000000000,)"))}
    yield {"extra_0.npy": npy(shape % (b"<f8", b"(-1, -3)"), bytes(24))}
    yield {"extra_0.npy": npy(shape % (b"|O", b"(3,)"), bytes(24))}
    yield {"extra_0.npy": npy(shape % (b"|S8", b"(3,)"), bytes(24))}
    yield {"extra_0.npy": npy(shape % (b"|V8", b"(3,)"), bytes(24))}
    yield {w: npy(b"(" * 60_000)}
    yield {w: npy(b"-" * 900 + b"1\n")}
    yield {w: npy(b"__import__('os').mkdir('trapped')\n", bytes(24))}
    yield {w: npy(shape % (b"<f8", b"(3,)"), bytes(25))}
    yield {w: npy(shape % (b"<f8", b"(3,)"), bytes(23))}
    yield {w: npy(shape % (b"<f4", b"(6,)"), bytes(24))}
    yield {state: npy(shape % (b"<u4", b"(628,)"), numbers.tobytes())}


@pytest.mark.skipif(NAME == "pytensor", reason="the members belong to streams of Theano")
def test_hostile_arrays_are_refused_and_never_unpickled(small, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    small.set_value(np.ones(3))
    for members in hostile_members(tmp_path):
        path = rewritten(tmp_path, members=members)
        with pytest.raises(ValueError, match=r"hostile' is damaged, or is not a checkpoint"):
            synk.load(path)
        assert small.get_value().tolist() == [1, 1, 1]
    with pytest.raises(ValueError, match="is not stored"):
        synk.load(rewritten(tmp_path, compression=zipfile.ZIP_DEFLATED))
    for name in ("plain", "model"):
        np.savez(tmp_path / name, w=np.arange(3.0))
        with pytest.raises(ValueError, match="not a checkpoint written by synk.save"):
            synk.load(tmp_path / f"{name}.npz")
    assert not (tmp_path / "trapped").exists()


def test_hostile_descriptions_are_refused(small, tmp_path):
    def at(*path, value):
        def change(description):
            for step in path[:-1]:
                description = description[step]
            description[path[-1]] = value

        return change

    small.set_value(np.ones(3))
    for change in (
        at("format", value=["synkhronos checkpoint", 3]), at("ranks", value=0), at("ranks", value="1"),
        at("ranks", value=None), at("master_rank", value=-1), at("master_rank", value=10**30),
        at("entries", value=None), at("entries", value=[]), at("entries", value=[[]]),
        at("entries", 0, 0, value=["w"]), at("entries", 0, 0, value={}), at("entries", 0, 1, value="0"),
        at("entries", 0, 2, value="O"), at("entries", 0, 3, value=[[10**18]]),
        at("entries", 0, 3, value=[]), at("entries", 0, 3, value=[None]),
        at("entries", 0, 4, value=["missing"]), at("entries", 0, 4, value=["../../etc/passwd"]),
        at("entries", 0, 4, value=[]), at("left_out", value=[1]), at("left_out", value=[["w", 0]]),
        at("functions", value=1), at("functions", value=[["f", [["other", 0]]]]),
        at("functions", 0, 0, value=[]), at("functions", 0, 1, value=[["w", 0], ["w", 0]]),
        at("functions", value=[["f", [[7, [["w", 0]]]]]]), at("functions", value=[["f", [["", ["w"]]]]]),
        at("functions", value=[["f", [["digest", [["other", 0]]]]]]), at("functions", value=[["f", 1]]),
        at("extra", value=[]), at("extra", "step", value=["pickle", "extra_0"]),
        at("extra", "step", value=["array", "shared_99"]),
        at("extra", "step", value=["random_state", "extra_0"]), at("extra", "step", value=7),
    ):  # fmt: skip
        with pytest.raises(ValueError):
            synk.load(rewritten(tmp_path, change))
        assert small.get_value().tolist() == [1, 1, 1]
    deep = "[" * 100_000
    with pytest.raises(ValueError, match="is damaged"):
        synk.load(rewritten(tmp_path, members={"synkhronos.json": deep.encode()}))


@pytest.mark.parametrize(
    "n", [pytest.param(1, marks=pytest.mark.slow), 2, pytest.param(3, marks=pytest.mark.slow)]
)
def test_a_resumed_run_equals_the_uninterrupted_one_bit_for_bit(programs, tmp_path, n):
    """Check it for an interpreter with a different hash seed, too."""
    uninterrupted, saving = (
        programs.run(print_training, n, mode, cwd=tmp_path).check().stdout
        for mode in ("uninterrupted", "saving")
    )
    resumed = run_file(
        "training.py", n, "resumed", cwd=tmp_path, environment={"PYTHONHASHSEED": "2"}
    ).stdout
    assert saving == uninterrupted
    assert resumed == uninterrupted
    assert len(re.findall(r"\d\.\d", resumed)) == 12


@own_process
def test_saving_and_loading_take_one_more_copy_at_most():
    size = 64 << 20
    synk.fork(2, use_gpu=False)
    w = compiler.shared(np.ones(size // 8), "w")
    touch = synk.function([], (w[0], None), updates=[(w, w + 1)])
    touch()  # now each rank has its own memory for the variable
    processes = [os.getpid(), *(child.pid for child in psutil.Process().children())]

    def field(pid, name):
        status = Path(f"/proc/{pid}/status").read_text()
        return int(re.search(name + r":\s+(\d+)", status)[1]) << 10

    def growth(call):
        before = [field(pid, "VmRSS") for pid in processes]
        for pid in processes:
            Path(f"/proc/{pid}/clear_refs").write_text("5")
        call()
        return [(field(pid, "VmHWM") - one) / size for pid, one in zip(processes, before)]

    alike = growth(lambda: synk.save("file"))
    assert max(alike) < 0.3, alike  # only pieces are copied
    # There is one copy in shared memory. It counts towards every process that accesses it.
    loading = growth(lambda: synk.load("file"))
    assert max(loading) < 1.3, loading
    synk.set_value(1, w, np.zeros(size // 8))
    current_world().rank_state.store.trim()
    differing = growth(lambda: synk.save("file"))
    assert max(differing) < 1.3, differing
