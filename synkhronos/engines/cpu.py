"""The engine of the chosen compiler on NumPy arrays."""

from __future__ import annotations

from synkhronos.engines.base import Engine
from synkhronos.host import compiler

CpuEngine: type[Engine]

if compiler.NAME == "pytensor":
    from synkhronos.engines.pytensor.engine import PyTensorEngine

    CpuEngine = PyTensorEngine
else:
    from synkhronos.engines.theano.engine import TheanoCpuEngine

    CpuEngine = TheanoCpuEngine
