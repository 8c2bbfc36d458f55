"""The context of a CUDA device, current in each thread that uses it.

libgpuarray makes its context current as a call begins, and takes that back as it ends. It counts, as
calls are nested. In 0.7.6 a call that finds a kernel in the cache does not count back: from then on
libgpuarray takes the context for current in every thread, while it is in that one alone, and calls in
any other end with "invalid device context". Functions are unpickled in a thread of their own, so
kernels are first needed in one thread, and used in another.

So the context is made current here, in each thread for as long as this lasts.
"""

import ctypes
import threading


class CudaContext:
    """The driver's context of one of pygpu's."""

    def __init__(self, context):
        self._driver = ctypes.CDLL("libcuda.so")  # by which name libgpuarray has loaded it
        self._handle = ctypes.c_void_p()
        self._threads = threading.local()
        with context:
            self._do("cuCtxGetCurrent", ctypes.byref(self._handle))

    def enter_thread(self):
        """Make it current in this thread, if that was not done."""
        if not hasattr(self._threads, "entered"):
            self._do("cuCtxSetCurrent", self._handle)
            self._threads.entered = True

    def _do(self, name, argument):
        status = getattr(self._driver, name)(argument)
        if status:
            raise RuntimeError(f"the CUDA driver's {name} failed with error {status}")
