"""Tests of the residual network demo: its steps, its loading of images, and both scripts."""

import re
from argparse import Namespace

import numpy as np
import pytest
import theano
import theano.tensor as tt
from demo_modules import modules_of, need
from processes import ROOT

import synkhronos as synk
from synkhronos.extensions.zoo import data

need("lasagne", "PIL", "tqdm")

DEMO = ROOT / "demos" / "resnet"
SCRIPTS = ("train_resnet_theano", "train_resnet")
MODULES = ("command_line", "script", "comparison", "images", "network", "training", *SCRIPTS)
TINY = ["--blocks", "1", "1", "--width", "4", "--size", "16", "--classes", "5"]
TINY += ["--batch", "6", "--valid", "7", "--steps", "3", "--evaluate-every", "2"]
TINIER = [*TINY, "--blocks", "1"]  # where the network does not matter

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:lasagne")
demo = modules_of("resnet", *MODULES)


def options_of(demo, *arguments, processes=1):
    options = demo.command_line.parser("test").parse_args([*TINY, *map(str, arguments)])
    demo.command_line.complete(options, processes)
    return options


def minibatch(options, rows):
    rng = np.random.RandomState(6)
    x = rng.normal(size=(rows, 3, options.size, options.size)).astype("float32")
    return x, rng.randint(options.classes, size=rows).astype("int32")


def values_of(variables):
    return [variable.get_value() for variable in variables]


def assert_close(got, expected):
    for one, other in zip(got, expected):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("processes, slices", [pytest.param(1, 1, marks=pytest.mark.slow), (2, 2)])
def test_a_step_equals_the_serial_one_where_every_share_has_the_same_statistics(
    demo, world_of, processes, slices
):
    """Each rank and slice gets the same rows, so its statistics equal the statistics of all rows."""
    options = options_of(demo, "--slices", slices, processes=processes)
    x, y = minibatch(options, 3)
    x, y = np.tile(x, (processes * slices, 1, 1, 1)), np.tile(y, processes * slices)

    serial = demo.network.build_model(options)
    serial_step, serial_evaluate = demo.train_resnet_theano.build(serial, options)
    expected = [float(serial_step(x, y)) for _ in range(2)]

    world_of(processes, verify="off")
    model = demo.network.build_model(options)
    step, evaluate = demo.train_resnet.build(model, options)
    data = synk.data(x), synk.data(y)
    np.testing.assert_allclose([step(*data) for _ in range(2)], expected, rtol=1e-5)
    assert_close(values_of(model.params), values_of(serial.params))
    if processes == 1 and slices == 1:  # otherwise, unbiased variances are of fewer numbers
        assert_close(values_of(model.averages), values_of(serial.averages))
        np.testing.assert_allclose(evaluate(*data), serial_evaluate(x, y), rtol=1e-5)


@pytest.mark.slow
def test_evaluation_averages_the_running_averages_over_the_ranks_by_their_rows(demo, world_of):
    options = options_of(demo, "--batch", 5, processes=2)
    world_of(2, verify="off")
    model = demo.network.build_model(options)
    step, evaluate = demo.train_resnet.build(model, options)
    x, y = minibatch(options, 5)
    data = synk.data(x), synk.data(y)
    step(*data)
    before = synk.gather(model.averages)
    assert not np.allclose(before[0][0], before[0][1])
    results = evaluate(*data)
    for each, after in zip(before, synk.gather(model.averages)):
        np.testing.assert_allclose(after[0], (3 * each[0] + 2 * each[1]) / 5, rtol=1e-5)
        np.testing.assert_array_equal(after[0], after[1])
    # Thus the results do not depend on which rank evaluates a row, or on the number of rows per call.
    order = [3, 4, 0, 2, 1]
    np.testing.assert_allclose(evaluate(synk.data(x[order]), synk.data(y[order])), results, rtol=1e-5)
    measure = theano.function([model.x, model.y], [model.valid_loss, model.accuracy])
    np.testing.assert_allclose(results, measure(x, y), rtol=1e-5)


COLOURS = {"blue": (0, 0, 255), "green": (0, 255, 0), "red": (255, 0, 0)}


@pytest.fixture
def folder(tmp_path):
    from PIL import Image

    root = tmp_path / "images"
    for name, colour in COLOURS.items():
        (root / name / "more").mkdir(parents=True)
        for number, where in enumerate((".", ".", ".", "more")):
            image = Image.new("RGB", (20 + 7 * number, 30), colour)
            suffix = "JPG" if number == 1 else "png"
            image.save(root / name / where / f"{number}.{suffix}", quality=95)
        (root / name / "notes.txt").write_text("not an image")
    (root / "empty").mkdir()
    return root


def test_images_have_the_class_of_their_folder_and_the_size_asked_for(demo, folder):
    images = demo.images.ImageFolder(folder)
    assert images.names == ["blue", "green", "red"]
    assert images.labels.dtype == "int32" and images.labels.tolist() == [0] * 4 + [1] * 4 + [2] * 4
    assert "12 of 3 classes" in images.source
    out = np.empty((3, 16, 16), "float32")
    for row, label in enumerate(images.labels):
        images.load(row, out)
        colour = np.array(COLOURS[images.names[label]]) / 255
        expected = (colour - data.IMAGENET_MEAN) / data.IMAGENET_DEVIATION
        np.testing.assert_allclose(out.reshape(3, -1).T, np.tile(expected, (256, 1)), atol=0.1)


def load_options(folder=None, **changes):
    options = dict(data=folder, classes=5, size=8, batch=4, valid=2, seed=1)
    return Namespace(**{**options, **changes})


