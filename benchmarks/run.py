"""Runs the rows, each in a separate process, and writes results/.

    python benchmarks/run.py                  # all rows
    python benchmarks/run.py call start       # some
    python benchmarks/run.py --plot --quick   # with pictures; few repetitions
    python benchmarks/run.py --devices cuda0 cuda1 --results benchmarks/results/H200
    .venv-pytensor/bin/python benchmarks/run.py   # the rows of PyTensor, which has its own environment
    .venv-pymc/bin/python benchmarks/run.py   # and of PyMC

It writes results/ROW.json for each row and, with ``--plot``, results/ROW.png. All tables are written to
results/README.md and, for the documentation, to results/tables.rst.
"""

import argparse
import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import common

from tqdm import tqdm

HERE = Path(__file__).resolve().parent
DESCRIBED = {
    "cpu": "CPU",
    "cores": "cores",
    "memory_gib": "memory, GiB",
    "kernel": "Linux",
    "python": "Python",
    "numpy": "NumPy",
    "theano": "Theano",
    "pytensor": "PyTensor",
    "pymc": "PyMC",
    "blas": "BLAS",
    "devices": "devices",
}
# Published figures, and the line of a row that has the same figure for this machine.
_SYNKHRONOS = "Synkhronos 2017, 2 GTX 1080"
_THEANO_MPI = "Theano-MPI, 2 of the GPUs of Tesla K80s, ResNet-50, batch 64 each"
_PLATOON = "Platoon, 2 of the GPUs of 2 K80s against 1, LSTM"
PUBLISHED = [
    (
        "MNIST CNN, parameters all-reduced and loss collected each step",
        f"0.72 s / 0.66 s = 1.1 × ({_SYNKHRONOS})",
        "step_small",
        "synkhronos, 2 ranks",
    ),
    (
        "MNIST CNN, neither (here: two independent processes)",
        f"0.72 s / 0.46 s = 1.6 × ({_SYNKHRONOS})",
        "step_small",
        "untouched / ideal",
    ),
    (
        "ResNet-50, synchronized each step",
        f"163.15 s / (80.09 s + 0.81 s) = 2.02 × ({_THEANO_MPI})",
        "step_large",
        "synkhronos, 2 ranks",
    ),
    (
        "ResNet-50, without communication",
        f"163.15 s / 80.09 s = 2.04 × ({_THEANO_MPI})",
        "step_large",
        "untouched / ideal",
    ),
    (
        "EASGD every 10 steps, 2 processes against 1 (here: MNIST CNN)",
        f"912 s / 477 s = 1.91 × ({_PLATOON})",
        "rules",
        "CNN: EASGD, 2 ranks / 1 rank",
    ),
]
# Rows that use devices, with two ranks. The other rows measure the host.
ON_DEVICES = ["all_reduce", "call", "observing", "sliced_evaluation", "step_large", "step_small"]
NOT_ROWS = {
    "commands", "common", "run", "seed_models", "simulated", "torch_networks", "torch_steps",
    "training_steps",
}  # fmt: skip
# What rows need that has an environment of its own; the other rows need Theano.
NEEDS = {"pymc_rows": "pymc", "step_pytensor": "pytensor"}


def main():
    rows = {path.stem for path in HERE.glob("*.py")} - NOT_ROWS
    options = parse(sorted(row for row in rows if find_spec(NEEDS.get(row, "theano"))))
    options.results.mkdir(parents=True, exist_ok=True)
    failed = []
    for row in (bar := tqdm(options.rows, unit="row")):
        bar.set_description(row)
        done = run(row, options)
        with tqdm.external_write_mode():
            print(done.stdout, flush=True)
            if done.returncode:
                failed.append(row)
                print(f"{row} failed:\n{done.stderr}", file=sys.stderr)
    write_tables(options.results)
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


def parse(rows):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("rows", nargs="*", metavar="ROW", help=f"default: {' '.join(rows)}")
    parser.add_argument("--plot", action="store_true", help="draw the results, too")
    parser.add_argument("--quick", action="store_true", help="few repetitions: to try it out")
    parser.add_argument("--devices", nargs="+", help="one device per rank, such as: cuda0 cuda1")
    parser.add_argument(
        "--results", type=Path, default=HERE / "results", metavar="FOLDER", help="to write to"
    )
    options = parser.parse_args()
    common.check_can_draw(parser, options)
    if options.devices:
        rows = ON_DEVICES
        if options.results == HERE / "results":
            parser.error("--devices: name a separate folder with --results")
    options.rows = options.rows or rows
    unknown = sorted({*options.rows} - {*rows})
    if unknown:
        parser.error(f"expected rows out of {', '.join(rows)}, got {', '.join(unknown)}")
    return options


