"""Tests of the demos on this run's device, with two ranks."""

import pytest
from processes import ROOT
from test_demo_mnist import DEMO


@pytest.mark.parametrize("number", [1, 2, 3, 4, 5])
def test_demo_runs_on_the_device(run_demo, devices, number):
    script = ROOT / "demos" / f"demo_{number}.py"
    done = run_demo(script, "--devices", *devices[:1] * 2, timeout=300)
    assert done.stdout.splitlines()[-1].startswith("All results match plain Theano")


@pytest.mark.slow
@pytest.mark.parametrize("script", ["train_mnist_cpu_data", "train_mnist_gpu_data"])
def test_mnist_demo_learns_on_the_device(run_demo, devices, script):
    options = ["--no-compare"] if script == "train_mnist_cpu_data" else []
    done = run_demo(
        DEMO / f"{script}.py",
        "--devices",
        *devices[:1] * 2,
        "--data",
        "sklearn",
        "--model",
        "mlp",
        "--epochs",
        1,
        *options,
        timeout=300,
    )
    assert "accuracy" in done.stdout, done.stdout
