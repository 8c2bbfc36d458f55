"""Common code of the rows: contestants that take turns, tables, JSON, plots, the machine.

A row is a script that ends with ``common.main(__doc__, measure, draw)``, where

``measure(options)``
    measures and returns a `Result`;
``draw(figure, result)``
    draws it; `result` is a dictionary, the contents of the JSON file.

``run.py`` finds the rows: all scripts in this folder except its ``NOT_ROWS``.

Each contestant of a row runs in its own processes. All contestants sleep except the one whose turn it
is, and the turns are repeated in rounds, so that a disturbance of the machine affects all of them
equally.
"""

if __name__ == "__main__":
    raise SystemExit(f"{__doc__}\nScripts use this file; run run.py.")

import argparse
import contextlib
import dataclasses
import importlib.metadata
import importlib.util
import itertools
import json
import multiprocessing
import os
import platform
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import Any, Dict, List, Optional

import numpy as np
import psutil
from threadpoolctl import threadpool_info
from tqdm import tqdm

ROOT = Path(__file__).resolve().parent.parent

# Contestants and other child processes find the package even if it is not installed.
for _folder in (str(ROOT), str(ROOT / "benchmarks")):
    if _folder not in sys.path:
        sys.path.insert(0, _folder)
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))

# Theano's devices, one per rank; contestants inherit the variable. Empty for the CPU.
_DEVICES = "BENCHMARK_DEVICES"

UNITS = {"µs": 1e6, "ms": 1e3, "s": 1.0}
_ASK_BLAS_OF_CONTESTANT = "BLAS"  # asks a contestant which BLAS it has loaded
_blas_of_contestants: Dict[str, str] = {}  # by name, of the contestants that have ended
_PAUSE = 0.1  # seconds before a turn, in which threads of BLAS that still poll fall asleep


# The result of a row


@dataclasses.dataclass
class Line:
    """One line of a row's table.

    `samples` are numbers in `unit`, and empty for a peer that is not installed. `ratios` are formed
    within each round, relative to the line named by `of`. `goal` is a text; `reached` is None if there
    is no goal.
    """

    what: str
    unit: str
    samples: List[float]
    ratios: Optional[List[float]] = None
    of: str = ""
    goal: str = ""
    reached: Optional[bool] = None

    @property
    def median(self):
        return float(np.median(self.samples)) if self.samples else None

    @property
    def ratio(self):
        return None if self.ratios is None else float(np.median(self.ratios))


@dataclasses.dataclass
class Result:
    """The lines of a row's table, in the order in which they are printed, and notes below it.

    `extra` is additional data for the plot, in a form that JSON can represent.
    """

    title: str
    lines: List[Line]
    notes: List[str] = dataclasses.field(default_factory=list)
    extra: Dict[str, Any] = dataclasses.field(default_factory=dict)


def line(what, unit, seconds, against=None, of="", at_most=None, at_least=None):
    """Return the `Line` of samples in seconds, compared round by round with the samples of another.

    With `at_least` the ratio is a speed-up, ``against / seconds``; else it is ``seconds / against``.
    """
    seconds = np.asarray(seconds, float)
    made = Line(what, unit, list(seconds * UNITS[unit]))
    if against is not None:
        against = np.asarray(against, float)
        made.ratios = list(seconds / against if at_least is None else against / seconds)
        made.of = of
    if at_most is not None:
        made.goal, made.reached = f"≤ {at_most:g}", made.ratio <= at_most
    if at_least is not None:
        made.goal, made.reached = f"≥ {at_least:g}", made.ratio >= at_least
    return made


# Contestants


