"""Tests of `Data`: its contents, its growth, invalid arguments, and what every rank sees of it."""

import copy
import gc
import os
import pickle
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor
from random import Random

import numpy as np
import pytest
from compilers import compiler, tt
from hypothesis import assume, given, strategies as st
from hypothesis.extra import numpy as arrays_of
from oracle import examples

import synkhronos as synk
from synkhronos.extensions import train, updates
from synkhronos.world.world import current_world

#: NumPy 2 has its warnings in another module.
EXCEPTIONS = getattr(np, "exceptions", np)
COMPLEX_WARNING = EXCEPTIONS.ComplexWarning
DTYPES = [
    "bool", "int8", "int32", "int64", "uint8", "uint16", "float16", "float32", "float64", "complex64",
]  # fmt: skip
SIZE = 3


class World:
    """Functions that return what each rank sees of a `Data`."""

    def __init__(self):
        self.matrix, self.vector = tt.matrix("m", dtype="float32"), tt.lvector("v")
        self.rows = synk.function([self.matrix], (self.matrix, "gather"))
        rank_of = self.vector
        self.whole = synk.function(
            [rank_of],
            [(self.matrix.dimshuffle("x", 0, 1) * 1.0, "gather")],
            bcast_inputs=[self.matrix],
            on_unused_input="ignore",
        )
        synk.distribute()

    def check_seen(self, data):
        expected = np.array(data.data)
        (got,) = self.whole(np.arange(SIZE), data)
        np.testing.assert_array_equal(got, np.stack([expected] * SIZE))
        if len(expected):
            np.testing.assert_array_equal(self.rows(data), expected)
            picked = list(range(len(expected)))[::-2]
            np.testing.assert_array_equal(self.rows(data, batch=picked), expected[picked])


@pytest.fixture(scope="module")
def world(open_world):
    open_world(SIZE, master_rank=1)
    return World()


@given(
    data=st.data(),
    dtype=st.sampled_from(DTYPES),
    shape=arrays_of.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=3),
)
@examples(60)
def test_data_holds_a_copy_of_any_array(world, data, dtype, shape):
    value = np.asarray(np.random.default_rng(0).integers(0, 3, shape)).astype(dtype)
    layout = data.draw(st.sampled_from(["plain", "transposed", "strided", "data", "swapped"]))
    if layout == "transposed":
        value = value.T
    elif layout == "strided" and value.ndim:
        value = np.repeat(value, 2, axis=0)[::-2]
    elif layout == "swapped":
        value = value.astype(value.dtype.newbyteorder())
    made = synk.data(synk.data(value) if layout == "data" else value, oversize=1.5)
    assert made.dtype == np.dtype(dtype) or layout == "swapped"
    assert (made.shape, made.ndim, made.size) == (value.shape, value.ndim, value.size)
    assert made.alloc_size == int(value.size * 1.5)
    np.testing.assert_array_equal(made.data, value)
    np.testing.assert_array_equal(np.asarray(made), value)
    before = value.copy()
    value[...] = 0
    np.testing.assert_array_equal(made, before)
    made[...] = 1
    assert not value.any()


def test_data_of_another_byte_order_is_seen_right_by_functions(world):
    value = np.arange(6.0).reshape(3, 2).astype(">f4")
    for made in (synk.data(value, var=world.matrix), synk.data(value), synk.data(value, dtype=">f4")):
        assert made.dtype == np.dtype("float32") and made.dtype.isnative
        world.check_seen(made)


def test_data_takes_dtype_ndim_and_name_from_a_variable(world):
    made = synk.data(var=world.matrix)
    assert (made.dtype, made.ndim, made.shape, made.name) == ("float32", 2, (0, 0), "m")
    assert synk.data([[1, 2]], var=world.matrix, name="mine").name == "mine"
    assert synk.data(dtype="int8", ndim=3).shape == (0, 0, 0)
    assert synk.data(shape=[2, 3], dtype="int8").data.tolist() == [[0] * 3] * 2
    assert synk.data(1.5).shape == ()
    assert synk.data([1, 2]).dtype == "int64"
    assert synk.data([1], minibatch=True).minibatch and not synk.data([1]).minibatch


