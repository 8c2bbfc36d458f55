"""Conformance checks on each engine for the CPU."""

import pytest
from checks.engines import CHECKS
from compilers import NAME, RandomStreams, compiler, default_mode, tt

import synkhronos as synk
from specifications import engine as naive
from synkhronos.engines.cpu import CpuEngine


class NaiveLab:
    dtype = "float64"
    is_immutable = False
    times_operations = True
    fixable = (1, 4)

    ops = naive

    def __init__(self):
        self.engine = naive.NaiveEngine()

    def tensor(self, name, ndim):
        return naive.Tensor(name, self.dtype, ndim)

    def fixed(self, name, extents):
        return naive.Tensor(name, self.dtype, len(extents), extents)

    shared = staticmethod(naive.Shared)
    streams = staticmethod(naive.Streams)

    def uniform(self, streams, size):
        return streams.uniform(size)


class CompilerLab:
    dtype = "float64"
    is_immutable = False
    times_operations = True
    fixable = (1,) if NAME == "theano" else (1, 4)
    streams = staticmethod(RandomStreams)
    ops = synk.ops

    def __init__(self):
        self.engine = CpuEngine()

    def tensor(self, name, ndim):
        return self.fixed(name, (None,) * ndim)

    def fixed(self, name, extents):
        fixed = [one == 1 for one in extents] if NAME == "theano" else extents
        return tt.TensorType(self.dtype, fixed)(name)

    shared = staticmethod(compiler.shared)

    def uniform(self, streams, size):
        return streams.uniform(size=size)


LABS = [CompilerLab]
if NAME == "theano":
    from theano.sandbox.rng_mrg import MRG_RandomStreams

    class MrgLab(CompilerLab):
        streams = MRG_RandomStreams

    LABS.append(MrgLab)
else:
    from pytensor.compile.mode import get_default_mode
    from pytensor.link.numba.linker import NumbaLinker

ALL = [(make, check) for make in (NaiveLab, CompilerLab) for check in CHECKS]
ALL += [(make, check) for make in LABS[1:] for check in CHECKS if "streams" in check.__name__]


@pytest.mark.parametrize("make, check", ALL, ids=lambda one: one.__name__.replace("check_", "", 1))
def test_engine(make, check):
    check(make())


if NAME == "pytensor":

    @pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__.replace("check_", "", 1))
    def test_engine_with_numba(check):
        """Run the checks with functions of Numba, except those with collectives, which are C code."""
        with default_mode("NUMBA"):
            assert isinstance(get_default_mode().linker, NumbaLinker)
            lab = CompilerLab()
            lab.times_operations = False
            check(lab)


@pytest.mark.parametrize("make", [NaiveLab, CompilerLab], ids=lambda make: make.__name__)
def test_an_engine_on_numpy_refuses_other_devices(make):
    make().engine.setup("cpu")
    with pytest.raises(ValueError, match="'cpu', got 'cuda0'"):
        make().engine.setup("cuda0")
