"""Tests of the choice of the tests that a change can break."""

import shutil
import subprocess
from pathlib import Path

import changed
import pytest

FILES = changed.Files()


def files_of(path):
    return {found.name for found in FILES.of(path)}


@pytest.mark.parametrize(
    "path, some",
    [
        ("synkhronos/arithmetic/partition.py", {"test_partition.py", "test_call.py"}),  # by its name
        ("synkhronos/host/descriptors.py", {"test_descriptors.py", "test_architecture.py"}),
        ("synkhronos/comms/shm.py", {"test_communicators.py"}),  # listed for mutants
        ("synkhronos/_text.py", {"test_text.py"}),
        ("synkhronos/stores/free_list.py", {"test_stores.py"}),  # which imports it
        ("synkhronos/engines/theano/kernels/pooling.h", {"test_kernels_pooling.py"}),
        ("tests/unit/test_text.py", {"test_text.py"}),
        ("tests/contract/test_engines.py", {"test_engines.py", "test_feedback.py"}),
        ("tests/support/scheduling.py", {"test_stores.py", "test_turn.py"}),
        ("tests/support/model.py", {"test_stateful.py"}),
        ("tests/checks/commons.py", {"test_commons.py"}),
        ("tests/programs/world_at_exit.py", {"test_lifecycle.py"}),
        ("demos/resnet/run.py", {"test_demo_resnet.py"}),
        ("docs/tutorial/new.rst", {"test_docs.py"}),
        ("README.rst", {"test_readme.py"}),
    ],
)
def test_a_change_is_tried_with_what_it_can_break(path, some):
    assert some <= files_of(path)


def test_a_change_of_one_module_is_not_tried_with_all_tests():
    assert len(files_of("synkhronos/host/heap.py")) < 10
    assert files_of("demos/ports/new.py") == {"test_ports.py"}
    assert files_of("tests/unit/test_text.py") == {"test_text.py"}


def test_the_change_is_all_that_differs_or_else_the_last_commit(tmp_path, monkeypatch):
    def git(*words):
        user = ["-c", "user.name=a", "-c", "user.email=a@b"]
        subprocess.run(["git", *user, *words], cwd=tmp_path, check=True, capture_output=True)

    if shutil.which("git") is None:
        pytest.skip("the test needs git")
    monkeypatch.setattr(changed, "ROOT", tmp_path)
    git("init")
    for number in range(3):
        Path(tmp_path, f"file_{number}").write_text("")
        git("add", ".")
        git("commit", "-m", f"{number}")
    assert changed.changed_files(None) == ["file_2"]
    assert changed.changed_files("HEAD~2") == ["file_1", "file_2"]
    Path(tmp_path, "file_0").write_text("changed")
    Path(tmp_path, "new").write_text("")
    assert changed.changed_files(None) == ["file_0", "new"]
    assert changed.changed_files("HEAD~1") == ["file_0", "file_2", "new"]
    with pytest.raises(SystemExit, match="no-such-revision"):
        changed.changed_files("no-such-revision")
