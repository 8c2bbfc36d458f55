"""Start a job of Synkhronos on the machines of a Dask cluster, with all hosts that have workers.

    python from_dask.py tcp://scheduler:8786 --ranks 4 train.py --epochs 10

The arguments after the address are those of ``python -m synkhronos launch``. The output appears here,
and the exit status is that of the script. Ctrl-C ends the job.
"""

import os
import subprocess
import sys
import threading

import distributed

#: Dask sets these to 1 for its workers; the ranks of a job share out the cores by themselves.
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


def launch(hosts, arguments, folder, ended):
    """Run ``launch`` on this worker, print its output at the client, and return its exit status."""
    python = [sys.executable, "-u", "-m", "synkhronos", "launch", "--hosts", ",".join(hosts)]
    process = subprocess.Popen(
        ["setpriv", "--pdeathsig", "TERM", *python, *arguments],  # the job ends with the worker
        cwd=folder,
        env={name: value for name, value in os.environ.items() if name not in THREADS},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    event = distributed.Event(ended, distributed.get_client())  # the thread has no client of its own
    threading.Thread(target=lambda: event.wait() and process.terminate(), daemon=True).start()
    for line in process.stdout:
        distributed.print(line, end="", flush=True)
    return process.wait()


def run(client, arguments):
    """Run a job on the cluster of a client; return the exit status.

    Parameters
    ----------
    client : distributed.Client
    arguments : list of str
        Of ``python -m synkhronos launch``, without ``--hosts``.
    """
    workers = client.scheduler_info(n_workers=-1)["workers"]
    hosts = sorted({worker["host"] for worker in workers.values()})
    if not hosts:
        raise SystemExit("the cluster has no workers")
    ended = distributed.Event()
    future = client.submit(
        launch, hosts, arguments, os.getcwd(), ended.name, workers=[hosts[0]], pure=False
    )
    try:
        return future.result()
    finally:
        ended.set()


if __name__ == "__main__":
    if len(sys.argv) < 3:
        raise SystemExit(__doc__)
    with distributed.Client(sys.argv[1]) as connected:
        status = run(connected, sys.argv[2:])
    sys.exit(status)