@given(source=st.sampled_from(DTYPES), target=st.sampled_from(DTYPES))
@examples(100)
def test_only_safe_casts_happen_unless_they_are_forced(world, source, target):
    value = np.array([0, 1, 1], source)
    made = synk.data(dtype=target, ndim=1)
    made.set_value(np.array([1], target))
    if np.can_cast(source, target, "safe"):
        made.set_value(value)
        conditioned = made.condition_data(value)
        assert conditioned.dtype == target
    else:
        with pytest.raises(TypeError, match="force_cast"):
            made.set_value(value)
        with pytest.raises(TypeError, match="force_cast"):
            made.condition_data(value)
        assert made.data.tolist() == [1]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", COMPLEX_WARNING)
            made.set_value(value, force_cast=True)
    assert made.dtype == target
    assert made.data.tolist() == value.real.astype(target).tolist()


def test_python_numbers_do_not_become_infinite(world):
    for numbers in ([1e300, 1.0], [-1e39], [70000, 2**63]):
        made = synk.data(dtype="float16", ndim=1)
        with pytest.raises(TypeError, match="force_cast"):
            made.set_value(numbers)
        with np.errstate(over="ignore"):
            made.set_value(numbers, force_cast=True)
        assert np.isinf(made[0])
    assert np.isinf(synk.data([float("inf")], dtype="float16")[0])


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_data_cannot_be_copied_or_pickled_and_say_so(world, copied):
    made = synk.data(np.ones(2), name="made")
    with pytest.raises(TypeError, match="Data 'made': .*array"):
        copied(made)


def test_data_is_what_it_was_after_there_was_not_enough_memory(world):
    made = synk.data(np.ones((2, 3), "float32"))
    for call in (lambda: made.set_shape((1 << 50, 3)), lambda: made.set_length(1 << 50)):
        with pytest.raises(MemoryError):
            call()
        world.check_seen(made)
        assert made.data.tolist() == [[1, 1, 1]] * 2
    with pytest.raises(MemoryError):
        synk.data(shape=(1 << 55,), dtype="int8")


@given(data=st.data())
@examples(60)
def test_data_is_indexed_as_an_array(world, data):
    array = np.arange(24.0).reshape(4, 3, 2)
    made = synk.data(array)
    index = data.draw(
        arrays_of.basic_indices(array.shape, allow_newaxis=True, allow_ellipsis=True)
        | arrays_of.integer_array_indices(array.shape)
        | arrays_of.arrays(bool, array.shape)
    )
    np.testing.assert_array_equal(made[index], array[index])
    made[index] = -1
    array[index] = -1
    np.testing.assert_array_equal(made, array)
    np.testing.assert_array_equal(made + array, 2 * array)


def test_numpy_copies_data_if_it_is_asked_to(world):
    data = synk.data(np.arange(3.0, dtype="float32"))
    for copied in (np.array(data), data.__array__(copy=True), data.__array__("float32", copy=True)):
        np.testing.assert_array_equal(copied, data.data)
        assert not np.shares_memory(copied, data.data)
    viewed = [np.asarray(data), np.asarray(data, "float32"), np.array(data, copy=False)]
    for same in (*viewed, *(data.__array__(copy=copied) for copied in (None, False))):
        assert np.shares_memory(same, data.data)
    for copied in (None, True):
        assert data.__array__("float64", copy=copied).tolist() == [0, 1, 2]
    with pytest.raises(ValueError, match="cannot be used as float64 without a copy"):
        data.__array__("float64", copy=False)
    if np.lib.NumpyVersion(np.__version__) >= "2.0.0":
        with pytest.raises(ValueError, match="cannot be used as float64 without a copy"):
            np.array(data, "float64", copy=False)


def test_freed_data_take_new_memory_as_large_as_they_need(world):
    made = synk.data(np.ones((100, 2)), oversize=2, name="rows")
    view = made.data
    for _ in range(2):
        made.free_memory()
        made.set_value(np.full((3, 2), 5.0))
        assert made.alloc_size == 6 and made.data.tolist() == [[5, 5]] * 3
        made.free_memory()
        made.set_length(4)  # keeps the former width of the rows
        assert made.alloc_size == 8 and made.data.tolist() == [[0, 0]] * 4
        made.free_memory()
        made.set_shape((1, 5), oversize=2)
        assert made.alloc_size == 10 and made.data.tolist() == [[0] * 5]
        made.set_shape((2, 2))
        assert made.alloc_size == 10
        made.set_length(8, oversize=1.5)
        assert made.alloc_size == 24 and made.data.tolist() == [[0, 0]] * 8
    assert (view == 1).all()
    number = synk.data(7)
    number.free_memory()
    number.set_shape(())
    assert number.data == 0
    number.free_memory()
    number.set_value(8)
    assert number.data == 8


