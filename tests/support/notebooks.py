"""Run notebooks in IPython, and compare or write their outputs.

``python tests/support/notebooks.py demos/introduction.ipynb`` writes the outputs of all cells to it.

The cells run in IPython's shell in this process, as Jupyter's kernel runs them. So no kernel has to be
started, and no package is needed that starts one (such as nbclient).
"""

import contextlib
import io
import json
import re
import sys
from pathlib import Path

NUMBER = re.compile(r" *\d+(\.\d+)?")  # with the spaces that align it
PICTURE = re.compile(r"base64,[\w+/=]+")


def read(path):
    """Return a notebook as a dictionary."""
    return json.loads(Path(path).read_text(encoding="utf-8"))


def code_cells(notebook):
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def run(notebook):
    """Run all cells; return the outputs of each, in the form that notebooks have.

    What is written to stderr is left out. A cell that raises an error ends the run with this error.
    """
    from IPython.core.interactiveshell import InteractiveShell

    shell = InteractiveShell.instance()
    results = []
    shell.display_trap.hook = lambda value: results.append(value)
    by_cell = []
    for number, cell in enumerate(code_cells(notebook), 1):
        results.clear()
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            done = shell.run_cell("".join(cell["source"]))
        done.raise_error()
        outputs = []
        if printed.getvalue():
            outputs.append({"name": "stdout", "output_type": "stream", "text": printed.getvalue()})
        for value in results:
            if value is not None:
                data, metadata = shell.display_formatter.format(value)
                outputs.append({"data": data, "execution_count": number, "metadata": metadata,
                                "output_type": "execute_result"})  # fmt: skip
        by_cell.append(outputs)
    return by_cell


def stored(notebook):
    """Return the outputs of each cell in the file, with lists of lines joined."""

    def joined(item):
        if isinstance(item, list) and all(isinstance(line, str) for line in item):
            return "".join(item)
        return {key: joined(value) for key, value in item.items()} if isinstance(item, dict) else item

    return [[joined(output) for output in cell["outputs"]] for cell in code_cells(notebook)]


def without_times(cell, outputs):
    """Return the outputs of a cell; numbers and pictures are left out if its tags say they are times."""
    text = json.dumps(outputs, sort_keys=True)
    if "times" not in cell["metadata"].get("tags", ()):
        return text
    return NUMBER.sub("0", PICTURE.sub("", text))


def write(path):
    """Run a notebook, and write the outputs into the file."""
    notebook = read(path)
    for number, (cell, outputs) in enumerate(zip(code_cells(notebook), run(notebook)), 1):
        cell["execution_count"] = number
        cell["outputs"] = outputs
    text = json.dumps(notebook, indent=1, ensure_ascii=False, sort_keys=True)
    Path(path).write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    write(sys.argv[1])
