"""Tests of what the demos share: options with limits, errors in one line, and how a script ends."""

import argparse
import contextlib
import importlib
import os
import re
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

DEMOS = ROOT / "demos"


def module(name, folder=DEMOS):
    """Import a module of the demos."""
    sys.path.insert(0, str(folder))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(folder))


@pytest.fixture(scope="module")
def script():
    yield module("script")
    sys.modules.pop("script", None)


@pytest.fixture
def parse(script, capsys):
    """Function that parses ``--option``, and returns the value or the error."""

    def parse_it(kind, text):
        parser = script.parser("Train.\n\nmore")
        parser.prog = "demo.py"
        parser.add_argument("--option", type=kind)
        try:
            return parser.parse_args([f"--option={text}"]).option
        except SystemExit as end:
            assert end.code == 2
            return capsys.readouterr().err

    return parse_it


# Options


def test_whole_numbers_have_limits(script, parse):
    kind = script.whole(1, 7)
    assert [parse(kind, text) for text in ("1", "7")] == [1, 7]
    for wrong in ("0", "8", "-1", "1.5", "nan", "two", ""):
        assert parse(kind, wrong) == (
            f"demo.py: argument --option: expected a whole number from 1 to 7, got {wrong!r} "
            f"(--help lists the options)\n"
        )


def test_rates_are_positive_numbers(script, parse):
    kind = script.positive(10)
    assert [parse(kind, text) for text in ("1e-30", "0.5", "10")] == [1e-30, 0.5, 10]
    for wrong in ("0", "-1", "10.1", "nan", "inf", "x"):
        said = parse(kind, wrong)
        assert f"expected a number greater than 0 and at most 10, got {wrong!r}" in said
        assert said.count("\n") == 1


def test_folders_and_files_are_checked(script, parse, tmp_path):
    file = tmp_path / "file.txt"
    file.touch()
    assert parse(script.folder, tmp_path) == tmp_path
    assert parse(script.new_file, file) == file and file.exists()
    assert parse(script.new_file, tmp_path / "new") == tmp_path / "new"
    assert parse(script.image_file, tmp_path / "x.PNG") == tmp_path / "x.PNG"
    for kind, wrong, message in (
        (script.folder, file, f"expected a folder, and there is none at '{file}'"),
        (script.folder, tmp_path / "none", "expected a folder, and there is none at "),
        (script.new_file, tmp_path, f"expected a file, and '{tmp_path}' is a folder"),
        (script.new_file, tmp_path / "none" / "x", f"there is no '{tmp_path}/none'"),
        (script.image_file, tmp_path / "none" / "x.png", f"there is no '{tmp_path}/none'"),
        (script.image_file, tmp_path / "x.doc", "ends in one of "),
        (script.image_file, tmp_path / "png", "ends in one of "),
    ):
        said = parse(kind, wrong)
        assert message in said and said.count("\n") == 1, said


def test_a_file_without_permission_is_refused(script, monkeypatch, tmp_path):
    monkeypatch.setattr(os, "access", lambda path, mode: (path, mode) != (tmp_path, os.W_OK))
    with pytest.raises(argparse.ArgumentTypeError, match="cannot be written: permission denied"):
        script.new_file(str(tmp_path / "x"))


def test_an_unknown_option_is_one_line(script, capsys):
    parser = script.parser("Train.")
    parser.prog = "demo.py"
    with pytest.raises(SystemExit):
        parser.parse_args(["--fast"])
    said = capsys.readouterr().err
    assert said == "demo.py: unrecognized arguments: --fast (--help lists the options)\n"


def test_packages_that_are_missing_are_named_with_the_remedy(script, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["/folder/demo.py"])
    script.need("numpy", "theano")
    with pytest.raises(SystemExit) as end:
        script.need("numpy", "no_such_package", "nor_this")
    assert end.value.code.startswith("demo.py: this script also needs no_such_package, nor_this; ")
    assert end.value.code.endswith("python -m pip install '.[demos]'")


# How a script ends


def raises(error):
    def main():
        raise error

    return main


