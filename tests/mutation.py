"""Mutation testing: make small changes to the library, one at a time, and check that the tests fail.

    python tests/mutation.py [--number 200] [--seed 0] [--only functions/call.py] [--processes 2]

Each mutant is one small change of the source code. It is tested in a copy of the project, with the
tests listed for its module below, until the first test fails. Mutants that survive are printed with
their line. A mutant also counts as caught if a file of tests exceeds a time limit of more than three
times its usual duration.

Nothing is left behind, even after an interrupt. The copies and the temporary files of the tests are in
one folder, and every process that the tests have started is killed when they end.
"""

import argparse
import ast
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

sys.path.append(str(Path(__file__).resolve().parent / "support"))

from processes import ROOT, find_test

CALLS = ["test_call.py", "test_functions.py", "test_function_oracle.py"]
PROCESSES = ["test_failures.py", "test_lifecycle.py", "test_restart.py"]
# Several machines in one process, whose ranks are threads.
MACHINES = ["test_machines_tree.py", "test_machines_counts.py", "test_machines.py"]
COURIERS = ["test_relay.py", "test_buckets.py"]
WORLDS = ["test_worlds.py", *PROCESSES]
WORKERS = ["test_transports.py -k Local", "test_transports.py"]
#: The tests that should catch a mutant of each module, fast ones first.
TESTS = {
    "comms/alone.py": ["test_communicators.py -k alone", *MACHINES],
    "comms/base.py": ["test_communicators.py"],
    "machines/buckets.py": ["test_buckets.py"],
    "comms/coded.py": MACHINES,
    "comms/formats.py": ["test_wire.py", *MACHINES],
    "comms/wire_state.py": MACHINES,
    "comms/algorithms.py": ["test_all_reduce.py"],
    "comms/direct.py": ["test_all_reduce.py", *MACHINES],
    "comms/doubling.py": ["test_all_reduce.py"],
    "comms/halving.py": ["test_all_reduce.py"],
    "comms/linked.py": ["test_all_reduce.py", *MACHINES],
    "comms/low_rank.py": MACHINES,
    "machines/communicator.py": MACHINES,
    "comms/naive.py": ["test_communicators.py -k naive"],
    "comms/shm.py": ["test_communicators.py -k shared_memory"],
    "comms/repeating.py": ["test_communicators.py -k prepared", "test_ops_calls.py"],
    "comms/sparse.py": MACHINES,
    "comms/staged.py": MACHINES,
    "comms/wires.py": MACHINES,
    "transports/base.py": ["test_transports.py", "test_copies.py"],
    "transports/children.py": [
        "test_children.py", "test_background_processes.py", *WORKERS, *PROCESSES, "test_hosts.py",
    ],
    "transports/fork_locks.py": ["test_fork_locks.py"],
    "transports/limits.py": ["test_limits.py", "test_failures.py"],
    "transports/local.py": [*WORKERS, *PROCESSES, "test_copies.py"],
    "transports/mailbox.py": ["test_transports.py -k box", "test_transports.py"],
    "transports/milestones.py": WORKERS,
    "transports/naive.py": ["test_transports.py", "test_stores.py"],
    "transports/replies.py": ["test_tree.py"],
    "transports/semaphore.py": ["test_semaphore.py", "test_transports.py"],
    "transports/tree.py": ["test_tree.py", "test_transports.py -k Tree", "test_many_ranks.py"],
    "transports/waiting.py": ["test_waiting.py", "test_transports.py"],
    "machines/overlap.py": [*COURIERS, "test_machines_mpi.py -m slow -k bit_for_bit"],
    "machines/courier.py": [*COURIERS, "test_machines_mpi.py -m slow -k gradients_travel"],
    "machines/bundles.py": MACHINES,
    "machines/commands.py": MACHINES,
    "machines/inbox.py": MACHINES,
    "machines/leaders.py": ["test_absent.py", "test_clocks.py", *MACHINES, "test_relay.py"],
    "machines/links.py": [*MACHINES, "test_machines_mpi.py -k naive_links"],
    "machines/meetings.py": [*MACHINES, "test_relay.py"],
    "machines/mpi.py": ["test_machines_mpi.py -m slow -k three_machines"],
    "machines/naive.py": ["test_machines_mpi.py -k naive_links", *MACHINES, "test_relay.py"],
    "machines/neighbours.py": ["test_connections.py"],
    "machines/transport.py": [*MACHINES, "test_relay.py"],
    "functions/agreement.py": ["test_agreement.py", "test_watch.py", "test_audit.py", "test_in_sync.py"],
    "functions/analysis.py": [
        "test_watch.py", "test_audit.py", "test_ops_calls.py", "test_recurrence.py",
    ],
    "functions/arguments.py": ["test_bad_input.py", *CALLS, "test_idioms.py"],
    "functions/on_step.py": ["test_on_step.py"],
    "functions/build.py": ["test_bad_input.py", "test_idioms.py", *CALLS],
    "functions/call.py": [
        *CALLS, "test_outputs.py", "test_idioms.py", "test_rehearsal.py", "test_windows.py",
        "test_fixed_rows.py", "test_verification.py",
    ],
    "functions/columns.py": [*CALLS, "test_idioms.py", "test_ops_calls.py"],
    "functions/comparing/first_calls.py": ["test_verification.py"],
    "functions/comparing/reasons.py": ["test_check.py", "test_verification.py"],
    "functions/comparing/replicas.py": [
        "test_watch.py", "test_audit.py", "test_in_sync.py", "test_on_step.py",
    ],
    "functions/comparing/serial_comparison.py": [
        "test_check.py", "test_verification.py", "test_none.py",
    ],
    "functions/comparing/trial_runs.py": ["test_check.py", "test_verification.py"],
    "functions/comparing/watch.py": ["test_watch.py", "test_audit.py"],
    "functions/compiling.py": ["test_progress.py", "test_log.py"],
    "functions/description.py": ["test_shell.py"],
    "functions/fixed.py": ["test_fixed_rows.py"],
    "functions/function.py": [
        *CALLS, "test_bad_input.py", "test_data.py", "test_idioms.py", "test_train.py",
        "test_replicate.py", "test_streams.py", "test_restart.py", "test_copyable.py", "test_on_step.py",
    ],
    "functions/call_plan.py": ["test_worlds.py", "test_call.py", "test_restart.py"],
    "functions/outputs.py": ["test_outputs.py", *CALLS, "test_uneven.py"],
    "functions/packed.py": ["test_outputs.py", *CALLS],
    "functions/copies.py": ["test_copyable.py", "test_replicate.py"],
    "functions/peers.py": ["test_ops_calls.py", "test_ops.py", "test_ops_gradients.py"],
    "functions/random.py": ["test_streams.py", "test_bad_input.py"],
    "functions/reduced.py": ["test_none.py", *MACHINES],
    "functions/replica.py": ["test_check.py", *CALLS],
    "functions/replicate.py": [
        "test_replicate.py", "test_streams.py", "test_late_operations.py", "test_call.py",
        "test_restart.py",
    ],
    "functions/signature.py": ["test_bad_input.py", "test_idioms.py", *CALLS],
    "functions/slices.py": [*CALLS, "test_outputs.py", "test_ops_calls.py"],
    "functions/stages.py": ["test_ops_calls.py"],
    "functions/steps.py": ["test_train.py", "test_rules.py", "test_check.py", "test_on_step.py"],
    "functions/window.py": ["test_windows.py", "test_idioms.py"],
    "machines/replies.py": MACHINES,
    "machines/store.py": MACHINES,
    "machines/job/config.py": ["test_job_config.py", "test_launch_machines.py"],
    "machines/job/doctor.py": ["test_doctor_mpi.py"],
    "machines/job/end_processes.py": ["test_restarts.py"],
    "machines/job/exit_code.py": ["test_ulfm.py"],
    "machines/job/launcher.py": ["test_launcher.py", "test_launch_machines.py", "test_restarts.py"],
    "machines/job/leftovers.py": ["test_leftovers.py"],
    "machines/job/loss_messages.py": ["test_loss_messages.py"],
    "machines/job/output_prefix.py": ["test_prefixes.py"],
    "machines/job/restarts.py": ["test_restarts.py"],
    "machines/job/signals_of_user.py": ["test_restarts.py", "test_launch_machines.py"],
    "machines/job/source_digest.py": ["test_launch_machines.py", "test_doctor_mpi.py"],
    "machines/job/start_guard.py": ["test_ulfm.py -k before_mpi"],
    "machines/job/termination.py": ["test_machines_deaths.py"],
    "machines/connections.py": ["test_connections.py"],
    "machines/relay/messages.py": ["test_relay.py"],
    "machines/relay/mirrors.py": ["test_relay.py"],
    "machines/relay/part.py": ["test_relay.py"],
    "machines/relay/questions.py": ["test_relay.py"],
    "machines/relay/relay.py": ["test_relay.py"],
    "machines/relay/remote_stripes.py": ["test_relay.py"],
    "variables/arguments.py": ["test_bad_input.py", "test_collectives_oracle.py", "test_functions.py"],
    "variables/begun.py": COURIERS,
    "variables/collectives.py": ["test_collectives_oracle.py", *CALLS, "test_bad_input.py", *MACHINES],
    "variables/in_sync.py": ["test_in_sync.py"],
    "variables/reductions.py": ["test_collectives_oracle.py", "test_bad_input.py", *MACHINES],
    "variables/replicas.py": [
        "test_collectives_oracle.py", *CALLS, "test_checkpoint.py", "test_bad_input.py",
    ],
    "world/devices.py": ["test_doctor_gpus.py", "test_launch.py", *WORLDS],
    "world/entry.py": ["test_turn.py", *WORLDS],
    "world/fuse.py": ["test_worlds.py", "test_failures.py", "test_train.py", "test_call.py"],
    "world/generators.py": ["test_generators.py", *WORLDS],
    "world/here.py": [*WORLDS, "test_drop.py", "test_call.py", "test_replicate.py"],
    "world/job.py": [
        *MACHINES, "test_machines_mpi.py -m slow -k three_machines", "test_machines_deaths.py",
    ],
    "world/launch.py": [
        *WORLDS, "test_launch.py", "test_limits.py", "test_bad_input.py", "test_other_programs.py",
    ],
    "world/logged.py": ["test_log.py"],
    "world/options.py": ["test_launch.py", *WORLDS],
    "world/placement.py": [*MACHINES, "test_launch.py"],
    "world/plans.py": ["test_worlds.py", "test_call.py", "test_train.py", "test_restart.py"],
    "world/registry.py": ["test_worlds.py", "test_drop.py", "test_replicate.py", *PROCESSES],
    "world/replacement.py": ["test_processes.py", "test_hosts.py", "test_controller.py"],
    "world/replies.py": [*WORLDS, "test_spmd.py"],
    "world/restart.py": ["test_restart.py"],
    "world/threads.py": ["test_environment.py", "test_launch.py", *WORLDS],
    "world/turn.py": ["test_turn.py", "test_interrupts.py"],
    "world/worker.py": [*WORLDS, "test_interrupts.py", "test_hosts.py"],
    "world/world.py": [*WORLDS, "test_interrupts.py", "test_call.py"],
}  # fmt: skip
FOLDERS = ("comms", "transports", "machines", "functions", "variables", "world")
#: Modules of these folders whose mutants are not tested, and why.
EXCLUDED = {
    "comms/nccl.py": "only the tests in tests/gpu run it, on GPUs of NVIDIA",
    "functions/stay.py": "only models of PyMC use it, which need PyTensor",
}

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


