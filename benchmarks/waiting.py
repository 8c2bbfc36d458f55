"""How much of a core the processes of a job on two machines use while they wait."""

if __name__ == "__main__":
    raise SystemExit(f"{__doc__}\nScripts use this file; run run.py.")

import time
from pathlib import Path

SECONDS = 3.0
BEGINNING = 1.0  # seconds until all of them wait
ROLES = "the master", "a leader", "another rank", "a progress process"
STATES = {"idle": "idle", "program": "waiting in a program"}


def shares(machines, job, state):
    """Return the largest share of a core that a process of each role uses, by role.

    Parameters
    ----------
    machines : Machines
    job : MpiJob
        With two tasks on each machine.
    state : str
        ``"idle"``: all wait for a call. ``"program"``: the ranks sleep in a program.
    """
    job.ask(state, SECONDS + 2 * BEGINNING)
    time.sleep(BEGINNING)
    began, before = time.perf_counter(), _used(machines)
    time.sleep(SECONDS)
    seconds, after = time.perf_counter() - began, _used(machines)
    job.answer()
    found = dict.fromkeys(ROLES, 0.0)
    for process, (role, used) in after.items():
        found[role] = max(found[role], (used - before[process][1]) / seconds)
    return found


def _used(machines):
    """Return the role of each process, and its processor time in seconds, by its number."""
    found = {}
    for number in range(machines.count):
        tasks = machines.tasks(number)
        for process, task in tasks.items():
            parent = int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])
            if task != min(tasks.values()):  # the second task of this machine
                role = "a progress process"
            elif parent in tasks:
                role = "another rank"
            else:
                role = "a leader" if number else "the master"
            files = Path(f"/proc/{process}/task").glob("*/schedstat")
            found[process] = role, 1e-9 * sum(int(one.read_text().split()[0]) for one in files)
    return found
