"""A plugin of pytest for tests that run in the first task of an MPI job, in worlds over its machines.

It leaves out the tests that run programs in separate processes, because these are not tasks of the job,
and slow tests unless ``-m`` selects them. It skips the tests of a world of one rank. The option
``--results`` names a file for the outcome of each test.
"""

import functools
import json
from pathlib import Path

import pytest

_ELSEWHERE = {"programs", "run_python", "run_demo", "demo_programs"}


def pytest_addoption(parser):
    parser.addoption("--results", type=Path)


def pytest_collection_modifyitems(config, items):
    """Leave out what says nothing about several machines."""
    slow_too = bool(config.option.markexpr)
    items[:] = [
        item
        for item in items
        if not _ELSEWHERE & {*item.fixturenames} and (slow_too or not item.get_closest_marker("slow"))
    ]


@pytest.fixture(autouse=True, scope="session")
def _several_ranks():
    """Skip a test that wants a world of one rank: it cannot be on two machines."""
    import synkhronos as synk

    fork = synk.fork

    @functools.wraps(fork)
    def fork_several(n_parallel=None, *args, **kwargs):
        if n_parallel == 1:
            pytest.skip("a world of one rank is on one machine")
        return fork(n_parallel, *args, **kwargs)

    synk.fork = fork_several
    yield
    synk.fork = fork


_outcomes = {}


def pytest_runtest_logreport(report):
    """Note the first text of a test that fails, or an empty text."""
    text = report.longreprtext if report.failed else ""
    _outcomes[report.nodeid] = _outcomes.get(report.nodeid) or text


def pytest_sessionfinish(session):
    """Write the outcomes."""
    if session.config.option.results is not None:
        session.config.option.results.write_text(json.dumps(_outcomes))
