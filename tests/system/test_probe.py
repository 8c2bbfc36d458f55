"""Tests of the probes of the doctor's checks, and of how results are printed."""

import pytest

from synkhronos.host.doctor import check


def test_a_probe_that_fails_reports_the_last_line():
    with pytest.raises(check.ProbeError, match="^ValueError: lost$"):
        check.probe("raise ValueError('lost')")


def test_a_probe_that_crashes_is_a_finding():
    with pytest.raises(check.ProbeError, match="exit status -9"):
        check.probe("import os; os.kill(os.getpid(), 9)")


def test_a_probe_that_hangs_is_given_up(monkeypatch):
    monkeypatch.setattr(check, "TIME_LIMIT", 0.5)
    with pytest.raises(check.ProbeError, match="no answer"):
        check.probe("import time; time.sleep(60)")
