"""Tests of the recorder of sessions: tables, pictures, TensorBoard, and records of Theano-MPI."""

import importlib
import io
import os
import pickle
import struct
import sys

import numpy as np
import pytest

from synkhronos.extensions.rules import Record
from synkhronos.extensions.session import RankRecorder, Recorder, compare
from synkhronos.extensions.session.recorder import Lines


def point(epoch, **numbers):
    return {
        "epoch": epoch, "rank": None, "step": 10 * epoch, "seconds": 1.5 * epoch, "samples": 80 * epoch,
        **numbers,
    }  # fmt: skip


def rows(n, error=True):
    columns = {"loss": [1 / (1 + one) for one in range(n)], "seconds": [0.1 * one for one in range(n)]}
    columns["samples"], columns["learning_rate"] = [8.0 * one for one in range(n)], [0.1] * n
    columns.update({name: [0.01] * n for name in ("load", "compute", "exchange", "wait")})
    return {**columns, "output error": [0.5] * n} if error else columns


def recorder(size=2, **options):
    made = Recorder(size, **options)
    for rank in range(size):
        made.extend(rank, rows(20 + rank))
    made.validations += [point(1, loss=0.5, error=0.25), point(2, loss=0.4)]
    return made


def test_the_table_has_the_validations():
    assert recorder().table().splitlines() == [
        "epoch  seconds    loss   error",
        "    1      1.5  0.5000  0.2500",
        "    2      3.0  0.4000        ",
    ]
    assert Recorder().table() == "epoch  seconds"


def test_a_record_is_saved_with_all_its_numbers(tmp_path):
    made, path = recorder(), tmp_path / "record.json"
    made.save(path)
    loaded = Recorder.load(path)
    for name in (*Record._fields, "outputs", "times", "learning_rates"):
        assert getattr(loaded, name) == getattr(made, name), name
    assert loaded.outputs["error"] == [[0.5] * 20, [0.5] * 21] and loaded.samples[1][-1] == 160
    with pytest.raises(ValueError, match="expected the format"):
        Record.load(path)


def test_an_output_that_begins_late_is_nan_before():
    made = RankRecorder([], 0, {}, 0.0)
    for extra in ({}, {"auc": 0.75}):
        made.train_error(1, np.float32(0.5), None, **extra)
        made.finish_batch(0.1, 0.2, 8)
    assert np.isnan(made.rows["output auc"][0]) and made.rows["output auc"][1] == 0.75
    assert made.rows["samples"] == [8, 16] and "output error" not in made.rows


def test_a_batch_has_the_means_of_its_sub_batches_and_its_times():
    made = RankRecorder([], 0, {}, 0.0)
    for cost in (1.0, 3.0):
        made.start()
        made.end("load")
        made.train_error(1, np.array([[cost]]), cost / 10)
    outputs = made.outputs_of_batch
    assert len(outputs) == 2 and outputs[-1]["loss"] == 3 and made.measured > 0
    made.add_time("exchange", 0.5)
    made.finish_batch(0.1, 0.25, 8)
    assert not made.outputs_of_batch and made.measured == 0
    assert made.rows["loss"] == [2.0] and made.rows["output error"] == [0.2]
    assert made.rows["exchange"] == [0.5] and made.rows["compute"] == [0.25]
    assert 0 < made.rows["load"][0] < 0.1


def test_wrong_calls_of_a_model_are_errors_in_words():
    made = RankRecorder([], 0, {}, 0.0)
    with pytest.raises(RuntimeError, match=r"expected a call of start\(\)"):
        made.end("calc")
    made.start()
    with pytest.raises(ValueError, match="expected 'load', 'calc', 'comm' or 'wait', got 'load2'"):
        made.end("load2")
    for wrong in (np.zeros(2), "text", None):
        with pytest.raises((ValueError, KeyError), match="train_error: error: expected one number|loss"):
            made.train_error(1, wrong, np.zeros(3))
            made.finish_batch(0.1, 0, 1)


@pytest.mark.parametrize(
    "options, error, words",
    [
        ({"print_every": -1}, ValueError, "print_every: expected at least 0"),
        ({"print_every": 1.5}, TypeError, "print_every: expected an int"),
        ({"tensorboard": 3}, TypeError, "tensorboard: expected a path"),
        ({"size": -1}, ValueError, "size: expected at least 0"),
    ],
)
def test_wrong_options_are_refused_in_words(options, error, words):
    with pytest.raises(error, match=words):
        Recorder(**options)


