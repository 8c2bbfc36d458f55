"""Tests of what the demos share, and of the ports, each against its serial original."""

import difflib
import functools
import importlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import theano.tensor as tt
from processes import ROOT

import synkhronos as synk
import theano

DEMOS = ROOT / "demos"


def module(name, folder=DEMOS):
    sys.path.insert(0, str(folder))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(folder))


@pytest.fixture(scope="module")
def script():
    yield module("script")
    sys.modules.pop("script", None)


def raises(error):
    def main():
        raise error

    return main


@pytest.fixture
def ended(script, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["/folder/demo.py"])

    def run(main):
        with pytest.raises(SystemExit) as end:
            script.run(main)
        return end.value.code, capsys.readouterr().err

    return run


def test_what_a_user_can_change_is_one_line(script, ended):
    for error, said in (
        (script.UserError("no images\nin the graph"), "no images"),
        (synk.WorkerError(1, "UserError", "x.png is lost\nApply node", "traceback"), "x.png is lost"),
        (synk.SynkhronosError("too many processes"), "too many processes"),
        (synk.WorldBrokenError("a worker died"), "a worker died"),
        (FileNotFoundError(2, "No such file", "x"), "[Errno 2] No such file: 'x'"),
        (MemoryError("too little shared memory"), "too little shared memory"),
        (MemoryError(), "MemoryError"),
    ):
        assert ended(raises(error)) == (1, f"demo.py: {said}\n")


def test_ctrl_c_ends_a_script_with_130(ended):
    assert ended(raises(KeyboardInterrupt())) == (130, "demo.py: interrupted\n")


def interrupted_in_a_call():
    """Be a demo that the terminal interrupts while all ranks compute."""
    script = module("script")

    def main():
        synk.fork(2, use_gpu=False)
        x = tt.dvector("x")
        f = synk.function([x], (x.sum(), "sum"))
        f(np.arange(4.0))
        os.killpg(0, signal.SIGINT)
        for _ in range(10_000):
            f(np.arange(4.0))
            time.sleep(0.01)

    script.run(main)


def test_a_demo_that_the_terminal_interrupts_ends_with_130_and_one_line(programs):
    done = programs.run(interrupted_in_a_call)
    assert done.returncode == 130 and "Traceback" not in done.stderr
    assert done.stderr.splitlines()[-1] == "interrupted_in_a_call: interrupted"


