"""Compute on the CPU; fail if any library for devices was loaded."""

import sys
from pathlib import Path

import synkhronos  # noqa: F401
import theano
import theano.tensor as tt

x = tt.scalar()
theano.function([x], x + 1)(1)
assert "pygpu" not in sys.modules
maps = Path("/proc/self/maps").read_text()
assert not [name for name in ("libgpuarray", "libOpenCL", "libcuda.") if name in maps]
