"""Tests of the probes of the doctor's checks, and of how results are printed."""

import pytest

from synkhronos.host.doctor import check


def test_a_result_shows_its_remedy_on_a_line_of_its_own():
    assert check.Result("BLAS", check.WARNING, "slow", "fix it").line().splitlines() == [
        "warning  BLAS           slow",
        "                        -> fix it",
    ]
    assert "\n" not in check.Result("BLAS", check.OK, "fast").line()


def test_a_probe_returns_what_it_prints_last():
    assert check.probe("print('noise'); print('{\"a\": 1}')") == {"a": 1}


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


def test_several_lines_are_in_one_column():
    result = check.Result("CUDA", check.WARNING, "one\ntwo", "fix it")
    assert result.line().splitlines() == [
        "warning  CUDA           one",
        "                        two",
        "                        -> fix it",
    ]
