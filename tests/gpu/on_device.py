"""Checks on a machine with a GPU of NVIDIA that is there for a few minutes only, without a network.

    python tests/gpu/on_device.py FOLDER [--device cuda0] [--probe COMMAND] [--budget SECONDS]
                                  [--python PATH] [--parts A,B] [--small] [--tests ARGUMENTS]

It finds out what is installed, and then does each part in a process of its own, with a time limit. A
part that cannot run says why, and the others go on. ``FOLDER`` gets ``report.json`` and ``report.txt``,
which are written again after each part, and a file with the output of each command. The exit status is
the number of parts that failed or ran out of time.

Parts are ``probe`` (a command of yours), ``tests`` (``tests/gpu``), ``shared`` (two ranks on the device,
without MPS), ``nccl`` (one rank), ``mnist`` and ``resnet`` (steps of one rank and of two, and their
times), and ``jax`` (PyTensor's JAX mode).
"""

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT, PROGRAMS = HERE.parent.parent, HERE / "programs"
PACKAGES = (
    "numpy", "scipy", "theano", "pygpu", "lasagne", "pytest", "psutil", "mpi4py", "pytensor", "jax",
    "jaxlib", "jax_cuda12_plugin", "jax_cuda13_plugin", "PIL",
)  # fmt: skip
# The distribution of a package may be unknown, as for a Debian package, so the module is asked, too.
ASK = """
import importlib, importlib.util, json, sys
found = {"version": sys.version.split()[0]}
for name in %r:
    if importlib.util.find_spec(name) is not None:
        try:
            from importlib.metadata import version
            found[name] = version(name)
        except Exception:
            found[name] = "of unknown version"
print(json.dumps(found))
"""
LIBRARIES = """
import json
from synkhronos.host import nvidia as libraries
found = {name: str(one.file) for name, one in libraries.find().items()}
print(json.dumps({"missing": libraries.explain_missing(), "found": found}))
"""
#: Each part, with its limit in seconds; together less than the 15 minutes for which a machine is lent
LIMITS = {
    "probe": 200, "tests": 300, "shared": 60, "nccl": 90, "mnist": 100, "resnet": 150, "jax": 90,
}  # fmt: skip
BUDGET = 840  # seconds for all
SHORTEST = 5  # seconds that are worth a start
TOLERANCE = 1e-3  # of losses, relative: two ranks add up in another order
_DYING = 5  # seconds


class Stopped(Exception):
    """A part has stopped with an outcome that is not "passed"; the message says why."""

    def __init__(self, outcome, why):
        super().__init__(why)
        self.outcome = outcome