def test_packages_that_are_missing_are_named(monkeypatch):
    monkeypatch.setattr("synkhronos.extensions.session.recorder.find_spec", lambda name: None)
    for options in ({"tensorboard": "runs"}, {"live": True}):
        (name,) = options
        with pytest.raises(ImportError, match=f"{name}: expected installed packages, .* pip install"):
            Recorder(**options)


def test_lines_have_the_means_since_the_last_line():
    written = []
    made = RankRecorder([Lines(written.append)], 2, {}, 0.0)
    for count, cost in enumerate((1.0, 2.0, 4.0, 6.0, 8.0), 1):
        made.train_error(count, cost, cost / 10, auc=0.5)
        made.add_time("wait", 0.25)
        made.finish_batch(0.1, 1.0, 8)
        made.print_train_info(count)
    made.print_val_info(5, point(1, loss=0.5, error=0.25, error_top5=0.125))
    assert written == [
        "\n2 1.500000 0.150000 auc 0.500000\n"
        "time per 2 batches: 2.50 (train 2.00 comm 0.00 wait 0.50 load 0.00)\n",
        "\n4 5.000000 0.500000 auc 0.500000\n"
        "time per 2 batches: 2.50 (train 2.00 comm 0.00 wait 0.50 load 0.00)\n",
        "\nvalidation cost:0.5000\nvalidation error:0.2500\nvalidation top_5_error:0.1250\n",
    ]
    assert made.get_latest_val_info() == [5, 0.5, 0.25, 0.125]


#: Stands for the package, and records what it is called with.
TENSORBOARDX = """
calls = []
class SummaryWriter:
    def __init__(self, folder): calls.append(("open", folder))
    def add_scalar(self, *args): calls.append(args)
    def close(self): calls.append("close")
"""


def test_tensorboard_gets_the_same_numbers(tmp_path, monkeypatch):
    (tmp_path / "tensorboardX.py").write_text(TENSORBOARDX)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "tensorboardX", raising=False)
    lines = []
    sinks = Recorder(print_every=2, tensorboard=tmp_path / "run").open_sinks(lines.append)
    made = RankRecorder(sinks, 2, {}, 0.0)
    for count in (1, 2):
        made.train_error(count, count, 0.5)
        made.finish_batch(0.125, 1.0, 8)
        made.print_train_info(count)
    made.print_val_info(2, point(1, error=0.25))
    for sink in sinks:
        sink.close()
    calls = sys.modules.pop("tensorboardX").calls
    assert calls[0] == ("open", str(tmp_path / "run")) and calls[-1] == "close" and len(lines) == 2
    scalars = {name: (value, step) for name, value, step in calls[1:-1]}
    assert scalars["training/loss"] == (1.5, 2) and scalars["training/error"] == (0.5, 2)
    assert scalars["training/learning_rate"] == (0.125, 2) and scalars["time/compute"] == (2.0, 2)
    assert scalars["validation/error"] == (0.25, 10) and len(scalars) == 8


def test_runs_are_compared_in_one_picture(tmp_path):
    pytest.importorskip("matplotlib")
    records = {"one": recorder(), "two & <more>": recorder(1), "empty": Recorder(2)}
    rules_record = Record(1)
    rules_record.losses, rules_record.seconds, rules_record.samples = [[1.0]], [[0.1]], [[8]]
    compare({**records, "of rules": rules_record}, tmp_path / "runs.svg")
    text = (tmp_path / "runs.svg").read_text()
    assert text.count('<g id="axes_') == 4, "loss by time and by rows, and two numbers"
    compare(records, tmp_path / "runs.png", numbers=["error"])
    assert (tmp_path / "runs.png").read_bytes()[:4] == b"\x89PNG"


#: Stands for the module, and records the pictures that are shown.
DISPLAY = """
shown = []
class Image:
    def __init__(self, data): self.data = data
class Handle:
    def update(self, image): shown.append(image.data)
def display(image, display_id):
    shown.append(image.data)
    return Handle()
"""


@pytest.fixture
def displayed(tmp_path, monkeypatch):
    """What a module in the place of IPython has displayed."""
    (tmp_path / "IPython").mkdir()
    # Matplotlib asks for the version when it makes its first canvas.
    (tmp_path / "IPython" / "__init__.py").write_text("version_info = 8, 24")
    (tmp_path / "IPython" / "display.py").write_text(DISPLAY)
    monkeypatch.syspath_prepend(tmp_path)
    for name in [name for name in sys.modules if name.partition(".")[0] == "IPython"]:
        monkeypatch.delitem(sys.modules, name)
    yield importlib.import_module("IPython.display").shown
    for name in ("IPython", "IPython.display"):
        del sys.modules[name]


