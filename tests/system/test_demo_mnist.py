"""Tests of the demos of MNIST and of reviews: their shared modules, and an epoch of each script."""

import gzip
import json
import re
import signal
import urllib.error

import numpy as np
import pytest
from demo_modules import modules_of, need
from processes import ROOT

need("lasagne", "matplotlib", "mlxtend", "sklearn", "tqdm")

DEMO = ROOT / "demos" / "lasagne_mnist"
MODULES = ("mnist", "network", "command_line", "script", "training", "train_mnist_gpu_data")
SCRIPTS = {
    "train_mnist_theano": [],
    "train_mnist_cpu_data": ["--processes", "2", "--no-compare"],
    "train_mnist_gpu_data": ["--processes", "2"],
}

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:lasagne")
demo = modules_of("lasagne_mnist", *MODULES)


def write_idx(path, array):
    header = bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">i4").tobytes()
    content = header + array.astype("uint8").tobytes()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)


def write_mnist(folder, suffix):
    rng = np.random.RandomState(5)
    for kind, rows in (("train", 120), ("t10k", 30)):
        write_idx(folder / f"{kind}-images-idx3-ubyte{suffix}", rng.randint(0, 256, (rows, 28, 28)))
        write_idx(folder / f"{kind}-labels-idx1-ubyte{suffix}", np.arange(rows) % 10)


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_mnist_is_read_from_its_own_files(demo, tmp_path, suffix):
    write_mnist(tmp_path, suffix)
    digits = demo.mnist.load_digits(tmp_path)
    assert [len(labels) for _, labels in digits.parts.values()] == [100, 20, 30]
    images, labels = digits.parts["test"]
    raw = demo.mnist.read_idx(tmp_path / f"t10k-images-idx3-ubyte{suffix}")
    assert np.allclose(images[:, 0] * 255, raw) and images.dtype == "float32"
    assert np.array_equal(labels, np.arange(30) % 10)


@pytest.fixture
def offline(demo, tmp_path, monkeypatch):
    """There are no files, and none can be downloaded."""

    def fail(address, timeout):
        raise urllib.error.URLError("no network")

    monkeypatch.setattr(demo.mnist, "MNIST_FOLDER", tmp_path / "data")
    monkeypatch.setattr(demo.mnist.urllib.request, "urlopen", fail)
    yield
    assert list(tmp_path.iterdir()) == []


