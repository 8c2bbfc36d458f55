"""Mutation testing: make small changes to the library, one at a time, and see which tests notice them.

    python tests/mutation.py RECORDS [--number 120] [--seed 0] [--processes 2]

Each mutant is one small change of a line that a test runs, by the records that ``tests/record.py`` has
written into the folder RECORDS. In a copy of the project, the tests of the first tier that run the line
are tried until one fails, and if none does, others. What each tier catches is printed, and the mutants
that survive. A mutant also counts as caught if its tests take several times as long as they should.

Nothing is left behind, even after an interrupt. The copies and the temporary files of the tests are in
one folder, and every process that the tests have started is killed when they end.
"""

import argparse
import ast
import collections
import concurrent.futures
import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from pathlib import Path
from typing import NamedTuple

import psutil

import record
import tiers

ROOT = tiers.ROOT
AT_MOST = 8  # tests of a tier that are tried, the cheapest
MARK = "MUTATION_RUN"  # environment variable that identifies the processes of one test run

COMPARISONS = {
    ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==",
    ast.Is: "is not", ast.IsNot: "is", ast.In: "not in", ast.NotIn: "in",
}  # fmt: skip
OPERATORS = {ast.Add: "-", ast.Sub: "+", ast.Mult: "//", ast.FloorDiv: "*", ast.Div: "*",
             ast.Mod: "+", ast.LShift: "+"}  # fmt: skip


class Mutant(NamedTuple):
    """A change of a module: the replacement for the source text between two offsets."""

    module: str
    line: int
    start: int
    stop: int
    new: str

    def apply(self, source):
        return source[: self.start] + self.new + source[self.stop :]

    def describe(self, source):
        old = " ".join(source[self.start : self.stop].split())
        return f"{self.module}:{self.line}: {old}  ->  {self.new}"


def mutants_of(module, source):
    """Return all mutants of a module."""
    lines = [0]
    for line in source.splitlines(keepends=True):
        lines.append(lines[-1] + len(line.encode()))
    encoded = source.encode()

    def offset(line, column):
        return len(encoded[: lines[line - 1] + column].decode())

    def replaced(node, new):
        start, stop = offset(node.lineno, node.col_offset), offset(node.end_lineno, node.end_col_offset)
        if source[start:stop] != new:
            found.append(Mutant(module, node.lineno, start, stop, new))

    def text(node):
        return ast.get_source_segment(source, node)

    found = []
    tree = ast.parse(source)
    for parent in ast.walk(tree):
        for child in ast.iter_child_nodes(parent):
            child.parent = parent
    for node in ast.walk(tree):
        if _is_left_out(node):
            continue
        if isinstance(node, ast.Compare) and len(node.ops) == 1:
            operator = COMPARISONS[type(node.ops[0])]
            replaced(node, f"({text(node.left)} {operator} {text(node.comparators[0])})")
        elif isinstance(node, ast.BoolOp):
            for one in node.values:
                others = [text(other) for other in node.values if other is not one]
                word = " and " if isinstance(node.op, ast.And) else " or "
                replaced(node, f"({word.join(f'({other})' for other in others)})")
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            replaced(node, f"({text(node.operand)})")
        elif isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
            new = f"({text(node.left)} {OPERATORS[type(node.op)]} {text(node.right)})"
            replaced(node, new)
        elif isinstance(node, ast.Constant) and type(node.value) is bool:
            replaced(node, str(not node.value))
        elif isinstance(node, ast.Constant) and type(node.value) in (int, float):
            replaced(node, str(node.value + 1))
        elif isinstance(node, ast.IfExp):
            replaced(node, f"({text(node.body)})")
            replaced(node, f"({text(node.orelse)})")
        elif isinstance(node, (ast.If, ast.While)):
            replaced(node.test, "True")
            replaced(node.test, "False")
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            replaced(node, "pass")
        elif isinstance(node, ast.Return) and node.value is not None:
            replaced(node, "return None")
        elif isinstance(node, (ast.Assign, ast.AugAssign)) and isinstance(
            node.targets[0] if isinstance(node, ast.Assign) else node.target,
            (ast.Attribute, ast.Subscript),
        ):
            replaced(node, "pass")
        elif isinstance(node, ast.Slice):
            for bound in (node.lower, node.upper):
                if bound is not None:
                    replaced(bound, f"({text(bound)}) + 1")
    return found


def _is_left_out(node):
    """Whether a node is part of a docstring, an annotation, a message, or an import."""
    while True:
        parent = getattr(node, "parent", None)
        if parent is None:
            return False
        if isinstance(node, (ast.JoinedStr, ast.Import, ast.ImportFrom, ast.Raise)):
            return True
        if isinstance(parent, ast.AnnAssign) and node is parent.annotation:
            return True
        if isinstance(node, ast.arguments) or (
            isinstance(parent, ast.FunctionDef) and node in (parent.returns, *parent.decorator_list)
        ):
            return True
        node = parent


def copy_project(folder):
    """Copy the project into a folder, in which mutants can be tested; return the folder."""
    for name in ("synkhronos", "tests", "demos", "docs", "requirements", "tools"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "setup.py", "README.rst"):
        shutil.copy(ROOT / name, folder / name)
    return folder


