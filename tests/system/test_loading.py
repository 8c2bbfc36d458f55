"""Tests that a loader gives the batches of a serial implementation, from every source, to every rank."""

import itertools
import multiprocessing
import os
import random
import sys
import types
import weakref
from pathlib import Path

import h5py
import numpy as np
import pytest
import serial_loading as serial
from compilers import run_examples, tt
from PIL import Image
from processes import own_process
from test_machines_counts import open_lab

import synkhronos as synk
from synkhronos.extensions import loading
from synkhronos.extensions.loaders.reachable import fingerprint

ROWS, BATCH = 23, 5
RANDOM = np.random.RandomState(0)
IMAGES = RANDOM.randint(0, 256, size=(ROWS, 3, 9, 8)).astype("uint8")
LABELS = RANDOM.randint(0, 4, size=ROWS).astype("int32")

LOADED = {
    "crop": (loading.RandomCrop((5, 4)), serial.crop(5, 4)),
    "crop of the batch": (loading.RandomCrop(6, per="batch"), serial.crop(6, 6, "batch")),
    "crop with padding": (loading.RandomCrop(8, padding=2), serial.crop(8, 8, padding=2)),
    "center": (loading.CenterCrop(4), serial.center(4)),
    "mirror": (loading.Mirror(), serial.mirror()),
    "mirror of the batch": (loading.Mirror("batch"), serial.mirror("batch")),
    "seldom": (loading.Mirror(probability=0.2), serial.mirror(probability=0.2)),
    "always": (loading.Mirror(probability=1), serial.mirror(probability=1)),
    "numbers": (loading.Normalize(100, 50), serial.normalize(100, 50)),
    "channels": (loading.Normalize([1, 2, 3], [4, 5, 6]), serial.normalize([1, 2, 3], [4, 5, 6])),
    "mean image": (loading.Normalize(IMAGES.mean(0), 1), serial.normalize(IMAGES.mean(0), 1)),
}
USUAL = ["crop", "mirror", "channels"]


def order_of(epoch, length=ROWS, seed=0):
    return np.random.default_rng([seed, epoch]).permutation(length)


def row_of(number):
    return IMAGES[number], LABELS[number]


def check_same(found, expected):
    assert len(found) == len(expected)
    for arrays, others in zip(found, expected):
        for array, other in zip(arrays, others):
            assert array.dtype == other.dtype
            np.testing.assert_array_equal(array, other)


def copied(batches):
    """Return batches as they were when they were due."""
    return [[np.array(one) for one in arrays] for arrays in batches]


def loads(source, expected_rows, order, names=(), **options):
    """Compare two epochs of a loader with the serial implementation."""
    options = {"batch_size": BATCH, "seed": 0, **options}
    transforms = [LOADED[name][0] for name in names]
    changes = [LOADED[name][1] for name in names]
    with loading.Loader(source, transforms, **options) as loader:
        for epoch in (0, 1):
            found = copied(loader.epoch(epoch))
            expected = serial.batches(
                expected_rows, order(epoch), options["batch_size"], changes, options["seed"], epoch
            )
            check_same(found, list(expected))
            assert len(found) == len(loader)


@pytest.mark.parametrize("name", LOADED)
def test_a_transform_changes_each_image_as_the_serial_one(name):
    loads((IMAGES, LABELS), row_of, order_of, [name], processes=2)


@pytest.mark.parametrize("processes", [1, 2, 3, pytest.param(7, marks=pytest.mark.slow)])
@pytest.mark.parametrize("batch_size", [1, 5, 6, ROWS, 100])
def test_batches_do_not_depend_on_the_number_of_processes(processes, batch_size):
    names = ["crop", "mirror of the batch", "channels"]
    loads((IMAGES, LABELS), row_of, order_of, names, processes=processes, batch_size=batch_size)


def test_the_seed_decides_the_order_and_the_numbers():
    def order(epoch):
        return order_of(epoch, seed=7)

    loads((IMAGES, LABELS), row_of, order, USUAL, seed=7)
    orders = []
    for one in (7, 8):
        with loading.Loader(np.arange(ROWS), batch_size=ROWS, seed=one) as loader:
            orders.append(next(loader.epoch(0))[0].tolist())
    assert orders[0] == order(0).tolist() != orders[1]