def run(row, options):
    command = [sys.executable, str(HERE / f"{row}.py"), "--json", options.results / f"{row}.json"]
    if options.plot:
        command += ["--plot", options.results / f"{row}.png"]
    if options.quick:
        command.append("--quick")
    if options.devices:
        command += ["--devices", *options.devices]
    return subprocess.run(command, capture_output=True, text=True)


def write_tables(results):
    """Write one page with the tables of all results that are there."""
    records = [json.loads(path.read_text()) for path in sorted(results.glob("*.json"))]
    if not records:
        return
    page = [
        "# Results",
        "",
        "Written by `benchmarks/run.py`. Medians and quartiles over all turns; a ratio is the median "
        "of the ratios within each round of turns.",
        "",
        *describe(records[-1]["machine"]),
    ]
    for record in records:
        name = record["row"]
        quick = "**A quick run, not for comparison.** " if record["quick"] else ""
        page += ["", f"## {name}: {record['title']}", "", common.markdown_table(record["lines"]), ""]
        if (results / f"{name}.png").exists():
            page += [f"![{name}]({name}.png)", ""]
        page += [f"- {note}" for note in record["notes"]]
        page.append(f"- {quick}{common.circumstances(record)}")
        if record["machine"] != records[-1]["machine"]:
            page += ["", "On another machine, or with other software:", "", *describe(record["machine"])]
    (results / "README.md").write_text("\n".join(page) + "\n")
    (results / "tables.rst").write_text("\n".join(write_rst(records, results)) + "\n")


def write_rst(records, results):
    """Return the lines of the tables as ``docs/scaling.rst`` includes them."""
    machine = records[-1]["machine"]
    page = [".. Written by benchmarks/run.py.", ""]
    page += [f":{title}: {machine[key]}" for key, title in DESCRIBED.items() if key in machine]
    page += ["", *_beside({record["row"]: record["lines"] for record in records})]
    for record in records:
        name = record["row"]
        title = f"{name.replace('_', ' ')}: {record['title']}"
        page += [
            "",
            title,
            "^" * len(title),
            "",
            *_rst_table([common.HEADINGS, *map(common.cells, record["lines"])]),
            "",
        ]
        if (results / f"{name}.png").exists():
            # The path as seen from the page that includes this.
            page += [f".. image:: ../benchmarks/results/{name}.png", f"   :alt: {title}", ""]
        notes = [*record["notes"], common.circumstances(record)]
        if record["quick"]:
            notes.append("a quick run, not for comparison")
        if record["machine"] != machine:
            notes.append("on another machine, or with other software: " + _in_words(record["machine"]))
        page += [f"- {_as_text(note)}" for note in notes]
    return page


def _beside(lines):
    """Return a table of published results and ours for the same quantities."""
    rows = [("what", "published", "here")]
    for what, theirs, row, name in PUBLISHED:
        for line in [one for one in lines.get(row, ()) if one["what"] == name]:
            ratio = line["ratio"] if line["ratio"] is not None else line["median"]
            rows.append((what, theirs, f"{ratio:.2f} × ({row.replace('_', ' ')})"))
    if len(rows) == 1:
        return []
    title = "Comparison with published results"
    return [
        title,
        "^" * len(title),
        "",
        "The published results are from GPUs, ours from this machine's cores. Each compares two "
        "processes with one process on the same hardware, so the ratios show how well a second "
        "processor is used, and not which system is faster.",
        "",
        *_rst_table(rows),
    ]


def _rst_table(cells):
    rows = [[_as_text(cell) for cell in row] for row in cells]
    table = [".. list-table::", "   :header-rows: 1", ""]
    for row in rows:
        table += [
            f"   {'-' if column else '* -'} {cell}".replace("   -", "     -").rstrip()
            for column, cell in enumerate(row)
        ]
    return table


def _as_text(text):
    """Escape characters with a special meaning in reStructuredText."""
    return "".join(f"\\{one}" if one in "*`|_\\" else one for one in text)


def _in_words(machine):
    return ", ".join(f"{title} {machine[key]}" for key, title in DESCRIBED.items() if key in machine)


def describe(machine):
    """Return the lines of a table of the machine."""
    rows = [f"| {title} | {machine[key]} |" for key, title in DESCRIBED.items() if key in machine]
    return ["| machine | |", "| --- | --- |", *rows]


if __name__ == "__main__":
    main()