def test_freed_data_can_be_inputs_again(world):
    made = synk.data(np.ones((6, 3), "float32"))
    world.check_seen(made)
    made.free_memory()
    made.set_value(np.arange(12, dtype="float32").reshape(4, 3))
    world.check_seen(made)


@pytest.mark.parametrize("columns", [2, 3000])
@pytest.mark.parametrize("batch", [None, slice(1, 9, 2), slice(8, 2, -1), [7, 0, 3, 3]], ids=str)
def test_a_repeated_call_sees_what_has_changed(world, batch, columns):
    data = synk.data(np.zeros((10, columns), "float32"))
    rows = slice(None) if batch is None else batch
    for value in range(1, 5):
        data[:] = value * np.arange(1, 11)[:, None]
        np.testing.assert_array_equal(world.rows(data, batch=batch), data.data[rows])
    for value in range(5, 8):
        data[:] = value * np.arange(1, 11)[:, None]
        with synk.fuse():  # each machine gets the rows of both in one array
            one, other = world.rows(data, batch=batch), world.rows(data, batch=4)
        np.testing.assert_array_equal(one.result(), data.data[rows])
        np.testing.assert_array_equal(other.result(), data.data[:4])


LAYOUTS = {"shape": (3, 8), "strides": (8, 16), "dtype": np.dtype("int32")}


def set_layout(array, name):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # newer versions of NumPy advise against it
        setattr(array, name, LAYOUTS[name])


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("batch", [None, [1, 2, 0]])
def test_a_layout_that_was_set_on_the_view_is_refused_once_and_taken_back(world, name, batch):
    value = np.arange(24, dtype="float32").reshape(6, 4)
    data, view = synk.data(value), synk.data(value).data.view()
    set_layout(view, name)  # another view may have any layout
    expected = value if batch is None else value[batch]
    uses = [lambda: world.rows(data, batch=batch), lambda: data.shape, lambda: data.set_length(7)]
    for use in uses:
        for _ in range(3):
            assert (world.rows(data, batch=batch) == expected).all()
        set_layout(data.data, name)
        with pytest.raises(ValueError, match="keep its layout, float32 .6, 4.*set_shape.. or set_value"):
            use()
        assert (world.rows(data, batch=batch) == expected).all()
        assert (data.shape, data.data.strides, data.data.dtype) == ((6, 4), (16, 4), "float32")
    set_layout(np.asarray(data), name)
    assert (world.rows(data, batch=batch) == expected).all()
    set_layout(data.data, name)
    data.set_value(value + 1)  # another array takes its place
    assert (world.rows(data, batch=batch) == expected + 1).all()


def test_a_layout_that_was_set_is_refused_by_repeated_steps_and_in_programs(world):
    x, w = tt.matrix("x", dtype="float32"), compiler.shared(np.zeros(4, "float32"), "w")
    step = train.make_train_function(tt.sqr(x - w).mean(), [w], x, None, updates.sgd, 0.5)
    synk.distribute()
    data = synk.data(np.ones((6, 4), "float32"))
    for batch in ([0, 1, 2], [3, 4, 5]):
        step(data, batch=batch)
    set_layout(data.data, "shape")
    with pytest.raises(ValueError, match="keep its layout"):
        step(data, batch=[0, 1, 2])
    step(data, batch=[0, 1, 2])

    def program(rank, data):
        set_layout(data.data, "shape")
        with pytest.raises(ValueError, match="keep its layout"):
            rank.call(world.rows, data)
        return rank.call(world.rows, data)

    assert all((rows == 1).all() and rows.shape == (6, 4) for rows in synk.spmd(program, data))


@pytest.fixture
def mapped(tmp_path):
    path = tmp_path / "rows.bin"
    file = np.memmap(path, "float32", "w+", offset=20, shape=(40, 3))
    file[:] = np.arange(120).reshape(40, 3)
    return file