def test_offline_a_part_of_mnist_is_used_and_it_says_so(demo, offline):
    digits = demo.mnist.load_digits()
    assert digits.source.startswith("5,000 digits of MNIST") and "none could be down" in digits.source
    assert [len(labels) for _, labels in digits.parts.values()] == [4000, 500, 500]
    for images, labels in digits.parts.values():
        assert images.shape[1:] == (1, 28, 28) and images.dtype == "float32" and images.max() == 1
        assert np.array_equal(np.bincount(labels), np.full(10, len(labels) // 10))


def test_a_download_is_kept_only_if_it_is_mnist(demo, tmp_path, monkeypatch):
    (tmp_path / "answer").write_bytes(b"a captive portal")
    monkeypatch.setattr(
        demo.mnist.urllib.request, "urlopen", lambda address, timeout: open(tmp_path / "answer", "rb")
    )
    folder = tmp_path / "data"
    assert not demo.mnist.download_mnist(folder)
    assert not folder.exists()

    digest = demo.mnist.hashlib.sha256(b"a captive portal").hexdigest()
    monkeypatch.setattr(demo.mnist, "MNIST_FILES", dict.fromkeys(demo.mnist.MNIST_FILES, digest))
    assert demo.mnist.download_mnist(folder)
    assert sorted(path.name for path in folder.iterdir()) == sorted(
        f"{name}.gz" for name in demo.mnist.MNIST_FILES
    )


@pytest.mark.slow
@pytest.mark.parametrize("model", ["mlp", "cnn"])
def test_the_three_scripts_have_the_same_loss_curve(run_demo, model):
    arguments = ["--model", model, "--no-dropout", "--epochs", "2"]
    results = {}
    for script, own in SCRIPTS.items():
        done = run_demo("mnist_losses.py", DEMO, script, *arguments, *own, timeout=300)
        results[script] = json.loads(done.stdout.splitlines()[-1])
    accuracy, curve = results["train_mnist_theano"]
    for other_accuracy, other_curve in results.values():
        assert np.allclose(other_curve, curve, rtol=1e-9, atol=0)
        assert other_accuracy == pytest.approx(accuracy)


@pytest.mark.parametrize(
    "script",
    ["train_mnist_cpu_data"]
    + [
        pytest.param(one, marks=pytest.mark.slow)
        for one in ("train_mnist_theano", "train_mnist_gpu_data")
    ],
)
def test_a_script_trains_reports_and_draws(run_demo, tmp_path, script):
    arguments = ["--data", "sklearn", "--model", "mlp", "--epochs", "1", "--plot", "curve.png"]
    done = run_demo(DEMO / f"{script}.py", *arguments, *SCRIPTS[script], timeout=300)
    lines = done.stdout.splitlines()
    assert "1797 digits" in lines[0]
    assert lines[3].split() == "epoch train loss valid loss valid accuracy seconds".split()
    _, train_loss, valid_loss, valid_accuracy, _ = lines[4].split()
    assert float(train_loss) < 2.5 and float(valid_loss) < 2 and float(valid_accuracy[:-1]) > 40
    assert "accuracy" in lines[5] and "images/s" in lines[6]
    assert "images/s" not in done.stderr  # no progress bar, as stderr is not a terminal
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_the_main_script_compares_itself_with_one_process(run_demo, monkeypatch):
    monkeypatch.setenv("SYNKHRONOS_PROGRESS", "1")
    options = ["--data", "sklearn", "--model", "mlp", "--epochs", "1", "--processes", "2"]
    done = run_demo(DEMO / "train_mnist_cpu_data.py", *options, timeout=300)
    number = r"[0-9.]+"
    expected = (
        rf"Speed:  (2 processes are {number} times as fast as Theano untouched \(\d+ BLAS threads?\),\n"
        rf"        and {number} times as fast as the best setting of one process .*|not measured, .*)\n"
        rf"        Seconds for 1259 digits: {number}, {number}, {number}; the least of 5 in turns\n"
        rf"        Other programs used {number} of \d+ cores meanwhile\n"
    )
    assert re.search(expected, done.stdout), done.stdout
    for title in ("1 of 4, the training step", "3 of 4, Theano untouched", "4 of 4, one process"):
        assert re.search(rf"^compiled {title}: {number} s$", done.stderr, re.MULTILINE), done.stderr


RESTART = ["--data", "sklearn", "--model", "mlp", "--epochs", "2", "--batch-size", "300"]


@pytest.mark.slow
def test_a_worker_lost_half_way_changes_nothing(run_demo, tmp_path):
    arguments = [*RESTART, "--processes", "2", "--save-every", "3", "--plot", "curve.png"]
    done = run_demo(DEMO / "train_mnist_restart.py", *arguments, timeout=300)
    for line in (
        "     5  Killing synkhronos-1, process ",
        "        WorldBrokenError: a worker died: rank 1 (killed by SIGKILL)",
        "        Started again with 2 process(es), from the checkpoint of step 3",
        "        Parameters, velocities and random streams are the same, bit for bit",
    ):
        assert line in done.stdout, done.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["curve.png"]


@pytest.mark.slow
def test_a_run_goes_on_with_fewer_processes(run_demo):
    arguments = [*RESTART, "--processes", "2", "--go-on-with", "1", "--no-compare"]
    done = run_demo(DEMO / "train_mnist_restart.py", *arguments, timeout=300)
    assert "Started again with 1 process(es), from the checkpoint of step 0" in done.stdout
    accuracy = re.search(r"Test:   accuracy ([0-9.]+)%", done.stdout)[1]
    assert float(accuracy) > 60


@pytest.mark.slow
def test_a_run_that_was_killed_is_resumed_and_ends_the_same(run_python, run_demo):
    arguments = [*RESTART, "--processes", "2", "--save-every", "3", "--checkpoint", "kept.npz"]
    script = DEMO / "train_mnist_restart.py"
    # The checkpoints are saved at the start, at steps 0 and 3, at step 3 again after the worker was
    # lost at step 5, and at step 6.
    killed = run_python("killed_while_saving.py", script, *arguments, timeout=300, check=False)
    assert killed.returncode == -signal.SIGKILL
    done = run_demo(script, *arguments, "--resume", timeout=300)
    assert "Going on from step 6 of kept.npz" in done.stdout
    assert "the same, bit for bit" in done.stdout


RULES = ["--data", "sklearn", "--model", "mlp", "--processes", "2"]


def test_a_rule_trains_and_is_resumed(run_demo, tmp_path):
    script = DEMO / "train_mnist_rules.py"
    arguments = [*RULES, "--rule", "localsgd", "--period", "3", "--checkpoint", "kept.npz"]
    first = run_demo(script, *arguments, "--epochs", "1", "--plot", "loss.png", timeout=300)
    assert "Rule:   LocalSGD(period=3), 2 process(es), 100 rows of each in a step" in first.stdout
    lines = first.stdout.splitlines()
    (row,) = [number for number, line in enumerate(lines) if line.startswith("epoch")]
    epoch, _, _, loss, accuracy = lines[row + 1].split()
    assert epoch == "1" and float(loss) < 2.3 and float(accuracy[:-1]) > 20
    assert "steps of the processes: 7, 7" in first.stdout
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")

    exists = run_demo(script, *arguments, "--epochs", "2", timeout=300, check=False)
    assert exists.returncode == 2 and "'kept.npz' exists already; add --resume" in exists.stderr
    second = run_demo(script, *arguments, "--epochs", "2", "--resume", timeout=300).stdout.splitlines()
    assert second[row + 1] == lines[row + 1] and second[row + 2].split()[0] == "2"
    assert "steps of the processes: 14, 14" in second[-1]


def test_a_training_with_a_rule_that_diverges_is_one_line(run_demo):
    arguments = [*RULES, "--rule", "ASGD", "--learning-rate", "1000", "--epochs", "3"]
    done = run_demo(DEMO / "train_mnist_rules.py", *arguments, timeout=300, check=False)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    last = done.stderr.splitlines()[-1]
    assert last.startswith("train_mnist_rules.py: ") and "lower the learning rate" in last


need("sklearn", "tqdm")

LSTM = ROOT / "demos" / "lstm_imdb"
SMALL = ["--processes", "2", "--cells", "16", "--epochs", "2", "--batch-size", "5"]

lstm = modules_of("lstm_imdb", "reviews")


@pytest.fixture(scope="module")
def reviews(lstm):
    return lstm.reviews


def write_files(folder, texts):
    for place, of_place in texts.items():
        (folder / place).mkdir(parents=True)
        for number, text in enumerate(of_place):
            (folder / place / f"{number}_7.txt").write_text(text, encoding="utf-8")


TEXTS = {
    "train/neg": ["Dull, dull.", "It's bad!<br /><br />Bad"],
    "train/pos": ["Très bon film", "good good good"],
    "test/neg": ["bad unheard-of"],
    "test/pos": ["one two three four five good film", ""],
}


def test_files_are_read_as_rows_of_word_numbers(reviews, tmp_path):
    write_files(tmp_path, TEXTS)
    found = reviews.load(tmp_path, n_words=100, length=4)
    sizes = {part: rows.shape for part, (rows, _) in found.parts.items()}
    assert sizes == {"train": (3, 4), "valid": (1, 4), "test": (3, 4)}
    rows, labels = found.parts["test"]
    assert labels.tolist() == [0, 1, 1] and rows.dtype == labels.dtype == np.int32
    assert rows[0].tolist()[1:] == [1, 1, 0]  # unknown words, and padding
    assert found.text(rows[1]).split()[:2] == ["?", "?"]  # of a long text the last words count
    assert rows[2].tolist() == [1, 0, 0, 0]  # without words
    seen = {found.text(row) for part in ("train", "valid") for row in found.parts[part][0]}
    assert any("good good good" in text for text in seen)
    assert sum(labels.sum() for _, labels in list(found.parts.values())[:2]) == 2


@pytest.mark.slow
def test_the_script_learns_from_made_reviews(run_demo, tmp_path):
    arguments = ["--reviews", "2000", *SMALL, "--learning-rate", "0.04", "--plot", "loss.png"]
    done = run_demo(LSTM / "train_lstm.py", *arguments, "--period", "2", timeout=300)
    lines = done.stdout.splitlines()
    assert lines[0] == "Data:   2000 reviews made by a grammar, not by people"
    assert "EASGD(alpha=0.5, period=2, momentum=0.0), 2 process(es)" in lines[2]
    assert lines[3].split()[:3] == ["epoch", "validated", "by"] and "process 1" in lines[4]
    accuracy = float(re.search(r"Test:   loss [0-9.]+, accuracy ([0-9.]+)%", done.stdout)[1])
    assert accuracy > 75  # the words alone, without their order, tell 63%
    assert len(re.findall(r"^positive by \d+%, and is (positive|negative): ", done.stdout, re.M)) == 3
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
