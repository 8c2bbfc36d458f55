"""Metadata of the package; the linter's and the tests' settings are in ``pyproject.toml``."""

import re
import runpy
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent

# pip would say only that the version of Python is wrong, not what to do; and newer versions of Python
# come without setuptools.
ENVIRONMENT = runpy.run_path(str(HERE / "synkhronos" / "host" / "environment.py"))
COMPLAINT = ENVIRONMENT["python_complaint"](sys.version_info[:3])
if COMPLAINT:
    sys.exit(COMPLAINT)

from setuptools import find_packages, setup  # noqa: E402

VERSION = re.search(
    r'^__version__ = "(.+)"$', (HERE / "synkhronos" / "_version.py").read_text(), re.MULTILINE
)

DEMOS = ["Lasagne==0.1", "matplotlib", "pillow", "scikit-learn", "tqdm"]
KERAS = ["keras==2.3.1", "h5py", "pyyaml"]
TESTS = ["hypothesis", "ipykernel", "jupyter_client", "pytest", "pytest-xdist", "ruff"]

setup(
    name="Synkhronos",
    version=VERSION.group(1),
    description="Data-parallel Theano on all the cores or GPUs of one machine",
    long_description=(HERE / "README.rst").read_text(encoding="utf-8"),
    long_description_content_type="text/x-rst",
    license="MIT",
    classifiers=[
        "Development Status :: 3 - Alpha",
        "Intended Audience :: Science/Research",
        "License :: OSI Approved :: MIT License",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3 :: Only",
        "Topic :: Scientific/Engineering",
    ],
    packages=find_packages(include=["synkhronos", "synkhronos.*"]),
    package_data={"synkhronos": ["py.typed", "host/startup/*.py"]},
    python_requires=">=3.8,<3.12",
    install_requires=[
        "theano==1.0.5",
        "numpy>=1.23,<1.24",
        "scipy<1.11",
        "cloudpickle",
        "psutil",
        "threadpoolctl",
    ],
    extras_require={"demos": DEMOS, "keras": KERAS, "tests": [*TESTS, *DEMOS, *KERAS]},
    zip_safe=False,
)