@pytest.fixture
def ended(script, monkeypatch, capsys):
    """Function that runs a script, and returns its status and what it says."""
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


def test_other_errors_keep_their_traceback(script):
    for error in (ZeroDivisionError(), synk.WorkerError(1, "ZeroDivisionError", "", "")):
        with pytest.raises(type(error)):
            script.run(raises(error))
    script.run(lambda: None)  # a script that ends well raises nothing


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
    "path",
    ["demo_1.py", "lasagne_mnist/train_mnist_theano.py", "resnet/train_resnet.py"],
)
def test_ctrl_c_during_the_imports_is_one_line_too(path, tmp_path):
    (tmp_path / "synkhronos.py").write_text(INTERRUPTED_IMPORT)
    command = [sys.executable, "-B", str(DEMOS / path)]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, env=environment, stderr=subprocess.PIPE, timeout=30)
    assert done.returncode == -signal.SIGINT  # which a shell reports as 130
    assert done.stderr.decode() == f"{Path(path).name}: interrupted\n"


def test_devices_that_do_not_exist_are_user_errors(script):
    with pytest.raises(script.UserError, match="expected names such as 'cpu', 'cuda0'"):
        script.fork(devices=["gpu0"])
    assert not synk.is_forked()


def test_an_error_in_a_worker_at_the_start_is_a_user_error(script, monkeypatch):
    def fork(n, **options):
        raise synk.WorkerError(1, "ValueError", "rank 1 cannot use the device", "traceback")

    monkeypatch.setattr(synk, "fork", fork)
    with pytest.raises(script.UserError, match="^rank 1 cannot use the device$"):
        script.fork()


# Losses


@pytest.mark.parametrize("loss", [float("nan"), float("inf"), np.float32("nan")])
def test_a_loss_that_is_no_number_stops_the_training_with_a_sentence(script, loss):
    script.check_loss(2.5, "at step 1")
    with pytest.raises(script.UserError, match=r"^the loss is (nan|inf) at step 2, so the training has"):
        script.check_loss(loss, "at step 2")


@contextlib.contextmanager
def folder_of(name, *modules):
    """Modules in one of the folders of demos, which are forgotten afterwards."""
    try:
        yield [module(one, DEMOS / name) for one in modules]
    finally:
        for one in ("show", "script", *modules):
            sys.modules.pop(one, None)


def test_a_port_shows_its_losses_and_stops_at_the_first_nan(monkeypatch, capsys):
    def main(steps=3, batch_size=8):
        return [(1 / (step + 1), batch_size) for step in range(steps)] + [(np.nan, 0), (1.0, 0)]

    monkeypatch.setattr(sys, "argv", ["port.py", "--steps", "2", "--batch-size", "5"])
    with folder_of("ports", "show") as (show,), pytest.raises(SystemExit) as end:
        show.show(main, "loss", "rows")
    said = capsys.readouterr()
    assert "Too small to be faster" in said.out
    said_last = "step 0: loss 1.000000, rows 5.000000\nstep 1: loss 0.500000, rows 5.000000\n"
    assert said.out.endswith(said_last)
    assert said.err.startswith("port.py: the loss is nan at step 2, so") and end.value.code == 1


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


# Files that are not scripts


def test_a_file_that_scripts_use_says_so_when_it_is_run():
    """And every other file of the demos and the benchmarks does something."""
    others = []
    for path in sorted([*DEMOS.rglob("*.py"), *(ROOT / "benchmarks").glob("*.py")]):
        start, end, tail = path.read_text().partition('\nif __name__ == "__main__":\n    ')
        assert end, f"{path}: nothing happens when it is run"
        if "Scripts use this file" in tail.partition("\n")[0]:
            script = re.search(r"run (\S+)\.\"", tail)[1]
            assert (path.parent / script).exists() and "import" not in start.replace(
                "__future__ import", ""
            )
            others.append(path)
    assert len(others) > 20
    done = subprocess.run([sys.executable, str(others[0])], capture_output=True, text=True)
    assert done.returncode == 1 and not done.stdout
    assert done.stderr.splitlines()[-1].startswith("Scripts use this file; run ")
