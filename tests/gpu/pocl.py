"""Operations that Theano places on an OpenCL device but cannot compute there, each with the reason.

They were observed with PoCL 3.1, Theano 1.0.5, pygpu 0.7.6 and CLBlast 1.5. The tests leave out only
these operations, and ``test_pocl.py`` checks that each is still an error. Operations that the engine
fixes (``synkhronos/engines/theano/gpu_engine.py``) are not listed here.
"""

from collections import namedtuple

import theano
import theano.tensor as tt

Unsupported = namedtuple("Unsupported", "name dtype make message reason")

CUMULATE = "GpuCumOp", "Theano has this kernel for CUDA alone"
REDUCE = "float16 not supported", "Theano reduces by pygpu on OpenCL, whose reductions take no float16"
MULTIPLY = "float16 is not supported", "CLBlast needs cl_khr_fp16 for it, which PoCL has not on CPUs"

CONVERT = "initialize elemwise", "Theano puts the cast on the device, which has no complex numbers"

LOOP = "This is for CUDA arrays", "Theano's Python loop for scan reads CUDA's address of an array"


def add(row, total):
    return tt.tanh(row + tt.dot(total, total) * total)


UNSUPPORTED = [
    Unsupported("cast to complex", "float32", lambda x: tt.cast(x, "complex64"), *CONVERT),
    Unsupported("scan", "float32", lambda x: theano.scan(add, x, x[0])[0], *LOOP),
    Unsupported("cumsum", "float32", lambda x: tt.cumsum(x, axis=0), *CUMULATE),
    Unsupported("cumprod", "float32", lambda x: tt.cumprod(x, axis=0), *CUMULATE),
    Unsupported("sum of float16", "float16", lambda x: x.sum(axis=0), *REDUCE),
    Unsupported("mean of float16", "float16", lambda x: x.mean(axis=0), *REDUCE),
    Unsupported("prod of float16", "float16", lambda x: x.prod(axis=0), *REDUCE),
    Unsupported("matrix by matrix of float16", "float16", lambda x: tt.dot(x, x), *MULTIPLY),
    Unsupported("matrix by vector of float16", "float16", lambda x: tt.dot(x, x[0]), *MULTIPLY),
]