class Contestant:
    """One way to do the work, in a separate process that sleeps until its turn.

    Parameters
    ----------
    prepare : generator function of a module
        Called in the process. It yields a function once; the code after the ``yield`` cleans up.
    *arguments
        Passed to `prepare`.
    environment : dict, optional
        Variables to set in the process before anything is imported.
    method : {"spawn", "fork"}
        A process that is forked has what a contestant has prepared before it makes further ones.
    """

    def __init__(self, prepare, *arguments, environment=None, method="spawn"):
        self._prepare, self._arguments = prepare, arguments
        self._variables, self._method = environment or {}, method
        self._process = None

    def start(self):
        """Start the process, and wait until it is prepared."""
        context = multiprocessing.get_context(self._method)
        self._connection, other = context.Pipe()
        self._process = context.Process(target=_contest, args=(other, self._prepare, self._arguments))
        with _environment(self._variables):
            self._process.start()
        other.close()
        self.result()

    def begin(self, *arguments):
        """Start the function; `result` waits for it."""
        self._connection.send(arguments)

    def result(self):
        """Return what the function returned."""
        try:
            failure, value = self._connection.recv()
        except EOFError:
            raise RuntimeError("a contestant died; see above") from None
        if failure:
            raise RuntimeError(f"a contestant failed:\n{failure}")
        return value

    def __call__(self, *arguments):
        self.begin(*arguments)
        return self.result()

    def blas(self):
        """Return the name, the version and the kernels of the BLAS that the process has loaded."""
        self._connection.send(_ASK_BLAS_OF_CONTESTANT)
        return self.result()

    def close(self):
        """Let the process clean up and end. Return its exit code."""
        if self._process is None:
            return 0
        with contextlib.suppress(OSError):
            self._connection.send(None)
        self._process.join(120)  # at the end, Theano looks through its cache
        if self._process.is_alive():
            self._process.kill()
        self._process.join()
        return self._process.exitcode


def _contest(connection, prepare, arguments):
    sys.modules["mpi4py"] = None  # Theano imports it if it is installed, which initializes MPI
    try:
        generator = prepare(*arguments)
        work = next(generator)
        connection.send((None, None))
        while True:
            asked = connection.recv()
            if asked is None:
                break
            if asked == _ASK_BLAS_OF_CONTESTANT:
                connection.send((None, _blas_in_words(threadpool_info())))
            else:
                connection.send((None, work(*asked)))
        next(generator, None)
    except EOFError:
        pass
    except BaseException:
        connection.send((traceback.format_exc(), None))
        raise


@contextlib.contextmanager
def _environment(changes):
    before = {name: os.environ.get(name) for name in changes}
    os.environ.update(changes)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextlib.contextmanager
def contestants(**made):
    """Start the contestants one by one, because Theano compiles one at a time; end them at the exit."""
    try:
        for contestant in tqdm(made.values(), "getting ready", leave=False, disable=None):
            contestant.start()
        yield made
        _blas_of_contestants.update({name: one.blas() for name, one in made.items()})
    finally:
        codes = {name: contestant.close() for name, contestant in made.items()}
    if any(codes.values()):
        raise RuntimeError(f"contestants that did not end well, by exit code: {codes}; see above")


def take_turns(turns, rounds, title):
    """Call each of `turns`, a dictionary of functions, `rounds` times, in changing order.

    Returns
    -------
    dict
        The return values of each function, by round.
    """
    results = {name: [] for name in turns}
    names = list(turns)
    bar = tqdm(total=rounds * len(names), desc=title, leave=False, disable=None)
    for number in range(rounds):
        # Alternating order: nobody is always first, or always after the same contestant.
        for name in names if number % 2 == 0 else names[::-1]:
            time.sleep(_PAUSE)
            results[name].append(turns[name]())
            bar.update()
    bar.close()
    return results