class Runner:
    """Tries mutants in copies of the project, and kills the processes that their tests leave."""

    def __init__(self, folder, records):
        self._folder, self.interrupted = folder, threading.Event()
        self._seconds, lines = record.read(records)
        lines_of_first = (tiers.RECORDED / "first_tier.txt").read_text().splitlines()
        self._first = {" ".join(line.split(" ", 2)[::2]) for line in lines_of_first}
        self._tests = collections.defaultdict(list)  # by module and line
        for key in sorted(lines, key=self._seconds.get):
            for place in lines[key]:
                self._tests[place].append(key)
        self.sources = {module: (ROOT / module).read_text() for module, _ in sorted(self._tests)}

    def mutants(self):
        """Return all mutants of lines that a test runs."""
        every = [one for name, source in self.sources.items() for one in mutants_of(name, source)]
        return [one for one in every if self._tests.get((one.module, one.line))]

    def try_mutants(self, number, mutants):
        """Return which mutants each tier catches: "first", "others" or None. Runs in a thread."""
        outcomes = {}
        folder = copy_project(self._folder / f"copy-{number}")
        for count, mutant in enumerate(mutants, 1):
            path, source = folder / mutant.module, self.sources[mutant.module]
            path.write_text(mutant.apply(source))
            outcomes[mutant] = self._tier_that_catches(folder, mutant)
            path.write_text(source)
            print(f"{number}: {count}/{len(mutants)} {outcomes[mutant] or 'SURVIVED'}: "
                  f"{mutant.describe(source)}", flush=True)  # fmt: skip
        return outcomes

    def _tier_that_catches(self, folder, mutant):
        covering = self._tests[mutant.module, mutant.line]
        for tier, tests in (
            ("first", [key for key in covering if key in self._first]),
            ("others", [key for key in covering if key not in self._first]),
        ):
            for environment in tiers.ENVIRONMENTS:
                some = [key for key in tests[:AT_MOST] if key.startswith(f"{environment} ")]
                if some and not self._passes(folder, environment, some):
                    return tier
        return None

    def _passes(self, folder, environment, keys):
        place, mark = tiers.ENVIRONMENTS[environment], uuid.uuid4().hex
        command = [place.python, "-m", "pytest", "-qx", "-p", "no:cacheprovider", *place.options]
        limit = time.monotonic() + 45 + 4 * sum(self._seconds[key] for key in keys)
        with tempfile.TemporaryDirectory(dir=self._folder, ignore_cleanup_errors=True) as temporary:
            Path(temporary).chmod(0o755)
            variables = {
                **os.environ, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1",
                "TMPDIR": temporary, MARK: mark, "PYTHONHASHSEED": "0",
            }  # fmt: skip
            process = subprocess.Popen(
                [*command, *(key.split(" ", 1)[1] for key in keys)], cwd=folder, env=variables,
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                start_new_session=True,
            )  # fmt: skip
            try:
                while time.monotonic() < limit:
                    if self.interrupted.is_set():
                        raise KeyboardInterrupt
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        return process.wait(0.2) == 0
                return False
            finally:
                _kill_all(process, mark)


def _kill_all(process, mark):
    """Kill the tests and all processes that they have started, in any session."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    while True:
        left = [one for one in psutil.process_iter() if _has_mark(one, mark)]
        if not left:
            return
        for one in left:
            with contextlib.suppress(psutil.Error):
                one.kill()
        psutil.wait_procs(left, 1)


def _has_mark(process, mark):
    try:
        return process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE
    except (psutil.Error, OSError):
        return False


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("records", help="the folder in which tests/record.py has recorded all tests")
    parser.add_argument("--number", type=int, default=120, help="mutants, drawn at random")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))
    with tempfile.TemporaryDirectory(prefix="mutation-", ignore_cleanup_errors=True) as folder:
        Path(folder).chmod(0o755)  # some tests run programs as another user
        report(options, Runner(Path(folder), options.records))


def report(options, runner):
    every = runner.mutants()
    chosen = choose(every, options.number, options.seed)
    print(f"{len(chosen)} of {len(every)} mutants of {len(runner.sources)} modules", flush=True)
    parts = [chosen[k :: options.processes] for k in range(options.processes)]
    outcomes = {}
    with concurrent.futures.ThreadPoolExecutor(options.processes) as pool:
        tries = [pool.submit(runner.try_mutants, *part) for part in enumerate(parts)]
        try:
            for one in tries:
                outcomes.update(one.result())
        except BaseException:
            runner.interrupted.set()
            raise
    first, others = (sum(one == tier for one in outcomes.values()) for tier in ("first", "others"))
    print(f"{first + others} of {len(chosen)} are caught, {first} of them by the first tier "
          f"({first / max(first + others, 1):.0%}); survivors:")  # fmt: skip
    for mutant in sorted(one for one, tier in outcomes.items() if tier is None):
        print(mutant.describe(runner.sources[mutant.module]))


def choose(mutants, number, seed):
    """Draw mutants at random, about as many of each folder of the package."""
    folders = collections.defaultdict(list)
    for mutant in mutants:
        folders[mutant.module.split("/")[1]].append(mutant)
    draw = random.Random(seed)
    for each in folders.values():
        draw.shuffle(each)
    chosen = []
    while len(chosen) < min(number, len(mutants)):
        for each in folders.values():
            if each and len(chosen) < number:
                chosen.append(each.pop())
    return chosen


if __name__ == "__main__":
    main()
