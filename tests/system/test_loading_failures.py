"""Tests of a loader in trouble: unreadable files, errors, deaths, interrupts, and its end."""

import gc
import os
import pickle
import re
import signal
import threading
import time
from pathlib import Path

import h5py
import numpy as np
import psutil
import pytest
import serial_loading as serial
from processes import own_process, shared_files
from test_children import wait_until
from test_loading import BATCH, IMAGES, LABELS, ROWS, copied, order_of, row_of, write_images

import synkhronos as synk
from synkhronos.extensions import loading
from synkhronos.extensions.loaders import ring
from synkhronos.stores import memory as memory_module


def error_of(batches):
    """Return the error with which a loop over batches ends, and the number of batches before."""
    count = 0
    try:
        for _ in batches:
            count += 1
    except Exception as error:
        return error, count
    raise AssertionError("the loop has ended without an error")


@pytest.fixture(autouse=True)
def nothing_is_left():
    """After each test, no process has the memory of a loader, and no file is in /dev/shm."""
    shared = shared_files()
    yield
    gc.collect()
    for process in [psutil.Process(), *psutil.Process().children()]:
        assert "synkhronos-loading" not in Path(f"/proc/{process.pid}/maps").read_text()
    assert not [one for one in names_of_open_files() if "synkhronos-loading" in one]
    wait_until(lambda: shared_files() <= shared)  # a semaphore of another test has a name for a moment


def names_of_open_files():
    for number in os.listdir("/proc/self/fd"):
        try:
            yield os.readlink(f"/proc/self/fd/{number}")
        except FileNotFoundError:
            pass  # the folder itself


@pytest.fixture
def folder(tmp_path):
    """A folder of images, of which rows 3 and 8 are broken in two ways; its rows by label."""
    rows = write_images(tmp_path)
    source = loading.ImageFolder(tmp_path)
    with open(source.files[3], "r+b") as file:
        file.truncate(60)
    with open(source.files[8], "wb") as file:
        file.write(b"no image at all")
    return source, rows


@pytest.mark.parametrize("processes", [1, 3])
def test_a_broken_file_ends_the_loop_with_its_name_where_it_is_due(folder, processes):
    source, _ = folder
    due = min(order_of(0).tolist().index(row) for row in (3, 8)) // BATCH
    with loading.Loader(source, batch_size=BATCH, processes=processes) as loader:
        for _ in range(2):  # another loop is possible
            error, count = error_of(loader.epoch(0))
            assert type(error) is synk.SynkhronosError and count == due
            assert re.search(
                r"loading: .*/(008|003|\d+).png cannot be read: .*unreadable='skip'", str(error)
            )
            assert any(source.files[row] in str(error) for row in (3, 8))


@pytest.mark.parametrize("processes", [1, 3])
@pytest.mark.parametrize("batch_size", [BATCH, 1])
def test_broken_files_are_left_out_and_named(folder, processes, batch_size):
    source, rows = folder
    options = {"batch_size": batch_size, "processes": processes, "unreadable": "skip"}
    crop, change = loading.RandomCrop(4), serial.crop(4, 4)
    with loading.Loader(source, crop, **options) as loader:
        with pytest.warns(synk.SynkhronosWarning, match="rows cannot be read") as warned:
            found = copied(loader.epoch(0))
        expected = serial.batches(
            lambda row: row_of(rows[row]), order_of(0), batch_size, [change], left_out=(3, 8)
        )
        for (images, labels), (others, wanted) in zip(found, list(expected)):
            np.testing.assert_array_equal(images, others)
            np.testing.assert_array_equal(labels, wanted)
        assert sum(len(labels) for _, labels in found) == ROWS - 2
        assert loader.skipped == [source.files[3], source.files[8]]
        names = str(warned[-1].message)
        assert "2 rows" in names and source.files[3] in names and source.files[8] in names
        with pytest.warns(synk.SynkhronosWarning):
            assert sum(len(labels) for _, labels in copied(loader.epoch(7))) == ROWS - 2