#: Takes the place of the package, whose import takes seconds
INTERRUPTED_IMPORT = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)  # also if the tests run in the background
signal.raise_signal(signal.SIGINT)
"""


@pytest.mark.parametrize(
    "path", ["demo_1.py", "lasagne_mnist/train_mnist_theano.py", "resnet/train_resnet.py"]
)
def test_ctrl_c_during_the_imports_is_one_line_too(path, tmp_path):
    (tmp_path / "synkhronos.py").write_text(INTERRUPTED_IMPORT)
    command = [sys.executable, "-B", str(DEMOS / path)]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, env=environment, stderr=subprocess.PIPE, timeout=30)
    assert done.returncode == -signal.SIGINT  # which a shell reports as 130
    assert done.stderr.decode() == f"{Path(path).name}: interrupted\n"


@pytest.mark.parametrize("loss", [float("nan"), float("inf"), np.float32("nan")])
def test_a_loss_that_is_no_number_stops_the_training_with_a_sentence(script, loss):
    script.check_loss(2.5, "at step 1")
    with pytest.raises(script.UserError, match=r"^the loss is (nan|inf) at step 2, so the training has"):
        script.check_loss(loss, "at step 2")


@pytest.mark.parametrize("name", ["vae", "vae_theano"])
def test_a_port_takes_options_with_limits(run_demo, name):
    done = run_demo(DEMOS / "ports" / f"{name}.py", "--steps", "0", check=False)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith(f"{name}.py: argument --steps: expected a whole number from 1 to")


#: Options that each folder of demos refuses before it trains, with a part of the line that says why
REFUSED = [
    ("demo_1.py", ["--processes", "0"], 2, "expected a whole number from 1 to 256, got '0'"),
    ("demo_5.py", ["--devices", "gpu"], 1, "expected names such as 'cpu'"),
    ("lasagne_mnist/train_mnist_cpu_data.py", ["--plot", "none/x.png"], 2, "there is no 'none'"),
    ("lasagne_mnist/train_mnist_gpu_data.py", ["--processes", "257"], 2, "from 1 to 256, got '257'"),
    ("lasagne_mnist/train_mnist_theano.py", ["--data", "."], 1, "expected train-images-idx3-ubyte"),
    ("lasagne_mnist/train_mnist_restart.py", ["--resume"], 2, "--resume needs a --checkpoint that"),
    ("lasagne_mnist/train_mnist_restart.py", ["-n2", "--go-on-with=3"], 2, "expected at most 2, got 3"),
    ("lasagne_mnist/train_mnist_rules.py", ["--rule=SGD"], 2, "expected one of BSP, LocalSGD, DiLoCo,"),
    ("lasagne_mnist/train_mnist_rules.py", ["--period=0"], 2, "expected a whole number from 1 to"),
    ("lasagne_mnist/train_mnist_rules.py", ["--momentum=1"], 2, "at least 0 and less than 1"),
    ("lasagne_mnist/train_mnist_rules.py", ["--resume"], 2, "--resume needs a --checkpoint that"),
    ("lstm_imdb/train_lstm.py", ["--rule=gosgd", "--alpha=1"], 2, "not have it; it has --probability"),
    ("lstm_imdb/train_lstm.py", ["--data=.", "-n1"], 1, "expected text files in train/neg, NAME.txt"),
    ("controller.py", ["--patience", "1"], 2, "expected a whole number from 2 to"),
    ("resnet/train_resnet.py", ["--data", "none"], 2, "expected a folder, and there is none"),
    ("resnet/train_resnet.py", ["--steps", "0"], 2, "expected a whole number from 1 to"),
    ("resnet/train_resnet_theano.py", ["--slices", "2"], 1, "--slices: needs train_resnet.py"),
]


@pytest.mark.parametrize("path, options, status, message", REFUSED)
def test_what_cannot_work_is_one_line_before_the_training(run_demo, path, options, status, message):
    pytest.importorskip("lasagne" if "/" in path else "numpy")
    done = run_demo(DEMOS / path, *options, check=False)
    assert done.returncode == status and done.stdout == ""
    (line,) = [one for one in done.stderr.splitlines() if one.startswith(f"{Path(path).name}: ")]
    assert message in line and "Traceback" not in done.stderr


FOLDER = ROOT / "demos" / "ports"
NAMES = sorted(path.stem[: -len("_theano")] for path in FOLDER.glob("*_theano.py"))
QUICK = ("dqn", "lenet", "mlp", "pixelcnn")  # to compile
STEPS = 40
RANKS = 2
#: Which number of those that a script returns for each step falls by half: the GAN's error.
COLUMNS = {"gan": 2}


def set_mode(name):
    """Build functions without C code; only convolutions have nothing else."""
    theano.config.optimizer = "fast_compile"
    theano.config.mode = "Mode" if name in ("lenet", "pixelcnn") else "FAST_COMPILE"


def run_both(name, float_x):
    """Write the losses of the serial and of the parallel script, in this process, as JSON."""
    set_mode(name)
    theano.config.floatX = float_x
    synk.fork = functools.partial(synk.fork, RANKS, use_gpu=False)
    sys.path.insert(0, str(FOLDER))
    losses = {one: __import__(one).main(STEPS) for one in (f"{name}_theano", name)}
    Path("losses.json").write_text(json.dumps(losses))


def compare(programs, folder, name, float_x, **tolerances):
    """Run both scripts; return the losses of the serial one, after a comparison."""
    programs.run(run_both, name, float_x, timeout=300, cwd=folder).check()
    losses = json.loads((folder / "losses.json").read_text())
    serial, parallel = np.array(losses[f"{name}_theano"]), np.array(losses[name])
    assert len(serial) == STEPS and np.isfinite(serial).all()
    np.testing.assert_allclose(parallel, serial, **tolerances)
    return serial


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in NAMES]
)
def test_the_parallel_losses_equal_the_serial_ones_and_fall_by_half(demo_programs, tmp_path, name):
    pytest.importorskip("sklearn", reason="the demos need sklearn")
    serial = compare(demo_programs, tmp_path, name, "float64", rtol=1e-9)
    falling = serial[:, COLUMNS[name]] if name in COLUMNS else serial
    assert falling[-5:].mean() < falling[0] / 2


def changed_lines(old, new):
    """Return how many lines differ: those that are new or replaced, and those that are only deleted."""
    matcher = difflib.SequenceMatcher(None, old.splitlines(), new.splitlines(), autojunk=False)
    changes = [one[1:] for one in matcher.get_opcodes() if one[0] != "equal"]
    return sum(max(end - start, new_end - new_start) for start, end, new_start, new_end in changes)


@pytest.mark.parametrize("name", NAMES)
def test_four_to_eight_lines_are_changed(name):
    old, new = (FOLDER / f"{one}.py" for one in (f"{name}_theano", name))
    assert 4 <= changed_lines(old.read_text(), new.read_text()) <= 8
    assert "synk" not in old.read_text()