def seconds_of(call, times, group=1, warm_up=None):
    """Return the seconds of a call: the median over short groups, which is robust to disturbances."""
    for _ in range(max(1, times // 5) if warm_up is None else warm_up):
        call()
    groups = []
    for _ in range(max(1, times // group)):
        start = time.perf_counter()
        for _ in range(group):
            call()
        groups.append((time.perf_counter() - start) / group)
    return float(np.median(groups))


def pin(processes):
    """Bind each process to its own core, as an idle system does by itself.

    A busy system may put both on the same core, where waking up is only a context switch.
    """
    for process, core in zip(processes, itertools.cycle(sorted(os.sched_getaffinity(0)))):
        os.sched_setaffinity(process, {core})


def worker_ids():
    """Return the process ids of the library's workers, by rank."""
    children = multiprocessing.active_children()
    workers = [child for child in children if child.name.startswith("synkhronos-")]
    return [child.pid for child in sorted(workers, key=lambda child: int(child.name.split("-")[1]))]


def load_demo(folder, module):
    """Return a module of a folder of ``demos``."""
    place = ROOT / "demos" / folder
    sys.path.append(str(place))  # it may import other modules of the folder
    spec = importlib.util.spec_from_file_location(f"{folder}_{module}", place / f"{module}.py")
    demo = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(demo)
    return demo


def devices():
    """Return the devices that the rows run on, by rank; empty for the CPU."""
    return os.environ.get(_DEVICES, "").split()


def fork(ranks):
    """Start a world of this many ranks on the devices that the rows run on."""
    import synkhronos as synk

    named = devices()
    if named and len(named) != ranks:
        raise SystemExit(f"--devices: this row needs {ranks}, one per rank, got {named}")
    synk.fork(devices=named or ["cpu"] * ranks)


def use_device(number=0):
    """Let plain Theano in this process use the device of a rank."""
    if devices():
        import theano.gpuarray

        theano.gpuarray.use(devices()[number])


ONE_THREAD = {name: "1" for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")}


# Tables


HEADINGS = ("what", "median", "quartiles", "ratio", "goal", "reached")


def cells(one):
    """Return the cells of one line, a dictionary from the JSON file."""
    if not one["samples"]:
        return one["what"], "not installed", "", "", one["goal"], ""
    low, high = np.percentile(one["samples"], (25, 75))
    spread = f"{number(low)} – {number(high)}" if len(one["samples"]) > 1 else ""
    ratio = "" if one["ratio"] is None else f"{one['ratio']:.3g} × {one['of']}".strip()
    reached = {None: "", True: "yes", False: "NO"}[one["reached"]]
    return one["what"], f"{number(one['median'])} {one['unit']}", spread, ratio, one["goal"], reached


def number(value):
    """Return a number with at least three digits, without an exponent."""
    size = abs(value)
    digits = 0 if size >= 100 else 1 if size >= 10 else 2 if size >= 1 else 3
    return f"{value:.{digits}f}"


def plain_table(lines):
    """Return the table as text."""
    rows = [HEADINGS, *map(cells, lines)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEADINGS))]
    text = [
        "  ".join(
            cell.rjust(width) if column in (1, 2) else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths))
        ).rstrip()
        for row in rows
    ]
    return "\n".join([text[0], "  ".join("-" * width for width in widths), *text[1:]])


def markdown_table(lines):
    """Return the table as Markdown."""
    rows = [HEADINGS, ("---", "---:", "---:", "---", "---", "---"), *map(cells, lines)]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


# The machine


def machine():
    """Describe the machine and the installed software that affects speed."""
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "kernel": platform.release().split("-")[0],
        "python": platform.python_version(),
        "numpy": np.__version__,
        **_compiler(),
        "blas": _blas(),
        **({"devices": ", ".join(_device_names())} if devices() else {}),
    }


def _compiler():
    """Return the versions of the graph compiler of this environment, and of PyMC."""
    if importlib.util.find_spec("theano"):
        return {"theano": importlib.metadata.version("Theano")}
    installed = filter(importlib.util.find_spec, ("pytensor", "pymc"))
    return {name: importlib.metadata.version(name) for name in installed}


def _device_names():
    code = "import pygpu, sys\nfor name in sys.argv[1:]: print(pygpu.init(name).devname)"
    command = [sys.executable, "-c", code, *devices()]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()


def _cpu_model():
    with contextlib.suppress(OSError):
        for text in Path("/proc/cpuinfo").read_text().splitlines():
            if text.startswith("model name"):
                return text.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