def test_ranks_get_shares_without_the_broken_files(folder, world_of):
    source, rows = folder
    world_of(2)

    def program(rank, shards):
        return [labels.tolist() for _, labels in shards.minibatches(rank)]

    with loading.Loader(source, batch_size=BATCH, unreadable="skip") as loader:
        found = synk.spmd(program, loader.shards(2))
        assert loader.skipped == [source.files[3], source.files[8]]
        with pytest.warns(synk.SynkhronosWarning, match="2 rows cannot be read"):
            loader.shards(2)
    used = [row for row in order_of(0) if row not in (3, 8)]
    assert sorted(sum(sum(found, []), [])) == sorted(LABELS[rows[used]].tolist())


def test_the_rows_of_a_broken_batch_of_hickle_are_left_out(tmp_path):
    for number in range(3):
        with h5py.File(tmp_path / f"{number}.hkl", "w") as file:
            file["data"] = np.moveaxis(IMAGES[:4], 0, -1)
    source = loading.HickleBatches(tmp_path, np.arange(12))
    (tmp_path / "1.hkl").write_bytes(b"no HDF5")
    with loading.Loader(source, batch_size=4, processes=2, unreadable="skip") as loader:
        with pytest.warns(synk.SynkhronosWarning):
            labels = sorted(np.concatenate([labels for _, labels in copied(loader.epoch(0))]))
        assert labels == [0, 1, 2, 3, 8, 9, 10, 11]
        assert loader.skipped == [f"{tmp_path}/1.hkl, image {number}" for number in range(4)]


@pytest.mark.parametrize("missing", ["file", "dataset"])
def test_rows_of_a_virtual_dataset_without_their_file_cannot_be_read(tmp_path, missing):
    layout = h5py.VirtualLayout((6,), "int64")
    (tmp_path / "parts").mkdir()
    for part in range(3):
        path = tmp_path / "parts" / f"{part}.h5"
        with h5py.File(path, "w") as file:
            file["x"] = np.arange(2) + 2 * part
        layout[2 * part : 2 * part + 2] = h5py.VirtualSource(f"parts/{part}.h5", "x", shape=(2,))
    with h5py.File(tmp_path / "all.h5", "w") as file:
        file.create_virtual_dataset("x", layout)
    path = tmp_path / "parts" / "1.h5"
    os.unlink(path)
    if missing == "dataset":
        h5py.File(path, "w").close()
    source = loading.HDF5(tmp_path / "all.h5", "x")
    with loading.Loader(source, batch_size=2, shuffle=False) as loader:
        batches = loader.epoch(0)
        assert next(batches)[0].tolist() == [0, 1]
        with pytest.raises(synk.SynkhronosError, match="rows 2 to 3 cannot be read: parts/1.h5, which"):
            next(batches)
    with loading.Loader(source, batch_size=6, shuffle=False, unreadable="skip") as loader:
        with pytest.warns(synk.SynkhronosWarning, match="2 rows cannot be read"):
            assert [rows.tolist() for (rows,) in loader.epoch(0)] == [[0, 1, 4, 5]]


def write_hickle(path, contents):
    with h5py.File(path, "w") as file:
        for name, one in contents.items():
            file[name] = one


@pytest.mark.parametrize(
    "contents, message",
    [
        ({"data_0/data_0": [1, 2]}, "got a list or a dictionary, which hickle stores as a group"),
        ({"data_0": 3.5}, "got a single value of dtype float64"),
        ({"data": "text"}, "got a single value of dtype object"),
        ({"data": [1.0, 2.0, 3.0]}, "images with the shape and dtype ((2,), '<i8') of the first file"),
        ({"other": [1]}, "expected an array of numbers named data or data_0, got a file with other"),
        ({}, "got a file with nothing"),
        ({"data": np.ones((2, 4), "i4")}, "got ((2,), '<i4') in"),
    ],
)
def test_a_file_of_hickle_that_has_no_such_images_is_named(tmp_path, contents, message):
    write_hickle(tmp_path / "0.hkl", {"data": np.ones((2, 4), "i8")})
    write_hickle(tmp_path / "1.hkl", contents)
    with pytest.raises(ValueError, match="(?s)HickleBatches: .*1.hkl") as raised:
        loading.HickleBatches(tmp_path)
    assert message in str(raised.value)