class Checks:
    """The parts, each of which is a method that returns numbers for the report, or raises `Stopped`."""

    def __init__(self, folder, options):
        self.folder, self.options, self.device = folder, options, options.device
        self.until = self.limit = time.monotonic() + options.budget
        self.report = {"device": self.device, "installed": {}, "parts": {}}

    def run(self):
        self.report["installed"] = self.installed()
        for name in self.options.parts:
            self.report["parts"][name] = self.outcome(name)
            self.write()
        return sum(one["outcome"] in ("failed", "timed out") for one in self.report["parts"].values())

    def outcome(self, name):
        began = time.monotonic()
        self.limit = min(began + LIMITS[name] * self.options.patience, self.until)
        outcome, why, found = "passed", "", {}
        try:
            if self.until - began < SHORTEST:
                raise Stopped("not run", "no time is left")
            found = getattr(self, name)()
        except Stopped as error:
            outcome, why = error.outcome, str(error)
        except Exception as error:  # such as an output that is not what was expected
            outcome, why = "failed", f"{type(error).__name__}: {error}"
        seconds = round(time.monotonic() - began, 1)
        return {"outcome": outcome, "why": why, "seconds": seconds, **found}

    def write(self):
        lines = [f"device: {self.device}"]
        for name, value in self.report["installed"].items():
            lines.append(f"{name}: {value if isinstance(value, str) else json.dumps(value)}")
        lines.append("")
        for name, row in self.report["parts"].items():
            lines.append(f"{name:8}{row['outcome']:10}{row['seconds']:7.1f} s  {row['why']}".rstrip())
            rest = {key: row[key] for key in row if key not in ("outcome", "seconds", "why")}
            lines += [f"        {key}: {value}" for key, value in rest.items()]
        texts = {"report.json": json.dumps(self.report, indent=1), "report.txt": "\n".join(lines)}
        for name, text in texts.items():
            part = self.folder / f"{name}.part"
            part.write_text(text + "\n")
            part.replace(self.folder / name)

    # What is installed

    def installed(self):
        query = "name,driver_version,memory.total,compute_mode"
        found = {
            "nvidia-smi": short(["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"]),
            "g++": short(["g++", "-dumpfullversion"]),
            "MPS": "on" if mps_is_on() else "off",
            "python": self.packages(sys.executable),
        }
        for path in self.options.python:
            found[path] = self.packages(path)
        found["libraries"] = parsed(short([sys.executable, "-c", LIBRARIES], self.environment()))
        return found

    def packages(self, python):
        return parsed(short([python, "-c", ASK % (PACKAGES,)], self.environment()))

    def needs(self, *names):
        """Stop the part if this Python lacks packages."""
        has = self.report["installed"]["python"]
        missing = [name for name in names if not isinstance(has, dict) or name not in has]
        if missing:
            raise Stopped("not run", f"{sys.executable} has no {', '.join(missing)}")

    def needs_device(self):
        """Stop the part if Theano cannot use the device."""
        self.needs("theano", "pygpu")
        libraries = self.report["installed"]["libraries"]
        missing = libraries["missing"] if isinstance(libraries, dict) else libraries
        if missing and self.device.startswith("cuda") and not self.options.emulated:
            raise Stopped("not run", missing)

    # Commands

    def environment(self, **more):
        """Return the variables of a command: those of this process, and the place of the package."""
        given = [*filter(None, [os.environ.get("PYTHONPATH")])]
        path = os.pathsep.join(map(str, [ROOT, *given, ROOT / "tests", ROOT / "tests" / "support"]))
        return {**os.environ, "PYTHONPATH": path, "SYNKHRONOS_PROGRESS": "0", **more}

    def command(self, name, line, **more):
        """Run a command to its end, at most to the limit of the part; return its output."""
        seconds = self.limit - time.monotonic()
        path = self.folder / f"{name}.txt"
        with open(path, "wb") as file:
            process = subprocess.Popen(
                [*map(str, line)], cwd=ROOT, env=self.environment(**more), stdin=subprocess.DEVNULL,
                stdout=file, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
            try:
                code = process.wait(max(1, seconds))
            except subprocess.TimeoutExpired:
                end(process)
                raise Stopped(
                    "timed out", f"{name} did not end within {seconds:.0f} s; {last_line(path)}"
                ) from None
        if code:
            raise Stopped("failed", f"{name} ended with {code}: {last_line(path)}")
        return path.read_text(errors="replace")

    def program(self, name, file, *arguments, python=sys.executable, **more):
        line = [python, "-m", "synkhronos", "run", PROGRAMS / file, *arguments]
        return self.command(name, line, **more)

    # The parts

    def probe(self):
        if not self.options.probe:
            raise Stopped("not run", "no command was given by --probe")
        text = self.command("probe", shlex.split(self.options.probe))
        return {"last lines": text.splitlines()[-10:]}

    def tests(self):
        self.needs_device()
        self.needs("pytest", "psutil")
        line = [sys.executable, "-m", "synkhronos", "run", "-m", "pytest", "-q", "-rfE", "--tb=short"]
        line += ["-p", "no:cacheprovider", "--device", self.device, *shlex.split(self.options.tests)]
        try:
            return {"pytest": last_of(self.command("tests", line))}
        except Stopped as error:
            if error.outcome != "failed":
                raise
            lines = (self.folder / "tests.txt").read_text(errors="replace").splitlines()
            failed = [one for one in lines if one.startswith(("FAILED", "ERROR"))]
            raise Stopped("failed", "; ".join([lines[-1] if lines else "no output", *failed])) from None

    def shared(self):
        self.needs_device()
        with tempfile.TemporaryDirectory() as none:  # so that no server of MPS is found
            more = {"CUDA_MPS_PIPE_DIRECTORY": none, "SYNKHRONOS_NCCL_SHARED_GPU": "0"}
            said = self.program("shared", "ask_for_nccl.py", self.device, self.device, **more)
        if "no NCCL" not in said.splitlines():
            raise Stopped("failed", "two ranks on a GPU have used NCCL, without being asked to")
        return {"collectives": "over shared memory"}

    def nccl(self):
        self.needs_device()
        if not self.device.startswith("cuda"):
            raise Stopped("not run", f"{self.device} is no CUDA device")
        libraries = self.report["installed"]["libraries"]
        if not any("nccl" in name for name in libraries["found"]) and not self.options.emulated:
            raise Stopped("not run", "NCCL was not found")
        said = self.program("nccl", "run_module.py", "conform", "nccl", self.device)
        passed = [line.split()[1] for line in said.splitlines() if line.startswith("passed")]
        if not passed:
            raise Stopped("failed", "no check has passed")
        return {"checks passed": len(passed)}

    def mnist(self):
        return self.compared("mnist", *((16, 3) if self.options.small else (500, 30)))

    def resnet(self):
        return self.compared("resnet", *((16, 2) if self.options.small else (128, 10)))

    def compared(self, name, size, count):
        """Take the same steps with one rank and with two on the device; compare the losses."""
        self.needs_device()
        self.needs("lasagne")
        found, losses = {}, []
        for ranks in (1, 2):
            devices = [self.device] * ranks
            said = self.program(f"{name}-{ranks}", "step_times.py", name, size, count, *devices)
            facts = json.loads(last_of(said))
            losses.append(facts["losses"])
            found[f"seconds per step, {ranks} rank(s)"] = facts["seconds"]
            found[f"seconds of the first step, {ranks} rank(s)"] = facts["first"]
        found["losses"] = losses
        for one, other in zip(*losses):
            if abs(one - other) > TOLERANCE * max(abs(one), 1e-3):
                raise Stopped("failed", f"losses of one rank and of two differ: {losses}")
        return found

    def jax(self):
        python = next((path for path in self.pythons() if {"jax", "pytensor"} <= {*path[1]}), None)
        if python is None:
            looked = ", ".join(path for path, _ in self.pythons())
            raise Stopped(
                "not run",
                f"no Python has both JAX and PyTensor; looked at {looked}; name others by --python",
            )
        device = f"jax:{self.device}" if self.device.startswith("cuda") else "jax:cpu"
        if self.options.emulated:
            device = "jax:cpu"  # the emulation has no kernels of XLA
        elif device != "jax:cpu" and not any("plugin" in name for name in python[1]):
            raise Stopped("not run", f"JAX of {python[0]} has no plugin for CUDA")
        variables = {"SYNKHRONOS_COMPILER": "pytensor"}
        said = self.program("jax", "jax_steps.py", device, python=python[0], **variables)
        return json.loads(last_of(said))

    def pythons(self):
        installed = self.report["installed"]
        every = [(sys.executable, installed["python"])]
        every += [(path, installed[path]) for path in self.options.python]
        return [(path, has if isinstance(has, dict) else {}) for path, has in every]


def short(line, environment=None):
    """Return the output of a command that takes a moment, or why there is none."""
    try:
        done = subprocess.run(
            line, capture_output=True, text=True, timeout=60, env=environment, errors="replace"
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"could not run: {error}"
    said = done.stdout.strip()
    return said if not done.returncode else f"ended with {done.returncode}: {said or done.stderr[-500:]}"


def parsed(text):
    try:
        return json.loads(text.splitlines()[-1])
    except (ValueError, IndexError):
        return text


def last_of(text):
    return next((line for line in reversed(text.splitlines()) if line.strip()), "")


def last_line(path):
    return last_of(path.read_text(errors="replace")) or "it has written nothing"


def mps_is_on():
    for file in Path("/proc").glob("[0-9]*/comm"):
        try:
            if file.read_text().startswith("nvidia-cuda-mps"):
                return True
        except OSError:
            pass  # it has ended
    return False


def end(process):
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            break
        try:
            process.wait(_DYING)
        except subprocess.TimeoutExpired:
            continue
    process.wait()


def main(arguments=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--device", default="cuda0", help="a name of Theano's (default: cuda0)")
    parser.add_argument("--probe", help="a command for the first part")
    parser.add_argument("--budget", type=float, default=BUDGET, help="seconds for all parts")
    parser.add_argument("--patience", type=float, default=1.0, help="a factor for the limits of parts")
    parser.add_argument(
        "--python", action="append", default=[], metavar="PATH", help="another Python, to find JAX"
    )
    parser.add_argument("--parts", default=",".join(LIMITS), help="only these, in this order")
    parser.add_argument("--small", action="store_true", help="networks for a slow device")
    parser.add_argument("--tests", default="tests/gpu", help="arguments of pytest")
    parser.add_argument(
        "--emulated", action="store_true", help="the libraries are emulated, and JAX uses the CPU"
    )
    options = parser.parse_args(arguments)
    options.parts = options.parts.split(",")
    unknown = [one for one in options.parts if one not in LIMITS]
    if unknown:
        parser.error(f"--parts: expected {', '.join(LIMITS)}, got {unknown[0]}")
    options.folder.mkdir(parents=True, exist_ok=True)
    checks = Checks(options.folder.resolve(), options)
    failures = checks.run()
    sys.stdout.write((checks.folder / "report.txt").read_text())
    return failures


if __name__ == "__main__":
    sys.exit(main())
