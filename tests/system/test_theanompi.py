"""Tests of scripts of Theano-MPI: launch files, rules and a loop of the script's own, run unchanged."""

import re
import shutil

import pytest
from demo_modules import need
from processes import ROOT, restore_signals, run_interpreter

need("sklearn")

from synkhronos.compat.theanompi.rules import BSP, EASGD, GOSGD, INTERRUPTED

PROGRAM = ROOT / "tests" / "programs" / "theanompi"
RUN = ("-m", "synkhronos", "run")
TMLAUNCHER = ("-c", "import synkhronos.compat.theanompi.launcher as one; one.main()")


@pytest.fixture
def script(tmp_path):
    """Function that runs Python in a folder with the scripts and models."""
    shutil.copytree(PROGRAM, tmp_path, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))

    def run(*arguments, code=0, epochs=1):
        environment = {"PYTHONPATH": str(ROOT), "EPOCHS": str(epochs)}
        options = {"cwd": tmp_path, "timeout": 240, "preexec_fn": restore_signals}
        return run_interpreter(*arguments, code=code, environment=environment, **options)

    return run


def write(folder, **changes):
    """Change the config file."""
    path = folder / "launch_session.cfg"
    lines = path.read_text().splitlines()
    kept = [line for line in lines if line.partition("=")[0] not in changes]
    path.write_text("\n".join([*kept, *(f"{key}={value}" for key, value in changes.items()), ""]))


def errors(output):
    return [float(one) for one in re.findall("^validation error:(.*)$", output, re.MULTILINE)]


@pytest.mark.parametrize(
    "rule", ["BSP", *(pytest.param(one, marks=pytest.mark.slow) for one in ("EASGD", "GOSGD"))]
)
def test_a_launch_script_trains_with_each_rule(script, rule):
    answer = script(*RUN, "launch_session.py", rule, epochs=4)
    found = errors(answer.stdout)
    assert len(found) == 4 and found[-1] < 0.5 < found[0] + 0.2
    assert sorted(re.findall("cleanup of rank ., at epoch 3", answer.stdout)) == [
        "cleanup of rank 0, at epoch 3", "cleanup of rank 1, at epoch 3",
    ]  # fmt: skip


@pytest.mark.slow
def test_a_launch_file_trains_by_summed_velocities_as_tmlauncher_does(script):
    answer = script(*TMLAUNCHER, "-cfg=launch_session.cfg", epochs=4)
    assert "for cdd" in answer.stdout
    assert errors(answer.stdout)[-1] < 0.5


@pytest.mark.slow
@pytest.mark.parametrize("model", ["Fixed", "AnyArguments"])
def test_a_model_that_compiles_for_averages_is_trained_with_them(script, tmp_path, model):
    write(tmp_path, MODELCLASS=model, DEVICES="cpu")
    answer = script(*TMLAUNCHER, "--config=launch_session.cfg")
    assert "for avg" in answer.stdout and len(errors(answer.stdout)) == 1
    assert "cleanup of rank 1" not in answer.stdout


@pytest.mark.slow
def test_the_learning_rate_is_scaled_by_the_model_with_averages(script, tmp_path):
    write(tmp_path, MODELCLASS="Scaled", BSP_SYNC_TYPE="avg")
    assert script(*TMLAUNCHER, "-cfg=launch_session.cfg").stdout.count("scaled by 2") == 2
    write(tmp_path, BSP_SYNC_TYPE="cdd")
    assert "scaled" not in script(*TMLAUNCHER, "-cfg=launch_session.cfg").stdout


@pytest.mark.slow
def test_the_exit_status_says_how_the_session_ended(script, tmp_path):
    write(tmp_path, MODELCLASS="Failing")
    answer = script(*TMLAUNCHER, "-cfg=launch_session.cfg", code=1)
    assert "OSError: the disk is full" in answer.stderr
    write(tmp_path, MODELCLASS="Interrupted")
    script(*TMLAUNCHER, "-cfg=launch_session.cfg", code=INTERRUPTED)
    write(tmp_path, MODELCLASS="Missing")
    answer = script(*TMLAUNCHER, "-cfg=launch_session.cfg", code=1)
    assert "expected a class 'Missing' in the module 'models.modelfile'" in answer.stderr


def test_the_launcher_reports_options_without_importing_theano(script, tmp_path):
    # As pip writes the command.
    (tmp_path / "tmlauncher").write_text(f"{TMLAUNCHER[1]}\n")
    answer = script("-X", "importtime", "tmlauncher", "-cfg=missing.cfg", code=1)
    assert "tmlauncher: the file missing.cfg cannot be read" in answer.stderr
    imported = {line.rpartition("|")[2].strip() for line in answer.stderr.splitlines()}
    assert "synkhronos.compat.theanompi.launcher" in imported and "theano" not in imported
    assert script(*TMLAUNCHER, "--help").stdout.startswith("usage: tmlauncher -cfg=FILE")


@pytest.mark.slow
def test_a_loop_of_the_scripts_own(script, tmp_path):
    answer = script(*RUN, "model_alone.py", "models.modelfile", "ModelClass", epochs=3)
    found = errors(answer.stdout)
    assert len(found) == 3 and found[-1] < found[0]
    assert re.search(r"^16 \d\.\d+ 0\.\d+\ntime per 16 batches", answer.stdout, re.MULTILINE)
    assert "inference (2, 10)\nchanged since True\n" in answer.stdout
    assert (tmp_path / "inforec" / "inforec.pkl").exists()
    assert {one.name for one in (tmp_path / "snapshots").glob("lr_*")} == {"lr_0.npy", "lr_2.npy"}


@pytest.mark.parametrize("rule", [BSP, EASGD, GOSGD])
def test_wrong_arguments_of_init(rule):
    for wrong in ("cuda0", [], [0]):
        with pytest.raises(TypeError, match=f"{rule.__name__}.init: devices: expected"):
            rule().init(wrong, "models.modelfile", "ModelClass")
    with pytest.raises(ValueError, match="expected devices of this machine, got 'node0:cuda0'"):
        rule().init(["node0:cuda0"], "models.modelfile", "ModelClass")
    with pytest.raises(TypeError, match="modelclass: expected a name"):
        rule().init(["cpu"], "models.modelfile", None)
    with pytest.raises(RuntimeError, match="expected a call of init"):
        rule().wait()


def test_the_strategy_of_bsp_is_one_of_theano_mpis(monkeypatch, tmp_path):
    (tmp_path / "model_of_a_test.py").write_text("class Model:\n    pass\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    rule = BSP()
    rule.exch_strategy = "fast"
    rule.init(["cpu"], "model_of_a_test", "Model")
    with pytest.raises(ValueError, match="BSP.exch_strategy: expected one of ar, asa16"):
        rule.wait()
    assert (BSP().rulename, EASGD().rulename, GOSGD().rulename) == ("BSP(avg)", "EASGD", "GOSGD")
