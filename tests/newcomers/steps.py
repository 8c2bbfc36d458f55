"""What the paths of newcomers have in common: the commands and examples of the pages, as they are shown.

    python3 tests/newcomers/readme.py FOLDER                    # as root in a bare Debian
    python3 tests/newcomers/readme.py FOLDER --python PYTHON    # in an environment that exists

The first form installs what the pages say, in a clone of this project in the folder.
"""

import argparse
import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

if __name__ == "__main__":
    raise SystemExit(__doc__)


def block(page, words):
    """Return the lines of the first indented block of a page with these words."""
    found = re.findall(r"^\n((?: {4}.*\n|\n)+)", (ROOT / page).read_text(), re.MULTILINE)
    lines = next((one for one in found if words in one), None)
    assert lines is not None, f"{page}: no commands with {words}"
    return [line.strip() for line in lines.splitlines() if line.strip()]


def examples(page):
    """Return the examples of a page, each as its code and the output that is shown."""
    body = r"\n\n((?: {4}.*\n|\n)+)"
    pattern = rf"^\.\. code-block:: python{body}\.\. code-block:: text{body}"
    found = re.findall(pattern, (ROOT / page).read_text(), re.MULTILINE)
    assert found, f"{page}: no examples"
    return [tuple(re.sub("^ {4}", "", one, flags=re.MULTILINE).strip() for one in two) for two in found]


class Newcomer:
    """Somebody who follows the pages in a folder, where everything is written.

    The Python may be that of an environment that has everything; else `install` makes one.
    """

    def __init__(self, folder, python=None):
        self.folder, self.project, self._python = folder, folder / "synkhronos", python
        self._environment = {**os.environ, "PYTHONPATH": str(ROOT)} if python else dict(os.environ)

    def install(self, *commands):
        """Follow blocks of commands, each given by a page and words in it, if no Python is given."""
        found = [line for page, words in commands for line in block(page, words)]
        if self._python is None:
            self._call("git", "clone", "--quiet", str(ROOT), str(self.project))
            lines = [line.replace("apt-get install", "apt-get install --yes") for line in found]
            self._call("sh", "-ec", "\n".join(lines), cwd=self.project)
            self._python = str(self.project / "env" / "bin" / "python")

    def run(self, *arguments):
        """Run Python in the folder, and return what it has printed, on stdout and on stderr."""
        return self._call(self._python, *arguments)

    def run_script(self, name, code):
        """Write a script and run it; return what it has printed, on stdout and on stderr."""
        (self.folder / name).write_text(code)
        return self.run(name)

    def _call(self, *words, cwd=None):
        print("$", *words, flush=True)
        done = subprocess.run(
            words, cwd=cwd or self.folder, env=self._environment, capture_output=True, text=True
        )
        assert done.returncode == 0, f"{done.stdout}{done.stderr}"
        return done.stdout.strip(), done.stderr


def changed(code, *replacements):
    """Return a script in which each text has been replaced by another."""
    for old, new in replacements:
        assert code.count(old) == 1, old
        code = code.replace(old, new)
    return code


def follow(path, description):
    """Follow a path, a function of a `Newcomer`, with the arguments of the command line."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("folder", type=Path, help="an empty folder")
    parser.add_argument("--python", help="of an environment that exists; else one is made")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    try:
        path(Newcomer(options.folder.resolve(), options.python))
    except AssertionError as error:
        sys.exit(f"the path ends here: {error}")
    print("the path was followed to its end")