_ASK_BLAS = """
import json, synkhronos, threadpoolctl
from synkhronos.host.compiler import NAME
package = __import__(NAME + ".tensor")
x = package.tensor.fmatrix()
f = package.function([x], package.tensor.dot(x, x), mode="FAST_RUN")  # loads what it is linked to
print(json.dumps(threadpoolctl.threadpool_info()))
"""


def _blas():
    asked = subprocess.run([sys.executable, "-c", _ASK_BLAS], capture_output=True, text=True)
    if asked.returncode:
        return "unknown"
    return _blas_in_words(json.loads(asked.stdout.splitlines()[-1]))


def _blas_in_words(libraries):
    libraries = [one for one in libraries if one["user_api"] == "blas"]
    # NumPy and SciPy each include a BLAS; Theano's is outside of Python's packages.
    own = [one for one in libraries if "site-packages" not in one["filepath"]] or libraries
    return ", ".join(
        f"{one['internal_api']} {one['version']} ({one.get('architecture', '?')}, "
        f"{one.get('threading_layer', '?')})"
        for one in own
    )


# A row as a script


def main(description, measure, draw, add_options=lambda parser: None):
    """Run the row that calls this: measure, print, draw."""
    name = Path(sys.argv[0]).stem
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    parser.add_argument("--plot", metavar="FILE", help="draw the result")
    parser.add_argument("--json", metavar="FILE", help="write the result")
    parser.add_argument("--quick", action="store_true", help="few repetitions: to try it out")
    parser.add_argument("--devices", nargs="+", help="one device per rank, such as: cuda0 cuda1")
    parser.add_argument(
        "--redraw", metavar="FILE", help="print and draw this JSON file; measure nothing"
    )
    add_options(parser)
    options = parser.parse_args()
    check_can_draw(parser, options)
    if options.devices:
        os.environ[_DEVICES] = " ".join(options.devices)
    if options.redraw:
        record = json.loads(Path(options.redraw).read_text())
    else:
        record = _measure(name, measure, options)
    report(record)
    if options.json:
        text = json.dumps(record, indent=1, ensure_ascii=False, default=float)
        Path(options.json).write_text(text + "\n")
    if options.plot:
        picture(draw, record, options.plot)


def check_can_draw(parser, options):
    """End with a message, before anything is measured, if the result could not be drawn."""
    if options.plot and importlib.util.find_spec("matplotlib") is None:
        parser.error(
            "--plot: matplotlib is not installed; install it, or leave out --plot, and draw afterwards "
            "with --redraw and the Python of another environment"
        )


def _measure(name, measure, options):
    described = machine()
    before, began = os.getloadavg(), time.monotonic()
    date = time.strftime("%Y-%m-%d %H:%M %Z")
    result = measure(options)
    lines = [
        {
            "what": one.what,
            "unit": one.unit,
            "median": one.median,
            "ratio": one.ratio,
            "of": one.of,
            "goal": one.goal,
            "reached": None if one.reached is None else bool(one.reached),
            "samples": [float(f"{sample:.5g}") for sample in one.samples],
        }
        for one in result.lines
    ]
    return {
        "row": name,
        "title": result.title,
        "date": date,
        "quick": options.quick,
        "load_before": [round(load, 2) for load in before],
        "load_after": [round(load, 2) for load in os.getloadavg()],
        "seconds": round(time.monotonic() - began),
        "machine": described,
        "blas": dict(_blas_of_contestants),
        "lines": lines,
        "notes": result.notes,
        "extra": result.extra,
    }


def report(record):
    """Print a row's result."""
    quick = ", quick: not for comparison" if record["quick"] else ""
    print(f"{record['row']}: {record['title']}\n")
    print(plain_table(record["lines"]))
    print()
    for note in record["notes"]:
        print(f"- {note}")
    if record.get("blas"):  # older records lack it
        print(f"- BLAS: {blas_of_contestants(record)}")
    print(f"- {circumstances(record)}{quick}", flush=True)