def test_each_rank_loads_the_images_of_its_own_rows(world_of, demo, folder):
    images = demo.images.load_images(load_options(folder))
    loaded_here = theano.shared(np.zeros(12), "loaded here")
    rows = tt.ivector("rows")
    pixels = demo.images.LoadImages(images, 8)(rows)
    counted = tt.inc_subtensor(loaded_here[rows], pixels.mean(axis=(1, 2, 3)) * 0 + 1)
    world_of(3)
    f = synk.function([rows], pixels.mean(), updates=[(loaded_here, counted)])
    f(np.arange(12, dtype="int32"))
    by_rank = synk.gather(loaded_here)
    assert by_rank.sum(axis=0).tolist() == [1] * 12
    assert by_rank.sum(axis=1).tolist() == [4, 4, 4]


def figures(line):
    return [float(number) for number in re.findall(r"(?<![\w.])\d+\.\d+", line)]


@pytest.mark.slow
def test_the_main_script_trains_compares_and_reports(run_demo):
    arguments = [*TINY, "--processes", "2", "--slices", "1", "--compare"]
    done = run_demo(DEMO / "train_resnet.py", *arguments, timeout=300)
    assert "noise with random labels; 7 held out" in done.stdout
    assert "8 layers" in done.stdout and "Ranks:   2, with 3 images each at most" in done.stdout
    assert "27 running averages are" in done.stdout
    for steps in (2, 3):
        line = rf"^ +{steps}( +\d+\.\d+){{2}} +\d+\.\d+% +\d+\.\d+$"
        assert re.search(line, done.stdout, re.M)
    assert re.search(r"^2 process\(es\)( +\d+\.\d+){3}$", done.stdout, re.M)
    assert re.search(r"^(2 processes are [0-9.]+ times as fast|not measured)", done.stdout, re.M)
    assert re.search(r"^Seconds for 6 images: [0-9.]+, [0-9.]+, [0-9.]+; the least", done.stdout, re.M)
    assert "images/s]" not in done.stderr  # no progress bar, as stderr is not a terminal


@pytest.mark.parametrize(
    "script", ["train_resnet", pytest.param("train_resnet_theano", marks=pytest.mark.slow)]
)
def test_the_scripts_train_on_image_files(run_demo, folder, script):
    own = ["--processes", "2", "--slices", "2", "--batch", "9"] if script == "train_resnet" else []
    done = run_demo(DEMO / f"{script}.py", *TINIER, "--data", folder, *own, timeout=300)
    assert f"12 of 3 classes, from {folder}; 2 held out" in done.stdout
    assert "3 classes\n" in done.stdout
    last = figures([line for line in done.stdout.splitlines() if line.startswith("    3 ")][0])
    assert 0 < last[0] < 5 and 0 < last[1] < 20


def test_a_script_names_the_broken_file_without_a_traceback(run_demo, folder):
    for path in folder.rglob("*.png"):
        path.write_bytes(b"")
    done = run_demo(DEMO / "train_resnet.py", *TINIER, "--data", folder, "--processes", "2", check=False)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    # Theano may have warned before that another process has removed a lock of its compiler.
    said = r"^train_resnet.py: .*\.png cannot be read as an image"
    assert re.search(said, done.stderr, re.MULTILINE)


@pytest.fixture
def double(demo, monkeypatch):
    monkeypatch.setattr(theano.config, "floatX", "float64")


def trained(demo, options, x, y, steps, build):
    """Return the losses, parameters and running averages after some steps in double precision."""
    model = demo.network.build_model(options)
    step, _ = build(model, options)
    rng = np.random.RandomState(7)
    order = [rng.permutation(len(x)) for _ in range(steps)]
    losses = [float(step(x[rows], y[rows])) for rows in order]
    return losses, values_of(model.params), values_of(model.averages)


def assert_equals_serial_training(demo, world_of, options, processes, steps, rtol):
    x, y = minibatch(options, options.batch)
    x = x.astype(theano.config.floatX)
    expected = trained(demo, options, x, y, steps, demo.train_resnet_theano.build)
    world_of(processes)
    result = trained(demo, options, x, y, steps, demo.train_resnet.build)
    for got, one in zip(result, expected):
        for value, wanted in zip(got, one):
            np.testing.assert_allclose(value, wanted, rtol=rtol, atol=rtol)


@pytest.mark.slow
@pytest.mark.parametrize("processes, rows", [(2, 5), (3, 5), (4, 3)])
def test_synchronized_steps_equal_the_serial_ones_for_any_numbers_of_rows(
    demo, double, world_of, processes, rows
):
    """In the last case a rank has no rows."""
    options = options_of(demo, "--sync-batch-norm", "--batch", rows, processes=processes)
    assert_equals_serial_training(demo, world_of, options, processes, 3, 1e-9)
    assert synk.size() == processes


@pytest.mark.slow
@pytest.mark.parametrize("processes", [2, 3])
def test_20_synchronized_steps_equal_the_serial_ones(demo, double, world_of, processes):
    options = options_of(demo, "--sync-batch-norm", "--batch", 8, processes=processes)
    assert_equals_serial_training(demo, world_of, options, processes, 20, 1e-5)


@pytest.mark.slow
def test_the_main_script_trains_with_the_statistics_of_all_ranks(run_demo):
    arguments = [*TINY, "--blocks", "1", "--processes", "2", "--sync-batch-norm"]
    done = run_demo(DEMO / "train_resnet.py", *arguments, timeout=300)
    assert "batch norm uses the statistics of all ranks\n" in done.stdout