def test_a_live_picture_is_replaced_by_the_next_one(displayed):
    pytest.importorskip("matplotlib")
    sinks = Recorder(print_every=0, live=True).open_sinks(print)
    made = RankRecorder(sinks, 2, {}, 0.0)
    for count in (1, 2, 3, 4):
        made.train_error(count, 1 / count, 0.5)
        made.finish_batch(0.125, 1.0, 8)
        made.print_train_info(count)
    made.print_val_info(4, point(1, error=0.25))
    assert len({*displayed}) == 3 and all(image.startswith(b"\x89PNG") for image in displayed)


def test_a_number_that_no_validation_has_is_drawn_as_nothing(tmp_path):
    pytest.importorskip("matplotlib")
    recorder().plot(tmp_path / "record.svg", numbers=["error", "auc"])
    assert "o-" not in (tmp_path / "record.svg").read_text()


class OfPython2(pickle._Pickler):
    """Pickles as Python 2 does with protocol 2: all strings are bytes, and NumPy's modules are old."""

    dispatch = pickle._Pickler.dispatch.copy()

    def save_string(self, value):
        data = value.encode("latin1") if isinstance(value, str) else value
        self.write(pickle.BINSTRING + struct.pack("<i", len(data)) + data)
        self.memoize(value)

    dispatch[bytes] = dispatch[str] = save_string

    def save_global(self, one, name=None):
        module = one.__module__.replace("numpy._core", "numpy.core")
        self.write(pickle.GLOBAL + f"{module}\n{one.__name__}\n".encode())
        self.memoize(one)

    dispatch[type(np.sum)] = dispatch[type(len)] = dispatch[type] = save_global


def pickled(value, of_python_2=False, protocol=2):
    if not of_python_2:
        return pickle.dumps(value, protocol)
    file = io.BytesIO()
    OfPython2(file, 2, fix_imports=False).dump(value)
    return file.getvalue()


INFOREC = {
    "train_info": [[40, np.array(2.5, "float32"), np.array(0.9)], [80, np.float32(1.5), 0.5]],
    "val_info": [[80, np.float64(1.25), np.array(0.375), 0.125]],
    "all_time": [[40, 2.0, 1.5, 0.25, 0.25], [80, 1.0, 0.75, 0.125, 0.125]],
    "epoch_time": [[80, 3.5]],
    "lr": [[80, np.array(0.01, ">f4")]],
}


@pytest.mark.parametrize("of_python_2", [True, False])
@pytest.mark.parametrize("protocol", [0, 2, 4])
def test_a_record_of_theano_mpi_is_read(tmp_path, of_python_2, protocol):
    path = tmp_path / "inforec.pkl"
    path.write_bytes(pickled(INFOREC, of_python_2, protocol))
    record = Recorder.from_inforec(path)
    assert record.losses == [[2.5, 1.5]] and record.outputs == {"error": [[0.9, 0.5]]}
    assert record.samples == [[40, 80]] and record.seconds == [[2.0, 3.0]]
    assert record.times["compute"] == [[1.5, 0.75]] and record.times["exchange"] == [[0.25, 0.125]]
    assert record.learning_rates == [[pytest.approx(0.01)] * 2]
    (validation,) = record.validations
    assert (validation["loss"], validation["error"], validation["error_top5"]) == (1.25, 0.375, 0.125)
    assert validation["seconds"] == 3.0 and validation["step"] == 80


class Harmful:
    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return os.mkdir, (self.path,)


def test_a_pickle_cannot_run_anything(tmp_path):
    path, made = tmp_path / "inforec.pkl", tmp_path / "made"
    objects = np.empty(1, object)
    objects[0] = Harmful(made)
    for number in (Harmful(made), objects, np.zeros(1, [("a", "f8")]), complex(1, 2), np.zeros(2)):
        path.write_bytes(pickled({**INFOREC, "lr": [[80, number]]}))
        with pytest.raises(ValueError, match="expected a file of Theano-MPI's recorder"):
            Recorder.from_inforec(path)
        assert not made.exists()
    for wrong in (b"", b"garbage", pickled([1]), pickled({"train_info": []}), pickled(INFOREC)[:-30]):
        path.write_bytes(wrong)
        with pytest.raises(ValueError, match="expected a file of Theano-MPI's recorder"):
            Recorder.from_inforec(path)
    pickle.loads(pickled(Harmful(made)))
    assert made.exists(), "what is refused would have run"