def circumstances(record):
    """Return when and under which load a row was measured."""
    load, after = record["load_before"][0], record["load_after"][0]
    return (
        f"{record['date']}, {record['machine']['cores']} cores, load average {load:.2f} before and "
        f"{after:.2f} after, {record['seconds']} s"
    )


def blas_of_contestants(record):
    """Return which BLAS each process that measured has loaded, with its version and kernels."""
    by_blas = {}
    for name, blas in record["blas"].items():
        by_blas.setdefault(blas, []).append(name)
    return "; ".join(f"{blas} in {', '.join(names)}" for blas, names in by_blas.items())


# Plots

COLOURS = {
    "synk": "#1f6fb4",
    "synk light": "#8fbfe3",
    "other": "#8a8f98",
    "other light": "#c9ccd1",
    "torch": "#c9733f",
    "good": "#2e8b57",
    "bad": "#c0392b",
    "goal": "#d9822b",
}


def picture(draw, record, filename):
    """Draw a row's result into a file."""
    import matplotlib
    from matplotlib.figure import Figure

    style = {
        "font.size": 10,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.titlesize": 11,
        "axes.titlelocation": "left",
        "axes.axisbelow": True,
        "axes.edgecolor": "#555555",
        "legend.frameon": False,
    }
    with matplotlib.rc_context(style):
        figure = Figure(figsize=(10, 4.2), layout="constrained")
        draw(figure, record)
        quick = ", quick run" if record["quick"] else ""
        figure.supxlabel(
            f"{record['machine'].get('devices', record['machine']['cpu'])}, "
            f"{record['machine']['cores']} cores, {record['date']}, "
            f"load {record['load_before'][0]:.1f} before{quick}",
            fontsize=7.5,
            color="#777777",
            x=0.995,
            ha="right",
        )
        figure.savefig(filename, dpi=130)


def find(record, what):
    """Return the line of that name."""
    return next(one for one in record["lines"] if one["what"] == what)


def bars_and_goals(axes, lines):
    """Draw the ratio of each line as a bar to the right, and its goal as a mark on it."""
    places = np.arange(len(lines))
    axes.barh(places, [one["ratio"] for one in lines], color=COLOURS["synk"])
    goals = [float(one["goal"].strip("≤≥ ")) for one in lines]
    axes.vlines(goals, places - 0.45, places + 0.45, COLOURS["goal"], linewidth=3, label="goal")
    axes.set_yticks(places, [one["what"] for one in lines])
    axes.invert_yaxis()
    axes.legend()


def bars(axes, lines, labels, colours, unit, right=1.3):
    """Draw lines as horizontal bars from the top: medians, whiskers at the quartiles, values."""
    places = range(len(lines))[::-1]
    medians = [one["median"] for one in lines]
    axes.barh(places, medians, color=colours, height=0.62)
    ends = []
    for place, one in zip(places, lines):
        low, high = np.percentile(one["samples"], (25, 75))
        axes.plot([low, high], [place, place], "|-", color="#333333", linewidth=1, markersize=7)
        box = {"boxstyle": "square,pad=0.1", "facecolor": "white", "edgecolor": "none"}
        value = f"{number(one['median'])} {unit}"
        write(axes, value, (high, place), (7, 0), va="center", fontweight="bold", bbox=box)
        ends.append(high)
    axes.set_yticks(list(places), labels)
    axes.tick_params(axis="y", length=0)
    axes.set_xlim(0, right * max(ends))
    axes.grid(axis="x", color="#e3e3e3")
    axes.set_xlabel(f"{unit} (medians; whiskers: quartiles)")


def write(axes, text, place, shift=(0, 4), **style):
    """Write a text at a place in the data's coordinates, shifted by some points."""
    return axes.annotate(text, place, xytext=shift, textcoords="offset points", **style)


def mark_goal(axes, value, place, text):
    """Mark a goal across the bar at `place`."""
    axes.plot([value] * 2, [place - 0.4, place + 0.4], "--", color=COLOURS["goal"])
    write(axes, text, (value, place + 0.4), (0, 2), ha="center", fontsize=8.5, color=COLOURS["goal"])
