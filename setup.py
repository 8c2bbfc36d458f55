"""What ``pyproject.toml`` cannot have: the check of Python's version, and the long description.

The requirements are in ``requirements/*.in``. The files ``requirements/*.txt`` list the exact versions
that are tested, with everything that these need in turn.
"""

import re
import runpy
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent

# pip would say only that the version of Python is wrong, not what to do.
ENVIRONMENT = runpy.run_path(str(HERE / "synkhronos" / "host" / "environment.py"))
COMPLAINT = ENVIRONMENT["python_complaint"](sys.version_info[:3])
if COMPLAINT:
    sys.exit(COMPLAINT)

from setuptools import setup  # noqa: E402


def read_description():
    """Return the README without pictures and links to files, which there are only in the source code."""
    text = (HERE / "README.rst").read_text(encoding="utf-8")
    text = re.sub(r"^\.\. image:: (?!https?:).*\n(?: +.*\n)*\n", "", text, flags=re.MULTILINE)
    return re.sub(r"`([^`<]+?)\s+<(?!https?:)[^`>]+>`_", r"\1", text)


setup(
    long_description=read_description(),
    long_description_content_type="text/x-rst",
    license="MIT",  # versions of setuptools do not agree on its form in pyproject.toml
)
