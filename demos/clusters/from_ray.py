"""Start a job of Synkhronos on all nodes of a Ray cluster.

    python from_ray.py auto --ranks 4 train.py --epochs 10

The first argument is the address of the cluster, ``auto`` on its nodes. The others are those of ``python
-m synkhronos launch``. The output appears here, and the exit status is that of the script. Ctrl-C ends
the job.
"""

import os
import subprocess
import sys

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

#: Ray may set this for its workers; the ranks of a job share out the cores by themselves.
THREADS = "OMP_NUM_THREADS"


@ray.remote(num_cpus=0, num_returns="streaming", max_retries=0)
def launch(hosts, arguments, folder):
    """Run ``launch`` on this node; yield the lines of its output, and then its exit status."""
    python = [sys.executable, "-u", "-m", "synkhronos", "launch", "--hosts", ",".join(hosts)]
    process = subprocess.Popen(
        ["setpriv", "--pdeathsig", "TERM", *python, *arguments],  # the job ends with the worker
        cwd=folder,
        env={name: value for name, value in os.environ.items() if name != THREADS},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    for line in process.stdout:
        yield line.rstrip("\n")
    yield process.wait()


def run(arguments):
    """Run a job on the cluster to which `ray.init` has connected; return the exit status.

    Parameters
    ----------
    arguments : list of str
        Of ``python -m synkhronos launch``, without ``--hosts``.
    """
    nodes = {node["NodeManagerAddress"]: node["NodeID"] for node in ray.nodes() if node["Alive"]}
    hosts = sorted(nodes)
    first = NodeAffinitySchedulingStrategy(nodes[hosts[0]], soft=False)
    for one in launch.options(scheduling_strategy=first).remote(hosts, arguments, os.getcwd()):
        result = ray.get(one)
        if isinstance(result, int):
            return result
        print(result, flush=True)


if __name__ == "__main__":
    if len(sys.argv) < 3:
        raise SystemExit(__doc__)
    ray.init(sys.argv[1])
    sys.exit(run(sys.argv[2:]))
