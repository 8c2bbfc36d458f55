"""Tests of the checks for a machine that is lent, on emulated GPUs, and where nothing is installed."""

import json
import os
import shlex
import subprocess
import sys

import pytest
from processes import ROOT

from .emulator import fixture_emulator  # noqa: F401
from .on_device import LIMITS, main
from .test_emulated_cuda import flags

pytest.importorskip("pygpu")
PYTENSOR = ROOT / ".venv-pytensor" / "bin" / "python"


def run(folder, *options, **environment):
    done = subprocess.run(
        [sys.executable, ROOT / "tests" / "gpu" / "on_device.py", folder, *map(str, options)],
        env={**os.environ, **environment}, capture_output=True, text=True, timeout=1800,
    )  # fmt: skip
    assert (folder / "report.txt").read_text() == done.stdout, done.stderr
    report = json.loads((folder / "report.json").read_text())
    return done.returncode, report


@pytest.mark.slow
def test_every_part_runs_on_an_emulated_gpu(emulator, tmp_path):
    python = ["--python", PYTENSOR] if PYTENSOR.exists() else []
    tests = "tests/gpu/test_gpu_functions.py --maxfail 3"
    code, report = run(
        tmp_path, "--emulated", "--small", "--patience", 20, "--budget", 1800, "--tests", tests, *python,
        "--probe", f"{shlex.quote(sys.executable)} -c 'print(6 * 7)'", PYTHONHASHSEED="0",
        **emulator.environment(1), **flags(emulator),
    )  # fmt: skip
    parts = report["parts"]
    outcomes = {name: (one["outcome"], one["why"]) for name, one in parts.items()}
    expected = dict.fromkeys(LIMITS, ("passed", ""))
    if not PYTENSOR.exists():
        expected["jax"] = ("not run", outcomes["jax"][1])
    assert outcomes == expected and list(parts) == list(LIMITS) and code == 0, outcomes
    assert parts["probe"]["last lines"] == ["42"] and " passed" in parts["tests"]["pytest"]
    assert parts["nccl"]["checks passed"] > 3
    for name in ("mnist", "resnet"):
        assert len(parts[name]["losses"]) == 2 and parts[name]["seconds per step, 2 rank(s)"] > 0
    assert report["installed"]["python"]["pygpu"]


def test_a_part_that_fails_hangs_or_cannot_run_says_so_and_the_others_go_on(
    tmp_path, capsys, monkeypatch
):
    monkeypatch.setitem(LIMITS, "probe", 1)
    hang = (
        f"{shlex.quote(sys.executable)} -c 'import time; print(\"begun\", flush=True); time.sleep(60)'"
    )
    parts = ["--parts", "probe,tests,shared,nccl,mnist,resnet,jax"]
    none = tmp_path / "python"
    none.write_text('#!/bin/sh\necho "{}"\n')
    none.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(none))
    assert main([str(tmp_path / "out"), *parts, "--probe", hang]) == 1
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    found = {name: (one["outcome"], one["why"]) for name, one in report["parts"].items()}
    assert found.pop("probe") == ("timed out", "probe did not end within 1 s; begun")
    assert found.pop("jax")[1].startswith("no Python has both JAX and PyTensor")
    assert {*found.values()} == {("not run", f"{none} has no theano, pygpu")}
    assert main([str(tmp_path / "out"), "--parts", "probe", "--probe", "false"]) == 1
    assert "ended with 1: it has written nothing" in capsys.readouterr().out
    assert main([str(tmp_path / "out"), "--parts", "probe,jax", "--budget", "0"]) == 0
    assert capsys.readouterr().out.count("no time is left") == 2
