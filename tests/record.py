"""Measures the tests, and chooses the first tier: writes the files in ``tests/recorded``.

    python tests/record.py run FOLDER ENVIRONMENT [ARGUMENTS]    run tests, and record them in a folder
    python tests/record.py choose FOLDER [--seconds 600]         choose from all records in the folder

``run`` passes arguments to pytest, and records the processor time of each test and the lines of the
library that it runs. The first tier has the tests that cover the most lines per second, until all are
covered three times; the first test that covers a line counts most. The shortest of the other tests have
the rest of the time.
"""

import argparse
import collections
import heapq
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import tiers

WORTH = (1.0, 0.3, 0.1)  # of a line that no, one, or two of the chosen tests cover
OVERHEAD = 0.05  # seconds of a test beside what is measured
SHARE = 0.6  # of the time, for the tests that cover the most lines
AT_MOST = 6  # tests that cover a function, in the record


def run(folder, environment, arguments):
    """Run tests of an environment with the plugin in all their processes."""
    records = Path(folder).resolve() / environment
    records.mkdir(parents=True, exist_ok=True)
    place = tiers.ENVIRONMENTS[environment]
    with tempfile.TemporaryDirectory() as hooks:
        Path(hooks, "sitecustomize.py").write_text(
            f"import sys\nsys.path.append({str(tiers.TESTS / 'support')!r})\nimport recording\n"
        )
        variables = {
            **os.environ,
            "TESTS_RECORD": str(records),
            "PYTHONPATH": hooks,
            "PYTHONHASHSEED": "0",
        }
        command = [place.python, "-m", "pytest", "-p", "recording", "-p", "no:unraisableexception"]
        command += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]  # it has been imported before
        return subprocess.call(
            [*command, *tiers.IN_TWO, *place.options, *arguments], cwd=tiers.ROOT, env=variables
        )


def read(folder):
    """Return the seconds and the lines of each test that exists, in the order in which they ran."""
    seconds, lines = {}, collections.defaultdict(set)
    for path in sorted(Path(folder).glob("*/*.jsonl")):
        environment = path.parent.name
        for text in path.read_text().splitlines():
            test, taken, found = json.loads(text)
            if test:
                key = f"{environment} {test}"
                if taken is not None:
                    seconds[key] = max(taken, 0.0)  # negative if a process left the tree of processes
                for module, numbers in found.items():
                    lines[key].update((module, number) for number in numbers)
    names = {}
    for path in tiers.TESTS.rglob("test_*.py"):
        names[path.relative_to(tiers.ROOT).as_posix()] = set(
            re.findall(r"def (test\w*)", path.read_text())
        )
    kept = [key for key in seconds if _name_of(key) in names.get(_file_of(key), ())]
    return {key: seconds[key] for key in kept}, {key: lines[key] for key in kept}


def _file_of(key):
    return key.partition(" ")[2].partition("::")[0]


def _name_of(key):
    return key.partition("[")[0].rpartition("::")[2]


class Selection:
    """The choice of the first tier.

    The first test of a file that runs has the fixtures of the file in its seconds. So these are the
    costs of the file's first test that is chosen, whichever it is.
    """

    def __init__(self, seconds, lines, limit):
        self._seconds, self._lines, self._limit = seconds, lines, limit
        self._files = collections.defaultdict(list)
        for key in seconds:
            self._files[key.partition("::")[0]].append(key)
        self._opened = set()
        self.covered, self.chosen, self.total = collections.Counter(), [], 0.0

    def _cost(self, key):
        file = key.partition("::")[0]
        first, own = self._seconds[self._files[file][0]], self._seconds[key]
        if file in self._opened:
            return OVERHEAD + (own if key != self._files[file][0] else 0.0)
        return OVERHEAD + max(first, own)

    def _worth(self, key):
        values = (WORTH[self.covered[one]] for one in self._lines[key] if self.covered[one] < len(WORTH))
        return sum(values) / self._cost(key)

    def _take(self, key):
        self.total += self._cost(key)
        self.chosen.append(key)
        self.covered.update(self._lines[key])
        self._opened.add(key.partition("::")[0])

    def run(self):
        """Choose the tests."""
        waiting = [(-self._worth(key), key) for key in self._seconds]
        heapq.heapify(waiting)
        taken = set()
        while waiting:
            before, key = heapq.heappop(waiting)
            now = self._worth(key)
            if key in taken or now == 0 or self.total + self._cost(key) > SHARE * self._limit:
                continue
            if -before > now and waiting and -waiting[0][0] > now:  # others may be worth more by now
                heapq.heappush(waiting, (-now, key))
                continue
            file = key.partition("::")[0]
            is_new = file not in self._opened
            taken.add(key)
            self._take(key)
            for other in self._files[file] if is_new else ():  # they cost less by now
                heapq.heappush(waiting, (-self._worth(other), other))
        for key in sorted(self._seconds.keys() - taken, key=lambda key: (self._cost(key), key)):
            if self.total + self._cost(key) <= self._limit:
                self._take(key)


def covering(seconds, lines):
    """Return the tests that cover each function, as the file of them has it: some, the cheapest."""
    functions = collections.defaultdict(lambda: collections.defaultdict(list))
    names = {}
    for key in sorted(lines, key=seconds.get):
        found = set()
        for module, number in lines[key]:
            if module not in names and (tiers.ROOT / module).exists():
                names[module] = tiers.functions_of((tiers.ROOT / module).read_text())
            found.add((module, names.get(module, {}).get(number, "")))
        for module, function in found:
            if function and len(functions[module][function]) < AT_MOST:
                functions[module][function].append(key)
    used = sorted({key for each in functions.values() for keys in each.values() for key in keys})
    place = {key: number for number, key in enumerate(used)}
    return {
        "tests": [[key, seconds[key]] for key in used],
        "functions": {
            module: {name: [place[key] for key in keys] for name, keys in sorted(each.items())}
            for module, each in sorted(functions.items())
        },
    }


def choose(folder, limit):
    seconds, lines = read(folder)
    selection = Selection(seconds, lines, limit)
    selection.run()
    every = set().union(*lines.values())
    print(f"{len(selection.chosen)} of {len(seconds)} tests, {selection.total:.0f} of "
          f"{sum(seconds.values()):.0f} s, {len(selection.covered)} of {len(every)} lines")  # fmt: skip
    tiers.RECORDED.mkdir(exist_ok=True)
    write("first_tier.txt", "".join(
        "{} {:.2f} {}\n".format(key.split(" ", 1)[0], seconds[key], key.split(" ", 1)[1])
        for key in sorted(selection.chosen)
    ))  # fmt: skip
    files = collections.Counter()
    for key, taken in seconds.items():
        files[key.partition("::")[0]] += taken / 2  # in two processes
    before = tiers.RECORDED / "seconds.json"
    known = json.loads(before.read_text()) if before.exists() else {}
    known.update({key: round(taken, 1) for key, taken in files.items()})
    write("seconds.json", json.dumps(dict(sorted(known.items())), indent=0) + "\n")
    write("covering.json", json.dumps(covering(seconds, lines), separators=(",", ":")) + "\n")


def write(name, text):
    (tiers.RECORDED / name).write_text(text)


if __name__ == "__main__":
    if sys.argv[1:2] == ["run"]:
        sys.exit(run(*sys.argv[2:4], sys.argv[4:]))
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("command", choices=["run", "choose"])
    parser.add_argument("folder")
    parser.add_argument("--seconds", type=float, default=600.0)
    options = parser.parse_args()
    choose(options.folder, options.seconds)
