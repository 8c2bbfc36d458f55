"""The two tiers of the tests, and how they are run.

    python tests/tiers.py                   the first tier, as ``sh tests/run``
    python tests/tiers.py --all [K/N]       all tests, or the K-th of N parts of them
    python tests/tiers.py --changed [REV]   the tests that cover what has changed since a revision
    python tests/tiers.py ARGUMENTS         pytest with these arguments, where the first file belongs

``tests/record.py`` measures the tests, and writes the files in ``tests/recorded`` that are read here:
the tests of the first tier, the seconds that each file takes, and which tests cover each function. A
test without a record is part of ``--all`` and, when its file is changed, of ``--changed``.
"""

import ast
import heapq
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path

TESTS = Path(__file__).resolve().parent
ROOT = TESTS.parent
RECORDED = TESTS / "recorded"
DEVICE = ["--device", "opencl0:0"]
IN_TWO = ["--numprocesses=2", "--dist=loadfile", "--no-loadscope-reorder", "--max-worker-restart=0"]
#: A test that hangs ends its process with the stacks of all threads; slow tests may take longer.
ENDING = {
    slow: ["-o", f"faulthandler_timeout={seconds}", "-o", "faulthandler_exit_on_timeout=true"]
    for slow, seconds in ((False, 300), (True, 1800))
}
UNKNOWN = {False: 20.0, True: 120.0}  # seconds of a file without a record, by whether of its slow tests
LIMIT = 150.0  # seconds of the tests of a change, by the record
OF_PYMC = ("pymc", "nutpie", "chains", "rows_potential", "resident")  # in names of files


class Environment:
    """Where tests run: a virtual environment and a device."""

    def __init__(self, name, folder, options=(), needs="import numpy"):
        self.name, self.options = name, list(options)
        self.python = ROOT / folder / "bin" / "python"
        self._needs = needs

    def why_not(self):
        """Return why the tests cannot run in this environment, or None."""
        if not self.python.exists():
            return f"there is no {self.python.parent.parent.name}"
        done = subprocess.run(
            [self.python, "-W", "ignore", "-c", self._needs], capture_output=True, text=True
        )
        return (done.stderr.strip().splitlines() or ["it fails"])[-1] if done.returncode else None


#: ArviZ writes a file when it is first imported on a day, which two processes must not do at once.
ENVIRONMENTS = {
    one.name: one
    for one in (
        Environment("theano", ".venv"),
        Environment(
            "opencl", ".venv", DEVICE,
            "from pygpu import gpuarray; gpuarray.count_platforms('opencl')",
        ),
        Environment("pytensor", ".venv-pytensor"),
        Environment("pymc", ".venv-pymc", needs="import arviz"),
    )
}  # fmt: skip


def main(arguments):
    if arguments[:1] == ["--all"]:
        part = arguments[1] if len(arguments) > 1 else None
        return run_parts(all_parts(part), arguments[2:])
    if arguments[:1] == ["--changed"]:
        revision = arguments[1] if len(arguments) > 1 and arguments[1][0] != "-" else None
        return run_parts(changed_parts(revision), arguments[1 + (revision is not None) :])
    if any(not one.startswith("--durations") for one in arguments):
        return run_pytest(arguments)
    return run_parts(first_tier(), arguments)


class Part:
    """Tests of one environment that run together: files, of which only some tests may be meant."""

    def __init__(self, environment, files, options, seconds, title, only=()):
        self.environment, self.options = ENVIRONMENTS[environment], options
        self.files = [file for file in files if (ROOT / file).exists()]
        self.seconds, self.title, self.only = seconds, title, only

    def command(self, folder, *others):
        environment, ending = self.environment, ENDING["slow" in self.options]
        words = [environment.python, "-m", "pytest", *environment.options, *self.options, *ending]
        if self.only:
            only = Path(folder, "only")
            only.write_text("".join(f"{test}\n" for test in self.only))
            others = "--only", only, *others
        return [*map(str, [*words, *others]), *self.files]


def run_pytest(arguments):
    """Run pytest with these arguments, where the first file that they name belongs."""
    names = [one for one in arguments if (ROOT / one.partition("::")[0]).exists()]
    environment = ENVIRONMENTS[environment_of(names[0]) if names else "theano"]
    options = [] if any(one.startswith("--device") for one in arguments) else environment.options
    marks = [] if "-m" in arguments else ["-m", "not slow"]
    return subprocess.call([environment.python, "-m", "pytest", *marks, *options, *arguments], cwd=ROOT)


def environment_of(name):
    """Return the environment in which a file of tests runs, if it runs in only one."""
    file = name.partition("::")[0]
    if "tests/gpu" in file:
        return "opencl"
    if any(one in file for one in OF_PYMC):
        return "pymc"
    return "pytensor" if any(one in file for one in ("pytensor", "jax", "modes")) else "theano"


def first_tier():
    """Return the parts of the first tier: the tests of the record, by environment."""
    tests = {}
    for line in (RECORDED / "first_tier.txt").read_text().splitlines():
        environment, taken, test = line.split(" ", 2)
        tests.setdefault(environment, {})[test] = float(taken)
    return [parts_of(environment, tests[environment], "first tier") for environment in tests]


