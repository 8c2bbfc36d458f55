"""Run scenarios by their seeds.

``python tests/faults/harness.py SEED...`` runs the given seeds and reports on each.
"""

import argparse
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

from scenarios import scenario

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
sys.path.append(str(HERE.parent / "support"))

from processes import PYTHONPATH, restore_signals

LIMIT = 40  # seconds for one scenario; the longest takes about 8


def run(seeds, jobs=2, limit=LIMIT, prelude="", tell=lambda result: None):
    """Run scenarios, each up to `limit` seconds; return their results in the order of the seeds.

    Up to `jobs` processes run at once. `prelude` is code that runs before the script, and `tell` is
    called with each result as soon as it is available.
    """
    seeds, results = list(seeds), {}

    def work(part):
        with subprocess.Popen(
            command(prelude, [limit, *part]),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=restore_signals,
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join([PYTHONPATH, str(HERE)]),
                "SYNKHRONOS_PROGRESS": "0",  # what takes long depends on the machine
                "MPI4PY_RC_INITIALIZE": "0",  # or Theano initializes MPI, which starts a process
            },
        ) as process:
            for line in process.stdout:
                result = json.loads(line)
                results[result["seed"]] = result
                tell(result)
            errors = process.stderr.read()
        for seed in part:
            results.setdefault(seed, missing(seed, errors))

    threads = [threading.Thread(target=work, args=(seeds[job::jobs],)) for job in range(jobs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [results[seed] for seed in seeds]


def command(prelude, arguments):
    # One process runs all seeds of a job, as importing Theano takes longer than most scenarios.
    code = f"{prelude}\nimport runpy\nrunpy.run_path({str(HERE / 'script.py')!r}, run_name='__main__')"
    return [sys.executable, "-c", code, *map(str, arguments)]


def missing(seed, errors):
    fault = scenario(seed)
    problem = f"no result; the process that runs the scripts ended: {errors[-2000:]}"
    return {"seed": seed, "scenario": str(fault), "detection": 0.0, "problem": problem}


def tell(result):
    verdict = result["problem"] or "well"
    print(f"{result['scenario']}: noticed after {result['detection']:.2f} s: {verdict}", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("seeds", type=int, nargs="*", metavar="SEED")
    parser.add_argument("--range", type=int, nargs=2, default=(0, 0), metavar=("START", "STOP"))
    parser.add_argument("--jobs", type=int, default=2)
    asked = parser.parse_args()
    results = run([*asked.seeds, *range(*asked.range)], asked.jobs, tell=tell)
    print(len(results), "scenarios,", sum(bool(one["problem"]) for one in results), "of them failed")
    return int(any(result["problem"] for result in results))


if __name__ == "__main__":
    sys.exit(main())