def test_without_any_readable_row_there_is_no_loader(tmp_path):
    (tmp_path / "only").mkdir()
    (tmp_path / "only" / "1.png").write_bytes(b"no image")
    source = loading.ImageFolder(tmp_path)
    with pytest.raises(loading.UnreadableError, match="1.png: cannot identify image file"):
        loading.Loader(source, batch_size=1)
    with pytest.raises(loading.UnreadableError, match="none of them can be read"):
        loading.Loader(source, batch_size=1, unreadable="skip")


def fail_later(images, draws):
    if len(images) > 1:
        raise LookupError("no such luck")
    return images


@pytest.mark.parametrize("processes", [1, 2])
def test_an_exception_in_a_process_reaches_the_script_with_its_traceback(processes):
    with loading.Loader(IMAGES, fail_later, batch_size=8, processes=processes) as loader:
        for _ in range(2):
            error, count = error_of(loader.epoch(0))
            assert count == 0
            assert re.search(
                "(?s)loading: process . raised.*fail_later.*LookupError: no such luck", str(error)
            )


def test_an_exception_reaches_a_program_and_the_world_stays_usable(two):
    def program(rank, shards):
        return sum(1 for _ in shards.minibatches(rank))

    with loading.Loader(IMAGES, fail_later, batch_size=8) as loader:
        with pytest.raises(synk.SynkhronosError, match="LookupError: no such luck"):
            synk.spmd(program, loader.shards(2))
        assert synk.spmd(lambda rank: rank.rank) == [0, 1]


MASKED = np.ma.masked_equal(np.arange(6.0), 4)


@pytest.mark.parametrize(
    "read, message",
    [
        (lambda rows: [rows[rows != 4]], "Rows.read: expected 2 rows, got array 0 with the shape (1,)"),
        (lambda rows: [rows, rows[rows != 4]], "expected 2 rows, got array 1 with the shape (1,) for"),
        (lambda rows: [rows] * (1 + (4 in rows)), "expected 1 arrays as for the first row, got 2"),
        (
            lambda rows: [rows.astype("u1" if 0 in rows else "u2")],
            "first row, uint8, got uint16 for row",
        ),
        (lambda rows: [rows * 0.5 if 4 in rows else rows], "first row, int64, got float64 for row"),
        (lambda rows: [MASKED[rows]], "array 0 of row 4 (no. 4) has masked values"),
        (lambda rows: [[MASKED[row : row + 1] for row in rows]], "array 0 of row 4 (no. 4) has masked"),
        (lambda rows: {"x": rows}, "expected a list of arrays, got {'x': array([0])}"),
        (
            lambda rows: [np.zeros(len(rows), "i4,f8")],
            "expected numbers of one dtype, got [('f0', '<i4'),",
        ),
        (lambda rows: [np.array([{}] * len(rows))], "expected numbers of one dtype, got Python objects"),
        (
            lambda rows: [np.zeros((len(rows), 1 + (4 in rows)))],
            "the shape of the first, (1,), got (2,)",
        ),
    ],
)
def test_rows_that_are_not_like_the_first_are_refused_with_their_names(read, message):
    class Rows(loading.Source):
        def __len__(self):
            return 6

        def read(self, rows):
            return read(rows)

        def name(self, row):
            return f"no. {row}"

    def load():
        with loading.Loader(Rows(), batch_size=2, shuffle=False) as loader:
            list(loader.epoch(0))

    with pytest.raises((synk.SynkhronosError, TypeError)) as raised:
        load()
    assert message in str(raised.value)


def test_a_transform_that_loses_images_is_refused():
    with pytest.raises(ValueError, match="to return 1 images, got an array of"):
        loading.Loader(IMAGES, lambda images, draws: images[1:], batch_size=2)