class Interrupted(Exception):
    """Raised when the runner has been told to stop."""


class Runner:
    """Runs tests in copies of the project, and kills the processes that they leave."""

    def __init__(self, folder):
        self.folder = folder
        self.interrupted = threading.Event()
        self._seconds = {}  # the duration of each test file
        self._original = copy_project(folder / "original")
        self.sources = {name: (self._original / "synkhronos" / name).read_text() for name in TESTS}

    def time_tests(self, words):
        """Run tests of the unchanged modules, to know how long they take beside others."""
        began = time.monotonic()
        with tempfile.TemporaryFile("w+", dir=self.folder) as output:
            if not self._run_file(self._original, words, None, output):
                if self.interrupted.is_set():
                    raise Interrupted
                output.seek(0)
                raise SystemExit(f"{output.read()}\n{words} fails without any change")
        self._seconds[words] = time.monotonic() - began

    def try_mutants(self, number, mutants):
        """Test mutants, and return those that survive. Runs in a separate thread."""
        survivors = []
        folder = copy_project(self.folder / f"copy-{number}")
        for count, mutant in enumerate(mutants, 1):
            path, source = folder / "synkhronos" / mutant.module, self.sources[mutant.module]
            path.write_text(mutant.apply(source))
            passed, seconds = self._run_tests(folder, mutant.module)
            path.write_text(source)
            outcome = "SURVIVED" if passed else "caught"
            print(f"{number}: {count}/{len(mutants)} {outcome} after {seconds:.0f} s: "
                  f"{mutant.describe(source)}", flush=True)  # fmt: skip
            if passed:
                survivors.append(mutant)
        return survivors

    def _run_tests(self, folder, module):
        """Return whether all tests of a module have passed, and their duration in seconds."""
        began = time.monotonic()
        for words in TESTS[module]:
            passed = self._run_file(folder, words, 20 + 3 * self._seconds[words])
            if self.interrupted.is_set():
                raise Interrupted
            if not passed:
                return False, time.monotonic() - began
        return True, time.monotonic() - began

    def _run_file(self, folder, words, limit, output=subprocess.DEVNULL):
        name, *options = words.split()
        command = [sys.executable, "-m", "pytest", "-qx", "-m", "not slow", "-p", "no:cacheprovider"]
        mark = uuid.uuid4().hex
        with tempfile.TemporaryDirectory(dir=self.folder, ignore_cleanup_errors=True) as temporary:
            Path(temporary).chmod(0o755)
            environment = {
                **os.environ, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1",
                "TMPDIR": temporary, MARK: mark,
            }  # fmt: skip
            process = subprocess.Popen(
                [*command, find_test(name).relative_to(ROOT), *options],
                cwd=folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                return self._wait(process, limit) == 0
            finally:
                _kill_all(process, mark)

    def _wait(self, process, limit):
        """Return the exit status, or None after the time limit or an interrupt."""
        end = None if limit is None else time.monotonic() + limit
        while end is None or time.monotonic() < end:
            try:
                return process.wait(0.2)
            except subprocess.TimeoutExpired:
                if self.interrupted.is_set():
                    break
        return None


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
    parser.add_argument("--number", type=int, default=200, help="mutants, drawn at random")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", action="append", choices=sorted(TESTS), metavar="MODULE")
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))
    shared_before = set(os.listdir("/dev/shm"))
    with tempfile.TemporaryDirectory(prefix="mutation-", ignore_cleanup_errors=True) as folder:
        Path(folder).chmod(0o755)  # some tests run programs as another user
        report(options, Runner(Path(folder)))
    left = sorted(set(os.listdir("/dev/shm")) - shared_before)
    if left:
        print(f"new in /dev/shm, by these or by other processes: {left}")


def report(options, runner):
    sources = {name: runner.sources[name] for name in options.only or TESTS}
    every = [one for name, source in sources.items() for one in mutants_of(name, source)]
    chosen = random.Random(options.seed).sample(every, min(options.number, len(every)))
    print(f"{len(chosen)} of {len(every)} mutants of {len(sources)} modules", flush=True)
    needed = sorted({words for mutant in chosen for words in TESTS[mutant.module]})
    parts = [chosen[k :: options.processes] for k in range(options.processes)]
    with concurrent.futures.ThreadPoolExecutor(options.processes) as pool:
        try:
            list(pool.map(runner.time_tests, needed))
            tries = [pool.submit(runner.try_mutants, *part) for part in enumerate(parts)]
            survivors = [mutant for one in tries for mutant in one.result()]
        except BaseException:
            runner.interrupted.set()
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    caught = len(chosen) - len(survivors)
    print(f"{caught} of {len(chosen)} caught ({caught / len(chosen):.0%}); survivors:")
    for mutant in sorted(survivors):
        print(mutant.describe(sources[mutant.module]))


if __name__ == "__main__":
    main()
