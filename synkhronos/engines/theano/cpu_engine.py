"""Theano on NumPy arrays."""

from synkhronos.engines.theano.engine import TheanoEngine


class TheanoCpuEngine(TheanoEngine):
    """Theano 1.0.5 with its C code, on one or more cores of this machine."""

    survives_fork = True

    def setup(self, device, announce=True):
        if device != "cpu":
            raise ValueError(f"device: the engine of Theano on NumPy runs on 'cpu', got {device!r}")