@given(data=st.data())
@examples(30)
def test_views_of_a_mapped_file_are_seen_by_every_rank_without_a_copy(world, data, tmp_path_factory):
    path = tmp_path_factory.mktemp("mapped") / "rows.bin"
    offset = data.draw(st.sampled_from([0, 4, 4096, 5000]))
    file = np.memmap(path, "float32", "w+", offset=offset, shape=(2000, 3))
    file[:] = np.arange(6000).reshape(2000, 3)
    start, stop = data.draw(st.integers(0, 1999)), data.draw(st.integers(0, 2000))
    assume(start < stop)
    view = file[start:stop]
    if data.draw(st.booleans()):
        view = np.memmap(path, "float32", "r", offset, (2000, 3))[start:stop]
    made = synk.data(view)
    assert np.shares_memory(made.data, view)
    world.check_seen(made)
    file[start] = -5
    world.check_seen(made)
    assert made[0, 0] == -5


@pytest.mark.parametrize(("dtype", "offset"), [("float32", 3), (">f4", 20)])
def test_a_file_that_compiled_code_cannot_read_where_it_is_is_copied(world, tmp_path, dtype, offset):
    path = tmp_path / "rows.bin"
    file = np.memmap(path, dtype, "w+", offset=offset, shape=(40, 3))
    file[:] = np.arange(120).reshape(40, 3)
    for value in (file, np.memmap(path, dtype, "r", offset, (40, 3))[3:30]):
        made = synk.data(value)
        assert made.dtype == "float32" and not np.shares_memory(made.data, value)
        assert made.data.tolist() == value.tolist()
        world.check_seen(made)


@pytest.mark.parametrize("change", ["columns", "strided", "rows reversed", "copied", "double"])
def test_views_of_a_mapped_file_that_are_not_contiguous_are_copied(world, mapped, change):
    views = {
        "columns": lambda: mapped[:, :2], "strided": lambda: mapped[::2],
        "rows reversed": lambda: mapped[::-1], "copied": lambda: mapped[[5, 3]],
        "double": lambda: mapped * 2,
    }  # fmt: skip
    view = views[change]()
    made = synk.data(view, var=world.matrix)
    np.testing.assert_array_equal(made, view)
    world.check_seen(made)
    before = np.array(made)
    mapped[:] = 0
    if change not in ("copied", "double"):
        assert not np.shares_memory(made.data, mapped)
    np.testing.assert_array_equal(made, before)


def test_private_changes_to_a_copy_on_write_mapping_are_kept(world, mapped):
    mapped.flush()
    private = np.memmap(mapped.filename, "float32", "c", 20, (40, 3))
    private[7] = -1
    made = synk.data(private)
    assert made[7].tolist() == [-1] * 3
    world.check_seen(made)


def test_a_file_is_read_only_if_it_was_mapped_so_and_data_can_leave_it(world, mapped):
    mapped.flush()
    made = synk.data(np.memmap(mapped.filename, "float32", "r", 20, (40, 3)))
    with pytest.raises(ValueError):
        made[0] = 1
    made.set_length(50)
    assert (made[:40] == mapped).all() and (made[40:] == 0).all()
    made[0] = 99
    world.check_seen(made)
    assert mapped[0, 0] == 0
    made.set_value(mapped[3:9])
    assert np.shares_memory(made.data, mapped)
    world.check_seen(made)
    made.set_value(np.ones((4, 2), "float32"))
    world.check_seen(made)
    assert mapped[3, 0] == 9


def test_a_new_file_of_an_old_name_is_read_anew(world, tmp_path):
    path = tmp_path / "epoch.npy"
    for epoch in range(4):
        fresh = tmp_path / "fresh.npy"
        np.save(fresh, np.full((6, 2), epoch, "float32"))
        if epoch % 2:
            os.replace(fresh, path)
        else:
            if path.exists():
                path.unlink()
            fresh.rename(path)
        world.check_seen(synk.data(np.load(path, mmap_mode="r")))


def test_a_file_that_was_removed_can_still_be_used(world, mapped):
    os.unlink(mapped.filename)
    world.check_seen(synk.data(mapped))


def test_bound_data_that_were_freed_are_filled_again(world):
    number = tt.lvector("number")
    first = synk.set_shmems({world.matrix: np.ones((2, 3), "float32"), number: [1, 2]})
    first[number].free_memory()
    again = synk.set_shmems({world.matrix: np.zeros((4, 3), "float32"), number: [3]})
    assert again[world.matrix] is first[world.matrix]
    assert again[number] is synk.get_shmems(number) is first[number]
    assert again[number].data.tolist() == [3] and len(again[world.matrix]) == 4
    synk.free_shmems(number, world.matrix)


