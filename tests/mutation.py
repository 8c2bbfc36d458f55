"""Mutation testing: change the library in one place after another, and see whether the tests notice.

    python tests/mutation.py [--number 200] [--seed 0] [--only functions/call.py] [--processes 2]

Each mutant is one small change of the source code. It is tried in a copy of the project, with the tests
that are named for its module below, until the first one fails. Mutants that survive are printed with
their line. A mutant counts as caught as well if the tests do not end within three times their usual
time.
"""

import argparse
import ast
import concurrent.futures
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent

PROCESSES = ["test_failures.py", "test_lifecycle.py", "test_restart.py"]
#: By module, the tests that are to notice, the quick ones first.
TESTS = {
    "comms/base.py": ["test_communicators.py"],
    "comms/naive.py": ["test_communicators.py -k naive"],
    "comms/shm.py": ["test_communicators.py -k shared_memory"],
    "transports/base.py": ["test_transports.py"],
    "transports/box.py": ["test_transports.py"],
    "transports/limits.py": ["test_limits.py", "test_failures.py"],
    "transports/liveness.py": ["test_liveness.py", "test_transports.py", *PROCESSES, "test_hosts.py"],
    "transports/local.py": ["test_transports.py", *PROCESSES, "test_interrupts.py", "test_hosts.py"],
    "transports/naive.py": ["test_transports.py", "test_stores.py"],
    "transports/semaphore.py": ["test_semaphore.py", "test_transports.py"],
    "transports/waiting.py": ["test_waiting.py", "test_transports.py"],
    "functions/arguments.py": ["test_bad_input.py", "test_call.py", "test_function_oracle.py"],
    "functions/call.py": ["test_call.py", "test_outputs.py", "test_function_oracle.py"],
    "functions/function.py": [
        "test_call.py", "test_bad_input.py", "test_data.py", "test_function_oracle.py",
        "test_train.py", "test_restart.py", "test_replicate.py", "test_streams.py",
    ],
    "functions/outputs.py": ["test_outputs.py", "test_uneven.py", "test_function_oracle.py"],
    "functions/random.py": ["test_streams.py", "test_bad_input.py"],
    "functions/replicate.py": [
        "test_replicate.py", "test_streams.py", "test_call.py", "test_restart.py",
    ],
    "functions/signature.py": ["test_bad_input.py", "test_function_oracle.py"],
}  # fmt: skip

COMPARISONS = {
    ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==",
    ast.Is: "is not", ast.IsNot: "is", ast.In: "not in", ast.NotIn: "in",
}  # fmt: skip
OPERATORS = {ast.Add: "-", ast.Sub: "+", ast.Mult: "//", ast.FloorDiv: "*", ast.Div: "*",
             ast.Mod: "+", ast.LShift: "+"}  # fmt: skip


class Mutant(NamedTuple):
    """A change of a module: what is put in the place of the source between two offsets."""

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
    """Make a copy of the project in which mutants can be tried."""
    for name in ("synkhronos", "tests", "demos", "docs", "requirements", "tools"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "setup.py", "README.rst"):
        shutil.copy(ROOT / name, folder / name)
    return folder


def run_tests(folder, module, limit=None):
    """Run the tests of a module; return whether all have passed, and the seconds that it took."""
    began = time.monotonic()
    environment = {**os.environ, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    for words in TESTS[module]:
        name, *options = words.split()
        command = [sys.executable, "-m", "pytest", "-qx", "-m", "not slow", "-p", "no:cacheprovider"]
        process = subprocess.Popen(
            [*command, f"tests/{name}", *options],
            cwd=folder,
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            left = None if limit is None else max(1, limit - (time.monotonic() - began))
            if process.wait(left):
                return False, time.monotonic() - began
        except subprocess.TimeoutExpired:
            return False, time.monotonic() - began
        finally:
            _end_session(process)
    return True, time.monotonic() - began


def _end_session(process):
    """Kill what the tests may have left: mutants leave processes behind."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()


def try_mutants(number, mutants, limits):
    """In a process of its own: return those of the mutants that survive."""
    survivors = []
    with tempfile.TemporaryDirectory(prefix=f"mutation-{number}-") as name:
        folder = copy_project(Path(name))
        for count, mutant in enumerate(mutants, 1):
            path = folder / "synkhronos" / mutant.module
            source = path.read_text()
            path.write_text(mutant.apply(source))
            passed, seconds = run_tests(folder, mutant.module, limits[mutant.module])
            path.write_text(source)
            outcome = "SURVIVED" if passed else "caught"
            print(f"{number}: {count}/{len(mutants)} {outcome} after {seconds:.0f} s: "
                  f"{mutant.describe(source)}", flush=True)  # fmt: skip
            if passed:
                survivors.append(mutant)
    return survivors


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--number", type=int, default=200, help="mutants, drawn at random")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", action="append", choices=sorted(TESTS), metavar="MODULE")
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args()
    sources = {name: (ROOT / "synkhronos" / name).read_text() for name in options.only or TESTS}
    every = [one for name, source in sources.items() for one in mutants_of(name, source)]
    chosen = random.Random(options.seed).sample(every, min(options.number, len(every)))
    print(f"{len(chosen)} of {len(every)} mutants of {len(sources)} modules")
    limits = {}
    for name in sorted({mutant.module for mutant in chosen}):
        passed, seconds = run_tests(ROOT, name)
        if not passed:
            sys.exit(f"the tests of {name} fail without any change")
        limits[name] = 30 + 3 * seconds * options.processes
    parts = [chosen[k :: options.processes] for k in range(options.processes)]
    with concurrent.futures.ProcessPoolExecutor(options.processes) as pool:
        results = pool.map(try_mutants, range(options.processes), parts, [limits] * options.processes)
        survivors = [mutant for result in results for mutant in result]
    caught = len(chosen) - len(survivors)
    print(f"{caught} of {len(chosen)} caught ({caught / len(chosen):.0%}); survivors:")
    for mutant in sorted(survivors):
        print(mutant.describe(sources[mutant.module]))


if __name__ == "__main__":
    main()
