"""Tests of the ports in ``demos/ports``: each parallel script against its serial original."""

import difflib
import functools
import json
import sys
from pathlib import Path

import numpy as np
import pytest
import theano
from processes import ROOT

import synkhronos as synk

pytest.importorskip("sklearn", reason="the demos need sklearn")

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
