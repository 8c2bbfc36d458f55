"""Runs the rows, each in a process of its own, and writes results/.

    python benchmarks/run.py                  # all rows
    python benchmarks/run.py call start       # some
    python benchmarks/run.py --plot --quick   # with pictures; few repetitions

For each row results/ROW.json, with ``--plot`` results/ROW.png, and a table of all in
results/README.md.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

import common

from tqdm import tqdm

HERE = Path(__file__).resolve().parent
NOT_ROWS = {"commands", "common", "run"}


def main():
    rows = sorted(path.stem for path in HERE.glob("*.py") if path.stem not in NOT_ROWS)
    options = parse(rows)
    options.results.mkdir(parents=True, exist_ok=True)
    failed = []
    for row in (bar := tqdm(options.rows or rows, unit="row")):
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
    parser.add_argument(
        "--results", type=Path, default=HERE / "results", metavar="FOLDER", help="to write to"
    )
    options = parser.parse_args()
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
            page += ["", "On another machine:", "", *describe(record["machine"])]
    (results / "README.md").write_text("\n".join(page) + "\n")


def describe(machine):
    """Return the lines of a table of the machine."""
    named = {
        "cpu": "CPU",
        "cores": "cores",
        "memory_gib": "memory, GiB",
        "kernel": "Linux",
        "python": "Python",
        "numpy": "NumPy",
        "theano": "Theano",
        "blas": "BLAS",
    }
    rows = [f"| {title} | {machine[key]} |" for key, title in named.items()]
    return ["| machine | |", "| --- | --- |", *rows]


if __name__ == "__main__":
    main()
