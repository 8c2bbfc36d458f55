"""The context of a CUDA device, made current in each thread that uses it.

libgpuarray makes its context current when a call begins, and restores the former one when it ends. As
calls are nested, it counts them. In 0.7.6 a call that finds a kernel in the cache does not decrement the
count: from then on libgpuarray assumes that the context is current in every thread, while it is so in
that one alone, and calls in any other fail with "invalid device context". Functions are unpickled in a
thread of their own, so kernels are compiled in one thread and used in another.

So the context is made current here, in each thread and for good.
"""

import ctypes
import threading


class CudaContext:
    """The CUDA driver's handle of a context of pygpu's."""

    def __init__(self, context):
        self._driver = ctypes.CDLL("libcuda.so")  # the name by which libgpuarray has loaded it
        self._handle = ctypes.c_void_p()
        self._threads = threading.local()
        with context:
            self._call("cuCtxGetCurrent", ctypes.byref(self._handle))

    def enter_thread(self):
        """Make the context current in this thread, unless that has been done."""
        if not hasattr(self._threads, "entered"):
            self._call("cuCtxSetCurrent", self._handle)
            self._threads.entered = True

    def _call(self, name, argument):
        status = getattr(self._driver, name)(argument)
        if status:
            raise RuntimeError(f"the CUDA driver's {name} failed with error {status}")