@pytest.mark.parametrize(
    "arguments, options, error, message",
    [
        ((3,), {}, TypeError, "Loader: source: expected a Source, an array or a path, got 3"),
        (((IMAGES, LABELS[1:]),), {}, ValueError, "the same number of rows"),
        ((IMAGES, 5), {}, TypeError, "Loader: transform: expected a callable"),
        ((IMAGES, None, 0), {}, ValueError, "Loader: ahead: expected at least 1, got 0"),
        ((IMAGES,), {"batch_size": 0}, ValueError, "Loader: batch_size: expected at least 1"),
        ((IMAGES,), {"processes": 0}, ValueError, "Loader: processes: expected at least 1"),
        ((IMAGES,), {"seed": -1}, ValueError, "Loader: seed: expected at least 0"),
        ((IMAGES,), {"unreadable": "ignore"}, ValueError, "Loader: unreadable: expected one of"),
        ((IMAGES,), {"batch_size": 50, "drop_last": True}, ValueError, "expected 50 rows, got 23"),
        ((IMAGES[:0],), {}, ValueError, "the length of the source: expected at least 1, got 0"),
        ((IMAGES, loading.RandomCrop(20)), {}, ValueError, "images of at least 20 x 20 pixels"),
        (
            (np.array(["a"]),),
            {},
            ValueError,
            "expected an array of numbers with rows, got one of <U1 with",
        ),
        (("missing.npy",), {}, FileNotFoundError, "missing.npy"),
    ],
)
def test_wrong_arguments_are_refused(arguments, options, error, message):
    with pytest.raises(error, match=re.escape(message)):
        loading.Loader(*arguments, **{"batch_size": 2, **options})


def test_wrong_arguments_of_sources_and_transforms_are_refused(tmp_path):
    with h5py.File(tmp_path / "data.h5", "w") as file:
        file["three"], file["four"] = np.zeros(3), np.zeros(4)
    (tmp_path / "empty").mkdir()
    for make, message in [
        (lambda: loading.HDF5(tmp_path / "data.h5"), "the name of at least one dataset"),
        (lambda: loading.HDF5(tmp_path / "data.h5", "five"), "expected datasets of .*data.h5"),
        (lambda: loading.HDF5(tmp_path / "data.h5", "three", "four"), "{'three': 3, 'four': 4}"),
        (lambda: loading.HickleBatches(tmp_path), "at least one file"),
        (lambda: loading.ImageFolder(tmp_path), "expected images in the folders of"),
        (lambda: loading.Normalize(mean=3), "both mean and std, or neither"),
        (lambda: loading.Mirror(per="pixel"), "Mirror: per: expected one of"),
        (lambda: loading.Mirror(probability=2), "Mirror: probability: expected a number from 0 to 1"),
        (lambda: loading.RandomCrop((0, 2)), "size: expected at least 1"),
    ]:
        with pytest.raises(ValueError, match=message):
            make()


@pytest.mark.parametrize("processes", [1, 2])
def test_the_death_of_a_process_ends_the_loop_with_its_cause(processes):
    with loading.Loader(np.arange(1000), batch_size=5, processes=processes) as loader:
        batches = loader.epoch(0)
        next(batches)
        os.kill(loader.pids[-1], signal.SIGKILL)
        error, count = error_of(batches)
        number = processes - 1
        expected = f"loading: process {number} of {processes} has ended (killed by SIGKILL); close"
        assert expected in str(error) and count <= 2
        with pytest.raises(synk.SynkhronosError, match="has ended"):
            loader.epoch(1)


def test_the_death_of_a_process_ends_a_program(two):
    def program(rank, shards, pid):
        for number, _ in enumerate(shards.minibatches(rank)):
            if number == 1 and rank.rank == 1:
                os.kill(pid, signal.SIGKILL)

    with loading.Loader(np.arange(10_000), batch_size=4, processes=2) as loader:
        with pytest.raises(synk.SynkhronosError, match="loading: process 1 of 2 has ended"):
            synk.spmd(program, loader.shards(2), loader.pids[1])
        assert synk.spmd(lambda rank: rank.rank) == [0, 1]


