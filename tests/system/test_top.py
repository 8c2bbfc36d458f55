"""Tests of ``python -m synkhronos top``: what it says of ranks that run."""

import os
import subprocess
import sys

import numpy as np
import pytest
from processes import own_process

import synkhronos as synk
import theano.tensor as T
from synkhronos.__main__ import main
from synkhronos.host import status
from synkhronos.host.top import Watch


def start():
    synk.fork(2, use_gpu=False)
    x = T.dvector("x")
    f = synk.function([x], (x.sum(), "sum"), name="f")
    f(np.ones(10))
    return f


@own_process
def test_the_ranks_of_this_script_are_found_and_described():
    f = start()
    [path] = status.find(os.getpid()).values()
    reader = status.StatusReader(path)
    before = reader.read()
    for _ in range(3):
        f(np.ones(11))
    after = reader.read()
    assert [new.rows - old.rows for new, old in zip(after.lines, before.lines)] == [18, 15]
    assert after.command - before.command == 3 and reader.last_command() == "function f"
    assert after.lines[0].process == os.getpid() and after.waiting() is None
    rowless = synk.function([], T.constant(1.0) * 2)
    rowless()
    assert [line.rows for line in reader.read().lines] == [line.rows for line in after.lines]
    data = synk.data(np.ones(8))
    for rows in (4, 6):
        f(data, batch=rows)
    assert reader.last_command() == "function f"
    f(data)
    assert reader.last_command() == "function f"
    synk.restart()
    [report] = Watch(os.getpid()).reports(0.02)
    assert len(report.ranks) == 2 and report.between == 1.0
    synk.close()
    assert not status.find(os.getpid())


@own_process
def test_another_process_prints_the_ranks_and_a_worker_is_as_good_as_the_master():
    f = start()
    line = [sys.executable, "-m", "synkhronos", "top", "--once", "--interval", "0.05"]
    worker = status.StatusReader(*status.find(os.getpid()).values()).read().lines[1].process
    for process in (os.getpid(), worker):
        done = subprocess.run([*line, str(process)], stdout=subprocess.PIPE, text=True, timeout=60)
        head, columns, first, second = done.stdout.splitlines()[:4]
        assert done.returncode == 0 and "last: function f" in head
        assert columns.split()[:3] == ["rank", "process", "rows/s"]
        assert first.split()[:2] == ["0", str(os.getpid())] and second.split()[1] == str(worker)
    assert f(np.ones(3)) == 3.0
    synk.close()


def test_a_process_without_ranks_and_one_that_does_not_exist(capsys):
    assert main(["top", str(2**22 + 1), "--once"]) == 1
    assert "does not exist; expected the process of a rank" in capsys.readouterr().err
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as other:
        assert main(["top", str(other.pid), "--once", "--interval", "0.01"]) == 1
        other.stdin.close()
    assert "no ranks" in capsys.readouterr().err


@pytest.mark.parametrize("wrong", [["--interval", "0"], ["--interval", "nan"], ["x"]])
def test_wrong_options_are_refused(wrong, capsys):
    with pytest.raises(SystemExit) as raised:
        main(["top", *wrong])
    assert raised.value.code == 2 and "invalid" in capsys.readouterr().err
