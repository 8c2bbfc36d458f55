"""Making the context of a CUDA device current in each thread that uses it.

libgpuarray makes its context current at the start of a call and restores the previous one at the end.
Because calls are nested, it counts them. In 0.7.6 a call that finds a kernel in the cache does not
decrement the count. From then on libgpuarray assumes that the context is current in every thread, but it
is current in that thread only, and calls in other threads fail with "invalid device context". Functions
are unpickled in a separate thread, so kernels are compiled in one thread and used in another.

This module therefore makes the context permanently current in each thread.
"""

import ctypes
import threading


class CudaContext:
    """The CUDA driver's handle of a pygpu context."""

    def __init__(self, context):
        self._driver = ctypes.CDLL("libcuda.so")  # libgpuarray has loaded it by this name
        self._handle = ctypes.c_void_p()
        self._threads = threading.local()
        with context:
            self._call("cuCtxGetCurrent", ctypes.byref(self._handle))

    def enter_thread(self):
        """Make the context current in this thread, unless it already is."""
        if not hasattr(self._threads, "entered"):
            self._call("cuCtxSetCurrent", self._handle)
            self._threads.entered = True

    def _call(self, name, argument):
        status = getattr(self._driver, name)(argument)
        if status:
            raise RuntimeError(f"the CUDA driver's {name} failed with error {status}")