def test_a_process_that_does_not_answer_is_reported_after_the_timeout():
    with loading.Loader(np.arange(1000), batch_size=5, timeout=0.3) as loader:
        batches = loader.epoch(0)
        next(batches)
        os.kill(loader.pids[0], signal.SIGSTOP)
        error = str(error_of(batches)[0])
        assert "was not loaded within timeout=0.3 seconds: process 0 of the loader" in error
        assert "is stopped by a signal" in error
        with pytest.raises(synk.SynkhronosError, match="an epoch was not loaded within timeout=0.3 sec"):
            loader.epoch(0)
        os.kill(loader.pids[0], signal.SIGCONT)
        assert len(copied(loader.epoch(0))) == 200
        assert loader.waited >= 0.3


@own_process
def test_a_thread_is_warned_of_and_a_stuck_process_is_reported_with_its_stack():
    lock, is_over = threading.Lock(), threading.Event()
    thread = threading.Thread(target=lambda: lock.acquire() and is_over.wait(), name="holder")
    thread.start()

    class Locked(loading.Source):
        def __len__(self):
            return 4

        def read(self, rows):
            return [rows + 0 * (rows[0] == stuck and lock.acquire())]

    for row, what in ((0, "the first row"), (2, "batch 1")):
        stuck = row
        with pytest.warns(synk.SynkhronosWarning, match="while processes for loading are .*: holder"):
            with pytest.raises(synk.SynkhronosError) as raised:
                with loading.Loader(Locked(), batch_size=2, shuffle=False, timeout=0.5) as loader:
                    list(loader.epoch(0))
        assert f"{what} was not loaded within timeout=0.5 seconds: process 0" in str(raised.value)
        assert re.search("is here, the latest call first:\n  File .* in read", str(raised.value))
    is_over.set()
    thread.join()


def test_a_long_wait_is_warned_of_once(monkeypatch):
    monkeypatch.setattr(ring, "_LONG", 0.2)
    with loading.Loader(np.arange(60), slow, batch_size=20) as loader:
        with pytest.warns(synk.SynkhronosWarning, match="batch 0 has not been loaded for") as warned:
            next(loader.epoch(0))
        assert len(warned) == 1 and "in slow" in str(warned[0].message)


@own_process
def test_the_processes_die_with_a_script_that_is_killed():
    reader, writer = os.pipe()
    pid = os.fork()
    if not pid:
        loader = loading.Loader(np.arange(1000), batch_size=5, processes=2)
        next(loader.epoch(0))
        os.write(writer, " ".join(map(str, loader.pids)).encode())
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)
    pids = [int(one) for one in os.read(reader, 100).split()]
    wait_until(lambda: not any(map(is_running, pids)))


def is_running(pid):
    try:
        return psutil.Process(pid).status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.NoSuchProcess:
        return False


def leave_open(how):
    loader = loading.Loader(np.arange(1000), batch_size=5, processes=2)
    print(*loader.pids)
    next(loader.epoch(0))
    if how == "raise":
        raise LookupError("the script fails")
    if how == "in a world":
        synk.fork(2, use_gpu=False)
        synk.distribute()


@pytest.mark.parametrize("how", ["return", "raise", "in a world"])
def test_the_processes_end_with_a_script_that_does_not_close_the_loader(programs, tmp_path, how):
    done = programs.run(leave_open, how, cwd=tmp_path)
    assert bool(done.returncode) == (how == "raise")
    assert "Traceback" not in done.stderr or how == "raise"
    pids = [int(one) for one in done.stdout.split()]
    assert len(pids) == 2
    wait_until(lambda: not any(map(is_running, pids)))


def slow(images, draws):
    if len(images) > 1:
        time.sleep(0.5)
    return images


@own_process
def test_an_interrupt_ends_the_loop_and_the_loader_stays_usable():
    with loading.Loader(np.arange(60), slow, batch_size=20) as loader:
        for place in (0, 1):
            batches = loader.epoch(0)
            with pytest.raises(KeyboardInterrupt):
                for number, _ in enumerate(batches):
                    if number == place:
                        # As the terminal does: to all processes of the script
                        for pid in [*loader.pids, os.getpid()]:
                            os.kill(pid, signal.SIGINT)
                        time.sleep(5)
        began = time.monotonic()
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        signal.signal(signal.SIGALRM, signal.default_int_handler)
        with pytest.raises(KeyboardInterrupt):  # while it waits
            next(loader.epoch(2))
        assert time.monotonic() - began < 0.45
        assert np.concatenate([rows for (rows,) in loader.epoch(1)]).tolist() == order_of(1, 60).tolist()
    assert not psutil.Process().children()


