"""Metadata of the package; the linter's and the tests' settings are in ``pyproject.toml``.

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

from setuptools import find_packages, setup  # noqa: E402

VERSION = re.search(
    r'^__version__ = "(.+)"$', (HERE / "synkhronos" / "_version.py").read_text(), re.MULTILINE
)
# Either compiler is enough, and an extra can only add requirements, so neither is required without one.
# pip cannot build Theano on Python 3.12 and newer. There its extra installs only what Theano needs, and
# the library, when it is imported, names the command that installs Theano.
COMPILERS = ("theano", "pytensor")
EXTRAS = {
    "test": "tests",
    **{name: name for name in (*COMPILERS, "jax", "pymc", "demos", "keras", "loading", "mpi")},
    **{name: name for name in ("bench", "docs", "tensorboard", "top")},
}


def read_requirements(name):
    """Return the lines of a file in ``requirements``, without comments."""
    lines = (HERE / "requirements" / f"{name}.in").read_text().splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def read_description():
    """Return the README without pictures and links to files, which there are only in the source code."""
    text = (HERE / "README.rst").read_text(encoding="utf-8")
    text = re.sub(r"^\.\. image:: (?!https?:).*\n(?: +.*\n)*\n", "", text, flags=re.MULTILINE)
    return re.sub(r"`([^`<]+?)\s+<(?!https?:)[^`>]+>`_", r"\1", text)


setup(
    name="Synkhronos",
    version=VERSION.group(1),
    description="Data-parallel Theano on all the cores or GPUs of one machine or several",
    long_description=read_description(),
    long_description_content_type="text/x-rst",
    author="The Synkhronos developers",
    license="MIT",
    license_files=["LICENSE"],
    keywords=["Theano", "PyTensor", "data parallelism", "multiprocessing", "GPU", "deep learning"],
    platforms=["Linux"],
    classifiers=[
        "Development Status :: 3 - Alpha",
        "Environment :: Console",
        "Environment :: GPU :: NVIDIA CUDA",
        "Framework :: IPython",
        "Intended Audience :: Developers",
        "Intended Audience :: Education",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3 :: Only",
        "Programming Language :: Python :: 3.8",
        "Programming Language :: Python :: 3.9",
        "Programming Language :: Python :: 3.10",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Programming Language :: Python :: 3.14",
        "Programming Language :: Python :: Implementation :: CPython",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Topic :: Scientific/Engineering :: Mathematics",
        "Topic :: Software Development :: Libraries :: Python Modules",
        "Topic :: System :: Distributed Computing",
        "Typing :: Typed",
    ],
    packages=find_packages(include=["synkhronos", "synkhronos.*"]),
    package_data={"synkhronos": ["py.typed"], "synkhronos.engines.theano.kernels": ["*.h"]},
    python_requires=">=3.8",
    install_requires=read_requirements("library"),
    extras_require={extra: read_requirements(file) for extra, file in EXTRAS.items()},
    entry_points={
        "console_scripts": [
            "synkhronos = synkhronos.__main__:main",
            "tmlauncher = synkhronos.compat.theanompi.launcher:main",
            "platoon-launcher = synkhronos.compat.platoon.launcher:main",
        ]
    },
    zip_safe=False,
)
