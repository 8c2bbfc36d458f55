"""Tests of the demo of sessions: a model of each library, an epoch or two with different rules."""

import importlib.util

import pytest
from demo_modules import need
from processes import ROOT

need("sklearn", "matplotlib")

DEMO = ROOT / "demos" / "session" / "train.py"


def errors(stdout):
    table = stdout.rpartition("\n\n")[2].splitlines()
    assert table[0].split() == ["epoch", "seconds", "loss", "error", "error_top5"]
    return [float(line.split()[3]) for line in table[1:]]


@pytest.mark.parametrize(
    "model, options",
    [
        ("theano", ["--sync-type", "cdd", "--plot", "session.png", "--warmup", "1"]),
        pytest.param("lasagne", ["--rule", "EASGD", "--batch", "20"], marks=pytest.mark.slow),
        pytest.param("keras", ["--rule", "LocalSGD", "--scale-lr"], marks=pytest.mark.slow),
    ],
)
def test_a_model_of_each_library_learns_the_digits(run_demo, tmp_path, model, options):
    if model != "theano" and importlib.util.find_spec(model) is None:
        pytest.skip(f"{model} is not installed")
    home = {"KERAS_HOME": str(tmp_path)}  # where Keras writes a file
    done = run_demo(
        DEMO, "--model", model, "--epochs", "5", *options, "--print-every", "30", environment=home
    )
    found = errors(done.stdout)
    assert len(found) == 5 and found[-1] < 0.2
    assert "time per 30 batches: " in done.stdout and "\nvalidation cost:" in done.stdout
    assert ("--plot" in options) == (tmp_path / "session.png").exists()


def test_wrong_options_end_with_one_line(run_demo):
    for options, words in (
        (["--rule", "EASGD", "--sync-type", "cdd"], "nothing would be trained"),
        (["--sync-type", "cdd", "--scale-lr"], "which scales the step"),
    ):
        done = run_demo(DEMO, *options, check=False)
        assert words in done.stderr and len(done.stderr.splitlines()) == 1