@own_process
def test_an_interrupt_of_a_program_ends_its_loops():
    synk.fork(2, use_gpu=False)

    def program(rank, shards):
        count = 0
        for _ in shards.minibatches(rank):
            count += 1
            if count == 2 and rank.rank == 0:
                os.kill(os.getpid(), signal.SIGINT)
        return count

    with loading.Loader(np.arange(6000), batch_size=4) as loader:
        results = synk.spmd(program, loader.shards(2, epochs=1000))
        assert results.interrupted and max(results) < 1_000_000
    synk.close()


def test_closing_twice_or_in_a_loop_is_harmless():
    loader = loading.Loader(np.arange(100), batch_size=5, processes=2)
    batches = loader.epoch(0)
    (rows,) = next(batches)
    pids = loader.pids
    loader.close()
    loader.close()
    assert not any(map(psutil.pid_exists, pids)) and not rows.any()
    assert repr(loader) == "<Loader: 100 rows, closed>"
    for use in (
        lambda: next(batches),
        lambda: loader.epoch(0),
        lambda: loader.shards(2),
        lambda: loader.skipped,
    ):
        with pytest.raises(synk.ClosedError, match="loading: this loader was closed"):
            use()


def test_a_loader_that_is_no_longer_used_is_closed():
    loader = loading.Loader(np.arange(100), batch_size=5)
    pids = loader.pids
    del loader
    gc.collect()
    assert not any(map(psutil.pid_exists, pids))


def test_a_second_loop_ends_the_first():
    with loading.Loader(np.arange(100), batch_size=5) as loader:
        first = loader.epoch(0)
        next(first)
        next(loader.epoch(0))
        with pytest.raises(synk.SynkhronosError, match="another epoch of the loader was begun"):
            next(first)


def test_shards_of_a_closed_loader_or_of_other_ranks_are_refused(two):
    def program(rank, shards):
        return [rows.tolist() for (rows,) in shards.minibatches(rank)]

    loader = loading.Loader(np.arange(100), batch_size=5)
    with pytest.raises(ValueError, match="Loader.shards: ranks: expected at most 5, got 6"):
        loader.shards(6)
    with pytest.raises(ValueError, match="expected a program on 3 ranks"):
        synk.spmd(program, loader.shards(3))
    shards = loader.shards(2)
    loader.shards(2)
    with pytest.raises(synk.SynkhronosError, match="another epoch of the loader was begun"):
        synk.spmd(program, shards)
    shards = loader.shards(2)
    loader.close()
    with pytest.raises(synk.SynkhronosError, match="this loader was closed|the loader was closed"):
        synk.spmd(program, shards)


def test_a_loader_cannot_be_sent_or_used_in_a_copy_of_the_script():
    with loading.Loader(np.arange(100), batch_size=5) as loader:
        with pytest.raises(TypeError, match=r"loader.shards\(\)"):
            pickle.dumps(loader)
        reader, writer = os.pipe()
        pid = os.fork()
        if not pid:
            try:
                loader.epoch(0)
            except synk.SynkhronosError as error:
                os.write(writer, str(error).encode())
            finally:
                loader.close()
                os._exit(0)
        os.waitpid(pid, 0)
        assert b"this process was forked from the script" in os.read(reader, 1000)
        os.close(reader)
        os.close(writer)
        assert len(copied(loader.epoch(0))) == 20


def test_too_little_memory_for_the_batches_is_an_error(monkeypatch):
    monkeypatch.setattr(memory_module, "_memory_left", lambda: 30 << 20)
    with pytest.raises(MemoryError, match="shared memory: .* bytes were requested"):
        loading.Loader(np.zeros((10, 1000, 1000)), batch_size=10)
