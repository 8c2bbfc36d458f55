"""The NCCL calls of emulated GPUs, from the file ``EMULATED_CALLS``, which `emulator.cpp` writes."""

import os
from pathlib import Path


def calls():
    """Return the name and the number of items of each NCCL call of rank 0."""
    path = Path(os.environ["EMULATED_CALLS"])
    lines = path.read_text().split("\n") if path.exists() else []
    return [line.split()[1:3] for line in lines if line.startswith("0 ")]


def calls_of(work):
    """Return the NCCL calls of rank 0 in ``work()``."""
    before = len(calls())
    work()
    return calls()[before:]
