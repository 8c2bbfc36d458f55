"""Tests of the processes in which tests run programs."""

import os
import signal

import pytest
from prelude import run_file
from processes import Programs

IGNORED = (signal.SIGINT, signal.SIGHUP)  # in what a shell starts in the background, or by nohup


@pytest.fixture
def ignored():
    before = {number: signal.signal(number, signal.SIG_IGN) for number in IGNORED}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def be_interrupted():
    os.kill(os.getpid(), signal.SIGINT)


def be_hung_up():
    os.kill(os.getpid(), signal.SIGHUP)


def test_signals_end_a_program_also_if_the_tests_ignore_them(ignored):
    programs = Programs(modules=())
    try:
        interrupted, hung_up = programs.run(be_interrupted), programs.run(be_hung_up)
    finally:
        programs.close()
    assert interrupted.stderr.rstrip().endswith("KeyboardInterrupt")
    assert interrupted.returncode == -signal.SIGINT and hung_up.returncode == -signal.SIGHUP


def test_signals_end_a_script_also_if_the_tests_ignore_them(ignored, tmp_path):
    (tmp_path / "script.py").write_text("import os\nos.kill(os.getpid(), 2)\n")
    done = run_file(tmp_path / "script.py", cwd=tmp_path, check=False)
    assert done.returncode == -signal.SIGINT and done.stderr.rstrip().endswith("KeyboardInterrupt")
