"""Conformance checks of `checks.communicators` on a communicator for arrays on devices.

Call ``main(kind, *devices)``, where `kind` is "staged" or "nccl". NCCL needs CUDA devices, either real
ones or emulated by `emulator`.
"""

import traceback

import numpy as np
import pygpu
from checks.communicators import CHECKS, collective
from pygpu.gpuarray import GpuArray
from checks.ranks import Ranks

from synkhronos.world.devices import _separate_pocl_cache
from synkhronos.comms import nccl
from synkhronos.comms.staged import StagedCommunicator
from synkhronos.engines.theano.gpu_engine import TheanoGpuEngine
from synkhronos.transports.local import LocalTransport

MOST_ITEMS = 15_000  # per call, so that the largest arrays of the checks need several calls


class OnDevice:
    """A communicator for arrays on a device, which takes and returns NumPy arrays for the checks."""

    def __init__(self, transport):
        self.transport, self.size = transport, transport.size
        self._over_cpu = transport.communicator()

    @property
    def rank(self):
        return self.transport.rank

    @property
    def group(self):
        return self.transport

    def begin(self, kind, devices):
        if self.rank != self.transport.master_rank:
            _separate_pocl_cache(self.rank)
        self.engine = TheanoGpuEngine()
        self.engine.setup(devices[self.rank], announce=False)
        self.staged = StagedCommunicator(
            self._over_cpu, self.transport.store, self.engine.read, self.engine.to_device,
            self.engine.overwrite,
        )  # fmt: skip
        self.comm = self.staged
        if kind == "nccl":
            self.comm = nccl.join(self.staged, self.engine.context, self.engine.arithmetic)

    def __getattr__(self, name):
        def call(arrays, *args, **kwargs):
            results = getattr(self.comm, name)([self._up(one) for one in arrays], *args, **kwargs)
            return None if results is None else [self._down(one) for one in results]

        return call

    def _up(self, array):
        """Copy an array to the device, keeping its layout.

        An array of a complex dtype, which devices do not support, is returned unchanged.
        """
        put = self.engine.to_device
        if array.dtype.kind == "c":
            return array
        if array.ndim == 2 and array.strides[0] < 0:
            return put(np.repeat(array[::-1], 2, axis=1))[::-1, ::2]
        if array.ndim == 2 and array.flags.f_contiguous:
            return put(np.ascontiguousarray(array.T)).transpose()
        return put(np.ascontiguousarray(array).reshape(array.shape))

    def _down(self, result):
        if isinstance(result, list):
            return [self._down(one) for one in result]
        return np.asarray(result) if isinstance(result, GpuArray) else result


def begin(comm, kind, devices):
    comm.begin(kind, devices)


def join_where_one_cannot(comm, failing):
    class Clique:
        def __init__(self, context, comm_id=None):
            self.comm_id = bytearray(b"the name of a clique")
            assert comm_id in (None, self.comm_id)

    def make(clique, size, rank):
        if rank == failing:
            raise pygpu.gpuarray.GpuArrayException("no such NCCL")
        return object()

    before = nccl.GpuCommCliqueId, nccl.GpuComm
    nccl.GpuCommCliqueId, nccl.GpuComm = Clique, make
    try:
        nccl.join(comm.staged, comm.engine.context, comm.engine.arithmetic)
    except nccl.CannotJoinError as error:
        return str(error)
    finally:
        nccl.GpuCommCliqueId, nccl.GpuComm = before


def check_join(ranks):
    """Check that all ranks raise the same error if one cannot join, and that a later try succeeds."""
    for failing in range(ranks.size):
        outcomes = ranks.run(join_where_one_cannot, failing)
        assert [one.error for one in outcomes] == [None] * ranks.size, outcomes
        assert {one.value for one in outcomes} == {f"rank {failing}: no such NCCL"}
    assert [one.value for one in ranks.run(join_where_one_cannot, None)] == [None] * ranks.size


def check_unequal_dtypes(ranks):
    """Check that unequal dtypes are an error on every rank, each time.

    NCCL itself would misinterpret the bytes of one dtype as the other.
    """
    arrays = [np.ones(3, "float32" if rank else "int32") for rank in range(ranks.size)]
    for _ in range(2 if ranks.size > 1 else 0):
        outcomes = ranks.run(collective, "broadcast", arrays, 0)
        assert [one.error for one in outcomes] == [ValueError] * ranks.size, outcomes


def main(kind, *devices):
    nccl._MOST_ITEMS = MOST_ITEMS
    size = len(devices)
    # The timeout is long because kernels are compiled.
    transport = LocalTransport(size, size - 1, timeout=300, may_poll=False)
    ranks = Ranks(transport, OnDevice)
    try:
        for rank, outcome in enumerate(ranks.run(begin, kind, devices)):
            assert outcome.error is None, (rank, outcome)
        checks = [*CHECKS, check_join]
        if kind != "staged":
            checks.append(check_unequal_dtypes)
        for check in checks:
            try:
                check(ranks)
            except Exception:
                print("failed", check.__name__, flush=True)
                traceback.print_exc()
            else:
                print("passed", check.__name__, flush=True)
    finally:
        ranks.close()
