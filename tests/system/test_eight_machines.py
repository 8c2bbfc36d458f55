"""Tests of jobs on eight machines and on four, among whose leaders commands take several steps."""

import pytest
from mortal_jobs import PROGRESS_PROCESSES, begin, needs_machines
from namespaces import Machines
from processes import FOLDER

pytestmark = [needs_machines, pytest.mark.slow]


def test_ranks_of_eight_machines_train_and_fail_until_a_machine_is_lost(tmp_path):
    with Machines(8) as machines:
        script, file = FOLDER / "programs" / "eight_machines.py", tmp_path / "now"
        job = begin(machines, script, file, file=file, cwd=tmp_path, limit=400, **PROGRESS_PROCESSES)
        machines.kill(6)  # by way of which commands and replies of the eighth machine travel
        done = job.wait(60)
        left = machines.left(5)
    assert done.returncode != 0 and "trained, failed and worked" in done.output, done.output
    lost = f"machine {machines.hosts[6]} (rank 6) was lost"
    assert done.output.count("was lost") == done.output.count(lost) >= 1, done.output
    assert not left, (left, done.output)


@pytest.mark.parametrize("rank, moment", [(5, "use"), (7, "meet")])
def test_a_script_goes_on_with_four_machines_after_the_death_of_a_rank_of_one(tmp_path, rank, moment):
    """Of the machine by way of which those of the fourth are reached, and of the fourth itself."""
    environment = {**PROGRESS_PROCESSES["environment"], "SYNKHRONOS_RANKS": "2"}
    with Machines(4) as machines:
        script = FOLDER / "programs" / "restarted_on_machines.py"
        done = machines.run(
            script, "rank", rank, moment, 8, cwd=tmp_path, tasks=2, environment=environment, timeout=400
        )
        assert done.check().output.splitlines()[-1] == "restarted with 8 of 8", done.output
        assert not machines.left()
