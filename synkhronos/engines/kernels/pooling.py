"""Pooling over the last two axes, and its gradients, in place of Theano's.

Results have the same bits. Arguments with which Theano reads memory that is not an array's, or ends the
process, raise ValueError.
"""

from theano.tensor.signal.pool import AveragePoolGrad, MaxPoolGrad, Pool

from synkhronos.engines.kernels import sources
from synkhronos.engines.kernels.optimizations import replacing

_FILES = ("pooling", "pooling_arrays")
_MODES = {
    "max": "MAX",
    "sum": "SUM",
    "average_inc_pad": "AVERAGE_WITH_PADDING",
    "average_exc_pad": "AVERAGE_WITHOUT_PADDING",
}
_CODE = """
{{
    synkhronos_pooling::Pairs of;
    if (!synkhronos_pooling::read_pair<dtype_{ws}>({ws}, "ws", of.window)
        || !synkhronos_pooling::read_pair<dtype_{stride}>({stride}, "stride", of.stride)
        || !synkhronos_pooling::read_pair<dtype_{pad}>({pad}, "pad", of.pad)
        || !synkhronos_pooling::{call})
        {fail}
}}
"""


class _InCpp:
    """What the operations have in common: where their C++ code comes from."""

    def c_support_code(self):
        return sources.read(*_FILES)

    def c_compile_args(self):
        return sources.COMPILE_ARGS

    def c_code_cache_version(self):
        return sources.version(*_FILES)

    def _code(self, inputs, out, sub, function, *options):
        """Return the code that calls a function of the file ``pooling_arrays.h``."""
        *arrays, ws, stride, pad = inputs
        arguments = ", ".join([*arrays, "of", *options, f"&{out[0]}"])
        call = f"{function}<dtype_{arrays[0]}>({arguments})"
        return _CODE.format(ws=ws, stride=stride, pad=pad, call=call, fail=sub["fail"])

    @property
    def _mode(self):
        return f"synkhronos_pooling::{_MODES[self.mode]}"


class FastPool(_InCpp, Pool):
    """Pooling: the maximum, sum or average of each window."""

    def c_code(self, node, name, inp, out, sub):
        """Return the C++ code of one application."""
        return self._code(inp, out, sub, "pool", f"{sub['params']}->ignore_border", self._mode)


class FastMaxPoolGrad(_InCpp, MaxPoolGrad):
    """The gradient of pooling by maximum."""

    def c_code(self, node, name, inp, out, sub):
        """Return the C++ code of one application."""
        return self._code(inp, out, sub, "max_pool_gradient")


class FastAveragePoolGrad(_InCpp, AveragePoolGrad):
    """The gradient of pooling by sum or average."""

    def c_code(self, node, name, inp, out, sub):
        """Return the C++ code of one application."""
        return self._code(inp, out, sub, "average_pool_gradient", self._mode)


def _replacement_of(node):
    """Return the operation that replaces one of Theano's, or None."""
    op = node.op
    dtypes = {variable.dtype for variable in node.inputs[:-3]}
    if op.ndim != 2 or op.openmp or len(dtypes) != 1 or not dtypes <= {"float32", "float64"}:
        return None
    if isinstance(op, MaxPoolGrad):
        return FastMaxPoolGrad(op.ignore_border, openmp=False)
    if isinstance(op, AveragePoolGrad):
        return FastAveragePoolGrad(op.ignore_border, op.mode)
    return FastPool(op.ignore_border, op.mode, openmp=False)


OPTIMIZATIONS = [
    replacing("synkhronos_pool", 48.8, [Pool, MaxPoolGrad, AveragePoolGrad], _replacement_of)
]
