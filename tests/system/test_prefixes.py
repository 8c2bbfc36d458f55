"""Tests of the lines that other machines print."""

import os
import subprocess
import sys

import pytest
from processes import ROOT

from synkhronos.machines.job.tasks import prefixed

P = b"[a] "


def test_each_line_gets_the_prefix_and_none_is_held_back():
    given = iter([b"one\ntwo\nth", b"ree\n", b"rest"])
    made = prefixed(given, P)
    assert [next(made), next(made)] == [b"[a] one\n", b"[a] two\n"]
    assert next(given) == b"ree\n"
    assert list(made) == [b"[a] threst\n"]


@pytest.mark.parametrize("end", [b"\n", b""])
def test_a_long_line_is_cut_between_characters(end):
    text = "aäöü" * 30
    made = b"".join(prefixed(iter([text.encode() + end]), P, 20)).decode()
    assert all(len(line.encode()) < 20 for line in made.splitlines())
    assert made.replace("[a] ", "").replace("\n", "") == text


def test_of_a_line_that_was_overwritten_the_last_state_is_left():
    given = iter([b"1%\r", b"2%\r3%", b"\r4%\r\n", b"5%\r6%\n"])
    assert b"".join(prefixed(given, P)) == b"[a] 4%\n[a] 6%\n"


CODE = """
import os, signal, sys
from synkhronos.machines.job.tasks import prefix_output
prefix_output("a")
os.system("echo from a child")
print("from Python", flush=True)
print("an error", file=sys.stderr, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_a_process_has_printed_appears_also_if_it_is_killed():
    done = subprocess.run(
        [sys.executable, "-c", CODE], env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True,
        timeout=30,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (-9, b"")
    assert done.stderr == b"[a] from a child\n[a] from Python\n[a] an error\n"