def test_bound_data_are_refilled_in_place_and_shared_by_functions(world):
    first = synk.set_shmems({world.matrix: np.ones((6, 2), "float32")}, oversize=2)[world.matrix]
    again = synk.set_shmems([(world.matrix, np.full((9, 2), 2, "float32"))])[world.matrix]
    assert first is again is synk.get_shmems(world.matrix)
    assert first.alloc_size == 24
    assert (world.rows() == 2).all()
    assert (world.rows(batch=[1, 2]) == np.full((2, 2), 2)).all()
    assert (world.rows(np.zeros((3, 2), "float32")) == 0).all()
    assert (world.rows() == 2).all()
    assert world.whole(np.arange(SIZE))[0].shape == (SIZE, 9, 2)
    mine = synk.data(np.full((4, 2), 5, "float32"))
    synk.set_shmems({world.matrix: mine})
    assert synk.get_shmems(world.matrix) is mine
    assert (world.rows() == 5).all()
    synk.free_shmems(world.matrix)
    for call in (
        world.rows,
        lambda: synk.get_shmems(world.matrix),
        lambda: synk.free_shmems(world.matrix),
    ):
        with pytest.raises((TypeError, ValueError), match="set_shmems"):
            call()


def test_inputs_of_a_function_are_bound_and_built_together(world):
    assert world.whole.build_inputs([1, 2]).dtype == "int64"
    rows, matrix = world.whole.build_inputs([1, 2, 3], np.ones((2, 2)), force_cast=True, oversize=2)
    assert (matrix.dtype, matrix.alloc_size, rows.minibatch) == ("float32", 8, False)
    world.whole.set_input_shmems(rows, m=matrix)
    bound = world.whole.get_input_shmems()
    assert [one is other for one, other in zip(bound, (rows, matrix))] == [True, True]
    assert world.whole()[0].shape == (3, 2, 2)
    synk.free_shmems(world.matrix, world.vector)


def make_and_drop(mark, steps, kept=5):
    datas, random = [], Random(mark)
    for step in range(steps):
        made = synk.data(np.full(random.choice([1, 500, 3000]), mark))
        made.set_length(len(made) + random.choice([0, 700]))
        made[...] = mark
        if step % 4 == 0:
            synk.data(made).free_memory()
        datas.append(made)
        if len(datas) > kept:
            assert (datas.pop(random.randrange(kept)).data == mark).all()
    assert all((one.data == mark).all() for one in datas)


class MakingData:
    """Garbage that makes `Data` when it is collected."""

    def __init__(self):
        self.own, self.made = self, synk.data(np.full(1000, 200))

    def __del__(self):
        assert (self.made.data == 200).all()
        make_and_drop(201, 2)


@pytest.mark.parametrize("collects", [False, True], ids=["", "with garbage collection inside"])
def test_threads_make_and_drop_data_at_the_same_time(world, collects):
    interval, threshold = sys.getswitchinterval(), gc.get_threshold()

    def work(mark):
        for _ in range(40 if collects else 1):
            if collects:
                MakingData()
            make_and_drop(mark, 3 if collects else 300)

    sys.setswitchinterval(1e-6)
    if collects:
        gc.set_threshold(1)
    try:
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(work, [1, 2]))
    finally:
        gc.set_threshold(*threshold)
        sys.setswitchinterval(interval)
    gc.collect()
    assert world.rows(np.ones((4, 2), "float32")) is not None


def test_a_child_process_that_the_script_forks_allocates_nothing(world):
    """Its blocks would be those that the master allocates next."""
    data = synk.data(np.zeros(5))
    calls = [lambda: data.set_length(200_000), lambda: data.set_value(np.ones(200_000)),
             lambda: current_world().rank_state.store.empty((200_000,), "float64")]  # fmt: skip
    for call in calls:
        reading, writing = os.pipe()
        pid = os.fork()
        if not pid:
            said = b"nothing was raised"
            try:
                call()
            except synk.SynkhronosError as error:
                said = str(error).encode()
            finally:
                os.write(writing, said)
                os._exit(0)
        os.close(writing)
        os.waitpid(pid, 0)
        with open(reading, "rb") as file:
            assert b"forked from the master, and only the master may allocate" in file.read()
    data.set_length(6)
    assert data.data.tolist() == [0] * 6