def parts_of(environment, tests, title):
    """Return the part of some tests, with their seconds, of which the longest files are the first."""
    files = {}
    for test, taken in tests.items():
        file = test.partition("::")[0]
        files[file] = files.get(file, 0.0) + taken
    in_order = sorted(files, key=files.get, reverse=True)
    seconds = sum(tests.values()) / 2
    return Part(environment, in_order, IN_TWO, seconds, f"{title}, {environment}", tests)


def all_parts(part):
    """Return all tests, or those of one of N parts of about the same duration, by environment."""
    number, count = map(int, part.split("/")) if part else (1, 1)
    if not 1 <= number <= count:
        raise SystemExit(f"--all: expected K/N with 1 <= K <= N, got {part}")
    every = every_file()
    loads, place = [(0.0, k) for k in range(count)], {}
    for key in sorted(every, key=lambda key: (-every[key], key)):  # the longest first
        load, bin = heapq.heappop(loads)
        place[key] = bin + 1
        heapq.heappush(loads, (load + every[key], bin))
    parts = []
    for environment in ENVIRONMENTS:
        for slow, options in ((False, [*IN_TWO, "-m", "not slow"]), (True, ["-m", "slow"])):
            keys = [key for key in every if key[:2] == (environment, slow) and place[key] == number]
            keys.sort(key=lambda key: -every[key])
            if keys:
                title = f"{environment}, {'slow' if slow else 'other'} tests"
                seconds = sum(every[key] for key in keys)
                parts.append(Part(environment, [key[2] for key in keys], options, seconds, title))
    return parts


def every_file():
    """Return the elapsed seconds of files: by environment, whether of the slow tests, and name."""
    recorded = json.loads((RECORDED / "seconds.json").read_text())
    sys.path[:0] = [str(TESTS / "support")]
    from environments import OF_BOTH, OF_PYTENSOR

    found = {}
    for path in sorted(TESTS.rglob("test_*.py")):
        file = path.relative_to(ROOT).as_posix()
        environments = ["theano"]
        if path.parent.name == "gpu":
            environments = ["opencl"]
        elif any(one in path.name for one in OF_PYMC):
            environments = ["pymc"]
        elif path.name in OF_PYTENSOR:
            environments = ["pytensor", "pymc"] if path.name == "test_pytensor.py" else ["pytensor"]
        elif path.name in OF_BOTH:
            environments = ["theano", "pytensor"]
        slow = "mark.slow" in path.read_text()
        for environment in environments:
            for is_slow in (False, True) if slow else (False,):
                key = f"{environment} {'slow ' if is_slow else ''}{file}"
                found[environment, is_slow, file] = recorded.get(key, UNKNOWN[is_slow])
    return found


def changed_parts(revision):
    """Return the tests that cover the functions that differ from a revision, the cheapest first."""
    recorded = json.loads((RECORDED / "covering.json").read_text())
    names, seconds = zip(*recorded["tests"])
    chosen, others = {}, []
    files, functions = changes(revision)
    for file in files:
        if re.fullmatch(r"tests/.*/test_\w+\.py", file) and (ROOT / file).exists():
            others.append(file)
        elif file.startswith(("docs/", "README", "demos/")):
            others += [f"tests/system/test_{name}.py" for name in ("docs", "demo_scripts")]
    for module, function in functions:
        for number in recorded["functions"].get(module, {}).get(function, ()):
            chosen[names[number]] = seconds[number]
    tests, total = {}, 0.0
    for key in sorted(chosen, key=chosen.get):
        total += chosen[key]
        if total / 2 <= LIMIT:
            environment, _, test = key.partition(" ")
            tests.setdefault(environment, {})[test] = chosen[key]
    left_out = len(chosen) - sum(map(len, tests.values()))
    if left_out:
        say(f"{left_out} of {len(chosen)} tests that cover the change are left out, for time")
    parts = [parts_of(environment, tests[environment], "changed") for environment in tests]
    every, taken, total = every_file(), {}, 0.0
    for file in dict.fromkeys(others):
        taken[file] = every.get((environment_of(file), False, file), UNKNOWN[False])
    few = []
    for file in sorted(taken, key=taken.get):
        total += taken[file]
        few += [file] * (total <= LIMIT)
    if len(few) < len(taken):
        say(f"{len(taken) - len(few)} of {len(taken)} changed files are left out, for time")
    for environment in ENVIRONMENTS:
        files = [file for file in few if environment_of(file) == environment]
        if files:
            seconds, options = sum(taken[file] for file in files), [*IN_TWO, "-m", "not slow"]
            parts.append(Part(environment, files, options, seconds, f"changed files, {environment}"))
    if not parts:
        say("no test covers what has changed")
    return parts