def test_images_without_channels_are_cropped_and_mirrored():
    row = lambda number: (IMAGES[number, 0],)  # noqa: E731
    loads(IMAGES[:, 0], row, order_of, ["crop", "mirror", "numbers"])


def test_an_image_is_normalized_by_its_own_moments():
    with loading.Loader(IMAGES, loading.Normalize(), batch_size=BATCH, processes=2) as loader:
        found = copied(loader.epoch(3))
    expected = serial.batches(
        lambda row: (IMAGES[row],), order_of(3), BATCH, [serial.normalize_itself()], epoch=3
    )
    for (images,), (others,) in zip(found, expected):
        np.testing.assert_allclose(images, others, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("processes", [1, 3])
def test_a_batch_is_normalized_by_the_moments_of_all_of_its_rows(processes):
    transform = loading.Normalize(per="batch")
    with loading.Loader(IMAGES, transform, batch_size=BATCH, processes=processes) as loader:
        found = copied(loader.epoch(0))
    assert len(found) == 5
    for (images,), start in zip(found, range(0, ROWS, BATCH)):
        batch = IMAGES[order_of(0)[start : start + BATCH]].astype("float32")
        expected = (batch - batch.mean()) / batch.std()
        np.testing.assert_allclose(images, expected, rtol=1e-4, atol=1e-5)


def test_a_transform_of_the_script_draws_by_row():
    def noisy(images, draws):
        assert len(draws) == len(images)
        return images + draws.uniform()[:, None] + draws.integers(10, per="batch")[:, None]

    def expected(image, numbers):
        return image + numbers.uniform("image") + numbers.integer(10, "batch")

    rows = np.arange(ROWS * 2.0).reshape(ROWS, 2)
    with loading.Loader(rows, noisy, batch_size=BATCH, processes=2) as loader:
        found = copied(loader.epoch(1))
    check_same(
        found, list(serial.batches(lambda row: (rows[row],), order_of(1), BATCH, [expected], epoch=1))
    )


def test_draws_have_the_distributions_of_their_names():
    draws = loading.Draws(3, 7, np.arange(30_000), 0)
    assert draws.epoch == 7
    for numbers in (draws.normal(), draws.normal(shape=(2, 3)), (draws.normal(5, 2) - 5) / 2):
        assert abs(numbers.mean()) < 0.02 and abs(numbers.std() - 1) < 0.02
    assert draws.normal(shape=(2, 3)).shape == (30_000, 2, 3)
    orders = draws.permutation(3)
    assert (np.sort(orders) == [0, 1, 2]).all()
    assert abs(np.bincount(orders @ [9, 3, 1])[[5, 7, 11, 15, 19, 21]] / 5000 - 1).max() < 0.05
    chosen = draws.choice([10, 20, 30], p=[0.5, 0, 0.5])
    assert {*chosen} == {10, 30} and abs(chosen.mean() - 20) < 0.2
    assert abs(draws.choice(4).mean() - 1.5) < 0.02
    seeds = draws.seed()
    assert len({*seeds}) > 29_900 and 0 <= seeds.min() and seeds.max() < 2**31
    assert len({*draws.seed("batch")}) == 1 and np.ptp(draws.normal(per="batch")) == 0
    with pytest.raises(ValueError, match="expected 2 probabilities that add up to 1"):
        draws.choice(2, p=[0.5, 0.4])


@pytest.mark.parametrize("processes", [1, 3])
def test_arrays_in_files_are_loaded(tmp_path, processes):
    np.save(tmp_path / "images.npy", IMAGES)
    np.save(tmp_path / "labels.npy", LABELS)
    paths = tmp_path / "images.npy", str(tmp_path / "labels.npy")
    loads(paths, row_of, order_of, USUAL, processes=processes)


@pytest.mark.parametrize("processes", [1, 3])
@pytest.mark.parametrize("options", [{}, {"chunks": (4, 3, 9, 8), "compression": "gzip"}])
def test_datasets_of_an_hdf5_file_are_loaded(tmp_path, processes, options):
    with h5py.File(tmp_path / "data.h5", "w") as file:
        file.create_dataset("of/images", data=IMAGES, **options)
        file["labels"] = LABELS
    source = loading.HDF5(tmp_path / "data.h5", "of/images", "labels")
    loads(source, row_of, order_of, USUAL, processes=processes)


def test_blocks_of_an_hdf5_file_are_shuffled_as_a_whole(tmp_path):
    with h5py.File(tmp_path / "data.h5", "w") as file:
        file["labels"] = LABELS
        file["rows"] = np.arange(ROWS)
    source = loading.HDF5(tmp_path / "data.h5", "rows", "labels", block=4)
    with loading.Loader(source, batch_size=BATCH, processes=2) as loader:
        epochs = [copied(loader.epoch(number)) for number in range(3)]
    orders = []
    for batches in epochs:
        rows, labels = (np.concatenate(column) for column in zip(*batches))
        assert sorted(rows) == list(range(ROWS))
        np.testing.assert_array_equal(labels, LABELS[rows])
        starts = np.flatnonzero((rows % 4 == 0) & (rows < 20)).tolist()
        assert all(np.array_equal(rows[at : at + 4], rows[at] + np.arange(4)) for at in starts)
        orders.append(rows.tolist())
    assert len(set(map(tuple, orders))) == 3


def write_hickle(folder, name="data", axis=-1):
    """Write files as ``hickle.dump`` does, with 8 images each and the rest in the last one."""
    folder.mkdir()
    for number, start in enumerate(range(0, ROWS, 8)):
        with h5py.File(folder / f"{number:04d}.hkl", "w") as file:
            file[name] = np.moveaxis(IMAGES[start : start + 8], 0, axis)
            file.create_group("hickle_types_table")


@pytest.mark.parametrize("name, axis", [("data", -1), ("data_0", -1), ("data", 0)])
@pytest.mark.parametrize("processes", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_batches_of_hickle_are_loaded_with_the_files_shuffled(tmp_path, name, axis, processes):
    write_hickle(tmp_path / "batches", name, axis)
    np.save(tmp_path / "labels.npy", LABELS)
    source = loading.HickleBatches(tmp_path / "batches", tmp_path / "labels.npy", axis)

    def order(epoch):
        files = [range(0, 8), range(8, 16), range(16, ROWS)]
        shuffled = np.random.default_rng([0, epoch]).permutation(3)
        return [row for number in shuffled for row in files[number]]

    loads(source, row_of, order, USUAL, processes=processes)
    files = sorted((tmp_path / "batches").iterdir())
    loads(loading.HickleBatches(files, axis=axis), lambda row: (IMAGES[row],), order)


def test_batches_of_hickle_may_have_different_numbers_of_images(tmp_path):
    stops = [0, 4, 14, 15, ROWS]
    for number, (start, stop) in enumerate(zip(stops, stops[1:])):
        with h5py.File(tmp_path / f"{number}.hkl", "w") as file:
            file["data"] = IMAGES[start:stop]
    source = loading.HickleBatches(tmp_path, LABELS, axis=0)
    images, labels = source.read(np.arange(len(source))[::-1])
    np.testing.assert_array_equal(images, IMAGES[::-1])
    np.testing.assert_array_equal(labels, LABELS[::-1])
    assert source.name(13) == f"{tmp_path}/1.hkl, image 9"


def write_images(folder, images=IMAGES, kind="png"):
    """Write images into folders by their label; return their rows in the order of the source."""
    for number, (image, label) in enumerate(zip(images, LABELS)):
        (folder / f"class {label}").mkdir(parents=True, exist_ok=True)
        picture = Image.fromarray(np.ascontiguousarray(np.moveaxis(image, 0, -1)))
        picture.save(folder / f"class {label}" / f"{number:03d}.{kind}")
    (folder / "class 0" / "notes.txt").write_text("no image")
    return np.argsort(LABELS, kind="stable")


@pytest.mark.parametrize("processes", [1, 3])
def test_images_in_folders_are_loaded(tmp_path, processes):
    rows = write_images(tmp_path)
    source = loading.ImageFolder(tmp_path)
    assert source.classes == [f"class {number}" for number in range(4)]
    np.testing.assert_array_equal(source.labels, LABELS[rows])
    loads(source, lambda row: row_of(rows[row]), order_of, USUAL, processes=processes)


def test_images_are_scaled_to_a_size(tmp_path):
    (tmp_path / "only").mkdir()
    sizes = [(40, 20), (20, 40), (32, 32), (20, 20)]  # width and height
    for number, size in enumerate(sizes):
        left = Image.new("RGB", size, (10, 20, 30))
        left.paste((200, 100, 50), (size[0] // 2, 0, size[0], size[1]))
        left.save(tmp_path / "only" / f"{number}.png")
    source = loading.ImageFolder(tmp_path, size=10)
    images, labels = source.read(np.arange(4))
    assert images.shape == (4, 3, 10, 10) and labels.tolist() == [0] * 4
    assert (images[:, :, :, 0] == np.array([10, 20, 30])[:, None]).all()
    assert (images[:, :, :, -1] == np.array([200, 100, 50])[:, None]).all()
    # The middle of the wide image is taken: both colors have half of it, as in the square image.
    assert abs(images[0].astype(int) - images[2].astype(int)).max() < 100


def test_gray_images_and_palettes_become_rgb(tmp_path):
    (tmp_path / "only").mkdir()
    gray = Image.fromarray(IMAGES[0, 0])
    gray.save(tmp_path / "only" / "0.png")
    gray.convert("P").save(tmp_path / "only" / "1.gif")
    images, _ = loading.ImageFolder(tmp_path).read(np.arange(2))
    assert images.shape == (2, 3, 9, 8)
    np.testing.assert_array_equal(images[0], np.repeat(IMAGES[:1, 0], 3, axis=0))


@pytest.mark.parametrize("kind", ["png", "tif", "pgm"])
def test_gray_images_of_16_bits_are_divided_by_256(tmp_path, kind):
    (tmp_path / "only").mkdir()
    pixels = np.array([[0, 255, 256, 1000, 40000, 65535]], "uint16")
    Image.fromarray(pixels).save(
        tmp_path / "only" / f"0.{kind}", **{"format": "PPM"} if kind == "pgm" else {}
    )
    os.rename(tmp_path / "only" / f"0.{kind}", tmp_path / "only" / f"0.{kind.replace('pgm', 'ppm')}")
    images, _ = loading.ImageFolder(tmp_path).read(np.arange(1))
    np.testing.assert_array_equal(images[0], np.repeat(pixels[None] // 256, 3, axis=0))


class Squares(loading.Source):
    """A source of a script: the squares of the first numbers, computed when they are read."""

    def __len__(self):
        return ROWS

    def read(self, rows):
        return [rows**2]


def test_a_source_of_the_script_is_loaded():
    loads(Squares(), lambda row: (np.int64(row**2),), order_of, processes=2)


def test_a_source_may_keep_an_open_file_of_savez(tmp_path):
    np.savez(tmp_path / "squares.npz", values=np.arange(ROWS) ** 2)
    with np.load(tmp_path / "squares.npz") as opened:

        class Kept(Squares):
            def read(self, rows):
                return [opened["values"][rows]]

        loads(Kept(), lambda row: (np.int64(row**2),), order_of, processes=2)


def test_what_a_source_opens_at_its_first_use_is_opened_in_each_process():
    class Opened(Squares):
        pid = None

        def read(self, rows):
            self.pid = self.pid or os.getpid()
            return np.full(len(rows), self.pid)  # one array needs no list

    with loading.Loader(Opened(), batch_size=BATCH, processes=3, drop_last=True) as loader:
        for (pids,) in loader.epoch(0):
            assert sorted({*pids.tolist()}) == sorted(loader.pids)


GENERATOR = np.random.default_rng(0)
LEGACY = np.random.RandomState(0)


class Holder:
    """Makes its generator when it is first called, as libraries of augmentations do."""

    made = None

    def __call__(self):
        self.made = self.made or random.Random()
        return self.made.random()


def seldom():
    """Draw a second number sometimes."""
    number = random.random()
    return number if number < 0.7 else number + LEGACY.rand()


DRAWN = {
    "numpy.random": np.random.rand,
    "numpy.random, of which one is kept": np.random.randn,
    "random": random.random,
    "of the script": GENERATOR.random,
    "old, of the script": lambda: LEGACY.standard_normal(),
    "without a seed": lambda: np.random.default_rng().random(),
    "without a seed, of Python": lambda: random.Random().random(),
    "made later": Holder(),
    "seldom": seldom,
}


class Drawn(loading.Source):
    def __init__(self, draw):
        self.draw = draw

    def __len__(self):
        return 6

    def read(self, rows):
        return np.array([[row, self.draw()] for row in rows], float)

    def order(self, generator):
        return np.random.permutation(6)


@pytest.mark.parametrize(
    "place, name", [*itertools.product(["source", "transform"], DRAWN), ("whole batch", "numpy.random")]
)
def test_any_generator_draws_by_epoch_and_row(name, place):
    draw = DRAWN[name]

    def change(images, draws):
        images += np.array([[0, draw()] for _ in images])  # in place, so that once more would show
        return images

    change.needs_whole_batch = place == "whole batch"
    found = []
    for processes in (1, 3):
        source = Drawn(draw if place == "source" else lambda: 0)
        transform = change if place != "source" else None
        with loading.Loader(source, transform, batch_size=4, processes=processes) as loader:
            for epoch in (0, 1):
                rows, numbers = np.concatenate([rows for (rows,) in copied(loader.epoch(epoch))]).T
                assert sorted(rows) == list(range(6)) and len({*numbers}) == 6
                found.append(numbers[np.argsort(rows)].tolist())
    assert found[0] == found[2] and found[1] == found[3] and not {*found[0]} & {*found[1]}


class Changed:
    strength = 1.0

    def __call__(self, images, draws):
        return images * self.strength * SETTINGS["strength"] * float(os.environ.get("STRENGTH", 1))


SETTINGS = {"strength": 1.0}


@pytest.mark.parametrize(
    "what",
    [
        "attribute", "class", "global", "array", "list", "environ", "module", "map", "file", "nothing",
        "shared memory", "weak reference",
    ],
)  # fmt: skip
def test_what_the_script_changes_is_seen_in_the_next_epoch(what, tmp_path, monkeypatch):
    change, labels = Changed(), np.ones(4, "int64")
    rows, path, module = np.ones((4, 1)), tmp_path / "rows.npy", types.ModuleType("of_the_script")
    module.strength = 1.0
    monkeypatch.setitem(sys.modules, "of_the_script", module)
    monkeypatch.setenv("STRENGTH", "1")
    np.save(path, rows)
    if what in ("map", "file"):
        rows = np.load(path, "r+") if what == "map" else path

    shared, held = multiprocessing.Value("d", 1.0), Changed()
    held.strength = 1.0
    reference = weakref.ref(held)

    def by_module(images, draws):
        import of_the_script

        return images * of_the_script.strength * shared.value * reference().strength

    def double():
        if what == "attribute":
            change.strength *= 2
        elif what == "class":
            Changed.strength *= 2
        elif what == "global":
            SETTINGS["strength"] *= 2
        elif what == "array":
            labels[:] *= 2
        elif what == "list":
            changes.append(lambda images, draws: images * 2)
        elif what == "environ":
            os.environ["STRENGTH"] = str(2 * float(os.environ["STRENGTH"]))
        elif what == "module":
            module.strength *= 2
        elif what == "shared memory":
            shared.value *= 2
        elif what == "weak reference":
            held.strength *= 2
        elif what == "map":
            rows[:] *= 2
        elif what == "file":
            np.save(tmp_path / "new.npy", 2 * np.load(path))
            os.replace(tmp_path / "new.npy", path)  # writing into a mapped file ends who reads it

    changes = [change, by_module]
    with loading.Loader((rows, labels), changes, batch_size=4, processes=2) as loader:
        pids = loader.pids
        for factor in (1, 2, 4):
            images, theirs = copied(loader.epoch(factor))[0]
            product = float(images[0, 0] * theirs[0])
            assert product == (1 if what == "nothing" else factor)
            double()
        assert (loader.pids == pids) == (what == "nothing")
    Changed.strength = SETTINGS["strength"] = 1.0


def test_changes_of_a_file_that_a_function_names_are_noticed(tmp_path, monkeypatch):
    def scaled(images, draws):
        return images * float(Path("strength").read_text())

    monkeypatch.chdir(tmp_path)
    found = [fingerprint([scaled])]
    for strength in ("1", "20"):
        Path("strength").write_text(strength)
        found.append(fingerprint([scaled]))
    assert len({*found}) == 3 and found[-1] == fingerprint([scaled])


def test_files_that_are_written_to_a_folder_that_a_function_names_change_nothing(tmp_path, monkeypatch):
    def read(images, draws):
        return np.load(Path("images") / "0.npy")

    monkeypatch.chdir(tmp_path)
    Path("images").mkdir()
    before = fingerprint([read])
    Path("images", "checkpoint").write_text("1")
    assert fingerprint([read]) == before


def test_another_number_of_rows_later_is_refused():
    class Listed(loading.Source):
        rows = [0, 1, 2]

        def __len__(self):
            return len(self.rows)

        def read(self, rows):
            return np.array(self.rows)[rows]

    with loading.Loader(Listed(), batch_size=2) as loader:
        Listed.rows.append(3)
        with pytest.raises(ValueError, match="expected a source of 3 rows, as when .*, got 4; create"):
            loader.epoch(0)


def test_rows_that_do_not_follow_from_their_numbers_are_warned_of():
    def draw(images, draws):
        return images + os.urandom(8)[0] + 256.0 * os.urandom(8)[0]

    numbers = iter(range(100))
    cases = {Drawn(lambda: next(numbers)): None, Drawn(lambda: 0): draw}
    for source, transform in cases.items():
        with pytest.warns(synk.SynkhronosWarning, match="row 0: loaded twice, with different results"):
            loading.Loader(source, transform, batch_size=4).close()


def test_a_transform_may_change_a_view_of_the_source(recwarn):
    class Views(Squares):
        rows = np.ones((ROWS, 1))

        def read(self, rows):
            return self.rows[rows.min() : rows.max() + 1]

    def double(images, draws):
        images *= 2
        return images

    with loading.Loader(Views(), double, batch_size=BATCH, shuffle=False) as loader:
        for epoch in (0, 1):
            assert np.ptp(np.concatenate([rows for (rows,) in copied(loader.epoch(epoch))]) - 2) == 0
    assert not [one for one in recwarn if "loaded twice" in str(one.message)]


def test_the_last_rows_are_left_out_on_request():
    with loading.Loader(np.arange(ROWS), batch_size=BATCH, drop_last=True) as loader:
        found = [rows.tolist() for (rows,) in loader.epoch(0)]
        following = [rows.tolist() for (rows,) in loader.epoch(1)]
    assert len(loader) == len(found) == 4
    assert sum(found, []) == order_of(0)[:20].tolist()
    assert sum(following, []) == order_of(1)[:20].tolist()


def test_epochs_may_follow_in_any_order_and_be_left_early():
    with loading.Loader(np.arange(ROWS), batch_size=BATCH, processes=2) as loader:
        for epoch in (5, 6, 2, 2, 3):
            assert [row for (rows,) in loader.epoch(epoch) for row in rows] == order_of(epoch).tolist()
            if epoch == 2:
                left = loader.epoch(3)
                assert next(left)[0].tolist() == order_of(3)[:BATCH].tolist()


def test_rows_are_sent_to_other_machines():
    """Machines are threads here."""
    rows = np.random.RandomState(0).normal(size=(ROWS, 2))
    with loading.Loader(rows, batch_size=8, processes=2) as loader:
        lab = open_lab(2, 1)
        try:
            x = lab.tensor("x", 2)
            f = synk.function([x], [(x.sum(axis=0), "sum")])
            for epoch in range(2):
                found = [np.asarray(f(*data)).ravel() for data in loader.epoch(epoch)]
                expected = [rows[order_of(epoch)[at : at + 8]].sum(axis=0) for at in range(0, ROWS, 8)]
                np.testing.assert_allclose(found, expected)
        finally:
            synk.close()


@pytest.fixture(scope="module", params=[1, 3], ids="{} rank(s)".format)
def world(open_world, request):
    open_world(request.param)


@pytest.fixture(scope="module")
def function(world):
    """A function that returns its rows as they are."""
    x, y = tt.tensor4("x"), tt.ivector("y")
    x = tt.TensorType("float32", [False] * 4)("x")
    return synk.function([x, y], [(x * 1, "gather"), (y * 1, "gather")], mode="FAST_COMPILE")


def test_a_function_gets_each_batch_from_all_ranks(function):
    transforms = [LOADED[name][0] for name in USUAL]
    changes = [LOADED[name][1] for name in USUAL]
    with loading.Loader((IMAGES, LABELS), transforms, batch_size=BATCH, processes=2) as loader:
        for epoch in range(3):
            found = []
            for data in loader.epoch(epoch):
                assert all(type(one) is synk.Data for one in data)
                found.append(function(*data))
            expected = serial.batches(row_of, order_of(epoch), BATCH, changes, 0, epoch)
            check_same(found, list(expected))


def test_a_loader_outlives_a_world_and_serves_the_next(world):
    size = synk.size()
    with loading.Loader((IMAGES.astype("float32"), LABELS), batch_size=BATCH) as loader:
        for _ in range(2):
            synk.close()
            assert all(type(one) is np.ndarray for one in next(loader.epoch(0)))
            synk.fork(size, use_gpu=False)
            x = tt.TensorType("float32", [False] * 4)("x")
            total = synk.function([x], (x.sum(), "sum"), mode="FAST_COMPILE")
            sums = [float(total(data[0])) for data in loader.epoch(0)]
            np.testing.assert_allclose(sum(sums), IMAGES.sum(dtype="float64"), rtol=1e-5)


def take_all(rank, shards):
    return copied(shards.minibatches(rank))


@pytest.mark.parametrize("batch_size", [3, 5, 22])
def test_a_program_gets_its_share_of_each_batch(world, batch_size):
    size = synk.size()
    transforms = [LOADED[name][0] for name in ("crop", "mirror of the batch", "channels")]
    changes = [LOADED[name][1] for name in ("crop", "mirror of the batch", "channels")]
    with loading.Loader((IMAGES, LABELS), transforms, batch_size=batch_size, processes=2) as loader:
        for first in (0, 4):
            shards = loader.shards(size, epochs=2, first=first)
            by_rank = synk.spmd(take_all, shards)
            expected = [
                batch
                for epoch in (first, first + 1)
                for batch in serial.batches(row_of, order_of(epoch), batch_size, changes, 0, epoch)
                if len(batch[0]) >= size
            ]
            assert len(shards) == len(expected)
            joined = [[np.concatenate(parts) for parts in zip(*arrays)] for arrays in zip(*by_rank)]
            check_same(joined, expected)
        check_same(
            copied(loader.epoch(0)), list(serial.batches(row_of, order_of(0), batch_size, changes))
        )


def test_ranks_may_be_at_different_batches(world):
    def program(rank, shards):
        found = []
        for number, (rows,) in enumerate(shards.minibatches(rank)):
            if rank.rank == 0 and number == 1:
                while rank.clocks[1:] != [len(shards)] * (rank.size - 1):
                    pass  # the others go on to the end meanwhile
            found.append(rows.tolist())
            rank.clock = number + 1
        return found

    with loading.Loader(np.arange(60), batch_size=6, processes=2) as loader:
        found = synk.spmd(program, loader.shards(synk.size()))
    together = [sorted(sum(parts, [])) for parts in zip(*found)]
    expected = [sorted(order_of(0, 60)[start : start + 6].tolist()) for start in range(0, 60, 6)]
    assert together == expected


def test_a_program_stops_between_two_minibatches(world):
    def program(rank, shards):
        count = 0
        for _ in shards.minibatches(rank):
            count += 1
            if count == 3:
                rank.stop()
        return count

    with loading.Loader(np.arange(600), batch_size=6) as loader:
        results = synk.spmd(program, loader.shards(synk.size(), epochs=100))
        assert results.stopped and max(results) >= 3 and sum(results) < 10_000
        assert len(copied(loader.epoch(0))) == 100


def test_a_new_rank_goes_on_with_the_minibatches_of_a_dead_one(two):
    def program(rank, shards):
        found = []
        for number, (rows,) in enumerate(shards.minibatches(rank)):
            if rank.rank == 1 and rank.restarts == 0 and number == 4:
                os._exit(1)
            found.append(rows.tolist())
        return found

    with loading.Loader(np.arange(60), batch_size=6) as loader:
        found = synk.spmd(program, loader.shards(2), on_death="continue")
    expected = [order_of(0, 60)[start : start + 6] for start in range(0, 60, 6)]
    assert found[0] == [rows[:3].tolist() for rows in expected]
    assert found[1] == [rows[3:].tolist() for rows in expected[4:]]


@own_process
def test_the_examples_print_what_they_show():
    assert run_examples(loading.Loader.__doc__, "Loader") > 8