def changes(revision):
    """Return what differs from a revision: files, and functions as (module, qualified name).

    Without a revision it is what is not committed, or, if all is committed, the last commit.
    """

    def git(*words):
        done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"--changed: git {' '.join(words)}: {done.stderr.strip()}")
        return done.stdout

    since = revision or ("HEAD" if git("status", "--porcelain") else "HEAD~1")
    files = git("diff", "--name-only", since).splitlines()
    files += git("ls-files", "--others", "--exclude-standard").splitlines()
    functions, module = set(), None
    for line in git("diff", "--unified=0", since, "--", "synkhronos").splitlines():
        if line.startswith("+++ "):
            module, spans = line[6:], {}
            if module.endswith(".py") and (ROOT / module).exists():
                spans = functions_of((ROOT / module).read_text())
        elif line.startswith("@@") and module:
            first, _, count = re.search(r"\+(\d+)(,(\d+))?", line).group(1, 2, 3)
            for number in range(int(first), int(first) + max(1, int(count or 1))):
                if number in spans:
                    functions.add((module, spans[number]))
    return sorted(set(files)), sorted(functions)


def functions_of(source):
    """Return the qualified name of the function that each line belongs to; "" outside of functions."""
    found = dict.fromkeys(range(1, source.count("\n") + 2), "")

    def visit(node, prefix):
        for child in ast.iter_child_nodes(node):
            if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                name = f"{prefix}{child.name}"
                if not isinstance(child, ast.ClassDef):
                    found.update(dict.fromkeys(range(child.lineno, child.end_lineno + 1), name))
                visit(child, f"{name}.")
            else:
                visit(child, prefix)

    visit(ast.parse(source), "")
    return found


def say(text):
    print(f"tests: {text}", file=sys.stderr, flush=True)


def duration(seconds):
    return f"{int(seconds) // 60}:{int(seconds) % 60:02}"


def run_parts(parts, options):
    """Run parts one after another, whatever the others do; return the status of all."""
    usable = []
    for part in parts:
        reason = part.environment.why_not()
        if reason:
            say(f"{part.title}: left out, {reason}")
        else:
            usable.append(part)
    expected = duration(sum(part.seconds for part in usable))
    say(f"{len(usable)} part(s), about {expected} minutes on two idle cores")
    counts, failed, began = {}, [], time.monotonic()
    for part in usable:
        found = run_part(part, options)
        failed += found.pop("failed tests")
        note_seconds(part, found.pop("seconds", {}))
        for name, number in found.items():
            counts[name] = counts.get(name, 0) + number
    for part, test in failed:
        if environment_of(test) == part.environment.name:
            command = ["sh", "tests/run", test]
        else:
            command = [str(part.environment.python.relative_to(ROOT)), "-m", "pytest", test]
        say(f"failed; to run it alone: {shlex.join(command)}")
    total = [counts.get(name, 0) for name in ("passed", "failed", "skipped")]
    say(f"{duration(time.monotonic() - began)} minutes in all")
    print(f"tests: {total[0]} passed, {total[1]} failed, {total[2]} skipped", flush=True)
    return 1 if total[1] else 0 if total[0] or not usable else 5


def note_seconds(part, seconds):
    """Update the record of the seconds of files, if all tests of the files have run."""
    if not part.only and "changed" not in part.title:
        path = RECORDED / "seconds.json"
        recorded = json.loads(path.read_text())
        words, share = ("slow ", 1) if "slow tests" in part.title else ("", 2)
        for file, taken in seconds.items():
            recorded[f"{part.environment.name} {words}{file}"] = round(taken / share, 1)
        path.write_text(json.dumps(dict(sorted(recorded.items())), indent=0) + "\n")


def wait(process, title, log):
    """Return the status of pytest when it has ended; meanwhile, show its progress on a terminal."""
    while True:
        try:
            return process.wait(1)
        except subprocess.TimeoutExpired:
            if sys.stderr.isatty():
                percent = int((re.findall(r"\[ *(\d+)%\]", log.read_text()) or [0])[-1])
                bar = "#" * (percent // 4)
                sys.stderr.write(f"\r\033[Ktests: {title} [{bar:25}] {percent}%\r")
                sys.stderr.flush()


def run_part(part, options):
    """Run a part, with one line about it, or its failures; return the numbers of its tests."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        report, log = Path(folder, "report"), Path(folder, "log")
        environment = {**os.environ, "TESTS_REPORT": str(report)}
        with log.open("w") as output:
            process = subprocess.Popen(
                part.command(folder, "-q", "-rf", *options), cwd=ROOT, env=environment, stdout=output,
                stdin=subprocess.DEVNULL,
            )  # fmt: skip
            status = wait(process, part.title, log)
        found = json.loads(report.read_text()) if report.exists() else {}
        text = log.read_text()
    found.setdefault("failed tests", [])
    if status not in (0, 5) and not found["failed tests"]:
        found["failed"] = found.get("failed", 0) + 1
    if status not in (0, 5) or any(one.startswith("--durations") for one in options):
        print(text, flush=True)
    counts = ", ".join(
        f"{found[name]} {name}" for name in ("passed", "failed", "skipped") if found.get(name)
    )
    say(f"{part.title}: {counts or 'no tests'} in {duration(time.monotonic() - began)}")
    found["failed tests"] = [(part, test) for test in found["failed tests"]]
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
